"""Readers of other libraries' datasets, and findings about their steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class SampleReader(Protocol):
    """Samples equal to `dataset[index]`, with the same draws from the global generators."""

    @property
    def uses_kernels(self) -> bool:
        """False if all samples are left to the dataset."""
        ...

    @property
    def is_repeatable(self) -> bool:
        """True if a sample is read by the library's own code only.

        Read again with torch's generator as before, it is the same, and nothing else has changed.
        """
        ...

    def refresh(self) -> None:
        """Update for changes of the dataset; called before each batch."""
        ...

    def read(self, index: Any, rows: Any) -> Any:
        """Sample `index`.

        Its image may be the next of `rows`, a `collate.rows.RowBuffer` or None.
        """
        ...


@dataclass(frozen=True, slots=True)
class StepFinding:
    """One step of a user's code, and how feedline executes it.

    `reason` is empty for a step that runs in the kernels.
    """

    step: str
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.step}: {self.reason or 'executed by the kernels'}"


@dataclass(frozen=True, slots=True)
class Recognition:
    """Findings about a dataset, and about the datasets that it wraps.

    `reader` is None if feedline reads no part of the dataset. `reason` is the reason why the dataset's own code runs
    instead.
    """

    name: str
    reader: SampleReader | None
    reason: str = ""
    findings: tuple[StepFinding, ...] = ()
    parts: tuple[Recognition, ...] = ()
