"""Random generators and dataset states of the workers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch.utils.data._utils.worker as torch_worker
from torch.utils.data import IterableDataset, IterDataPipe

from feedline.core.packing import pack_or_keep, unpack
from feedline.core.rng import derive
from feedline.core.rng_globals import global_states, states_after_seeding
from feedline.core.schedule import InitialStates
from feedline.errors import StateError
from feedline.loader.building.captures import is_stateful, split_capture
from feedline.samplers.generator_state import PROCESS, GeneratorAccess, generators_of, select_states, torch_access

_RANKS = "ranks"
"""Key of the workers of several ranks in a merged state, by rank."""


_CACHED_NBYTES = 1 << 16
"""Packed states are cached up to this size: random generators, and not the data of a dataset's state."""


@dataclass(slots=True)
class WorkerStates:
    """The states of the workers of one epoch.

    `count` is the loader's `num_workers`; 0 means the training process, whose generators are not recorded here. Worker
    k of n takes the requests with `turn` modulo n equal to k.
    """

    count: int
    base_seed: int | None = None
    """The seed from which new workers are seeded; None before it is drawn."""
    captures: dict[int, bytes] = field(default_factory=dict)
    """By worker, the capture of its builder after its last delivered batch."""
    starts: dict[int, bytes] = field(default_factory=dict)
    """By worker, the generators at the start of the epoch, where they are not those of a new worker."""
    dataset: Any = None
    """The loaded state of the dataset in the training process."""
    latest: dict[int, bytes] = field(default_factory=dict)
    """By worker, the states to restore before its first batch."""
    replayed: dict[int, bytes | None] = field(default_factory=dict)
    """By partition that must be opened at its mark, the generators at the start of the epoch."""
    former: int = 0
    """The number of workers that `latest` is from."""

    @property
    def is_new(self) -> bool:
        """True if nothing but the base seed is recorded."""
        return not (self.captures or self.starts or self.latest or self.replayed) and self.dataset is None

    @property
    def has_drawn(self) -> bool:
        """True if a worker has drawn from its random generators."""
        base_seed = self.base_seed
        return base_seed is None or any(
            pack_states(split_capture(captured)[0], first_states(base_seed, worker))
            for worker, captured in self.captures.items()
        )

    def add(self, turn: int, captured: bytes) -> None:
        """Record the capture that came with a delivered batch."""
        self.captures[turn % max(1, self.count)] = captured

    def follow(self, former: WorkerStates) -> None:
        """Continue with the workers of the previous epoch."""
        self.base_seed, self.captures, self.starts = former.base_seed, dict(former.captures), dict(former.captures)
        self.latest, self.former = dict(former.latest), former.former  # of workers that had no batch to build

    def with_initial_states(self, requests: Iterator[Any]) -> Iterator[Any]:
        """The requests, with initial states.

        The first request for each worker, and for each partition, carries the states to restore.
        """
        return self._with_initial_states(requests) if self.latest or self.replayed else requests

    def _with_initial_states(self, requests: Iterator[Any]) -> Iterator[Any]:
        while self.latest or self.replayed:
            request = next(requests, None)
            if request is None:
                return
            states = self._initial_states(request.turn, request.partition)
            yield request if states is None else request._replace(initial_states=states)
        yield from requests

    def _initial_states(self, turn: int, partition: int | None) -> InitialStates | None:
        if partition is None:
            latest = self.latest.pop(turn % max(1, self.count), None)
            return None if latest is None else InitialStates(latest)
        latest = self.latest.pop(turn % max(1, self.former), None)
        if partition not in self.replayed:
            return None if latest is None else InitialStates(latest, latest)
        return InitialStates(latest, self.replayed.pop(partition))

    def pack(self, *, starts: bool) -> dict[str, Any] | None:
        """The states as JSON values, or None.

        `starts` is true if partitions may be replayed.
        """
        if self.base_seed is None and not self.captures:
            return None
        packed: dict[str, Any] = {"count": self.count, "base_seed": self.base_seed}
        captures = {worker: self._pack_one(worker, captured) for worker, captured in sorted(self.captures.items())}
        packed["held"] = {str(worker): state for worker, state in captures.items() if state}
        if starts and self.starts:
            packed["starts"] = {str(worker): self._pack_one(worker, states) for worker, states in self.starts.items()}
        return packed

    def _pack_one(self, worker: int, captured: bytes) -> dict[str, Any]:
        pack = _pack_capture if len(captured) < _CACHED_NBYTES else _pack_capture.__wrapped__
        packed: dict[str, Any] = pack(captured, self.base_seed if self.count else None, worker)
        return packed


# Frameworks take a state at every step: of all workers, only one has moved since the step before.
@lru_cache(maxsize=256)
def _pack_capture(captured: bytes, base_seed: int | None, worker: int) -> dict[str, Any]:
    states, dataset_state = split_capture(captured)
    generators = pack_states(states, None if base_seed is None else first_states(base_seed, worker)) if states else {}
    packed: dict[str, Any] = {"generators": generators} if generators else {}
    return packed if dataset_state is None else {**packed, "dataset": pack_or_keep(dataset_state)}


def pack_workers(loader: Any, workers: WorkerStates, *, over: bool) -> dict[str, Any] | None:
    """The states of a loader's workers as JSON values, or None.

    `over` is true at the end of an epoch.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if loader.num_workers:
        keeps = not over or loader.persistent_workers
        packed = workers.pack(starts=is_stream and not over) if keeps and not loader._fl_repeats else None
        for source in _seed_generators(loader):
            packed = {**(packed or _NO_WORKERS), "count": workers.count, _GENERATOR: source.pack(source.read())}
        return None if packed is None else {**packed, "rank": loader._fl_rank}
    captures = {} if is_stream or not is_stateful(loader.dataset) else {0: of_dataset(loader.dataset.state_dict())}
    has_drawn = is_stream and not over and workers.starts.get(0) != global_states()
    base_seed = None if over or loader._fl_repeats else workers.base_seed
    return replace(workers, base_seed=base_seed, captures=captures).pack(starts=has_drawn)


_GENERATOR = "generator"
"""Key of the state of the loader's `generator`."""


_NO_WORKERS: dict[str, Any] = {"base_seed": None, "held": {}}


def _seed_generators(loader: Any) -> list[GeneratorAccess]:
    """The user's generator, if seeds of workers are drawn from it.

    Empty if the saved order has its state.
    """
    generator, dataset = loader.generator, loader.dataset
    is_drawn_from = generator is not None and loader._fl.seed is None and loader.num_workers
    if not is_drawn_from or isinstance(dataset, IterDataPipe):
        return []
    drawn_from = [] if isinstance(dataset, IterableDataset) else generators_of(loader._index_sampler)
    is_packed = any(source.holder is generator for source in (*PROCESS, *drawn_from))
    return [] if is_packed else [torch_access(_GENERATOR, generator)]


def saved_generator(loader: Any, packed: dict[str, Any] | None) -> Mapping[GeneratorAccess, Any]:
    """The loader's generator with its saved state, if both exist.

    `packed` is the result of `pack_workers()`, of which the part of the same rank counts. `StateError` if the state is
    damaged.
    """
    own = {} if packed is None else _by_rank(packed).get(str(loader._fl_rank), {})
    sources = _seed_generators(loader) if _GENERATOR in own else []
    return select_states(sources, {source.path: own[_GENERATOR] for source in sources})


def process_generators() -> dict[str, Any]:
    """The generators of this process as JSON values."""
    return {source.path: source.pack(source.read()) for source in PROCESS}


def check_process(packed: dict[str, Any] | None) -> None:
    """Raise `StateError` for damaged `process_generators()`."""
    select_states(list(PROCESS), packed or {})


def restore_process(packed: dict[str, Any] | None) -> None:
    """Restore `process_generators()` in this process; None leaves the generators unchanged."""
    if packed is None:
        return
    for source, state in select_states(list(PROCESS), packed).items():
        source.write(state)


@lru_cache(maxsize=256)
def first_states(base_seed: int, worker: int) -> bytes:
    """The generators of a new worker, seeded as torch seeds its workers."""
    return states_after_seeding(base_seed + worker, torch_worker._generate_state(base_seed, worker))  # type: ignore[no-untyped-call]


def pack_states(states: bytes, usual: bytes | None) -> dict[str, Any]:
    """`global_states()` as JSON values, without the generators that equal those of `usual`."""
    mine, others = _by_generator(states), _by_generator(usual) if usual is not None else {}
    return {source.path: source.pack(mine[source]) for source in PROCESS if mine[source] != others.get(source)}


def unpack_states(packed: Any, usual: bytes | None) -> bytes:
    """`global_states()` from JSON values; `StateError` if they are damaged.

    Generators that `packed` lacks have the states of `usual`, or else those of this process.
    """
    states = select_states(list(PROCESS), packed)
    rest = _by_generator(usual if usual is not None else global_states())
    by_path = {source.path: value for source, value in {**rest, **states}.items()}
    numpy_state, torch_state = unpack(by_path["numpy"]), by_path["torch"]
    return pickle.dumps((by_path["random"], numpy_state, _as_array(torch_state)), 5)


def _by_generator(states: bytes) -> dict[GeneratorAccess, Any]:
    python, numpy_state, torch_state = pickle.loads(states)
    by_path = {"random": python, "numpy": pack_or_keep(numpy_state), "torch": torch_state.tobytes()}
    return {source: by_path[source.path] for source in PROCESS}


def _as_array(content: bytes) -> Any:
    return np.frombuffer(content, np.uint8).copy()


def merge_workers(parts: Sequence[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The packed workers of all ranks, or None."""
    ranks: dict[str, Any] = {}
    for part in parts:
        if part is not None:
            ranks = {**_by_rank(part), **ranks}
    return next(iter(ranks.values())) if len(ranks) == 1 else {_RANKS: ranks} if ranks else None


def resume_workers(
    packed: dict[str, Any] | None,
    count: int,
    place: int,
    partitions: tuple[int, ...] | None,
    *,
    begun: bool,
    rank: int = 0,
    is_strided: bool = False,
) -> WorkerStates:
    """The states of `count` workers that resume at a saved place.

    With another number of workers, the saved generators do not fit: the workers start from a new seed, derived from
    `place`. So do those of another `rank`, whose random values would otherwise equal those of the rank that saved the
    state. If streams are strided, these values may decide the order, which all ranks share: they stay. Dataset states
    are distributed round-robin. `partitions` is None for map-style datasets. `begun` is false at the start of an epoch.
    """
    if packed is None:
        return WorkerStates(count)
    packed = _of_rank(packed, rank)
    former, base_seed, captures, starts = _read(packed)
    is_own = is_strided or packed.get("rank", rank) == rank
    states = WorkerStates(count, base_seed, former=former)
    if former == count and is_own:
        states.captures, states.starts = dict(captures), starts
    elif base_seed is not None:
        key = (place, count) if is_own else (place, count, rank)
        states.base_seed = derive(base_seed, *key, "workers") >> 1 if begun else None
    if partitions is not None and not is_own:
        states.replayed = dict.fromkeys(partitions) if begun else {}
    elif partitions is not None:
        states.latest = captures if count else {}
        if begun:
            start = {worker: _start(worker, former, count, starts, base_seed) for worker in range(max(1, former))}
            states.replayed = {partition: start[partition % max(1, former)] for partition in partitions}
    elif count == 0:
        states.dataset = next((split_capture(each)[1] for _, each in sorted(captures.items())), None)
    else:
        states.latest = captures if former == count and is_own else _distribute_states(captures, count)
    return states


def _of_rank(packed: dict[str, Any], rank: int) -> dict[str, Any]:
    """The packed workers of a rank, or else of another one."""
    ranks = _by_rank(packed)
    return ranks.get(str(rank)) or ranks[min(ranks)]


def _by_rank(packed: dict[str, Any]) -> dict[str, dict[str, Any]]:
    ranks = packed.get(_RANKS, {str(packed.get("rank", 0)): packed})
    if not isinstance(ranks, dict) or not ranks or not all(isinstance(each, dict) for each in ranks.values()):
        raise StateError(f"the field 'workers' of this state is damaged: {ranks!r} are not the workers of ranks")
    return ranks


def of_dataset(dataset_state: Any) -> bytes:
    """The capture of a dataset's state alone."""
    return pickle.dumps((b"", dataset_state), 5)


def _start(worker: int, former: int, count: int, starts: dict[int, bytes], base_seed: int | None) -> bytes | None:
    if worker in starts or former in (0, count) or base_seed is None:
        return starts.get(worker)
    return first_states(base_seed, worker)


def _distribute_states(captures: dict[int, bytes], count: int) -> dict[int, bytes]:
    """The dataset states of other workers, distributed round-robin."""
    states = [state for _, each in sorted(captures.items()) if (state := split_capture(each)[1]) is not None]
    return {worker: of_dataset(states[worker % len(states)]) for worker in range(count)} if states else {}


def _read(packed: dict[str, Any]) -> tuple[int, int | None, dict[int, bytes], dict[int, bytes]]:
    try:
        former, base_seed = packed["count"], packed["base_seed"]
        captures = {
            int(worker): _capture(state, former, base_seed, int(worker)) for worker, state in packed["held"].items()
        }
        starts = {
            int(worker): _capture(state, former, base_seed, int(worker))
            for worker, state in packed.get("starts", {}).items()
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise StateError(f"the field 'workers' of this state is damaged: {error!r}") from error
    if not isinstance(former, int) or not isinstance(base_seed, int | None):
        raise StateError(f"the field 'workers' of this state is damaged: {former!r} workers, base seed {base_seed!r}")
    return former, base_seed, captures, starts


def _capture(state: dict[str, Any], former: int, base_seed: int | None, worker: int) -> bytes:
    dataset_state = unpack(state["dataset"]) if "dataset" in state else None
    if former == 0 and "generators" not in state:
        return of_dataset(dataset_state)
    usual = first_states(base_seed, worker) if former and base_seed is not None else None
    states = unpack_states(state.get("generators", {}), usual)
    return states if dataset_state is None else pickle.dumps((states, dataset_state), 5)
