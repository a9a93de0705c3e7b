"""Data loading for PyTorch: a drop-in DataLoader with exact resume."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from feedline.core.finalizers import no_collections
from feedline.core.interrupts import quiet_imports

with quiet_imports():
    from torch.utils.data import get_worker_info

# Imports leave hardly any garbage, but allocate so much that Python would look for it among all objects of torch. That
# would take as long as the imports.
with quiet_imports(), no_collections():
    from feedline import collate, errors, samplers, workers
    from feedline.core.dataset import BatchRead, Dataset, Traits
    from feedline.core.rng import SampleRng, sample_rng
    from feedline.loader.dataloader import DataLoader
    from feedline.loader.device.delivery import Delivery
    from feedline.loader.error_policy import ErrorPolicy
    from feedline.loader.monitoring.metrics import add_instruments, serve_metrics
    from feedline.loader.partitions import PartitionedDataset
    from feedline.loader.patch import patch_torch
    from feedline.loader.ranks.contract import RankPolicy
    from feedline.loader.ranks.merging import merge_states
    from feedline.workers.base import Recovery
    from feedline.workers.transport import share

if TYPE_CHECKING:
    from feedline import datasets, images, stores, streams, testing, transforms

__all__ = [
    "BatchRead",
    "DataLoader",
    "Dataset",
    "Delivery",
    "ErrorPolicy",
    "PartitionedDataset",
    "RankPolicy",
    "Recovery",
    "SampleRng",
    "Traits",
    "add_instruments",
    "collate",
    "datasets",
    "errors",
    "get_worker_info",
    "images",
    "merge_states",
    "patch_torch",
    "sample_rng",
    "samplers",
    "serve_metrics",
    "share",
    "stores",
    "streams",
    "testing",
    "transforms",
    "workers",
]

_LAZY = {"datasets", "images", "stores", "streams", "testing", "transforms"}


def __getattr__(name: str) -> Any:
    """Import a subpackage on first use.

    Worker processes, which do without, start sooner.
    """
    if name in _LAZY:
        return import_module(f"feedline.{name}")
    raise AttributeError(f"module 'feedline' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
