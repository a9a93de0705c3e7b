"""Datasets: ordinary torch-style ones, which work in torch's own DataLoader too."""

from feedline.datasets.arrays import ArrayFile, Arrays
from feedline.datasets.files import Raw
from feedline.datasets.strings import PackedStrings
from feedline.datasets.tokens import TokenDocuments, TokenFile

__all__ = ["ArrayFile", "Arrays", "PackedStrings", "Raw", "TokenDocuments", "TokenFile"]
