"""The two pipelines that most training on ImageNet-like pictures begins with."""

from __future__ import annotations

import torch

from feedline.transforms.compose import Compose
from feedline.transforms.convert import Normalize
from feedline.transforms.geometry import CenterCrop, RandomHorizontalFlip, RandomResizedCrop, Resize

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
"""Of the levels / 255 of ImageNet's training pictures: what published weights expect."""


def imagenet_train(size: int = 224, dtype: torch.dtype = torch.float32) -> Compose:
    """A random part of each picture, maybe mirrored, normalised: what most ImageNet models are trained with."""
    return Compose([RandomResizedCrop(size), RandomHorizontalFlip(), Normalize(IMAGENET_MEAN, IMAGENET_STD, dtype)])


def imagenet_eval(size: int = 224, resize: int = 256, dtype: torch.dtype = torch.float32) -> Compose:
    """The centre of each picture, normalised: what such models are validated with."""
    return Compose([Resize(resize), CenterCrop(size), Normalize(IMAGENET_MEAN, IMAGENET_STD, dtype)])
