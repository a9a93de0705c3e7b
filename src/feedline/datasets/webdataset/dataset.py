"""`TarShards`: random access to the samples of WebDataset tars."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.dataset import BatchRead, Traits, TransformFunction, check_reads_batches
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike
from feedline.core.rng import sample_rng, torch_keys
from feedline.core.sample_transform import SampleTransform
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import as_indices, normalize_index, normalize_indices
from feedline.datasets.decoding import check_names
from feedline.datasets.formats import FORMATS
from feedline.datasets.inflated import inflated
from feedline.datasets.paths import Paths, find, listed
from feedline.datasets.strings import PackedStrings
from feedline.datasets.webdataset import Head, Shard, ShardCache, Tars, is_image, tar
from feedline.datasets.webdataset.columns import (
    PSEUDO,
    MemberPlace,
    Own,
    ShardPart,
    TarColumn,
    TarDecoding,
    TransformedAlternatives,
    decode_function,
)
from feedline.datasets.webdataset.index_files import without_indexes
from feedline.errors import ArgumentError
from feedline.stores import Cache, CachedStore, ObjectRange
from feedline.stores.cache import MissingPieceError
from feedline.stores.files import Extent, FileSet
from feedline.stores.requests import FetchedRanges
from feedline.transforms import plan
from feedline.transforms.batched.encoded import decoded_on_device

T = TypeVar("T")


_OPEN_SHARDS = 128


_SHOWN = 20


_FIRST = np.zeros(1, np.int64)


Sources = Sequence[tuple[TarColumn, MemberPlace]]
"""The columns of one sample, each with the member that it decodes."""


class TarShards(torch.utils.data.Dataset[Any]):
    """Samples of WebDataset tars, read by index from files or object stores.

    `paths` is a path or an address, a folder, a pattern (`train-*.tar`, `s3://bucket/train-{0000..0127}.tar`) or a
    list of these. Samples keep the order of the shards, and within a shard the order in which their keys first appear.

    Without `columns` samples are dicts of `__key__` and all their fields. With it they are tuples: `("jpg;png",
    "cls")` takes the first alternative that a sample has; `__key__` and `__shard__` may be among them.

    Members are decoded by their extension (`webdataset.columns.DECODERS`; images become PIL images in RGB).
    `decode={"flac": function_of_the_bytes}` adds or replaces decoders, `decode=False` leaves all members as bytes.
    `decode="device"` wraps image transforms in `transforms.DecodeOnDevice`.
    `transform` takes the whole sample, or is a dict of transforms by field; one of the alternatives of a column stands
    for all of them, unless others have transforms, too. A feedline image transform, given for a
    field or by itself for all images, is fused with decoding, and takes uint8 `.npy` members (height, width, 3) as
    decoded images. The images of one sample share its random key, so they get the same boxes and flips. With
    `apply_exif_orientation`, images are turned upright.

    A truncated tar raises ShardError; with `allow_truncated`, its complete samples are read, without the last one if
    the cut may have taken a member from it. Samples are complete only if the members of each follow one another.
    Compressed tars, which have no random access, are decompressed once, into the folder `cache` or the user's cache
    folder: those that end in `.gz`, `.tgz`, `.zst`, `.tzst`, `.bz2`, `.tbz2`, `.xz` or `.txz`.

    The index of each tar is built on first use and stored: next to a file (see `open_index`), for an object in the
    user's cache folder, unless one is next to the object; or in the folder `index_dir`. Each process keeps at most
    `open_files` tars open. Objects are read through a cache in the folder `cache`, if one is given; `options` are
    passed to `open_store`. Pickles by path.
    """

    def __init__(
        self,
        paths: Paths,
        columns: Sequence[str] | None = None,
        *,
        decode: bool | Own | Literal["device"] = True,
        transform: TransformFunction | Mapping[str, TransformFunction] | None = None,
        apply_exif_orientation: bool = False,
        allow_truncated: bool = False,
        open_files: int = _OPEN_SHARDS,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if open_files < 1:
            raise ArgumentError(f"open_files={open_files} must be at least 1")
        found = _find_tars(paths, cache, options)
        self._files = inflated(found, [tar.opener_of(name) for name in found.names], cache)
        self._tars = Tars(self._files, index_dir=index_dir, allow_truncated=allow_truncated)
        heads = self._tars.heads()
        self._offsets = ShardOffsets(head.samples for head in heads)
        if not len(self):
            raise ArgumentError(f"no samples in {self.paths[0]}{' and the other tars' * (len(self.paths) > 1)}")
        prints = PackedStrings(head.fingerprint for head in heads)
        self._shards = ShardCache(self._tars, prints, open_files)
        self.columns = None if columns is None else _check_columns(columns)
        if decode == "device":
            transform, decode = decoded_on_device(transform), True
        self.transform = transform
        if not isinstance(decode, (bool, Mapping)):
            raise ArgumentError(
                f'decode={decode!r}: give a dict of functions by field or extension, False, or "device"'
            )
        own = {str(name).lower(): each for name, each in decode.items()} if isinstance(decode, Mapping) else {}
        self._settings = TarDecoding(decode is not False, own, apply_exif_orientation)
        self._known: dict[tuple[str, bool], TarColumn] = {}
        self._prepare(transform)
        self._check_fields(heads)
        if self.columns is None and self._settings.decode:
            self._check_no_pickles(heads)

    @property
    def paths(self) -> list[str]:
        """Paths and addresses of the tars, as they were found."""
        return self._files.names

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Samples per tar, int64, for `samplers.ShardShuffled`."""
        return self._offsets.sizes

    @property
    def listing_fingerprint(self) -> str:
        """Digest of tar names and sizes, checked by saved loader states."""
        return digest_of(self.paths, self.shard_sizes)

    def _prepare(self, transform: TransformFunction | Mapping[str, TransformFunction] | None) -> None:
        """Split the transform into transforms of fields, images and samples."""
        self._field_transforms: Mapping[str, TransformFunction] = {}
        self._image_transform: TransformFunction | None = None
        whole: TransformFunction | None = None
        if isinstance(transform, Mapping):
            self._field_transforms = transform
        elif transform is not None and not callable(transform):
            raise ArgumentError(
                f"transform must be a callable or a dict of callables by field, not {type(transform).__name__}"
            )
        elif plan(transform) is not None:
            self._image_transform = transform
        else:
            whole = transform
        self._whole = SampleTransform(whole)
        named = self.columns if self.columns is not None else tuple(self._field_transforms)
        self._columns = [self._column(name, named) for name in named]
        if self.columns is not None:
            _check_used(self._field_transforms, self._columns)
        free = plan(self._image_transform) if self.columns is None else None
        self._uses_keys = (
            self._whole.takes_rng or any(c.uses_keys for c in self._columns) or (free is not None and free.is_random)
        )

    def _check_fields(self, heads: Sequence[Head]) -> None:
        """Raise ArgumentError for names that are fields of no tar."""
        known = {field for head in heads for field in head.fields}
        for name in self.columns or ():
            if name not in PSEUDO and not any(each.strip().lower() in known for each in name.split(";")):
                raise _unknown_error("columns", name, known.union(PSEUDO))
        for name in self._field_transforms if self.columns is None else ():
            if name not in known:
                raise _unknown_error("transform", name, known)

    def _check_no_pickles(self, heads: Sequence[Head]) -> None:
        """Raise ArgumentError if all samples have a field that must be unpickled.

        A field that only some samples have is refused when it is read.
        """
        own, filled = self._settings.own, {number: head for number, head in enumerate(heads) if head.samples}
        for name in set.intersection(*(set(head.fields) for head in filled.values())):
            try:
                decode_function(name, own)
            except ArgumentError:
                if all(self._tars.index(number).counts()[name] == head.samples for number, head in filled.items()):
                    raise

    def _column(self, name: str, fields: Sequence[str]) -> TarColumn:
        """The column of a field of a sample with the given `fields`."""
        as_image = self._image_transform is not None and _takes_image_transform(name, fields)
        column = self._known.get((name, as_image))
        if column is None:
            each = _transforms_of(name, self._field_transforms)
            first, *others = each.values()
            if as_image or all(other == first for other in others):
                column = TarColumn(name, self._image_transform if as_image else first, self._settings)
            else:
                column = TransformedAlternatives(name, each, self._settings)
            self._known[name, as_image] = column
        return column

    def __len__(self) -> int:
        return len(self._offsets)

    def address(self, index: int) -> tuple[str, str]:
        """Tar and key of sample `index`."""
        shard, row = self._at(normalize_index(index, len(self), "TarShards"))
        return shard.tar, shard.index.key(row)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        places = normalize_indices(indices, len(self), "TarShards")
        if self._files.is_local:
            return []
        return self._files.ranges([extent for part in self._parts(places) for extent in self._extents(part)])

    def __getitem__(self, index: int) -> Any:
        """Sample `index` in its own memory; negative indices count from the end."""
        shard, row = self._at(normalize_index(index, len(self), "TarShards"))
        part = ShardPart(shard, _FIRST, np.array([row]), shard.get_loaded())
        [sample] = self._with_members([part], self._find_sources).values()
        return self._sample(*sample, None)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples of these indices; remote members are read together."""
        if type(self).__getitem__ is not TarShards.__getitem__:  # a subclass overrides `__getitem__`
            return [self[index] for index in indices]
        places = normalize_indices(as_indices(indices), len(self), "TarShards")
        found = self._with_members(self._parts(places), self._find_sources)
        return [self._sample(*found[at], at) for at in range(len(places))]

    def _find_sources(self, parts: Sequence[ShardPart]) -> dict[int, tuple[Shard, int, Sources]]:
        """Shard, row and sources of each sample, by row of the batch."""
        found: dict[int, tuple[Shard, int, Sources]] = {}
        for part in parts:
            for at, row, sources in zip(part.places.tolist(), part.rows.tolist(), self._sources(part), strict=True):
                found[at] = part.shard, row, sources
        return found

    def _at(self, at: int) -> tuple[Shard, int]:
        number, row = self._offsets.one(at)
        return self._shards[number], row

    def _sources(self, part: ShardPart) -> list[Sources]:
        """Columns and members of each sample of a part."""
        if self.columns is not None:
            return _by_sample(self._columns, part, part.rows)
        index = part.shard.index
        alike: dict[bytes, list[int]] = {}
        for number, has in enumerate(index.blocks[part.rows] > 0):
            alike.setdefault(has.tobytes(), []).append(number)
        found: list[Any] = [None] * len(part.rows)
        for numbers in alike.values():
            rows = part.rows[numbers]
            present = index.present(int(rows[0]))
            columns = [self._column(name, present) for name in present]
            for number, sources in zip(numbers, _by_sample(columns, part, rows), strict=True):
                found[number] = sources
        return found

    def _sample(self, shard: Shard, row: int, sources: Sources, batch_row: int | None) -> Any:
        rng = sample_rng(batch_row) if self._uses_keys else None
        if self.columns is not None:
            return self._whole.apply(tuple([column.value(place, rng) for column, place in sources]), rng)
        named = {column.spec: column.value(place, rng) for column, place in sources}
        return self._whole.apply({"__key__": shard.index.key(row), **named}, rng)

    @property
    def traits(self) -> Traits:
        """Traits: batches need `columns`, without transforms or PIL images of single samples."""
        plain = self.columns is not None and self._whole.transform is None and self._settings.decode
        own = type(self).__getitem__ is TarShards.__getitem__
        return Traits(
            thread_safe=True,
            reads_batches=own and plain and all(column.batchable for column in self._columns),
            uses_keys=self._uses_keys,
            supports_threads=any(column.supports_threads for column in self._columns),
        )

    def read_batch(self, request: BatchRead) -> list[Any]:
        """The batch of each field, with images decoded in place.

        TypeError if samples must be read one by one.
        """
        check_reads_batches(self)
        places, keys = normalize_indices(request.indices, len(self), "TarShards"), request.keys
        if keys is None and self._uses_keys:
            keys = torch_keys(len(places))

        def find_members(parts: Sequence[ShardPart]) -> list[list[MemberPlace]]:
            return [column.all_places(parts, len(places)) for column in self._columns]

        columns = zip(self._columns, self._with_members(self._parts(places), find_members), strict=True)
        return [column.batch(each, keys, request.allocate, threads=request.threads) for column, each in columns]

    def _parts(self, places: NDArray[np.int64]) -> list[ShardPart]:
        """Group samples by shard, opening each shard once."""
        shards = ((self._shards[number], at, rows) for number, at, rows in self._offsets.by_shard(places))
        return [ShardPart(shard, at, rows, shard.get_loaded()) for shard, at, rows in shards]

    def _with_members(self, parts: Sequence[ShardPart], use: Callable[[Sequence[ShardPart]], T]) -> T:
        """Apply `use` to the parts, with their members in memory.

        The store is not queried for members in files and caches.
        """
        try:
            return use(parts)
        except MissingPieceError:
            return use(self._with_fetched(parts))

    def _with_fetched(self, parts: Sequence[ShardPart]) -> list[ShardPart]:
        """Fetch the members of unmapped parts in one request."""
        wanted = [[] if part.shard.is_mapped else self._extents(part) for part in parts]
        views = iter(self._files.read([extent for extents in wanted for extent in extents]))
        return [
            part
            if part.shard.is_mapped
            else part._replace(loaded=FetchedRanges.of({extent[1:]: next(views) for extent in extents}))
            for part, extents in zip(parts, wanted, strict=True)
        ]

    @property
    def _choices(self) -> Sequence[Sequence[str]] | None:
        """The alternative fields of each column; None for all fields."""
        return None if self.columns is None else [column.members for column in self._columns if column.members]

    def _extents(self, part: ShardPart) -> list[Extent]:
        """Byte ranges of members, sorted."""
        shard = part.shard
        starts, stops = shard.spans(part.rows, self._choices)
        spans = set(zip(starts.tolist(), stops.tolist(), strict=True))
        return [Extent(shard.number, start, stop) for start, stop in sorted(spans)]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}  # filled while samples are read, so it must not be part of a fingerprint

    def __repr__(self) -> str:
        return f"<TarShards: {len(self)} samples in {len(self.paths)} tars>"


def _find_tars(paths: Paths, cache: Cache | Pathlike | None, options: Mapping[str, Any] | None) -> FileSet:
    given = [os.fspath(path) for path in listed(paths)]
    _check_no_commands(given)
    files = without_indexes(find(given, FORMATS["tar"].pattern, cache=cache, options=options))
    seen = set[str]()
    for name in files.names:
        if name in seen:
            raise ArgumentError(f"{name} is listed twice; its samples would be duplicated")
        seen.add(name)
    return files


def _by_sample(columns: Sequence[TarColumn], part: ShardPart, rows: NDArray[np.int64]) -> list[Sources]:
    if not columns:
        return [()] * len(rows)
    places = [column.places(part, rows) for column in columns]
    return [tuple(zip(columns, sample, strict=True)) for sample in zip(*places, strict=True)]


def _check_no_commands(given: Sequence[str]) -> None:
    for path in given:
        command = path.removeprefix("pipe:").split()
        if path.startswith("pipe:"):
            raise ArgumentError(
                f"'pipe:{command[0] if command else ''} ...' is a command, which TarShards does not run, because it "
                "reads samples in any order: give the address that the command reads (s3://, gs://, az://, https://, "
                "hf://), and a local folder as cache= to keep downloads"
            )


def _check_columns(columns: Sequence[str]) -> tuple[str, ...]:
    check_names(columns, "columns", "('jpg;png', 'cls')")
    return tuple(columns)


def _unknown_error(argument: str, name: str, known: Iterable[str]) -> ArgumentError:
    names = sorted(known)
    alike = [match for each in name.lower().split(";") for match in difflib.get_close_matches(each.strip(), names, 1)]
    return ArgumentError(
        f"{argument} names {name!r}, but no sample has this field; fields are {', '.join(names[:_SHOWN])}"
        f"{', …' * (len(names) > _SHOWN)}{f'. Did you mean {alike[0]!r}?' if alike else ''}"
    )


def _spellings(name: str) -> tuple[str, ...]:
    """Names by which `transform` may refer to this field."""
    return name, *(each.strip() for each in name.split(";"))


def _transforms_of(spec: str, given: Mapping[str, TransformFunction]) -> dict[str, TransformFunction | None]:
    """The transform of each alternative of a column.

    A transform for the column, or for a single alternative, is that of all alternatives without one of their own.
    """
    names = [each.strip() for each in spec.split(";")]
    own = [each for each in names if each in given]
    missing = [each for each in names if each not in given]
    shared = given.get(own[0] if len(own) == 1 and spec not in given else spec)
    if len(own) > 1 and missing and spec not in given:
        raise ArgumentError(
            f"transform names {' and '.join(map(repr, own))} of the column {spec!r}, but not {missing[0]!r}: give each "
            f"alternative a transform, or {spec!r} one for all"
        )
    return {each.lower(): given.get(each, shared) for each in names}


def _takes_image_transform(name: str, fields: Sequence[str]) -> bool:
    """True if a transform of all images applies to this field.

    It applies to encoded images, or, in samples without encoded images, to arrays.
    """
    if any(is_image(each) for spec in fields for each in _spellings(spec)):
        return any(map(is_image, _spellings(name)))
    return any(each.rpartition(".")[2] == "npy" for each in _spellings(name))


def _check_used(transforms: Mapping[str, TransformFunction], columns: Sequence[TarColumn]) -> None:
    known = {each for column in columns for each in _spellings(column.spec)}
    for name in transforms:
        if name not in known:
            raise ArgumentError(f"transform names the field {name!r}; fields are {', '.join(sorted(known))}")
