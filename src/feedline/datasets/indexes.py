"""Index files: arrays computed once from a file or object, then mapped.

`IndexFile` is the one class that reads and writes files of such arrays. `BuiltIndex` is the index file of one file or
object, `MetadataCache` one with metadata of many. `indexes_of` finds or builds the indexes of a set of files.
`index_path` gives the path of an index on this machine, and `read_adjacent` reads one next to an object. Formats only
define the arrays.
"""

from __future__ import annotations

import hashlib
import logging
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import PerProcess
from feedline.core.paths import Pathlike, folder_path, user_cache
from feedline.core.threads import INDEX_THREADS, DaemonPool
from feedline.datasets import array_container as files
from feedline.errors import SampleError, StateError
from feedline.stores import ObjectInfo, ObjectNotFoundError
from feedline.stores.files import File, FileSet, RemoteFile
from feedline.stores.urls import is_local, join

_log = logging.getLogger("feedline")


Columns = Mapping[str, NDArray[np.integer[Any]]]


Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of the arrays of an index."""


T = TypeVar("T", files.ArrayTable, files.NamedArrays)


class IndexFileWarning(RuntimeWarning):
    """An index could not be written, and is computed again each time."""


class IndexFile:
    """A file of arrays that can be built again at any time.

    `about` identifies the described object and its state. It is stored with the arrays. For `find`, a file that is
    missing, damaged or about something else counts as absent; `open` leaves that decision to the caller. Writing
    replaces the file as a whole: a process that has mapped the older file keeps it.
    """

    def __init__(self, path: Pathlike, about: Mapping[str, Any] = MappingProxyType({})) -> None:
        self.path = str(Path(path).absolute())
        self._about = dict(about)

    def open(self) -> files.NamedArrays:
        """Map the arrays, without a check of their origin.

        FileNotFoundError if there is no file, SampleError if it is damaged.
        """
        return files.open_mapped(self.path)

    def read_table(self) -> files.ArrayTable:
        """Read the table of the arrays, with one small read.

        Raises the errors of `open`.
        """
        return files.read_table(self.path)

    def describes(self, stored: files.ArrayTable | files.NamedArrays) -> bool:
        """True if stored arrays describe the same object in the same state."""
        return {name: stored.metadata.get(name) for name in self._about} == self._about

    def find(self) -> files.NamedArrays | None:
        """Map the arrays; None if the file is absent. Damage is logged."""
        return self._find(self.open)

    def find_table(self) -> files.ArrayTable | None:
        """Read the table of the arrays; None if the file is absent."""
        return self._find(self.read_table)

    def save(self, arrays: Columns) -> None:
        """Replace the file; OSError if that is impossible."""
        files.write(self.path, self._about, arrays)

    def write(self, arrays: Columns) -> bool:
        """Replace the file; False, with an IndexFileWarning, if that is impossible."""
        try:
            self.save(arrays)
        except OSError as error:
            warnings.warn(
                f"the index {self.path} could not be written ({error.strerror}), so it is computed again each time;"
                " give index_dir=, a writable folder",
                IndexFileWarning,
                stacklevel=3,
            )
            return False
        return True

    def _find(self, read: Callable[[], T]) -> T | None:
        try:
            stored = read()
        except OSError:
            return None
        except SampleError as damage:
            self._log_rebuild(damage)
            return None
        return stored if self.describes(stored) else None

    def _log_rebuild(self, damage: SampleError) -> None:
        _log.warning("feedline: the index %s is built again (%s)", self.path, damage)


def index_path(address: str, name: str, index_dir: Pathlike | None) -> str:
    """Path of the index of a file or object, by its address.

    It is in `index_dir`, or in the user's cache folder. Files of one name may come from several folders, so a digest
    of the address is part of the name.
    """
    key = hashlib.blake2b(address.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    return str(_index_folder(index_dir, "indexes") / f"{key}-{name.lstrip('.')}")


def read_adjacent(file: File, name: str) -> files.NamedArrays:
    """Read the index `name` next to an object; ObjectNotFoundError without one."""
    return files.parse(bytes(file.read_adjacent(name)), join(file.name.rpartition("/")[0], name))


class BuiltIndex(IndexFile):
    """The index file of one file or object.

    `build()` computes its arrays from the content, and `state` is the state of the file or object. An absent index is
    built at once. If it cannot be written, the arrays stay in memory. Pickles as its path, without `build`, or as
    arrays if there is no file.
    """

    def __init__(self, path: Pathlike, state: tuple[int, str], build: Callable[[], Columns]) -> None:
        super().__init__(path, {"stamp": [*state]})
        self._build: Callable[[], Columns] | None = build
        self._in_memory: Columns | None = None
        self._arrays: Columns | None = None
        table = self.find_table()
        self.shapes: Shapes = self._build_and_store(build) if table is None else table.shapes

    @property
    def arrays(self) -> Columns:
        """The arrays, mapped on first use; StateError if the file changed."""
        arrays = self._arrays
        if arrays is None:
            arrays = self._arrays = self.open_arrays()  # no lock: if two threads map it, either result is valid
        return arrays

    def open_arrays(self) -> Columns:
        """Map the arrays on each call, so that few files stay open."""
        if self._in_memory is not None:
            return self._in_memory
        try:
            stored = self.open()
        except OSError as error:
            raise self._lost_error() from error
        except SampleError as error:
            return self._repair(error)
        # Another process may have replaced the index, whose rows would then differ from the counted ones.
        if not self.describes(stored):
            raise self._lost_error()
        return stored.arrays

    def renew(self) -> None:
        """Compute the arrays again; only in the process that created the index."""
        assert self._build is not None
        self.shapes, self._arrays = self._build_and_store(self._build), None

    @property
    def _fingerprint(self) -> str:
        """The state of the file that the arrays describe, for `fingerprints.fingerprint`."""
        return str(self._about)

    def _repair(self, damage: SampleError) -> Columns:
        """Rebuild a damaged index; StateError without `build`."""
        if self._build is None:
            raise StateError(f"the index {damage}; remove it, and create the dataset again") from damage
        self._log_rebuild(damage)
        before = self.shapes
        self.renew()
        if self.shapes != before:
            raise self._lost_error()
        return self.open().arrays if self._in_memory is None else self._in_memory

    def _lost_error(self) -> StateError:
        return StateError(
            f"the index {self.path} was removed or replaced while a dataset used it; create the dataset again"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None, "_build": None}

    def _build_and_store(self, build: Callable[[], Columns]) -> Shapes:
        """Compute and store the arrays; returns their shapes."""
        arrays = build()
        if not self.write(arrays):
            self._in_memory = arrays
        return {name: array.shape for name, array in arrays.items()}


_KEY_NBYTES = 16
_NAME_NBYTES = 8


Description = bytes | memoryview


def key_of(name: str, info: ObjectInfo) -> bytes | None:
    """Key of the current state of a file or object.

    None without a version. Keys of all versions of a name begin with the same `_NAME_NBYTES`.
    """
    if not info.is_versioned:
        return None
    sizes = (_NAME_NBYTES, _KEY_NBYTES - _NAME_NBYTES)
    texts = (text.encode("utf-8", "surrogateescape") for text in (name, info.version))
    return b"".join(hashlib.blake2b(text, digest_size=size).digest() for text, size in zip(texts, sizes, strict=True))


def metadata_path(kind: str, given: Iterable[str], index_dir: Pathlike | None) -> str:
    """Path of the metadata file for these paths and addresses.

    It is in `index_dir`, or in the user's cache folder.
    """
    named = hashlib.blake2b("\0".join([kind, *given]).encode("utf-8", "surrogateescape"), digest_size=_KEY_NBYTES)
    return str(_index_folder(index_dir, "descriptions") / f"{kind}-{named.hexdigest()}.index")


def _index_folder(index_dir: Pathlike | None, kind: str) -> Path:
    """The given folder, or that of a kind in the user's cache."""
    return Path(user_cache(kind)).absolute() if index_dir is None else folder_path(index_dir, "index_dir")


_SIMILAR = 8
"""Least number of files for which the first is read before the others, to estimate the size of their metadata."""


_LEARNED = 15
"""Number of latest footers from which the length of the next one is estimated."""


class FooterRead:
    """Bytes to read first from the ends of files with similar footers.

    `most` until the length of a footer is known. Each rank reads the footers of all files, so on many ranks these bytes
    weigh more than their share of the data. A longer footer needs a second request. The learned length is not pickled,
    because it is not a property of a dataset.
    """

    def __init__(self, most: int) -> None:
        self.nbytes, self._most, self._latest = most, most, tuple[int, ...]()

    def learn(self, footer_nbytes: int) -> None:
        """Record the length of a footer."""
        # No lock: a length that another thread adds at the same time may be lost.
        self._latest = (*self._latest[1 - _LEARNED :], footer_nbytes)
        likely = sorted(self._latest)[(len(self._latest) - 1) * 3 // 4]  # a single long footer does not count
        self.nbytes = min(self._most, likely + likely // 8 + 256)

    def __reduce__(self) -> tuple[Any, ...]:
        return FooterRead, (self._most,)


class MetadataCache:
    """Bytes by key in one index file, mapped on first use.

    An absent file is an empty mapping. Other processes may replace the file at any time, so an entry may
    disappear. Pickles as its path. If the file cannot be written, a warning is issued and this process keeps the
    entries in memory.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._in_memory: Mapping[bytes, Description] = {}
        self._mapped = PerProcess(_MappedMetadata)

    def get(self, key: bytes | None) -> Description | None:
        """The entry of a key, or None."""
        if key is None:
            return None
        held = self._in_memory.get(key)
        return self._mapped().of(self.path).get(key) if held is None else held

    def replace(self, found: Mapping[bytes | None, Description], *, keeps_others: bool = False) -> None:
        """Replace all entries; entries without a key are dropped.

        `keeps_others` keeps the entries of other names.
        """
        described = {key: each for key, each in found.items() if key is not None}
        if not described:
            return
        if keeps_others:
            described = self._others(described) | described
        data = [np.frombuffer(each, np.uint8) for each in described.values()]
        bounds = np.cumsum([0, *map(len, data)]).astype("<u8")
        keys = np.frombuffer(b"".join(described), np.uint8)
        whole = np.concatenate(data) if data else np.empty(0, np.uint8)
        if not IndexFile(self.path).write({"keys": keys, "bounds": bounds, "data": whole}):
            self._in_memory = described
        self._mapped().forget()

    def _others(self, described: Mapping[bytes, Description]) -> dict[bytes, Description]:
        """The entries of names that are not described, in the current file."""
        self._mapped().forget()  # another process may have added some
        names = {key[:_NAME_NBYTES] for key in described}
        known = {**self._mapped().of(self.path), **self._in_memory}
        return {key: entry for key, entry in known.items() if key[:_NAME_NBYTES] not in names}

    def collect(
        self,
        what: str,
        names: Sequence[str],
        keys: Sequence[bytes | None],
        build: Callable[[int], Description],
        at_once: int = INDEX_THREADS,
        *,
        is_usable: Callable[[Description], bool] | None = None,
        keeps_others: bool = False,
    ) -> list[Description]:
        """The entry of each file; missing ones are built, several at once.

        Unusable entries count as missing. `build(number)` makes the entry of file `number`. `what` names the entries in
        the log. With many files, the first entry is built before the others. `keeps_others` is that of `replace`.
        """
        known = {number: entry for number, key in enumerate(keys) if (entry := self.get(key)) is not None}
        entries = known if is_usable is None else {at: entry for at, entry in known.items() if is_usable(entry)}
        missing = [number for number in range(len(keys)) if number not in entries]
        if missing:
            _log.info("reading the %s of %d files, beginning with %s", what, len(missing), names[missing[0]])
            if len(missing) >= _SIMILAR:
                first = missing.pop(0)
                entries[first] = build(first)
            with DaemonPool(at_once, "feedline-index") as pool:
                entries |= zip(missing, pool.map(build, missing), strict=True)
            self.replace({key: entries[number] for number, key in enumerate(keys)}, keeps_others=keeps_others)
        return [entries[number] for number in range(len(keys))]

    def __reduce__(self) -> tuple[type[MetadataCache], tuple[str]]:
        return MetadataCache, (self.path,)


class _MappedMetadata:
    """The file as mapped by this process."""

    def __init__(self) -> None:
        self._entries: dict[bytes, memoryview] | None = None

    def of(self, path: str) -> dict[bytes, memoryview]:
        entries = self._entries
        if entries is None:
            entries = self._entries = _entries(path)  # no lock: if two threads map it, either result is valid
        return entries

    def forget(self) -> None:
        self._entries = None


def _entries(path: str) -> dict[bytes, memoryview]:
    stored = IndexFile(path).find()
    if stored is None or not {"keys", "bounds", "data"} <= stored.arrays.keys():
        return {}
    arrays = stored.arrays
    keys, bounds, data = arrays["keys"].tobytes(), arrays["bounds"].tolist(), arrays["data"].data
    if len(keys) != _KEY_NBYTES * (len(bounds) - 1) or bounds != sorted(bounds) or bounds[-1] > len(data):
        return {}
    starts = range(0, len(keys), _KEY_NBYTES)
    return {keys[at : at + _KEY_NBYTES]: data[bounds[number] : bounds[number + 1]] for number, at in enumerate(starts)}


def _count_starts(shapes: Shapes) -> int:
    return shapes["starts"][0]


def _start_to_stop(arrays: Columns, row: int) -> tuple[int, int]:
    return int(arrays["starts"][row]), int(arrays["stops"][row])


class IndexRecipe(NamedTuple):
    """A format of record files, indexed by one scan of each.

    By default the arrays "starts" and "stops" of an index have the byte range of each record.
    """

    name: Callable[[str], str]
    """Maps a file name to the name of its index."""
    scan: Callable[[File], Columns]
    """Computes the arrays from the content."""
    fits: Callable[[File, Columns], bool]
    """Checks, with a few reads, that arrays of another origin match the content."""
    count: Callable[[Shapes], int] = _count_starts
    """The number of records of a file."""
    span: Callable[[Columns, int], tuple[int, int]] = _start_to_stop
    """The byte range of a record."""


def indexes_of(stored: FileSet, kind: IndexRecipe, index_dir: Pathlike | None) -> list[BuiltIndex]:
    """The index of each file, built where none matches.

    Indexes of files are next to them or in `index_dir`; those of objects in `index_dir` or the user's cache folder.
    A matching index next to an object is copied.
    """
    index = partial(_index, stored, kind, index_dir)
    if stored.is_local:
        return [index(number) for number in range(len(stored))]
    with DaemonPool(INDEX_THREADS, "feedline-index") as pool:
        return list(pool.map(index, range(len(stored))))


def _index(stored: FileSet, kind: IndexRecipe, index_dir: Pathlike | None, number: int) -> BuiltIndex:
    info, address = stored.info(number), stored.name(number)
    name = kind.name(address.rpartition("/")[2])
    if is_local(address) and index_dir is None:
        place = Path(address).with_name(name)
    else:
        place = Path(index_path(address, name, index_dir))
    work = partial(_of_file if stored.store(number) is None else _of_object, stored, kind, number)
    if key_of(address, info) is None:  # changes cannot be detected without a version, so a stored index is never used
        return BuiltIndex(place, (info.size, uuid4().hex), work)
    return BuiltIndex(place, (info.size, info.version), work)


def _of_file(stored: FileSet, kind: IndexRecipe, number: int) -> Columns:
    return kind.scan(stored.open(number))  # not `stored[number]`, which stays open: there may be too many


def _of_object(stored: FileSet, kind: IndexRecipe, number: int) -> Columns:
    file = stored[number]
    assert isinstance(file, RemoteFile)
    index_name = kind.name(file.path.rpartition("/")[2])
    arrays = _adjacent_arrays(file, index_name)
    if arrays is not None and kind.fits(file, arrays):
        return arrays
    _log.info(
        "indexing %s: all its %d bytes are read once; put its index, %s, next to it to avoid this",
        *(file.name, file.nbytes, index_name),
    )
    return kind.scan(file)


def _adjacent_arrays(file: RemoteFile, name: str) -> Columns | None:
    """The arrays in an index next to an object, or None."""
    try:
        stored = read_adjacent(file, name)
    except (ObjectNotFoundError, SampleError):
        return None
    state = stored.metadata.get("stamp")
    return stored.arrays if isinstance(state, list) and state[:1] == [file.nbytes] else None
