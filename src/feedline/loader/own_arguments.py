"""feedline's own arguments of a DataLoader."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields

import torch

from feedline.loader.device import Delivery
from feedline.loader.error_policy import Action, ErrorPolicy
from feedline.loader.ranks.contract import RankPolicy, Ranks
from feedline.workers.base import Recovery


@dataclass(frozen=True, slots=True)
class OwnArguments:
    """feedline's own arguments of a loader.

    feedline reads them here: an attribute of the loader with such a name may belong to the user's subclass.
    """

    seed: int | None = None
    worker_method: str = "auto"
    distributed: Ranks | RankPolicy = None
    on_error: Action | ErrorPolicy = "raise"
    device: str | torch.device | Delivery | None = None
    recovery: Recovery = field(default_factory=Recovery)
    accelerate: bool = True
    log: str | os.PathLike[str] | None = None


OWN_NAMES = tuple(each.name for each in fields(OwnArguments))
