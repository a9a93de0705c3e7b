"""Where the record batches of Arrow objects lie, looked into once and kept on this machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from feedline.cancelling import DaemonPool
from feedline.datasets.descriptions import Descriptions, key_of
from feedline.datasets.ipc_layout import DamagedError, Layout, layout_of, unpacked
from feedline.datasets.uncached import uncached
from feedline.errors import SampleError
from feedline.stores.blobs import Blobs

_log = logging.getLogger("feedline")

_BLOCK_NBYTES = 16 << 20
_LAID_OUT_AT_ONCE = 8
"""Objects gone through at the same time, of each of which a block is in memory."""


def layouts_of(blobs: Blobs, kept: Descriptions) -> list[Layout]:
    """Of all objects; those that the index does not have are looked into, several at once."""
    keys = [key_of(blobs.name(number), blobs.info(number)) for number in range(len(blobs))]
    described = {number: found for number, key in enumerate(keys) if (found := kept.get(key)) is not None}
    lacking = [number for number in range(len(blobs)) if number not in described]
    if lacking:
        _log.info("%d Arrow objects are looked into, the first is %s", len(lacking), blobs.name(lacking[0]))
        with DaemonPool(_LAID_OUT_AT_ONCE) as pool:
            made = pool.map(lambda number: _laid_out(blobs, number).packed(), lacking)
            described |= zip(lacking, made, strict=True)
        kept.replace({key: described[number] for number, key in enumerate(keys)})
    return [unpacked(described[number]) for number in range(len(blobs))]


def damaged(what: str, error: Exception) -> SampleError:
    """What to raise where something is not what Arrow writes."""
    return SampleError(f"{what} is no whole Arrow file or stream ({error}); write it again, or leave it out")


def _laid_out(blobs: Blobs, number: int) -> Layout:
    blob = blobs[number]

    def blocks(start: int) -> Iterator[tuple[int, memoryview]]:
        _log.info(
            "%s is an Arrow stream, which has no table of contents: it is read from byte %d on; written as a file"
            " (pyarrow.ipc.new_file), it need not be",
            blob.name,
            start,
        )
        for at in range(start, blob.nbytes, _BLOCK_NBYTES):
            yield at, blob.read([(at, min(at + _BLOCK_NBYTES, blob.nbytes))])[0]

    try:
        return layout_of(blob.nbytes, uncached(blob), blocks)
    except DamagedError as error:
        raise damaged(blob.name, error) from error
