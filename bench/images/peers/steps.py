"""Usual steps from a JPEG's bytes to a row of a batch: with Pillow, or with simplejpeg and OpenCV."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from io import BytesIO

import numpy as np
import torch

from task import MEAN, SHORTER, STD, Task

Box = tuple[int, int, int, int]
Prepare = Callable[[bytes], torch.Tensor]


def prepare(task: Task, decoder: str) -> Prepare:
    """Convert the encoded bytes of an image to its row; picklable."""
    return {"pil": WithPillow, "simplejpeg": WithSimpleJpeg}[decoder](task)


class WithPillow:
    """Pillow, antialiased bilinear, as torchvision's transforms."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, data: bytes) -> torch.Tensor:
        from PIL import Image

        task, bilinear = self.task, Image.Resampling.BILINEAR
        image = Image.open(BytesIO(data)).convert("RGB")
        if task.recipe == "random":
            box = random_box(*image.size, task.scale)
            image = image.resize((task.size, task.size), bilinear, box=box)
        else:
            width, height = shorter_side(*image.size)
            image = image.resize((width, height), bilinear).crop(center(width, height, task.size))
        return finished(np.asarray(image), task)


class WithSimpleJpeg:
    """libjpeg-turbo, and OpenCV's area filter for shrinking: the fastest Python packages."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def __call__(self, data: bytes) -> torch.Tensor:
        import cv2
        import simplejpeg

        cv2.setNumThreads(1)
        task = self.task
        pixels = simplejpeg.decode_jpeg(data)
        if task.recipe == "random":
            left, top, right, bottom = random_box(pixels.shape[1], pixels.shape[0], task.scale)
            return finished(resized(pixels[top:bottom, left:right], task.size, task.size), task)
        width, height = shorter_side(pixels.shape[1], pixels.shape[0])
        left, top, right, bottom = center(width, height, task.size)
        return finished(resized(pixels, width, height)[top:bottom, left:right], task)


def resized(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """The resized image. OpenCV's bilinear filter does not antialias; its area filter does."""
    import cv2

    shrinks = pixels.shape[1] > width or pixels.shape[0] > height
    return cv2.resize(pixels, (width, height), interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR)


def finished(pixels: np.ndarray, task: Task) -> torch.Tensor:
    """The output from uint8 (H, W, 3): flipped half of the time, normalized if it is float."""
    if task.recipe == "random" and random.random() < 0.5:
        pixels = pixels[:, ::-1]
    if task.output == "uint8":
        return torch.from_numpy(np.ascontiguousarray(pixels))
    chw = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).contiguous()
    return chw.float().sub_(_MEAN).mul_(_SCALE)


_MEAN = torch.tensor(MEAN).mul(255)[:, None, None]
_SCALE = torch.tensor(STD).mul(255).reciprocal()[:, None, None]


def random_box(width: int, height: int, scale: tuple[float, float]) -> Box:
    """A random box (left, top, right, bottom) as in torchvision's RandomResizedCrop."""
    low, high = math.log(3 / 4), math.log(4 / 3)
    for _ in range(10):
        area = width * height * random.uniform(*scale)
        ratio = math.exp(random.uniform(low, high))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            left, top = random.randint(0, width - w), random.randint(0, height - h)
            return left, top, left + w, top + h
    return 0, 0, width, height


def shorter_side(width: int, height: int) -> tuple[int, int]:
    """The size whose shorter side is `SHORTER`."""
    zoom = SHORTER / min(width, height)
    return round(width * zoom), round(height * zoom)


def center(width: int, height: int, size: int) -> Box:
    left, top = (width - size) // 2, (height - size) // 2
    return left, top, left + size, top + size
