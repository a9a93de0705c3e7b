"""The figures of scripts/house.py, over a small made-up tree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import house
from house import SourceTree

FILES = {
    "src/feedline/__init__.py": '"""The face."""\n\nfrom feedline.loader.loop import Loop\n',
    "src/feedline/errors.py": '"""Errors."""\n\n\nclass Broken(Exception):\n    pass\n',
    "src/feedline/core/__init__.py": "",
    "src/feedline/core/tree.py": "import json\nfrom feedline.errors import Broken\n\nclass Tree:\n    pass\n",
    "src/feedline/loader/__init__.py": "",
    "src/feedline/loader/loop.py": (
        "from feedline.core.tree import Tree\n"
        "\n"
        "\n"
        "class Loop:\n"
        '    """The loop."""\n'
        "\n"
        "    # One reason.\n"
        "    def run(self) -> int:  # and a remark\n"
        '        """\n'
        "        Run it.\n"
        '        """\n'
        "        return 1\n"
    ),
    "tests/test_loop.py": "def test_one():\n    pass\n\n\ndef helper():\n    pass\n",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


def write(root: Path, name: str, text: str) -> SourceTree:
    path = root / "src/feedline" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return SourceTree(root / "src/feedline")


def test_a_clean_tree_passes(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert house.main(["--root", str(root), "--check", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["files"], figures["lines"], figures["code_lines"]) == (6, 25, 11)
    assert (figures["rooms"], figures["floors"], figures["room_arrows"]) == (4, 4, 3)
    assert figures["function_lines"] == {"functions": 1, "median": 5, "p95": 5, "max": 5}
    assert figures["import_share"] == 4 / 25
    assert figures["comment_lines_per_100"] == 4
    assert figures["delicate_comment_lines_per_100"] == 0
    assert figures["test_functions"] == 1
    assert not any(figures[name] for name in (*house.BROKEN, "not_placed", "banned_words"))


def test_arrows_up_and_sideways_are_found_once(root: Path) -> None:
    tree = write(root, "core/late.py", "def f():\n    from feedline.loader.loop import Loop, other\n")
    assert house.arrows_up(tree) == ["core.late:2 imports loader.loop"]
    tree = write(root, "stores/base.py", "import feedline.samplers\n")
    assert len(house.arrows_up(write(root, "samplers/__init__.py", ""))) == 2


def test_the_face_is_imported_by_no_room_below_it(root: Path) -> None:
    tree = write(root, "core/rng.py", "import feedline\nfrom feedline import errors, DataLoader\n")
    assert house.arrows_up(tree) == ["core.rng:1 imports face", "core.rng:2 imports face"]


def test_names_given_to_import_module_are_imports(root: Path) -> None:
    text = 'import importlib\n\nloop = importlib.import_module("feedline.loader.loop")\n'
    assert house.arrows_up(write(root, "core/late.py", text)) == ["core.late:3 imports loader.loop"]


def test_modules_loaded_by_their_name_are_arrows_but_make_no_cycle(root: Path) -> None:
    text = 'LOOP = "feedline.loader.loop:Loop"\nOURS = "feedline.loader."\nSPAN = "feedline.copy"\nX = "feedline is"\n'
    tree = write(root, "core/tree.py", text)
    assert house.arrows_up(tree) == ["core.tree:1 imports loader.loop", "core.tree:2 imports loader"]
    assert not house.cycles(tree)


def test_rooms_without_a_floor_are_listed_and_not_judged(root: Path) -> None:
    tree = write(root, "attic.py", "import feedline.loader.loop\n")
    assert house.not_placed(tree) == ["attic"]
    assert not house.arrows_up(tree)
    assert ("attic", "loader") in house.room_arrows(tree)


def test_cycles_are_found_whole(root: Path) -> None:
    write(root, "core/a.py", "import feedline.core.b\n")
    write(root, "core/b.py", "import feedline.core.c\n")
    tree = write(root, "core/c.py", "import feedline.core.tree\nfrom feedline.core import a\n")
    assert house.cycles(tree) == [["core.a", "core.b", "core.c"]]


def test_class_names_defined_twice_are_found(root: Path) -> None:
    tree = write(root, "core/other.py", "class Tree:\n    pass\n")
    assert house.names_twice(tree) == {"Tree": ["core/other.py:1", "core/tree.py:4"]}


def test_type_aliases_count_as_names(root: Path) -> None:
    tree = write(root, "core/other.py", "T = TypeVar('T')\nTree = dict[str, int]\nLIMIT = 3\nRows = int | list[int]\n")
    tree = write(root, "core/more.py", "T = TypeVar('T')\nLIMIT = 3\n_Rows = tuple[int, ...]\n")
    assert house.names_twice(tree) == {
        "Rows": ["core/more.py:3", "core/other.py:4"],
        "Tree": ["core/other.py:2", "core/tree.py:4"],
    }


def test_short_files_with_one_importer_are_found(root: Path) -> None:
    write(root, "core/long.py", "X = 1\n" * house.FEWEST_LINES)
    write(root, "core/public.py", "import feedline.errors\n")
    write(root, "core/__init__.py", "import feedline.core.public\n")
    tree = write(root, "loader/loop.py", "import feedline.core.long\nimport feedline.core.tree\n")
    assert house.private_files(tree) == ["core/tree.py (5): loader.loop"]


@pytest.mark.parametrize("word", house.CLAUSES)
def test_first_lines_that_are_clauses_are_found(root: Path, word: str) -> None:
    tree = write(
        root, "core/prose.py", f'"""Good.\n\n{word} follows is free."""\n\ndef f():\n    """{word} it is."""\n'
    )
    assert [str(remark) for remark in house.first_lines(tree)] == [f"core/prose.py:6: {word} it is."]


def test_docstrings_of_attributes_that_are_clauses_are_found(root: Path) -> None:
    text = '"""Good."""\n\nX = 1\n"""What it is."""\n\nclass A:\n    y: int\n    """How it is."""\n    "Where."\n'
    assert [remark.line for remark in house.first_lines(write(root, "core/prose.py", text))] == [4, 8]


def test_first_lines_that_are_too_long_are_found(root: Path) -> None:
    tree = write(root, "core/prose.py", f'"""{"word " * 12}"""\n\ndef f():\n    """{"word " * 13}"""\n')
    assert [remark.line for remark in house.first_lines(tree)] == [4]


def test_banned_words_are_found_in_docstrings_comments_and_messages(root: Path) -> None:
    text = (
        '"""Good.\n\nNobody said lesson."""\n'
        "# anew, and again\n"
        'raise ValueError(f"{beside} is told to {told}")\n'
        'KEYS = {"told": 1}\n'
    )
    found = [(remark.line, remark.text) for remark in house.banned_words(write(root, "core/prose.py", text))]
    assert sorted(found) == [(3, "nobody"), (4, "anew"), (5, "told")]


def test_banned_words_are_found_in_names_and_texts(root: Path) -> None:
    (root / "tests").mkdir(exist_ok=True)
    (root / "tests" / "test_tree.py").write_text("def test_it_is_told_so() -> None:\n    toldo = 1\n")
    (root / "README.md").write_text("Its colour.\n\nA color beside it.\n")
    assert [str(remark) for remark in house.banned_in_text(root)] == [
        "README.md:1: colour",
        "README.md:3: beside",
        "tests/test_tree.py:1: told",
    ]


def test_texts_and_tests_have_no_banned_words() -> None:
    """`test_layers.py` checks the package, which it has read."""
    assert not house.banned_in_text(Path(house.__file__).parents[1])


def test_a_check_that_fails_names_the_places(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(root, "core/other.py", '"""What it is."""\nimport feedline.loader.loop\n\nclass Tree:\n    pass\n')
    write(root, "core/one.py", "import feedline.core.two\n")
    write(root, "core/two.py", "import feedline.core.one\n")
    assert house.main(["--root", str(root)]) == 0
    assert "arrows up              1\n" in capsys.readouterr().out
    assert house.main(["--root", str(root), "--check"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "arrows_up: core.other:2 imports loader.loop",
        "cycles: core.one -> core.two",
        "names_twice: Tree: core/other.py:4, core/tree.py:4",
        "first_lines: core/other.py:1: What it is.",
    ]


@pytest.mark.nightly
def test_cases_are_collected_by_pytest(root: Path) -> None:
    (root / "pyproject.toml").write_text('[tool.pytest.ini_options]\ntestpaths = ["tests"]\n')
    (root / "tests/test_loop.py").write_text(
        "import pytest\n\n@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_one(n):\n    pass\n"
    )
    assert house.count_test_cases(root) == 3
    (root / "tests/test_broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(SystemExit, match="could not collect"):
        house.count_test_cases(root)


def test_a_root_without_the_package_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        house.main(["--root", str(tmp_path)])
    assert "pass the checkout as --root" in " ".join(capsys.readouterr().err.split())


def test_an_extension_imports_public_rooms_only(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = root / "examples/extending"
    folder.mkdir(parents=True)
    (folder / "a.py").write_text("import json\nimport feedline as fl\nfrom feedline.stores import join\n")
    assert house.main(["--root", str(root), "--check"]) == 0
    assert "1 in one file each, 0 inner imports" in capsys.readouterr().out
    (folder / "b.py").write_text("from feedline.stores.urls import join\n")
    assert house.main(["--root", str(root), "--check"]) == 1
    assert "inner_imports: b.py imports feedline.stores.urls" in capsys.readouterr().err
