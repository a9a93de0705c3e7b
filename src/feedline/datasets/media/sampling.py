"""Positions and frames of clips.

All functions here are pure functions of a file's times, the number of the clip, and one random key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feedline.core.arguments import check_one_of
from feedline.core.rng import Draws
from feedline.errors import ArgumentError, SampleError

Short = Literal["error", "repeat_last", "wrap"]
"""Treatment of videos that are shorter than a clip."""


_SAME_TIME_S = 1e-6
"""Default of `FrameTimes.tolerance`; larger than the rounding errors of numbers of 64 bits."""


class TooShortError(SampleError):
    """The file is shorter than the part to be read."""


@dataclass(frozen=True, slots=True)
class FrameTimes:
    """The frames that clips may be taken from.

    `seconds`: the time of each, ascending. They are shown from `start`, by default the time of the first one, until
    `end`. `first` is the number of the first of them in the video. `tolerance`: times that differ by no more seconds
    are equal; the time stamps of a file are rounded.
    """

    seconds: NDArray[np.float64]
    end: float
    first: int = 0
    start: float = -np.inf
    tolerance: float = _SAME_TIME_S

    @property
    def begin(self) -> float:
        """The first time at which a frame is shown."""
        return max(self.start, float(self.seconds[0]))

    def between(self, start: float | None, stop: float | None) -> FrameTimes:
        """The frames that are shown in the seconds `[start, stop)`."""
        start = self.start if start is None else start
        end = self.end if stop is None else min(stop, self.end)
        low = max(0, int(self.shown_at(np.array(start))))
        high = int(np.searchsorted(self.seconds, end - self.tolerance, "left"))
        if start >= end - self.tolerance:
            high = low
        return replace(self, seconds=self.seconds[low:high], end=end, first=self.first + low, start=start)

    def shown_at(self, seconds: NDArray[np.float64]) -> NDArray[np.intp]:
        """The frame that is shown at each time; -1 before the first."""
        return np.searchsorted(self.seconds, seconds + self.tolerance, "right") - 1


@dataclass(frozen=True, slots=True)
class ClipRule:
    """Positions of clips in a video, and their frames.

    A clip has `frames` frames: every `stride`-th, or those shown `1 / fps` seconds apart. `per_video` and `step` are
    described by `Clips`.
    """

    frames: int | None
    stride: int
    fps: float | None
    sampling: str
    per_video: int
    step: float | None
    short: Short

    def __post_init__(self) -> None:
        check_one_of("sampling", self.sampling, _PLACES)
        check_one_of("short", self.short, get_args(Short))
        if (self.frames is None) != (self.sampling == "whole"):
            raise ArgumentError("frames=None and sampling='whole' belong together: pass both or neither")
        for name, count in (("frames", self.frames), ("stride", self.stride), ("clips_per_file", self.per_video)):
            if count is not None and count < 1:
                raise ArgumentError(f"{name}={count!r} must be at least 1")
        if self.fps is not None and (self.stride != 1 or not 0 < self.fps < np.inf):
            raise ArgumentError(
                f"fps={self.fps!r} must be positive and finite, and replaces stride=: pass only one of them"
            )
        if self.sampling in ("uniform", "segments") and (self.fps is not None or self.stride != 1):
            raise ArgumentError(f"sampling={self.sampling!r} spreads the frames over the video: omit stride= and fps=")
        if self.sampling in ("sliding", "whole") and self.per_video != 1:
            raise ArgumentError(
                f"with sampling={self.sampling!r}, the length of a video determines its clips: omit clips_per_file="
            )
        if self.step is not None and (self.sampling != "sliding" or not 0 < self.step < np.inf):
            raise ArgumentError(f"step={self.step!r} must be positive and finite, and is only for sampling='sliding'")
        if self.step is not None and self.fps is None and self.step != int(self.step):
            raise ArgumentError(f"step={self.step!r} counts frames: give a whole number, or fps= to count seconds")

    @property
    def is_random(self) -> bool:
        """True if clips are drawn."""
        return self.sampling in ("random", "segments")

    def count(self, times: FrameTimes) -> int:
        """The number of clips of a video."""
        if self.sampling != "sliding" or not len(times.seconds):
            return self.per_video
        first, last = self._starts(times)
        slack = 0 if self.fps is None else times.tolerance
        return 1 + max(0, int((last - first + slack) / self._step))

    def pick(self, times: FrameTimes, clip: int, draws: Draws) -> NDArray[np.int64]:
        """The frame numbers of clip `clip`; a number may repeat.

        TooShortError if the video is shorter than a clip, and `short` is "error".
        """
        if not len(times.seconds):
            raise TooShortError("there is no frame between start and stop of the manifest: correct them")
        if self.sampling in ("uniform", "segments"):
            return times.first + self._spread(len(times.seconds), clip, draws)
        first, last = self._starts(times)
        start = first
        if last > first:
            start = self._place(first, last, clip, draws)
        return times.first + self._frames_from(times, start)

    @property
    def _step(self) -> float:
        assert self.frames is not None
        span = self.frames * self.stride if self.fps is None else self.frames / self.fps
        return span if self.step is None else self.step

    def _starts(self, times: FrameTimes) -> tuple[float, float]:
        """First and last start: a frame, or seconds with `fps`."""
        if self.frames is None:
            return (0, 0) if self.fps is None else (times.begin, times.begin)
        if self.fps is None:
            return 0, len(times.seconds) - 1 - (self.frames - 1) * self.stride
        # The clip ends with the video, or with a last frame whose duration is less than that of a frame of the clip.
        return times.begin, max(float(times.seconds[-1]), times.end - 1 / self.fps) - (self.frames - 1) / self.fps

    def _place(self, first: float, last: float, clip: int, draws: Draws) -> float:
        if self.sampling == "random":
            return draws.between(first, last) if self.fps is not None else first + draws.below(int(last - first) + 1)
        if self.sampling == "sliding":
            return first + clip * self._step
        share = 0.5 if self.per_video == 1 else clip / (self.per_video - 1)
        start = first + (last - first) * share
        return start if self.fps is not None else int(start)

    def _frames_from(self, times: FrameTimes, start: float) -> NDArray[np.int64]:
        count = len(times.seconds)
        if self.fps is None:
            wanted = -(-count // self.stride) if self.frames is None else self.frames
            chosen = int(start) + self.stride * np.arange(wanted)
            return self._fit(chosen, chosen < count, times)
        end = times.end - times.tolerance
        whole = max(1, int(np.ceil((end - start) * self.fps)))
        at = start + np.arange(whole if self.frames is None else self.frames) / self.fps
        return self._fit(np.maximum(times.shown_at(at), 0), at < end, times)

    def _fit(self, chosen: NDArray[np.int64], inside: NDArray[np.bool_], times: FrameTimes) -> NDArray[np.int64]:
        """Replace frames after the end by the rule `short`."""
        have = max(1, int(inside.sum()))
        if have >= len(chosen):
            return chosen
        if self.short == "error":
            every = f"every {self.stride}" if self.fps is None else f"{self.fps:g} a second"
            raise TooShortError(
                f"a clip of {len(chosen)} frames ({every}) is longer than the {len(times.seconds)} frames "
                f"({times.end - times.begin:.3f} s) from which it is taken: pass short='repeat_last' or 'wrap', a "
                "smaller frames=, or on_error='skip' to the loader"
            )
        rows = np.arange(len(chosen))
        return chosen[np.minimum(rows, have - 1) if self.short == "repeat_last" else rows % have]

    def _spread(self, count: int, clip: int, draws: Draws) -> NDArray[np.int64]:
        """One frame of each of `frames` equal parts."""
        assert self.frames is not None
        if self.sampling == "segments":
            shares = np.array([draws.unit() for _ in range(self.frames)])
        else:
            shares = np.full(self.frames, (clip + 0.5) / self.per_video)
        chosen = ((np.arange(self.frames) + shares) * count / self.frames).astype(np.int64)
        last: NDArray[np.int64] = np.minimum(chosen, count - 1)
        return last


_PLACES = ("random", "regular", "sliding", "uniform", "segments", "whole")
