"""What is known of a sample before it is made."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Form:
    """Size (height, width) and channels of a sample, None where the picture decides; and whether it ended as numbers.

    `dtype` and `layout` are those of a tensor, or of the levels: uint8, "HWC".
    """

    size: tuple[int, int] | None = None
    channels: int | None = 3
    converted: bool = False
    dtype: torch.dtype = torch.uint8
    layout: str = "HWC"

    @property
    def shape(self) -> tuple[int, int, int] | None:
        """Of the sample, if it is known."""
        if self.size is None or self.channels is None:
            return None
        return (*self.size, self.channels) if self.layout == "HWC" else (self.channels, *self.size)
