"""Positions and frames of clips.

Everything here is a pure function of a file's times, the number of the clip, and one random key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from feedline.core.arguments import check_one_of
from feedline.core.rng import Draws
from feedline.errors import ArgumentError, SampleError

Short = Literal["error", "repeat_last", "wrap"]
"""What to do with a video that is shorter than a clip."""


_SAME_TIME_S = 1e-6
"""Times of containers are rounded, at worst to a microsecond here."""


class TooShortError(SampleError):
    """The file is shorter than what is to be read of it."""


@dataclass(frozen=True, slots=True)
class Times:
    """The frames that clips may be taken of.

    `seconds`: the time of each, ascending; `end`: the time at which the last one ends. `first` is the number of the
    first of them in the video.
    """

    seconds: NDArray[np.float64]
    end: float
    first: int = 0

    def between(self, start: float | None, stop: float | None) -> Times:
        """The frames that are shown in the seconds `[start, stop)`."""
        low = 0 if start is None else max(0, self.frame_at(start))
        high = len(self.seconds)
        if stop is not None:
            high = int(np.searchsorted(self.seconds, stop - _SAME_TIME_S, "left"))
        end = self.end if stop is None else min(stop, self.end)
        return Times(self.seconds[low:high], end, self.first + low)

    def frame_at(self, seconds: float) -> int:
        """The frame that is shown at a time; -1 before the first."""
        return int(np.searchsorted(self.seconds, seconds + _SAME_TIME_S, "right")) - 1


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
            raise ArgumentError("frames=None goes with sampling='whole', which has all frames of a video")
        for name, count in (("frames", self.frames), ("stride", self.stride), ("clips_per_video", self.per_video)):
            if count is not None and count < 1:
                raise ArgumentError(f"{name}={count!r} must be at least 1")
        if self.fps is not None and (self.stride != 1 or not self.fps > 0):
            raise ArgumentError(f"fps={self.fps!r} must be positive, and takes the place of stride=")
        if self.sampling in ("uniform", "segments") and (self.fps is not None or self.stride != 1):
            raise ArgumentError(f"sampling={self.sampling!r} spreads the frames over the video: omit stride= and fps=")
        if self.sampling in ("sliding", "whole") and self.per_video != 1:
            raise ArgumentError(f"the length of a video decides about its clips with sampling={self.sampling!r}")
        if self.step is not None and (self.sampling != "sliding" or not self.step > 0):
            raise ArgumentError(f"step={self.step!r} must be positive, and goes with sampling='sliding'")
        if self.step is not None and self.fps is None and self.step != int(self.step):
            raise ArgumentError(f"step={self.step!r} counts frames: give a whole number, or fps= to count seconds")

    @property
    def is_random(self) -> bool:
        """True if clips are drawn."""
        return self.sampling in ("random", "segments")

    def count(self, times: Times) -> int:
        """The number of clips of a video."""
        if self.sampling != "sliding" or not len(times.seconds):
            return self.per_video
        first, last = self._starts(times)
        return 1 + max(0, int((last - first) / self._step + _SAME_TIME_S))

    def pick(self, times: Times, clip: int, draws: Draws) -> NDArray[np.int64]:
        """The frame numbers of clip `clip`; one may repeat.

        TooShortError if the video is shorter than a clip, and `short` is "error".
        """
        if not len(times.seconds):
            raise TooShortError("there is no frame between the start and stop that the manifest gives")
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

    def _starts(self, times: Times) -> tuple[float, float]:
        """First and last start: a frame, or seconds with `fps`."""
        if self.frames is None:
            return (0, 0) if self.fps is None else (times.seconds[0], times.seconds[0])
        if self.fps is None:
            return 0, len(times.seconds) - 1 - (self.frames - 1) * self.stride
        return times.seconds[0], times.seconds[-1] - (self.frames - 1) / self.fps

    def _place(self, first: float, last: float, clip: int, draws: Draws) -> float:
        if self.sampling == "random":
            return draws.between(first, last) if self.fps is not None else first + draws.below(int(last - first) + 1)
        if self.sampling == "sliding":
            return first + clip * self._step
        share = 0.5 if self.per_video == 1 else clip / (self.per_video - 1)
        start = first + (last - first) * share
        return start if self.fps is not None else int(start)

    def _frames_from(self, times: Times, start: float) -> NDArray[np.int64]:
        count = len(times.seconds)
        if self.fps is None:
            wanted = -(-count // self.stride) if self.frames is None else self.frames
            chosen = int(start) + self.stride * np.arange(wanted)
            return self._fit(chosen, chosen < count, times)
        whole = max(1, int(np.ceil((times.end - start) * self.fps - _SAME_TIME_S)))
        wanted = whole if self.frames is None else self.frames
        at = start + np.arange(wanted) / self.fps
        chosen = np.searchsorted(times.seconds, at + _SAME_TIME_S, "right") - 1
        return self._fit(np.maximum(chosen, 0), at < times.end - _SAME_TIME_S, times)

    def _fit(self, chosen: NDArray[np.int64], inside: NDArray[np.bool_], times: Times) -> NDArray[np.int64]:
        """Replace what lies behind the end, as `short` says."""
        have = max(1, int(inside.sum()))
        if have >= len(chosen):
            return chosen
        if self.short == "error":
            every = f"every {self.stride}" if self.fps is None else f"{self.fps:g} a second"
            raise TooShortError(
                f"a clip of {len(chosen)} frames ({every}) is longer than the {len(times.seconds)} frames "
                f"({times.end - times.seconds[0]:.3f} s) that there are: pass short='repeat_last' or 'wrap', a smaller "
                "frames=, or on_error='skip' to the loader"
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
