"""Index files: arrays computed once from a file or object, then mapped.

`SideCar` is the index file of one file or object. `MetadataCache` keeps metadata of many files and objects by address
and version. `indexes_of` finds or builds the side-cars of a set of files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import PerProcess
from feedline.core.paths import user_cache
from feedline.core.threads import DaemonPool
from feedline.datasets import array_container as files
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.errors import SampleError, StateError
from feedline.stores import AccessDeniedError, CachedStore, ObjectInfo, ObjectNotFoundError
from feedline.stores.files import Blob, FileSet, LocalFile, RemoteBlob
from feedline.stores.urls import scheme_of

_log = logging.getLogger("feedline")


Columns = Mapping[str, NDArray[np.integer[Any]]]


State = list[int | str] | tuple[int | str, ...]


class SideCarWarning(RuntimeWarning):
    """An index could not be written, and is computed again each time."""


class SideCar:
    """Arrays that `build()` computes from a file or object, stored at `path`.

    `source` is the file, or a state that changes with the object. A side-car that is missing, damaged or of another
    state is rewritten atomically. If it cannot be written, a warning is issued and the arrays stay in memory. Pickles
    as its path, without the ability to rebuild; as arrays where there is no file.
    """

    def __init__(self, path: Pathlike, source: Pathlike | State, build: Callable[[], Columns]) -> None:
        self._path = str(Path(path).absolute())
        self._stamp = stamp(source) if isinstance(source, (str, os.PathLike)) else [*source]
        self._build: Callable[[], Columns] | None = build
        self._held: Columns | None = None
        self._arrays: Columns | None = None
        shapes = _kept(self._path, self._stamp)
        self.shapes = self._made(build) if shapes is None else shapes

    @property
    def arrays(self) -> Columns:
        """The arrays, mapped on first use; StateError if the side-car changed."""
        arrays = self._arrays
        if arrays is None:
            arrays = self._arrays = self.opened()  # two threads may both have mapped them: either result serves
        return arrays

    def opened(self) -> Columns:
        """Map the arrays on each call, so that few side-cars stay open."""
        if self._held is not None:
            return self._held
        try:
            found = files.opened(self._path)
        except OSError as error:
            raise self._lost() from error
        except SampleError as error:
            return self._mended(error)
        if found.told.get("stamp") != self._stamp:
            raise self._lost()
        return found.arrays

    def renew(self) -> None:
        """Compute the arrays again; only in the process that created the side-car."""
        assert self._build is not None
        self.shapes, self._arrays = self._made(self._build), None

    def _mended(self, damage: SampleError) -> Columns:
        """Rebuild a damaged side-car; StateError without `build`."""
        if self._build is None:
            raise StateError(f"the index {damage}; remove it, and make the dataset anew") from damage
        _tell(self._path, damage)
        before = self.shapes
        self.renew()
        if self.shapes != before:
            raise self._lost()
        return files.opened(self._path).arrays if self._held is None else self._held

    def _lost(self) -> StateError:
        return StateError(f"the index {self._path} was removed or replaced while a dataset used it; make it anew")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None, "_build": None}

    def _made(self, build: Callable[[], Columns]) -> dict[str, tuple[int, ...]]:
        """Compute and store the arrays; their shapes."""
        arrays = build()
        self._keep(arrays)
        return {name: array.shape for name, array in arrays.items()}

    def _keep(self, arrays: Columns) -> None:
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            files.write(self._path, files.packed({"stamp": self._stamp}, arrays))
        except OSError as error:
            warnings.warn(
                f"the index {self._path} could not be written ({error.strerror}), so that it is worked out again each"
                " time; give index_dir=, a folder that can be written to",
                SideCarWarning,
                stacklevel=2,
            )
            self._held = arrays


def stamp(source: Pathlike) -> list[int | str]:
    """Size and modification time of a file."""
    found = os.stat(source)  # noqa: PTH116 - asked for every shard
    return [found.st_size, found.st_mtime_ns]


def _kept(path: str, wanted: list[int | str]) -> dict[str, tuple[int, ...]] | None:
    """Shapes of the arrays in a matching side-car, else None."""
    try:
        table = files.table_of(path)
    except OSError:
        return None
    except SampleError as error:
        _tell(path, error)
        return None
    if table.told.get("stamp") != wanted:
        return None
    return {name: place.shape for name, place in table.arrays.items()}


def _tell(path: str, damage: SampleError) -> None:
    _log.warning("feedline: the index %s is made anew (%s)", path, damage)


_KEY_NBYTES = 16


Description = bytes | memoryview


def key_of(name: str, info: ObjectInfo) -> bytes | None:
    """Key of a file's or object's current state; None without a version."""
    if not info.is_versioned:
        return None
    text = f"{name}\0{info.version}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=_KEY_NBYTES).digest()


def place_of(kind: str, given: Iterable[str], index_dir: Pathlike | None) -> str:
    """Path of the metadata file for these paths and addresses.

    It lies in `index_dir`, or in the user's cache folder.
    """
    if index_dir is None:
        index_dir = user_cache("descriptions")
    named = hashlib.blake2b("\0".join([kind, *given]).encode("utf-8", "surrogateescape"), digest_size=_KEY_NBYTES)
    return str(Path(index_dir, f"{kind}-{named.hexdigest()}.index").absolute())


class MetadataCache:
    """Bytes by key in one file, mapped on first use.

    A missing or damaged file is an empty mapping. Other processes may replace the file at any time, so an entry may
    disappear. Pickles as its path. If the file cannot be written, a warning is issued and this process keeps the
    entries in memory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._held: Mapping[bytes, Description] = {}
        self._mapped = PerProcess(_MappedMetadata)

    def get(self, key: bytes | None) -> Description | None:
        """The entry of a key, or None."""
        if key is None:
            return None
        held = self._held.get(key)
        return self._mapped().of(self.path).get(key) if held is None else held

    def replace(self, found: Mapping[bytes | None, Description]) -> None:
        """Replace all entries; those without a key are dropped."""
        described = {key: each for key, each in found.items() if key is not None}
        if not described:
            return
        data = [np.frombuffer(each, np.uint8) for each in described.values()]
        bounds = np.cumsum([0, *map(len, data)]).astype("<u8")
        keys = np.frombuffer(b"".join(described), np.uint8)
        whole = np.concatenate(data) if data else np.empty(0, np.uint8)
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            files.write(self.path, files.packed({}, {"keys": keys, "bounds": bounds, "data": whole}))
        except OSError as error:
            warnings.warn(
                f"the index {self.path} could not be written ({error.strerror}), so that it is worked out again each"
                " time; give index_dir=, a folder that can be written to",
                SideCarWarning,
                stacklevel=2,
            )
            self._held = described
        self._mapped().forget()

    def __reduce__(self) -> tuple[type[MetadataCache], tuple[str]]:
        return MetadataCache, (self.path,)


class _MappedMetadata:
    """The file as mapped by this process."""

    def __init__(self) -> None:
        self._entries: dict[bytes, memoryview] | None = None

    def of(self, path: str) -> dict[bytes, memoryview]:
        entries = self._entries
        if entries is None:
            entries = self._entries = _entries(path)  # two threads may both have mapped it: either result serves
        return entries

    def forget(self) -> None:
        self._entries = None


def _entries(path: str) -> dict[bytes, memoryview]:
    with suppress(OSError, SampleError, KeyError):
        found = files.opened(path).arrays
        keys, bounds, data = found["keys"].tobytes(), found["bounds"].tolist(), found["data"].data
        if len(keys) == _KEY_NBYTES * (len(bounds) - 1) and bounds == sorted(bounds) and bounds[-1] <= len(data):
            starts = range(0, len(keys), _KEY_NBYTES)
            return {
                keys[at : at + _KEY_NBYTES]: data[bounds[number] : bounds[number + 1]]
                for number, at in enumerate(starts)
            }
    return {}


_INDEXED_AT_ONCE = 8
"""Each holds a few parts of its object in memory."""


class IndexRecipe(NamedTuple):
    """The way in which the files of one format are indexed."""

    name: Callable[[str], str]
    """Maps a file name to the name of its side-car."""
    scan: Callable[[Blob], Columns]
    """Computes the arrays from the content."""
    fits: Callable[[Blob, Columns], bool]
    """Checks, by a few reads, that arrays of another origin match the content."""


def indexes_of(blobs: FileSet, kind: IndexRecipe, index_dir: Pathlike | None) -> list[SideCar]:
    """The side-car of each blob, built where none matches.

    Side-cars of files lie next to them or in `index_dir`; those of objects in `index_dir` or the user's cache folder.
    A matching side-car next to an object is copied.
    """
    index = partial(_index, blobs, kind, index_dir)
    if blobs.is_local:
        return [index(number) for number in range(len(blobs))]
    with DaemonPool(_INDEXED_AT_ONCE, "feedline-index") as pool:
        return list(pool.map(index, range(len(blobs))))


def _index(blobs: FileSet, kind: IndexRecipe, index_dir: Pathlike | None, number: int) -> SideCar:
    info, address = blobs.info(number), blobs.name(number)
    name = kind.name(address.rpartition("/")[2])
    is_file = scheme_of(address) == "file"
    if is_file and index_dir is None:
        place = Path(address).with_name(name)
    else:  # names are told apart by where they come from
        key = hashlib.blake2b(address.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
        place = Path(index_dir or user_cache("indexes"), f"{key}-{name.lstrip('.')}")
    work = partial(_of_file, info, kind) if is_file else partial(_of_object, blobs, kind, number)
    if key_of(address, info) is None:  # it may have changed without a sign: what was kept of it is not used
        return SideCar(place, (info.size, uuid4().hex), work)
    return SideCar(place, (info.size, info.version), work)


def _of_file(info: ObjectInfo, kind: IndexRecipe) -> Columns:
    return kind.scan(LocalFile(info.path, info.size, info.version))  # opened for this only: there may be too many


def _of_object(blobs: FileSet, kind: IndexRecipe, number: int) -> Columns:
    blob = blobs[number]
    assert isinstance(blob, RemoteBlob)
    folder, _, name = blob.path.rpartition("/")
    beside = kind.name(name)
    found = _found(blob, f"{folder}/{beside}".lstrip("/"))
    if found is not None and kind.fits(blob, found):
        return found
    _log.info(
        "indexing %s: all its %d bytes are read once; with its index, %s, beside it they need not be",
        *(blob.name, blob.nbytes, beside),
    )
    return kind.scan(blob)


def _found(blob: RemoteBlob, path: str) -> Columns | None:
    """The arrays in the side-car next to an object, if it exists."""
    store = blob.store.store if isinstance(blob.store, CachedStore) else blob.store  # it is kept as a side-car anyway
    try:
        data = store.read(path)
    except (ObjectNotFoundError, AccessDeniedError):  # who may not list a bucket is told so of what is not there
        return None
    with TemporaryDirectory(prefix="feedline-") as scratch:
        place = Path(scratch, "index")
        place.write_bytes(data)
        try:
            found = files.opened(str(place))  # stays mapped when the file is gone
        except SampleError:
            return None
    told = found.told.get("stamp")
    return found.arrays if isinstance(told, list) and told[:1] == [blob.nbytes] else None
