"""Samplers with random access, and adapters for torch's samplers."""

from feedline.samplers.adapters import MaterializedSampler, as_index_sampler
from feedline.samplers.base import BatchIndexSampler, IndexSampler
from feedline.samplers.basic import Infinite, Sequential, Shuffled, Subset, VirtualEpochs
from feedline.samplers.curriculum import Curriculum
from feedline.samplers.distributed import Distributed, DistributedBatches, TorchDistributed
from feedline.samplers.length_buckets import LengthBuckets
from feedline.samplers.mixture import Mixture
from feedline.samplers.shard_shuffle import Mixing, ShardShuffled
from feedline.samplers.stratified import StratifiedBatches
from feedline.samplers.weighted import ClassBalanced, Weighted

__all__ = [
    "BatchIndexSampler",
    "ClassBalanced",
    "Curriculum",
    "Distributed",
    "DistributedBatches",
    "IndexSampler",
    "Infinite",
    "LengthBuckets",
    "MaterializedSampler",
    "Mixing",
    "Mixture",
    "Sequential",
    "ShardShuffled",
    "Shuffled",
    "StratifiedBatches",
    "Subset",
    "TorchDistributed",
    "VirtualEpochs",
    "Weighted",
    "as_index_sampler",
]
