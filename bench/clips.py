"""Clips of 16 frames: feedline, torchcodec's own sampler, and loops that open, seek and decode for each sample.

torchcodec's wheels need a build of torch with CUDA; where it cannot be imported, it is left out. The videos are made by
FFmpeg: H.264, 320 × 240, a keyframe every 30 frames.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import soundfile
import torch
from torch.utils.data import DataLoader, Dataset

import feedline as fl
from harness import Contest

VIDEOS, CLIPS, FRAMES, BATCH = 4, 8, 16, 4
SOUNDS, RANGES = 16, 16


class Loop(Dataset[Any]):
    """One sample by a function of path and number."""

    def __init__(self, paths: list[str], count: int, read: Callable[[str, int], torch.Tensor]) -> None:
        self.paths, self.count, self.read = paths, count, read

    def __len__(self) -> int:
        return len(self.paths) * self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(self.paths[index // self.count], index)


def by_pyav(path: str, index: int) -> torch.Tensor:
    """As people write it: open, seek, decode up to the clip."""
    with av.open(path) as container:
        stream = container.streams.video[0]
        start = int(np.random.default_rng(index).integers(0, stream.frames - FRAMES))
        first = int(start / stream.average_rate / stream.time_base)
        container.seek(first, stream=stream)
        frames = []
        for frame in container.decode(stream):
            if frame.pts >= first:
                frames.append(torch.from_numpy(frame.to_ndarray(format="rgb24")).permute(2, 0, 1))
            if len(frames) == FRAMES:
                break
    return torch.stack(frames)


def by_torchcodec(path: str, index: int) -> torch.Tensor:
    from torchcodec.decoders import VideoDecoder
    from torchcodec.samplers import clips_at_random_indices

    torch.manual_seed(index)
    clip: torch.Tensor = clips_at_random_indices(VideoDecoder(path), num_clips=1, num_frames_per_clip=FRAMES).data[0]
    return clip


def by_soundfile(path: str, index: int) -> torch.Tensor:
    with soundfile.SoundFile(path) as file:
        file.seek(int(np.random.default_rng(index).integers(0, file.frames - file.samplerate)))
        return torch.from_numpy(file.read(file.samplerate, dtype="float32"))


def drained(loader: Any) -> None:
    for _ in loader:
        pass


def has_torchcodec() -> bool:
    try:
        import torchcodec.decoders  # noqa: F401
    except Exception as error:  # noqa: BLE001 - a wheel of another build fails in many ways
        print(f"torchcodec is left out: {type(error).__name__}: {error!s:.100}")
        return False
    return True


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        source = ["-f", "lavfi", "-i", "testsrc2=size=320x240:rate=30:duration=20"]
        for number in range(VIDEOS):
            out = ["-c:v", "libx264", "-g", "30", f"{folder}/{number}.mp4"]
            subprocess.run(["ffmpeg", "-loglevel", "error", *source, *out], check=True)
        videos = [str(path) for path in sorted(Path(folder).glob("*.mp4"))]
        clips = fl.datasets.Clips(videos, frames=FRAMES, clips_per_video=CLIPS, index_dir=folder)
        contest = Contest("clips of 16 frames", unit="clips/s", baseline="PyAV, a loop per sample")
        loops = {"PyAV, a loop per sample": by_pyav}
        if has_torchcodec():
            loops["torchcodec, clips_at_random_indices"] = by_torchcodec
        for name, read in loops.items():
            theirs = DataLoader(Loop(videos, CLIPS, read), BATCH, shuffle=True)
            contest.add(name, lambda theirs=theirs: drained(theirs), work=len(clips))
        ours = fl.DataLoader(clips, BATCH, shuffle=True, seed=0)
        contest.add("feedline", lambda: drained(ours), work=len(clips))
        contest.run(rounds=5).publish()

        noise = np.random.default_rng(0).normal(0, 0.1, 44_100 * 60)
        for number in range(SOUNDS):
            soundfile.write(f"{folder}/{number}.flac", noise, 44_100)
        sounds = [str(path) for path in sorted(Path(folder).glob("*.flac"))]
        ranges = fl.datasets.Waveforms(sounds, seconds=1.0, clips_per_file=RANGES, index_dir=folder)
        contest = Contest("ranges of a second of FLAC", unit="ranges/s", baseline="soundfile, a loop per sample")
        theirs = DataLoader(Loop(sounds, RANGES, by_soundfile), 32, shuffle=True)
        contest.add("soundfile, a loop per sample", lambda: drained(theirs), work=len(ranges))
        mine = fl.DataLoader(ranges, 32, shuffle=True, seed=0)
        contest.add("feedline", lambda: drained(mine), work=len(ranges))
        contest.run(rounds=5).publish()


if __name__ == "__main__":
    main()
