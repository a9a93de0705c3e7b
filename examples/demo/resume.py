"""Stop in the middle of an epoch, resume with other workers, and compare with an uninterrupted epoch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import feedline as fl

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch.utils.data import Dataset

    from training import Batch


@dataclass(frozen=True, slots=True)
class ResumeTest:
    """SHA-256 digests of the batches of one epoch, fed in one run and in two."""

    state: str
    workers: tuple[int, int]
    uninterrupted: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """True if the two parts equal the uninterrupted epoch bit for bit."""
        return self.before + self.after == self.uninterrupted

    def summary(self) -> dict[str, Any]:
        """The results as a JSON object."""
        return {
            "equal": self.equal,
            "batches": len(self.uninterrupted),
            "cut_after": len(self.before),
            "workers": self.workers,
            "state_nbytes": len(self.state.encode()),
            "checksum": checksum(self.before + self.after),
            "checksum_uninterrupted": checksum(self.uninterrupted),
        }


def run_resume_test(dataset: Dataset[Any], *, batch_size: int, seed: int, workers: tuple[int, int]) -> ResumeTest:
    """Feed one epoch with `workers[0]`, then stop it after a third and resume with `workers[1]`.

    The state passes through JSON text, as through a checkpoint file.
    """

    def loader(num_workers: int) -> fl.DataLoader[Any]:
        return fl.DataLoader(dataset, batch_size=batch_size, shuffle=True, seed=seed, num_workers=num_workers)

    with loader(workers[0]) as whole:
        uninterrupted = digests(whole)
    with loader(workers[0]) as first:
        before = digests(batch for _, batch in zip(range(len(first) // 3), first, strict=False))
        state = json.dumps(first.state_dict())
    with loader(workers[1]) as second:
        second.load_state_dict(json.loads(state))
        after = digests(second)
    return ResumeTest(state, workers, uninterrupted, before, after)


def digests(batches: Iterable[Batch]) -> tuple[str, ...]:
    """One digest per batch, over images and labels."""
    return tuple(_digest(images.numpy().tobytes() + labels.numpy().tobytes()) for images, labels in batches)


def checksum(parts: tuple[str, ...]) -> str:
    """One short checksum over many digests, for display."""
    return _digest("".join(parts).encode())[:16]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
