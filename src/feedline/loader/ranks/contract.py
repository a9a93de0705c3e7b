"""Contract of the ranks of a run, compared at each epoch's start.

The ranks meet in the key-value store of torch.distributed. Collectives are not used: a rank that iterates alone would
confuse them with those of the model.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from time import monotonic, time
from typing import Any, Literal, NamedTuple, get_args

import torch.distributed as dist
import torch.utils.data._utils.worker as torch_worker

from feedline.core.arguments import check_one_of
from feedline.core.cursor import Cursor, PartitionCursor
from feedline.errors import ArgumentError, RankError
from feedline.loader.plan import Plan

Uneven = Literal["allow", "raise", "stop", "repeat"]

Ranks = Literal["auto"] | tuple[int, int] | None
"""Rank and world size of a loader."""

_UNEVEN = get_args(Uneven)


_SLICE_S = 1.0
"""Longest uninterrupted wait: Ctrl-C has an effect only between two waits."""


_GRACE_S = 5.0


_PATIENCE_S = 30.0
"""Wait after which the missing ranks are named."""


@dataclass(frozen=True, slots=True)
class RankPolicy:
    """Share of one rank, and rules for all ranks.

    - `ranks`: "auto" or (rank, world_size), as the argument `distributed` of a DataLoader.
    - `check`: at the start of each epoch all ranks compare dataset, order, seed, length, batch size, epoch and
      position, and `RankError` names the rank that differs. It takes effect where torch.distributed is initialized
      with `world_size` ranks.
    - `wait_s`: time until a rank that does not begin its epoch is an error. After 30 seconds a warning names it.
    - `uneven`: the rule for ranks with different numbers of batches. "allow" checks nothing, and ranks with more
      batches wait forever if all ranks step together. The others agree on each step, over gloo: when the first rank has
      no batch left, "raise" raises `RankError` on all ranks, "stop" ends the epoch of all ranks, and "repeat" lets that
      rank repeat its batches, from the first one of the epoch, until all ranks have ended.
    - `reads_all`: a stream without partitions reads all of its samples on each rank, though it asks for its rank, for
      example to log on rank 0. Without it, such a stream is refused: it may divide its samples by itself.
    """

    ranks: Ranks = "auto"
    uneven: Uneven = "allow"
    check: bool = True
    wait_s: float = 600.0
    reads_all: bool = False

    def __post_init__(self) -> None:
        check_one_of("RankPolicy.uneven", self.uneven, _UNEVEN)
        if not self.wait_s > 0:
            raise ArgumentError(f"RankPolicy.wait_s must be above 0; got {self.wait_s!r}")

    @classmethod
    def of(cls, distributed: Ranks | RankPolicy) -> RankPolicy:
        """The policy for the `distributed` argument of a DataLoader."""
        if distributed is None:  # each loader asks, and a new value takes a microsecond
            return _ALONE
        return distributed if isinstance(distributed, RankPolicy) else cls(distributed)


_ALONE = RankPolicy(None)


class Terms(NamedTuple):
    """Facts on which all ranks must agree."""

    dataset: str
    kind: str
    length: int | None
    order: str
    seed: int | None
    listing: str | None
    world_size: int
    batch_size: int | None
    drop_last: bool
    epoch: int
    position: Any
    cpu_share: str | None = None

    @classmethod
    def of(cls, loader: Any, plan: Plan, cursor: Cursor | PartitionCursor) -> Terms:
        """The terms of one rank at the start of an iteration."""
        # Each rank of a stream has its own partitions' marks, so only their presence is comparable.
        position = cursor[1:] if isinstance(cursor, Cursor) else bool(cursor.marks) and "resumed"
        return cls(
            dataset=type(loader.dataset).__name__, **plan.fingerprint.to_json(), world_size=loader._fl_world_size,
            batch_size=loader.batch_size, drop_last=bool(loader.drop_last), epoch=cursor.epoch, position=position,
        )  # fmt: skip


_WORDS = {"kind": "kind of dataset", "order": "order", "listing": "list of files", "drop_last": "drop_last"}


_contracts = count()


class Contract:
    """Comparison of one loader with those of the other ranks.

    The n-th loader of each rank, in the order of their first iterations, is compared with the n-th of the others.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._rounds = 0
        self._kept: tuple[Any, str] | None = None
        self.met: tuple[str, float] | None = None
        """Name of the latest comparison, and the time at which it ended on all ranks, in seconds since 1970."""

    def check(self, policy: RankPolicy, rank: int, terms: Terms) -> None:
        """Wait for all ranks, and compare; `RankError` names the odd one."""
        store = _store(policy, terms.world_size)
        if store is None:
            return
        if self._number is None:  # at the first iteration: ranks may create loaders that they never iterate over
            self._number = next(_contracts)
        meeting = f"{self._number}/{self._rounds}"
        key = f"feedline/loader {meeting}/"
        self._rounds += 1
        mine = key + str(dist.get_rank())
        store.set(mine, json.dumps([rank, terms]))
        keys = [key + str(other) for other in range(dist.get_world_size())]
        _wait(store, keys, policy.wait_s, terms)
        self.met = meeting, time()
        ranks = [json.loads(value) for value in store.multi_get(keys)]
        try:
            compare(ranks)
        except RankError:
            _let_others_read(store, key)
            raise
        # All ranks have read the keys of the round before, or would not be in this one.
        if self._kept is not None:
            with suppress(RuntimeError, NotImplementedError):
                self._kept[0].delete_key(self._kept[1])
        self._kept = store, mine


def compare(ranks: Sequence[tuple[int, Sequence[Any]]]) -> None:
    """Raise `RankError` unless all processes agree.

    `ranks` has the rank of the loader and its terms for each process, in the order of their ranks in torch.distributed.
    """
    read_as = Counter(rank for rank, _ in ranks)
    twice = [rank for rank, times in read_as.items() if times > 1]
    if twice:
        who = [process for process, (rank, _) in enumerate(ranks) if rank == twice[0]]
        raise RankError(
            f"{named_ranks(who)} all read as rank {twice[0]} of {len(ranks)}, so their samples would be delivered "
            f"{len(who)} times, and those of another rank never: pass distributed='auto', or each rank's own number"
        )
    columns = zip(Terms._fields, zip(*(terms for _, terms in ranks), strict=True), strict=True)
    differences = [text for field, values in columns if (text := _difference(field, values))]
    if differences:
        raise RankError(
            f"the ranks do not read the same data: {'; '.join(differences)}. All ranks need the same dataset, seed, "
            "batch size and loaded state. distributed=fl.RankPolicy(check=False) skips this check"
        )


def _difference(field: str, values: Sequence[Any]) -> str:
    """Text on the values that differ; empty if all ranks agree."""
    texts = [json.dumps(value) for value in values]
    (usual, times), *others = Counter(texts).most_common()
    if not others:
        return ""
    name = _WORDS.get(field, field.replace("_", " "))
    if times == others[0][1]:  # no majority
        parts = [f"{_short(text)} on {named_ranks(_places(texts, text))}" for text in dict.fromkeys(texts)]
        return f"{name} is {', but '.join(parts)}"
    odd = [f"{_short(text)} on {named_ranks(_places(texts, text))}" for text, _ in others]
    return f"{name} is {', '.join(odd)}, but {_short(usual)} on the other ranks"


def _places(texts: Sequence[str], text: str) -> list[int]:
    return [place for place, each in enumerate(texts) if each == text]


def named_ranks(ranks: Sequence[int]) -> str:
    """Text with the first eight of some ranks."""
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _short(text: str) -> str:
    return text if len(text) <= 100 else text[:97] + "..."


def _store(policy: RankPolicy, world_size: int) -> Any:
    """The store of torch.distributed; None if its ranks are not the loader's."""
    if not policy.check or world_size < 2 or torch_worker._worker_info is not None:
        return None
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() != world_size:
        return None
    try:
        return dist.distributed_c10d._get_default_store()
    except (AttributeError, ValueError, RuntimeError):  # a backend without one, such as MPI
        return None


def _let_others_read(store: Any, key: str) -> None:
    """Wait until all ranks have seen the error, for at most `_GRACE_S`.

    The store may end with the process of one of the ranks.
    """
    read = [f"{key}{rank}/read" for rank in range(dist.get_world_size())]
    with suppress(RuntimeError):
        store.set(read[dist.get_rank()], "1")
        store.wait(read, timedelta(seconds=_GRACE_S))


def _wait(store: Any, keys: Sequence[str], wait_s: float, terms: Terms) -> None:
    """Wait until all keys exist; `RankError` names the missing ranks."""
    began_s, warned = monotonic(), False
    while True:
        slice_s = max(0.01, min(_SLICE_S, began_s + wait_s - monotonic()))
        due_s = monotonic() + slice_s
        try:
            store.wait(keys, timedelta(seconds=slice_s))
        except RuntimeError:  # each kind of store has an error of its own for the end of a wait
            if monotonic() < due_s - slice_s / 2:
                raise
        else:
            return
        waited_s = monotonic() - began_s
        if waited_s < wait_s and (warned or waited_s < _PATIENCE_S):
            continue
        missing = named_ranks([rank for rank, key in enumerate(keys) if not store.check([key])])
        text = (
            f"rank {dist.get_rank()} has waited {waited_s:.0f} s at the start of epoch {terms.epoch} of "
            f"{terms.dataset}: {missing} did not begin this iteration of the loader. If only some ranks "
            "read it, pass distributed=(0, 1)"
        )
        if waited_s >= wait_s:
            raise RankError(text)
        warned = True
        warnings.warn(text, stacklevel=6)


def is_in_step(policy: RankPolicy) -> bool:
    """True if this process must agree with others on each step."""
    return policy.uneven != "allow" and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
