"""`Advice`: one change, with its gain for the whole loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from feedline.loader.report.model import Model

Basis = Literal["replayed", "measured", "bound"]


LEAST_GAIN = 1.05
"""Gain below which a change is not worth it."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One change, and its gain for the whole loop."""

    text: str
    """The reason, with the figures behind the gain."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the loader to set; empty for a change of code or of the machine."""
    gain: float = 1.0
    """Speed of the loop after the change, as a multiple of today's."""
    low: float = 1.0
    high: float = 1.0
    basis: Basis = "replayed"
    """"replayed" by the model; "measured"; or "bound", the gain if a stage took no time at all."""

    @property
    def change(self) -> str:
        """The arguments as in code; for other changes the text."""
        return ", ".join(f"{name}={value!r}" for name, value in self.arguments.items()) or self.text

    def __str__(self) -> str:
        return self.change if not self.arguments else f"{self.change}: {self.text}"


def upper_bound(model: Model, stage: str, text: str) -> Iterator[Advice]:
    """Advice that would remove a stage, if that gains enough."""
    case = model.removal(stage)
    if model.gain(case) >= LEAST_GAIN:
        gain = model.range_of(case)
        yield Advice(text, {}, gain.gain, 1.0, gain.high, "bound")
