"""Media files: the suite's corpora of videos and sounds."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import soundfile

from feedline.datasets import Clips, Waveforms
from formats.format import Format

FILES, PER_FILE = 3, 8
RATE = 8000


def write_videos(folder: Path) -> None:
    for number in range(FILES):
        with av.open(str(folder / f"{number}.mkv"), "w") as container:
            stream = container.add_stream("mpeg4", rate=10)
            stream.width, stream.height, stream.pix_fmt = 32, 32, "yuv420p"
            for at in range(PER_FILE):
                pixels = np.random.default_rng((number, at)).integers(0, 256, (32, 32, 3), np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels)))
            container.mux(stream.encode())


def write_sounds(folder: Path) -> None:
    for number in range(FILES):
        noise = np.random.default_rng(number).normal(0, 0.1, RATE * PER_FILE // 10)
        soundfile.write(folder / f"{number}.flac", noise, RATE)


FORMATS = {
    "videos": Format(
        write_videos,
        lambda root, **store: Clips(f"{root}/*.mkv", frames=1, sampling="sliding", **store),
        cut=("1.mkv", 0.6, "{} is truncated"),
    ),
    "sounds": Format(
        write_sounds,
        lambda root, **store: Waveforms(f"{root}/*.flac", seconds=0.1, sampling="sliding", **store),
        cut=("1.flac", 0.6, "{} (ends at sample|cannot be decoded)"),
    ),
}
