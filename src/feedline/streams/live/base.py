"""Live stream: partitions of messages, whose places are the state."""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic
from typing import Any

import torch.utils.data

from feedline.core import finalizers
from feedline.core.dataset import Traits
from feedline.core.live import LiveDraw
from feedline.core.packing import from_leaf, unpack
from feedline.core.rng import addressed, derive
from feedline.errors import ArgumentError, FeedlineError, OffsetLostError, note
from feedline.streams.live.decoding import message_decoder
from feedline.streams.live.reader import LiveReader
from feedline.streams.live.terms import LiveClient, LiveOptions, Place, RetainedRange


@dataclass(slots=True)
class _Commits:
    """Places to commit, and those that one process has committed."""

    pending: dict[int, Place] = field(default_factory=dict)
    done: dict[int, Place] = field(default_factory=dict)
    client: LiveClient | None = None
    at_s: float = 0.0
    own: set[int] = field(default_factory=set)
    """Partitions that this process has begun; a state also has those of other ranks."""

    def disconnect(self) -> None:
        """Close the connection, if there is one."""
        client, self.client = self.client, None
        if client is not None:
            client.close()


class LiveStream(torch.utils.data.IterableDataset[Any]):
    """Messages of a source without an end, in partitions.

    Ranks and workers share the partitions.

    The state of a loader holds the place of each partition after the delivered batches, so a resume neither loses nor
    repeats a message. With `group`, places are also committed to the source, when the loop asks for the next batch: a
    run without a state begins there, and may receive the latest messages again.

    A batch holds messages of one partition. It is delivered when it is full, or `max_wait_s` after the arrival of its
    first message. Each epoch begins where the loop left the previous one. It ends with the batch that reaches
    `stop_after` messages of this rank, or at `until`: a time, or "latest", the newest messages at its start.

    `decode` is "bytes", "text", "json" or a function of a message. A message that it cannot decode raises an error that
    names its place, or is left out by the loader's `on_error="skip"`, with its content in the quarantine file.

    In torch's own DataLoader, each worker reads its share of the partitions, without state and commits.
    """

    continues = True
    runs = 0
    """Number of `begin` calls in this process."""
    _readers: dict[tuple[int, int], LiveReader]
    """By thread, and by the run of their partitions: a run that ends closes its own."""
    _commits: _Commits
    _pid = 0
    _epoch = -1
    _places: dict[int, Any]

    def __init__(self, terms: LiveOptions) -> None:
        self.terms = terms
        self.decode = message_decoder(terms.decode, terms.limits.message_nbytes)
        self._places = {}
        self._forget()

    # Of subclasses.

    def open_client(self) -> LiveClient:
        """Open a connection to the source."""
        raise NotImplementedError

    def address(self, partition: int, place: Place) -> str:
        """Name of the message before `place`, for errors."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Text that identifies the messages.

        A state is only loaded into a stream with an equal text.
        """
        raise NotImplementedError

    @property
    def num_partitions(self) -> int:
        """Number of partitions, which ranks and workers share."""
        raise NotImplementedError

    @staticmethod
    def order(place: Place) -> Any:
        """Key that orders the places of a partition."""
        return place

    # Of the loader.

    def place_key(self, state: Any) -> Any:
        """JSON value that orders the states of a partition by their places."""
        return self.order(state["place"])

    @property
    def traits(self) -> Traits:
        """Traits of the samples: random only if `decode` is a user's function."""
        return Traits(is_random=not self.decode.is_pure)

    def partition(self, partition: int, epoch: int) -> LivePartition:
        """The messages of one partition: an iterator with a state."""
        return LivePartition(self, partition, epoch)

    def begin(self, epoch: int, states: Mapping[int, Any]) -> dict[int, Any]:
        """States of partitions at the start of an epoch.

        `states` maps each partition to its earlier state, or to None. If the source no longer has the messages after a
        state, `OffsetLostError` is raised. With `lost="skip"`, a warning is given, and the epoch begins at the oldest
        message.
        """
        self.runs += 1
        try:
            client = self.open_client()
        except FeedlineError as error:
            which = f"partition{'s'[: len(states) - 1]} {', '.join(map(str, states))}"
            note(error, f"feedline: while opening {which} (epoch {epoch}) of {type(self).__name__}")
            raise
        self._commits.own = set(states)
        with closing(client):
            return {number: self._begin_partition(client, number, epoch, state) for number, state in states.items()}

    def is_over(self, epoch: int, states: Sequence[Any]) -> bool:
        """True if `stop_after` ends the epoch at these states."""
        most = self.terms.stop_after
        return most is not None and sum(state["count"] for state in states if state["epoch"] == epoch) >= most

    def acknowledge(self, states: Mapping[int, Any], *, now: bool) -> None:
        """Commit the places of these states, if there is a group.

        Commits are at least `commit_every_s` apart, unless `now` is true.
        """
        if self.terms.group is None:
            return
        commits = self._commits
        commits.pending.update((number, state["place"]) for number, state in states.items())
        if now or monotonic() - commits.at_s >= self.terms.limits.commit_every_s:
            self._commit(commits)

    def commit(self, state: Mapping[str, Any]) -> None:
        """Commit the places of a loader's state, as after a checkpoint.

        Of the partitions, only those of this rank are committed: the state has old places of the others. A process
        that has not read the stream commits all of them. Raises `ArgumentError` without `group`.
        """
        if self.terms.group is None:
            raise ArgumentError("commit() needs group=: the source keeps places by the name of a group")
        marks = {int(entry[0]): unpack(from_leaf(entry[3], "partitions")) for entry in state["partitions"]}
        own = self._commits.own or set(marks)
        marks = {number: mark for number, mark in marks.items() if number in own}
        self.acknowledge({number: mark[1] for number, mark in marks.items() if mark is not None}, now=True)

    def disconnect(self, run: int) -> None:
        """Close connections of a run of this process."""
        if self._pid != os.getpid():
            return
        for key, reader in list(self._readers.items()):
            if key[1] == run:
                del self._readers[key]
                reader.close()
        if run == self.runs:
            self._commits.disconnect()

    def stop_waiting(self, run: int) -> None:
        """End draws of a run that wait for messages. Thread-safe."""
        for (_, its_run), reader in list(self._readers.items()):
            if its_run == run:
                reader.stop()

    def __iter__(self) -> Iterator[Any]:
        mine = range(self.num_partitions)
        info = torch.utils.data.get_worker_info()
        if info is not None:
            mine = mine[info.id :: info.num_workers]
        self._epoch += 1
        return self._alone(list(mine), self._epoch, 1 if info is None else info.num_workers)

    def _alone(self, mine: list[int], epoch: int, sharers: int) -> Iterator[Any]:
        """The samples of these partitions, as messages arrive."""
        begun = self.begin(epoch, {number: self._places.get(number) for number in mine})
        run = self.runs
        flows = {number: self.partition(number, epoch) for number in mine}
        for number, flow in flows.items():
            flow.load_state_dict(begun[number])
        try:
            yield from self._samples_of(flows, sharers)
        finally:
            self.disconnect(run)

    def _samples_of(self, flows: dict[int, LivePartition], sharers: int) -> Iterator[Any]:
        most = self.terms.stop_after and -(-self.terms.stop_after // sharers)
        given = 0
        while flows:
            for number, flow in list(flows.items()):
                try:
                    drawn = flow.draw(64 if most is None else min(64, most - given))
                except StopIteration:
                    del flows[number]
                    continue
                for state, sample in zip(flow.states(), drawn.samples, strict=True):
                    self._places[number] = state
                    yield sample
                given += len(drawn.samples)
                if most is not None and given >= most:
                    return

    def reader(self, run: int) -> LiveReader:
        """The reader of this thread and run, for all its partitions."""
        if self._pid != os.getpid():
            self._forget()
        key = threading.get_ident(), run
        if key not in self._readers:
            self._readers[key] = LiveReader(self.open_client, self.terms, self.order, type(self).__name__)
        return self._readers[key]

    def __getstate__(self) -> dict[str, Any]:
        hidden = ("_finalizer", "_readers", "_commits", "_pid", "_former")
        return {name: value for name, value in vars(self).items() if name not in hidden}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._forget()

    def _forget(self) -> None:
        # A fork has the connections of its parent, and must not end them: they are kept, and never used.
        self._former = (vars(self).get("_readers"), vars(self).get("_commits"))
        self._readers = {}
        self._commits = _Commits()
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, finalizers.run, _disconnect, self._readers, self._commits, self._pid)

    def _commit(self, commits: _Commits) -> None:
        changed = {number: place for number, place in commits.pending.items() if commits.done.get(number) != place}
        if changed:
            if commits.client is None:
                commits.client = self.open_client()
            try:
                commits.client.commit(changed)
            except BaseException:
                client, commits.client = commits.client, None  # a connection that was lost stays so
                with suppress(FeedlineError):
                    client.close()
                raise
        commits.done.update(changed)
        commits.pending.clear()
        commits.at_s = monotonic()

    def _begin_partition(self, client: LiveClient, number: int, epoch: int, state: Any) -> dict[str, Any]:
        try:
            return self._begun(client, number, epoch, state)
        except FeedlineError as error:
            note(error, f"feedline: while opening partition {number} (epoch {epoch}) of {type(self).__name__}")
            raise

    def _begun(self, client: LiveClient, number: int, epoch: int, state: Any) -> dict[str, Any]:
        retained = client.retained(number)
        place = self._start(client, number, retained) if state is None else state["place"]
        if client.is_lost(number, place, retained):
            place = self.after_loss(number, place, retained)
        stop = retained.end if self.terms.until == "latest" else None
        if state is not None and state["epoch"] == epoch:
            kept_stop = state["stop"]  # None in an epoch that began without an end, and may get one now
            return {**state, "place": place, "stop": stop if kept_stop is None else kept_stop}
        return {"place": place, "epoch": epoch, "count": 0, "stop": stop}

    def _start(self, client: LiveClient, number: int, retained: RetainedRange) -> Place:
        place = None if self.terms.group is None else client.committed(number)
        if place is None:
            place = retained.first if self.terms.start == "earliest" else retained.end
        self._commits.done[number] = place  # nothing was delivered that could be committed
        return place

    def after_loss(self, number: int, place: Place, retained: RetainedRange) -> Place:
        """The oldest place, with a warning; raises `OffsetLostError` unless `lost` is "skip"."""
        what = (
            f"{self.address(number, place)} is out of retention: the source has only what lies between "
            f"{retained.first!r} and {retained.end!r}, so messages were deleted before they were delivered"
        )
        if self.terms.lost == "raise":
            raise OffsetLostError(f"{what}. Keep messages for longer; lost='skip' continues with the oldest message")
        warnings.warn(f"{what}; continuing with the oldest message", stacklevel=2)
        return retained.first


# A finalizer, so it must not refer to the stream.
def _disconnect(readers: dict[tuple[int, int], LiveReader], commits: _Commits, pid: int) -> None:
    if pid != os.getpid():
        return
    while readers:
        readers.popitem()[1].close()
    commits.disconnect()


class LivePartition:
    """The messages of one partition of a live stream; see `LiveSamples`."""

    def __init__(self, stream: LiveStream, number: int, epoch: int) -> None:
        self._stream, self._number, self._run = stream, number, stream.runs
        self._state: dict[str, Any] = {"place": None, "epoch": epoch, "count": 0, "stop": None}
        self._reader: LiveReader | None = None
        self._before = self._state
        self._used: list[Any] = []

    def __iter__(self) -> LivePartition:
        return self

    def __next__(self) -> Any:
        """The next sample, for steps of streams; waits without a limit."""
        while not (drawn := self.draw(1)).samples:
            pass
        return drawn.samples[0]

    def draw(self, size: int, *, skips: bool = False, seed: int | None = None) -> LiveDraw:
        """See `LiveSamples`."""
        until = self._stream.terms.until
        if isinstance(until, datetime) and datetime.now(UTC) >= until:
            raise StopIteration
        reader = self._open()
        messages, places = reader.draw(self._number, size)
        if not messages and reader.is_at_end(self._number):
            raise StopIteration
        used = 0
        try:
            with addressed(None if seed is None else _PlaceKeys(seed, self._number, places)) as address:
                drawn, used = self._stream.decode(
                    messages, lambda row: self._stream.address(self._number, places[row]), address, skips=skips
                )
        finally:
            if used < len(messages):
                reader.put_back(self._number, messages[used:], places[used:])
        self._before, self._used = self._state, places[:used]
        if used:
            self._state = self._after(used)
        return drawn

    def states(self) -> Iterator[dict[str, Any]]:
        """States after each message of the latest draw."""
        return map(self._after, range(1, len(self._used) + 1))

    def _after(self, count: int) -> dict[str, Any]:
        before = self._before
        return {**before, "place": self._used[count - 1], "count": before["count"] + count}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._state, self._reader = dict(state), None

    def _open(self) -> LiveReader:
        reader = self._stream.reader(self._run)
        if self._reader is not reader:
            if self._state["place"] is None:  # opened by a caller that has no states
                self._state = self._stream.begin(self._state["epoch"], {self._number: None})[self._number]
            reader.open(self._number, self._state["place"], self._state["stop"])
            self._reader = reader
        return reader


class _PlaceKeys(Sequence[int]):
    """Random keys of messages, by row, fixed by seed and place."""

    __slots__ = ("_partition", "_places", "_seed")

    def __init__(self, seed: int, partition: int, places: Sequence[Place]) -> None:
        self._seed, self._partition, self._places = seed, partition, places

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, row: Any) -> Any:
        return derive(self._seed, "live", self._partition, str(self._places[row]))
