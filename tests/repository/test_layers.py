"""The rooms of the package and their floors: imports go down, and the design page names the rooms that exist."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from preloaded import IMPORTS_FEEDLINE, Preloaded

import house

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / house.PACKAGE


class LateImport(NamedTuple):
    module: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.module}:{self.line} imports {self.imported} inside a function"


def late_imports(tree: house.SourceTree) -> list[str]:
    """Imports inside functions of the standard library and of the package itself, which are always available."""
    always = sys.stdlib_module_names | {house.PACKAGE}
    return [
        str(LateImport(file.module, name, line))
        for file in tree.files
        for name, line in _names_in_functions(file)
        if name.split(".", maxsplit=1)[0] in always
    ]


def _names_in_functions(file: house.SourceFile) -> Iterator[tuple[str, int]]:
    """Import statements only: a module that is loaded by its name is slow to import, and says so where it is loaded."""
    for function in file.functions:
        for node in ast.walk(function):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                yield from house.imported_names([node])


@pytest.fixture(scope="module")
def tree() -> house.SourceTree:
    return house.SourceTree(SOURCE)


def test_every_room_has_a_floor(tree: house.SourceTree) -> None:
    assert not house.not_placed(tree)


def test_imports_go_downwards(tree: house.SourceTree) -> None:
    assert not house.arrows_up(tree)


def test_imports_inside_functions_only_load_what_may_be_missing_or_slow(tree: house.SourceTree) -> None:
    assert not late_imports(tree)


def test_the_package_has_no_banned_words(tree: house.SourceTree) -> None:
    assert not house.banned_words(tree)


def test_there_is_no_import_cycle(tree: house.SourceTree) -> None:
    assert not house.cycles(tree)


FORMATS_AT_THE_TOP = {"datasets.tokens"}
"""Formats of one file, which need no folder."""


def test_the_framework_of_datasets_imports_no_format(tree: house.SourceTree) -> None:
    families = {module for module in tree.modules if module.count(".") == 2 and module.startswith("datasets.")}
    framework = {module for module in tree.modules if module.count(".") == 1 and module.startswith("datasets.")}
    framework -= FORMATS_AT_THE_TOP | {module.rpartition(".")[0] for module in families}
    found = [str(arrow) for arrow in tree.arrows if arrow.importer in framework and arrow.imported in families]
    # The shards of a dataset are fingerprinted without their contents.
    assert [text for text in found if not text.endswith("imports datasets.shards.files")] == []


def test_the_guide_to_the_code_lists_the_floors() -> None:
    rows = re.findall(r"^\| (`.*?) \|", (ROOT / "CONTRIBUTING.md").read_text().partition("## Tests")[0], re.MULTILINE)
    floors = [tuple(re.findall(r"\w+", row)) for row in rows if re.fullmatch(r"(`\w+`(, )?)+", row)]
    floors = floors[: len(house.FLOORS)]
    names = {house.FACE: house.PACKAGE}
    assert floors[::-1] == [tuple(names.get(room, room) for room in rooms) for rooms in house.FLOORS]


def test_the_name_of_a_class_or_type_exists_once(tree: house.SourceTree) -> None:
    assert not house.names_twice(tree)


def layout_section() -> str:
    section = re.search(r"^## 5\. Layout$(.*?)^## ", (ROOT / "docs/design.md").read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None
    return section[1]


def test_the_design_page_lists_the_rooms(tree: house.SourceTree) -> None:
    listed = re.findall(r"^  ([a-z_]+)(?:/|\.py)\s", layout_section(), re.MULTILINE)
    assert sorted(listed) == sorted({"__init__", *tree.rooms} - {house.FACE, "_native"})


def test_the_design_page_names_the_folders_of_rooms(tree: house.SourceTree) -> None:
    paragraphs = re.split(r"^  (?=[a-z_]+(?:/|\.py)\s)", layout_section().partition("```\n\n")[0], flags=re.MULTILINE)
    described = {text.partition("/")[0]: set(re.findall(r"\w+", text)) for text in paragraphs}
    folders = sorted(file.path.parent for file in tree.files if file.path.name == "__init__.py")
    inner = [folder.parts for folder in folders if len(folder.parts) == 2]
    assert len(inner) > 20
    assert [f"{room}/{name}" for room, name in inner if name not in described[room]] == []


def test_the_design_page_lists_the_arrows(tree: house.SourceTree) -> None:
    lines = re.findall(r"^([a-z_]+) +→ (.*)$", layout_section(), re.MULTILINE)
    listed = [(importer, imported) for importer, names in lines for imported in names.split(", ")]
    everywhere = {"core", "errors", "_native"}
    drawn = [arrow for arrow in house.room_arrows(tree) if arrow[0] != house.FACE and arrow[1] not in everywhere]
    assert sorted(listed) == drawn


def test_the_guide_to_extensions_names_files_that_exist() -> None:
    section = re.search(
        r"^## Extending feedline$(.*?)^## ", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE | re.DOTALL
    )
    assert section is not None
    named = re.findall(r"`((?:datasets|workers|stores|samplers|transforms|images)/[\w/]*(?:\.py)?)`", section[1])
    assert len(named) > 15
    assert [name for name in named if not (SOURCE / name).exists()] == []


def test_late_imports_are_found(tmp_path: Path) -> None:
    (tmp_path / "rng.py").write_text("def f():\n    import torch\n    import json\n    from feedline.errors import E\n")
    assert late_imports(house.SourceTree(tmp_path)) == [
        "rng:3 imports json inside a function",
        "rng:4 imports feedline.errors.E inside a function",
    ]


def test_a_loader_does_without_the_datasets(preloaded: Preloaded, tmp_path: Path) -> None:
    """Every start pays for imports, also that of a worker process; the public names are available without them."""
    program = IMPORTS_FEEDLINE + (
        "import sys, feedline as fl; heavy = ('datasets', 'images', 'stores', 'testing', 'transforms')\n"
        "print([name for name in heavy if f'feedline.{name}' in sys.modules])\n"
        "print([name for name in fl.__all__ if not hasattr(fl, name)])"
    )
    assert preloaded.run_code(program, tmp_path) == (0, "[]\n[]\n")


def test_the_test_files_that_run_first_exist() -> None:
    tests = ROOT / "tests"
    named = re.findall(r'"(test_\w+)"', (tests / "conftest.py").read_text(encoding="utf-8"))
    assert named
    assert set(named) <= {path.stem for path in tests.rglob("test_*.py")}
