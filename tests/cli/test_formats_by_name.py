"""The command line reads the table of formats, and knows none by name, class, suffix or module."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import feedline
from feedline.datasets.formats import FORMATS
from feedline.stores.globs import braces

CLI = Path(feedline.__file__).parent / "cli"

PACK = "`feedline pack` writes tar shards of WebDataset from folders of files, and nothing else"
WORD = "an English word here, not the format"
DRAWN = "the image that `feedline inspect` draws"
LOGS = "a log that feedline itself has written"
OTHERS = "a name in the code that is linted, of another library"

ALLOWED: dict[str, dict[str, str]] = {
    "attempt.py": {"'lines'": WORD},
    "audit.py": {".jsonl": LOGS},
    "doctor/data.py": {"'files'": WORD},
    "inspect/command.py": {"Files": WORD, ".png": DRAWN},
    "inspect/contact_sheet.py": {".jpg": DRAWN, ".png": DRAWN},
    "lint/command.py": {"'files'": WORD},
    "lint/rules.py": {"HDF5": OTHERS, "LMDB": OTHERS},
    "pack/encode.py": {"'npy'": PACK, "feedline.datasets.webdataset": PACK},
    "pack/run.py": {
        ".tar": PACK,
        "feedline.datasets.imagefolder.listing": PACK,
        "feedline.datasets.webdataset": PACK,
        "feedline.datasets.webdataset.build_index": PACK,
        "feedline.datasets.webdataset.listing": PACK,
        "feedline.datasets.webdataset.targets": PACK,
    },
    "report.py": {".jsonl": LOGS},
}
"""Allowed finds by file or folder of the room, and the reason why each is not knowledge of a format."""


def format_words() -> dict[str, re.Pattern[str]]:
    """Names, classes and suffixes of all formats, each with a pattern of literals that have it."""
    words = {repr(name): re.compile(rf"{name}\Z") for name in FORMATS}
    for row in FORMATS.values():
        for reference in row.datasets:
            name = reference.partition(":")[2]
            words[name] = re.compile(rf"(?s:.*)\b{name}\b")
        for pattern in (form for name in row.all_names for form in braces(name)):
            suffix = pattern.lstrip("*").rstrip("*")
            words[suffix] = re.compile(rf"(?s:.*){re.escape(suffix)}(?![\w])")
        for marker in row.markers:
            words[marker] = re.compile(rf"(?s:.*){re.escape(marker)}(?![\w])")
    return words


FAMILIES = {reference.partition(":")[0] for row in FORMATS.values() for reference in row.datasets}
FAMILIES |= {module.rpartition(".")[0] for module in FAMILIES if module.count(".") > 2}


def knowledge(source: str) -> Iterator[str]:
    """Names and suffixes of formats in a module."""
    tree = ast.parse(source)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    words = format_words()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [name.name for name in node.names]
            yield from (module for module in modules if any(f"{module}.".startswith(f"{each}.") for each in FAMILIES))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield from (word for word, pattern in words.items() if pattern.match(node.value))
        elif isinstance(node, (ast.Name, ast.Attribute)):
            name = node.id if isinstance(node, ast.Name) else node.attr
            yield from (word for word in words if word == name)


def allowed(file: str) -> set[str]:
    return {word for place, words in ALLOWED.items() if file.startswith(place) for word in words}


FILES = sorted(path.relative_to(CLI).as_posix() for path in CLI.rglob("*.py"))


def test_a_module_of_the_command_line_knows_no_format() -> None:
    known = {file: sorted({*knowledge((CLI / file).read_text())} - allowed(file)) for file in FILES}
    assert {file: words for file, words in known.items() if words} == {}


def test_every_exception_is_needed() -> None:
    found = {place: set[str]() for place in ALLOWED}
    for file in FILES:
        for place in (place for place in ALLOWED if file.startswith(place)):
            found[place] |= {*knowledge((CLI / file).read_text())}
    assert {place: sorted(set(words) - found[place]) for place, words in ALLOWED.items()} == {
        place: [] for place in ALLOWED
    }


def test_knowledge_is_found() -> None:
    source = '''
"""Of .tar files."""
import feedline.datasets.tables.parquet
from feedline.datasets.webdataset import is_image
from feedline.datasets.formats import FORMATS
if path.endswith(".zarr") or name == "tar" or kind is TarShards or marker == "index.json": pass
print("files of .tartan and a tar", "see TFRecord(paths)")
'''
    assert sorted(knowledge(source)) == sorted(
        [
            "feedline.datasets.tables.parquet",
            "feedline.datasets.webdataset",
            ".zarr",
            "'tar'",
            "TarShards",
            "index.json",
            "TFRecord",
        ]
    )
