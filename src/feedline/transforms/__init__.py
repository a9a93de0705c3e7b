"""Transforms of images with torchvision's names; randomness is fixed by the key of the sample."""

from feedline.transforms.colour import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from feedline.transforms.compose import Compose, RandomApply, RandomChoice
from feedline.transforms.convert import Normalize, ToTensor
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
from feedline.transforms.planning import ImagePlan
from feedline.transforms.presets import IMAGENET_MEAN, IMAGENET_STD, imagenet_eval, imagenet_train
from feedline.transforms.transform import Transform, plan

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
