"""Clips of 16 frames: feedline, and loops that open, seek and decode for each sample with PyAV, decord and torchcodec.

All read the same frames, which is checked first, without workers. Rates are per second of CPU time, of all threads:
wall time depends on how many idle cores PyAV's, decord's and torch's threads find.
"libavcodec alone" decodes the packets of these frames in decoders that stay open, and drops the frames: no reader with
one thread of libavcodec can be faster. torchcodec's sampler draws the clips of a video with one call;
"feedline, a video a batch" draws as many, with a batch for each video. decord is installed in a folder of its own;
torchcodec's wheels need a build of torch with CUDA, and where it cannot be imported, it is left out. FFmpeg makes the
videos: H.264, 320 × 240, a keyframe every 30 frames, 20 seconds or 10 minutes long.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import av
import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader, Dataset

import feedline as fl
from harness import Contest

sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "helpers"))

from peers import decord as installed_decord

VIDEOS, CLIPS, FRAMES, BATCH, RATE = 4, 8, 16, 4, 30
REPEATS = 30
"""How often a long video repeats a short one."""
SOUNDS, RANGES = 16, 16
TORCHCODEC = "torchcodec, a loop per sample"

Read = Callable[[str, int], torch.Tensor]
"""The frames of the clip that begins with this frame of a video."""


class Loop(Dataset[Any]):
    """One sample by a function of path and number."""

    def __init__(self, paths: list[str], numbers: list[int], read: Read) -> None:
        self.paths, self.numbers, self.read = paths, numbers, read

    def __len__(self) -> int:
        return len(self.paths) * len(self.numbers)

    def __getitem__(self, index: int) -> torch.Tensor:
        path, number = divmod(index, len(self.numbers))
        return self.read(self.paths[path], self.numbers[number])


def by_pyav(path: str, start: int) -> torch.Tensor:
    """The usual code: open, seek, decode up to the clip."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        first = round(start / stream.average_rate / stream.time_base)
        container.seek(first, stream=stream)
        frames = []
        for frame in container.decode(stream):
            if frame.pts >= first:
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1))
            if len(frames) == FRAMES:
                break
    return torch.stack(frames)


def by_decord(path: str, start: int) -> torch.Tensor:
    clip = importlib.import_module("decord").VideoReader(path, num_threads=1).get_batch(range(start, start + FRAMES))
    return torch.from_numpy(clip.asnumpy()).permute(0, 3, 1, 2)


def by_torchcodec(path: str, start: int) -> torch.Tensor:
    clip: torch.Tensor = open_torchcodec(path).get_frames_in_range(start, start + FRAMES).data
    return clip


def open_torchcodec(path: str) -> Any:
    return importlib.import_module("torchcodec.decoders").VideoDecoder(path, num_ffmpeg_threads=1)


def draw_by_torchcodec(path: str) -> torch.Tensor:
    """All clips of a video, by torchcodec's own sampler."""
    draw = importlib.import_module("torchcodec.samplers").clips_at_random_timestamps
    clips = draw(open_torchcodec(path), num_clips=CLIPS, num_frames_per_clip=FRAMES, seconds_between_frames=1 / RATE)
    return torch.as_tensor(clips.data)


class LibavcodecAlone:
    """Decoding of the packets that a clip needs, in decoders that stay open; no pixels are returned."""

    def __init__(self, paths: list[str]) -> None:
        self.streams = {path: av.open(path).streams.video[0] for path in paths}
        packets = [packet for packet in av.open(paths[0]).demux(video=0) if packet.pts is not None]
        self.order = {packet.pts: number for number, packet in enumerate(packets)}
        self.shown, self.keys = sorted(self.order), [packet.pts for packet in packets if packet.is_keyframe]

    def __call__(self, path: str, start: int) -> None:
        stream, wanted = self.streams[path], set(self.shown[start : start + FRAMES])
        first, last = min(wanted), max(wanted, key=self.order.__getitem__)
        stream.container.seek(self.keys[bisect_right(self.keys, first) - 1], stream=stream)
        for packet in stream.container.demux(stream):
            stream.codec_context.skip_frame = "NONREF" if packet.pts < first else "DEFAULT"
            packet.decode()
            if packet.pts == last:
                break
        stream.codec_context.decode(None)


def by_soundfile(path: str, index: int) -> torch.Tensor:
    with soundfile.SoundFile(path) as file:
        file.seek(int(np.random.default_rng(index).integers(0, file.frames - file.samplerate)))
        return torch.from_numpy(file.read(file.samplerate, dtype="float32"))


def drained(loader: Any) -> None:
    for _ in loader:
        pass


def available(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a wheel of another build fails in many ways
        print(f"{name} is left out: {type(error).__name__}: {error!s:.100}")
        return False
    return True


def write_videos(folder: Path) -> tuple[list[str], list[str]]:
    """The paths of short and of long videos."""
    short, long = ([str(folder / f"{kind}{number}.mp4") for number in range(VIDEOS)] for kind in ("short", "long"))
    source = ["-f", "lavfi", "-i", f"testsrc2=size=320x240:rate={RATE}:duration=20"]
    for path, longer in zip(short, long, strict=True):
        encode = [*source, "-c:v", "libx264", "-g", str(RATE), path]
        repeat = ["-stream_loop", str(REPEATS - 1), "-i", path, "-c", "copy", longer]
        for command in (encode, repeat):
            subprocess.run(["ffmpeg", "-loglevel", "error", *command], check=True)
    return short, long


def compare_clips(name: str, videos: list[str], folder: str, loops: dict[str, Read]) -> None:
    clips = fl.datasets.Clips(videos, frames=FRAMES, sampling="regular", clips_per_file=CLIPS, index_dir=folder)
    numbers = [round(clips[number]["seconds"][0].item() * RATE) for number in range(CLIPS)]
    contest = Contest(f"clips of 16 frames of {name}", unit="clips/s of CPU", baseline="PyAV, a loop per sample")

    def add(name: str, fn: Callable[[], object]) -> None:
        def clips_per_cpu_second() -> float:
            start = process_time()
            fn()
            return len(clips) / (process_time() - start)

        contest.measure(name, clips_per_cpu_second)

    for loop, read in loops.items():
        dataset = Loop(videos, numbers, read)
        for row in range(CLIPS):
            assert torch.equal(dataset[row], clips[row]["frames"]), (loop, row)
        theirs = DataLoader(dataset, BATCH, shuffle=True)
        add(loop, lambda theirs=theirs: drained(theirs))
    alone = LibavcodecAlone(videos)
    places = [(path, number) for path in videos for number in numbers]
    add("libavcodec alone", lambda: [alone(*place) for place in places])
    ours = fl.DataLoader(clips, BATCH, shuffle=True, seed=0)
    add("feedline", lambda: drained(ours))
    packages = ["av", "decord"]
    if TORCHCODEC in loops:
        add("torchcodec, its sampler", lambda: [draw_by_torchcodec(video) for video in videos])
        packages.append("torchcodec")
    drawn = fl.datasets.Clips(videos, frames=FRAMES, fps=RATE, clips_per_file=CLIPS, index_dir=folder)
    by_video = fl.DataLoader(drawn, CLIPS, seed=0)
    add("feedline, a video a batch", lambda: drained(by_video))
    contest.run(rounds=9).publish(*packages)


def main() -> None:
    torch.set_num_threads(1)
    sys.path.append(str(installed_decord()))
    loops = {"PyAV, a loop per sample": by_pyav, "decord, a loop per sample": by_decord}
    if available("torchcodec.decoders"):
        loops[TORCHCODEC] = by_torchcodec
    with tempfile.TemporaryDirectory() as folder:
        short, long = write_videos(Path(folder))
        compare_clips("20 seconds", short, folder, loops)
        compare_clips("10 minutes", long, folder, loops)

        noise = np.random.default_rng(0).normal(0, 0.1, 44_100 * 60)
        for number in range(SOUNDS):
            soundfile.write(f"{folder}/{number}.flac", noise, 44_100)
        sounds = [str(path) for path in sorted(Path(folder).glob("*.flac"))]
        ranges = fl.datasets.Waveforms(sounds, seconds=1.0, clips_per_file=RANGES, index_dir=folder)
        contest = Contest("ranges of a second of FLAC", unit="ranges/s", baseline="soundfile, a loop per sample")
        theirs = DataLoader(Loop(sounds, list(range(RANGES)), by_soundfile), 32, shuffle=True)
        contest.add("soundfile, a loop per sample", lambda: drained(theirs), work=len(ranges))
        mine = fl.DataLoader(ranges, 32, shuffle=True, seed=0)
        contest.add("feedline", lambda: drained(mine), work=len(ranges))
        contest.run(rounds=5).publish()


if __name__ == "__main__":
    main()
