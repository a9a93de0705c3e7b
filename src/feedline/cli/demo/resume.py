"""The demo's second act: stop in the middle of an epoch, go on with other workers, miss and repeat nothing."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import feedline as fl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from feedline.cli.demo.pictures import Pictures, Sample
    from feedline.cli.demo.training import Batch


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """One epoch in one go beside the same epoch in two parts; digests are SHA-256 over the bytes of a batch."""

    state: str
    workers: tuple[int, int]
    uninterrupted: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the two parts are, bit for bit, the whole."""
        return self.before + self.after == self.uninterrupted

    def summary(self) -> dict[str, Any]:
        """The figures, as JSON would hold them."""
        return {
            "equal": self.equal,
            "batches": len(self.uninterrupted),
            "cut_after": len(self.before),
            "workers": self.workers,
            "state_nbytes": len(self.state.encode()),
            "checksum": checksum(self.before + self.after),
            "checksum_uninterrupted": checksum(self.uninterrupted),
        }


def rehearse(pictures: Pictures, *, batch_size: int, seed: int, workers: tuple[int, int]) -> Rehearsal:
    """Feed one epoch with `workers[0]`, then again but cut after a third of its batches and resumed with `workers[1]`.

    The state goes through JSON text in between, as through a checkpoint on disk.
    """

    def loader(num_workers: int) -> fl.DataLoader[Sample]:
        return fl.DataLoader(pictures, batch_size=batch_size, shuffle=True, seed=seed, num_workers=num_workers)

    with loader(workers[0]) as whole:
        uninterrupted = digests(whole)
    with loader(workers[0]) as first:
        before = digests(batch for _, batch in zip(range(len(first) // 3), first, strict=False))
        state = json.dumps(first.state_dict())
    with loader(workers[1]) as second:
        second.load_state_dict(json.loads(state))
        after = digests(second)
    return Rehearsal(state, workers, uninterrupted, before, after)


def digests(batches: Iterable[Batch]) -> tuple[str, ...]:
    """One checksum per batch, over the values of its pictures and labels."""
    return tuple(_digest(images.numpy().tobytes() + labels.numpy().tobytes()) for images, labels in batches)


def checksum(parts: tuple[str, ...]) -> str:
    """One short checksum over many, for people to compare."""
    return _digest("".join(parts).encode())[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
