"""Collate functions: torch's default, padding, packing and ragged batches."""

from torch.utils.data import default_convert as convert

from feedline.collate.base import Collator
from feedline.collate.default import default
from feedline.collate.pad import Padded, pad
from feedline.collate.ragged import detection, ragged
from feedline.collate.token_budget import Packed, token_budget

__all__ = [
    "Collator",
    "Packed",
    "Padded",
    "convert",
    "default",
    "detection",
    "pad",
    "ragged",
    "token_budget",
]
