"""check_store passes feedline's stores and names the faults of others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from feedline import stores
from feedline.errors import ObjectChangedError, ObjectNotFoundError, RangeError
from feedline.stores import ObjectInfo
from feedline.testing import check_store

CONTENTS = {
    "a/0.bin": random.Random(1).randbytes(5120),
    "a/1.bin": b"one",
    "a/b/2.bin": b"two",
    "ab.bin": b"",
    "c d/ü%#": b"odd",
}


class MemoryStore:
    """The smallest store that keeps every promise."""

    url = "memory://contents"

    def info(self, path: str) -> ObjectInfo:
        if path not in CONTENTS:
            raise ObjectNotFoundError(f"{self.url}/{path}: there is no such object")
        return ObjectInfo(path, len(CONTENTS[path]), "1")

    def size(self, path: str) -> int:
        return self.info(path).size

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        return self.read_many(path, [(start, self.size(path) if stop is None else stop)], version=version)[0]

    def read_many(self, path: str, ranges: Any, *, version: str | None = None) -> list[memoryview]:
        info = self.info(path)
        if version not in (None, info.version):
            raise ObjectChangedError(f"{self.url}/{path} has another version")
        if any(not 0 <= start <= stop for start, stop in ranges):
            raise ValueError(f"{self.url}/{path}: {ranges} are no ranges")
        if any(stop > info.size for _, stop in ranges):
            raise RangeError(f"{self.url}/{path} has only {info.size} bytes")
        return [memoryview(CONTENTS[path])[start:stop] for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (self.info(path) for path in sorted(CONTENTS) if path.startswith(prefix))


@pytest.fixture(params=["local", "cached"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> stores.Store:
    for name, data in CONTENTS.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_bytes(data)
    cache = stores.Cache(tmp_path / "cache", limit="1 MB") if request.param == "cached" else None
    return stores.open_store(tmp_path / "data", cache=cache)


def test_feedlines_own_stores_pass(store: stores.Store) -> None:
    check_store(store, CONTENTS)
    check_store(store)


def test_the_smallest_store_passes() -> None:
    check_store(MemoryStore(), CONTENTS)


class Unsorted(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(list(super().list(prefix))[::-1])


class Shallow(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return (info for info in super().list(prefix) if info.path.count("/") < 2)


class FolderPrefixes(MemoryStore):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return super().list(prefix[: prefix.rfind("/") + 1])


class OtherSizes(MemoryStore):
    def size(self, path: str) -> int:
        return super().size(path) + 1

    def read(self, path: str, *args: Any, **kwargs: Any) -> memoryview:
        return MemoryStore().read(path, *args, **kwargs)


class Writable(MemoryStore):
    def read(self, *args: Any, **kwargs: Any) -> memoryview:
        return memoryview(bytearray(super().read(*args, **kwargs)))


class OneBuffer(MemoryStore):
    def __init__(self) -> None:
        self.buffer = bytearray(10_000)

    def read_many(self, *args: Any, **kwargs: Any) -> list[memoryview]:
        views = super().read_many(*args, **kwargs)
        for view in views:
            self.buffer[: len(view)] = view
        return [memoryview(self.buffer)[: len(view)].toreadonly() for view in views]


class Clipping(MemoryStore):
    def read_many(self, path: str, ranges: Any, **kwargs: Any) -> list[memoryview]:
        size = self.size(path)
        return super().read_many(path, [(min(start, size), min(stop, size)) for start, stop in ranges], **kwargs)


class OtherErrors(MemoryStore):
    def info(self, path: str) -> ObjectInfo:
        try:
            return super().info(path)
        except ObjectNotFoundError as error:
            raise KeyError(path) from error


class Nameless(MemoryStore):
    def info(self, path: str) -> ObjectInfo:
        try:
            return super().info(path)
        except ObjectNotFoundError as error:
            raise ObjectNotFoundError("not found") from error


class Versionless(MemoryStore):
    def read_many(self, path: str, ranges: Any, *, version: str | None = None) -> list[memoryview]:
        return super().read_many(path, ranges)


class Held(MemoryStore):
    def __init__(self) -> None:
        self.connection = iter("")

    def __reduce__(self) -> Any:
        raise TypeError("cannot pickle a connection")


@pytest.mark.parametrize(
    ("store", "complaint"),
    [
        (Unsorted(), "in order"),
        (Shallow(), r"left out \['a/b/2.bin'\]"),
        (FolderPrefixes(), "only give paths with this prefix"),
        (OtherSizes(), r"size\('a/0.bin'\) must be 5120, but is 5121"),
        (Writable(), "must be read-only"),
        (OneBuffer(), "must hold the 2560 bytes"),
        (Clipping(), "must raise RangeError, but returned"),
        (OtherErrors(), "must raise ObjectNotFoundError, but raised KeyError"),
        (Nameless(), "must name the object"),
        (Versionless(), "must raise ObjectChangedError, but returned"),
        (Held(), "survive pickling"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_wrong_with_a_store_is_named(store: Any, complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_store(store, CONTENTS)


def test_other_bytes_than_the_expected_are_named() -> None:
    with pytest.raises(AssertionError, match=r"read\('a/1.bin'\) must hold the 3 bytes"):
        check_store(MemoryStore(), {**CONTENTS, "a/1.bin": b"eno"})


def test_an_empty_store_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no object of two bytes or more"):
        check_store(stores.open_store(tmp_path))


def test_a_store_without_a_member_names_it() -> None:
    class Unlisted:
        url, info, size, read, read_many = "memory://x", None, None, None, None

    with pytest.raises(AssertionError, match=r"^the store lacks list:"):
        check_store(Unlisted())  # type: ignore[arg-type]
