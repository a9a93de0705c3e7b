"""Decoding of images to rows of a batch, in one pass."""

from feedline.images.accelerate import PillowAcceleration, accelerate_pillow, pillow_obstacle
from feedline.images.crops import CenterBox, CropPolicy, Geometry, RandomBox, WholeBox
from feedline.images.decode import decode, probe, read_batch, read_one
from feedline.images.errors import ImageError
from feedline.images.pillow import Header, ImageSource
from feedline.images.plugins import open_image
from feedline.images.recipe import Recipe, geometry

__all__ = [
    "CenterBox",
    "CropPolicy",
    "Geometry",
    "Header",
    "ImageError",
    "ImageSource",
    "PillowAcceleration",
    "RandomBox",
    "Recipe",
    "WholeBox",
    "accelerate_pillow",
    "decode",
    "geometry",
    "open_image",
    "pillow_obstacle",
    "probe",
    "read_batch",
    "read_one",
]
