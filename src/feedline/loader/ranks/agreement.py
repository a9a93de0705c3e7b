"""Agreement of all ranks on each step, for unequal numbers of batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import getpid
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from feedline.core.batch import BatchResult
from feedline.errors import RankError
from feedline.loader.device import Stage
from feedline.loader.ranks.contract import Uneven

Entry = tuple[Any, BatchResult, Any]
"""A request, its batch, and the work that the stage has started for it."""


class Agreement:
    """Rule of one iteration for ranks with different numbers of batches.

    Each call is a collective of all ranks over gloo, so that the loader's tensors never wait for a device.
    `again()` gives requests and batches from the start of the epoch.
    """

    def __init__(self, uneven: Uneven, again: Callable[[], Iterator[tuple[Any, BatchResult]]]) -> None:
        self._uneven, self._again = uneven, again
        self._group = _gloo()
        self._repeated: Iterator[tuple[Any, BatchResult]] | None = None
        self._steps = 0

    @property
    def is_repeating(self) -> bool:
        """True if the latest batch was a repeated one."""
        return self._repeated is not None

    def agree_on_step(self, *, has_batch: bool) -> bool:
        """Agree on one step: False if the epoch ends for all ranks.

        `RankError` on all ranks if only some have a batch, and `uneven` is "raise".
        """
        # A flag for each rank, not a sum: the error names the ranks that have ended.
        ready = torch.zeros(dist.get_world_size(), dtype=torch.int32, device="cpu")
        ready[dist.get_rank()] = has_batch
        dist.all_reduce(ready, group=self._group)
        some, every = bool(ready.any()), bool(ready.all())
        if some and not every and self._uneven == "raise":
            ended = (ready == 0).nonzero().flatten().tolist()
            raise RankError(
                f"rank {', '.join(map(str, ended))} has no batch left after step {self._steps}, but others have: the "
                "ranks have unequal numbers of batches. RankPolicy(uneven='stop') ends the epoch of all ranks here, "
                "uneven='repeat' lets this rank repeat batches"
            )
        self._steps += 1
        return some if self._uneven == "repeat" else every

    def choose_entry(self, entry: Entry | None, stage: Stage | None) -> Entry | None:
        """The entry that this rank delivers; None if the epoch ends."""
        if not self.agree_on_step(has_batch=entry is not None):
            return None
        if entry is not None:
            return entry
        request, result = self.next_repeated()
        return request, result, None if stage is None else stage.start(result.batch)

    def next_repeated(self) -> tuple[Any, BatchResult]:
        """The next repeated batch; `RankError` if there is none."""
        repeated = self._repeated or self._again()
        following = next(repeated, None)
        if following is None:
            repeated = self._again()
            following = next(repeated, None)
        if following is None:  # the epoch was just begun again, so it is empty
            raise RankError(
                f"rank {dist.get_rank()} has no batch at all to repeat, while other ranks have some: use at least as "
                "many partitions with samples as ranks, or RankPolicy(uneven='stop')"
            )
        self._repeated = repeated
        return following


_groups: WeakKeyDictionary[Any, tuple[int, Any]] = WeakKeyDictionary()
"""The gloo group made for each default group, and the process that made it."""


def _gloo() -> Any:
    """A gloo group of all ranks, made once for each default group.

    A group survives neither a fork nor the end of its default group.
    """
    world, pid = dist.group.WORLD, getpid()
    made = _groups.get(world)
    if made is None or made[0] != pid:
        made = _groups[world] = pid, dist.new_group(backend="gloo")
    return made[1]
