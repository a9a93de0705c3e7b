"""Mixture of streams by weights that change after numbers of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import numpy as np

from feedline.errors import ArgumentError, StateError
from feedline.samplers.mixture import tempered, weights_by_epoch
from feedline.streams.flow import FlowPlace, FlowSource, SampleFlow
from feedline.streams.mixing import MixSource, WeightsAt, check_weights


@dataclass(frozen=True)
class TemperedWeights:
    """Weights of each epoch, scaled by a temperature."""

    weights: WeightsAt
    temperature: float

    def __call__(self, epoch: int) -> Sequence[float]:
        weights = self.weights(epoch)
        count = len(weights) if isinstance(cast("object", weights), Sequence) else 0
        return temper(check_weights(weights, count, epoch), self.temperature)


@dataclass(frozen=True)
class ListedWeights:
    """Weights of each epoch; the last ones apply to all later epochs."""

    rows: tuple[Sequence[float], ...]

    def __call__(self, epoch: int) -> Sequence[float]:
        return self.rows[min(epoch, len(self.rows) - 1)]


def weights_of(weights: Any, count: int, temperature: float) -> Sequence[float] | WeightsAt:
    """Scaled weights of `count` streams, or a function of the epoch."""
    if callable(weights):
        return weights if temperature == 1 else TemperedWeights(weights, temperature)
    rows = weights_by_epoch(weights)
    if rows is None:
        return temper(check_weights(weights, count), temperature)
    return ListedWeights(tuple(temper(check_weights(row, count, at), temperature) for at, row in enumerate(rows)))


def temper(weights: Sequence[float], temperature: float) -> list[float]:
    """The weights, scaled by a temperature to a sum of 1."""
    scaled: list[float] = tempered(np.asarray(weights, np.float64), temperature).tolist()
    return scaled


@dataclass(frozen=True)
class Phase:
    """Samples of all partitions, and the weights of the streams for them."""

    samples: int
    weights: Sequence[float] | WeightsAt


@dataclass(frozen=True)
class PhasedSource:
    """Several sources; each partition mixes partitions of all of them, in phases.

    A source that has ended restarts.
    """

    sources: tuple[FlowSource, ...]
    phases: tuple[Phase, ...]
    max_repeats: int | None

    @property
    def num_partitions(self) -> int:
        return min(source.num_partitions for source in self.sources)

    def open(self, place: FlowPlace) -> SampleFlow:
        """The mixture of one partition; `ArgumentError` for invalid weights."""
        return _Phased(self, place)


class _Phased:
    """Flow of one partition of a mixture in phases.

    Within a phase each source has the time of its next sample, as in a mixture without phases.
    """

    def __init__(self, source: PhasedSource, place: FlowPlace) -> None:
        mixed = MixSource(source.sources, [1.0] * len(source.sources), "all_exhausted", source.max_repeats)
        self._source, self._place = source, place
        self._flows = [mixed.passes(number, place) for number in range(len(source.sources))]
        self._left = list(range(len(source.sources)))
        self._phase, self._given = 0, 0
        self._begin()

    def _begin(self) -> None:
        """Set weights and times of the sources for the current phase."""
        weights = self._source.phases[self._phase].weights
        if callable(weights):
            weights = check_weights(weights(self._place.shown_epoch), len(self._flows), self._place.shown_epoch)
        self._weights = [float(f"{weight:.9g}") for weight in weights]
        self._periods = [1.0 / weight if weight else 0.0 for weight in weights]
        self._keys = [self._place.keys("phase", self._phase, number) for number in range(len(weights))]
        self._drawn = [0] * len(weights)
        self._due = [self._time(number) for number in range(len(weights))]
        self._used = [number for number in self._left if weights[number]]

    def _time(self, number: int) -> float:
        drawn = self._drawn[number]
        return (drawn + (self._keys[number][drawn] >> 11) * 2.0**-53) * self._periods[number]

    def _quota(self, phase: int) -> int:
        """Number of samples of this partition in a phase."""
        share, rest = divmod(self._source.phases[phase].samples, self._place.partitions)
        return share + (self._place.partition < rest)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._given == self._quota(self._phase):
            if self._phase + 1 == len(self._source.phases):
                raise StopIteration
            self._phase, self._given = self._phase + 1, 0
            self._begin()
        while self._used:
            number = min(self._used, key=self._due.__getitem__)
            for sample in self._flows[number]:
                self._given, self._drawn[number] = self._given + 1, self._drawn[number] + 1
                self._due[number] = self._time(number)
                return sample
            self._left.remove(number)
            self._used.remove(number)
        raise ArgumentError(self._shortage())

    def _shortage(self) -> str:
        place, phase = self._place, self._source.phases[self._phase]
        where = f"partition {place.partition} of {place.partitions} (epoch {place.shown_epoch}, phase {self._phase})"
        numbers = [number for number, weight in enumerate(self._weights) if weight]
        return (
            f"in {where} of a mixture, streams {numbers} have ended after {self._given} of {self._quota(self._phase)}"
            f" samples, with max_repeats={self._source.max_repeats}: ask for fewer than {phase.samples} samples, or"
            " raise max_repeats; a stream without any sample cannot be repeated"
        )

    def state_dict(self) -> Any:
        return {
            "phase": self._phase, "given": self._given, "weights": list(self._weights), "drawn": list(self._drawn),
            "left": list(self._left), "inner": [flow.state_dict() for flow in self._flows],
        }  # fmt: skip

    def load_state_dict(self, state: Any) -> None:
        self._phase, self._left = state["phase"], list(state["left"])
        self._begin()
        if state["weights"] != self._weights:  # those of a function are not in the fingerprint
            raise StateError(
                f"this state mixes with the weights {state['weights']}, but those of epoch {self._place.shown_epoch}"
                f" are now {self._weights}: weights cannot change within an epoch. Pass the former weights for it"
            )
        self._given, self._drawn = state["given"], list(state["drawn"])
        self._due = [self._time(number) for number in range(len(self._flows))]
        for flow, inner in zip(self._flows, state["inner"], strict=True):
            flow.load_state_dict(inner)


def phases_of(
    phases: Sequence[tuple[int, Sequence[float]]], count: int, temperature: float, check: Callable[[str, object], int]
) -> tuple[Phase, ...]:
    """The phases of `curriculum`; `ArgumentError` if they are invalid."""
    made = []
    for number, phase in enumerate(phases):
        try:
            samples, weights = phase
        except (TypeError, ValueError):
            raise ArgumentError(f"phases[{number}] is {phase!r}: pass (samples, weights)") from None
        try:
            checked = check_weights(weights, count)
        except ArgumentError as error:
            raise ArgumentError(f"phases[{number}]: {error}") from None
        made.append(Phase(check(f"the samples of phases[{number}]", samples), temper(checked, temperature)))
    if not made:
        raise ArgumentError("phases is empty: a curriculum needs at least one (samples, weights)")
    return tuple(made)
