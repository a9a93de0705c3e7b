"""Sources of streams: datasets, and lists of items to open."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

from torch.utils.data import IterableDataset

from feedline.core.dataset import traits_of
from feedline.core.dataset_fingerprint import listing_fingerprint_of
from feedline.core.live import is_live
from feedline.core.rng import addressed
from feedline.core.torch_wrappers import batch_getter
from feedline.errors import ArgumentError
from feedline.samplers import IndexSampler, Sequential
from feedline.streams.flow import FlowPlace, ReadingFlow, SampleFlow, check_count, describe
from feedline.streams.live.terms import LiveOptions
from feedline.streams.stream import SampleStream

_LOOKAHEAD = 1024
"""Number of indices requested from a sampler at once."""


_TOGETHER = 32
"""Number of samples read at once from a map-style dataset with `__getitems__`."""


@dataclass(frozen=True)
class IterableSource:
    """An `IterableDataset`: its partitions if it has the protocol, else one."""

    dataset: Any

    @property
    def num_partitions(self) -> int:
        return int(getattr(self.dataset, "num_partitions", 1)) if hasattr(self.dataset, "partition") else 1

    def fingerprint(self) -> str:
        """Text that identifies the dataset."""
        return f"IterableSource({_describe_dataset(self.dataset)})"

    def open(self, place: FlowPlace) -> SampleFlow:
        """The flow of one partition."""
        if hasattr(self.dataset, "partition"):
            samples = iter(self.dataset.partition(place.partition, place.passed_epoch))
            return ReadingFlow(_LiveMessages(self.dataset, samples, place) if is_live(self.dataset) else samples, place)
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(place.passed_epoch)
        return ReadingFlow(_begun_later(self.dataset), place)


def _describe_dataset(dataset: Any) -> str:
    listing = listing_fingerprint_of(dataset)
    return describe(dataset) if listing is None else f"{type(dataset).__name__} of {listing}"


def _begun_later(dataset: Iterable[Any]) -> Iterator[Any]:
    yield from dataset  # `iter` within the first step, where the stream has taken away the worker's number


class _LiveMessages:
    """Messages of a live partition up to its end, as a dataset's."""

    def __init__(self, dataset: Any, samples: Any, place: FlowPlace) -> None:
        self._dataset, self._samples, self._place = dataset, samples, place

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return next(self._samples)

    def state_dict(self) -> Any:
        return self._samples.state_dict()

    def load_state_dict(self, state: Any) -> None:
        if state["place"] is not None:  # it may be out of retention by now
            state = self._dataset.begin(self._place.passed_epoch, {self._place.partition: state})[self._place.partition]
        self._samples.load_state_dict(state)


def _check_ending(dataset: Any) -> None:
    """Raise `ArgumentError` for a live stream without an end.

    A live stream with a group or `stop_after` is refused, too.
    """
    terms = getattr(dataset, "terms", None)
    if not is_live(dataset) or not isinstance(terms, LiveOptions):
        return
    if terms.until is None:
        raise ArgumentError(
            f"{type(dataset).__name__} has no end here, so a partition without messages would delay the others:"
            " pass until='latest' or until=datetime(...). In a loader, without steps, the stream needs no end, and"
            " decode= can be a function that does the work of map()"
        )
    for name in ("group", "stop_after"):
        if (value := getattr(terms, name)) is not None:
            raise ArgumentError(
                f"{name}={value!r} has no effect on a stream with steps, whose epochs all begin at start=: leave it"
                " out, or pass the live stream to the loader without steps; decode= may be a function"
            )


@dataclass(frozen=True)
class MapSource:
    """A map-style dataset in a sampler's order, cut into runs."""

    dataset: Any
    sampler: IndexSampler
    num_partitions: int

    def fingerprint(self) -> str:
        """Text that identifies the dataset and its order."""
        order = f"{describe(self.sampler)}, {self.num_partitions}"
        return f"MapSource({_describe_dataset(self.dataset)}, {order})"

    def open(self, place: FlowPlace) -> SampleFlow:
        """The flow of one partition."""
        length = len(self.sampler)
        start, stop = (length * edge // self.num_partitions for edge in (place.partition, place.partition + 1))
        return _Positions(self, place, start, stop)


class _Positions:
    """Flow over the positions [start, stop) of a sampler's order."""

    def __init__(self, source: MapSource, place: FlowPlace, start: int, stop: int) -> None:
        self._source, self._place, self._at, self._stop = source, place, start, stop
        self._keys = place.keys()
        # Draws belong to the samples one by one, and a resume may begin between any two of them.
        self._many = None if traits_of(source.dataset).is_random else batch_getter(source.dataset)
        self._ready: list[Any] = []
        self._indices: list[int] = []
        self._first = 0
        self._alone = start  # up to here, samples are read one by one

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._at >= self._stop:
            raise StopIteration
        if not self._ready:
            self._ready = self._read()
        sample = self._ready.pop()
        self._at += 1
        return sample

    def _read(self) -> list[Any]:
        """The next samples, in reverse order.

        If reading many at once fails, they are read one by one. A sample that raises is passed.
        """
        if self._many is not None and self._at >= self._alone:
            indices = self._take(_TOGETHER)
            try:
                with addressed([self._keys[self._at]]):
                    return list(self._many(indices))[::-1]
            except Exception:  # noqa: BLE001 - reading the sample alone raises it again
                self._alone = self._at + len(indices)
        (index,) = self._take(1)
        try:
            with addressed([self._keys[self._at]]):
                return [self._source.dataset[index]] if self._many is None else list(self._many([index]))
        except Exception:
            self._at += 1
            raise

    def _take(self, count: int) -> list[int]:
        """Up to `count` of the next indices."""
        stop = min(self._stop, self._at + count)
        if not self._first <= self._at <= stop <= self._first + len(self._indices):
            end = min(self._stop, self._at + _LOOKAHEAD)
            self._first = self._at
            self._indices = self._source.sampler.take(self._place.passed_epoch, self._at, end).tolist()
        return self._indices[self._at - self._first : stop - self._first]

    def state_dict(self) -> Any:
        return self._at

    def load_state_dict(self, state: Any) -> None:
        self._at, self._ready = state, []


@dataclass(frozen=True)
class ItemSource:
    """Items that `read` opens, such as paths, divided among partitions."""

    items: tuple[Any, ...]
    read: Callable[[Any], Iterable[Any]]

    @property
    def num_partitions(self) -> int:
        return len(self.items)

    def open(self, place: FlowPlace) -> SampleFlow:
        """The flow of one item."""
        return ReadingFlow(iter(self.read(self.items[place.partition])), place)


def from_dataset(
    dataset: Any, sampler: IndexSampler | None = None, *, partitions: int | None = None, seed: int = 0
) -> SampleStream:
    """A stream of any dataset.

    An `IterableDataset` keeps its partitions. Without any, all of it is one partition, which a single rank reads. A
    live stream is read from its `start` to its `until` in each epoch. A map-style dataset is read in the order of
    `sampler`, by default that of the indices, cut into `partitions` runs. Use as many runs as there will be workers on
    all ranks, or a multiple. `seed` fixes the random numbers of all steps.

    Raises `ArgumentError` for a live stream without an end, and for arguments that do not apply to the dataset.
    """
    if isinstance(dataset, IterableDataset):
        if sampler is not None or partitions is not None:
            raise ArgumentError("sampler= and partitions= are for map-style datasets; an IterableDataset has its own")
        _check_ending(dataset)
        return SampleStream(IterableSource(dataset), seed=seed)
    order = Sequential(len(dataset)) if sampler is None else sampler
    if not isinstance(cast("object", order), IndexSampler) or order.length is None:
        raise ArgumentError(f"sampler must be a sampler of fl.samplers with an end, not {type(sampler).__name__}")
    count = 1 if partitions is None else check_count("partitions", partitions)
    if count > len(order):
        raise ArgumentError(f"partitions={count} is more than the {len(order)} samples: pass fewer")
    return SampleStream(MapSource(dataset, order, count), seed=seed)


def from_items(items: Sequence[Any], read: Callable[[Any], Iterable[Any]], *, seed: int = 0) -> SampleStream:
    """A stream of the samples of `read(item)` for each item.

    Each item, such as the path of a file, is a partition. A resume reads the samples of an item again from its start,
    unless the iterator of `read(item)` has `state_dict` and `load_state_dict`. `seed` fixes the random numbers of all
    steps. Raises `ArgumentError` without items.
    """
    if not items:
        raise ArgumentError("items is empty: a stream needs at least one thing to read")
    return SampleStream(ItemSource(tuple(items), read), seed=seed)
