"""The one door to pixels: decode, crop, resize, flip and normalise pictures straight into the rows of a batch."""

from feedline.images.geometry import Geometry, geometry
from feedline.images.problems import ImageError
from feedline.images.reading import decode, probe, read_batch, read_one
from feedline.images.recipe import CentreBox, Law, RandomBox, Recipe, WholeBox
from feedline.images.sources import Header, Source

__all__ = [
    "CentreBox",
    "Geometry",
    "Header",
    "ImageError",
    "Law",
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
