#!/usr/bin/env python3
"""Measure the layout, size and prose of the source tree, and check the rules that are countable.

Only reads the files; nothing is imported, except with --collect, which asks pytest for the number of test cases.

Exit code of --check: 1 when imports go up, files import each other in a cycle, a class or type is defined twice, the
first line of a docstring breaks the rules, or an example of an extension imports more than public rooms.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import statistics
import subprocess
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

PACKAGE = "feedline"
FACE = "face"
"""The package's own `__init__.py`."""

FLOORS: tuple[tuple[str, ...], ...] = (
    ("_native",),
    ("errors",),
    ("core",),
    ("samplers", "collate", "stores", "images"),
    ("transforms",),
    ("datasets", "workers"),
    ("streams",),
    ("loader",),
    ("testing",),
    (FACE,),
    ("cli",),
    ("__main__",),
)
"""The rooms of each floor, from the ground up. A room is a package or module at the top level."""

BANNED = (
    *("told", "anew", "afresh", "beside", "nobody", "whoever", "somebody", "anybody", "lest", "picture", "pictures"),
    *("artefact", "behaviour", "behaviours", "centre", "colour", "colours", "grey", "favour", "neighbour"),
    *(
        "labelled",
        "modelled",
        "recognised",
        "initialised",
        "normalised",
        "optimised",
        "summarised",
        "analyse",
        "towards",
    ),
)
"""Words without technical meaning, words that have a preferred synonym here, and British spellings."""

CLAUSES = ("What", "Whether", "Where", "Of", "That", "How")
"""First words of a docstring that make its first line a relative clause."""

MOST_WORDS = 12
"""Longest first line of a docstring."""

FEWEST_LINES = 120
"""A shorter file with a single importer may be a part of that file."""

DELICATE = "workers", "stores.cache"
"""Packages of forks, shared memory, locks and files that several processes write."""

Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Arrow(NamedTuple):
    """An import of one module of the package by another; "" is the package's `__init__.py`."""

    importer: str
    imported: str
    line: int

    def __str__(self) -> str:
        return f"{self.importer or FACE}:{self.line} imports {self.imported or FACE}"


class Remark(NamedTuple):
    """A line of prose that breaks a rule."""

    file: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.text}"


@dataclass
class SourceFile:
    """One parsed file. `path` is relative to the package, `module` too, without the package's name."""

    path: Path
    text: str
    tree: ast.Module = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text, str(self.path))

    @property
    def module(self) -> str:
        """Dotted name below the package; "" for its `__init__.py`."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """Top-level package or module."""
        return self.module.split(".", maxsplit=1)[0] or FACE

    @property
    def lines(self) -> int:
        """Number of lines."""
        return len(self.text.splitlines())

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the syntax tree."""
        return list(ast.walk(self.tree))

    @cached_property
    def functions(self) -> list[Function]:
        """All functions, nested ones included."""
        return [node for node in self.nodes if isinstance(node, Function)]

    @cached_property
    def docstrings(self) -> list[tuple[int, str]]:
        """Line and cleaned text of every docstring."""
        documented = [node for node in self.nodes if isinstance(node, _DOCUMENTED)]
        return [(node.body[0].lineno, text) for node in documented if (text := ast.get_docstring(node))]

    @cached_property
    def attribute_docstrings(self) -> list[tuple[int, str]]:
        """Line and text of every string after an assignment, in a module or class."""
        pairs = (
            pair for node in self.nodes if isinstance(node, (ast.Module, ast.ClassDef)) for pair in pairwise(node.body)
        )
        return [
            (after.lineno, after.value.value)
            for before, after in pairs
            if isinstance(before, (ast.Assign, ast.AnnAssign)) and _is_bare_string(after)
        ]

    @cached_property
    def comments(self) -> list[tuple[int, str]]:
        """Line and text of every comment, those after code included."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        return [(token.start[0], token.string) for token in tokens if token.type == tokenize.COMMENT]

    @property
    def comment_lines(self) -> int:
        """Lines that hold a comment and nothing else."""
        return sum(line.lstrip().startswith("#") for line in self._lines_at(line for line, _ in self.comments))

    @property
    def import_lines(self) -> int:
        """Lines of import statements."""
        imports = (node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom)))
        return len({line for node in imports for line in _lines_of(node)})

    @property
    def code_lines(self) -> int:
        """Lines with code: no blank lines, comments or docstrings, those of attributes included."""
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
        skipped.add(tokenize.ENDMARKER)
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        code = {
            line for token in tokens if token.type not in skipped for line in range(token.start[0], token.end[0] + 1)
        }
        return len(code - {line for node in self._bare_strings() for line in _lines_of(node)})

    @property
    def phrases(self) -> list[tuple[int, str]]:
        """Line and text of every string literal with a space in it: docstrings, messages, parts of f-strings."""
        literals = (node for node in self.nodes if isinstance(node, ast.Constant))
        return [(node.lineno, node.value) for node in literals if isinstance(node.value, str) and " " in node.value]

    def _bare_strings(self) -> list[ast.Expr]:
        return [node for node in self.nodes if _is_bare_string(node)]

    def _lines_at(self, numbers: Iterator[int]) -> list[str]:
        lines = self.text.splitlines()
        return [lines[number - 1] for number in numbers]


def _is_bare_string(node: ast.AST) -> TypeGuard[Any]:
    """True for a string that is a statement, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


class SourceTree:
    """The Python files of a package, and the imports between them."""

    def __init__(self, root: Path) -> None:
        paths = sorted(root.rglob("*.py"))
        self.files = [SourceFile(path.relative_to(root), path.read_text(encoding="utf-8")) for path in paths]
        stubs = {SourceFile(path.relative_to(root), "").module for path in root.rglob("*.pyi")}
        self.modules = {file.module for file in self.files} | stubs

    @cached_property
    def arrows(self) -> list[Arrow]:
        """Every import between two files of the package, late ones and those for type checkers included."""
        return [
            Arrow(file.module, imported, line)
            for file in self.files
            for name, line in imported_names(file.nodes)
            if (imported := self._module(name)) is not None and imported != file.module
        ]

    @cached_property
    def references(self) -> list[Arrow]:
        """Every module of another file that is named in a string, to be loaded by its name."""
        return [
            Arrow(file.module, module, line)
            for file in self.files
            for name, line in named_modules(file)
            if (module := self._module(name)) and module != file.module
        ]

    @property
    def rooms(self) -> list[str]:
        """All rooms, sorted."""
        return sorted({_room(module) for module in self.modules})

    def _module(self, name: str) -> str | None:
        """The module that provides a dotted name; None outside the package."""
        if name != PACKAGE and not name.startswith(f"{PACKAGE}."):
            return None
        dotted = name.removeprefix(PACKAGE).lstrip(".")
        while dotted not in self.modules and dotted:
            dotted = dotted.rpartition(".")[0]
        return dotted


def imported_names(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """Absolute names that syntax nodes import, with lines; also the text given to `import_module`."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and _call_text(node) in {"import_module", "__import__"} and node.args:
            name = node.args[0]
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value, node.lineno


_REFERENCE = re.compile(rf"{PACKAGE}(\.[A-Za-z_]\w*)+\.?(:\w+)?")


def named_modules(file: SourceFile) -> Iterator[tuple[str, int]]:
    """Strings that consist of the name of a module or of an object in one, with lines."""
    for node in file.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _REFERENCE.fullmatch(node.value):
            yield node.value.partition(":")[0].rstrip("."), node.lineno


def _call_text(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _room(module: str) -> str:
    return module.split(".", maxsplit=1)[0] or FACE


def _lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def not_placed(tree: SourceTree) -> list[str]:
    """Rooms that `FLOORS` does not name."""
    placed = {room for rooms in FLOORS for room in rooms}
    return [room for room in tree.rooms if room not in placed]


def room_arrows(tree: SourceTree) -> list[tuple[str, str]]:
    """Distinct pairs of rooms of which the first imports the second, or loads it by name."""
    pairs = {(_room(arrow.importer), _room(arrow.imported)) for arrow in (*tree.arrows, *tree.references)}
    return sorted((importer, imported) for importer, imported in pairs if importer != imported)


def arrows_up(tree: SourceTree) -> list[str]:
    """Imports between placed rooms that do not go to a lower floor, those by name included."""
    level = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
    found = []
    for arrow in (*tree.arrows, *tree.references):
        importer, imported = _room(arrow.importer), _room(arrow.imported)
        if importer != imported and {importer, imported} <= set(level) and level[importer] <= level[imported]:
            found.append(str(arrow))
    return list(dict.fromkeys(found))  # `from x import a, b` is one


def cycles(tree: SourceTree) -> list[list[str]]:
    """Groups of files that import each other, directly or through others; each group sorted."""
    graph: dict[str, set[str]] = defaultdict(set)
    for arrow in tree.arrows:
        graph[arrow.importer].add(arrow.imported)
    reached = {module: _reachable(graph, module) for module in list(graph)}
    groups = {
        frozenset(other for other in reached[module] if module in reached.get(other, ()))
        for module in reached
        if module in reached[module]
    }
    return sorted(sorted(name or FACE for name in group) for group in groups)


def _reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    """Modules that one or more arrows lead to from `start`; `start` itself only through a cycle."""
    seen, stack = set[str](), [start]
    while stack:
        for module in graph.get(stack.pop(), ()):
            if module not in seen:
                seen.add(module)
                stack.append(module)
    return seen


def private_files(tree: SourceTree) -> list[str]:
    """Files under `FEWEST_LINES` lines that exactly one file imports, with that file.

    Files that their package's `__init__.py` imports are public, and left out.
    """
    importers: dict[str, set[str]] = defaultdict(set)
    for arrow in tree.arrows:
        importers[arrow.imported].add(arrow.importer)
    packages = {file.module for file in tree.files if file.path.name == "__init__.py"}
    return [
        f"{file.path} ({file.lines}): {''.join(importers[file.module])}"
        for file in tree.files
        if file.module not in packages and file.lines < FEWEST_LINES
        if len(importers[file.module]) == 1 and not importers[file.module] & packages
    ]


def names_twice(tree: SourceTree) -> dict[str, list[str]]:
    """Classes and type aliases of the same name, underscores left out, with the files that define them."""
    places = defaultdict(list)
    for file in tree.files:
        classes = [(node.name, node.lineno) for node in file.nodes if isinstance(node, ast.ClassDef)]
        for name, line in classes + [alias for node in file.tree.body for alias in _aliases(node)]:
            places[name.lstrip("_")].append(f"{file.path}:{line}")
    return {name: found for name, found in sorted(places.items()) if len(found) > 1}


def _aliases(node: ast.stmt) -> list[tuple[str, int]]:
    """Name and line of a type alias: an assignment to a name in CapWords, except type variables."""
    if not isinstance(node, ast.Assign) or isinstance(node.value, ast.Call):
        return []
    names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    return [(name, node.lineno) for name in names if re.fullmatch(r"_?[A-Z]\w*[a-z]\w*", name)]


def first_lines(tree: SourceTree) -> list[Remark]:
    """First lines of docstrings that are clauses, and, except for attributes, those over `MOST_WORDS` words."""
    remarks = []
    for file in tree.files:
        for line, text in file.docstrings:
            first = text.splitlines()[0]
            words = first.split()
            if words[0].rstrip(",:") in CLAUSES or len(words) > MOST_WORDS:
                remarks.append(Remark(str(file.path), line, first))
        # An attribute's docstring is one text, not a line above others: it may be longer.
        for line, text in file.attribute_docstrings:
            if text.split()[0].rstrip(",:") in CLAUSES:
                remarks.append(Remark(str(file.path), line, text.splitlines()[0]))
    return remarks


_BANNED = re.compile(rf"(?<![A-Za-z])({'|'.join(BANNED)})(?![A-Za-z])", re.IGNORECASE)


def banned_words(tree: SourceTree) -> list[Remark]:
    """Banned words in docstrings, comments and messages, one remark for each."""
    return [
        Remark(str(file.path), line + text.count("\n", 0, match.start()), match[0].lower())
        for file in tree.files
        for line, text in (*file.phrases, *file.comments)
        for match in _BANNED.finditer(text)
    ]


PROSE = (
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench", "deploy", "docs", "examples"),
    *("native", "scripts", "tests"),
)
"""Files and folders outside of the package whose words are checked, names in code included."""

UNCHECKED = ("scripts/house.py", "tests/repository/test_house.py", "tests/repository/test_bench_images.py")
"""The list of words and its test, and a test that uses names of `bench`."""


def banned_in_text(root: Path) -> list[Remark]:
    """Banned words in the files of `PROSE`, one remark for each, without the files of `UNCHECKED`."""
    found: list[Remark] = []
    for place in PROSE:
        for path in _texts(root / place):
            if str(path.relative_to(root)) not in UNCHECKED:
                found += _banned_in_file(path, str(path.relative_to(root)))
    return found


def _texts(place: Path) -> Iterator[Path]:
    if place.is_dir():
        paths = sorted(place.rglob("*"))
        yield from (path for path in paths if path.suffix in {".md", ".py", ".cpp", ".h"})
    elif place.is_file():
        yield place


def _banned_in_file(path: Path, name: str) -> Iterator[Remark]:
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        yield from (Remark(name, number, match[0].lower()) for match in _BANNED.finditer(line))


def function_lengths(tree: SourceTree) -> dict[str, float]:
    """Number of functions, and median, 95th percentile and maximum of their lines, decorators left out."""
    lengths = sorted(len(_lines_of(node)) for file in tree.files for node in file.functions)
    if not lengths:
        return {"functions": 0, "median": 0, "p95": 0, "max": 0}
    p95 = lengths[min(len(lengths) - 1, round(0.95 * (len(lengths) - 1)))]
    return {"functions": len(lengths), "median": statistics.median(lengths), "p95": p95, "max": lengths[-1]}


def count_test_functions(tests: Path) -> int:
    """Functions below `tests` whose name begins with `test_`."""
    sources = (path.read_text(encoding="utf-8") for path in tests.rglob("test_*.py"))
    nodes = (node for source in sources for node in ast.walk(ast.parse(source)))
    return sum(isinstance(node, Function) and node.name.startswith("test_") for node in nodes)


def count_test_cases(root: Path) -> int:
    """Cases that pytest collects. A failed collection ends the program with pytest's output."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"house: pytest could not collect the tests below {root}:\n{done.stdout}{done.stderr}")
    return sum("::" in line for line in done.stdout.splitlines())


def extensions(root: Path) -> dict[str, list[str]]:
    """The modules of the package that each example of an extension imports."""
    found = {}
    for path in sorted((root / "examples" / "extending").glob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]
        names += [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        found[path.name] = sorted({name for name in names if name.split(".", maxsplit=1)[0] == PACKAGE})
    return found


def inner_imports(imports: dict[str, list[str]]) -> list[str]:
    """Imports by extensions of what is not a public room."""
    return [f"{file} imports {name}" for file, names in imports.items() for name in names if name.count(".") > 1]


def measure(tree: SourceTree) -> dict[str, Any]:
    """All figures of the source tree, by name."""
    lines = sum(file.lines for file in tree.files)
    first, banned = first_lines(tree), banned_words(tree)
    unplaced = not_placed(tree)
    return {
        "files": len(tree.files),
        "lines": lines,
        "code_lines": sum(file.code_lines for file in tree.files),
        "rooms": len(tree.rooms),
        "floors": sum(any(room in tree.rooms for room in rooms) for rooms in FLOORS),
        "not_placed": unplaced,
        "room_arrows": len(room_arrows(tree)),
        "arrows_up": arrows_up(tree),
        "cycles": cycles(tree),
        "function_lines": function_lengths(tree),
        "import_share": _share(sum(file.import_lines for file in tree.files), lines),
        "docstrings": sum(len(file.docstrings) for file in tree.files),
        "docstrings_by_first_word": dict(Counter(remark.text.split()[0] for remark in first if _is_clause(remark))),
        "docstrings_too_long": sum(len(remark.text.split()) > MOST_WORDS for remark in first),
        "first_lines": [str(remark) for remark in first],
        "names_twice": names_twice(tree),
        "private_files": private_files(tree),
        "comment_lines_per_100": _comments_per_100(tree.files),
        "delicate_comment_lines_per_100": _comments_per_100(
            [file for file in tree.files if any(file.module.startswith(f"{room}.") for room in DELICATE)]
        ),
        "banned_words": dict(Counter(remark.text for remark in banned)),
        "banned_places": [str(remark) for remark in banned],
    }


def _is_clause(remark: Remark) -> bool:
    return remark.text.split()[0].rstrip(",:") in CLAUSES


def _comments_per_100(files: list[SourceFile]) -> float:
    return 100 * _share(sum(file.comment_lines for file in files), sum(file.lines for file in files))


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


BROKEN = ("arrows_up", "cycles", "names_twice", "first_lines", "banned_places", "inner_imports")
"""Figures that --check requires to be empty."""


def table(figures: dict[str, Any]) -> str:
    """The figures as lines of text; lists by their length."""
    lengths = figures["function_lines"]
    rows = [
        ("files", f"{figures['files']:,}"),
        ("lines", f"{figures['lines']:,}"),
        ("code lines", f"{figures['code_lines']:,}"),
        ("rooms", f"{figures['rooms']}"),
        ("floors", f"{figures['floors']} of {len(FLOORS)}"),
        ("rooms not placed", _list_text(figures["not_placed"])),
        ("arrows between rooms", f"{figures['room_arrows']}"),
        ("arrows up", f"{len(figures['arrows_up'])}"),
        ("import cycles", f"{len(figures['cycles'])}"),
        ("functions", f"{lengths['functions']:,}"),
        ("function lines", f"median {lengths['median']:g}, p95 {lengths['p95']}, max {lengths['max']}"),
        ("import lines", f"{figures['import_share']:.1%}"),
        ("docstrings", f"{figures['docstrings']:,}"),
        ("first line a clause", _count_cases(figures["docstrings_by_first_word"])),
        (f"first line > {MOST_WORDS} words", f"{figures['docstrings_too_long']:,}"),
        ("names twice", f"{len(figures['names_twice'])}"),
        (f"one importer, < {FEWEST_LINES}", f"{len(figures['private_files'])}"),
        ("comment lines per 100", f"{figures['comment_lines_per_100']:.2f}"),
        (" where it is delicate", f"{figures['delicate_comment_lines_per_100']:.2f}"),
        ("banned words", _count_cases(figures["banned_words"])),
        ("extensions", f"{len(figures['extensions'])} in one file each, {len(figures['inner_imports'])} inner imports"),
        ("test functions", f"{figures['test_functions']:,}"),
    ]
    if "test_cases" in figures:
        rows.append(("test cases", f"{figures['test_cases']:,}"))
    return "\n".join(f"{name:<22} {value}" for name, value in rows)


def _list_text(names: list[str]) -> str:
    return f"{len(names)}: {', '.join(names)}" if names else "0"


def _count_cases(counts: dict[str, int]) -> str:
    parts = [f"{word} {count}" for word, count in sorted(counts.items(), key=lambda item: -item[1])]
    return f"{sum(counts.values())} ({', '.join(parts)})" if parts else "0"


def main(arguments: list[str] | None = None) -> int:
    """Print the figures and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help="the checkout")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with the places")
    parser.add_argument("--check", action="store_true", help="list the places that break a rule, and exit with 1")
    parser.add_argument("--collect", action="store_true", help="count the test cases as well, with pytest")
    options = parser.parse_args(arguments)
    source = options.root / "src" / PACKAGE
    if not source.is_dir():
        parser.error(f"there is no {source}; pass the checkout as --root")
    figures = measure(SourceTree(source))
    figures["banned_places"] += map(str, banned_in_text(options.root))
    figures["extensions"] = extensions(options.root)
    figures["inner_imports"] = inner_imports(figures["extensions"])
    figures["test_functions"] = count_test_functions(options.root / "tests")
    if options.collect:
        figures["test_cases"] = count_test_cases(options.root)
    print(json.dumps(figures, indent=2) if options.json else table(figures))
    if not options.check:
        return 0
    for name in BROKEN:
        _list_places(name, figures[name])
    return 1 if any(figures[name] for name in BROKEN) else 0


def _list_places(name: str, places: Any) -> None:
    entries = [f"{key}: {', '.join(found)}" for key, found in places.items()] if isinstance(places, dict) else places
    for entry in entries:
        text = " -> ".join(entry) if isinstance(entry, list) else entry
        print(f"{name}: {text}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
