"""Index of a folder of Mosaic Streaming: its shards and their columns.

Mosaic writes binary shards (`mds`) and shards of text (`csv`, `tsv`, `xsv`, `json`). Each shard of text has a second
file with the offsets of its samples. An index may list shards of several formats, and is not trusted.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from feedline.datasets.shards.folder import IndexedFolder, check_count, check_file_name, check_samples, check_total
from feedline.datasets.shards.mds_values import fixed_nbytes
from feedline.errors import ArgumentError, SampleError

_SEPARATORS = {"csv": ",", "tsv": "\t"}


@dataclass(frozen=True, slots=True)
class MDSFile:
    """File listed in the index."""

    name: str
    nbytes: int
    hashes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MDSColumns:
    """Columns of a shard, by names and encodings.

    Subclasses define their places in a sample.
    """

    form: str
    names: tuple[str, ...]
    encodings: tuple[str, ...]

    def split(self, data: memoryview) -> Sequence[Any]:
        """Source of each column, for a decoder.

        ValueError or struct.error for a damaged sample.
        """
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class BinaryColumns(MDSColumns):
    """Consecutive values, after the sizes of those whose size varies.

    These are None in `sizes`.
    """

    sizes: tuple[int | None, ...]
    heads: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", f"<{self.sizes.count(None)}I")

    def split(self, data: memoryview) -> list[memoryview]:
        """Bytes of each column; ValueError unless they fill the sample."""
        lengths = iter(struct.unpack_from(self.heads, data))
        at, parts = struct.calcsize(self.heads), []
        for size in self.sizes:
            start, at = at, at + (next(lengths) if size is None else size)
            parts.append(data[start:at])
        if at != len(data):
            raise ValueError(f"its columns take {at} bytes of {len(data)}")
        return parts


@dataclass(frozen=True, slots=True)
class SeparatedColumns(MDSColumns):
    """A line of values with a string between them; nothing is quoted."""

    separator: str
    newline: str

    def split(self, data: memoryview) -> list[bytes]:
        """Bytes of each column; ValueError for another number of columns."""
        line = bytes(data)
        if not line.endswith(self.newline.encode()):
            raise ValueError("its line does not end")
        parts = line[: -len(self.newline.encode())].split(self.separator.encode())
        if len(parts) != len(self.names):
            raise ValueError(f"it has {len(parts)} columns of {len(self.names)}")
        return parts


@dataclass(frozen=True, slots=True)
class JSONColumns(MDSColumns):
    """A JSON object on a line."""

    def split(self, data: memoryview) -> list[Any]:
        """Value of each column; ValueError if one is missing."""
        found = json.loads(bytes(data))
        if not isinstance(found, dict):
            raise ValueError(f"it is not a JSON object, but of type {type(found).__name__}")
        absent = next((name for name in self.names if name not in found), None)
        if absent is not None:
            raise ValueError(f"it has no column {absent!r}")
        return [found[name] for name in self.names]


@dataclass(frozen=True, slots=True)
class MDSShard:
    """One shard; shards with equal columns share one `MDSColumns`.

    `raw` and `zipped` are the same file, plain and compressed. `meta` and `zipped_meta` have the offsets of samples; a
    binary shard has its own.
    """

    samples: int
    columns: MDSColumns
    raw: MDSFile
    zipped: MDSFile | None
    meta: MDSFile | None
    zipped_meta: MDSFile | None
    codec: str | None


def read_shards(folder: IndexedFolder, known: dict[MDSColumns, MDSColumns]) -> list[MDSShard]:
    """Read the shards listed in the index of a folder.

    Columns that are equal to columns in `known` are replaced by the latter; new ones are added. SampleError for a
    damaged index, ArgumentError for unsupported content.
    """
    data, path = folder.index("MDS data set"), folder.where("index.json")
    try:
        shards = [_parse_shard(each, known) for each in json.loads(data)["shards"]]
        check_total(shard.samples for shard in shards)
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        if isinstance(error, ArgumentError):
            raise ArgumentError(f"{path}: {error}") from None
        problem = f"{type(error).__name__}: {error}"
        raise SampleError(f"{path} is not an index of MDS shards ({problem}); copy it again") from error
    return shards


def _parse_shard(entry: dict[str, Any], known: dict[MDSColumns, MDSColumns]) -> MDSShard:
    form = entry["format"]
    if form not in ("mds", "csv", "tsv", "xsv", "json") or entry["version"] != 2:
        raise ArgumentError(
            f"shards of format {form} version {entry['version']}; MDS reads version 2 of mds, csv, tsv, xsv and json:"
            " rewrite them with MDSWriter"
        )
    columns = _parse_columns(form, entry)
    columns = known.setdefault(columns, columns)
    raw, zipped = _parse_files(entry, "data")
    assert raw is not None
    meta, zipped_meta = (None, None) if form == "mds" else _parse_files(entry, "meta")
    codec = entry["compression"] and str(entry["compression"]).partition(":")[0]
    number = check_samples(entry["samples"], (meta or raw).nbytes, f"the number of samples in {raw.name}")
    return MDSShard(number, columns, raw, zipped, meta, zipped_meta, codec or None)


def _parse_columns(form: str, entry: dict[str, Any]) -> MDSColumns:
    if form == "json":
        return JSONColumns(form, tuple(entry["columns"]), tuple(entry["columns"].values()))
    names, encodings = tuple(entry["column_names"]), tuple(entry["column_encodings"])
    if len(names) != len(encodings):
        raise ValueError("column names and encodings do not agree")
    if form == "mds":
        sizes = tuple(entry["column_sizes"])
        if sizes != tuple(map(fixed_nbytes, encodings)):
            raise ValueError("column names, encodings and sizes do not agree")
        return BinaryColumns(form, names, encodings, sizes)
    separator, newline = _SEPARATORS.get(form) or entry["separator"], entry["newline"]
    if not (isinstance(separator, str) and separator and isinstance(newline, str) and newline):
        raise ValueError(f"columns end with {separator!r}, and lines with {newline!r}")
    return SeparatedColumns(form, names, encodings, separator, newline)


def _parse_files(entry: dict[str, Any], what: str) -> tuple[MDSFile, MDSFile | None]:
    """Plain and compressed file of a shard's data or offsets."""
    zipped = entry[f"zip_{what}"]
    return _parse_file(entry[f"raw_{what}"]), _parse_file(zipped) if zipped else None


def _parse_file(entry: dict[str, Any]) -> MDSFile:
    name = check_file_name(entry["basename"])  # includes folders if Mosaic merged several indexes
    return MDSFile(name, check_count(entry["bytes"], f"the size of {name}"), dict(entry["hashes"]))
