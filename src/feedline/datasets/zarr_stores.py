"""What zarr reads from: a store of ours, so that retries, cache and errors are ours, too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import cache
from types import new_class
from typing import Any, TypeVar

from feedline import extras
from feedline.cancelling import DaemonPool
from feedline.stores import ObjectNotFoundError, RangeError, Store

T = TypeVar("T")

_READERS = 32


def library() -> Any:
    """The package zarr."""
    return extras.load("zarr", "zarr", "datasets.Zarr")


def reading(store: Store) -> Any:
    """A store of zarr's that reads the objects of this one, many at once."""
    return _store_class()(store)


@cache
def _store_class() -> Any:
    return new_class("ObjectStore", (_Reading, _abc().Store))


def _abc() -> Any:
    return extras.load("zarr.abc.store", "zarr", "datasets.Zarr")


class _Reading:
    """What zarr's abstract store asks for; all of it waits in threads, which zarr's one loop of events must not."""

    supports_writes = supports_deletes = False
    supports_listing = True

    def __init__(self, store: Store) -> None:
        super().__init__(read_only=True)  # type: ignore[call-arg] # zarr's class, which comes after this one
        self.store = store
        self._readers = DaemonPool(_READERS, "feedline-zarr")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reading) and other.store is self.store

    __hash__ = object.__hash__

    async def get(self, key: str, prototype: Any, byte_range: Any = None) -> Any:
        """The value of a key, or None."""
        data = await self._waited(self._read, key, byte_range)
        return None if data is None else prototype.buffer.from_bytes(data)

    async def get_partial_values(self, prototype: Any, key_ranges: Any) -> list[Any]:
        """Parts of several values."""
        return await asyncio.gather(*(self.get(key, prototype, wanted) for key, wanted in key_ranges))

    async def exists(self, key: str) -> bool:
        """Whether there is such a key."""
        return await self._waited(self._exists, key)

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """The keys that begin so."""
        for key in await self._waited(self._keys, prefix):
            yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """The names in a folder."""
        folder = f"{prefix.rstrip('/')}/" if prefix.strip("/") else ""
        keys = await self._waited(self._keys, folder)
        for name in dict.fromkeys(key.removeprefix(folder).partition("/")[0] for key in keys):
            yield name

    def list(self) -> AsyncIterator[str]:
        """All keys."""
        return self.list_prefix("")

    async def set(self, key: str, value: Any) -> None:
        """Zarr does not call it of what is read-only."""
        raise NotImplementedError

    async def delete(self, key: str) -> None:
        """Zarr does not call it of what is read-only."""
        raise NotImplementedError

    async def _waited(self, call: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(self._readers.submit(call, *arguments))

    def _read(self, key: str, wanted: Any) -> memoryview | None:
        try:
            return self.store.read(key) if wanted is None else self._read_range(key, wanted)
        except ObjectNotFoundError:  # a chunk that was never written, or metadata of another version
            return None

    def _read_range(self, key: str, wanted: Any) -> memoryview:
        if isinstance(wanted, _abc().SuffixByteRequest):
            size = self.store.size(key)
            return self.store.read(key, max(0, size - wanted.suffix), size)
        if isinstance(wanted, _abc().OffsetByteRequest):
            return self.store.read(key, wanted.offset)
        try:
            return self.store.read(key, wanted.start, wanted.end)
        except RangeError:  # zarr's ranges may reach beyond the end
            return self.store.read(key, wanted.start)

    def _exists(self, key: str) -> bool:
        try:
            self.store.info(key)
        except ObjectNotFoundError:
            return False
        return True

    def _keys(self, prefix: str) -> tuple[str, ...]:
        return tuple(info.path for info in self.store.list(prefix))
