"""A format from outside: RecordIO, in which MXNet's `im2rec` packs images with their labels.

Each part of a record is a magic number, its length with two flags, and data padded to four bytes. A record whose data
hold the magic number is divided there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import feedline as fl
from feedline.datasets import File, IndexRecipe, Record, RecordDataset, Stream

MAGIC = b"\x0a\x23\xd7\xce"
WHOLE, FIRST, MIDDLE, LAST = range(4)
HEAD_NBYTES = 8  # the magic number; kind of part, and length
LABELED_NBYTES = 24  # count of labels that follow, the label if none do, two numbers


def scan(file: File) -> dict[str, np.ndarray]:
    """The byte range of each record, found in one pass over the file."""
    stream, starts, stops = Stream(file), list[int](), list[int]()
    while stream.at < file.nbytes:
        at = stream.at
        kind, padded, _ = parse_head(stream.take(HEAD_NBYTES))
        if kind is None or (kind in (WHOLE, FIRST)) != (len(starts) == len(stops)):
            raise fl.errors.SampleError(f"{file.name} has no record at byte {at}: it is damaged, or no RecordIO file")
        stream.take(padded)
        if kind in (WHOLE, FIRST):
            starts.append(at)
        if kind in (WHOLE, LAST):
            stops.append(stream.at)
    if len(starts) != len(stops):
        raise fl.errors.SampleError(f"{file.name} ends within a record; was the file copied completely?")
    return {"starts": np.array(starts, np.int64), "stops": np.array(stops, np.int64)}


def fits(file: File, arrays: Mapping[str, np.ndarray]) -> bool:
    """True if an index from elsewhere is that of this file, judged by its end and a few records."""
    starts, stops = arrays["starts"], arrays["stops"]
    if len(starts) != len(stops) or not len(stops) or stops[-1] != file.nbytes:
        return False
    some = starts[:: max(1, len(starts) // 16)].tolist()
    return all(view == MAGIC for view in file.read([(at, at + len(MAGIC)) for at in some]))


def parse_head(data: memoryview) -> tuple[int | None, int, int]:
    """Kind of a part, length of its data with padding, and without; None for the kind if there is no part."""
    magic, word = struct.unpack("<4sI", data)
    length = word & (1 << 29) - 1
    return word >> 29 if magic == MAGIC and word >> 29 <= LAST else None, length + -length % 4, length


def parts_of(data: memoryview) -> Iterator[memoryview]:
    """The data of the parts of a record."""
    while data:
        _, padded, length = parse_head(data[:HEAD_NBYTES])
        yield data[HEAD_NBYTES : HEAD_NBYTES + length]
        data = data[HEAD_NBYTES + padded :]


def label_of(data: Any) -> torch.Tensor:
    """One label as a number, several as a vector, without the count in front."""
    labels = torch.from_numpy(np.frombuffer(data, "<f4", offset=4).astype(np.float32))
    return labels if int.from_bytes(data[:4], "little") else labels[0]


def number_of(data: Any) -> int:
    """An unsigned number."""
    return int.from_bytes(data, "little")


RECIPE = IndexRecipe(lambda name: f".{name}.index", scan, fits)


class RecordIO(RecordDataset):
    """Images of RecordIO files with number and label, as dicts.

    `decode` is "image", "bytes" or a function of the encoded image. `transform` is a function of the sample, or a dict
    of functions by field. The other arguments are those of feedline's own datasets.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        decode: Any = "image",
        transform: Any = None,
        index_dir: str | Path | None = None,
        cache: Any = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            paths,
            RECIPE,
            {"id": number_of, "label": label_of, "image": decode},
            inside=FORMAT.pattern,
            transform=transform,
            index_dir=index_dir,
            cache=cache,
            options=options,
        )

    def fields(self, record: Record) -> dict[str, Any]:
        """The encoded fields of a record; the base class decodes and transforms them."""
        parts = list(parts_of(record.data))
        data = parts[0] if len(parts) == 1 else memoryview(MAGIC.join(parts))
        count, _, number, _ = struct.unpack("<IfQQ", data[:LABELED_NBYTES])
        image = LABELED_NBYTES + 4 * count
        label = data[:4].tobytes() + data[LABELED_NBYTES:image].tobytes() if count else data[:8]
        return {"id": number.to_bytes(8, "little"), "label": label, "image": data[image:]}


FORMAT = fl.datasets.Format(
    "RecordIO", ("recordio_dataset:RecordIO",), "images of RecordIO", ("RecordIO(paths)",), pattern="**/*.rec"
)

fl.datasets.register_format("recordio", FORMAT)
