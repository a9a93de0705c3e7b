"""feedline feeds PyTorch training loops: torch's DataLoader with exact resume, at the speed of the hardware."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from feedline import collate, errors, samplers
from feedline.core.dataset import BatchRead, Dataset, Traits
from feedline.core.rng import SampleRng, sample_rng
from feedline.loader.dataloader import DataLoader
from feedline.loader.error_policy import ErrorPolicy
from feedline.loader.partitions import PartitionedDataset
from feedline.loader.state import merge_states
from feedline.workers.base import Recovery
from feedline.workers.transport import share

if TYPE_CHECKING:
    from feedline import datasets, images, stores, testing, transforms

__all__ = [
    "BatchRead",
    "DataLoader",
    "Dataset",
    "ErrorPolicy",
    "PartitionedDataset",
    "Recovery",
    "SampleRng",
    "Traits",
    "collate",
    "datasets",
    "errors",
    "get_worker_info",
    "images",
    "merge_states",
    "sample_rng",
    "samplers",
    "share",
    "stores",
    "testing",
    "transforms",
]

_LATER = {"datasets", "images", "stores", "testing", "transforms"}


def __getattr__(name: str) -> Any:
    """The parts a loader itself does without, imported when first asked for: worker processes start sooner."""
    if name in _LATER:
        return import_module(f"feedline.{name}")
    raise AttributeError(f"module 'feedline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
