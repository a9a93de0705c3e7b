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
from feedline.cli.lint.syntax import (
    STREAMS,
    appends_objects,
    argument_of,
    constant_of,
    dataset_classes,
    functions_of_samples,
    has_star,
    init_functions,
    is_broad,
    is_false,
    is_true,
    loops_around,
    makes_objects,
    method_of,
    moves_to_device,
    nodes_between,
    own_assignments,
    passed_functions,
    raises,
    returns,
    serves_only,
    shared_by_samples,
    targets_of,
    values_of,
)

LOADERS = (
    "torch.utils.data.DataLoader", "torch.utils.data.dataloader.DataLoader", "feedline.DataLoader",
    "torchdata.stateful_dataloader.StatefulDataLoader", "DataLoader",
)  # fmt: skip


HANDLES = {
    "open": "a file", "io.open": "a file", "os.open": "a file descriptor", "h5py.File": "an HDF5 file",
    "tables.open_file": "an HDF5 file", "lmdb.open": "an LMDB environment", "sqlite3.connect": "a connection",
    "psycopg.connect": "a connection", "psycopg2.connect": "a connection", "pymysql.connect": "a connection",
    "redis.Redis": "a connection", "boto3.client": "a client", "boto3.resource": "a client",
    "zipfile.ZipFile": "an archive", "tarfile.open": "an archive", "zarr.ZipStore": "an archive",
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
    if any(name.endswith(".set_epoch") for name, _ in source.calls()) or not _EPOCH_SETTERS.isdisjoint(source.packages):
        return
    for name, call in source.calls():
        if name.rpartition(".")[2] == "DistributedSampler" and not is_false(argument_of(call, "shuffle", 3)):
            remedy = 'call sampler.set_epoch(epoch) each epoch, or DataLoader(shuffle=True, seed=0, distributed="auto")'
            yield Violation(call, "set_epoch is never called: every epoch has the same order", remedy)


_EPOCH_SETTERS = frozenset({"lightning", "pytorch_lightning"})
"""Packages whose trainers set the epoch of samplers."""


def handle_in_init(source: SourceFile) -> Iterator[Violation]:
    """Files and connections that workers inherit from the training process."""
    remedy = "open it in the first __getitem__ of each process"
    for definition in dataset_classes(source):
        for assignment in own_assignments(method_of(definition, "__init__")):
            if kind := HANDLES.get(_name_called(source, assignment.value)):
                text = f"{definition.name} opens {kind} in __init__: forked workers share it, spawned ones lack it"
                yield Violation(assignment, text, remedy)
        for assignment in shared_by_samples(source, definition):
            if kind := HANDLES.get(_name_called(source, assignment.value)):
                text = f"{definition.name} reads {kind} that the import opens: forked workers share it"
                yield Violation(assignment, text, remedy)


def _name_called(source: SourceFile, value: ast.expr | None) -> str:
    """Qualified name of a called function; empty for other values."""
    return source.qualified_name(value.func) if isinstance(value, ast.Call) else ""


def generator_in_init(source: SourceFile) -> Iterator[Violation]:
    """Random generators kept for samples: every worker copies them."""
    for definition in dataset_classes(source):
        constructor = method_of(definition, "__init__")
        for assignment in (*own_assignments(constructor), *shared_by_samples(source, definition)):
            is_generator = _name_called(source, assignment.value) in GENERATORS
            if is_generator and not serves_only(source, constructor, assignment):
                text = f"{definition.name} keeps a random generator: its copies in the workers draw the same numbers"
                yield Violation(
                    assignment, text, "use feedline.sample_rng() in __getitem__, or torch.rand and numpy.random"
                )


def seed_per_sample(source: SourceFile) -> Iterator[Violation]:
    """Constant seeds set in workers or for each sample."""
    functions: list[ast.FunctionDef | ast.Lambda] = [*init_functions(source)]
    functions += [method for kind in dataset_classes(source) if (method := method_of(kind, "__getitem__"))]
    for function in functions:
        for name, call in source.calls(function):
            if name in SEEDS and call.args and isinstance(call.args[0], ast.Constant):
                remedy = "remove it: feedline seeds every worker, and with seed= every sample, by itself"
                yield Violation(call, f"{name}({source.code(call.args[0])}) gives all workers the same numbers", remedy)


def list_of_objects(source: SourceFile) -> Iterator[Violation]:
    """Long lists of Python objects, whose pages forked workers copy."""
    for definition in dataset_classes(source):
        seen = set[str]()
        constructor = method_of(definition, "__init__")
        for assignment in own_assignments(constructor):
            attribute = source.code(targets_of(assignment)[0])
            if attribute in seen or attribute in _FEW:
                continue
            is_filled = constructor is not None and appends_objects(source, constructor, assignment)
            if is_filled or makes_objects(source, assignment.value):
                seen.add(attribute)
                text = (
                    f"{definition.name} keeps Python objects: each worker copies their pages when it counts references"
                )
                remedy = "feedline.datasets.PackedStrings or a NumPy array holds them once; ignore this for short lists"
                yield Violation(assignment, text, remedy)


_FEW = ("self.datasets", "self.transforms")


def device_in_getitem(source: SourceFile) -> Iterator[Violation]:
    """Tensors moved to a device by datasets and collate functions."""
    remedy = 'return CPU tensors, and pass device="cuda" to the loader'
    seen = set[ast.AST]()
    for definition in dataset_classes(source):
        for function in functions_of_samples(source, definition):
            for _, call in source.calls(function):
                if call not in seen and moves_to_device(source, call):
                    seen.add(call)
                    text = f"{definition.name} moves single samples to the device: one copy and one context per worker"
                    yield Violation(call, text, remedy)
    with_workers = [call for name, call in source.calls() if name in LOADERS and not _has_no_workers(call)]
    for passed in passed_functions(source, "collate_fn", with_workers):
        for _, call in source.calls(passed):
            if call not in seen and moves_to_device(source, call):
                name = getattr(passed, "name", "the lambda")
                text = f"{name} moves batches to the device: one context per worker, and forked ones fail"
                yield Violation(call, text, remedy)


def _has_no_workers(call: ast.Call) -> bool:
    """True if a loader certainly has no workers."""
    workers = argument_of(call, "num_workers", 5)
    return not has_star(call) and (workers is None or constant_of(workers) == 0)


def device_in_init(source: SourceFile) -> Iterator[Violation]:
    """Tensors that a dataset keeps on a device."""
    loaders = [call for name, call in source.calls() if name in LOADERS]
    if loaders and all(_has_no_workers(call) for call in loaders):
        return  # a good place for small data
    for definition in dataset_classes(source):
        constructor = method_of(definition, "__init__")
        for assignment in own_assignments(constructor):
            if any(moves_to_device(source, call) for _, call in source.calls(assignment)):
                text = f"{definition.name} keeps tensors on the device: forked workers cannot use them"
                remedy = 'keep CPU tensors, and pass device="cuda" to the loader; or use num_workers=0'
                yield Violation(assignment, text, remedy)


def swallowed_error(source: SourceFile) -> Iterator[Violation]:
    """Broad handlers in `__getitem__` that hide errors of samples."""
    for definition in dataset_classes(source):
        method = method_of(definition, "__getitem__")
        for node in ast.walk(method) if method else ():
            if isinstance(node, ast.ExceptHandler) and is_broad(source, node) and not raises(node) and returns(node):
                text = f"{definition.name}.__getitem__ hides errors of samples: the data may shrink unnoticed"
                yield Violation(
                    node, text, 'let it raise, and pass on_error="skip" or "replace": they count and list it'
                )


def duplicate_stream(source: SourceFile) -> Iterator[Violation]:
    """Streams that do not divide themselves among workers."""
    for definition in source.classes:
        method = method_of(definition, "__iter__") if source.inherits(definition, *STREAMS) else None
        if method is None or "get_worker_info" in source.text or method_of(definition, "partition"):
            continue
        if _INNER_ITERABLE.search(source.code(method)):  # its iterable decides
            continue
        text = f"each worker would read all of {definition.name}: every sample would be delivered num_workers times"
        remedy = "derive from feedline.PartitionedDataset, or use get_worker_info() in __iter__"
        yield Violation(definition, text, remedy)


_INNER_ITERABLE = re.compile(r"(\bin |\biter\()(self\.)?\w*(loader|dataset|stream)\b")


def loader_per_epoch(source: SourceFile) -> Iterator[Violation]:
    """Loaders made inside a loop over epochs."""
    for name, call in source.calls():
        loops = [node for node in loops_around(source, call) if "epoch" in source.code(node.target)]
        if name in LOADERS and loops:
            text = "a new loader is made in every epoch: its workers start again"
            yield Violation(call, text, "make it before the loop, with persistent_workers=True")


def first_batch_in_loop(source: SourceFile) -> Iterator[Violation]:
    """`next(iter(loader))` in a loop, which starts an epoch for each batch."""
    for name, call in source.calls():
        inner = call.args[0] if call.args else None
        is_first = name == "next" and isinstance(inner, ast.Call) and source.qualified_name(inner.func) == "iter"
        if is_first and any(True for _ in loops_around(source, call)) and "load" in source.code(call).lower():
            text = f"{source.code(call)} in a loop starts an epoch, and its workers, for every batch"
            yield Violation(call, text, "make the iterator once before the loop: batches = iter(loader)")


def no_workers(source: SourceFile) -> Iterator[Violation]:
    """Shuffled loaders that build batches in the training process."""
    for name, call in source.calls():
        is_training = name in LOADERS and is_true(argument_of(call, "shuffle", 2)) and not has_star(call)
        workers = argument_of(call, "num_workers", 5)
        if is_training and (workers is None or constant_of(workers) == 0):
            text = "num_workers=0: the training process builds each batch itself"
            yield Violation(call, text, 'num_workers="auto", or a number that feedline bench measures')


def conflicting_arguments(source: SourceFile) -> Iterator[Violation]:
    """Arguments that loaders refuse together."""
    for name, call in source.calls():
        if name not in LOADERS or has_star(call):
            continue
        if is_true(argument_of(call, "shuffle", 2)) and _is_object(source, argument_of(call, "sampler", 3)):
            text = "shuffle=True and sampler= exclude each other: the loader raises ValueError"
            yield Violation(call, text, "remove shuffle=True: the sampler decides on the order")
        for argument in ("prefetch_factor", "persistent_workers"):
            if _has_no_workers(call) and constant_of(argument_of(call, argument)):
                text = f"{argument} without workers: the loader raises ValueError"
                yield Violation(call, text, f"set num_workers, or remove {argument}")


def _is_object(source: SourceFile, value: ast.expr | None) -> bool:
    """True for calls, and for names to which only calls are assigned."""
    if not isinstance(value, ast.Name):
        return isinstance(value, ast.Call)
    assigned = values_of(source, value.id)
    return bool(assigned) and all(isinstance(each, ast.Call) for each in assigned)


def undivided_ranks(source: SourceFile) -> Iterator[Violation]:
    """Shuffled loaders next to DistributedDataParallel that no rank divides."""
    if trains_in_parallel(source):
        yield from undivided_loaders(source)


def trains_in_parallel(source: SourceFile) -> bool:
    """True if every rank needs samples of its own."""
    names = {name.rpartition(".")[2] for name, _ in source.calls()}
    if names & {"prepare", "setup_dataloaders"}:  # Accelerate and Fabric add a sampler
        return False
    return bool(names & {"DistributedDataParallel", "fully_shard"}) and not _divides_samples(source)


def _divides_samples(source: SourceFile) -> bool:
    names = {name.rpartition(".")[2] for name, _ in source.calls()}
    has_sampler = any("Distributed" in name and name.endswith("Sampler") for name in names)
    return has_sampler or "distributed=" in source.text


def undivided_loaders(source: SourceFile) -> Iterator[Violation]:
    """Shuffled loaders whose samples no rank divides."""
    for name, call in source.calls() if not _divides_samples(source) else ():
        dataset = argument_of(call, "dataset", 0)
        is_shuffled = name in LOADERS and is_true(argument_of(call, "shuffle", 2)) and not has_star(call)
        if is_shuffled and dataset is not None:
            sources = [dataset, *(values_of(source, dataset.id) if isinstance(dataset, ast.Name) else ())]
            if not any(re.search("rank|world_size|shard", source.code(each)) for each in sources):
                text = "each rank reads all samples: the loader knows nothing of DistributedDataParallel"
                remedy = 'feedline.DataLoader(shuffle=True, seed=0, distributed="auto"), or a DistributedSampler'
                yield Violation(call, text, remedy)


def unguarded_spawn(source: SourceFile) -> Iterator[Violation]:
    """Scripts that spawned workers would run again."""
    if source.cell is not None or "__main__" in source.text:
        return
    spawns = any(
        (context := _start_method(name, call)) is not None and re.search("'(spawn|forkserver)'", source.code(context))
        for name, call in source.calls()
    )
    statement = next(_iterations_of_script(source), None) if spawns else None
    if statement is not None:
        text = "spawned workers import the script, and would start this loop again: they fail"
        yield Violation(statement, text, 'put it below if __name__ == "__main__":')


def _start_method(name: str, call: ast.Call) -> ast.expr | None:
    """Start method that a call sets for loaders."""
    if name in LOADERS:
        return argument_of(call, "multiprocessing_context", 11)
    return argument_of(call, "method", 0) if name.endswith("multiprocessing.set_start_method") else None


def _iterations_of_script(source: SourceFile) -> Iterator[ast.AST]:
    """Loops and calls of own functions that an import runs."""
    functions = {node.name for node in source.tree.body if isinstance(node, ast.FunctionDef)}
    for node in source.nodes:
        if any(isinstance(outer, (ast.FunctionDef, ast.Lambda, ast.ClassDef)) for outer in source.enclosing(node)):
            continue
        is_loop = isinstance(node, ast.For) and "load" in source.code(node.iter).lower()
        if is_loop or (isinstance(node, ast.Expr) and _name_called(source, node.value) in functions):
            yield node


def workers_restart(source: SourceFile) -> Iterator[Violation]:
    """Loaders whose workers end after each epoch."""
    for name, call in source.calls():
        workers = constant_of(argument_of(call, "num_workers", 5))
        is_open = argument_of(call, "persistent_workers") is None and not has_star(call)
        if name in LOADERS and isinstance(workers, int) and workers > 0 and is_open:
            yield Violation(call, "workers end with each epoch", "persistent_workers=True starts them once")


def pinned_tiny_batches(source: SourceFile) -> Iterator[Violation]:
    """Page-locked memory for tiny batches."""
    for name, call in source.calls():
        size = constant_of(argument_of(call, "batch_size", 1))
        if (
            name in LOADERS
            and isinstance(size, int)
            and size < TINY_BATCH
            and is_true(argument_of(call, "pin_memory", 7))
        ):
            text = f"pin_memory=True with batches of {size}: page-locking costs more than it saves"
            yield Violation(call, text, "remove pin_memory, or use larger batches")


def small_buffer(source: SourceFile) -> Iterator[Violation]:
    """Shuffle buffers too small to mix a stream."""
    for node in source.nodes:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "shuffle":
            continue
        size = constant_of(argument_of(node, "buffer_size", 0))
        streams = ("webdataset", "streaming=True", "wds.")
        if isinstance(size, int) and 1 < size < SMALL_BUFFER and any(word in source.text for word in streams):
            text = f"a shuffle buffer of {size} mixes only neighbors of a shard"
            yield Violation(
                node,
                text,
                f"use at least {SMALL_BUFFER:,}, or feedline.samplers.ShardShuffled over a dataset with shard_sizes",
            )


def sync_per_step(source: SourceFile) -> Iterator[Violation]:
    """`.item()` in each step, which waits for the device."""
    for node in source.nodes:
        if not isinstance(node, ast.For) or "load" not in source.code(node.iter).lower():
            continue
        if not _uses_device(source, node):
            continue
        for _, call in source.calls(node):
            is_item = isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args
            if is_item and not any(isinstance(outer, ast.If) for outer in nodes_between(source, call, node)):
                text = f"{source.code(call)} in each step waits for the device"
                yield Violation(call, text, "sum tensors on the device, and call .item() every few hundred steps")
                break


_DEVICE_WORDS = (".to(", ".cuda(", ".backward(", "model(", "net(")


def _uses_device(source: SourceFile, loop: ast.For) -> bool:
    """True if the loop moves data or calls a model."""
    text = source.code(loop)
    return any(word in text for word in _DEVICE_WORDS)


def seeding_init_fn(source: SourceFile) -> Iterator[Violation]:
    """Init functions that only seed, which feedline does by itself."""
    for function in init_functions(source):
        calls = [name for name, _ in source.calls(function)]
        if calls and all(name in SEEDS or name.startswith(("torch.initial_seed", "int")) for name in calls):
            remedy = "feedline seeds torch, numpy.random and random in each worker: remove it"
            name = getattr(function, "name", "the lambda")
            yield Violation(function, f"{name} only seeds generators", remedy)


def sharing_strategy(source: SourceFile) -> Iterator[Violation]:
    """Workarounds for torch's shared memory."""
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
    Rule("device-in-init", Severity.NOTE, device_in_init),
    Rule("swallowed-error", Severity.NOTE, swallowed_error),
    Rule("loader-per-epoch", Severity.NOTE, loader_per_epoch),
    Rule("first-batch-in-loop", Severity.BAD, first_batch_in_loop),
    Rule("list-of-objects", Severity.NOTE, list_of_objects),
    Rule("no-workers", Severity.NOTE, no_workers),
    Rule("conflicting-arguments", Severity.BAD, conflicting_arguments),
    Rule("undivided-ranks", Severity.BAD, undivided_ranks),
    Rule("unguarded-spawn", Severity.BAD, unguarded_spawn),
    Rule("workers-restart", Severity.NOTE, workers_restart),
    Rule("pinned-tiny-batches", Severity.NOTE, pinned_tiny_batches),
    Rule("small-buffer", Severity.NOTE, small_buffer),
    Rule("sync-per-step", Severity.NOTE, sync_per_step),
    Rule("torch-import", Severity.GOOD, import_of_torch),
    Rule("torch-name", Severity.GOOD, use_of_torch),
    Rule("seeding-init-fn", Severity.GOOD, seeding_init_fn),
    Rule("sharing-strategy", Severity.GOOD, sharing_strategy),
)
"""All rules. GOOD marks correct code that feedline simplifies."""
