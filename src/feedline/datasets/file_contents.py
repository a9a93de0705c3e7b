"""Files below a root, local or in a store: their contents, decoded; never a file outside."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decode, Decoding, Where
from feedline.errors import ArgumentError, SampleError
from feedline.rows import Empty
from feedline.stores import Store, open_store

_GONE = "it was moved or deleted; restore it, or pass on_error='skip' to the loader"


class Root:
    """A folder or the address of a store; `whole(path)` gives the bytes of a file in it."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        text = os.fspath(root)
        self._store: Store | None = open_store(text) if "://" in text and not text.startswith("file://") else None
        self.name = self._store.url if self._store else str(Path(text.removeprefix("file://")).absolute())

    @property
    def is_local(self) -> bool:
        """Whether files have a path that anybody can open."""
        return self._store is None

    def local(self, path: str) -> str:
        """The absolute path of a file; SampleError if it leads out of the root."""
        joined = os.path.normpath(os.path.join(self.name, path))  # noqa: PTH118 - links are kept as they are
        if not Path(joined).is_relative_to(self.name):
            raise SampleError(f"{path!r} leads out of {self.name}, the root of all files; give a root= that holds it")
        return joined

    def whole(self, path: str) -> bytes | memoryview:
        """The content of a file."""
        if self._store is None:
            return Path(self.local(path)).read_bytes()
        try:
            return self._store.read(path)
        except ArgumentError as error:  # a path that leads out of the store
            raise SampleError(str(error)) from error


class FileDecoding(Decoding):
    """How the content of a file becomes a value; what is decoded is its path below the root."""

    def __init__(self, root: Root, decode: Decode, transform: Transform | None = None) -> None:
        super().__init__(decode, transform)
        self._root = root
        # Pictures that are decoded natively are read there, too: from their path.
        self._source: Callable[[str], Any] = root.local if root.is_local and self._plan is not None else root.whole

    def __call__(self, source: Any, row: int | None, where: Where) -> Any:
        """The value; FileNotFoundError tells `where()` a file is named that is not there."""
        with _naming_gone(where):
            return super().__call__(self._source(source), row, where)

    def batch(
        self, sources: Sequence[Any], keys: NDArray[np.uint64] | None, empty: Empty, where: Callable[[int], str]
    ) -> torch.Tensor:
        """The values of these files as one tensor."""
        read = []
        for row, source in enumerate(sources):
            with _naming_gone(lambda row=row: where(row)):  # type: ignore[misc]
                read.append(self._source(source))
        try:
            return super().batch(read, keys, empty, where)
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{where(read.index(error.filename))} does not exist: {_GONE}") from error


@contextmanager
def _naming_gone(where: Where) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{where()} does not exist: {_GONE}") from error
