"""The table of floors, and the rule that imports only go downwards."""

from __future__ import annotations

import ast
import graphlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = "feedline"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

FLOORS: tuple[tuple[str, set[str]], ...] = (
    ("0 ground", {"_native", "errors", "per_process"}),
    (
        "0 values",
        {
            "_kernels",
            "cancelling",
            "cpus",
            "cursor",
            "datapipes",
            "extras",
            "hugging_face",
            "listings",
            "ranks",
            "rows",
            "sizes",
            "store_counts",
            "telemetry",
            "tree",
            "told_length",
            "twins",
            "user_cache",
        },
    ),
    ("0 keys", {"rng"}),
    ("1 parts", {"collate", "device", "diagnose", "images", "samplers", "stores", "transport"}),
    ("1 parts, upper", {"shards", "transforms"}),
    ("2 data", {"gather", "schedule", "wants"}),
    ("2 data, upper", {"datasets", "packing"}),
    ("3 builder", {"builder"}),
    ("3 plan, values", {"lanes", "quarantine"}),
    ("3 plan, state", {"state"}),
    ("3 plan", {"plan"}),
    ("4 workers", {"workers"}),
    ("5 engine", {"ahead", "engine"}),
    ("6 workforce", {"workforce"}),
    ("6 loader", {"dataloader"}),
    ("6 checks", {"testing"}),
    ("6 public names", {""}),
    ("7 command line", {"cli"}),
)
"""From the ground up. A name stands for a module or for a package with all that is in it; "" is `__init__.py`."""

LEVELS = {name: level for level, (_, names) in enumerate(FLOORS) for name in names}


class Import(NamedTuple):
    importer: str
    imported: str
    line: int
    inside_function: bool

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


class Tree:
    """The modules below a folder, named relative to it ("" is its `__init__.py`), and what they import."""

    def __init__(self, root: Path) -> None:
        self.files = {_module_name(path.relative_to(root)): path for path in sorted(root.rglob("*.py"))}
        stubs = {_module_name(path.relative_to(root).with_suffix(".py")) for path in root.rglob("*.pyi")}
        self.names = set(self.files) | stubs
        self.imports = [found for name, path in self.files.items() for found in self._imports_of(name, path)]

    def internal(self) -> list[Import]:
        """The imports of one module of the package by another, without the package's prefix."""
        own = [i for i in self.imports if i.imported == PACKAGE or i.imported.startswith(f"{PACKAGE}.")]
        return [i._replace(imported=self._nearest(i.imported.removeprefix(PACKAGE).lstrip("."))) for i in own]

    def _nearest(self, dotted: str) -> str:
        while dotted not in self.names:  # `from feedline.rng import derive`: the name of a value, not of a module
            dotted = dotted.rpartition(".")[0]
        return dotted

    def _imports_of(self, name: str, path: Path) -> Iterator[Import]:
        tree = ast.parse(path.read_text(), str(path))
        inside = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for node in ast.walk(function)
        }
        for node in ast.walk(tree):
            for imported in _imported_names(node):
                yield Import(name, imported, getattr(node, "lineno", 0), id(node) in inside)


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported_names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _unit(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def upward(tree: Tree) -> list[str]:
    """The imports that stay on their floor or climb, but for those within one package."""
    return [
        f"{found}, which is not on a lower floor"
        for found in tree.internal()
        if _unit(found.importer) != _unit(found.imported)
        and LEVELS[_unit(found.importer)] <= LEVELS[_unit(found.imported)]
    ]


def late(tree: Tree) -> list[str]:
    """The imports inside functions of what is always there."""
    always = sys.stdlib_module_names | {PACKAGE}
    return [
        f"{found} inside a function"
        for found in tree.imports
        if found.inside_function and _unit(found.imported) in always
    ]


def cycle(tree: Tree) -> list[str]:
    """The modules of one import cycle, or nothing. Importing a name from a package is importing its `__init__.py`."""
    graph: dict[str, set[str]] = {name: set() for name in tree.names}
    for found in tree.internal():
        if found.imported != found.importer:
            graph[found.importer].add(found.imported)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.fixture(scope="module")
def tree() -> Tree:
    return Tree(SOURCE)


def test_every_module_has_a_floor(tree: Tree) -> None:
    assert {_unit(name) for name in tree.names} <= set(LEVELS)


def test_imports_go_downwards(tree: Tree) -> None:
    assert not upward(tree)


def test_imports_inside_functions_only_load_what_may_be_missing_or_slow(tree: Tree) -> None:
    assert not late(tree)


def test_there_is_no_import_cycle(tree: Tree) -> None:
    assert not cycle(tree)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    (tmp_path / "workers").mkdir()
    for name in ("__init__", "errors", "rng", "engine", "workers/__init__", "workers/base", "workers/threads"):
        (tmp_path / f"{name}.py").write_text("")
    return tmp_path


def test_climbing_and_sideways_imports_are_found(made: Path) -> None:
    (made / "rng.py").write_text("from feedline import errors\nfrom feedline.workers.base import Pool\n")
    (made / "workers/threads.py").write_text("import feedline.workers.base\nfrom feedline.engine import run\n")
    assert upward(Tree(made)) == [
        "rng:2 imports workers.base, which is not on a lower floor",
        "workers.threads:2 imports engine, which is not on a lower floor",
    ]


def test_late_imports_are_found(made: Path) -> None:
    (made / "rng.py").write_text("def f():\n    import torch\n    import json\n    from feedline.errors import E\n")
    assert late(Tree(made)) == [
        "rng:3 imports json inside a function",
        "rng:4 imports feedline.errors.E inside a function",
    ]


def test_cycles_are_found(made: Path) -> None:
    (made / "workers/threads.py").write_text("from feedline.workers.base import Pool\n")
    assert not cycle(Tree(made))
    (made / "workers/base.py").write_text("from feedline.workers import threads\n")
    assert set(cycle(Tree(made))) == {"workers.base", "workers.threads"}


def test_a_loader_does_without_the_datasets() -> None:
    """Every start pays for what is imported, of worker processes too; the public names are there all the same."""
    program = (
        "import sys, feedline as fl; heavy = ('datasets', 'images', 'stores', 'testing', 'transforms')\n"
        "print([name for name in heavy if f'feedline.{name}' in sys.modules])\n"
        "print([name for name in fl.__all__ if not hasattr(fl, name)])"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert told == "[]\n[]\n"
