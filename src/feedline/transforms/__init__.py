"""Transforms of images with torchvision's names; randomness is fixed by the key of the sample."""

from feedline.transforms.base import Transform, plan
from feedline.transforms.color import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from feedline.transforms.compose import Compose, RandomApply, RandomChoice
from feedline.transforms.erasing import RandomErasing
from feedline.transforms.foreign import OnArray
from feedline.transforms.geometry import (
    CenterCrop,
    HorizontalFlip,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from feedline.transforms.plan import ImagePlan
from feedline.transforms.to_tensor import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalize,
    ToTensor,
    imagenet_eval,
    imagenet_train,
)

__all__ = [
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "GaussianBlur",
    "Grayscale",
    "HorizontalFlip",
    "ImagePlan",
    "Normalize",
    "OnArray",
    "RandomApply",
    "RandomChoice",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToTensor",
    "Transform",
    "imagenet_eval",
    "imagenet_train",
    "plan",
]
