"""Shards listed in the index of a folder, read as byte ranges.

A shard is a local file, which is mapped, or an object in a store, which is read in ranges, many at once. A shard that
was compressed as a whole is first decompressed into a cache. The beginning and end of each object, which say where its
records are, are read once and kept on this machine.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from feedline.core.caches import PerProcess
from feedline.core.dataset import digest_of
from feedline.core.paths import Pathlike, make_folder, user_cache
from feedline.core.tensors import within
from feedline.core.threads import DaemonPool
from feedline.datasets.base import ShardedFields
from feedline.datasets.compression import InflatedFiles, check_hashes, inflate
from feedline.datasets.indexes import MetadataCache, key_of, place_of
from feedline.datasets.shards.folder import FolderFile, IndexedFolder
from feedline.errors import SampleError
from feedline.stores import Cache, CachedStore, CacheWarning, ObjectInfo, ObjectNotFoundError, ObjectRange, Store, join
from feedline.stores.cache import without_cache
from feedline.stores.files import Extent, FileSet, LazyList, LocalFile, RemoteBlob


class ShardSource(NamedTuple):
    """Shard as its index describes it.

    `forms` maps the names of the files that may hold it, in order of preference, to their codecs (None: uncompressed).
    """

    forms: Mapping[str, str | None]
    nbytes: int
    samples: int
    hashes: Mapping[str, str]


class ShardSources:
    """Files and objects behind shards, by number.

    Safe to use from several threads; pickles by path or address. Shards that were compressed as a whole are kept
    decompressed in the folder `cache`; `extra` is the extra that decompression requires.
    """

    def __init__(
        self, shards: Sequence[tuple[IndexedFolder, ShardSource]], extra: str, cache: Cache | Pathlike | None
    ) -> None:
        self.shards = [shard for _, shard in shards]
        self._folders, self._extra, self._own = [folder for folder, _ in shards], extra, uuid4().hex
        self._files = _find_files(self._folders, self.shards)
        self.blobs = FileSet([*map(_blob, self._folders, self._files)])
        """All shards by number, as they are stored."""
        self._inflated = InflatedFiles(cache if isinstance(cache, Cache) else Cache(_folder(cache)))

    def where(self, number: int) -> str:
        """Path or address of a shard, for messages."""
        return self._folders[number].where(self._files[number].name)

    def is_plain(self, number: int) -> bool:
        """True if a shard is not compressed as a whole."""
        return self._codec(number) is None

    def whole(self, number: int) -> memoryview:
        """Content of a compressed shard, mapped."""
        codec = self._codec(number)
        assert codec is not None
        version = self._version(self.blobs.info(number))
        return self._inflated.data(self.where(number), version, partial(self._inflate, number, codec))

    def whole_ranges(self, number: int) -> list[tuple[CachedStore, ObjectRange]] | None:
        """Object ranges to prefetch for `whole`.

        None if `whole` fetches nothing: for local, uncompressed and already decompressed shards.
        """
        info = self.blobs.info(number)
        is_local = self.blobs.store(number) is None
        if is_local or self.is_plain(number) or self._inflated.has(self.where(number), self._version(info)):
            return None
        return self.blobs.ranges([Extent(number, 0, info.size)])

    def _version(self, info: ObjectInfo) -> str:
        """Version under which an object is kept decompressed.

        An object without a version is kept for this dataset only.
        """
        return info.version if info.is_versioned else f"{info.version} {self._own}"

    def has_room(self) -> bool:
        """True if the cache has room for all decompressed shards.

        Warns with a CacheWarning if it has not.
        """
        packed = [shard.nbytes for number, shard in enumerate(self.shards) if self._codec(number) is not None]
        if not packed:
            return True
        cache = self._inflated.cache
        make_folder(cache.folder, f"cache={cache.folder!r}")
        limit = cache.limit_nbytes()
        if sum(packed) > limit:
            warnings.warn(
                f"decompressed, the shards of {self._folders[0].name} take {sum(packed):,} bytes, and the cache in"
                f" {cache.folder} keeps {limit:,}: in random order they are decompressed repeatedly. Pass"
                " cache=stores.Cache(folder, limit=...) with more room, or use samplers.ShardShuffled",
                CacheWarning,
                stacklevel=5,
            )
        return sum(packed) <= limit

    def _codec(self, number: int) -> str | None:
        return self.shards[number].forms[self._files[number].name]

    def _inflate(self, number: int, codec: str) -> NDArray[np.uint8]:
        shard, where = self.shards[number], self.where(number)
        (packed,) = self.blobs.read([Extent(number, 0, self.blobs.info(number).size)])
        data = inflate(np.frombuffer(packed, np.uint8), codec, shard.nbytes, where, self._extra)
        check_hashes(data, shard.hashes, where)
        return data

    def check_sizes(self) -> None:
        """SampleError for an uncompressed shard of another size than listed."""
        for number, shard in enumerate(self.shards):
            nbytes = self.blobs.info(number).size
            if self.is_plain(number) and nbytes != shard.nbytes:
                raise SampleError(
                    f"{self.where(number)} has {nbytes} bytes, its index says {shard.nbytes}; copy it again"
                )

    def missing(self) -> int | None:
        """Number of the first shard without a file, or None."""
        return next((number for number, file in enumerate(self._files) if file.info is None), None)


def _find_files(folders: Sequence[IndexedFolder], shards: Sequence[ShardSource]) -> list[FolderFile]:
    """File of each shard; those of one folder are looked up together."""
    files: dict[int, FolderFile] = {}
    for folder in dict.fromkeys(folders):
        mine = [number for number, each in enumerate(folders) if each is folder]
        files |= zip(mine, folder.files([tuple(shards[number].forms) for number in mine]), strict=True)
    return [files[number] for number in range(len(shards))]


def _blob(folder: IndexedFolder, file: FolderFile) -> tuple[Store | None, ObjectInfo]:
    return folder.store, file.info or ObjectInfo(file.name, 0, "")


def _folder(cache: Pathlike | None) -> Path:
    return Path(user_cache("inflated")) if cache is None else Path(cache)


_log = logging.getLogger("feedline")


_LENGTH_NBYTES = 8


Read = Callable[[int, int], memoryview]


Cut = Callable[[Read, int, int], tuple[memoryview, memoryview]]
"""Extracts the ends of a shard from `read(start, stop)`, its bytes and its samples.

It must not fail, whatever it reads.
"""


class Ends(NamedTuple):
    """The parts of a shard that its format needs for finding records."""

    begin: NDArray[np.uint8]
    end: NDArray[np.uint8]


class ObjectEnds:
    """Ends of objects by number.

    Those that are not cached are read all at once, by the constructor.

    Pickles with what opens the stores. `samples` is the number of samples of each object. These reads bypass the cache
    of a store, which would fetch a large piece for each.
    """

    def __init__(self, objects: Mapping[int, tuple[Store, ObjectInfo]], samples: Mapping[int, int], cut: Cut) -> None:
        self._objects = {number: (without_cache(store), info) for number, (store, info) in objects.items()}
        self._samples, self._cut = samples, cut
        self._known = MetadataCache(place_of("ends", sorted({store.url for store, _ in self._objects.values()}), None))
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
        _log.info("reading the record offsets of %d shards of %s, once; they are cached", len(self._objects), store.url)
        keys = {number: key for number in self._objects if (key := self._key(number)) is not None}
        with DaemonPool(thread_name_prefix="feedline-ends") as pool:
            self._known.replace(dict(zip(keys.values(), pool.map(self._known_or_read, keys), strict=True)))

    def _known_or_read(self, number: int) -> bytes | memoryview:
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
    """Offsets of the samples of an MDS or LitData shard.

    The last offset is the end of the last sample.

    They follow the number of samples at the beginning of the shard. SampleError for invalid offsets, which would read
    the wrong bytes.
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
        raise SampleError(f"{where} is damaged: it does not hold the {samples} samples in its index; copy it again")
    return offsets.data


_OPEN_AT_ONCE = 4
"""Shards fetched and decompressed at once; each takes memory for both forms."""


_MAPPED_WITHOUT_ROOM = 8
"""Decompressed shards kept mapped, and so on disk, if the cache lacks room."""


class ShardFiles:
    """Content of shards by number, read as byte ranges.

    Safe to use from several threads; pickles by path or address. `cut` extracts the ends of a shard, None if they are
    not needed. `sizes` is the number of the dataset's samples in each shard, if it differs from that in the index.
    Other arguments are those of `ShardSources`. A missing file raises ObjectNotFoundError, in the constructor if its
    folder does not list it.
    """

    def __init__(
        self,
        shards: Sequence[tuple[IndexedFolder, ShardSource]],
        cut: Cut | None,
        extra: str,
        cache: Cache | Pathlike | None,
        *,
        sizes: Sequence[int] | None = None,
    ) -> None:
        sources = self._sources = ShardSources(shards, extra, cache)
        self.shards, self._cut = sources.shards, cut or _no_ends
        absent = sources.missing()
        if absent is not None:
            raise _missing_error(sources, sizes, absent)
        sources.check_sizes()
        self._is_plain = [sources.is_plain(number) for number in range(len(shards))]
        self._sizes = sizes
        self._whole = LazyList(sources.whole, len(shards), None if sources.has_room() else _MAPPED_WITHOUT_ROOM)
        self._openers = PerProcess(partial(DaemonPool, _OPEN_AT_ONCE, "feedline-shards"))
        objects = {
            number: (store, sources.blobs.info(number))
            for number, is_plain in enumerate(self._is_plain)
            if is_plain and (store := sources.blobs.store(number)) is not None
        }
        samples = {number: self.shards[number].samples for number in objects}
        self._ends = ObjectEnds(objects if cut else {}, samples, self._cut)

    @property
    def is_local(self) -> bool:
        """True if all shards are local files."""
        return self._sources.blobs.is_local

    @property
    def names(self) -> list[str]:
        """Paths or addresses of all shards."""
        return [self.where(number) for number in range(len(self.shards))]

    def where(self, number: int) -> str:
        """Path or address of a shard, for messages."""
        return self._sources.where(number)

    def data(self, number: int) -> memoryview | None:
        """Content of a shard, mapped; None if it is read in ranges."""
        return self._file(number).data if self._is_plain[number] else self._whole[number]

    def check_unchanged(self, number: int) -> None:
        """StateError within moments of a change of a local shard.

        To be called before its mapping is used, offsets included: touching a page that was truncated away would kill
        the process.
        """
        if self._is_plain[number]:
            self._file(number)

    def ends(self, number: int) -> Ends:
        """Beginning and end of a shard."""
        data = self.data(number)
        if data is None:
            return self._ends[number]
        shard = self.shards[number]
        begin, end = self._cut(lambda start, stop: data[start:stop], shard.nbytes, shard.samples)
        return Ends(np.frombuffer(begin, np.uint8), np.frombuffer(end, np.uint8))

    def check(self) -> None:
        """SampleError for the first shard whose hashes differ from the index."""
        for number, shard in enumerate(self.shards):
            (data,) = self.read([Extent(number, 0, shard.nbytes)])
            check_hashes(np.frombuffer(data, np.uint8), shard.hashes, self.where(number))

    def read(self, extents: Sequence[Extent]) -> list[memoryview]:
        """One view per extent, read concurrently.

        Positions are those in the uncompressed shard.
        """
        plain = [each for each in extents if self._is_plain[each.blob]]
        if len(plain) == len(extents):
            return self._read_plain(plain)
        views = iter(self._read_plain(plain))
        others = self._open_shards({each.blob for each in extents if not self._is_plain[each.blob]})
        return [others[number][start:stop] if number in others else next(views) for number, start, stop in extents]

    def _read_plain(self, extents: Sequence[Extent]) -> list[memoryview]:
        try:
            return self._sources.blobs.read(extents)
        except ObjectNotFoundError:
            raise
        except FileNotFoundError as error:
            raise _missing_error(self._sources, self._sizes, self.names.index(error.filename)) from error

    def _file(self, number: int) -> LocalFile | RemoteBlob:
        """The file or object of a shard; StateError if it has changed."""
        try:
            return self._sources.blobs[number]
        except FileNotFoundError as error:
            raise _missing_error(self._sources, self._sizes, number) from error

    def ranges(self, extents: Sequence[Extent]) -> list[tuple[CachedStore, ObjectRange]]:
        """Object ranges to prefetch for `read(extents)`."""
        return self._sources.blobs.ranges([each for each in extents if self._is_plain[each.blob]])

    def whole_ranges(self, number: int) -> list[tuple[CachedStore, ObjectRange]] | None:
        """Object ranges to prefetch before a compressed object can be decompressed.

        None for other shards and for those already decompressed.
        """
        return self._sources.whole_ranges(number)

    def _open_shards(self, numbers: Collection[int]) -> dict[int, memoryview]:
        """Contents of these shards; several are fetched and decompressed at once."""
        if len(numbers) < 2:
            return {number: self._whole[number] for number in numbers}
        return dict(zip(numbers, self._openers().map(self._whole.__getitem__, numbers), strict=True))


def _missing_error(sources: ShardSources, sizes: Sequence[int] | None, number: int) -> ObjectNotFoundError:
    counts = [shard.samples for shard in sources.shards] if sizes is None else sizes
    return ObjectNotFoundError(
        f"{sources.where(number)} does not exist, but index.json lists it for {counts[number]} samples from number"
        f" {sum(counts[:number])} on: copy it there, or write the dataset again"
    )


def _no_ends(read: Read, nbytes: int, samples: int) -> tuple[memoryview, memoryview]:  # noqa: ARG001 - a `Cut`
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
        rows = [self._at(at) for at in within(indices, len(self), type(self).__name__).tolist()]
        whole = {shard: self._files.whole_ranges(shard) for shard in {shard for shard, _ in rows}}
        extents = [Extent(shard, *self._span(shard, row)) for shard, row in rows if whole[shard] is None]
        return [*(each for ranges in whole.values() for each in ranges or ()), *self._files.ranges(extents)]
