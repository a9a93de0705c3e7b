"""`LMDB`: the values of an LMDB environment, decoded out of its memory map."""

from __future__ import annotations

import gc
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.caches import PerProcess
from feedline.core.dataset import Keys
from feedline.core.paths import user_cache
from feedline.core.tensors import Allocator, as_indices, within
from feedline.datasets.arrays.npy import Transform
from feedline.datasets.arrays.npy_layout import Pathlike
from feedline.datasets.base import DecodedRecords
from feedline.datasets.decoding import Decode, Decoding
from feedline.datasets.indexes import Columns, SideCar, State
from feedline.datasets.lmdb.environment import Environment, data_in, fetch_environment, open_environment
from feedline.datasets.paths import find
from feedline.datasets.strings import PackedBytes
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache
from feedline.stores.files import FileSet
from feedline.stores.urls import is_local, local_path

_BIG_ENDIAN = {"uint32": ">I", "uint64": ">Q"}


_DOUBTS = 64
"""Of keys that may be names of databases, so many are tried."""


class LMDB(DecodedRecords):
    """The values of an LMDB environment, each decoded where it lies in the memory map.

    `keys` says which value is sample i: a pattern for its number such as `"{:08d}"`; "uint32" or "uint64" for numbers
    in big-endian bytes; a list of keys; or None for all in the order of the environment, enumerated once and kept in a
    side-car in the folder `index_dir` (beside the data unless given). With patterns and numbers, `length` is the number
    of entries unless given. `decode` is "bytes", "text", "npy", "image" or a function of a memoryview, which must not
    keep it.

    `database` is that of this name; without it, an environment of named databases is refused, as is, without `keys`, a
    database that holds several values under one key.

    The environment is opened read-only and without locks, once in each process. `readahead` suits reading in order. One
    in a store is fetched as a whole, once, into the folder `cache`; `options` are those of `open_store`.
    """

    def __init__(
        self,
        path: Pathlike,
        keys: str | Sequence[bytes | str] | None = None,
        *,
        decode: Decode = "bytes",
        transform: Transform | None = None,
        length: int | None = None,
        database: str | None = None,
        readahead: bool = False,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        held = _held(os.fspath(path), cache, options)
        self.path = held.name
        self._decoding = Decoding(_Transient(decode) if callable(decode) else decode, transform)
        self._environment = PerProcess(partial(held.opened, database, readahead))
        if keys is None:
            self._environment()  # what is wrong with the path is said here
            place = held.keys_file(database, index_dir)
            self._keys: _Names = _EnumeratedKeys(SideCar(place, held.state(), partial(_enumerated, self._environment)))
        elif isinstance(keys, str):
            self._keys = _numbered(keys, self._environment().entries() if length is None else _counted(length))
        else:
            self._keys = _listed(keys)
        self._refuse_wrong_keys()

    def __len__(self) -> int:
        return len(self._keys)

    def _sample(self, at: int, row: int | None) -> Any:
        return self._samples(np.array([at]), [row])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices, in one transaction."""
        places = within(as_indices(indices), len(self), "LMDB")
        return self._samples(places, range(len(places)))

    def _samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[Any]:
        keys = self._keys.many(places)
        with self._environment().reading() as transaction:
            values = self._values(transaction, keys)
            if self._decoding.copies:
                return list(map(bytes, values))
            return [
                self._decoding(value, row, partial(self._named, key))
                for value, key, row in zip(values, keys, rows, strict=True)
            ]

    def _batch(self, places: NDArray[np.int64], empty: Allocator, keys: Keys | None) -> torch.Tensor:
        names = self._keys.many(places)
        with self._environment().reading() as transaction:
            values = self._values(transaction, names)
            return self._decoding.batch(values, keys, empty, lambda row: self._named(names[row]))

    def _values(self, transaction: Any, keys: Sequence[bytes]) -> list[memoryview]:
        """Views of the map, which end with the transaction."""
        try:
            values = list(map(transaction.get, keys))
        except optional.load("lmdb", "lmdb", "datasets.LMDB").Error as error:
            raise SampleError(f"{self.path} cannot be read: {error}; correct keys=, or copy it again") from error
        if None in values:
            self._missing(keys[values.index(None)])
        return values

    def _named(self, key: bytes) -> str:
        return f"the value of key {key!r} in {self.path}"

    def _missing(self, key: bytes) -> bytes:
        raise SampleError(
            f"{self.path} has no key {key!r}: it was deleted, or keys= does not fit the environment;"
            " correct keys=, or pass on_error='skip' to the loader"
        )

    def _refuse_wrong_keys(self) -> None:
        """The first and the last key must be there: most patterns that do not fit show themselves so."""
        ends = self._keys.many(np.array([0, len(self) - 1][: len(self)], np.int64))
        environment = self._environment()
        with environment.reading() as transaction:
            values = self._values(transaction, ends)
            doubted = [key for key, value in zip(ends, values, strict=True) if environment.may_be_database(value)]
        _refuse_databases(environment, doubted)


class _LocalEnvironment(NamedTuple):
    """An environment on this machine."""

    name: str

    def opened(self, database: str | None, readahead: bool) -> Environment:
        return open_environment(self.name, database, readahead)

    def keys_file(self, database: str | None, index_dir: Pathlike | None) -> str:
        """The path of the file that keeps its keys: next to the data, or in `index_dir`."""
        if index_dir is not None:
            return _keys_file(index_dir, self.name, database)
        return f"{data_in(self.name)}.{database or 'main'}.keys"

    def state(self) -> str | State:
        """What keys belong to: the file, as it is."""
        return str(data_in(self.name))


class _InStore(NamedTuple):
    """An environment in a store, found."""

    blobs: FileSet

    @property
    def name(self) -> str:
        return self.blobs.name(0)

    def opened(self, database: str | None, readahead: bool) -> Environment:
        return fetch_environment(self.blobs, database, readahead)

    def keys_file(self, database: str | None, index_dir: Pathlike | None) -> str:
        """The path of the file on this machine that keeps its keys."""
        return _keys_file(user_cache("indexes") if index_dir is None else index_dir, self.name, database)

    def state(self) -> str | State:
        """What keys belong to: this version of the object."""
        return (self.blobs.info(0).size, self.blobs.info(0).version)


def _keys_file(index_dir: Pathlike, name: str, database: str | None) -> str:
    key = hashlib.blake2b(name.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return str(Path(index_dir, f"{key}-{name.rpartition('/')[2]}.{database or 'main'}.keys"))


def _held(
    address: str, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None
) -> _LocalEnvironment | _InStore:
    if is_local(address):
        return _LocalEnvironment(str(Path(local_path(address)).resolve()))
    blobs = find(address, "data.mdb", cache=cache, options=options)
    if len(blobs) > 1:
        raise ArgumentError(f"LMDB reads one environment; {address} stands for {len(blobs)}")
    return _InStore(blobs)


class _Transient:
    """A function of a view that ends with its transaction: ValueError if anything still refers to it afterwards.

    Reading it then would read what another page holds by now, or kill the process.
    """

    def __init__(self, function: Callable[[Any], Any]) -> None:
        self._function = function
        self.__name__ = getattr(function, "__name__", type(function).__name__)

    def __call__(self, view: memoryview) -> Any:
        # All that is cut out of `holder`, by whatever library, keeps a reference to it; the function gets one more.
        holder = np.frombuffer(view, np.uint8)
        alone = sys.getrefcount(holder)
        value = self._function(holder.data)
        if sys.getrefcount(holder) > alone:
            gc.collect()  # it may be rubbish already, in a cycle
            if sys.getrefcount(holder) > alone:
                raise ValueError("the function kept a part of the memory that it was given: return a copy")
        return value


class _Names(Protocol):
    """The key of each sample."""

    def __len__(self) -> int: ...
    def many(self, places: NDArray[np.int64]) -> list[bytes]: ...


class _PatternKeys:
    """Numbers as text."""

    def __init__(self, pattern: str, length: int) -> None:
        self._pattern, self._length = pattern, length

    def __len__(self) -> int:
        return self._length

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        return [self._pattern.format(at).encode() for at in places.tolist()]


class _NumberKeys:
    """Numbers as big-endian bytes, in whose order LMDB keeps them."""

    def __init__(self, layout: str, length: int) -> None:
        self._layout, self._length = layout, length

    def __len__(self) -> int:
        return self._length

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        return [struct.pack(self._layout, at) for at in places.tolist()]


class _EnumeratedKeys:
    """All keys of an environment, in a side-car."""

    def __init__(self, sidecar: SideCar) -> None:
        self._sidecar = sidecar
        self._packed = self._opened()

    def _opened(self) -> PackedBytes:
        arrays = self._sidecar.arrays
        return PackedBytes(arrays["offsets"].view(np.int64), arrays["keys"].view(np.uint8))

    def __len__(self) -> int:
        return len(self._packed)

    def many(self, places: NDArray[np.int64]) -> list[bytes]:
        return self._packed.many(places)

    def __getstate__(self) -> dict[str, Any]:
        return {"_sidecar": self._sidecar}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._sidecar = state["_sidecar"]
        self._packed = self._opened()


def _enumerated(opened: PerProcess[Environment]) -> Columns:
    environment, doubted = opened(), list[bytes]()
    with environment.reading() as transaction, transaction.cursor() as cursor:
        packed = PackedBytes.of(_distinct(cursor, environment, doubted))
    _refuse_databases(environment, doubted)
    return {"offsets": packed.offsets, "keys": packed.buffer}


def _distinct(cursor: Any, environment: Environment, doubted: list[bytes]) -> Iterator[bytes]:
    """The keys; among `doubted` the first of those that may be names of databases. ArgumentError if one comes twice."""
    last = None
    for view, value in cursor:
        key = bytes(view)
        if key == last:
            raise ArgumentError(
                f"{environment.path} holds several values under one key ({key!r}), as a dupsort database may, and a"
                " sample is a key with one value: give keys=, which takes the first value of each, or copy it into a"
                " database with a key for each value"
            )
        if environment.may_be_database(value) and len(doubted) < _DOUBTS:
            doubted.append(key)
        yield key
        last = key


def _refuse_databases(environment: Environment, keys: Sequence[bytes]) -> None:
    """ArgumentError if databases lie under these keys: what is read there are no values."""
    if any(map(environment.is_database, keys)):
        raise ArgumentError(
            f"{environment.path} holds named databases, which are no samples: give database=, one of"
            f" {', '.join(environment.databases())}; or keys=, those of the values beside them"
        )


def _listed(keys: Any) -> PackedBytes:
    if not isinstance(keys, Iterable):
        raise ArgumentError(f"keys={keys!r} is no pattern, no list of keys, nor None for all")
    return PackedBytes.of(_encoded(key) for key in keys)


def _encoded(key: Any) -> bytes:
    if isinstance(key, str):
        return key.encode()
    if isinstance(key, (bytes, bytearray, memoryview)):
        return bytes(key)
    raise ArgumentError(
        f"keys= holds {key!r}, and a key is bytes or str; for numbers, give a pattern such as '{{:08d}}', or one of"
        f" {', '.join(_BIG_ENDIAN)}"
    )


def _counted(length: Any) -> int:
    if not isinstance(length, (int, np.integer)) or length < 0:
        raise ArgumentError(f"length={length!r}: give the number of samples, or None for that of the entries")
    return int(length)


def _numbered(keys: str, length: int) -> _Names:
    if keys in _BIG_ENDIAN:
        return _NumberKeys(_BIG_ENDIAN[keys], length)
    try:
        fits = keys.format(1) != keys.format(2)
    except (ValueError, LookupError):
        fits = False
    if not fits:
        raise ArgumentError(
            f"keys={keys!r} is no pattern for a number, such as '{{:08d}}', nor one of {', '.join(_BIG_ENDIAN)}"
        )
    return _PatternKeys(keys, length)
