"""From a list of samples to a batch: torch's default, and collators for samples of different sizes."""

from torch.utils.data import default_convert as convert

from feedline.collate.collator import Collator
from feedline.collate.listing import detection, ragged
from feedline.collate.packing import Packed, token_budget
from feedline.collate.padding import Padded, pad
from feedline.collate.stacking import default, is_standard

__all__ = [
    "Collator",
    "Packed",
    "Padded",
    "convert",
    "default",
    "detection",
    "is_standard",
    "pad",
    "ragged",
    "token_budget",
]
