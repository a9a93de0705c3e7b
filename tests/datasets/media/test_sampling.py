from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_files import ffmpeg

from feedline.core.rng import Draws
from feedline.datasets import Clips
from feedline.datasets.media.frame_table import FrameTable
from feedline.datasets.media.sampling import ClipRule, FrameTimes, TooShortError

BASES = [Fraction(1, 1000), Fraction(1, 15360), Fraction(1, 90_000), Fraction(1001, 30_000)]
RATES = [Fraction(1), Fraction(5), Fraction(7), Fraction(30), Fraction(30_000, 1001)]


def rule(sampling: str, frames: int | None, fps: float, **changes: Any) -> ClipRule:
    return ClipRule(frames, 1, fps, sampling, **{"per_video": 1, "step": None, "short": "error", **changes})


@st.composite
def tables(draw: st.DrawFn) -> FrameTable:
    """Frames at any distances, at least a millisecond apart."""
    base = draw(st.sampled_from(BASES))
    least = max(1, int(Fraction(1, 1000) / base))
    gaps = draw(st.lists(st.integers(least, 9 * least), min_size=1, max_size=60))
    ends = draw(st.integers(0, 5 * least)) + np.cumsum([0, *gaps])
    pts = ends[:-1].astype(np.int64)
    order, unknown = np.arange(len(pts)), np.full(len(pts), -1)
    return FrameTable(base, int(ends[-1]), 64, 96, pts, pts[:1], order, order[:1], unknown, unknown, unknown[:1])


def times_of(table: FrameTable) -> FrameTimes:
    return FrameTimes(table.seconds, table.end_s, tolerance=table.rounding_s)


def assert_shown(table: FrameTable, chosen: np.ndarray, start: Fraction, fps: Fraction) -> None:
    """Each frame is shown at its time, within the rounding of time stamps."""
    slack = Fraction(table.rounding_s) + Fraction(1, 10**9)
    bounds = [Fraction(int(at)) * table.time_base for at in [*table.pts, table.end]]
    for row, number in enumerate(chosen.tolist()):
        at = start + row / fps
        assert number == 0 or bounds[number] <= at + slack, (row, number, at)
        assert at < bounds[number + 1] + slack, (row, number, at)


@given(tables(), st.sampled_from(RATES), st.fractions(0, 1, max_denominator=97), st.data())
def test_a_part_has_seconds_times_fps_frames_each_shown_at_its_time(
    table: FrameTable, fps: Fraction, share: Fraction, data: st.DataObject
) -> None:
    begin, end = (Fraction(int(at)) * table.time_base for at in (table.pts[0], table.end))
    start = begin + (end - begin) * share
    fitting = int((end - start) * fps)
    if not fitting:
        return
    wanted = data.draw(st.integers(1, fitting))
    times = times_of(table).between(float(start), float(start + wanted / fps))
    chosen = rule("whole", None, float(fps)).pick(times, 0, Draws(0))
    assert len(chosen) == wanted
    assert_shown(table, chosen, start, fps)


@given(tables(), st.sampled_from(RATES), st.integers(1, 12), st.integers(0, 2**32))
def test_clips_are_within_the_video(table: FrameTable, fps: Fraction, frames: int, key: int) -> None:
    times, end = times_of(table), Fraction(table.end) * table.time_base
    begin = Fraction(int(table.pts[0])) * table.time_base
    sliding = rule("sliding", frames, float(fps))
    count = sliding.count(times)
    assert count >= max(1, int((end - begin) * fps / frames)), "the clips that fit, one behind the other"
    for clip in range(count):
        start = begin + clip * frames / fps
        if start + (frames - 1) / fps + Fraction(table.rounding_s) < end:
            assert_shown(table, sliding.pick(times, clip, Draws(0)), start, fps)
    if (frames - 1) / fps < end - begin - Fraction(table.rounding_s):
        for sampling, per_video in [("random", 1), ("regular", 1), ("regular", 2)]:
            drawn = rule(sampling, frames, float(fps), per_video=per_video).pick(times, per_video - 1, Draws(key))
            assert len(drawn) == frames
            assert (np.diff(drawn) >= 0).all()
    else:
        with pytest.raises(TooShortError):
            rule("random", frames, float(fps)).pick(times, 0, Draws(key))


def test_a_rate_above_that_of_the_video_fills_it() -> None:
    times = FrameTimes(np.arange(40) / 10, 4.0)
    thirty = rule("sliding", 30, 30.0)
    assert thirty.count(times) == 4
    assert thirty.pick(times, 3, Draws(0)).tolist() == [*np.repeat(range(30, 40), 3)]


def test_a_part_behind_the_end_has_no_frames() -> None:
    times = FrameTimes(np.arange(20) / 10, 2.0)
    assert len(times.between(2.0, None).seconds) == 0
    assert times.between(1.96, None).first == 19
    with pytest.raises(TooShortError, match="no frame between start and stop of the manifest"):
        rule("whole", None, 5.0).pick(times.between(7.0, 9.0), 0, Draws(0))


def test_every_frame_is_shown_once_at_the_rate_of_a_video_with_rounded_time_stamps(tmp_path: Path) -> None:
    ffmpeg("-f lavfi -i testsrc2=size=32x32:rate=30:duration=2 -c:v mpeg4 x.mkv", tmp_path)  # stamps in milliseconds
    all_frames = Clips(tmp_path / "x.mkv", frames=None, fps=30.0, index_dir=tmp_path)[0]
    assert len(all_frames["seconds"]) == 60
    assert np.abs(all_frames["seconds"].numpy() - np.arange(60) / 30).max() <= 0.0005
    between = [{"path": "x.mkv", "start": 0.41, "stop": 1.41}]
    part = Clips(tmp_path, manifest=between, frames=None, sampling="whole", fps=5.0, index_dir=tmp_path)[0]
    assert part["seconds"].tolist() == [0.4, 0.6, 0.8, 1.0, 1.2]
