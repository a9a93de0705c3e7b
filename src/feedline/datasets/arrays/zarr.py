"""`Zarr`: rows of the arrays in a Zarr store, local or remote.

zarr reads folders and remote stores through feedline's `Store`, so that retries, caching and errors are the same as for
other formats.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import product
from pathlib import Path
from threading import Lock
from time import monotonic_ns
from types import new_class
from typing import Any, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike, missing_error
from feedline.core.stage_parts import READ_FILES, read_part
from feedline.core.threads import DaemonPool
from feedline.datasets.arrays.chunked import (
    ArrayRows,
    ArraySource,
    ChunkCache,
    ChunkedRows,
    Names,
    Shape,
    check_unchanged,
)
from feedline.datasets.arrays.records import delivered_dtype
from feedline.datasets.arrays.stored_arrays import CHUNK_CACHE_NBYTES, StoredArrays
from feedline.datasets.arrays.zarr_checks import with_checked_frames
from feedline.datasets.content_digest import digest_of_folder, digest_of_objects, versioned
from feedline.datasets.decoding import DAMAGE
from feedline.datasets.formats import ShardSummary
from feedline.datasets.paths import Paths, find, paths_of
from feedline.datasets.shard_summaries import summarize_arrays
from feedline.errors import ArgumentError, SampleError
from feedline.stores import (
    Cache,
    CachedStore,
    ObjectNotFoundError,
    ObjectRange,
    RangeError,
    Store,
    StoreError,
    open_store,
)
from feedline.stores.base import Range
from feedline.stores.cache import cache_of
from feedline.stores.files import FileSet
from feedline.stores.local import LocalStore
from feedline.stores.urls import is_local, local_path, scheme_row

T = TypeVar("T")


_OTHER_FORMATS = {
    "attributes.json": ("an N5 container", "driver 'n5' to 'zarr3'"),
    "manifest.ocdbt": ("a database of tensorstore", "kvstore 'ocdbt' to 'file'"),
}
"""Other stores of arrays, by an object at their root, each with a driver for a copy."""


def library() -> Any:
    """The zarr module; MissingExtraError without it."""
    return optional.load("zarr", "zarr", "datasets.Zarr")


def adapt_store(store: Store) -> Any:
    """A zarr store that reads the objects of `store`, many at once."""
    return _store_class()(store)


# zarr is an optional dependency, so its base class is not available on import.
@cache
def _store_class() -> Any:
    return new_class("ObjectStore", (_StoreAdapter, _abc().Store))


def _abc() -> Any:
    return optional.load("zarr.abc.store", "zarr", "datasets.Zarr")


class _ReadClock:
    """Time of reads that overlap, and the bytes read.

    Reads run in threads whose parts of stages are not timed.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._elapsed_ns = self._began_ns = self._running = 0
        self._lock = Lock()

    def __enter__(self) -> None:
        with self._lock:
            self._began_ns = self._began_ns if self._running else monotonic_ns()
            self._running += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._running -= 1
            self._elapsed_ns += 0 if self._running else monotonic_ns() - self._began_ns

    def count(self, nbytes: int) -> None:
        """Count bytes of a read."""
        with self._lock:
            self.nbytes += nbytes

    def elapsed_ns(self) -> int:
        """Time until now."""
        with self._lock:
            return self._elapsed_ns + (monotonic_ns() - self._began_ns if self._running else 0)


class _StoreAdapter:
    """Implementation of zarr's abstract store over a feedline `Store`.

    zarr runs one event loop for all calls, so blocking calls run in threads.
    """

    supports_writes = supports_deletes = False
    supports_listing = True

    def __init__(self, store: Store) -> None:
        super().__init__(read_only=True)  # type: ignore[call-arg] # zarr's class is next in the MRO
        self.store = store
        self.clock = _ReadClock()
        self._readers = DaemonPool(thread_name_prefix="feedline-zarr")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _StoreAdapter) and other.store is self.store

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """Value of a key, or None."""
        data = await self._run_in_thread(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
        """Parts of several values."""
        return await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges))

    async def exists(self, key: str) -> bool:
        """True if the key exists."""
        return await self._run_in_thread(self._exists, key)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Keys with this prefix."""
        for key in await self._run_in_thread(self._keys, prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names directly below a folder."""
        for name in await self._run_in_thread(self._names, prefix.strip("/")):
            yield name

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self.list_prefix("")

    async def set(self, key: str, value: Any) -> None:
        """Not called by zarr: the store is read-only."""
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        """Not called by zarr: the store is read-only."""
        raise NotImplementedError

    async def _run_in_thread(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._readers.submit(call, *arguments))

    def _read(self, key: str, wanted: Any) -> memoryview | None:
        try:
            with self.clock:
                data = self.store.read(key) if wanted is None else self._read_range(key, wanted)
                self.clock.count(len(data))
            return data
        except ObjectNotFoundError:  # a chunk never written, or metadata of the other format version
            return None

    def _read_range(self, key: str, wanted: Any) -> memoryview:
        if isinstance(wanted, _abc().SuffixByteRequest):
            size = self.store.size(key)
            return self.store.read(key, max(0, size - wanted.suffix), size)
        if isinstance(wanted, _abc().OffsetByteRequest):
            return self.store.read(key, wanted.offset)
        try:
            return self.store.read(key, wanted.start, wanted.end)
        except RangeError:  # zarr's ranges may reach beyond the end of the object
            return self.store.read(key, wanted.start)

    def _exists(self, key: str) -> bool:
        try:
            self.store.info(key)
        except ObjectNotFoundError:
            return False
        return True

    def _names(self, folder: str) -> tuple[str, ...]:
        if isinstance(self.store, LocalStore):
            # Not `list`, which would visit every chunk of every array.
            path = Path(self.store.url, folder)
            return tuple(os.listdir(path)) if path.is_dir() else ()  # noqa: PTH208 - names
        prefix = f"{folder}/" if folder else ""
        return tuple(dict.fromkeys(key.removeprefix(prefix).partition("/")[0] for key in self._keys(prefix)))

    def _keys(self, prefix: str) -> tuple[str, ...]:
        return tuple(info.path for info in self.store.list(prefix))


_READERS = 16
"""Fewer than for reads alone: these threads decode, too, and more of them made batches a tenth slower."""


class Zarr(StoredArrays):
    """Rows along the first axis of the arrays in Zarr stores.

    `paths` is a path or an address, or a list of these; several stores are concatenated. A store has format version 2
    or 3, and is a folder or a `.zip`. `columns` is one name, a sequence, or names by key; None takes every array at the
    top level, or the store itself if it is an array. Chunks (with sharding, shards) are decoded whole, and each process
    keeps the last `cache_nbytes` of them. Each process opens the stores itself, on first use. Numbers become tensors,
    times int64 counts of their unit, records dicts of their fields, strings `str`. `transform(sample)` or
    `transform(sample, rng)` is applied to each sample.

    From a remote store, the chunks of a batch are fetched concurrently and kept in the folder `cache` if one is given
    (a `.zip` needs one). `options` are passed to `open_store`.

    SampleError names a store that is damaged, and the rows of a damaged chunk.
    """

    def _find(
        self, paths: Paths, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
    ) -> Sequence[ArraySource]:
        self._sources = [_ZarrSource(os.fspath(path), cache, options) for path in paths_of(paths)]
        if not self._sources:
            raise FileNotFoundError("no stores: the list of paths is empty")
        return self._sources

    @property
    def content_fingerprint(self) -> str:
        """Digest of the stores' current content, for cached results.

        Computed from a `stat` of each local file, or from the listing of a remote store.
        """
        return digest_of([source.content_fingerprint() for source in self._sources])


class _ZarrSource:
    """A Zarr store: a folder or `.zip`, on this machine or remote.

    zarr opens a `.zip` itself; a remote one is a file in the cache.
    """

    def __init__(self, address: str, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None) -> None:
        self._zip: FileSet | None = None
        self._store: Store | None = None
        if is_local(address):
            self.name = str(Path(local_path(address)).resolve())
            self._store = None if Path(self.name).is_file() else LocalStore(self.name)
        elif address.endswith(".zip"):
            self._zip = find(address, "*.zip", cache=cache, options=options)
            self.name = self._zip.name(0)
        else:
            self._store = open_store(address, cache=cache, options=options)
            self.name = self._store.url

    @property
    def is_remote(self) -> bool:
        return self._store is not None and not isinstance(self._store, LocalStore)

    def content_fingerprint(self) -> str:
        if self._zip is not None:
            return versioned(self._zip.info(0)).version
        store = self._store if self.is_remote else None
        return digest_of_folder(self.name) if store is None else digest_of_objects(store)

    def all_names(self) -> Names:
        node = self._root()
        return "" if isinstance(node, library().Array) else {name: name for name in _array_names(node, self.name)}

    def shapes(self, names: Sequence[str]) -> list[Shape]:
        node = self._root()
        return [_shape(_array(node, name, self.name), name, self.name) for name in names]

    def rows(self, shapes: Sequence[Shape], cache: ChunkCache) -> list[ArrayRows | ChunkedRows]:
        node = self._root()
        return [self._rows(_reopen_array(node, shape, self.name), shape, cache) for shape in shapes]

    def _root(self) -> Any:
        """Group or array at the root of the store, open for reading."""
        place = self.name if self._zip is None else self._zip.local_path(0)
        if not (self.is_remote or Path(place).exists()):
            raise missing_error(place, "no such store")
        return _open_root(place if self._store is None else adapt_store(self._store), self.name)

    def _rows(self, array: Any, shape: Shape, cache: ChunkCache) -> ArrayRows | ChunkedRows:
        chunks = _ZarrChunks(self._store if self.is_remote else None, with_checked_frames(array))
        return ChunkedRows(self.name, shape, chunks.read, cache, chunks.ranges if self.is_remote else None)


class _ZarrChunks:
    """Chunks of an array; remote arrays are read concurrently.

    Their objects are known by key, so that a prefetch needs no request to find them.
    """

    def __init__(self, store: Store | None, array: Any) -> None:
        self._store, self._array = store, array
        # zarr's own store for a `.zip` measures no time.
        self._clock = getattr(array.store, "clock", None) or _ReadClock()
        self._part = READ_FILES if store is None else read_part(store.url)
        self._sizes = getattr(array, "shards", None) or array.chunks
        # Each process opens the store itself, as it opens all rows, because threads do not survive a fork.
        self._readers = DaemonPool(_READERS, "feedline-chunks")

    def read(self, spans: Sequence[Range]) -> Iterator[NDArray[Any]]:
        found = iter(map(self._rows, spans) if self._store is None else self._readers.map(self._rows, spans))
        while (rows := self._next(found)) is not None:
            yield rows

    def _next(self, found: Iterator[NDArray[Any]]) -> NDArray[Any] | None:
        """The next rows; reads in other threads do not count as decoding."""
        began_ns, read_ns, nbytes = monotonic_ns(), self._clock.elapsed_ns(), self._clock.nbytes
        rows = next(found, None)
        read_ns = min(self._clock.elapsed_ns() - read_ns, monotonic_ns() - began_ns)
        self._part.claim(read_ns, self._clock.nbytes - nbytes)
        return rows

    def _rows(self, span: Range) -> NDArray[Any]:
        return np.asarray(self._array[slice(*span)])

    def ranges(self, spans: Sequence[Range]) -> list[tuple[CachedStore, ObjectRange]]:
        cache = cache_of(self._store)
        if cache is None:
            return []
        return [(cache, ObjectRange(key)) for span in spans for key in self._keys(*span)]

    def _keys(self, start: int, stop: int) -> Iterator[str]:
        first, *others = zip(self._array.shape, self._sizes, strict=True)
        numbers = [range(start // first[1], -(-stop // first[1]))]
        numbers += [range(-(-length // size)) for length, size in others]
        beginning = f"{self._array.path}/" if self._array.path else ""
        for place in product(*numbers):
            yield beginning + self._array.metadata.encode_chunk_key(place)


def _open_root(source: Any, name: str) -> Any:
    zarr = library()
    try:
        return zarr.open(zarr.storage.ZipStore(source, mode="r") if isinstance(source, str) else source, mode="r")
    except StoreError:
        raise
    except (*DAMAGE, RuntimeError, BadZipFile) as error:
        _check_format(source, name)
        raise SampleError(
            f"{name} cannot be opened as a Zarr store ({type(error).__name__}: {error}); was it written completely?"
        ) from error


def _check_format(source: Any, name: str) -> None:
    """Raise SampleError for a store of another format."""
    if isinstance(source, str):
        return
    for key, (what, driver) in _OTHER_FORMATS.items():
        with suppress(StoreError):
            source.store.info(key)
            raise SampleError(
                f"{name} is {what}, not a Zarr store; copy its arrays into one, such as with tensorstore ({driver})"
            )


def _array_names(group: Any, path: str) -> list[str]:
    try:
        return sorted(group.array_keys())
    except StoreError as error:
        if type(error) is StoreError and not scheme_row(path).lists:
            raise ArgumentError(
                f"the arrays of {path} cannot be listed on a web server: name those to read with columns=, or"
                " consolidate the metadata"
            ) from None
        raise
    except (*DAMAGE, RuntimeError) as error:
        raise SampleError(
            f"the arrays of {path} cannot be listed, because one of them cannot be opened"
            f" ({type(error).__name__}: {error}); name the arrays to read with columns="
        ) from error


def _describe_arrays(node: Any, path: str) -> str:
    if isinstance(node, library().Array):
        return "it has itself (columns=None)"
    try:
        return f"it has {', '.join(_array_names(node, path)) or 'none'}"
    except ArgumentError:
        return "its other arrays cannot be listed on a web server"


def _array(node: Any, name: str, path: str) -> Any:
    """Array `name` of the store; "" is the store itself."""
    zarr = library()
    is_array = isinstance(node, zarr.Array)
    if is_array and name == "":
        return node
    try:
        item = None if is_array else node[name]
    except KeyError:
        item = None
    except StoreError:
        raise
    except (*DAMAGE, RuntimeError) as error:
        raise SampleError(
            f"{name!r} in {path} cannot be opened ({type(error).__name__}: {error}); if its codec is in a separate"
            " package, install that package; codecs that use pickle are refused. Otherwise name other arrays"
        ) from error
    if not isinstance(item, zarr.Array):
        raise ArgumentError(f"{path} has no array {name!r}; {_describe_arrays(node, path)}")
    return item


def _reopen_array(node: Any, shape: Shape, path: str) -> Any:
    """Open an array again; StateError if its shape has changed."""
    array = _array(node, shape.name, path)
    check_unchanged(path, shape, array.shape[0], array.shape[1:])
    return array


def _shape(array: Any, name: str, path: str) -> Shape:
    if not array.shape:
        raise ArgumentError(f"{name!r} in {path} is a single value; the first axis of an array counts its samples")
    chunks = getattr(array, "shards", None) or array.chunks  # a shard is one object with several chunks
    return Shape(name, array.shape[0], array.shape[1:], _number_dtype(array, name, path), max(1, chunks[0]))


def _number_dtype(array: Any, name: str, path: str) -> np.dtype[Any] | None:
    """Delivered dtype of the rows; None for strings."""
    dtype: np.dtype[Any] = np.dtype(array.dtype)
    if dtype.kind in "OTUS":
        return None
    try:
        return delivered_dtype(dtype)
    except TypeError as error:
        raise ArgumentError(
            f"{name!r} in {path} holds {error}, which torch does not support; name other arrays"
        ) from None


def summarize_chunks(paths: Sequence[str]) -> ShardSummary:
    """Chunks of Zarr stores."""
    return summarize_arrays(Zarr, paths, CHUNK_CACHE_NBYTES)
