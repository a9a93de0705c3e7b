"""Any sampler as one that has random access, or that lists itself where it has not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.utils.data import DistributedSampler, SequentialSampler

from feedline.samplers.distributed import TorchDistributed
from feedline.samplers.foreign import Listed
from feedline.samplers.order import BatchIndexSampler, IndexSampler
from feedline.samplers.sequential import Sequential

if TYPE_CHECKING:
    from collections.abc import Iterable


def recognise(sampler: Iterable[Any], batches: bool = False) -> IndexSampler | BatchIndexSampler | Listed:
    """Our own samplers as they are, torch's sequential and distributed ones with random access, all others `Listed`.

    `batches`: the sampler was given as `batch_sampler`. A subclass that changes what it yields is listed.
    """
    if isinstance(sampler, Listed) or (isinstance(sampler, (IndexSampler, BatchIndexSampler)) and _keeps(sampler)):
        return sampler
    if type(sampler) is SequentialSampler and not batches:
        return Sequential(len(sampler))
    if isinstance(sampler, DistributedSampler) and _distributed_as_torch(sampler) and not batches:
        return TorchDistributed(sampler)
    return Listed(sampler, batches)


def _keeps(sampler: IndexSampler | BatchIndexSampler) -> bool:
    base = IndexSampler if isinstance(sampler, IndexSampler) else BatchIndexSampler
    return type(sampler).__iter__ is base.__iter__


def _distributed_as_torch(sampler: object) -> bool:
    deciding = ("__iter__", "__len__", "set_epoch")
    return all(getattr(type(sampler), name) is getattr(DistributedSampler, name) for name in deciding)
