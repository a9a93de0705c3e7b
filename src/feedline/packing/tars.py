"""The samples of tar shards in WebDataset's layout, through the same index that reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from feedline.errors import ArgumentError
from feedline.packing.samples import Listing, Part, Readable, Sample
from feedline.shards import Index, build_index, glance, open_index

CLASSES = "classes.json"


def listed(tars: Sequence[str]) -> Listing:
    """The samples of tars, tar after tar; ShardError for one that cannot be read."""
    groups = [samples_in(open_index(tar) if glance(tar) else build_index(tar)) for tar in tars]
    found = [sample for group in groups for sample in group]
    if not found:
        raise ArgumentError(f"{', '.join(tars)} hold no samples: members are named KEY.FIELD, such as 0001.jpg")
    return Listing(found, _classes(tars), shards=list(map(len, groups))).with_unique_keys()


def samples_in(index: Index, blob: Readable | None = None) -> list[Sample]:
    """The samples of the tar that an index is of, which is a file or this object."""
    return [
        Sample(key, None, tuple(_part(index, row, field, blob) for field in index.present(row)))
        for row, key in enumerate(index.keys)
    ]


def _part(index: Index, row: int, field: str, blob: Readable | None) -> Part:
    column = index.fields.index(field)
    place = index.start(row, column), int(index.sizes[row, column]), index.member(row, column)
    return Part(field, index.tar, *place, index.has_grids and index.grid(row, column) is not None, blob)


def _classes(tars: Sequence[str]) -> list[str] | None:
    """The class names that lie beside the tars, if those beside all of them are the same."""
    found = {_text(Path(tar).parent / CLASSES) for tar in tars}
    text = found.pop()
    return None if found or text is None else list(map(str, json.loads(text)))


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8") if path.is_file() else None
