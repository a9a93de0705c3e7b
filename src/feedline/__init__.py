"""feedline feeds PyTorch training loops: torch's DataLoader with exact resume, at the speed of the hardware."""

from torch.utils.data import get_worker_info

from feedline import collate, datasets, errors, images, samplers, stores, testing, transforms
from feedline.dataloader import DataLoader
from feedline.lanes import LaneDataset
from feedline.quarantine import ErrorPolicy
from feedline.rng import SampleRng, sample_rng
from feedline.state import merge_states
from feedline.workers.recovery import Recovery

__all__ = [
    "DataLoader",
    "ErrorPolicy",
    "LaneDataset",
    "Recovery",
    "SampleRng",
    "collate",
    "datasets",
    "errors",
    "get_worker_info",
    "images",
    "merge_states",
    "sample_rng",
    "samplers",
    "stores",
    "testing",
    "transforms",
]
