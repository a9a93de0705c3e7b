"""Rules of `feedline lint`: one function each, listed in `RULES`.

A rule yields violations: the node, the mistake, and the code to write instead.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

from feedline.cli.doctor.findings import Severity
from feedline.cli.lint.source import SourceFile

LOADERS = (
    "torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader", "feedline.DataLoader",
    "torchdata.stateful_dataloader.StatefulDataLoader", "DataLoader",
)  # fmt: skip


DATASETS = ("torch.utils.data.Dataset", "torch.utils.data.dataset.Dataset", "Dataset")


STREAMS = ("torch.utils.data.IterableDataset", "torch.utils.data.dataset.IterableDataset", "IterableDataset")


HANDLES = {
    "open": "file", "io.open": "file", "h5py.File": "HDF5 file", "lmdb.open": "LMDB environment",
    "sqlite3.connect": "connection", "psycopg.connect": "connection", "psycopg2.connect": "connection",
    "pymysql.connect": "connection", "redis.Redis": "connection", "boto3.client": "client", "boto3.resource": "client",
    "zipfile.ZipFile": "archive", "tarfile.open": "archive", "tables.open_file": "HDF5 file",
    "zarr.ZipStore": "archive",
}  # fmt: skip


GENERATORS = ("numpy.random.default_rng", "numpy.random.RandomState", "random.Random", "torch.Generator")


SEEDS = ("numpy.random.seed", "random.seed", "torch.manual_seed")


TINY_BATCH = 8
"""Batch size below which page-locked memory gains nothing."""


SMALL_BUFFER = 1000
"""Size of a shuffle buffer below which neighbors of a shard stay neighbors."""


class Violation(NamedTuple):
    """One place that a rule objects to."""

    node: ast.AST
    text: str
    remedy: str


class Rule(NamedTuple):
    """A rule with the code that switches it off in a comment."""

    code: str
    severity: Severity
    find: Callable[[SourceFile], Iterator[Violation]]


def import_of_torch(source: SourceFile) -> Iterator[Violation]:
    """Imports of loaders that feedline replaces."""
    for node in source.nodes:
        if not isinstance(node, ast.ImportFrom):
            continue
        names = [alias.name for alias in node.names]
        if node.module in ("torch.utils.data", "torch.utils.data.dataloader") and "DataLoader" in names:
            yield Violation(
                node, "DataLoader comes from torch", "from feedline import DataLoader: same arguments and batches"
            )
        if node.module == "torchdata.stateful_dataloader":
            remedy = "from feedline import DataLoader: it has state_dict() and load_state_dict(), for any worker count"
            yield Violation(node, "StatefulDataLoader comes from torchdata", remedy)


def use_of_torch(source: SourceFile) -> Iterator[Violation]:
    """Loaders named by their full path."""
    for name, call in source.calls():
        if name == "torch.utils.data.DataLoader" and isinstance(call.func, ast.Attribute):
            yield Violation(call, "DataLoader comes from torch", "feedline.DataLoader: same arguments and batches")


def missing_set_epoch(source: SourceFile) -> Iterator[Violation]:
    """DistributedSampler without set_epoch: every epoch has the same order."""
    if any(name.endswith(".set_epoch") for name, _ in source.calls()):
        return
    for name, call in source.calls():
        if name.rpartition(".")[2] == "DistributedSampler" and not _is_false(_argument(call, "shuffle", 3)):
            remedy = 'call sampler.set_epoch(epoch) each epoch, or DataLoader(shuffle=True, seed=0, distributed="auto")'
            yield Violation(call, "set_epoch is never called: every epoch has the same order", remedy)


def handle_in_init(source: SourceFile) -> Iterator[Violation]:
    """Files and connections opened in a dataset's constructor."""
    for definition in _datasets(source):
        for assignment in _own_assignments(_method(definition, "__init__")):
            kind = (
                HANDLES.get(source.qualified_name(assignment.value.func))
                if isinstance(assignment.value, ast.Call)
                else None
            )
            if kind:
                text = f"{definition.name} opens a {kind} in __init__: forked workers share it, spawned ones lack it"
                yield Violation(assignment, text, "open it in the first __getitem__ of each process")


def generator_in_init(source: SourceFile) -> Iterator[Violation]:
    """Random generators made in a dataset's constructor, which every worker copies."""
    for definition in _datasets(source):
        for assignment in _own_assignments(_method(definition, "__init__")):
            if isinstance(assignment.value, ast.Call) and source.qualified_name(assignment.value.func) in GENERATORS:
                text = f"{definition.name} keeps a random generator: its copies in the workers draw the same numbers"
                yield Violation(
                    assignment, text, "use feedline.sample_rng() in __getitem__, or torch.rand and numpy.random"
                )


def seed_per_sample(source: SourceFile) -> Iterator[Violation]:
    """Constant seeds set in workers or for each sample."""
    functions = [method for definition in _datasets(source) if (method := _method(definition, "__getitem__"))]
    functions += _init_functions(source)
    for function in functions:
        for name, call in source.calls(function):
            if name in SEEDS and call.args and isinstance(call.args[0], ast.Constant):
                remedy = "remove it: feedline seeds every worker, and with seed= every sample, by itself"
                yield Violation(call, f"{name}({ast.unparse(call.args[0])}) gives all workers the same numbers", remedy)


def list_of_objects(source: SourceFile) -> Iterator[Violation]:
    """Long lists of Python objects, whose pages forked workers copy."""
    for definition in _datasets(source):
        seen = set[str]()
        for assignment in _own_assignments(_method(definition, "__init__")):
            attribute = ast.unparse(assignment.targets[0] if isinstance(assignment, ast.Assign) else assignment.target)
            if attribute not in seen and attribute not in _FEW and _makes_objects(source, assignment.value):
                seen.add(attribute)
                text = (
                    f"{definition.name} keeps Python objects: each worker copies their pages when it counts references"
                )
                remedy = "feedline.datasets.PackedStrings or a NumPy array holds them once; ignore this for short lists"
                yield Violation(assignment, text, remedy)


_FEW = ("self.datasets", "self.transforms")


def device_in_getitem(source: SourceFile) -> Iterator[Violation]:
    """Tensors moved to a device sample by sample."""
    for definition in _datasets(source):
        for function in filter(None, (_method(definition, "__getitem__"), _method(definition, "__iter__"))):
            for _, call in source.calls(function):
                if _moves_to_device(call):
                    text = f"{definition.name} moves single samples to the device: one copy and one context per worker"
                    yield Violation(call, text, 'return CPU tensors, and pass device="cuda" to the loader')


def swallowed_error(source: SourceFile) -> Iterator[Violation]:
    """Samples replaced by others when they raise."""
    for definition in _datasets(source):
        method = _method(definition, "__getitem__")
        for node in ast.walk(method) if method else ():
            if isinstance(node, ast.ExceptHandler) and _is_broad(node) and not _raises(node) and _returns(node):
                text = f"{definition.name}.__getitem__ hides errors of samples: the data may shrink unnoticed"
                yield Violation(
                    node, text, 'let it raise, and pass on_error="skip" or "replace": they count and list it'
                )


def duplicate_stream(source: SourceFile) -> Iterator[Violation]:
    """Streams that do not share themselves out among workers."""
    for definition in source.classes:
        method = _method(definition, "__iter__") if source.inherits(definition, *STREAMS) else None
        if method is None or "get_worker_info" in source.text or _method(definition, "partition"):
            continue
        if _WRAPS.search(ast.unparse(method)):  # what it iterates over decides
            continue
        text = f"each worker would read all of {definition.name}: every sample would come num_workers times"
        remedy = "derive from feedline.PartitionedDataset, or use get_worker_info() in __iter__"
        yield Violation(definition, text, remedy)


_WRAPS = re.compile(r"(\bin |\biter\()(self\.)?\w*(loader|dataset|stream)\b")


def loader_per_epoch(source: SourceFile) -> Iterator[Violation]:
    """Loaders made inside a loop over epochs."""
    for name, call in source.calls():
        loops = [node for node in _loops_around(source, call) if "epoch" in ast.unparse(node.target)]
        if name in LOADERS and loops:
            text = "a new loader is made in every epoch: its workers start again"
            yield Violation(call, text, "make it before the loop, with persistent_workers=True")


def first_batch_in_loop(source: SourceFile) -> Iterator[Violation]:
    """`next(iter(loader))` in a loop, which starts an epoch for each batch."""
    for name, call in source.calls():
        inner = call.args[0] if call.args else None
        is_first = name == "next" and isinstance(inner, ast.Call) and source.qualified_name(inner.func) == "iter"
        if is_first and any(True for _ in _loops_around(source, call)) and "load" in ast.unparse(call).lower():
            text = f"{ast.unparse(call)} in a loop starts an epoch, and its workers, for every batch"
            yield Violation(call, text, "make the iterator once before the loop: batches = iter(loader)")


def no_workers(source: SourceFile) -> Iterator[Violation]:
    """Shuffled loaders that build batches in the training process."""
    for name, call in source.calls():
        is_training = name in LOADERS and _is_true(_argument(call, "shuffle", 2)) and not _has_star(call)
        workers = _argument(call, "num_workers", 5)
        if is_training and (workers is None or _constant(workers) == 0):
            text = "num_workers=0: the training process builds each batch itself"
            yield Violation(call, text, 'num_workers="auto", or a number that feedline bench measures')


def workers_restart(source: SourceFile) -> Iterator[Violation]:
    """Workers that end after each epoch."""
    for name, call in source.calls():
        workers = _constant(_argument(call, "num_workers", 5))
        is_open = _argument(call, "persistent_workers") is None and not _has_star(call)
        if name in LOADERS and isinstance(workers, int) and workers > 0 and is_open:
            yield Violation(call, "workers end with each epoch", "persistent_workers=True starts them once")


def pinned_tiny_batches(source: SourceFile) -> Iterator[Violation]:
    """Page-locked memory for tiny batches."""
    for name, call in source.calls():
        size = _constant(_argument(call, "batch_size", 1))
        if (
            name in LOADERS
            and isinstance(size, int)
            and size < TINY_BATCH
            and _is_true(_argument(call, "pin_memory", 7))
        ):
            text = f"pin_memory=True with batches of {size}: page-locking costs more than it saves"
            yield Violation(call, text, "remove pin_memory, or use larger batches")


def small_buffer(source: SourceFile) -> Iterator[Violation]:
    """Shuffle buffers too small to mix a stream."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "shuffle":
            continue
        size = _constant(_argument(node, "buffer_size", 0))
        streams = ("webdataset", "streaming=True", "wds.")
        if isinstance(size, int) and 1 < size < SMALL_BUFFER and any(word in source.text for word in streams):
            text = f"a shuffle buffer of {size} mixes only neighbors of a shard"
            yield Violation(
                node, text, f"use at least {SMALL_BUFFER:,}, or feedline.samplers.ShardShuffled over TarShards"
            )


def sync_per_step(source: SourceFile) -> Iterator[Violation]:
    """`.item()` on each step, which waits for the device."""
    for node in source.nodes:
        if not isinstance(node, ast.For) or "load" not in ast.unparse(node.iter).lower() or not _uses_device(node):
            continue
        for _, call in source.calls(node):
            is_item = isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args
            if is_item and not any(isinstance(outer, ast.If) for outer in _between(source, call, node)):
                text = f"{ast.unparse(call)} in each step waits for the device"
                yield Violation(call, text, "sum tensors on the device, and call .item() every few hundred steps")
                break


_DEVICE_WORDS = (".to(", ".cuda(", ".backward(", "model(", "net(")


def _uses_device(loop: ast.For) -> bool:
    """True if the loop moves data or calls a model."""
    text = ast.unparse(loop)
    return any(word in text for word in _DEVICE_WORDS)


def seeding_init_fn(source: SourceFile) -> Iterator[Violation]:
    """Init functions that only seed, which feedline does by itself."""
    for function in _init_functions(source):
        calls = [name for name, _ in source.calls(function)]
        if calls and all(name in SEEDS or name.startswith(("torch.initial_seed", "int")) for name in calls):
            remedy = "feedline seeds torch, numpy.random and random in each worker: remove it"
            yield Violation(function, f"{function.name} only seeds generators", remedy)


def sharing_strategy(source: SourceFile) -> Iterator[Violation]:
    """Work-arounds for torch's shared memory."""
    for name, call in source.calls():
        if name.endswith("multiprocessing.set_sharing_strategy"):
            text = "a workaround for torch's shared memory"
            yield Violation(
                call, text, "remove it: feedline's batches use neither /dev/shm nor file descriptors per tensor"
            )


RULES: tuple[Rule, ...] = (
    Rule("missing-set-epoch", Severity.BAD, missing_set_epoch),
    Rule("handle-in-init", Severity.BAD, handle_in_init),
    Rule("generator-in-init", Severity.BAD, generator_in_init),
    Rule("constant-seed", Severity.BAD, seed_per_sample),
    Rule("duplicate-stream", Severity.BAD, duplicate_stream),
    Rule("device-in-getitem", Severity.BAD, device_in_getitem),
    Rule("swallowed-error", Severity.NOTE, swallowed_error),
    Rule("loader-per-epoch", Severity.NOTE, loader_per_epoch),
    Rule("first-batch-in-loop", Severity.BAD, first_batch_in_loop),
    Rule("list-of-objects", Severity.NOTE, list_of_objects),
    Rule("no-workers", Severity.NOTE, no_workers),
    Rule("workers-restart", Severity.NOTE, workers_restart),
    Rule("pinned-tiny-batches", Severity.NOTE, pinned_tiny_batches),
    Rule("small-buffer", Severity.NOTE, small_buffer),
    Rule("sync-per-step", Severity.NOTE, sync_per_step),
    Rule("torch-import", Severity.GOOD, import_of_torch),
    Rule("torch-name", Severity.GOOD, use_of_torch),
    Rule("seeding-init-fn", Severity.GOOD, seeding_init_fn),
    Rule("sharing-strategy", Severity.GOOD, sharing_strategy),
)
"""All rules. GOOD marks correct code for which feedline has a shorter way."""


def _datasets(source: SourceFile) -> Iterator[ast.ClassDef]:
    for definition in source.classes:
        # Without the base class, any container has these methods: the name decides.
        has_samples = _method(definition, "__getitem__") and _method(definition, "__len__") and not definition.bases
        if source.inherits(definition, *DATASETS, *STREAMS) or (has_samples and _NAMES.search(definition.name)):
            yield definition


_NAMES = re.compile(
    r"data(?!base|loader|frame)|set$|reader|corpus|samples|images|photos|records|rows|files", re.IGNORECASE
)
"""Names of classes that give samples."""


def _method(definition: ast.ClassDef, name: str) -> ast.FunctionDef | None:
    return next((node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name == name), None)


def _own_assignments(method: ast.FunctionDef | None) -> Iterator[ast.Assign | ast.AnnAssign]:
    """Assignments to attributes of `self`."""
    for node in ast.walk(method) if method else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Attribute) and _is_self(target.value) for target in targets):
                yield node


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _init_functions(source: SourceFile) -> list[ast.FunctionDef]:
    """Functions of this file that are passed as worker_init_fn."""
    passed = {
        keyword.value.id
        for _, call in source.calls()
        for keyword in call.keywords
        if keyword.arg == "worker_init_fn" and isinstance(keyword.value, ast.Name)
    }
    return [node for node in source.nodes if isinstance(node, ast.FunctionDef) and node.name in passed]


_OBJECT_SOURCES = ("json.load", "json.loads", "pickle.load", "sorted", "list", "os.listdir", "glob.glob")


def _makes_objects(source: SourceFile, value: ast.AST | None) -> bool:
    """True for expressions that give long lists or dicts.

    Maps of maps, and lists of distinct values, are mostly of classes and thus short.
    """
    if isinstance(value, ast.DictComp) and ast.unparse(value.generators[0].iter).endswith((".items()", "_keys")):
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
    """True for empty collections and distinct values."""
    if not isinstance(value, ast.Call):
        return isinstance(value, (ast.List, ast.Tuple, ast.Set))
    name = source.qualified_name(value.func)
    is_empty = name in ("list", "tuple", "dict") and not value.args
    return is_empty or name == "set" or (name in ("list", "sorted") and _is_short(source, value.args[0]))


def _moves_to_device(call: ast.Call) -> bool:
    if not isinstance(call.func, ast.Attribute):
        return False
    if call.func.attr == "cuda":
        return True
    words = [ast.unparse(part) for part in (*call.args, *(keyword.value for keyword in call.keywords))]
    return call.func.attr == "to" and any("cuda" in word or word.endswith("device") for word in words)


def _is_broad(handler: ast.ExceptHandler) -> bool:
    return handler.type is None or ast.unparse(handler.type) in ("Exception", "BaseException")


def _raises(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, ast.Raise) for node in ast.walk(handler))


def _returns(handler: ast.ExceptHandler) -> bool:
    return any(isinstance(node, (ast.Return, ast.Assign, ast.AugAssign, ast.Continue)) for node in ast.walk(handler))


def _loops_around(source: SourceFile, node: ast.AST) -> Iterator[ast.For]:
    """Enclosing `for` loops within the same function."""
    for outer in source.enclosing(node):
        if isinstance(outer, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            return
        if isinstance(outer, ast.For):
            yield outer


def _between(source: SourceFile, node: ast.AST, outer: ast.AST) -> Iterator[ast.AST]:
    for each in source.enclosing(node):
        if each is outer:
            return
        yield each


def _argument(call: ast.Call, name: str, position: int | None = None) -> ast.expr | None:
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


def _has_star(call: ast.Call) -> bool:
    """True if some arguments cannot be seen."""
    return any(keyword.arg is None for keyword in call.keywords) or any(
        isinstance(part, ast.Starred) for part in call.args
    )


def _constant(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _is_true(node: ast.expr | None) -> bool:
    return _constant(node) is True


def _is_false(node: ast.expr | None) -> bool:
    return _constant(node) is False
