"""The one door to pixels: decode, crop, resize, flip and normalize pictures straight into the rows of a batch."""

from feedline.images.decode import decode, probe, read_batch, read_one
from feedline.images.errors import ImageError
from feedline.images.geometry import Geometry, geometry
from feedline.images.pillow import Header, Source
from feedline.images.recipe import CenterBox, CropPolicy, RandomBox, Recipe, WholeBox

__all__ = [
    "CenterBox",
    "CropPolicy",
    "Geometry",
    "Header",
    "ImageError",
    "RandomBox",
    "Recipe",
    "Source",
    "WholeBox",
    "decode",
    "geometry",
    "probe",
    "read_batch",
    "read_one",
]
