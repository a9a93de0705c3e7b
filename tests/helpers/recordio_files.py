"""A writer of RecordIO files, like that of MXNet: data is divided where it contains the magic number."""

from __future__ import annotations

import struct
from collections.abc import Sequence

MAGIC = b"\x0a\x23\xd7\xce"


def packed(number: int, labels: Sequence[float], image: bytes) -> bytes:
    """The data of a record with a single label, or with several."""
    head = (0, labels[0]) if len(labels) == 1 else (len(labels), 0.0)
    more = b"" if len(labels) == 1 else struct.pack(f"<{len(labels)}f", *labels)
    return struct.pack("<IfQQ", *head, number, 0) + more + image


def file_of(records: Sequence[bytes]) -> bytes:
    """The content of a file."""
    return b"".join(_record(data) for data in records)


def _record(data: bytes) -> bytes:
    cuts = [at for at in range(0, len(data) - 3, 4) if data[at : at + 4] == MAGIC]
    parts = [data[start:stop] for start, stop in zip([0, *(cut + 4 for cut in cuts)], [*cuts, len(data)], strict=True)]
    kinds = [0] if len(parts) == 1 else [1, *[2] * (len(parts) - 2), 3]
    return b"".join(
        struct.pack("<4sI", MAGIC, kind << 29 | len(part)) + part + bytes(-len(part) % 4)
        for kind, part in zip(kinds, parts, strict=True)
    )
