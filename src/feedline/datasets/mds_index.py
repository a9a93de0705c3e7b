"""`index.json` of an MDS folder: what its shards hold, read without trust."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from feedline.datasets.indexed_folders import IndexedFolder
from feedline.datasets.mds_encodings import fixed_nbytes
from feedline.datasets.promises import count, file_name, refuse_overflow, samples
from feedline.errors import ArgumentError, SampleError


@dataclass(frozen=True, slots=True)
class File:
    """A file that the index promises."""

    name: str
    nbytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns in the order in which they are stored; a size is None where each value has its own."""

    names: tuple[str, ...]
    encodings: tuple[str, ...]
    sizes: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard; those with equal columns share them."""

    samples: int
    columns: Columns
    raw: File
    zipped: File | None
    codec: str | None


def shards_of(folder: IndexedFolder, known: dict[Columns, Columns]) -> list[Shard]:
    """The shards that the index in this folder names; SampleError tells what is wrong with it.

    Columns that are in `known` are given as they are there; others are added.
    """
    data, path = folder.index("MDS data set"), folder.where("index.json")
    try:
        shards = [_shard(each, known) for each in json.loads(data)["shards"]]
        refuse_overflow(shard.samples for shard in shards)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise ArgumentError(f"{path}: {error}") from None
        raise SampleError(f"{path} is no index of MDS shards ({type(error).__name__}: {error})") from error
    return shards


def _shard(told: dict[str, Any], known: dict[Columns, Columns]) -> Shard:
    if told["format"] != "mds" or told["version"] != 2:
        raise ArgumentError(f"shards of format {told['format']} version {told['version']}; MDS reads mds version 2")
    encodings, sizes = tuple(told["column_encodings"]), tuple(told["column_sizes"])
    names = tuple(told["column_names"])
    if not len(names) == len(encodings) == len(sizes) or sizes != tuple(map(fixed_nbytes, encodings)):
        raise ValueError("column names, encodings and sizes do not agree")
    zipped = told["zip_data"] and _file(told["zip_data"])
    codec = told["compression"] and str(told["compression"]).partition(":")[0]
    columns = Columns(names, encodings, sizes)
    columns = known.setdefault(columns, columns)
    raw = _file(told["raw_data"])
    number = samples(told["samples"], raw.nbytes, f"the number of samples in {raw.name}")
    return Shard(number, columns, raw, zipped or None, codec or None)


def _file(told: dict[str, Any]) -> File:
    name = file_name(told["basename"])  # with folders, if Mosaic merged the indexes of several
    return File(name, count(told["bytes"], f"the size of {name}"), dict(told["hashes"]))
