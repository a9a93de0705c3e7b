"""A store scheme from outside: members of a zip file, addressed as `zipfile://archive.zip/member`."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from feedline.stores import (
    ObjectChangedError,
    ObjectInfo,
    ObjectNotFoundError,
    RangeError,
    Scheme,
    Store,
    StorePolicy,
    join,
    register_scheme,
)


class ZipStore:
    """Members of an archive in the working directory. Each call opens it: safe in threads and after a fork."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._archive = Path(url.partition("://")[2].strip("/")).absolute()

    def info(self, path: str) -> ObjectInfo:
        with zipfile.ZipFile(self._archive) as archive:
            try:
                return _describe(archive.getinfo(path))
            except KeyError:
                raise ObjectNotFoundError(f"{join(self.url, path)}: the archive has no such member") from None

    def size(self, path: str) -> int:
        return self.info(path).size

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        info = self.info(path)
        if version not in (None, info.version):
            raise ObjectChangedError(f"{join(self.url, path)} changed: create the dataset again to read it")
        if start < 0 or (stop is not None and stop < start):
            raise ValueError(f"{join(self.url, path)}: bytes {start} to {stop} are not a valid range")
        if max(start, stop or 0) > info.size:
            raise RangeError(f"{join(self.url, path)}: the member has only {info.size} bytes")
        with zipfile.ZipFile(self._archive) as archive:
            return memoryview(archive.read(path))[start:stop]

    def read_many(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> list[memoryview]:
        return [self.read(path, start, stop, version=version) for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        with zipfile.ZipFile(self._archive) as archive:
            members = [member for member in archive.infolist() if not member.is_dir()]
        yield from sorted((_describe(m) for m in members if m.filename.startswith(prefix)), key=lambda info: info.path)


def _describe(member: zipfile.ZipInfo) -> ObjectInfo:
    return ObjectInfo(member.filename, member.file_size, f"{member.CRC:08x}-{member.file_size:x}")


def open_zip(url: str, options: object, policy: StorePolicy) -> Store:
    """Open the archive at an address."""
    return ZipStore(url)


SCHEME = Scheme(open_zip)

register_scheme("zipfile", SCHEME)
