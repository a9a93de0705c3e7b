"""Steps of streams, from single samples to packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal, Protocol, Self

from feedline import collate
from feedline.collate.base import Fill
from feedline.core.rng import addressed, derive, permuted
from feedline.core.sample_transform import SampleTransform
from feedline.errors import CollateError, note
from feedline.streams.flow import FlowPlace, OpenFlow, SampleFlow


class StreamStep(Protocol):
    """A step of a stream: a value, from which flows are opened."""

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow: ...


@dataclass(frozen=True)
class MapStep:
    """`function` applied to each sample."""

    function: Callable[..., Any]

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        return _MappedSamples(upstream(place.epoch), place, self.function, keeps=False)


@dataclass(frozen=True)
class FilterStep:
    """The samples for which `function` is true."""

    function: Callable[..., Any]

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        return _MappedSamples(upstream(place.epoch), place, self.function, keeps=True)


class _MappedSamples:
    """Results of a function, or the samples that it keeps.

    Random numbers are fixed by the number of the sample.
    """

    def __init__(self, inner: SampleFlow, place: FlowPlace, function: Callable[..., Any], *, keeps: bool) -> None:
        self._inner, self._place, self._keeps = inner, place, keeps
        self._transform = SampleTransform(function)
        self._random = place.keys()
        self._count = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        for sample in self._inner:
            key = self._random[self._count]
            self._count += 1
            try:
                with addressed([key]):
                    result = self._transform.with_key(sample, key)
            except Exception as error:
                self._add_note(error)
                raise
            if not self._keeps:
                return result
            if result:
                return sample
        raise StopIteration

    def _add_note(self, error: Exception) -> None:
        place = f"sample {self._count - 1} of partition {self._place.partition} (epoch {self._place.shown_epoch})"
        function = self._transform.transform
        note(error, f"feedline: {place}, in the step {getattr(function, '__name__', function)}")

    def state_dict(self) -> Any:
        return {"count": self._count, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._count = state["count"]
        self._inner.load_state_dict(state["inner"])


@dataclass(frozen=True)
class ShuffleStep:
    """Blocks of `buffer` samples, each in random order."""

    buffer: int

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        def order(samples: list[Any], number: int) -> list[Any]:
            count = len(samples)
            places = permuted(place.key("shuffle", number), count, 0, count).tolist() if count else []
            return [samples[at] for at in places]

        return BlockFlow(upstream(place.epoch), self.buffer, order)


class BlockFlow:
    """Samples made from blocks of other samples.

    `make(samples, number)` lists the samples made from one block. The state is that of the preceding flow at the start
    of the block, so a resume reads at most one block again, and none of its content is stored. After an error of the
    preceding flow, the next call continues the block. A block that cannot be made is left out.
    """

    def __init__(self, inner: SampleFlow, size: int, make: Callable[[list[Any], int], list[Any]]) -> None:
        self._inner, self._size, self._make = inner, size, make
        self._began = inner.state_dict()
        self._number, self._given = -1, 0
        self._made: list[Any] = []
        self._block: list[Any] = []
        self._reads, self._errors = False, 0  # an error may interrupt the reading of a block

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        while self._given == len(self._made):
            if not self._reads:
                self._began, self._made, self._given = self._inner.state_dict(), [], 0
                self._block, self._reads, self._errors = [], True, 0
            samples = self._read()
            if not samples:
                raise StopIteration
            self._number += 1
            self._made = self._make(samples, self._number)
        self._given += 1
        return self._made[self._given - 1]

    def _read(self) -> list[Any]:
        """The samples of the next block; continues after an error."""
        try:
            for sample in islice(self._inner, self._size - len(self._block)):
                self._block.append(sample)
        except Exception:
            self._errors += 1
            raise
        self._reads = False
        return self._block

    def state_dict(self) -> Any:
        if self._reads:
            return {"number": self._number + 1, "given": 0, "inner": self._began}
        if self._given == len(self._made):  # between two blocks
            return {"number": self._number + 1, "given": 0, "inner": self._inner.state_dict()}
        return {"number": self._number, "given": self._given, "errors": self._errors, "inner": self._began}

    def load_state_dict(self, state: Any) -> None:
        self._inner.load_state_dict(state["inner"])
        self._number, self._given, self._made = state["number"] - 1, 0, []
        self._block, self._reads, self._errors = [], False, 0
        if state["given"]:
            self._began, self._number = state["inner"], state["number"]
            self._made = self._make(self._read_again(state.get("errors", 0)), self._number)
            self._given = state["given"]

    def _read_again(self, errors: int) -> list[Any]:
        while True:
            try:
                return self._read()
            except Exception:
                if self._errors > errors:
                    raise  # the first run has not raised it


@dataclass(frozen=True)
class BatchStep:
    """Batches of `size` samples, collated."""

    size: int
    drop_last: bool
    collate_fn: Callable[[list[Any]], Any] | None

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        build = collate.default if self.collate_fn is None else self.collate_fn

        def batch(samples: list[Any], _: int) -> list[Any]:
            return [] if self.drop_last and len(samples) < self.size else [build(samples)]

        return BlockFlow(upstream(place.epoch), self.size, batch)


@dataclass(frozen=True)
class TakeStep:
    """The first `count` samples, divided among the partitions."""

    count: int

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        share, rest = divmod(self.count, place.partitions)
        return _Taken(upstream(place.epoch), share + (place.partition < rest))


class _Taken:
    """The first samples of another flow."""

    def __init__(self, inner: SampleFlow, left: int) -> None:
        self._inner, self._left = inner, left

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._left <= 0:
            raise StopIteration
        sample = next(self._inner)
        self._left -= 1
        return sample

    def state_dict(self) -> Any:
        return {"left": self._left, "inner": self._inner.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._left = state["left"]
        self._inner.load_state_dict(state["inner"])


@dataclass(frozen=True)
class RepeatStep:
    """Several passes, each as an epoch of its own; endless for None."""

    times: int | None

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        return Passes(upstream, place, self.times)


Long = Literal["raise", "truncate", "split"]


@dataclass(frozen=True)
class PackStep:
    """Rows of `max_tokens`, packed from blocks of `buffer` sequences by best fit."""

    max_tokens: int
    buffer: int
    long: Long
    value: Fill

    def open(self, upstream: OpenFlow, place: FlowPlace) -> SampleFlow:
        def rows(samples: list[Any], number: int) -> list[Any]:
            try:
                return self._rows(samples)
            except CollateError as error:
                error.add_note(
                    f"feedline: in block {number} of partition {place.partition} (epoch {place.shown_epoch})"
                )
                raise

        return BlockFlow(upstream(place.epoch), self.buffer, rows)

    def _rows(self, samples: list[Any]) -> list[Any]:
        pieces = [piece for sample in samples for piece in self._pieces(sample)]
        pieces = [piece for piece in pieces if _length(piece)]
        if not pieces:
            return []
        packed = collate.token_budget(self.max_tokens, value=self.value, truncate=self.long == "truncate")(pieces)
        columns = packed.values if isinstance(packed.values, dict) else {"tokens": packed.values}
        if taken := sorted({"positions", "segments"} & set(columns)):
            raise CollateError(
                f"pack() adds fields {taken} to its rows, but samples have them, too: rename or drop them"
            )
        columns = {**columns, "positions": packed.positions, "segments": packed.segments}
        return [{name: column[row] for name, column in columns.items()} for row in range(len(packed.positions))]

    def _pieces(self, sample: Any) -> list[Any]:
        if self.long != "split" or _length(sample) <= self.max_tokens:
            return [sample]
        starts = range(0, _length(sample), self.max_tokens)
        return [_cut(sample, start, start + self.max_tokens) for start in starts]


def _length(sample: Any) -> int:
    if isinstance(sample, Mapping):
        return max((len(value) for value in sample.values()), default=0)
    return len(sample)


def _cut(sample: Any, start: int, stop: int) -> Any:
    if isinstance(sample, Mapping):
        return {name: value[start:stop] for name, value in sample.items()}
    return sample[start:stop]


class Passes:
    """Passes over another flow, each in an epoch of its own."""

    def __init__(self, upstream: OpenFlow, place: FlowPlace, times: int | None) -> None:
        self._upstream, self._place, self._times = upstream, place, times
        self._number, self._flow = 0, self._open_pass(0)
        self._is_empty = True

    def _open_pass(self, number: int) -> SampleFlow:
        # The first pass of an epoch has its number; those of later passes are far from all epochs.
        return self._upstream(self._place.epoch if not number else derive(self._place.epoch, number) >> 2)

    def __iter__(self) -> Self:
        return self

    @property
    def number(self) -> int:
        """Number of passes before the current one."""
        return self._number

    def __next__(self) -> Any:
        while True:
            for sample in self._flow:
                self._is_empty = False
                return sample
            if self._is_empty or (self._times is not None and self._number + 1 >= self._times):
                raise StopIteration  # a pass without samples would be repeated forever
            self._number += 1
            self._flow, self._is_empty = self._open_pass(self._number), True

    def state_dict(self) -> Any:
        return {"number": self._number, "empty": self._is_empty, "inner": self._flow.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self._number, self._is_empty = state["number"], state["empty"]
        self._flow = self._open_pass(self._number)
        self._flow.load_state_dict(state["inner"])
