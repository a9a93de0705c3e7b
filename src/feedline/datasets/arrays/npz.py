"""`.npz` archives.

Stored members are read in place, compressed ones as a whole.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import BufferedReader, BytesIO
from typing import IO, Any, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from feedline.core.paths import Pathlike
from feedline.datasets.arrays.npy_layout import NpzMember, layout_of
from feedline.datasets.arrays.rows import ArrayLayout, MemoryArrays
from feedline.datasets.file_objects import BlockFile
from feedline.datasets.paths import find_each
from feedline.errors import ArgumentError, FeedlineError, SampleError
from feedline.stores import Cache
from feedline.stores.files import Extent, FileSet

# zipfile raises RuntimeError for encrypted members, NotImplementedError for methods that it lacks.
_DAMAGE = (BadZipFile, zlib.error, EOFError, struct.error, ValueError, RuntimeError)
_HEAD_NBYTES = 16 << 10
_ENCRYPTED = 1
"""Flag of a member of a zip archive."""
_NAME_LENGTHS = struct.Struct("<26xHH")
"""Local file header of a zip archive: lengths of the name and of the extra field."""


def is_npz(paths: Any) -> bool:
    """True for the path or address of an archive."""
    return isinstance(paths, (str, os.PathLike)) and os.fspath(paths).endswith(".npz")


class _ArchiveBytes(BlockFile):
    """File in a store, for zipfile.

    A read to its end gives bytes, not a view.
    """

    def readall(self) -> bytes:
        return bytes(self.read())


class NpzArchive:
    """Directory of an archive, local or remote; pickles by path."""

    def __init__(
        self, path: Pathlike, *, cache: Cache | Pathlike | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        (matches,) = find_each([path], "*", cache=cache, options=options)
        if len(matches) != 1:
            raise ArgumentError(f"{os.fspath(path)} matches {len(matches)} files: name one .npz archive")
        self._files = FileSet(matches)
        self.path = self._files.name(0)
        with self._open_archive() as (_, archive):
            entries = archive.infolist()
        if any(entry.flag_bits & _ENCRYPTED for entry in entries):
            raise SampleError(f"{self.path} is encrypted: unpack it with its password, and write it again")
        self._entries = {entry.filename.removesuffix(".npy"): entry for entry in entries}

    @property
    def names(self) -> list[str]:
        """Names of the arrays."""
        return list(self._entries)

    def is_stored(self, names: Sequence[str]) -> bool:
        """True if all of these arrays can be read in place.

        ArgumentError names a missing one.
        """
        for name in names:
            if name not in self._entries:
                raise ArgumentError(f"{self.path} has no array {name!r}; it has {', '.join(self.names) or 'none'}")
        return all(self._entries[name].compress_type == ZIP_STORED for name in names)

    def members(self, names: Sequence[str]) -> list[NpzMember]:
        """Byte ranges of these arrays, which are not compressed."""
        with self._open_archive() as (file, _):
            return [self._member(file, name, self._entries[name]) for name in names]

    def load(self, names: Sequence[str]) -> list[NDArray[Any]]:
        """Decompressed copies of these arrays; SampleError for damaged ones."""
        with self._open_archive(whole=True) as (_, archive):
            return [self._load(archive, name) for name in names]

    def _member(self, file: IO[bytes], name: str, entry: ZipInfo) -> NpzMember:
        file.seek(entry.header_offset)
        start = entry.header_offset + _NAME_LENGTHS.size + sum(_NAME_LENGTHS.unpack(file.read(_NAME_LENGTHS.size)))
        return NpzMember(self.path, name, start, entry.file_size)

    def _load(self, archive: ZipFile, name: str) -> NDArray[Any]:
        entry = self._entries[name]
        with archive.open(entry) as file:
            head = BytesIO(file.read(_HEAD_NBYTES))
            # The header is checked before memory of its size is allocated.
            layout_of(self.path, f"{name!r} in {self.path}", head, entry.file_size)
        with archive.open(entry) as file:
            array: NDArray[Any] = npy.read_array(cast("Any", file), allow_pickle=False)
            return np.ascontiguousarray(array)

    @contextmanager
    def _open_archive(self, *, whole: bool = False) -> Iterator[tuple[IO[bytes], ZipFile]]:
        """Open the archive.

        A remote archive is fetched in blocks, or at once if `whole` is True.
        """
        try:
            with self._file(whole) as file, ZipFile(file) as archive:
                yield file, archive
        except FeedlineError:
            raise
        except (*_DAMAGE, OSError) as error:
            # If a damaged directory refers to a place outside of the file, the system refuses to seek. A remote file
            # is refused by Python, without a number.
            if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
                raise
            raise SampleError(
                f"{self.path} cannot be read as a .npz archive ({type(error).__name__}: {error});"
                " was it written completely?"
            ) from error

    def _file(self, whole: bool) -> IO[bytes]:
        file = self._files[0]  # StateError if the file has changed
        if self._files.is_local:
            return open(self.path, "rb")
        if whole:
            return BytesIO(self._files.read([Extent(0, 0, self._files.info(0).size)])[0])
        return cast("IO[bytes]", BufferedReader(_ArchiveBytes(file)))


class LoadedArrays(MemoryArrays):
    """Compressed arrays of an archive, in memory.

    Forked workers share this memory. Pickles by path; another process loads the arrays on first use.
    """

    is_local = True

    def __init__(self, archive: NpzArchive, names: Sequence[str]) -> None:
        self._archive, self._names = archive, names
        self._loaded: list[NDArray[Any]] | None = archive.load(names)
        self.paths = [f"{archive.path}[{name}]" for name in names]
        self.lengths = [len(array) for array in self._loaded]
        self.layouts = [ArrayLayout(array.dtype, array.shape, False, 0) for array in self._loaded]

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """The arrays; StateError if the archive has changed before they were loaded."""
        loaded = self._loaded
        if loaded is None:  # two threads may both load the arrays; either result is valid
            loaded = self._loaded = self._archive.load(self._names)
        return loaded

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_loaded": None}
