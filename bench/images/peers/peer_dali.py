"""DALI on the CPU: its reader, decoder with random crop, and antialiased resize."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from nvidia.dali import fn, pipeline_def, types

from task import MEAN, SHORTER, STD, Task

AHEAD = 2


def open_epochs(task: Task) -> Callable[[], Iterator[Any]]:
    paths, labels = task.files()

    @pipeline_def(batch_size=task.batch, num_threads=task.workers, device_id=None, prefetch_queue_depth=AHEAD)
    def image_pipeline() -> tuple[Any, Any]:
        encoded, label = fn.readers.file(files=paths, labels=labels, shuffle_after_epoch=True)
        return _pixels(encoded, task), label

    pipeline = image_pipeline()
    pipeline.build()

    def epoch() -> Iterator[Any]:
        """The batches of exactly one epoch: run() would begin the next one."""
        batches = task.images // task.batch
        for _ in range(min(AHEAD, batches)):
            pipeline.schedule_run()
        for number in range(batches):
            pixels, label = pipeline.share_outputs()
            yield np.asarray(pixels.as_tensor()), np.asarray(label.as_tensor()).reshape(-1)
            pipeline.release_outputs()
            if number + AHEAD < batches:
                pipeline.schedule_run()

    return epoch


def _pixels(encoded: Any, task: Task) -> Any:
    if task.recipe == "random":
        image = fn.decoders.image_random_crop(
            encoded, device="cpu", random_area=list(task.scale), random_aspect_ratio=[3 / 4, 4 / 3], num_attempts=10
        )
        image = fn.resize(image, size=(task.size, task.size), interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = fn.random.coin_flip(probability=0.5)
    else:
        image = fn.decoders.image(encoded, device="cpu")
        image = fn.resize(image, resize_shorter=SHORTER, interp_type=types.INTERP_LINEAR, antialias=True)
        mirror = 0
    square = {"crop": (task.size, task.size), "mirror": mirror}
    if task.output == "uint8":
        return fn.crop_mirror_normalize(image, dtype=types.UINT8, output_layout="HWC", mean=[0.0], std=[1.0], **square)
    mean, std = [255 * x for x in MEAN], [255 * x for x in STD]
    return fn.crop_mirror_normalize(image, dtype=types.FLOAT, output_layout="CHW", mean=mean, std=std, **square)
