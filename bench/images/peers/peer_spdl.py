"""SPDL: its pipeline of threads, with its own FFmpeg decoder or with simplejpeg and OpenCV."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import spdl.io
import torch
from spdl.pipeline import PipelineBuilder

from steps import center, finished, prepare, random_box, shorter_side
from task import Task

Sample = tuple[torch.Tensor, int]


class WithFfmpeg:
    """Decode, crop and scale in one filter graph; swscale's bilinear filter is as wide as shrinking needs."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, data: bytes) -> torch.Tensor:
        packets = spdl.io.demux_image(data)
        frames = spdl.io.decode_packets(packets, filter_desc=self._filters(packets.width, packets.height))
        return finished(spdl.io.to_numpy(spdl.io.convert_frames(frames)), self.task)

    def _filters(self, width: int, height: int) -> str:
        size = self.task.size
        if self.task.recipe == "random":
            left, top, right, bottom = random_box(width, height, self.task.scale)
            crop = f"crop={right - left}:{bottom - top}:{left}:{top}"
            return f"{crop},scale={size}:{size}:flags=bilinear,format=pix_fmts=rgb24"
        w, h = shorter_side(width, height)
        left, top, _, _ = center(w, h, size)
        return f"scale={w}:{h}:flags=bilinear,crop={size}:{size}:{left}:{top},format=pix_fmts=rgb24"


def open_epochs(task: Task, decoder: str) -> Callable[[], Iterator[Any]]:
    torch.set_num_threads(1)
    paths, labels = task.files()
    decode = WithFfmpeg(task) if decoder == "ffmpeg" else prepare(task, decoder)
    rng = random.Random(0)

    def sample(index: int) -> Sample:
        return decode(Path(paths[index]).read_bytes()), labels[index]

    def batch(samples: list[Sample]) -> tuple[torch.Tensor, np.ndarray]:
        return torch.stack([pixels for pixels, _ in samples]), np.array([label for _, label in samples])

    def epoch() -> Iterator[Any]:
        pipeline = (
            PipelineBuilder()
            .add_source(task.drawn(rng))
            .pipe(sample, concurrency=task.workers)
            .aggregate(task.batch)
            .pipe(batch)
            .add_sink(2)
            .build(num_threads=task.workers + 1)
        )
        with pipeline.auto_stop():
            yield from pipeline

    return epoch
