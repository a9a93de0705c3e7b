"""Searches in syntax trees that several rules of `feedline lint` need."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from feedline.cli.lint.source import SourceFile

DATASETS = ("torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset", "Dataset")


DATASET_MODULES = ("torchvision.datasets.", "torchaudio.datasets.", "torch_geometric.datasets.", "feedline.datasets.")
"""Modules whose classes are datasets."""


STREAMS = ("torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset", "IterableDataset")


def dataset_classes(source: SourceFile) -> Iterator[ast.ClassDef]:
    """Classes of datasets in a file."""
    for definition in source.classes:
        # Without the base class, any container has these methods: the name decides.
        has_samples = method_of(definition, "__getitem__") and method_of(definition, "__len__") and not definition.bases
        if source.inherits(definition, *DATASETS, *STREAMS, *DATASET_MODULES) or (
            has_samples and _NAMES.search(definition.name)
        ):
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
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and any(
            isinstance(target, ast.Attribute) and is_self(target.value) for target in targets_of(node)
        ):
            yield node


def functions_of_samples(source: SourceFile, definition: ast.ClassDef) -> list[ast.FunctionDef]:
    """Functions of this file that make the samples of a class.

    `__getitem__`, `__iter__`, and the methods of the class and functions of the module that they call.
    """
    found = [method for name in ("__getitem__", "__iter__", "__getitems__") if (method := method_of(definition, name))]
    functions = {node.name: node for node in source.tree.body if isinstance(node, ast.FunctionDef)}
    for function in found:  # grows
        for _, call in source.calls(function):
            called = None
            if isinstance(call.func, ast.Attribute) and is_self(call.func.value):
                called = method_of(definition, call.func.attr)
            elif isinstance(call.func, ast.Name):
                called = functions.get(call.func.id)
            if called is not None and called not in found:
                found.append(called)
    return found


def shared_by_samples(source: SourceFile, definition: ast.ClassDef) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Calls assigned in module or class that samples read."""
    functions = functions_of_samples(source, definition)
    for body, in_class in ((source.tree.body, False), (definition.body, True)):
        for node in body:
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and isinstance(node.value, ast.Call)
                and any(_reads(function, target, in_class) for target in targets_of(node) for function in functions)
            ):
                yield node


def _reads(function: ast.FunctionDef, target: ast.expr, in_class: bool) -> bool:
    """True if a function reads an assigned name or attribute."""
    if not isinstance(target, ast.Name):
        return False
    nodes = list(ast.walk(function))
    if in_class:
        return any(isinstance(node, ast.Attribute) and node.attr == target.id for node in nodes)
    names = [node for node in nodes if isinstance(node, ast.Name) and node.id == target.id]
    is_local = any(isinstance(node.ctx, ast.Store) for node in names) or any(
        isinstance(node, ast.arg) and node.arg == target.id for node in nodes
    )
    return bool(names) and not is_local


def targets_of(assignment: ast.Assign | ast.AnnAssign) -> list[ast.expr]:
    """The targets of an assignment."""
    return assignment.targets if isinstance(assignment, ast.Assign) else [assignment.target]


def values_of(source: SourceFile, name: str) -> list[ast.expr]:
    """Values that a file assigns to a variable."""
    return [
        node.value
        for node in source.nodes
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and node.value is not None
        and any(isinstance(target, ast.Name) and target.id == name for target in targets_of(node))
    ]


def serves_only(source: SourceFile, method: ast.FunctionDef | None, assignment: ast.Assign | ast.AnnAssign) -> bool:
    """True if only this method reads the assigned attribute of `self`."""
    names = {target.attr for target in targets_of(assignment) if isinstance(target, ast.Attribute)}
    reads = [
        node
        for node in source.nodes
        if isinstance(node, ast.Attribute) and node.attr in names and isinstance(node.ctx, ast.Load)
    ]
    return bool(reads) and all(any(outer is method for outer in source.enclosing(node)) for node in reads)


def is_self(node: ast.AST) -> bool:
    """True for the name `self`."""
    return isinstance(node, ast.Name) and node.id == "self"


def passed_functions(
    source: SourceFile, argument: str, calls: Iterable[ast.Call]
) -> list[ast.FunctionDef | ast.Lambda]:
    """Functions of this file that calls pass as this argument.

    Lambdas, methods and the functions of `partial` are among them.
    """
    passed = [each for call in calls if (value := argument_of(call, argument)) for each in _functions_of(source, value)]
    lambdas = [each for each in passed if isinstance(each, ast.Lambda)]
    return lambdas + [node for node in source.nodes if isinstance(node, ast.FunctionDef) and node.name in passed]


def _functions_of(source: SourceFile, value: ast.expr) -> list[ast.Lambda | str]:
    """Lambdas and names of functions that an expression may give."""
    if isinstance(value, ast.Call) and value.args and source.qualified_name(value.func) == "functools.partial":
        return _functions_of(source, value.args[0])
    if isinstance(value, ast.Name):
        return [value.id, *(each for each in values_of(source, value.id) if isinstance(each, ast.Lambda))]
    if isinstance(value, ast.Attribute):
        return [value.attr]
    return [value] if isinstance(value, ast.Lambda) else []


def init_functions(source: SourceFile) -> list[ast.FunctionDef | ast.Lambda]:
    """Functions of this file that are passed as worker_init_fn."""
    return passed_functions(source, "worker_init_fn", (call for _, call in source.calls()))


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


def appends_objects(source: SourceFile, method: ast.FunctionDef, assignment: ast.Assign | ast.AnnAssign) -> bool:
    """True if a loop of the method fills the assigned list.

    `self.items = []` and `self.items = items` are followed. Loops over literals, `*args` and short ranges are excluded,
    and lists that a later assignment replaces, such as by an array.
    """
    value = assignment.value
    names = {source.code(target) for target in targets_of(assignment)}
    if isinstance(value, ast.Name):
        names.add(value.id)
    stores = [
        node
        for node in ast.walk(method)
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        and node is not (assignment if isinstance(value, ast.Name) else None)
        and any(source.code(target) in names for target in targets_of(node))
    ]
    if not stores or not all(_is_empty_list(source, node.value) for node in stores):
        return False
    return any(
        source.code(filled) in names
        and not any(isinstance(part, ast.Constant) for part in added)
        and (is_many or not all(_is_brief(loop, method.args.vararg) for loop in loops_around(source, node)))
        for node, filled, added, is_many in _additions(source, method)
    )


def _additions(source: SourceFile, method: ast.FunctionDef) -> Iterator[tuple[ast.AST, ast.expr, list[ast.expr], bool]]:
    """Additions to lists.

    Each is the node, the list, what is added, and whether that is many objects.
    """
    for _, call in source.calls(method):
        if isinstance(call.func, ast.Attribute) and call.func.attr in ("append", "extend"):
            is_many = call.func.attr == "extend"
            added = [part for arg in call.args for part in _parts(arg)] if is_many else call.args
            yield call, call.func.value, added, is_many and any(makes_objects(source, part) for part in added)
    for node in ast.walk(method):
        if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add):
            yield node, node.target, _parts(node.value), makes_objects(source, node.value)


def _parts(value: ast.expr) -> list[ast.expr]:
    """The elements of a literal list; other expressions as they are."""
    return value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]


def _is_empty_list(source: SourceFile, value: ast.expr | None) -> bool:
    if isinstance(value, ast.Call):
        return source.qualified_name(value.func) == "list" and not value.args
    return isinstance(value, ast.List) and not value.elts


def _is_brief(loop: ast.For, star: ast.arg | None) -> bool:
    """True for loops over literals, `*args`, and ranges of constants below 1,000."""
    is_star = star is not None and isinstance(loop.iter, ast.Name) and loop.iter.id == star.arg
    if is_star or isinstance(loop.iter, (ast.List, ast.Tuple, ast.Set)):
        return True
    if not isinstance(loop.iter, ast.Call) or not isinstance(loop.iter.func, ast.Name) or loop.iter.func.id != "range":
        return False
    ends = [constant_of(part) for part in loop.iter.args]
    return all(isinstance(end, int) and end < 1000 for end in ends)


def moves_to_device(source: SourceFile, call: ast.Call) -> bool:
    """True for `.cuda(...)`, `.to(device)`, `.to("cuda")`, and `torch.zeros(3, device="cuda")`."""
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cuda":
        return True
    name = source.qualified_name(call.func)
    if name.startswith("torch.") and name != "torch.device":
        places = [place for place in (argument_of(call, "device"), argument_of(call, "map_location")) if place]
        # Not x.device: on the CPU in a worker, as x is.
        return any("cuda" in (code := source.code(place)) or code in ("device", "self.device") for place in places)
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
