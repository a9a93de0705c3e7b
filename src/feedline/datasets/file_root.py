"""Reading and decoding of files below a local or remote root.

Paths out of the root are refused.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import TransformFunction
from feedline.core.stage_parts import READ_FILES, read_part
from feedline.core.tensors import Allocator
from feedline.datasets.decoding import Decode, Decoder, ImageDecoder, Where, decoder_of
from feedline.errors import ArgumentError, SampleError, note
from feedline.stores import Cache, CachedStore, ObjectNotFoundError, ObjectRange, Store, open_store
from feedline.stores.object_reader import Fetched, ObjectReader
from feedline.stores.urls import is_local, local_path

_GONE = "it was moved or deleted; restore it, or pass on_error='skip' to the loader"


_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Errors of a path, in contrast to errors of the file or the disk."""


class FileRoot:
    """A folder, or the address of a store, that contains files.

    Objects are kept in the folder `cache`, if one is given; `options` are passed to `open_store`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        cache: Cache | str | os.PathLike[str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        text = os.fspath(root)
        self.store: Store | None = None
        """The store of a remote root; None for a folder of this machine."""
        if is_local(text):
            self.name = str(Path(local_path(text)).absolute())
            if not Path(self.name).is_dir():
                raise FileNotFoundError(f"no such folder: {self.name}, given as root=")
        else:
            self.store = open_store(text, options=options, cache=cache)
            self.name = self.store.url
        self._objects = ObjectReader(self.store)

    def local(self, path: str) -> str:
        """The absolute path of a file.

        _PathError if the path is invalid or outside of the root.
        """
        if "\0" in path:
            raise _PathError("has a NUL character in its path")
        joined = os.path.normpath(os.path.join(self.name, path))  # noqa: PTH118 - links are kept as they are
        if not Path(joined).is_relative_to(self.name):
            raise _PathError(f"is outside the root {self.name}; give a root= that contains it")
        return joined

    def content(self, fetched: Fetched) -> bytes | memoryview:
        """The content of a file."""
        try:
            if self.store is None:
                assert isinstance(fetched, str)
                path = Path(self.local(fetched))
                with READ_FILES as part:
                    content = path.read_bytes()
                    part.count(len(content))
                return content
            if not isinstance(fetched, str):
                return self._objects.result(self.store, fetched)
            with read_part(self.store.url) as part:
                data = self._objects.read(self.store, fetched)
                part.count(len(data))
            return data
        except ArgumentError as error:  # a path out of the store
            raise _PathError(f"cannot be read: {error}") from error

    def fetching(self, paths: Sequence[str]) -> AbstractContextManager[Sequence[Fetched]]:
        """Fetch these files concurrently while the block runs."""
        return self._objects.fetching(paths)

    def ranges(self, paths: Sequence[str]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of each file, to prefetch."""
        return self._objects.ranges(paths)


class FileDecoder(Decoder):
    """Decodes files, given their path below the root or fetched content.

    Arguments are those of `decoder_of`.
    """

    def __init__(self, root: FileRoot, decode: Decode, transform: TransformFunction | None = None) -> None:
        self.root = root
        self._content = decoder_of(decode, transform)
        self.step = self._content.step
        # The native decoder opens image files itself, so it gets their paths.
        self._opens = root.store is None and isinstance(self._content, ImageDecoder)

    @property
    def batchable(self) -> bool:
        return self._content.batchable

    @property
    def uses_keys(self) -> bool:
        return self._content.uses_keys

    @property
    def is_ours(self) -> bool:
        return self._content.is_ours

    def __call__(self, source: Any, row: int | None, where: Where) -> Any:
        """The value; errors describe the file as `where()`.

        FileNotFoundError if it does not exist, SampleError if its path or content is unusable.
        """
        with _naming(where):
            read = self._read(source)
            if self._opens:
                return self._content(read, row, where)
        return self._content(read, row, where)

    def batch(
        self,
        sources: Sequence[Any],
        keys: NDArray[np.uint64] | None,
        allocate: Allocator,
        where: Callable[[int], str],
        threads: int = 1,
    ) -> torch.Tensor:
        read = []
        with self.root.fetching(sources) as fetched:
            for row, each in enumerate(fetched):
                with _naming(partial(where, row)):
                    read.append(self._read(each))
        try:
            return self._content.batch(read, keys, allocate, where, threads)
        except OSError as error:
            if error.filename not in read:
                raise
            with _naming(partial(where, read.index(error.filename))):
                raise

    def _read(self, source: Any) -> Any:
        return self.root.local(source) if self._opens else self.root.content(source)


class _PathError(SampleError):
    """An invalid path; callers add a description of its origin."""


@contextmanager
def _naming(where: Where) -> Iterator[None]:
    """Add a description of the file to errors of the block."""
    try:
        yield
    except FileNotFoundError as error:
        kind = ObjectNotFoundError if isinstance(error, ObjectNotFoundError) else FileNotFoundError
        raise kind(f"{where()} does not exist: {_GONE}") from error
    except _PathError as error:
        raise SampleError(f"{where()} {error}") from error
    except OSError as error:
        if error.errno in _NO_FILE:
            raise SampleError(
                f"{where()} is not a file ({error.strerror}): correct its path, or leave it out"
            ) from error
        note(error, f"feedline: {where()}")
        raise
