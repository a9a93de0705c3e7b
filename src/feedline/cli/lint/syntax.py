"""Searches in syntax trees that several rules of `feedline lint` need."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from feedline.cli.lint.source import SourceFile

DATASETS = ("torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset", "Dataset")


STREAMS = ("torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset", "IterableDataset")


def dataset_classes(source: SourceFile) -> Iterator[ast.ClassDef]:
    """Classes of datasets in a file."""
    for definition in source.classes:
        # Without the base class, any container has these methods: the name decides.
        has_samples = method_of(definition, "__getitem__") and method_of(definition, "__len__") and not definition.bases
        if source.inherits(definition, *DATASETS, *STREAMS) or (has_samples and _NAMES.search(definition.name)):
            yield definition


_NAMES = re.compile(
    r"data(?!base|loader|frame)|set$|reader|corpus|samples|images|photos|records|rows|files", re.IGNORECASE
)
"""Class names of datasets, used for classes without a base class."""


def method_of(definition: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    """The method of this name in a class, or None."""
    return next((node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def own_assignments(method: ast.FunctionDef | None) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Assignments to attributes of `self`."""
    for node in ast.walk(method) if method else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Attribute) and is_self(target.value) for target in targets):
                yield node


def serves_only(source: SourceFile, method: ast.FunctionDef | None, assignment: ast.Assign | ast.AnnAssign) -> bool:
    """True if only this method reads the assigned attribute of `self`."""
    targets = assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]
    names = {target.attr for target in targets if isinstance(target, ast.Attribute)}
    reads = [
        node
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load)
    ]
    return bool(reads) and all(any(outer is method for outer in source.enclosing(node)) for node in reads)


def is_self(node: ast.AST) -> bool:
    """True for the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


def init_functions(source: SourceFile) -> list[ast.FunctionDef]:
    """Functions of this file that are passed as worker_init_fn."""
    passed = {
        keyword.value.id
        for _, call in source.calls()
        for keyword in call.keywords
        if keyword.arg == "worker_init_fn" and isinstance(keyword.value, ast.Name)
    }
    return [node for node in source.nodes if isinstance(node, ast.FunctionDef) and node.name in passed]


_OBJECT_SOURCES = ("json.load", "json.loads", "pickle.load", "sorted", "list", "os.listdir", "glob.glob")


def makes_objects(source: SourceFile, value: ast.AST | None) -> bool:
    """True for expressions that give long lists or dicts.

    Mappings of mappings and lists of distinct values are excluded: they mostly concern classes, and are short.
    """
    if isinstance(value, ast.DictComp) and source.code(value.generators[0].iter).endswith((".items()", "_keys")):
        return False
    if isinstance(value, (ast.ListComp, ast.DictComp)):
        item = value.elt if isinstance(value, ast.ListComp) else value.value
        return not isinstance(item, ast.Constant) and not isinstance(value.generators[0].iter, (ast.List, ast.Tuple))
    if not isinstance(value, ast.Call) or (value.args and _is_short(source, value.args[0])):
        return False
    is_method = isinstance(value.func, ast.Attribute) and value.func.attr in (
        "tolist",
        "to_dict",
        "readlines",
        "splitlines",
    )
    return is_method or (source.qualified_name(value.func) in _OBJECT_SOURCES and bool(value.args))


def _is_short(source: SourceFile, value: ast.expr) -> bool:
    """True for literal, empty and distinct collections."""
    if not isinstance(value, ast.Call):
        return isinstance(value, (ast.List, ast.Tuple, ast.Set))
    name = source.qualified_name(value.func)
    is_empty = name in ("list", "tuple", "dict") and not value.args
    inner = value.args[0] if value.args else None
    return is_empty or name == "set" or (inner is not None and name in ("list", "sorted") and _is_short(source, inner))


def moves_to_device(source: SourceFile, call: ast.Call) -> bool:
    """True for `.cuda(...)`, `.to(device)` and `.to("cuda")`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cuda":
        return True
    words = [source.code(part) for part in (*call.args, *(keyword.value for keyword in call.keywords))]
    return call.func.attr == "to" and any("cuda" in word or word.endswith("device") for word in words)


def is_broad(source: SourceFile, handler: ast.ExceptHandler) -> bool:
    """True if a handler catches all exceptions."""
    return handler.type is None or source.code(handler.type) in ("Exception", "BaseException")


def raises(handler: ast.ExceptHandler) -> bool:
    """True if a handler raises an exception."""
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def returns(handler: ast.ExceptHandler) -> bool:
    """True if a handler returns, assigns or continues."""
    return any(isinstance(node, (ast.Return, ast.Assign, ast.AugAssign, ast.Continue)) for node in ast.walk(handler))


def loops_around(source: SourceFile, node: ast.AST) -> Iterator[ast.For]:
    """Enclosing `for` loops within the same function."""
    for outer in source.enclosing(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        if isinstance(outer, ast.For):
            yield outer


def nodes_between(source: SourceFile, node: ast.AST, outer: ast.AST) -> Iterator[ast.AST]:
    """Enclosing nodes of a node, inner ones first, up to `outer`."""
    for each in source.enclosing(node):
        if each is outer:
            return
        yield each


def argument_of(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
    """The argument of a call, by name or position; None without it."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if (
        position is not None
        and len(call.args) > position
        and not any(isinstance(part, ast.Starred) for part in call.args)
    ):
        return call.args[position]
    return None


def has_star(call: ast.Call) -> bool:
    """True if a call has `*` or `**` arguments, which hide names."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(part, ast.Starred) for part in call.args
    )


def constant_of(node: ast.expr | None) -> object:
    """The value of a constant; None for other nodes."""
    return node.value if isinstance(node, ast.Constant) else None


def is_true(node: ast.expr | None) -> bool:
    """True for the constant True."""
    return constant_of(node) is True


def is_false(node: ast.expr | None) -> bool:
    """True for the constant False."""
    return constant_of(node) is False
