"""Stream: partitions of samples, and the steps that they take."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, Self, get_args

import torch.utils.data

from feedline.collate.base import Fill
from feedline.core.arguments import check_one_of
from feedline.core.rng import derive
from feedline.errors import ArgumentError
from feedline.streams.flow import FlowPlace, FlowSource, OpenFlow, SampleFlow, check_count, describe
from feedline.streams.mixing import MixSource, Stop, WeightsAt
from feedline.streams.phases import Phase, PhasedSource, phases_of, weights_of
from feedline.streams.steps import (
    BatchStep,
    FilterStep,
    Long,
    MapStep,
    PackStep,
    RepeatStep,
    ShuffleStep,
    StreamStep,
    TakeStep,
)


class SampleStream(torch.utils.data.IterableDataset[Any]):
    """Samples of a source, and steps that each partition takes by itself.

    A stream never changes: each method returns another one. It resumes in the middle, with the content of its buffers
    read again, not stored, and gives the same samples for any number of workers and ranks, because their partitions are
    those of the source. Functions of steps take the sample, or the sample and a random generator, which is fixed by
    `seed`, epoch, partition and the number of the sample, as `feedline.sample_rng()` is. Draws from global generators
    do not repeat on a resume.

    In torch's DataLoader each worker reads its share of the partitions, and each pass of a process is the next epoch.
    """

    def __init__(self, source: FlowSource, steps: Sequence[StreamStep] = (), *, seed: int = 0) -> None:
        self.source, self.steps, self.seed = source, tuple(steps), operator.index(seed)
        self._epoch = 0

    @property
    def num_partitions(self) -> int:
        """Number of partitions, which ranks and workers share."""
        return self.source.num_partitions

    def partition(self, partition: int, epoch: int) -> SampleFlow:
        """The flow of one partition in an epoch, an iterator with state."""
        return self.open(FlowPlace(self.seed, epoch, partition, self.num_partitions))

    def open(self, place: FlowPlace) -> SampleFlow:
        """The flow of a partition, as a source of another stream."""
        place = replace(place, seed=derive(place.seed, self.seed), depth=0)

        def source(epoch: int) -> SampleFlow:
            return self.source.open(place.at(epoch))

        upstream: OpenFlow = source
        for depth, step in enumerate(self.steps, 1):
            upstream = _opening(step, upstream, replace(place, depth=depth))
        return upstream(place.epoch)

    def fingerprint(self) -> str:
        """Text that identifies source and steps.

        A state is only loaded into a stream with an equal text. Functions are identified by their names.
        """
        return f"SampleStream({describe((self.source, *self.steps))}, seed={self.seed})"

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next pass in torch's DataLoader."""
        self._epoch = operator.index(epoch)

    def __iter__(self) -> Iterator[Any]:
        partitions, epoch = range(self.num_partitions), self._epoch
        info = torch.utils.data.get_worker_info()
        if info is not None:
            partitions = partitions[info.id :: info.num_workers]
        self._epoch += 1
        return chain.from_iterable(self.partition(partition, epoch) for partition in partitions)

    def then(self, step: StreamStep) -> Self:
        """Return the stream with one more step."""
        return type(self)(self.source, (*self.steps, step), seed=self.seed)

    def map(self, fn: Callable[..., Any]) -> Self:
        """Apply `fn(sample)` or `fn(sample, rng)` to each sample."""
        return self.then(MapStep(fn))

    def filter(self, predicate: Callable[..., Any]) -> Self:
        """Keep samples for which `predicate(sample)` or `predicate(sample, rng)` is true."""
        return self.then(FilterStep(predicate))

    def shuffle(self, buffer: int) -> Self:
        """Shuffle each block of `buffer` samples of a partition.

        One block per partition is in memory. A resume reads at most one block again.
        """
        return self.then(ShuffleStep(check_count("buffer", buffer)))

    def batch(
        self, size: int, *, drop_last: bool = False, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Self:
        """Collate every `size` samples of a partition, for steps on batches.

        The loader then needs `batch_size=None`. The last batch of a partition may be smaller, unless `drop_last` is
        true. `collate_fn` is by default `fl.collate.default`.
        """
        return self.then(BatchStep(check_count("size", size), drop_last, collate_fn))

    def take(self, count: int) -> Self:
        """Keep the first `count` samples, an equal share from each partition.

        Fewer are kept if a partition has less than its share.
        """
        return self.then(TakeStep(check_count("count", count)))

    def repeat(self, times: int | None = None) -> Self:
        """Read each partition `times` times in an epoch; endlessly for None.

        Each pass has another random order. A pass without samples is the last one.
        """
        return self.then(RepeatStep(None if times is None else check_count("times", times)))

    def pack(self, max_tokens: int, *, buffer: int = 256, long: Long = "raise", value: Fill = 0) -> Self:
        """Pack sequences into rows of `max_tokens`, by best fit.

        Each block of `buffer` sequences of a partition is packed by itself. Samples are 1-D sequences, or dicts of 1-D
        sequences of equal length. Empty sequences are left out. A row is a dict of tensors (max_tokens,):

        - the fields of the samples, or "tokens", padded with `value`, which may be a mapping from field to value;
        - "positions", int64: place of a token within its sequence, 0 on padding;
        - "segments", int64: number of the sequence within its row, from 1; 0 on padding.

        A sequence longer than a row raises `CollateError`. With `long="truncate"` it is cut at its end; with "split" it
        becomes several sequences.
        """
        check_one_of("long", long, get_args(Long))
        return self.then(PackStep(check_count("max_tokens", max_tokens), check_count("buffer", buffer), long, value))


def _opening(step: StreamStep, upstream: OpenFlow, place: FlowPlace) -> OpenFlow:
    return lambda epoch: step.open(upstream, place.at(epoch))


def mix(
    streams: Sequence[SampleStream], weights: Sequence[float] | Sequence[Sequence[float]] | WeightsAt, *,
    stop: Stop | int = "first_exhausted", temperature: float = 1.0, max_repeats: int | None = None, seed: int = 0,
) -> SampleStream:  # fmt: skip
    """Streams mixed by weights, which are scaled to a sum of 1.

    `weights` is a list with a number for each stream, or a list of such lists, one for each epoch. The last of these
    lists applies to all later epochs. `weights` may also be a function that returns the list of an epoch. In any part
    of a partition, the share of each stream is exact to within one sample. `temperature` T scales each weight w to
    w ** (1 / T): with sizes as weights, T > 1 draws more from small streams. The mixture has as many partitions as the
    stream with the fewest. `seed` fixes the order of the streams, and the random numbers of steps.

    `stop` is the end of a partition, or with a number the length of an epoch:

    - "first_exhausted": when one of its streams ends;
    - "all_exhausted": when each of its streams has ended once. Streams that end earlier restart, in another order;
    - "each_once": after each sample was delivered once. Streams that have ended are left out;
    - a number: after that number of samples, which the partitions share. Streams that end restart, in another order.

    `max_repeats` limits how often an epoch has each sample, if streams restart. Other streams take over the share of a
    stream that has reached the limit. With a number as `stop`, the iteration raises `ArgumentError` if all streams
    reach the limit before that number of samples.
    """
    _check_streams("mix", streams)
    if max_repeats is not None and stop in ("first_exhausted", "each_once"):
        raise ArgumentError(
            "max_repeats= is for stop='all_exhausted', or a number of samples: no other mixture repeats samples"
        )
    repeats = None if max_repeats is None else check_count("max_repeats", max_repeats)
    scaled = weights_of(weights, len(streams), temperature)
    if isinstance(stop, str):
        check_one_of("stop", stop, get_args(Stop))
        return SampleStream(MixSource(tuple(streams), scaled, stop, repeats), seed=seed)
    samples = check_count("stop", stop)
    return SampleStream(PhasedSource(tuple(streams), (Phase(samples, scaled),), repeats), seed=seed)


def curriculum(
    streams: Sequence[SampleStream], phases: Sequence[tuple[int, Sequence[float]]], *,
    temperature: float = 1.0, max_repeats: int | None = None, seed: int = 0,
) -> SampleStream:  # fmt: skip
    """Streams mixed in phases of different weights.

    A phase is a number of samples, which the partitions share, and a weight for each stream. A phase continues each
    stream where the previous phase ended. An epoch has all phases. Streams that end within an epoch restart, in another
    order. Partitions, `temperature`, `max_repeats`, `seed` and errors are those of `mix` with a number as `stop`.
    """
    _check_streams("curriculum", streams)
    repeats = None if max_repeats is None else check_count("max_repeats", max_repeats)
    made = phases_of(phases, len(streams), temperature, check_count)
    return SampleStream(PhasedSource(tuple(streams), made, repeats), seed=seed)


def _check_streams(name: str, streams: Any) -> None:
    if isinstance(streams, SampleStream) or not isinstance(streams, Sequence):
        raise ArgumentError(f"{name}() takes a list of streams; got {type(streams).__name__}")
    if not streams:
        raise ArgumentError(f"{name}() needs at least one stream")
    for number, each in enumerate(streams):
        if not isinstance(each, SampleStream):
            raise ArgumentError(
                f"streams[{number}] is {type(each).__name__}: make a stream of it with fl.streams.from_dataset(dataset)"
                " or from_items(items, read)"
            )
