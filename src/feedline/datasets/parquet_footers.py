"""The footers of Parquet files: read many at once, and those of many files kept on this machine."""

from __future__ import annotations

import logging
import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from feedline import extras
from feedline.cancelling import DaemonPool
from feedline.datasets.descriptions import Descriptions
from feedline.datasets.kinds import bare, pyarrow
from feedline.datasets.parquet_files import WHAT, Files, naming
from feedline.errors import SampleError
from feedline.per_process import PerProcess
from feedline.stores.recent import Recent

_log = logging.getLogger("feedline")

_GLANCE_NBYTES = 64 << 10
_TAIL_NBYTES = 8
"""The length of the footer, then PAR1."""
_READ_AT_ONCE = 32
_PARSED = 256
_KEPT_FROM = 1000
"""From so many files of this machine on, opening a table takes noticeably longer than looking into an index."""

_SIZES = struct.Struct("<IIQ")


class Summary(NamedTuple):
    """What has to be known of every file before any is read."""

    sizes: bytes
    """The rows of each row group, int64."""
    schema: bytes
    """The Arrow schema, as Arrow serializes it."""
    largest_nbytes: int
    """Of its largest row group, in all its columns, not compressed."""


class Footers:
    """The footers of files by number. Pickles without them: what is not kept in the index is read again."""

    def __init__(self, files: Files, index: str) -> None:
        self._files = files
        self._kept = Descriptions(index)
        self._parsed: PerProcess[Recent[int, Any]] = PerProcess(partial(Recent, _PARSED))

    def summaries(self) -> list[Summary]:
        """Of all files; SampleError names one that is no Parquet file."""
        numbers = range(len(self._files.names))
        if self._files.is_local and len(numbers) < _KEPT_FROM:
            return [_split(self._made(number))[0] for number in numbers]
        keys = [self._files.key(number) for number in numbers]
        described = {number: kept for number in numbers if (kept := self._get(keys[number])) is not None}
        lacking = [number for number in numbers if number not in described]
        if lacking:
            _log.info("the footers of %d Parquet files are read, the first is %s", len(lacking), self._name(lacking[0]))
            described |= zip(lacking, self._made_at_once(lacking), strict=True)
            self._kept.replace({keys[number]: described[number] for number in numbers})
        return [_split(described[number])[0] for number in numbers]

    def footer(self, number: int) -> memoryview:
        """The end of a file from the footer on."""
        kept = self._get(self._files.key(number))
        return _split(self._made(number) if kept is None else kept)[1]

    def metadata(self, number: int) -> Any:
        """The footer as pyarrow's FileMetaData."""
        parsed = self._parsed()
        found = parsed.get(number)
        if found is None:
            with naming(self._name(number)):
                buffer = pyarrow(WHAT).BufferReader(self.footer(number))
                found = parsed.put(number, extras.load("pyarrow.parquet", "arrow", WHAT).read_metadata(buffer))
        return found

    def _name(self, number: int) -> str:
        return self._files.names[number]

    def _get(self, key: bytes | None) -> memoryview | None:
        found = self._kept.get(key)
        return None if found is None else memoryview(found)

    def _made_at_once(self, numbers: Sequence[int]) -> Iterator[memoryview]:
        with DaemonPool(_READ_AT_ONCE) as pool:
            yield from pool.map(self._made, numbers)

    def _made(self, number: int) -> memoryview:
        """The description of a file, worked out from its footer."""
        footer = self._read(number)
        arrow = pyarrow(WHAT)
        with naming(self._name(number)):
            file = extras.load("pyarrow.parquet", "arrow", WHAT).ParquetFile(arrow.BufferReader(footer))
            metadata = self._parsed().put(number, file.metadata)
            groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
            sizes = np.array([group.num_rows for group in groups], "<i8").tobytes()
            largest = max((group.total_byte_size for group in groups), default=0)
            schema = bare(file.schema_arrow).serialize().to_pybytes()
        return memoryview(b"".join([_SIZES.pack(len(sizes), len(schema), max(0, largest)), sizes, schema, footer]))

    def _read(self, number: int) -> memoryview:
        """One request, but for footers that are longer than usual."""
        nbytes, name = self._files.nbytes(number), self._name(number)
        start = max(0, nbytes - _GLANCE_NBYTES)
        glance = self._files.read(number, start, nbytes) if nbytes else memoryview(b"")
        wanted = _TAIL_NBYTES + (int.from_bytes(glance[-_TAIL_NBYTES:-4], "little") if nbytes > _TAIL_NBYTES else 0)
        if bytes(glance[-4:]) != b"PAR1" or wanted > nbytes:
            raise SampleError(
                f"{name} cannot be read: it is damaged, cut short, or not Parquet (no footer is at its end); write it"
                " again or leave it out"
            )
        if wanted <= len(glance):
            return glance[-wanted:]
        return memoryview(bytes(self._files.read(number, nbytes - wanted, start)) + bytes(glance))


def _split(description: memoryview) -> tuple[Summary, memoryview]:
    sizes, schema, largest = _SIZES.unpack_from(description)
    first, second = _SIZES.size + sizes, _SIZES.size + sizes + schema
    summary = Summary(bytes(description[_SIZES.size : first]), bytes(description[first:second]), largest)
    return summary, description[second:]
