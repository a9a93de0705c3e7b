"""Damaged videos: FFmpeg conceals what it can, and feedline must not."""

from __future__ import annotations

import contextlib
import io
import random
import re
from pathlib import Path
from typing import Any

import av
import fsspec
import numpy as np
import pytest
from diagonals import diagonal_by_day
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from media_files import VIDEOS, ffmpeg, write_video
from rounds import rounds

import feedline as fl
from feedline.datasets import Clips
from feedline.datasets.media.frame_table import any_metadata
from feedline.errors import SampleError

REPORTING = ["h264.mp4", "mpeg4.mp4", "mpeg4.avi", "open-gop.mkv"]
"""Videos whose decoders report damage in the packet that has it."""


def by_number(path: Path | str, index_dir: Path) -> Clips:
    return Clips(path, frames=1, sampling="sliding", index_dir=index_dir)


def reported(data: bytes) -> set[int]:
    """Time stamps of the packets and frames that FFmpeg reports as damaged."""
    damaged = set()
    with av.open(io.BytesIO(data), **any_metadata()) as container:
        for packet in container.demux(video=0):
            try:
                damaged.update(frame.pts for frame in packet.decode() if frame.is_corrupt)
            except av.FFmpegError:
                damaged.add(packet.pts)
    return damaged


def packets(path: Path) -> list[tuple[int, int, int]]:
    """Place, size and time stamp of each, without those that are shown before the keyframe they follow."""
    found, key = [], 0
    with av.open(str(path)) as container:
        for packet in container.demux(video=0):
            if packet.size:
                key = packet.pts if packet.is_keyframe else key
                if packet.pts >= key:
                    found.append((packet.pos, packet.size, packet.pts))
    return found


@pytest.mark.parametrize("name", REPORTING)
def test_a_frame_that_needs_a_damaged_one_is_never_given(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path, name, VIDEOS[name], seconds=1)
    whole = [clip["frames"].numpy() for clip in map(by_number(path, tmp_path).__getitem__, range(30))]
    good, spans, rng, lost, intact = path.read_bytes(), packets(path), random.Random(1), 0, 0
    for attempt in range(24):
        pos, size, pts = rng.choice(spans)
        bad = bytearray(good)
        bad[pos + rng.randrange(size // 2, size)] ^= 1 << rng.randrange(8)
        if pts not in reported(bytes(bad)):
            continue
        (damaged := tmp_path / f"{attempt}-{name}").write_bytes(bytes(bad))
        clips = by_number(damaged, tmp_path)
        given = {}
        for number in rng.sample(range(len(clips)), len(clips)):  # the verdict is that of the file, in any order
            with contextlib.suppress(SampleError):
                given[number] = clips[number]["frames"].numpy()
        lost += len(given) < 30
        intact += len(given)
        assert all(np.array_equal(frame, whole[number]) for number, frame in given.items()), (attempt, pts)
        if lost >= 4:
            break
    assert lost
    assert intact, "frames of other groups can be read"


CUT = {
    **{name: VIDEOS[name] for name in ("h264.mp4", "hevc.mp4", "av1.mp4", "vp9.webm", "open-gop.mkv", "mpeg4.avi")},
    "index-first.mp4": "-c:v libx264 -preset ultrafast -movflags +faststart",
    "fragments.mp4": "-c:v libx264 -preset ultrafast -g 12 -movflags frag_keyframe+empty_moov",
    "flash.flv": "-c:v libx264 -preset ultrafast",
}


@pytest.mark.parametrize("name", CUT)
def test_a_truncated_video_is_an_error_that_can_be_skipped(tmp_path: Path, name: str) -> None:
    path = write_video(tmp_path, name, CUT[name])
    whole = path.read_bytes()
    assert len(by_number(path, tmp_path)) == 60
    for share in (0.7, 0.95):
        (cut := tmp_path / f"{share}-{name}").write_bytes(whole[: int(len(whole) * share)])
        clips = Clips([cut, path], frames=4, sampling="regular", index_dir=tmp_path)
        with pytest.raises(SampleError, match=r"is truncated|cannot be decoded") as caught:
            clips[0]
        assert str(cut) in str(caught.value)
        with fl.DataLoader(clips, 2, on_error="skip") as loader:
            (batch,) = loader
            assert len(batch["frames"]) == 1
            assert loader.stats().skipped == 1


@pytest.fixture(scope="module")
def whole_videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("videos")
    names = {**{name: CUT[name] for name in CUT if not name.startswith("open")}, "a.mkv": CUT["flash.flv"]}
    sound = "-f lavfi -i sine=duration=1 -c:v libtheora"
    return {
        name: write_video(folder, name, settings, seconds=1).read_bytes()
        for name, settings in {**names, "sound.ogv": sound, "sound.mkv": f"{sound} -c:a flac"}.items()
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=rounds(25, 300))
@given(st.data(), st.integers(1, 1 << 20), st.booleans())
def test_a_video_cut_anywhere_is_an_error_or_has_all_its_frames(
    tmp_path: Path, whole_videos: dict[str, bytes], data: st.DataObject, cut: int, is_short: bool
) -> None:
    name = data.draw(st.sampled_from(sorted(whole_videos)))
    whole = whole_videos[name]
    (path := tmp_path / name).write_bytes(whole[: len(whole) - 1 - cut % (400 if is_short else len(whole) - 1)])
    clips = by_number(path, tmp_path / "index")
    with contextlib.suppress(SampleError):
        assert clips[len(clips) - 1]["frames"].shape[0] == 1
        assert len(clips) == 30


JOINED = dict.fromkeys(("a.mpg", "a.mkv"), VIDEOS["mpeg4.mp4"]) | {
    "a.ts": VIDEOS["h264.mp4"],
    "fragments.mp4": CUT["fragments.mp4"],
}


@pytest.mark.parametrize(("name", "offset"), diagonal_by_day([*JOINED], [0, 0.5]))
def test_videos_that_cat_has_joined_are_named(tmp_path: Path, name: str, offset: float) -> None:
    """Their time stamps overlap, and a frame is found by its time stamp."""
    first = write_video(tmp_path, name, JOINED[name]).read_bytes()
    second = write_video(tmp_path, f"b{name}", f"{JOINED[name]} -output_ts_offset {offset}").read_bytes()
    (path := tmp_path / f"c{name}").write_bytes(first + second)
    with pytest.raises(SampleError, match=f"{path} has several frames at one time stamp, or time stamps that go back"):
        by_number(path, tmp_path)[0]


def test_a_header_that_is_cut_is_no_error_of_the_disk(tmp_path: Path) -> None:
    whole = write_video(tmp_path, "a.mkv", CUT["flash.flv"]).read_bytes()
    for nbytes in range(1, 600, 9):
        (path := tmp_path / f"{nbytes}.mkv").write_bytes(whole[:nbytes])
        with pytest.raises(SampleError, match=re.escape(str(path))):
            by_number(path, tmp_path / "index")[0]
        fsspec.filesystem("memory").pipe(f"/cut/{nbytes}.mkv", whole[:nbytes])
        with pytest.raises(SampleError, match=f"memory://cut/{nbytes}.mkv"):
            by_number(f"memory://cut/{nbytes}.mkv", tmp_path / "index")[0]
    fsspec.filesystem("memory").rm("/cut", recursive=True)


def test_frames_do_not_depend_on_a_damaged_index(tmp_path: Path) -> None:
    """FFmpeg counts the time stamps of AVI from the place to which the index leads."""
    path = write_video(tmp_path, "a.avi", VIDEOS["mpeg4.avi"])
    data, whole = path.read_bytes(), by_number(path, tmp_path / "whole")
    expected, order = whole.__getitems__(range(len(whole))), list(reversed(range(0, len(whole), 7)))
    begin = data.rindex(b"idx1") + 8
    wrong = 0
    for entry in range(0, len(whole), 5):
        at = begin + 16 * entry
        path.write_bytes(data[:at] + b"\xff" + data[at + 1 :])
        clips = by_number(path, tmp_path / f"index {entry}")
        for number in order:
            with contextlib.suppress(SampleError):
                wrong += not np.array_equal(clips[number]["frames"], expected[number]["frames"])
    assert wrong == 0


def test_a_stream_may_end_anywhere_and_has_the_frames_before(tmp_path: Path) -> None:
    path = write_video(tmp_path, "x.ts", VIDEOS["open-gop.ts"])
    whole = by_number(path, tmp_path)
    (cut := tmp_path / "cut.ts").write_bytes(path.read_bytes()[: 188 * 205])
    clips = by_number(cut, tmp_path)
    assert 30 < len(clips) < 60
    for number in range(len(clips) - 4):
        assert np.array_equal(clips[number]["frames"], whole[number]["frames"])


@pytest.mark.parametrize("edit", ["-ss 0.5 -t 1 -i x.mp4 -c copy", "-i x.mp4 -t 1.2 -c copy"])
def test_a_video_that_was_cut_by_an_edit_list_is_whole(tmp_path: Path, edit: str) -> None:
    write_video(tmp_path, "x.mp4")
    ffmpeg(f"{edit} y.mp4", tmp_path)
    clips: Any = by_number(tmp_path / "y.mp4", tmp_path)
    assert len([clips[number] for number in range(len(clips))]) >= 30
