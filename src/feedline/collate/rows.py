"""Batch memory that samples are written into directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getrefcount
from typing import Any

import torch

from feedline.collate.default import BatchWalk, default
from feedline.core.tensors import Allocator, allocate_tensor, empty_tensor

Undo = Callable[[], object]
"""Restores the random generators to before the draws of a sample."""


Write = Callable[[list[Any]], Sequence[int]]
"""`write(items)` writes many rows at once, and returns the positions of the items that it refused."""


_WORTH_COPYING = 1 << 16
"""Least bytes of a tensor for which `_adopt` is faster than one copy of all tensors together."""


_MOST_WAITING = 8 << 20
"""Bytes of encoded images whose rows may wait for one call."""


@dataclass(slots=True)
class _Waiting:
    """Rows that wait for one `write`.

    `places` holds the number of each sample and of its row.
    """

    items: list[Any]
    places: list[tuple[int, int]]
    undo: list[Undo | None]


class RowBuffer:
    """Rows for the first tensors of `count` samples, taken in order.

    `collate` gives the same batch as default collate. If the first tensors of the samples are the rows, nothing is
    copied.
    Samples are `repeatable` if reading one again draws the same numbers, and changes nothing else.
    """

    def __init__(self, count: int, allocate: Allocator, repeatable: bool = False) -> None:
        self._count, self._allocate = count, allocate
        self.may_refuse = False
        """True where a deferred write may refuse its item, as `read_all` then reads its sample again."""
        self._is_repeatable = repeatable
        self._batch: torch.Tensor | None = None
        self._rows: Sequence[torch.Tensor] = ()
        self._kind: tuple[tuple[int, ...], torch.dtype] | None = None
        self._taken: list[torch.Tensor] = []
        self._deferred: dict[Write, _Waiting] = {}
        self._waiting_nbytes = 0
        self.reading = 0
        """Row of the sample that `read_all` reads."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The next row; None if the batch cannot have such a row."""
        if self._batch is None:
            self._batch = empty_tensor((self._count, *shape), dtype, self._allocate)
            self._rows, self._kind = self._batch.unbind(), (shape, dtype)
        if len(self._taken) == self._count or self._kind != (shape, dtype):
            return None
        row = self._rows[len(self._taken)]
        self._taken.append(row)
        return row

    def defer(self, write: Write, item: Any, undo: Undo | None = None, nbytes: int = 0) -> None:
        """Let `write` write the latest row, with others, before they are collated.

        It may refuse the item only if `undo` is given. `nbytes` is memory that the item keeps.
        """
        waiting = self._deferred.get(write)
        if waiting is None:
            waiting = self._deferred[write] = _Waiting([], [], [])
        waiting.items.append(item)
        waiting.places.append((self.reading, len(self._taken) - 1))
        waiting.undo.append(undo)
        self._waiting_nbytes += nbytes

    def read_all(self, indices: Sequence[Any], source: Any, at: Callable[[int], object]) -> list[Any]:
        """`source[index]` for all samples, in order, with their deferred writes executed.

        `at(row)` is called before each sample, and `at(-1)` before samples are written together. After a refusal the
        samples are read again from the refused one on, and each is written at once. An error is then raised at its
        sample, and random numbers are drawn as if the samples were read one after the other.
        """
        samples: list[Any] = []
        self.may_refuse = self._is_repeatable
        while len(samples) < len(indices):
            self.reading = len(samples)
            at(self.reading)
            try:
                samples.append(source[indices[self.reading]])
            except Exception:
                at(-1)
                kept = self._write_deferred(len(samples))
                if kept == len(samples):
                    raise
                del samples[kept:]
                continue
            if len(samples) == len(indices) or self._waiting_nbytes > _MOST_WAITING:
                at(-1)
                del samples[self._write_deferred(len(samples)) :]
        return samples

    def _write_deferred(self, count: int) -> int:
        """Execute the deferred writes.

        Returns the number of samples that stay, of the first `count`.
        """
        refused = min(self._written(), default=None, key=lambda each: each[0])
        if refused is None:
            return count
        (sample, row), undo = refused
        assert undo is not None
        undo()
        self.give_back(row)
        self.may_refuse = False
        return sample

    def _written(self) -> list[tuple[tuple[int, int], Undo | None]]:
        """Execute the deferred writes; return places and undo of the items refused."""
        deferred, self._deferred, self._waiting_nbytes = self._deferred, {}, 0
        return [
            (waiting.places[at], waiting.undo[at]) for write, waiting in deferred.items() for at in write(waiting.items)
        ]

    @property
    def taken(self) -> int:
        """Number of taken rows."""
        return len(self._taken)

    def give_back(self, taken: int) -> None:
        """Give back all rows but the first `taken`.

        No returned row may wait for a write.
        """
        del self._taken[taken:]

    def copy_row(self, tensor: Any) -> Any:
        """Copy `tensor` into the next row, and return the row.

        Returns `tensor` itself if it does not fit.
        """
        if type(tensor) is not torch.Tensor or tensor.requires_grad or not tensor.is_cpu:
            return tensor
        row = None if self._batch is None else self.take(tuple(tensor.shape), tensor.dtype)
        return tensor if row is None else row.copy_(tensor)

    def adopt_all(self, indices: Sequence[Any], source: Any, at: Callable[[int], object]) -> list[Any]:
        """Samples in order; rows are copied while that succeeds.

        Calls `at(row)` before each `source[index]`.
        """
        samples: list[Any] = []
        adopts = True
        for index in indices:
            self.reading = len(samples)
            at(self.reading)
            box = [source[index]]
            adopts = adopts and self._adopt(box)
            samples += box
        return samples

    def _adopt(self, box: list[Any]) -> bool:
        """Replace the first tensor of a sample by a row.

        The memory of the sample is then free for the next one, while it is in the CPU's caches. False, and nothing is
        changed, if anything else refers to the sample: the dataset might still change a returned value.
        """
        sample = box[0]
        if type(sample) is not tuple or len(sample) < _FEWEST_FIELDS or not _is_plain(sample[0]):
            return False
        tensor = sample[0]
        if tensor.nbytes < _WORTH_COPYING or tensor.is_shared():
            return False
        del sample, tensor
        if _holders(box) != _ALONE:
            return False
        sample = box[0]
        row = self.take(tuple(sample[0].shape), sample[0].dtype)
        if row is None:
            return False
        box[0] = (row.copy_(sample[0]), *sample[1:])
        return True

    def collate(self, samples: Sequence[Any]) -> Any:
        """Default collate of the samples, after all deferred writes."""
        self._written()
        if not self._holds(samples):
            return default(samples, allocate=None if self._allocate is allocate_tensor else self._allocate)
        walk = BatchWalk(self._allocate)
        columns = zip(*(sample[1:] for sample in samples), strict=True)
        return [self._batch, *(walk(column, (place,)) for place, column in enumerate(columns, 1))]

    def _holds(self, samples: Sequence[Any]) -> bool:
        """True if the samples are tuples beginning with the rows."""
        if not (len(samples) == self._count == len(self._taken) and all(type(sample) is tuple for sample in samples)):
            return False
        lengths = {len(sample) for sample in samples}
        return (
            lengths not in ({0}, {1})
            and len(lengths) == 1
            and all(sample[0] is row for sample, row in zip(samples, self._taken, strict=True))
        )


_FEWEST_FIELDS = 2


def _is_plain(tensor: Any) -> bool:
    if type(tensor) is not torch.Tensor or not tensor.is_cpu or tensor.requires_grad or tensor.is_quantized:
        return False
    return tensor.layout is torch.strided and not tensor.is_nested


def _holders(box: list[Any]) -> tuple[int, int, int, int, bool]:
    """References to a sample, its first tensor and its memory.

    The last item is True if torch manages the memory.
    """
    sample = box[0]
    tensor = sample[0]
    storage = tensor.untyped_storage()
    uses = torch._C._storage_Use_Count(storage._cdata)
    return getrefcount(sample), getrefcount(tensor), tensor._use_count(), uses, storage.resizable()


# Counted, since it depends on the version of Python.
_ALONE = _holders([(torch.zeros(1, device="cpu"), 0)])
