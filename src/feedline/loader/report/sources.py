"""Libraries that datasets read with, and feedline's alternatives."""

from __future__ import annotations

import dis
import inspect
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

from torch.utils.data import ConcatDataset, Subset

from feedline.core.huggingface import is_stream


class _OwnReader(NamedTuple):
    names: tuple[str, ...]
    """Dotted names; the name of a module stands for everything in it."""
    text: str


_IN_MEMORY = "table in memory"
"""Target of a table that a dataset holds: no file is read for its samples."""


_TABLES = ("pandas", "polars", "pyarrow")


_HUGGINGFACE = "datasets"
"""Package of Hugging Face; many projects have a package of their own by this name."""


_OWN_READERS = (
    _OwnReader(("requests", "urllib", "urllib3", "httpx", "boto3", "botocore", "fsspec", "s3fs", "gcsfs", "smart_open"),
            "feedline.datasets.TarShards, or Files with cache=, reads many objects at once and keeps them"),
    _OwnReader(("sqlite3", "psycopg", "psycopg2", "sqlalchemy", "pymysql"),
            "feedline.datasets.SQLManifest reads the table once, and then whole batches"),
    # Before what decodes their members.
    _OwnReader(("tarfile", "webdataset"), "feedline.datasets.TarShards reads single members by an index"),
    _OwnReader(("zipfile",),
            "feedline.datasets.Files reads unpacked members, and TarShards single ones of a tar (feedline pack)"),
    _OwnReader(("PIL", "cv2", "torchvision.io", "imageio", "skimage", "turbojpeg"),
            "feedline.datasets.ImageFolder with feedline.transforms decodes only what a crop needs"),
    _OwnReader((_HUGGINGFACE,), "feedline.datasets.HuggingFace reads whole batches of the same table"),
    _OwnReader(("h5py", "tables"), "feedline.datasets.HDF5 reads whole batches, and each worker opens the file itself"),
    _OwnReader(("zarr",), "feedline.datasets.Zarr reads whole batches by chunk"),
    _OwnReader(("lmdb",), "feedline.datasets.LMDB reads whole batches"),
    _OwnReader(("pyarrow", "pandas", "polars", "fastparquet"),
            "feedline.datasets.Parquet reads whole batches of columns"),
    _OwnReader(("numpy.memmap", "numpy.load", "numpy.fromfile", "numpy.frombuffer"),
            "feedline.datasets.ArrayFile, or TokenFile for windows of tokens, reads whole batches without copies"),
    _OwnReader(("json", "csv", "orjson"), "feedline.datasets.JSONL and CSV read lines by an index"),
    _OwnReader((_IN_MEMORY,), "feedline.datasets.Arrays, of its columns as NumPy arrays, reads whole batches"),
)  # fmt: skip


SHOWS_CALLS = frozenset((
    "PIL", "boto3", "botocore", "datasets", "fsspec", "gcsfs", "httpx", "imageio", "json", "pandas", "requests", "s3fs",
    "skimage", "smart_open", "tarfile", "urllib", "urllib3", "webdataset", "zarr", "zipfile",
))  # fmt: skip
"""Libraries whose calls run Python code of theirs, so that a line that calls one is known by it."""


@dataclass(frozen=True, slots=True)
class SampleSource:
    """Call of a library in `__getitem__` that reads or decodes a sample."""

    call: str = ""
    """The name in the code, such as "requests.get"; empty if none is known."""
    where: str = ""
    """File and line, such as "data.py:31"."""
    own_reader: str = ""
    """feedline's own way to read the same data; empty if there is none."""
    library: str = ""
    """Top-level module of the call, such as "PIL"."""


class LineShare(NamedTuple):
    """A line of the user's code, with its share of the time."""

    share: float
    where: str
    """File and line, such as "data.py:31"."""
    text: str
    stage: str = "fetch"
    """The stage in which the line runs."""
    library: str = ""
    """Top-level module that the line calls, such as "PIL"; empty if unknown, as for calls of C code."""
    is_own: bool = True
    """False for a line of a library that no line of the user's has called."""


def source_of(dataset: Any) -> SampleSource:
    """A known library call with which a dataset reads its samples.

    Searches its methods for reading and the types of its attributes, and then what `__init__` keeps: a download there
    reads no sample. If several calls are known, the order of `_OWN_READERS` decides. Reads the code and runs none of
    it. Calls of functions in the same module are followed.
    """
    dataset = _innermost(dataset)
    if type(dataset).__module__.partition(".")[0] == "feedline" or is_stream(dataset):
        return SampleSource()
    with suppress(Exception):  # code objects of other tools may lack anything; then nothing is known
        return _known(list(_calls_of_dataset(dataset))) or _known(list(_kept_calls(dataset))) or SampleSource()
    return SampleSource()


def consumes(stream: Any) -> bool:
    """True for a stream whose samples are gone once they are read.

    All streams of feedline count, because some are live.
    """
    if type(stream).__module__.partition(".")[0] == "feedline":
        return True
    with suppress(Exception):  # code objects of other tools may lack anything; then it is left alone
        return any(call.target.partition(".")[0] in _QUEUES for call in _calls_of_dataset(stream))
    return True


_QUEUES = {
    "aiokafka", "asyncio", "boto3", "botocore", "confluent_kafka", "google", "kafka", "multiprocessing", "nats", "paho",
    "pika", "pulsar", "queue", "redis", "select", "serial", "socket", "websocket", "websockets", "zmq",
}  # fmt: skip
"""Libraries with which messages are taken from queues and connections."""


def _known(calls: Sequence[_CodeName]) -> SampleSource | None:
    """The first call of a library that feedline has a reader for."""
    for reader in _OWN_READERS:
        if reader.names == (_HUGGINGFACE,) and "datasets.arrow_dataset" not in sys.modules:
            continue
        for target, call, where in calls:
            if any(target == name or target.startswith(name + ".") for name in reader.names):
                return SampleSource(call, where, reader.text, target.partition(".")[0])
    return None


def _innermost(dataset: Any) -> Any:
    while isinstance(dataset, (Subset, ConcatDataset)):
        dataset = dataset.dataset if isinstance(dataset, Subset) else dataset.datasets[0]
    return dataset


class _CodeName(NamedTuple):
    target: str
    call: str
    where: str


def _calls_of_dataset(dataset: Any) -> Iterator[_CodeName]:
    seen: set[CodeType] = set()
    held = [value for value in vars(dataset).values() if _is_table(value)]
    for name in ("__getitems__", "__getitem__", "__iter__"):
        method = inspect.getattr_static(type(dataset), name, None)
        if isinstance(method, FunctionType):
            calls = _calls(method, dataset, seen)
            yield from (call for call in calls if not (held and _is_of_table(call, name)))
    for value in vars(dataset).values():  # objects that `__init__` has opened, and functions that it was given
        module = type(value).__module__
        if not isinstance(value, (ModuleType, FunctionType, type)) and module != "builtins":
            target = _IN_MEMORY if _is_table(value) else f"{module}.{type(value).__name__}"
            yield _CodeName(target, type(value).__name__, "")


def _kept_calls(dataset: Any) -> Iterator[_CodeName]:
    """Calls on lines of `__init__` that set an attribute."""
    method = inspect.getattr_static(type(dataset), "__init__", None)
    if not isinstance(method, FunctionType):
        return
    held = any(_is_table(value) for value in vars(dataset).values())
    instructions = dis.get_instructions(method.__code__)
    lines = {each.positions.lineno for each in instructions if each.opname == "STORE_ATTR" and each.positions}
    calls = _calls(method, dataset, set(), lines)
    yield from (call for call in calls if not (held and _is_of_table(call, "__init__")))


def _is_table(value: Any) -> bool:
    """True for rows in memory, of a library that also reads files."""
    kind = type(value)
    return kind.__module__.partition(".")[0] in _TABLES and kind.__name__ in ("DataFrame", "Series", "Table")


def _is_of_table(call: _CodeName, method: str) -> bool:
    """True for table calls that read no file for a sample."""
    library, _, name = call.target.partition(".")
    reads = name.rpartition(".")[2].startswith(("read_", "scan_"))
    return library in _TABLES and (method == "__init__" or not reads)


def _calls(
    function: FunctionType, dataset: Any, seen: set[CodeType], lines: Collection[int | None] | None = None
) -> Iterator[_CodeName]:
    """Dotted names that a function uses, resolved as far as globals go.

    With `lines`, only those on these lines.
    """
    code = function.__code__
    if code in seen or len(seen) > _MOST_FUNCTIONS:
        return
    seen.add(code)
    if lines is None:
        yield from _imports(code)
    for name, line in _dotted_names(code):
        if lines is not None and line not in lines:
            continue
        value, target = _resolve(function.__globals__, dataset, name)
        if isinstance(value, FunctionType) and value.__module__ == function.__module__:
            yield from _calls(value, dataset, seen)
        elif target:
            yield _CodeName(target, name, f"{code.co_filename.rpartition('/')[2]}:{line}")


_MOST_FUNCTIONS = 40


def _imports(code: CodeType) -> Iterator[_CodeName]:
    """Modules that a function imports itself."""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            line = instruction.positions.lineno if instruction.positions else code.co_firstlineno
            yield _CodeName(instruction.argval, instruction.argval, f"{code.co_filename.rpartition('/')[2]}:{line}")


def _dotted_names(code: CodeType) -> Iterator[tuple[str, int]]:
    """Names such as `np.load`, with their lines."""
    name, line = "", code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno:
            line = instruction.positions.lineno
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and name:
            name = f"{name}.{instruction.argval}"
            continue
        if name:
            yield name, line
        is_name = instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FAST")
        name = instruction.argval if is_name else ""
    if name:
        yield name, line


def _resolve(variables: dict[str, Any], dataset: Any, name: str) -> tuple[Any, str]:
    """The value of a dotted name, and the name with its module."""
    first, *rest = name.split(".")
    value = type(dataset) if first == "self" else variables.get(first)
    for part in rest:
        if value is None:
            break
        # Not getattr, which runs properties and __getattr__ of the user's.
        is_module = isinstance(value, ModuleType)
        value = vars(value).get(part) if is_module else inspect.getattr_static(value, part, None)
    owner = variables.get(first)
    if isinstance(owner, ModuleType):
        return value, ".".join([owner.__name__, *rest])
    is_named = isinstance(owner, type | FunctionType | BuiltinFunctionType)
    module = (owner.__module__ if is_named else type(owner).__module__) or ""
    if owner is None or module == "builtins":
        return value, ""
    return value, ".".join([module, owner.__name__ if is_named else first, *rest]) if module else ""


def shards_itself(stream: Any) -> bool:
    """True for an iterable dataset that divides itself among the workers.

    It has partitions, or its code calls `get_worker_info`. Streams of other libraries count, too.
    """
    if hasattr(stream, "num_partitions") or is_stream(stream) or type(stream).__module__.startswith("webdataset."):
        return True
    with suppress(Exception):  # code objects of other tools may lack anything; then workers are not advised
        seen: set[CodeType] = set()
        names = [each.call for each in _calls(type(stream).__iter__, stream, seen)]
        return any("get_worker_info" in name for name in names)
    return False
