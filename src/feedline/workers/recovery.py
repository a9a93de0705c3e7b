"""How much trouble with worker processes is borne before it becomes an error."""

from __future__ import annotations

from dataclasses import dataclass

from feedline.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class Recovery:
    """What a loader bears from its worker processes; the stream of batches is the same whatever happens within it."""

    deaths_per_epoch: int = 3
    """Workers that may die in one epoch. Each is replaced and its request given to another; one more is an error."""
    stall_s: float = 60.0
    """How long the loop waits for a batch before the stack and the current sample of every worker are logged."""

    def __post_init__(self) -> None:
        if self.deaths_per_epoch < 0:
            raise ArgumentError(f"deaths_per_epoch must not be negative; got {self.deaths_per_epoch}")
        if self.stall_s <= 0:
            raise ArgumentError(f"stall_s must be positive; got {self.stall_s}")
