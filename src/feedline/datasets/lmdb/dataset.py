"""`LMDB`: the values of an LMDB environment, decoded from its memory map."""

from __future__ import annotations

import gc
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.caches import PerProcess
from feedline.core.dataset import Keys, TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.stage_parts import READ_FILES
from feedline.core.tensors import Allocator, as_indices, normalize_indices
from feedline.datasets.base import DecodedRecords
from feedline.datasets.content_digest import digest_of_files, versioned
from feedline.datasets.decoding import Decode, decoder_of
from feedline.datasets.indexes import BuiltIndex, Columns, index_path
from feedline.datasets.lmdb.environment import Environment, data_in, fetch_environment, open_environment
from feedline.datasets.paths import find
from feedline.datasets.strings import PackedBytes
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import FileSet, local_info
from feedline.stores.urls import is_local, local_path

_BIG_ENDIAN = {"uint32": ">I", "uint64": ">Q"}


_MAX_SUSPECTS = 64
"""Most keys that are checked for names of databases."""


_BOOKKEEPING = (b"__keys__", b"__len__")
"""Keys of a pickled list of all keys, and of its length."""


class LMDB(DecodedRecords):
    """Values of an LMDB environment, decoded from its memory map.

    `keys` selects the value of sample i: a pattern for the number, such as `"{:08d}"`; "uint32" or "uint64" for
    big-endian numbers; a list of keys; or None for all keys in the environment's order, which are enumerated once and
    kept in an index file next to the data or in the folder `index_dir`. `length` is the number of samples for patterns
    and numbers, by default the number of entries. `decode` is "bytes", "text", "npy", "image" or a function of a
    memoryview, which must not keep it. `transform(value)` or `transform(value, rng)` is applied to the result.

    The entries `__keys__` and `__len__`, in which many scripts keep a pickled list of the keys and its length, are
    never unpickled. They are samples only if a list of keys names them.

    `database` names a database of the environment. Without it, an environment of named databases is rejected; so is,
    without `keys`, a database with several values per key.

    The environment is opened read-only and without locks, once per process. `readahead` helps sequential reads. A
    remote environment is fetched whole, once, into the folder `cache`; `options` are passed to `open_store`.

    SampleError names an environment that is damaged, and a value that cannot be decoded.
    """

    def __init__(
        self,
        path: Pathlike,
        keys: str | Sequence[bytes | str] | None = None,
        *,
        decode: Decode = "bytes",
        transform: TransformFunction | None = None,
        length: int | None = None,
        database: str | None = None,
        readahead: bool = False,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        location = _find_environment(os.fspath(path), cache, options)
        self.path = location.name
        self._location = location
        self._decoder = decoder_of(_ViewGuard(decode) if callable(decode) else decode, transform)
        self._environment = PerProcess(partial(location.open, database, readahead))
        if length is not None and not isinstance(keys, str):
            raise ArgumentError(
                f"length={length!r} is the number of samples for a pattern; leave it out, or shorten the list of keys"
            )
        if keys is None:
            self._environment()  # opened first, so that errors name the environment, not the index
            build = partial(_enumerate_keys, self._environment)
            self._keys: _KeyList = _EnumeratedKeys(location.key_index(database, index_dir, build))
        elif isinstance(keys, str):
            count = _count_samples(self._environment()) if length is None else _check_length(length)
            self._keys = _number_keys(keys, count)
        else:
            self._keys = _pack_keys(keys)
        self._check_keys()

    @property
    def content_fingerprint(self) -> str:
        """The version of the environment, for cached results."""
        return self._location.content_fingerprint()

    def __len__(self) -> int:
        return len(self._keys)

    def _sample(self, at: int, row: int | None) -> Any:
        return self._samples(np.array([at]), [row])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Samples of these indices, read in one transaction."""
        places = normalize_indices(as_indices(indices), len(self), "LMDB")
        return self._samples(places, range(len(places)))

    def _samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        keys = self._keys.many(places)
        with self._environment().reading() as transaction:
            values = self._values(transaction, keys)
            if self._decoder.copies:
                return list(map(bytes, values))
            return [
                self._decoder(value, row, partial(self._describe, key))
                for value, key, row in zip(values, keys, rows, strict=True)
            ]

    def _batch(self, places: NDArray[np.int64], allocate: Allocator, keys: Keys | None) -> torch.Tensor:
        names = self._keys.many(places)
        with self._environment().reading() as transaction:
            values = self._values(transaction, names)
            return self._decoder.batch(values, keys, allocate, lambda row: self._describe(names[row]))

    def _values(self, transaction: Any, keys: Sequence[bytes]) -> list[memoryview]:
        """Values of these keys, as views that end with the transaction."""
        try:
            with READ_FILES as part:
                values = list(map(transaction.get, keys))
                if part.timed:
                    part.count(sum(map(len, filter(None, values))))
        except optional.load("lmdb", "lmdb", "datasets.LMDB").Error as error:
            raise SampleError(f"{self.path} cannot be read: {error}; correct keys=, or copy it again") from error
        if None in values:
            self._raise_missing(keys[values.index(None)])
        return values

    def _describe(self, key: bytes) -> str:
        return f"the value of key {key!r} in {self.path}"

    def _raise_missing(self, key: bytes) -> bytes:
        raise SampleError(
            f"{self.path} has no key {key!r}: it was deleted, or keys= does not match the environment;"
            " correct keys=, or pass on_error='skip' to the loader"
        )

    def _check_keys(self) -> None:
        """Check the first and the last key.

        Most patterns that do not fit the environment fail here.
        """
        ends = self._keys.many(np.array([0, len(self) - 1][: len(self)], np.int64))
        environment = self._environment()
        with environment.reading() as transaction:
            values = self._values(transaction, ends)
            suspects = [key for key, value in zip(ends, values, strict=True) if environment.may_be_database(value)]
        _check_not_databases(environment, suspects)


class _EnvironmentLocation(NamedTuple):
    """Local environment, or an object that is fetched whole."""

    name: str
    files: FileSet | None

    def open(self, database: str | None, readahead: bool) -> Environment:
        if self.files is None:
            return open_environment(self.name, database, readahead)
        return fetch_environment(self.files, database, readahead)

    def key_index(self, database: str | None, index_dir: Pathlike | None, build: Callable[[], Columns]) -> BuiltIndex:
        """The keys, in a file next to local data or in `index_dir`."""
        ending = "main.keys" if database is None else f"named-{quote(database, safe='')}.keys"
        path: Pathlike = index_path(self.name, f"{self.name.rpartition('/')[2]}.{ending}", index_dir)
        if self.files is not None:
            state = self.files.info(0).state
        else:
            data = data_in(self.name)
            state = local_info(str(data)).state
            path = f"{data}.{ending}" if index_dir is None else path
        if database is not None:  # the path may be one file that the user has chosen for several databases
            state = state._replace(tag=f"{state.tag} {database}")
        return BuiltIndex(path, state, build)

    def content_fingerprint(self) -> str:
        if self.files is None:
            return digest_of_files([str(data_in(self.name))])
        return versioned(self.files.info(0)).version


def _find_environment(
    address: str, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
) -> _EnvironmentLocation:
    if is_local(address):
        return _EnvironmentLocation(str(Path(local_path(address)).resolve()), None)
    files = find(address, "data.mdb", cache=cache, options=options)
    if len(files) > 1:
        raise ArgumentError(f"LMDB reads one environment; {address} matches {len(files)}")
    return _EnvironmentLocation(files.name(0), files)


class _ViewGuard:
    """Wraps a decoding function of a view that ends with its transaction.

    ValueError if anything still refers to the view when the function returns: reading it later would return the content
    of another page, or crash the process.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, view: memoryview) -> Any:
        # Every slice of `holder`, by any library, keeps a reference to it, which increases its reference count.
        holder = np.frombuffer(view, np.uint8)
        before = sys.getrefcount(holder)
        value = self._function(holder.data)
        if sys.getrefcount(holder) > before:
            gc.collect()  # the references may be in a garbage cycle
            if sys.getrefcount(holder) > before:
                raise ValueError("the function kept a reference to the memory it received: return a copy")
        return value


class _KeyList(Protocol):
    """Keys of samples."""

    def __len__(self) -> int: ...
    def many(self, places: NDArray[np.int64]) -> list[bytes]: ...


class _PatternKeys:
    """Numbers formatted by a pattern."""

    def __init__(self, pattern: str, length: int) -> None:
        self._pattern, self._length = pattern, length

    def __len__(self) -> int:
        return self._length

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        return [self._pattern.format(at).encode() for at in places.tolist()]


class _NumberKeys:
    """Numbers as big-endian bytes, which LMDB sorts numerically."""

    def __init__(self, layout: str, length: int) -> None:
        self._layout, self._length = layout, length

    def __len__(self) -> int:
        return self._length

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        return [struct.pack(self._layout, at) for at in places.tolist()]


class _EnumeratedKeys:
    """All keys of an environment, from the index."""

    def __init__(self, index: BuiltIndex) -> None:
        self._index = index
        self._packed = self._unpack()

    def _unpack(self) -> PackedBytes:
        arrays = self._index.arrays
        return PackedBytes(arrays["offsets"].view(np.int64), arrays["keys"].view(np.uint8))

    def __len__(self) -> int:
        return len(self._packed)

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        return self._packed.many(places)

    def __getstate__(self) -> dict[str, Any]:
        return {"_index": self._index}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._index = state["_index"]
        self._packed = self._unpack()


def _enumerate_keys(environments: PerProcess[Environment]) -> Columns:
    environment, suspects = environments(), list[bytes]()
    with environment.reading() as transaction, transaction.cursor() as cursor:
        packed = PackedBytes.of(_unique_keys(cursor, environment, suspects))
    _check_not_databases(environment, suspects)
    return {"offsets": packed.offsets, "keys": packed.buffer}


def _unique_keys(cursor: Any, environment: Environment, suspects: list[bytes]) -> Iterator[bytes]:
    """All keys, in order; ArgumentError if a key has several values.

    Appends to `suspects` the first keys that may be names of databases.
    """
    last = None
    for view, value in cursor:
        key = bytes(view)
        if key == last:
            raise ArgumentError(
                f"{environment.path} holds several values under one key ({key!r}), as a dupsort database may, but a"
                " sample is one value: pass keys=, which takes the first value of each, or copy it into a database with"
                " one key per value"
            )
        if environment.may_be_database(value) and len(suspects) < _MAX_SUSPECTS:
            suspects.append(key)
        if key not in _BOOKKEEPING:
            yield key
        last = key


def _count_samples(environment: Environment) -> int:
    """Number of entries that are samples."""
    with environment.reading() as transaction:
        extra = sum(transaction.get(key) is not None for key in _BOOKKEEPING)
    return environment.entries() - extra


def _check_not_databases(environment: Environment, keys: Sequence[bytes]) -> None:
    """Raise ArgumentError if any of these keys names a database."""
    if any(map(environment.is_database, keys)):
        raise ArgumentError(
            f"{environment.path} holds named databases, which are not samples: pass database=, one of"
            f" {', '.join(environment.databases())}; or pass keys= of values only"
        )


def _pack_keys(keys: Any) -> PackedBytes:
    if not isinstance(keys, Iterable):
        raise ArgumentError(f"keys={keys!r} is neither a pattern, nor a list of keys, nor None for all")
    if isinstance(keys, (set, frozenset)):
        raise ArgumentError("keys= is a set, whose order differs between processes: pass a list, such as sorted(keys)")
    return PackedBytes.of(_encode(key) for key in keys)


def _encode(key: Any) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    raise ArgumentError(
        f"keys= holds {key!r}, but a key must be bytes or str; for numbers, pass a pattern such as '{{:08d}}', or one"
        f" of {', '.join(_BIG_ENDIAN)}"
    )


def _check_length(length: Any) -> int:
    if not isinstance(length, (int, np.integer)) or length < 0:
        raise ArgumentError(f"length={length!r}: pass the number of samples, or None for the number of entries")
    return int(length)


def _number_keys(keys: str, length: int) -> _KeyList:
    if keys in _BIG_ENDIAN:
        return _NumberKeys(_BIG_ENDIAN[keys], length)
    try:
        fits = keys.format(1) != keys.format(2)
    except (ValueError, LookupError):
        fits = False
    if not fits:
        raise ArgumentError(
            f"keys={keys!r} is neither a pattern for a number, such as '{{:08d}}', nor one of {', '.join(_BIG_ENDIAN)}"
        )
    return _PatternKeys(keys, length)
