"""Python files and notebooks as syntax trees with resolved names."""

from __future__ import annotations

import ast
import io
import json
import os
import re
import tokenize
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

SKIPPED_FOLDERS = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv", "env"}
"""Folders that hold no code of the project; hidden ones are skipped, too."""


LARGEST_NBYTES = 2_000_000
"""Size above which a file counts as data or generated code."""


_IGNORED = re.compile(r"#\s*feedline:\s*ignore(?:\[([\w, -]+)\])?")


_SUBJECT = re.compile(
    r"DataLoader|Dataset|Sampler|__getitem__|sharing_strategy|shuffle\(|next\(\s*iter|\.item\("
    r"|DistributedDataParallel|fully_shard|\.set_epoch\("
)
"""A file without any of these words breaks no rule, and is no reason to drop a hit in another one."""


class SourcePlace(NamedTuple):
    """Place of a node, in the form of compilers."""

    path: str
    line: int
    cell: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" if self.cell is None else f"{self.path}:cell {self.cell}:{self.line}"


@dataclass(frozen=True)
class SourceFile:
    """A parsed file, or one cell of a notebook.

    A cell knows the imports of the cells before it.
    """

    path: str
    text: str
    tree: ast.Module
    cell: int | None = None
    names: dict[str, str] = field(default_factory=dict)
    """Qualified name for each imported name: "np" → "numpy", "DataLoader" → "torch.utils.data.DataLoader"."""

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes; a node comes after its enclosing ones."""
        return list(ast.walk(self.tree))

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        """The directly enclosing node of each node."""
        return {child: node for node in self.nodes for child in ast.iter_child_nodes(node)}

    @cached_property
    def modules(self) -> set[str]:
        """Last names of everything that the file imports."""
        imports = [node for node in self.nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
        paths = [alias.name for node in imports for alias in node.names]
        paths += [node.module for node in imports if isinstance(node, ast.ImportFrom) and node.module]
        return {path.rpartition(".")[2] for path in paths}

    @cached_property
    def packages(self) -> set[str]:
        """First names of everything that the file imports."""
        paths = [alias.name for node in self.nodes if isinstance(node, ast.Import) for alias in node.names]
        paths += [node.module for node in self.nodes if isinstance(node, ast.ImportFrom) and node.module]
        return {path.partition(".")[0] for path in paths}

    @cached_property
    def classes(self) -> list[ast.ClassDef]:
        """All class definitions."""
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def place(self, node: ast.AST) -> SourcePlace:
        """Place of a node."""
        return SourcePlace(self.path, getattr(node, "lineno", 1), self.cell)

    def code(self, node: ast.AST) -> str:
        """Code of a node, in a uniform layout where Python has one."""
        try:
            return ast.unparse(node)
        except ValueError:  # an integer of more digits than Python converts to text
            return ast.get_source_segment(self.text, node) or ""

    def qualified_name(self, node: ast.AST | None) -> str:
        """Dotted name with imports resolved; empty except for names and attributes."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, node.id)
        if isinstance(node, ast.Attribute) and (base := self.qualified_name(node.value)):
            return f"{base}.{node.attr}"
        return ""

    def calls(self, within: ast.AST | None = None) -> Iterator[tuple[str, ast.Call]]:
        """Calls with the qualified names of their functions."""
        if within is None:
            yield from self._calls
            return
        for node in ast.walk(within):
            if isinstance(node, ast.Call):
                yield self.qualified_name(node.func), node

    @cached_property
    def _calls(self) -> list[tuple[str, ast.Call]]:
        return [(self.qualified_name(node.func), node) for node in self.nodes if isinstance(node, ast.Call)]

    def enclosing(self, node: ast.AST) -> Iterator[ast.AST]:
        """Enclosing nodes, inner ones first."""
        while (outer := self.parents.get(node)) is not None:
            yield outer
            node = outer

    def inherits(self, definition: ast.ClassDef, *bases: str) -> bool:
        """True if a class derives from one of these bases.

        A base that ends with a dot stands for all classes of a module. Base classes defined in this file are followed.
        """
        names, seen = self._bases_of(definition), {id(definition)}
        for name in names:  # grows
            inner = next((known for known in self.classes if known.name == name and id(known) not in seen), None)
            if inner is not None and name not in bases:
                seen.add(id(inner))
                names += self._bases_of(inner)
        modules = tuple(base for base in bases if base.endswith("."))
        return any(name in bases or name.startswith(modules) for name in names)

    def _bases_of(self, definition: ast.ClassDef) -> list[str]:
        plain = (base.value if isinstance(base, ast.Subscript) else base for base in definition.bases)  # Dataset[int]
        return [self.qualified_name(base) for base in plain]

    def ignores(self, line: int, code: str) -> bool:
        """True if a comment on the line switches the rule off.

        `# feedline: ignore[code, ...]` names rules; `# feedline: ignore` switches off all of them.
        """
        lines = self.text.split("\n")  # not splitlines: a form feed ends no line of Python
        found = _IGNORED.search(lines[line - 1]) if 0 < line <= len(lines) else None
        return found is not None and (found[1] is None or code in re.split(r"[,\s]+", found[1]))


class UnreadableFile(NamedTuple):
    """A file that could not be parsed, and why."""

    path: str
    reason: str


def python_files(root: Path) -> Iterator[Path]:
    """Python files and notebooks below a folder, in order.

    A path to a file is yielded unchanged.
    """
    if root.is_file():
        yield root
        return
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if path.suffix in (".py", ".ipynb") and _nbytes(path) <= LARGEST_NBYTES:
                yield path


def _nbytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # such as a link to a file that is gone: `parse` gives the reason
        return 0


def package_of(path: Path) -> Path:
    """Folder of the outermost package of a file.

    Outside packages, the file itself.
    """
    package = path.resolve()  # else the parent of "." is "." again
    while package.parent != package and (package.parent / "__init__.py").exists():
        package = package.parent
    return package


def parse(path: Path, is_named: bool = False) -> list[SourceFile] | UnreadableFile:
    """The file, or the code cells of a notebook.

    Unless the user named it, a file to which no rule can apply is not parsed, and has an empty tree. Cells that are not
    Python are left out.
    """
    try:
        content = path.read_bytes()
        lossy = content.decode("utf-8-sig", errors="replace")
        if not is_named and _SUBJECT.search(lossy) is None:
            return [SourceFile(str(path), lossy, ast.Module([], []))]
        if path.suffix == ".ipynb":
            return list(_cells(str(path), json.loads(content)))
        encoding, _ = tokenize.detect_encoding(io.BytesIO(content).readline)
        return [_parse_text(str(path), io.TextIOWrapper(io.BytesIO(content), encoding).read())]
    except SyntaxError as error:
        return UnreadableFile(str(path), error.msg if error.lineno is None else f"{error.msg} in line {error.lineno}")
    except (OSError, ValueError) as error:
        return UnreadableFile(str(path), str(error))
    except (RecursionError, MemoryError):
        return UnreadableFile(str(path), TOO_DEEP)


TOO_DEEP = "an expression has too many parts or brackets within each other"
"""Reason why a file cannot be read that is valid Python."""


def _parse_text(path: str, text: str, cell: int | None = None, known: dict[str, str] | None = None) -> SourceFile:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes and the like are not our subject
        tree = ast.parse(text)
    return SourceFile(path, text, tree, cell, {**(known or {}), **_imports(tree)})


def _cells(path: str, notebook: Any) -> Iterator[SourceFile]:
    known: dict[str, str] = {}
    for number, text in _code_of(notebook):
        plain = "\n".join("" if line.lstrip().startswith(("%", "!")) else line for line in text.split("\n"))
        try:
            source = _parse_text(path, plain, number, known)
        except SyntaxError:  # a cell of another language, or a cell magic
            continue
        known = source.names
        yield source


def _code_of(notebook: Any) -> Iterator[tuple[int, str]]:
    """Numbers and texts of the code cells."""
    try:
        for number, cell in enumerate(notebook["cells"], 1):
            if cell["cell_type"] == "code":
                yield number, "".join(cell["source"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"not a notebook of format 4 ({type(error).__name__}: {error})") from None


def _imports(tree: ast.Module) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names
