"""Shards listed in the index of a folder, read as byte ranges.

A shard is a local file, which is mapped, or an object in a store, which is read in ranges, many at once. A shard that
was compressed as a whole is first decompressed into a cache. The beginning and end of each object, which contain the
positions of its records, are read once and kept on this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.tensors import normalize_indices
from feedline.core.threads import IO_THREADS
from feedline.datasets.base import ShardedFields
from feedline.datasets.compression import check_hashes, inflate
from feedline.datasets.indexes import MetadataCache, key_of, metadata_path
from feedline.datasets.inflated import ContentBlocks, Inflation, PlainFiles
from feedline.datasets.shards.folder import FolderFile, IndexedFolder
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, ObjectInfo, ObjectNotFoundError, ObjectRange, Store, join
from feedline.stores.cache import without_cache
from feedline.stores.files import Extent, File, FileSet


class ShardSource(NamedTuple):
    """Shard as its index describes it.

    `forms` maps the names of the files that may hold it, in order of preference, to their codecs (None: uncompressed).
    """

    forms: Mapping[str, str | None]
    nbytes: int
    samples: int
    hashes: Mapping[str, str]


def _find_files(folders: Sequence[IndexedFolder], shards: Sequence[ShardSource]) -> list[FolderFile]:
    """File of each shard; files of one folder are looked up together."""
    files: dict[int, FolderFile] = {}
    for folder in dict.fromkeys(folders):
        mine = [number for number, each in enumerate(folders) if each is folder]
        files |= zip(mine, folder.files([tuple(shards[number].forms) for number in mine]), strict=True)
    return [files[number] for number in range(len(shards))]


def _file(folder: IndexedFolder, file: FolderFile) -> tuple[Store | None, ObjectInfo]:
    path = folder.where(file.name) if folder.store is None else file.name
    return folder.store, file.info or ObjectInfo(path, 0, "")


def _inflation(shard: ShardSource, codec: str | None, extra: str) -> Inflation | None:
    if codec is None:
        return None
    return Inflation("decompressed", partial(_inflate, shard, codec, extra), shard.nbytes)


def _inflate(shard: ShardSource, codec: str, extra: str, file: File) -> ContentBlocks:
    (packed,) = file.read([(0, file.nbytes)])
    data = inflate(np.frombuffer(packed, np.uint8), codec, shard.nbytes, file.name, extra)
    check_hashes(data, shard.hashes, file.name)
    yield data.data


_LENGTH_NBYTES = 8


ReadBytes = Callable[[int, int], memoryview]


CutEnds = Callable[[ReadBytes, int, int], tuple[memoryview, memoryview]]
"""Extracts the ends of a shard from `read(start, stop)`, the number of bytes and the number of samples. It must not
fail for any content.
"""


class Ends(NamedTuple):
    """The parts of a shard that its format needs for finding records."""

    begin: NDArray[np.uint8]
    end: NDArray[np.uint8]


class ObjectEnds:
    """Ends of objects by number.

    The constructor reads all ends that are not cached at once. Pickles with the information to open the stores. These
    reads bypass the cache of a store, which would fetch a large piece for each.
    """

    def __init__(
        self, objects: Mapping[int, tuple[Store, ObjectInfo]], shards: Sequence[ShardSource], cut: CutEnds
    ) -> None:
        self._objects = {number: (without_cache(store), info) for number, (store, info) in objects.items()}
        self._samples, self._cut = {number: shards[number].samples for number in objects}, cut
        self._known = MetadataCache(
            metadata_path("ends", sorted({store.url for store, _ in self._objects.values()}), None)
        )
        self._learn({number: key for number in self._objects if (key := self._key(number)) is not None})

    def __getitem__(self, number: int) -> Ends:
        known = self._known.get(self._key(number))
        data = np.frombuffer(self._read(number) if known is None else known, np.uint8)
        stop = _LENGTH_NBYTES + int.from_bytes(data[:_LENGTH_NBYTES].tobytes(), "little")
        return Ends(data[_LENGTH_NBYTES:stop], data[stop:])

    def _learn(self, keys: Mapping[int, bytes]) -> None:
        numbers = list(keys)
        names = [self._objects[number][1].path for number in numbers]
        self._known.collect(
            "record offsets", names, list(keys.values()), lambda at: self._read(numbers[at]), IO_THREADS
        )

    def _read(self, number: int) -> bytes:
        store, info = self._objects[number]
        begin, end = self._cut(partial(_range, store, info), info.size, self._samples[number])
        return b"".join([len(begin).to_bytes(_LENGTH_NBYTES, "little"), begin, end])

    def _key(self, number: int) -> bytes | None:
        store, info = self._objects[number]
        return key_of(f"{join(store.url, info.path)}\0{self._samples[number]}", info)


def _range(store: Store, info: ObjectInfo, start: int, stop: int) -> memoryview:
    return store.read_many(info.path, [(start, stop)], version=info.version)[0]


def offsets_in(
    begin: NDArray[np.uint8], samples: int, nbytes: int, where: str, *, is_apart: bool = False
) -> memoryview:
    """Offsets of the samples of an MDS or LitData shard of `nbytes`.

    The last offset is the end of the last sample. Offsets are stored after the number of samples, at the beginning of
    the shard or of a separate file. SampleError for invalid offsets, which would read the wrong bytes.
    """
    first = 4 * (samples + 2)
    offsets = (
        begin[4:first].view("<u4").astype(np.uint32, copy=False) if len(begin) >= first else np.empty(0, np.uint32)
    )
    if not (
        len(offsets)
        and int.from_bytes(begin[:4].tobytes(), "little") == samples
        and (is_apart or offsets[0] >= first)
        and offsets[-1] == nbytes
        and (offsets[1:] >= offsets[:-1]).all()
    ):
        raise SampleError(f"{where} is damaged: it does not hold the {samples} samples in its index; copy it again")
    return offsets.data


class ShardFiles:
    """Content of shards by number, read as byte ranges.

    Safe to use from several threads; pickles by path or address. Shards that were compressed as a whole are kept
    decompressed in the folder `cache`; `extra` is the extra that decompression requires. `cut` extracts the ends of a
    shard, None if they are not needed. `sizes` is the number of the dataset's samples in each shard, if it differs from
    that in the index. A missing file raises ObjectNotFoundError, in the constructor if its folder does not list it.
    """

    def __init__(
        self,
        shards: Sequence[tuple[IndexedFolder, ShardSource]],
        cut: CutEnds | None,
        extra: str,
        cache: Cache | Pathlike | None,
        *,
        sizes: Sequence[int] | None = None,
    ) -> None:
        folders, self.shards = [folder for folder, _ in shards], [shard for _, shard in shards]
        self._cut, self._sizes = cut or _no_ends, sizes
        files = _find_files(folders, self.shards)
        self._stored = FileSet([*map(_file, folders, files)])
        absent = next((number for number, file in enumerate(files) if file.info is None), None)
        if absent is not None:
            raise self._missing_error(absent)
        codecs = [shard.forms[file.name] for shard, file in zip(self.shards, files, strict=True)]
        self._check_sizes(codecs)
        inflations = [_inflation(shard, codec, extra) for shard, codec in zip(self.shards, codecs, strict=True)]
        self._files = PlainFiles(self._stored, inflations, cache) if any(inflations) else self._stored
        self._ends = ObjectEnds(self._objects() if cut else {}, self.shards, self._cut)

    def __fingerprint__(self) -> Any:
        """The shards and their locations, without cached contents."""
        return self.shards, self._stored

    def _check_sizes(self, codecs: Sequence[str | None]) -> None:
        """Raise SampleError for an uncompressed shard of another size than listed."""
        for number, (shard, codec) in enumerate(zip(self.shards, codecs, strict=True)):
            nbytes = self._stored.info(number).size
            if codec is None and nbytes != shard.nbytes:
                raise SampleError(
                    f"{self.where(number)} has {nbytes} bytes, its index says {shard.nbytes}; copy it again"
                )

    def _objects(self) -> dict[int, tuple[Store, ObjectInfo]]:
        """The shards that are read in ranges of objects."""
        stores = ((number, self._files.store(number)) for number in range(len(self._files)))
        return {number: (store, self._files.info(number)) for number, store in stores if store is not None}

    @property
    def is_local(self) -> bool:
        """True if all shards are local files."""
        return self._stored.is_local

    @property
    def names(self) -> list[str]:
        """Paths or addresses of all shards."""
        return self._stored.names

    def where(self, number: int) -> str:
        """Path or address of a shard, for messages."""
        return self._stored.name(number)

    def data(self, number: int) -> memoryview | None:
        """Content of a shard, mapped; None if it is read in ranges."""
        return self.file(number).data

    def ends(self, number: int) -> Ends:
        """Beginning and end of a shard."""
        data = self.data(number)
        if data is None:
            return self._ends[number]
        shard = self.shards[number]
        begin, end = self._cut(lambda start, stop: data[start:stop], shard.nbytes, shard.samples)
        return Ends(np.frombuffer(begin, np.uint8), np.frombuffer(end, np.uint8))

    def check(self) -> None:
        """Raise SampleError for the first shard whose hashes differ."""
        for number, shard in enumerate(self.shards):
            (data,) = self.read([Extent(number, 0, shard.nbytes)])
            check_hashes(np.frombuffer(data, np.uint8), shard.hashes, self.where(number))

    def read(self, extents: Sequence[Extent]) -> list[memoryview]:
        """One view per extent, read concurrently.

        Positions count in the uncompressed shard.
        """
        try:
            return self._files.read(extents)
        except ObjectNotFoundError:
            raise
        except FileNotFoundError as error:
            if error.filename not in self.names:  # a file of the cache
                raise
            raise self._missing_error(self.names.index(error.filename)) from error

    def file(self, number: int) -> File:
        """The file or object of a shard.

        StateError soon after a change of a local file. Call it before each use of its mapping, offsets included: an
        access to a page that was truncated would kill the process.
        """
        try:
            return self._files[number]
        except FileNotFoundError as error:
            if error.filename not in (None, self.where(number)):
                raise
            raise self._missing_error(number) from error

    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch for `read(extents)`."""
        return self._files.ranges(extents)

    def is_missing(self, number: int) -> bool:
        """True if a shard must be decompressed before it is read."""
        return self._files.is_missing(number)

    def _missing_error(self, number: int) -> ObjectNotFoundError:
        counts = [shard.samples for shard in self.shards] if self._sizes is None else self._sizes
        return ObjectNotFoundError(
            f"{self.where(number)} does not exist, but index.json lists it for {counts[number]} samples from number"
            f" {sum(counts[:number])} on: copy it there, or write the dataset again"
        )


def _no_ends(read: ReadBytes, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:  # noqa: ARG001 - a `Cut`
    return memoryview(b""), memoryview(b"")


class ShardFileFields(ShardedFields):
    """Dataset of records with fields, read from `ShardFiles`."""

    def __init__(self, files: ShardFiles) -> None:
        super().__init__((shard.samples for shard in files.shards), files)
        self._files = files

    @property
    def listing_fingerprint(self) -> str:
        """Digest of shard names and sizes, checked by saved loader states."""
        return digest_of(self._files.names, self.shard_sizes)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch into a cache for these samples."""
        if self._files.is_local:
            return []
        rows = [self._at(at) for at in normalize_indices(indices, len(self), type(self).__name__).tolist()]
        missing = {shard for shard in {shard for shard, _ in rows} if self._files.is_missing(shard)}
        # The spans of a shard that is not decompressed yet are unknown, so the whole shard is fetched.
        extents = [Extent(shard, *(0, 0) if shard in missing else self._span(shard, row)) for shard, row in rows]
        return self._files.ranges(extents)
