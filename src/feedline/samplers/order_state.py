"""One run through a foreign sampler, recorded so that it can be repeated.

torch's `RandomSampler` and its few bytes of state.
"""

from __future__ import annotations

import sys
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import BatchSampler, RandomSampler

from feedline.errors import StateError
from feedline.samplers.generator_state import GeneratorState, chosen, nested, pack, sources, unpack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.samplers.base import Indices


_ITER = -1
"""The place of what `iter(sampler)` itself draws, before the item at 0."""


class Drawn:
    """Any sampler. Around every step the generators it may use are compared, and what it drew from is recorded.

    A record is the state just before a draw, needed again only where others drew from the generator in between: a
    sampler that draws nothing records nothing, one that draws once records one state. When a run is repeated, the
    process's own generators hold the recorded states for the sampler's steps alone; the sampler's own generators keep
    moving, as they did in the first run.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert  # called with each item as it comes
        self._script = _checked(script)
        self._sources = sources(sampler)
        self._draws: list[dict[str, Any]] = list(self._script.get("draws", []))
        self._ahead = [(entry["at"], chosen(self._sources, entry["states"])) for entry in self._draws]
        self._left: dict[GeneratorState, Any] = {}  # how our last step that drew from it left a generator
        self._held: dict[GeneratorState, Any] = {}  # states of the process's generators that stand in during our steps
        self._context: dict[str, Any] = {}
        self._unpackable: StateError | None = None
        self._iterator: Iterator[Any] | None = None
        self._listed = 0

    def start(self) -> None:
        """Call `iter(sampler)`, as torch does at once with a batch sampler and lazily with a sampler."""
        self._context = self._restored_context() if self._script else self._current_context()
        self._install(_ITER)
        self._iterator = self._observed(_ITER, lambda: iter(self._sampler))

    def pull(self, count: int) -> list[Any]:
        """The next `count` items, fewer only at the end; calls `start` if that was not done."""
        if self._iterator is None:
            self.start()
        items: list[Any] = []
        while len(items) < count:
            self._install(self._listed)
            step = min(count - len(items), self._ahead[0][0] - self._listed if self._ahead else sys.maxsize)
            part = self._observed(self._listed, partial(self._next, step))
            items += part
            self._listed += len(part)
            if len(part) < step:
                break
        return items

    def _next(self, count: int) -> list[Any]:
        items = islice(self._iterator or (), count)
        return list(items if self._convert is None else map(self._convert, items))

    def recorded(self) -> dict[str, Any]:
        """JSON that makes another run give the same items."""
        if self._iterator is None:
            return self._script
        if self._unpackable is not None:
            raise self._unpackable
        return {**self._context, **({"draws": list(self._draws)} if self._draws else {})}

    def _current_context(self) -> dict[str, Any]:
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
            states, self._unpackable = {}, error  # for who asks what was recorded; the order itself needs no state
        if states:
            context["states"] = states
        return context

    def _restored_context(self) -> dict[str, Any]:
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
        """Take up the recorded states of this place."""
        while self._ahead and self._ahead[0][0] <= at:
            for source, state in self._ahead.pop(0)[1].items():
                self._left[source] = state
                if source.owned:
                    source.write(state)
                else:
                    self._held[source] = state

    def _observed(self, at: int, step: Callable[[], Any]) -> Any:
        with self._standing_in():
            before = [source.read() for source in self._sources]
            try:
                return step()
            finally:
                self._note(at, before)

    @contextmanager
    def _standing_in(self) -> Iterator[None]:
        process = {source: source.read() for source in self._held}
        for source, state in self._held.items():
            source.write(state)
        try:
            yield
        finally:
            self._held = {source: source.read() for source in process}
            for source, state in process.items():
                source.write(state)

    def _note(self, at: int, before: list[Any]) -> None:
        drawn = {}
        for source, state in zip(self._sources, before, strict=True):
            after = source.read()
            if after != state:
                if self._left.get(source) != state:
                    drawn[source.path] = source.pack(state)
                self._left[source] = after
        if drawn:
            self._draws.append({"at": at, "states": drawn})


def _with_epoch(sampler: Any) -> list[tuple[str, Any]]:
    holders = ((path, holder) for path, holder in nested(sampler) if callable(getattr(holder, "set_epoch", None)))
    return [(path, holder) for path, holder in holders if type(getattr(holder, "epoch", None)) is int]


def _stateful(sampler: Any) -> list[tuple[str, Any]]:
    """The samplers with a state of their own, but not those inside one, whose state is its affair."""
    found: list[tuple[str, Any]] = []
    for path, holder in nested(sampler):
        outermost = not any(path.startswith(f"{outer}.") for outer, _ in found)
        if (
            outermost
            and callable(getattr(holder, "state_dict", None))
            and callable(getattr(holder, "load_state_dict", None))
        ):
            found.append((path, holder))
    return found


def _checked(script: dict[str, Any]) -> dict[str, Any]:
    unknown = script.keys() - {"epochs", "states", "draws"}
    if unknown:
        raise StateError(f"a saved order of such a sampler has no entry {min(unknown)!r}: it is that of another kind")
    for name, kind in (("epochs", dict), ("states", dict), ("draws", list)):
        if not isinstance(script.get(name, kind()), kind):
            raise StateError(f"a damaged state: the entry {name!r} of a sampler's order is {script[name]!r}")
    for entry in script.get("draws", []):
        at, states = (entry.get("at"), entry.get("states")) if isinstance(entry, dict) else (None, None)
        if not isinstance(at, int) or not isinstance(states, dict):
            raise StateError(f"a damaged state: {entry!r} is no record of draws")
    return script


def seedable(sampler: Any) -> bool:
    """Whether `sampler` is torch's `RandomSampler` without a generator, as it is or in torch's `BatchSampler`."""
    core = sampler.sampler if type(sampler) is BatchSampler else sampler
    return type(core) is RandomSampler and core.generator is None


class Seeded:
    """A run of torch's `RandomSampler` without a generator, which draws a seed from torch's global one and no more.

    The same draw is made at the same moment, so that order and global state are torch's; the seed is all there is to
    record. The methods are those of `Drawn`.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert
        self._seed: int | None = script.get("seed")
        if script.keys() - {"seed"} or not isinstance(self._seed, int | None):
            raise StateError(f"a saved order of {type(sampler).__name__} holds a seed, but this one holds {script}")
        self._items: Iterator[Any] | None = None
        self._order: Indices | None = None

    def start(self) -> None:
        """Nothing: torch draws with the first item, not in `iter`."""

    def pull(self, count: int) -> list[Any] | Indices:
        if self._items is None and self._order is None:
            self._open()
        if self._order is None:
            items = islice(self._items or (), count)
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
            inner = _with(sampler.sampler, generator)
            self._items = iter(BatchSampler(inner, sampler.batch_size, sampler.drop_last))
        elif self._convert or sampler.replacement or sampler.num_samples > len(sampler.data_source):
            self._items = iter(_with(sampler, generator))
        else:  # a single permutation: as an array, without a Python integer for every sample
            n = len(sampler.data_source)
            self._order = torch.randperm(n, generator=generator).numpy()[: sampler.num_samples]

    def recorded(self) -> dict[str, Any]:
        return {} if self._seed is None else {"seed": self._seed}


def _with(sampler: Any, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
