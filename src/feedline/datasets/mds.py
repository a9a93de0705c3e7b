"""`MDS`: the shards that Mosaic's StreamingDataset reads, in any order."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decoding, split_transform
from feedline.datasets.files import Pathlike
from feedline.datasets.inflating import inflated_file, refuse_other
from feedline.datasets.lazily import Lazily
from feedline.datasets.mds_encodings import decoder, is_picture
from feedline.datasets.mds_index import Columns, Shard, shards_of
from feedline.datasets.records import Field, FieldRecords
from feedline.errors import ArgumentError, SampleError


class MDS(FieldRecords):
    """The samples of an MDS folder (with its `index.json`) as dicts of what Mosaic's own reader gives.

    `columns` picks some; those encoded as pickle are never read. `transform` is a function of the sample, or functions
    by column. Compressed shards are decompressed on first use into the folder `cache` (by default one in the user's
    cache folder), and their hashes compared where the index has some; `check_hashes` compares those of the others now.
    """

    def __init__(
        self,
        path: Pathlike,
        *,
        columns: Sequence[str] | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        cache: Pathlike | None = None,
        check_hashes: bool = False,
    ) -> None:
        self.path = str(Path(path).resolve())
        shards = shards_of(Path(self.path))
        names = (
            tuple(columns) if columns is not None else tuple(dict.fromkeys(n for s in shards for n in s.columns.names))
        )
        by_column, whole = split_transform(transform, names)
        super().__init__(whole)
        self._sizes = np.array([shard.samples for shard in shards], np.int64)
        self._firsts = np.cumsum([0, *self._sizes])
        kinds = dict.fromkeys(shard.columns for shard in shards)
        layouts = {kind: _layout(kind, names, by_column, self.path) for kind in kinds}
        parts = tuple((shard, layouts[shard.columns]) for shard in shards)
        self._shards = Lazily(partial(_opened, Path(self.path), parts, cache), len(shards))
        self._layouts = tuple(layouts.values())
        if check_hashes:
            for number, shard in enumerate(shards):
                self._shards[number].check(shard.raw.hashes)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The samples of each shard, for `ShardShuffled`."""
        return self._sizes

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _decodings(self) -> list[Decoding]:
        """Of all shards: a column that is encoded otherwise in some of them has no one decoding."""
        return [decoding for layout in self._layouts for _, _, decoding in layout.wanted]

    def _fields(self, at: int) -> dict[str, Field]:
        number = int(np.searchsorted(self._firsts, at, side="right")) - 1
        return self._shards[number].fields(at - int(self._firsts[number]))


@dataclass(frozen=True, slots=True)
class _Layout:
    """How samples of some shards are laid out, and what decodes the columns that are wanted."""

    heads: str
    sizes: tuple[int | None, ...]
    wanted: tuple[tuple[int, str, Decoding], ...]

    def spans(self, data: memoryview) -> list[tuple[int, int]]:
        """From where to where each column goes; ValueError if it goes too far."""
        lengths = iter(struct.unpack_from(self.heads, data))
        at, found = struct.calcsize(self.heads), []
        for size in self.sizes:
            start, at = at, at + (next(lengths) if size is None else size)
            found.append((start, at))
        if at != len(data):
            raise ValueError(f"its columns take {at} bytes of {len(data)}")
        return found


class _Opened:
    """A shard whose file is mapped."""

    def __init__(self, path: Path, samples: int, layout: _Layout) -> None:
        self._path, self._layout = path, layout
        self._whole: NDArray[np.uint8] = np.memmap(path, np.uint8, "r").view(np.ndarray)
        self._data = self._whole.data
        self._offsets = _offsets(self._whole, samples, path)

    def fields(self, at: int) -> dict[str, Field]:
        """The chosen columns of a sample."""
        data = self._data[self._offsets[at] : self._offsets[at + 1]]
        try:
            spans = self._layout.spans(data)
        except (ValueError, struct.error) as error:
            raise SampleError(f"{self._where(at)} is damaged ({error}); copy the shard again") from error
        fields = {}
        for number, name, decoding in self._layout.wanted:
            start, stop = spans[number]
            fields[name] = Field(decoding, data[start:stop], partial(self._where, at, name))
        return fields

    def check(self, hashes: Mapping[str, str]) -> None:
        """SampleError if the file has not these."""
        refuse_other(self._whole, hashes, str(self._path))

    def _where(self, at: int, name: str | None = None) -> str:
        return f"{'' if name is None else f'column {name!r} of '}sample {at} of {self._path}"


def _offsets(whole: NDArray[np.uint8], samples: int, path: Path) -> memoryview:
    """Where samples begin, and where the last one ends; checked, because a wrong one would read something else."""
    first = 4 * (samples + 2)
    offsets = (
        whole[4:first].view("<u4").astype(np.uint32, copy=False) if len(whole) >= first else np.empty(0, np.uint32)
    )
    if not (
        len(offsets)
        and int(whole[:4].view("<u4")[0]) == samples
        and offsets[0] >= first
        and offsets[-1] == len(whole)
        and (offsets[1:] >= offsets[:-1]).all()
    ):
        raise SampleError(f"{path} is damaged: it does not hold {samples} samples, as its index says; copy it again")
    return offsets.data


def _layout(columns: Columns, names: Sequence[str], by_column: Mapping[str, Transform], path: str) -> _Layout:
    wanted = []
    for name in names:
        if name not in columns.names:
            raise ArgumentError(f"{path} has shards without a column {name!r}; they have {', '.join(columns.names)}")
        number = columns.names.index(name)
        wanted.append((number, name, _decoding(name, columns.encodings[number], by_column.get(name), path)))
    return _Layout(f"<{columns.sizes.count(None)}I", columns.sizes, tuple(wanted))


def _decoding(name: str, encoding: str, transform: Transform | None, path: str) -> Decoding:
    if is_picture(encoding) and transform is not None:
        return Decoding("image", transform)
    try:
        return Decoding(decoder(encoding), transform)
    except ArgumentError as error:
        raise ArgumentError(f"column {name!r} of {path} is encoded as {error}; leave it out with columns=") from None


def _opened(folder: Path, parts: tuple[tuple[Shard, _Layout], ...], cache: Pathlike | None, number: int) -> _Opened:
    shard, layout = parts[number]
    path = folder / shard.raw.name
    if not path.exists() and shard.zipped is not None and shard.codec is not None:
        path = folder / shard.zipped.name
        path = inflated_file(path, shard.codec, shard.raw.nbytes, "mds", cache, shard.raw.hashes)
    found = path.stat().st_size
    if found != shard.raw.nbytes:
        raise SampleError(f"{path} has {found} bytes, its index promises {shard.raw.nbytes}; copy it again")
    return _Opened(path, shard.samples, layout)
