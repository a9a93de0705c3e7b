"""Orders with random access that are plain torch samplers too, and adapters for torch's own."""

from feedline.samplers.balanced import ClassBalanced
from feedline.samplers.distributed import Distributed, DistributedBatches, TorchDistributed
from feedline.samplers.endless import Infinite, VirtualEpochs
from feedline.samplers.foreign import Listed
from feedline.samplers.lengths import LengthBuckets
from feedline.samplers.mixture import Mixture
from feedline.samplers.order import BatchIndexSampler, IndexSampler
from feedline.samplers.recognised import recognise
from feedline.samplers.sequential import Sequential
from feedline.samplers.shards import Mixing, ShardShuffled
from feedline.samplers.shuffled import Shuffled
from feedline.samplers.stratified import StratifiedBatches
from feedline.samplers.subset import Subset
from feedline.samplers.weighted import Weighted

__all__ = [
    "BatchIndexSampler",
    "ClassBalanced",
    "Distributed",
    "DistributedBatches",
    "IndexSampler",
    "Infinite",
    "LengthBuckets",
    "Listed",
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
    "recognise",
]
