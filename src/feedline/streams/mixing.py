"""Mixture of streams by weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import numpy as np

from feedline.core.rng import derive
from feedline.errors import ArgumentError, StateError
from feedline.streams.flow import Chained, FlowPlace, FlowSource, SampleFlow
from feedline.streams.steps import Passes

Stop = Literal["first_exhausted", "all_exhausted", "each_once"]

WeightsAt = Callable[[int], Sequence[float]]
"""Function that returns the weights of an epoch."""


@dataclass(frozen=True)
class MixSource:
    """Several sources; each partition mixes partitions of all of them."""

    sources: tuple[FlowSource, ...]
    weights: Sequence[float] | WeightsAt
    stop: Stop
    max_repeats: int | None

    @property
    def num_partitions(self) -> int:
        return min(source.num_partitions for source in self.sources)

    def open(self, place: FlowPlace) -> SampleFlow:
        """The mixture of one partition; `ArgumentError` for invalid weights."""
        weights = self.weights(place.shown_epoch) if callable(self.weights) else self.weights
        return _Mixed(self, check_weights(weights, len(self.sources), place.shown_epoch), place)

    def passes(self, number: int, place: FlowPlace) -> Passes:
        """Passes over one source's share of a partition of the mixture.

        The share has every `num_partitions`-th partition of the source.
        """
        source = self.sources[number]
        mine = range(place.partition, source.num_partitions, self.num_partitions)

        def open_flow(epoch: int) -> SampleFlow:
            own = replace(place.at(epoch), seed=derive(place.seed, "source", number))
            places = [replace(own, partition=partition, partitions=source.num_partitions) for partition in mine]
            return Chained([partial(source.open, each) for each in places])

        repeats = self.stop == "all_exhausted"
        return Passes(open_flow, place, self.max_repeats if repeats else 1)


class _Mixed:
    """Flow of one partition of a mixture.

    Each source has the time of its next sample. The interval between its samples is 1 / weight, and each sample is
    moved by a random part of its interval. So the shares of any run are exact to within one sample, and the order is
    random.
    """

    def __init__(self, source: MixSource, weights: Sequence[float], place: FlowPlace) -> None:
        self._stop = source.stop
        self._weights = [float(f"{weight:.9g}") for weight in weights]
        self._epoch = place.shown_epoch
        self._periods = [1.0 / weight if weight else 0.0 for weight in weights]
        self._flows = [source.passes(number, place) for number in range(len(weights))]
        self._keys = [place.keys("mix", number) for number in range(len(weights))]
        self._drawn = [0] * len(weights)
        self._left = [number for number, weight in enumerate(weights) if weight]
        self._again = list(self._left)  # those that have not ended once
        self._due = [self._time(number) for number in range(len(weights))]

    def _time(self, number: int) -> float:
        drawn = self._drawn[number]
        moved = (self._keys[number][drawn] >> 11) * 2.0**-53
        return (drawn + moved) * self._periods[number]

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._left:
            number = min(self._left, key=self._due.__getitem__)
            flow = self._flows[number]
            passes = flow.number
            for sample in flow:
                if flow.number > passes and self._has_ended(number):
                    break
                self._drawn[number] += 1
                self._due[number] = self._time(number)
                return sample
            else:
                if self._stop == "first_exhausted":
                    self._left = []
                else:
                    self._left.remove(number)
                    self._has_ended(number)
        raise StopIteration

    def _has_ended(self, number: int) -> bool:
        """Record the end of a source; True if all have ended once."""
        if number in self._again:
            self._again.remove(number)
        if not self._again:
            self._left = []
        return not self._again

    def state_dict(self) -> Any:
        return {
            "weights": list(self._weights), "drawn": list(self._drawn),
            "left": list(self._left), "again": list(self._again),
            "inner": [flow.state_dict() for flow in self._flows],
        }  # fmt: skip

    def load_state_dict(self, state: Any) -> None:
        if len(state["drawn"]) != len(self._flows):
            raise StateError(
                f"this state mixes {len(state['drawn'])} streams, this mixture {len(self._flows)}: mix the same streams"
            )
        if state.get("weights", self._weights) != self._weights:  # those of a function are not in the fingerprint
            raise StateError(
                f"this state mixes with the weights {state['weights']}, but those of epoch {self._epoch} are now"
                f" {self._weights}: weights cannot change within an epoch. Let the function of the epoch return the"
                " former weights for this epoch, and others for later epochs"
            )
        self._drawn, self._left, self._again = list(state["drawn"]), list(state["left"]), list(state["again"])
        self._due = [self._time(number) for number in range(len(self._flows))]
        for flow, inner in zip(self._flows, state["inner"], strict=True):
            flow.load_state_dict(inner)


def check_weights(weights: Sequence[float], count: int, epoch: int | None = None) -> list[float]:
    """The weights, scaled to a sum of 1; `ArgumentError` if invalid."""
    where = "" if epoch is None else f" of epoch {epoch}"
    try:
        values = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        values = np.empty(())
    if values.ndim != 1:
        raise ArgumentError(f"the weights{where} are {weights!r}: pass one number for each of the {count} streams")
    if len(values) != count:
        raise ArgumentError(f"{len(values)} weights{where} for {count} streams: pass one for each")
    wrong = ~(np.isfinite(values) & (values >= 0))
    if wrong.any():
        at = int(wrong.argmax())
        raise ArgumentError(f"weights[{at}]{where} is {values[at]}: weights must be finite and not negative")
    if not values.any():
        raise ArgumentError(f"the weights{where} are all zero: at least one stream needs a weight above 0")
    return (values / values.sum()).tolist()  # type: ignore[no-any-return]
