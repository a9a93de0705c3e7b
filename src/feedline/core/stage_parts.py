"""Parts of the stages of a worker: reads, decoding and transforms.

A part is timed with `with part:`, summed for each batch, and sent as one span of that batch.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Self

from feedline.core.kernels import native
from feedline.core.telemetry import PartFrame, Recorder, recorder_of_batches

READ, DECODE, TRANSFORM = "read", "decode", "transform"
"""Parts of the stages of a worker. The name of a read ends with its store: "read s3://bucket", "read files"."""


def is_part(stage: str) -> bool:
    """True for a part of the stages of a worker."""
    return stage in (DECODE, TRANSFORM) or stage.startswith(READ + " ")


class Part:
    """`with part:` counts the time of its block for the part.

    A part within another one interrupts it, so that no time counts twice. Outside of batches nothing is recorded. A
    part has no state, so threads share it.
    """

    __slots__ = ("stage",)

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __enter__(self) -> Self:
        recorder, frame = self._place()
        if recorder is not None and frame is not None:
            recorder.enter(frame, self.stage)
        return self

    def __exit__(self, *_: object) -> None:
        recorder, frame = self._place()
        if recorder is not None and frame is not None:
            recorder.leave(frame)

    @property
    def timed(self) -> bool:
        """True in a batch whose parts are timed."""
        return self._place()[1] is not None

    def count(self, nbytes: int) -> None:
        """Count bytes that the innermost part has read."""
        frame = self._place()[1]
        if frame is not None and frame.open:
            frame.open[-1].nbytes += nbytes

    def claim(self, elapsed_ns: int, nbytes: int) -> None:
        """Move time of the innermost part to this part."""
        recorder, frame = self._place()
        if recorder is not None and frame is not None and frame.open:
            recorder.claim(frame, self.stage, elapsed_ns, nbytes)

    @staticmethod
    def _place() -> tuple[Recorder | None, PartFrame | None]:
        recorder = recorder_of_batches()
        return recorder, None if recorder is None else recorder.timed_frame()


def new_part(stage: str) -> Part:
    """A part of a stage: native where possible, ten times faster."""
    stage = sys.intern(stage)  # recorders compare names by identity
    if native is not None and hasattr(native, "Part"):
        part: Part = native.Part(stage)
        return part
    return Part(stage)


@cache
def part(stage: str) -> Part:
    """The part of this name."""
    return new_part(stage)


MOST_STORES = 8
"""Number of stores per process with a part of their own; further stores share one part."""


_stores: dict[str, Part] = {}


def read_part(url: str) -> Part:
    """The part in which a store is read: "read s3://bucket"."""
    found = _stores.get(url)
    if found is None:
        scheme, _, rest = url.partition("://")
        known = {each.stage for each in _stores.values()}
        stage = f"{READ} {scheme}://{rest.partition('/')[0]}" if rest else f"{READ} {scheme}"
        if stage not in known and len(known) >= MOST_STORES:
            stage = f"{READ} other stores"
        found = part(stage)
        if len(_stores) < _MOST_URLS:
            _stores[url] = found
    return found


_MOST_URLS = 1024


READ_FILES = part(f"{READ} files")
"""The part in which files of this machine are read."""


DECODING, TRANSFORMING = part(DECODE), part(TRANSFORM)
