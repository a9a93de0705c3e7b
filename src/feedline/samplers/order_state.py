"""Recording of a foreign sampler's epoch, to repeat it after a resume."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from feedline.errors import StateError
from feedline.samplers.generator_state import GeneratorState, nested, pack, select_states, sources, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.samplers.base import Indices


_ITER = -1
"""Position of what `iter(sampler)` itself draws, before the first item."""


class RecordedRun:
    """One epoch of any sampler, with the random states it used.

    The generators that the sampler may use are compared before and after every step. A record is the state before a
    draw. It is only needed if something else drew from that generator since: a sampler that draws nothing records
    nothing, one that draws once records one state.

    When an epoch is repeated, the process's generators hold the recorded states during the sampler's steps only. The
    sampler's own generators keep moving, as they did the first time.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert
        self._script = _check_script(script)
        self._sources = sources(sampler)
        self._draws: list[dict[str, Any]] = list(self._script.get("draws", []))
        self._pending = [(entry["at"], select_states(self._sources, entry["states"])) for entry in self._draws]
        self._left: dict[GeneratorState, Any] = {}  # state after the sampler's latest draw, by generator
        self._overrides: dict[GeneratorState, Any] = {}  # recorded states of the process's generators
        self._context: dict[str, Any] = {}
        self._unpackable: StateError | None = None
        self._iterator: Iterator[Any] | None = None
        self._position = 0

    def start(self) -> None:
        """Call `iter(sampler)`.

        torch does this at once for a batch sampler, and with the first item for a sampler.
        """
        self._context = self._restore_context() if self._script else self._read_context()
        self._install(_ITER)
        self._iterator = self._observe(_ITER, lambda: iter(self._sampler))

    def pull(self, count: int) -> list[Any]:
        """The next `count` items, fewer only at the end; starts if needed."""
        if self._iterator is None:
            self.start()
        items: list[Any] = []
        while len(items) < count:
            self._install(self._position)
            step = min(count - len(items), self._pending[0][0] - self._position if self._pending else sys.maxsize)
            part = self._observe(self._position, partial(self._next, step))
            items += part
            self._position += len(part)
            if len(part) < step:
                break
        return items

    def _next(self, count: int) -> list[Any]:
        items = next_items(self._iterator, count)
        return list(items if self._convert is None else map(self._convert, items))

    def recorded(self) -> dict[str, Any]:
        """JSON from which another run gives the same items."""
        if self._iterator is None:
            return self._script
        if self._unpackable is not None:
            raise self._unpackable
        return {**self._context, **({"draws": list(self._draws)} if self._draws else {})}

    def _read_context(self) -> dict[str, Any]:
        context: dict[str, Any] = {}
        epochs = {path: holder.epoch for path, holder in _with_epoch(self._sampler)}
        if epochs:
            context["epochs"] = epochs
        try:
            states = {
                path: pack(holder.state_dict(), f"the sampler{path}'s state")
                for path, holder in _stateful(self._sampler)
            }
        except StateError as error:
            states, self._unpackable = {}, error  # raised by `recorded`: the order itself needs no state
        if states:
            context["states"] = states
        return context

    def _restore_context(self) -> dict[str, Any]:
        epochs = self._script.get("epochs", {})
        for path, holder in _with_epoch(self._sampler):
            if path in epochs:
                holder.set_epoch(epochs[path])
        states = self._script.get("states", {})
        for path, holder in _stateful(self._sampler):
            if path in states:
                holder.load_state_dict(unpack(states[path]))
        return {name: self._script[name] for name in ("epochs", "states") if name in self._script}

    def _install(self, at: int) -> None:
        """Set the generators to the states recorded for this position."""
        while self._pending and self._pending[0][0] <= at:
            for source, state in self._pending.pop(0)[1].items():
                self._left[source] = state
                if source.owned:
                    source.write(state)
                else:
                    self._overrides[source] = state

    def _observe(self, at: int, step: Callable[[], Any]) -> Any:
        with self._overridden_generators():
            before = [source.read() for source in self._sources]
            try:
                return step()
            finally:
                self._note(at, before)

    @contextmanager
    def _overridden_generators(self) -> Iterator[None]:
        process = {source: source.read() for source in self._overrides}
        for source, state in self._overrides.items():
            source.write(state)
        try:
            yield
        finally:
            self._overrides = {source: source.read() for source in process}
            for source, state in process.items():
                source.write(state)

    def _note(self, at: int, before: list[Any]) -> None:
        states = {}
        for source, state in zip(self._sources, before, strict=True):
            after = source.read()
            if after != state:
                if self._left.get(source) != state:
                    states[source.path] = source.pack(state)
                self._left[source] = after
        if states:
            self._draws.append({"at": at, "states": states})


def next_items(iterator: Iterator[Any] | None, count: int) -> Iterator[Any]:
    """Yield the next `count` items, fewer only at the end.

    Only `next` is called, as in torch: an iterator whose `__iter__` restarts it would give its first items again.
    """
    for _ in range(count if iterator is not None else 0):
        try:
            item = next(iterator)  # type: ignore[arg-type]
        except StopIteration:
            return
        yield item


def _with_epoch(sampler: Any) -> list[tuple[str, Any]]:
    holders = ((path, holder) for path, holder in nested(sampler) if callable(getattr(holder, "set_epoch", None)))
    return [(path, holder) for path, holder in holders if type(getattr(holder, "epoch", None)) is int]


def _stateful(sampler: Any) -> list[tuple[str, Any]]:
    """The outermost samplers that have a `state_dict` of their own.

    A sampler's state covers the samplers inside it.
    """
    samplers: list[tuple[str, Any]] = []
    for path, holder in nested(sampler):
        outermost = not any(path.startswith(f"{outer}.") for outer, _ in samplers)
        if (
            outermost
            and callable(getattr(holder, "state_dict", None))
            and callable(getattr(holder, "load_state_dict", None))
        ):
            samplers.append((path, holder))
    return samplers


def _check_script(script: dict[str, Any]) -> dict[str, Any]:
    unknown = script.keys() - {"epochs", "states", "draws"}
    if unknown:
        raise StateError(f"the saved order is that of another kind of sampler: this one has no entry {min(unknown)!r}")
    for name, kind in (("epochs", dict), ("states", dict), ("draws", list)):
        if not isinstance(script.get(name, kind()), kind):
            raise StateError(f"a damaged state: the entry {name!r} of a sampler's order is {script[name]!r}")
    for entry in script.get("draws", []):
        at, states = (entry.get("at"), entry.get("states")) if isinstance(entry, dict) else (None, None)
        if not isinstance(at, int) or not isinstance(states, dict):
            raise StateError(f"a damaged state: {entry!r} is not a record of draws")
    return script


def is_seedable(sampler: Any) -> bool:
    """Check for torch's `RandomSampler` without a generator.

    Also accepted inside torch's `BatchSampler`.
    """
    core = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(core) is RandomSampler and core.generator is None


class SeededRun:
    """One epoch of torch's `RandomSampler` without a generator.

    Such a sampler draws one seed from torch's global generator. The same draw is made at the same moment, so that order
    and global state are torch's; the seed is all there is to record. The methods are those of `RecordedRun`.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert
        self._seed: int | None = script.get("seed")
        if script.keys() - {"seed"} or not isinstance(self._seed, int | None):
            raise StateError(f"the saved order of a {type(sampler).__name__} holds a seed, but this one holds {script}")
        self._items: Iterator[Any] | None = None
        self._order: Indices | None = None

    def start(self) -> None:
        """Do nothing: torch draws with the first item, not in `iter`."""

    def pull(self, count: int) -> list[Any] | Indices:
        if self._items is None and self._order is None:
            self._open()
        if self._order is None:
            items = next_items(self._items, count)
            return list(items if self._convert is None else map(self._convert, items))
        part, self._order = self._order[:count], self._order[count:]
        return part

    def _open(self) -> None:
        if self._seed is None:
            self._seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(self._seed)
        sampler = self._sampler
        if type(sampler) is BatchSampler:
            inner = _with_generator(sampler.sampler, generator)
            self._items = iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))
        elif self._convert or sampler.replacement or sampler.num_samples > len(sampler.data_source):
            self._items = iter(_with_generator(sampler, generator))
        else:  # a single permutation stays an array, without a Python int per sample
            n = len(sampler.data_source)
            self._order = torch.randperm(n, generator=generator).numpy()[: sampler.num_samples]

    def recorded(self) -> dict[str, Any]:
        return {} if self._seed is None else {"seed": self._seed}


def _with_generator(sampler: Any, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
