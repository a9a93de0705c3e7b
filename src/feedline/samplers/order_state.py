"""Recording of a foreign sampler's epoch, to repeat it after a resume."""

from __future__ import annotations

import hashlib
import sys
from collections import deque
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler

from feedline.core.dataset import declared
from feedline.core.packing import pack_or_keep, unpack
from feedline.core.rng_globals import SAMPLER_STEPS, draw_seed
from feedline.core.torch_wrappers import is_torchs
from feedline.errors import StateError
from feedline.samplers.generator_state import GeneratorAccess, generators_of, nested_samplers, select_states

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from feedline.samplers.base import Indices


_ITER = -1
"""Position of the draws of `iter(sampler)` itself, before the first item."""


_SNAPSHOTS = 256
"""Number of kept snapshots of a stateful sampler: more than the batches that any loader has in flight."""


class RecordedRun:
    """One epoch of any sampler, with the random states it used.

    The generators that the sampler may use are compared before and after every step. A record is the state before a
    draw. It is needed only if other code drew from that generator in between: a sampler that draws nothing records
    nothing, and one that draws once records one state.

    When an epoch is repeated, the process's generators hold the recorded states during the sampler's steps only. The
    sampler's own generators keep moving, as they did the first time.

    A sampler, or an iterator of it, that has `state_dict` and `load_state_dict` is repeated from its state at the start
    of the epoch. If that gives different items, because other code has advanced the sampler, it continues from its
    state at the cut.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert
        self._script = _check_script(script)
        self._sources = generators_of(sampler)
        if "generators" in self._script:
            select_states(self._sources, self._script["generators"])
        self._draws: list[dict[str, Any]] = list(self._script.get("draws", []))
        self._pending = [(entry["at"], select_states(self._sources, entry["states"])) for entry in self._draws]
        self._left: dict[GeneratorAccess, Any] = {}  # state after the sampler's latest draw, by generator
        self._overrides: dict[GeneratorAccess, Any] = {}  # recorded states of the process's generators
        self._context: dict[str, Any] = {}
        self._iterator: Iterator[Any] | None = None
        self._position = 0
        self._holders = stateful(sampler)
        self._snapshots = _SnapshotLog()
        self._cut: dict[str, Any] | None = self._script.get("cut")

    def start(self) -> None:
        """Call `iter(sampler)`.

        torch does this at once for a batch sampler, and with the first item for a sampler.
        """
        self._context = self._restore_context() if self._script else self._read_context()
        self._install(_ITER)
        self._iterator = self._observe(_ITER, lambda: iter(self._sampler))
        if is_stateful(self._iterator):
            self._snapshots.add(0, [], self._take_snapshot())

    def close(self) -> None:
        """Drop the sampler's iterator, but not the record.

        This ends a generator that the sampler keeps.
        """
        if self._iterator is not None and not is_stateful(self._iterator):
            self._iterator = iter(())

    def pull(self, count: int) -> list[Any]:
        """The next `count` items, fewer only at the end; starts if needed."""
        if self._iterator is None:
            self.start()
        items: list[Any] = []
        if self._cut is not None:
            cut, self._cut = self._cut, None
            items = self._return_to(cut)
        items += self._advance(count - len(items))
        if self._is_stateful:
            self._snapshots.add(self._position, items, self._take_snapshot())
        return items

    def _advance(self, count: int) -> list[Any]:
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

    def _return_to(self, cut: dict[str, Any]) -> list[Any]:
        """Repeat the items before `cut`.

        They differ if the sampler cannot repeat them.
        """
        at, digest = cut["at"], cut["digest"]
        items = self._advance(at) if digest is not None else []
        if digest is None or len(items) < at or _digest(items) != digest or (not at and cut["iterator"] is not None):
            self._jump(cut)
            items = (items + [0 if self._convert is None else []] * at)[:at]
        return items

    def _jump(self, cut: dict[str, Any]) -> None:
        """Continue from the states at `cut`, without the items before it."""
        self._load(cut["states"])
        self._iterator = self._observe(_ITER, lambda: iter(self._sampler))
        if cut["iterator"] is not None:
            self._iterator.load_state_dict(unpack(cut["iterator"]))  # type: ignore[union-attr]
        for source, state in select_states(self._sources, cut["generators"]).items():
            source.write(state)
        self._position = cut["at"]
        self._snapshots.replays = False

    @property
    def _is_stateful(self) -> bool:
        return bool(self._holders) or is_stateful(self._iterator)

    def _take_snapshot(self) -> dict[str, Any]:
        """The current states of the sampler, its iterator and its own generators."""
        owned = [source for source in self._sources if source.owned]
        return {
            "states": self._read_states(),
            "iterator": pack_or_keep(self._iterator.state_dict()) if is_stateful(self._iterator) else None,  # type: ignore[union-attr]
            "generators": {source.path: source.pack(source.read()) for source in owned},
        }

    def _next(self, count: int) -> list[Any]:
        items = next_items(self._iterator, count)
        return list(items if self._convert is None else map(self._convert, items))

    def record(self, position: int | None = None) -> dict[str, Any]:
        """JSON from which another run gives the items from `position`."""
        if self._iterator is None:
            return self._script
        cut = self._snapshots.at(self._position if position is None else position)
        return {
            **self._context,
            **({"draws": list(self._draws)} if self._draws else {}),
            **({} if cut is None else {"cut": cut}),
        }

    def record_end(self) -> dict[str, Any]:
        """JSON from which the next epoch starts."""
        if self._iterator is not None and self._is_stateful:
            return {**self.record(), "ended": True}
        states = {source.path: source.pack(source.read()) for source in self._sources if source.owned}
        return {"generators": states} if states else {}

    def _read_context(self) -> dict[str, Any]:
        context: dict[str, Any] = {}
        epochs = {path: holder.epoch for path, holder in _with_epoch(self._sampler)}
        if epochs:
            context["epochs"] = epochs
        states = self._read_states()
        if states:
            context["states"] = states
        return context

    def _read_states(self) -> dict[str, Any]:
        return {path: pack_or_keep(holder.state_dict()) for path, holder in self._holders}

    def _load(self, states: dict[str, Any]) -> None:
        for path, holder in self._holders:
            if path in states:
                holder.load_state_dict(unpack(states[path]))

    def _restore_context(self) -> dict[str, Any]:
        epochs = self._script.get("epochs", {})
        for path, holder in _with_epoch(self._sampler):
            if path in epochs:
                holder.set_epoch(epochs[path])
        self._load(self._script.get("states", {}))
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
        SAMPLER_STEPS.running += 1
        try:
            with self._overridden_generators():
                before = [source.read() for source in self._sources]
                try:
                    return step()
                finally:
                    self._note(at, before)
        finally:
            SAMPLER_STEPS.running -= 1

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
                SAMPLER_STEPS.draws += 1
                if self._left.get(source) != state:
                    states[source.path] = source.pack(state)
                self._left[source] = after
        if states:
            self._draws.append({"at": at, "states": states})


class _SnapshotLog:
    """Latest snapshots of a stateful sampler, and a digest of its items."""

    def __init__(self) -> None:
        self.replays = True
        """False if the items before a cut are not those that the sampler would repeat."""
        self._hash = hashlib.blake2b(digest_size=8)
        self._snapshots: deque[tuple[int, str, dict[str, Any]]] = deque(maxlen=_SNAPSHOTS)

    def add(self, position: int, items: list[Any], snapshot: dict[str, Any]) -> None:
        """Record the items up to `position`, and the states there."""
        _update(self._hash, items)
        self._snapshots.append((position, self._hash.hexdigest(), snapshot))

    def at(self, position: int) -> dict[str, Any] | None:
        """The latest snapshot at or before `position`, or None.

        Earlier snapshots are dropped.
        """
        while len(self._snapshots) > 1 and self._snapshots[1][0] <= position:
            self._snapshots.popleft()
        if not self._snapshots or self._snapshots[0][0] > position:
            return None
        at, digest, snapshot = self._snapshots[0]
        return {"at": at, "digest": digest if self.replays else None, **snapshot}


def _digest(items: list[Any]) -> str:
    content = hashlib.blake2b(digest_size=8)
    _update(content, items)
    return content.hexdigest()


def _update(content: Any, items: list[Any]) -> None:
    for item in items:
        content.update(item.tobytes() if isinstance(item, np.ndarray) else repr(item).encode())
        content.update(b";")


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
    holders = ((path, holder) for path, holder in nested_samplers(sampler) if callable(declared(holder, "set_epoch")))
    return [(path, holder) for path, holder in holders if isinstance(declared(holder, "epoch"), int)]


def is_stateful(thing: Any) -> bool:
    """True if it has `state_dict` and `load_state_dict`."""
    return callable(declared(thing, "state_dict")) and callable(declared(thing, "load_state_dict"))


def stateful(sampler: Any) -> list[tuple[str, Any]]:
    """The outermost samplers that have a `state_dict` of their own.

    A sampler's state covers the samplers inside it.
    """
    samplers: list[tuple[str, Any]] = []
    for path, holder in nested_samplers(sampler):
        outermost = not any(path.startswith(f"{outer}.") for outer, _ in samplers)
        if outermost and is_stateful(holder):
            samplers.append((path, holder))
    return samplers


_ENTRIES: dict[str, type] = {
    "epochs": dict, "states": dict, "draws": list, "cut": dict, "ended": bool, "generators": dict
}  # fmt: skip


_CUT: dict[str, tuple[type, ...]] = {
    "at": (int,), "digest": (str, type(None)), "states": (dict,), "generators": (dict,),
    "iterator": (object,),
}  # fmt: skip


def _check_script(script: dict[str, Any]) -> dict[str, Any]:
    unknown = script.keys() - _ENTRIES.keys()
    if unknown:
        raise StateError(f"the saved order belongs to another kind of sampler: this one has no entry {min(unknown)!r}")
    for name, kind in _ENTRIES.items():
        if not isinstance(script.get(name, kind()), kind):
            raise StateError(f"a damaged state: {name!r} of a sampler's order is {script[name]!r}; load an earlier one")
    for entry in script.get("draws", []):
        at, states = (entry.get("at"), entry.get("states")) if isinstance(entry, dict) else (None, None)
        if not isinstance(at, int) or not isinstance(states, dict):
            raise StateError(f"a damaged state: {entry!r} is not a record of draws; load an earlier state")
    cut = script.get("cut")
    if cut is not None and not all(name in cut and isinstance(cut[name], kinds) for name, kinds in _CUT.items()):
        raise StateError(f"a damaged state: 'cut' of a sampler's order is {str(cut)[:80]}; load an earlier state")
    return script


def is_seedable(sampler: Any) -> bool:
    """True for torch's `RandomSampler` without a generator.

    It may be inside torch's `BatchSampler`.
    """
    core = sampler.sampler if is_torchs(sampler, BatchSampler) else sampler
    return is_torchs(core, RandomSampler) and core.generator is None


class SeededRun:
    """One epoch of torch's `RandomSampler` without a generator.

    Such a sampler draws one seed from torch's global generator. The same draw is made at the same moment, so that order
    and global state are torch's; only the seed needs to be recorded. It has the methods of `RecordedRun`.
    """

    def __init__(self, sampler: Any, script: dict[str, Any], convert: Callable[[Any], Any] | None = None) -> None:
        self._sampler = sampler
        self._convert = convert
        self._seed: int | None = script.get("seed")
        if script and (script.keys() - {"seed"} or not isinstance(self._seed, int | None)):
            raise StateError(f"the saved order of a {type(sampler).__name__} holds a seed, but this one holds {script}")
        self._items: Iterator[Any] | None = None
        self._order: Indices | None = None

    def start(self) -> None:
        """Do nothing: torch draws with the first item, not in `iter`."""

    def close(self) -> None:
        """Do nothing: torch's sampler keeps no generator."""

    def pull(self, count: int) -> list[Any] | Indices:
        """The next `count` items, fewer only at the end.

        Of a permutation, all that are left.
        """
        if self._items is None and self._order is None:
            self._open()
        if self._order is None:
            items = next_items(self._items, count)
            return list(items if self._convert is None else map(self._convert, items))
        part, self._order = self._order, self._order[:0]
        return part

    def _open(self) -> None:
        if self._seed is None:
            self._seed = draw_seed()
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
            self._order = torch.randperm(n, generator=generator, device="cpu").numpy()[: sampler.num_samples]

    def record(self, _: int | None = None) -> dict[str, Any]:
        return {} if self._seed is None else {"seed": self._seed}

    def record_end(self) -> dict[str, Any]:
        return {}


def _with_generator(sampler: Any, generator: torch.Generator) -> RandomSampler:
    return RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples, generator)
