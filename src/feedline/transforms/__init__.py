"""Image transforms with torchvision's names, and the hooks for your own."""

from feedline.core.rng import Draws
from feedline.transforms.base import Transform, plan
from feedline.transforms.batched.encoded import DecodeOnDevice
from feedline.transforms.batched.mixing import CutMix, MixUp
from feedline.transforms.batched.on_batch import OnBatch
from feedline.transforms.color import ColorJitter, GaussianBlur, Grayscale, RandomGrayscale
from feedline.transforms.compose import Compose, RandomApply, RandomChoice
from feedline.transforms.erasing import RandomErasing
from feedline.transforms.foreign import OnArray
from feedline.transforms.geometry import (
    CenterCrop,
    RandomCrop,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from feedline.transforms.plan import ImagePlan
from feedline.transforms.steps import FUSIONS, ImageSpec, PlannedStep, register_fusion, unregister_fusion
from feedline.transforms.to_tensor import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Normalize,
    ToTensor,
    imagenet_eval,
    imagenet_train,
)

__all__ = [
    "FUSIONS",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "DecodeOnDevice",
    "Draws",
    "GaussianBlur",
    "Grayscale",
    "ImagePlan",
    "ImageSpec",
    "MixUp",
    "Normalize",
    "OnArray",
    "OnBatch",
    "PlannedStep",
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
    "register_fusion",
    "unregister_fusion",
]
