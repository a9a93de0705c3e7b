"""FFCV over its own file (.beton), with JPEGs or pixels; its resize is OpenCV's area filter."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ffcv.fields.decoders import CenterCropRGBImageDecoder, IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import Convert, NormalizeImage, RandomHorizontalFlip, Squeeze, ToTensor, ToTorchImage

from stream import Slices
from task import MEAN, SHORTER, STD, Task

AHEAD = 3
MANY = 2_000_000


def open_epochs(task: Task, form: str) -> Slices:
    square = (task.size, task.size)
    if task.recipe == "random":
        image: list[Any] = [RandomResizedCropRGBImageDecoder(square, task.scale), RandomHorizontalFlip(0.5)]
    else:
        image = [CenterCropRGBImageDecoder(square, task.size / SHORTER)]
    if task.output == "float32":
        image += [NormalizeImage(np.array(MEAN) * 255, np.array(STD) * 255, np.float32)]
    image += [ToTensor()]
    if task.output == "float32":
        image += [ToTorchImage(channels_last=False)]
    # Each iterator allocates memory for all of its batches, so there is only one, of an epoch that never ends.
    loader = Loader(
        str(task.form(f"{form}.beton")),
        task.batch,
        num_workers=task.workers,
        order=OrderOption.RANDOM,
        indices=np.tile(np.arange(task.image_count), -(-MANY // task.image_count)),
        batches_ahead=AHEAD,
        pipelines={"image": image, "label": [IntDecoder(), ToTensor(), Squeeze(), Convert(torch.int64)]},
    )
    return Slices(iter(loader), task.images // task.batch, ahead=AHEAD + 1)
