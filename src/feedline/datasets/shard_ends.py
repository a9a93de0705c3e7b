"""Beginnings and ends of shards in stores, which say where their records lie: read once, kept on this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.cancelling import DaemonPool
from feedline.datasets.descriptions import Descriptions, key_of, place_of
from feedline.errors import SampleError
from feedline.stores import CachedStore, ObjectInfo, Store, join

_log = logging.getLogger("feedline")

_READ_AT_ONCE = 32
_LENGTH_NBYTES = 8

Read = Callable[[int, int], memoryview]
Cut = Callable[[Read, int, int], tuple[memoryview, memoryview]]
"""From `read(start, stop)`, and the bytes and samples of a shard, to its ends; it does not fail, whatever it reads."""


class Ends(NamedTuple):
    """What has to be known of a shard to find its records: its beginning and its end, as much as its format needs."""

    begin: NDArray[np.uint8]
    end: NDArray[np.uint8]


class ObjectEnds:
    """The ends of objects by number, learned all at once where they are not known. Pickles with what opens the stores.

    `samples` are those of each object. What is read here does not go through the cache of a store, which would fetch a
    large piece for each.
    """

    def __init__(self, objects: Mapping[int, tuple[Store, ObjectInfo]], samples: Mapping[int, int], cut: Cut) -> None:
        self._objects = {
            number: (store.store if isinstance(store, CachedStore) else store, info)
            for number, (store, info) in objects.items()
        }
        self._samples, self._cut = samples, cut
        self._known = Descriptions(place_of("ends", sorted({store.url for store, _ in self._objects.values()}), None))
        keys = map(self._key, self._objects)
        if any(key is not None and self._known.get(key) is None for key in keys):
            self._learn()

    def __getitem__(self, number: int) -> Ends:
        known = self._known.get(self._key(number))
        data = np.frombuffer(self._read(number) if known is None else known, np.uint8)
        stop = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES].tobytes(), "little")
        return Ends(data[_LENGTH_NBYTES:stop], data[stop:])

    def _learn(self) -> None:
        (store, _), *_ = self._objects.values()
        _log.info("reading where the records of %d shards of %s begin; it is kept", len(self._objects), store.url)
        keys = {number: key for number in self._objects if (key := self._key(number)) is not None}
        with DaemonPool(_READ_AT_ONCE, "feedline-ends") as pool:
            self._known.replace(dict(zip(keys.values(), pool.map(self._either, keys), strict=True)))

    def _either(self, number: int) -> bytes | memoryview:
        known = self._known.get(self._key(number))
        return self._read(number) if known is None else known

    def _read(self, number: int) -> bytes:
        store, info = self._objects[number]
        begin, end = self._cut(partial(_range, store, info), info.size, self._samples[number])
        return b"".join([len(begin).to_bytes(_LENGTH_NBYTES, "little"), begin, end])

    def _key(self, number: int) -> bytes | None:
        store, info = self._objects[number]
        return key_of(f"{join(store.url, info.path)}\0{self._samples[number]}", info)


def _range(store: Store, info: ObjectInfo, start: int, stop: int) -> memoryview:
    return store.read_many(info.path, [(start, stop)], version=info.version)[0]


def offsets_in(begin: NDArray[np.uint8], samples: int, nbytes: int, where: str) -> memoryview:
    """The offsets of samples, and where the last one ends, that MDS and LitData write behind their number.

    Checked, because a wrong one would read something else: SampleError.
    """
    first = 4 * (samples + 2)
    offsets = (
        begin[4:first].view("<u4").astype(np.uint32, copy=False) if len(begin) >= first else np.empty(0, np.uint32)
    )
    if not (
        len(offsets)
        and int.from_bytes(begin[:4].tobytes(), "little") == samples
        and offsets[0] >= first
        and offsets[-1] == nbytes
        and (offsets[1:] >= offsets[:-1]).all()
    ):
        raise SampleError(f"{where} is damaged: it does not hold {samples} samples, as its index says; copy it again")
    return offsets.data
