"""Places of a corpus: a folder, a store in memory, a bucket, a web server."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fsspec
from ceph import S3
from fsspec.implementations.memory import MemoryFileSystem

from feedline.stores import Cache, FromEnv
from formats.format import Format


class Place:
    """A folder of this machine; base class of the other places."""

    remote = False
    methods: tuple[str, ...] = ()
    """Methods of workers, besides threads, which read all datasets of the suite."""

    def __init__(self, root: str, **store: Any) -> None:
        self.root, self.store = root, store
        self.copies: Cache | None = None

    def store_of(self, form: Format) -> dict[str, Any]:
        """The arguments of a dataset: a cache for libraries that need copies, by default."""
        needed = {"cache": self.copies} if form.needs_cache and self.remote else {}
        return {**needed, **self.store}

    def fill(self, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            self.write(name, data)

    def write(self, name: str, data: bytes) -> None:
        path = Path(self.root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def touch(self, name: str, data: bytes) -> None:
        """Write another version, even of equal data."""
        path = Path(self.root, name)
        before = path.stat().st_mtime_ns
        self.write(name, data)
        os.utime(path, ns=(before + 10**6, before + 10**6))

    def remove(self, *names: str) -> None:
        for name in names:
            Path(self.root, name).unlink()


class Memory(Place):
    """A store in the memory of this process."""

    remote = True

    def __init__(self, root: str = "memory://far", **store: Any) -> None:
        super().__init__(root, **store)
        self.system = fsspec.filesystem("memory")
        self.clear()

    def clear(self) -> None:
        MemoryFileSystem.store.clear()
        MemoryFileSystem.pseudo_dirs[:] = [""]

    def put(self, folder: Path) -> str:
        """Put exactly the files of a folder into the store; returns the address."""
        self.clear()
        for path in folder.rglob("*"):
            if path.is_file():
                self.write(path.relative_to(folder).as_posix(), path.read_bytes())
        return self.root

    def write(self, name: str, data: bytes) -> None:
        self.system.pipe(self._path(name), data)

    def touch(self, name: str, data: bytes) -> None:
        self.write(name, data)

    def read(self, name: str) -> bytes:
        data: bytes = self.system.cat_file(self._path(name))
        return data

    def remove(self, *names: str) -> None:
        for name in names:
            self.system.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self.root.removeprefix('memory:/')}/{name}"


class Bucket(Place):
    """A folder of a bucket; with a cache, worker processes read it too."""

    remote = True

    def __init__(self, server: S3, bucket: str, prefix: str, **store: Any) -> None:
        super().__init__(f"s3://{bucket}/{prefix}", options=options(server), **store)
        self.methods = ("process",) if store else ()
        self._server, self._bucket, self._prefix = server, bucket, prefix

    def fill(self, files: Mapping[str, bytes]) -> None:
        self._server.put(self._bucket, {f"{self._prefix}/{name}": data for name, data in files.items()})

    def write(self, name: str, data: bytes) -> None:
        self.fill({name: data})

    def touch(self, name: str, data: bytes) -> None:
        self.write(name, data)

    def remove(self, *names: str) -> None:
        self._server.remove(self._bucket, [f"{self._prefix}/{name}" for name in names])


class Web(Place):
    """A folder that a web server serves, which lists nothing."""

    remote = True

    def __init__(self, server: str, folder: Path) -> None:
        super().__init__(f"{server}/{folder.name}")
        self._folder = Place(str(folder))

    def write(self, name: str, data: bytes) -> None:
        self._folder.write(name, data)


def options(server: S3) -> dict[str, Any]:
    """Options of a server; secrets stay in the environment, so that the options reach other processes."""
    keys = {"access_key_id": FromEnv("SUITE_KEY"), "secret_access_key": FromEnv("SUITE_SECRET")}
    return {"endpoint": server.endpoint, **keys}


def small_pieces(folder: Path, piece_nbytes: int = 1000) -> Cache:
    return Cache(folder / "cache", limit="100 MB", piece_nbytes=piece_nbytes)
