"""`DataLoader`, the replacement of torch's."""

from __future__ import annotations

import inspect
import json
import operator
import os
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

from feedline.core.compiler import leave_to_python
from feedline.core.devices import usable_device
from feedline.core.live import is_live
from feedline.errors import ArgumentError, note_rank
from feedline.loader import frameworks
from feedline.loader.building.captures import is_stateful
from feedline.loader.device import Delivery
from feedline.loader.epochs import pack_epoch, start_epoch
from feedline.loader.error_policy import Action, ErrorPolicy
from feedline.loader.live import check_live
from feedline.loader.loop import Iteration, live_iterations
from feedline.loader.monitoring import diagnosis
from feedline.loader.monitoring.monitor import Monitor
from feedline.loader.monitoring.resources import rank_and_world_size, usable_cpus
from feedline.loader.own_arguments import OwnArgument, OwnArguments, check_seed
from feedline.loader.plan import Plan, check_ranks, partitions_of, plan_of
from feedline.loader.pools import LoaderPools, PersistentIteration, check_method, runs_elsewhere
from feedline.loader.progress import Progress
from feedline.loader.ranks.contract import Contract, RankPolicy, Ranks
from feedline.loader.read_plan import ReadingPlan, read_plan
from feedline.loader.rebuilding import rebuild_batch
from feedline.loader.report import Advice, Stats, Verdict
from feedline.loader.report.trace import chrome_trace
from feedline.loader.state import check_version, part_of, resume_quarantine
from feedline.loader.worker_states import check_process, saved_generator
from feedline.samplers import Shuffled
from feedline.workers.base import Recovery

T_co = TypeVar("T_co", covariant=True)


_RUNNING = ("_fl_pools", "_fl_progress", "_fl_plan", "_fl_live", "_fl_monitor", "_fl_contract", "_fl_step")


_TORCH_ARGUMENTS = frozenset(inspect.signature(TorchDataLoader.__init__).parameters)


T = TypeVar("T")


class RunningPart(Generic[T]):
    """Part of a loader that its first use makes.

    Most of the time of a new loader would go to parts of an iteration.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make

    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, _: type) -> T:
        # One step: all threads get the same part. It hides this descriptor from then on.
        part: T = vars(loader).setdefault(self._name, self._make())
        return part


class DataLoader(TorchDataLoader[T_co]):
    """torch's DataLoader with exact resume and worker restarts.

    Every argument of `torch.utils.data.DataLoader` keeps its meaning, checks and results; `num_workers` may also be
    "auto". Each iteration is the next epoch. feedline's own arguments:

    - `seed`: with a number, order and augmentation are functions of (seed, epoch, position), for any workers. With
      None, torch's generators decide, and batches equal torch's for the same random state. That includes random values
      drawn in samples, except with `num_workers="auto"` and in thread workers.
    - `worker_method`: "process", "thread", a name given to `feedline.workers.register_pool`, or "auto": threads for
      thread-safe datasets and for those read in whole batches, else processes.
    - `distributed`: None for one rank; "auto" reads rank and world size from torch.distributed or the environment;
      (rank, world_size); or a `RankPolicy`. Each rank gets its rows of every global batch of `batch_size * world_size`
      samples. At the start of each epoch the ranks compare their data, order and position.
    - `on_error`: "raise", "skip", "replace" or an `ErrorPolicy`, for samples that raise.
    - `device`: the device of delivered batches, or a `Delivery` with steps there; copies run on a side stream while
      the loop computes.
    - `recovery`: limit of worker restarts per epoch, and time until a stall is reported.
    - `accelerate`: read known datasets and transforms of other libraries, and in worker processes Pillow's JPEGs, by
      feedline's kernels, with the same results; False runs all of them unchanged. See `plan()`.
    - `log`: file to which a line of statistics is appended every ten seconds and at the end of each epoch; by default
      that of the environment variable FEEDLINE_LOG. `{rank}` in it is replaced by the rank.

    `snapshot_every_n_steps` is accepted for code written for torchdata's StatefulDataLoader, and has no effect: states
    are exact at every step.
    """

    # feedline reads no other attributes of its own: a subclass may have its own ones, such as `device` or `_rank`.
    # Defaults are for subclasses that call neither this constructor nor this class's `__iter__`.
    _fl: OwnArguments = OwnArguments()
    seed = OwnArgument[int | None]()
    worker_method = OwnArgument[str]()
    distributed = OwnArgument[Ranks | RankPolicy]()
    on_error = OwnArgument[Action | ErrorPolicy]()
    device = OwnArgument[str | torch.device | Delivery | None]()
    recovery = OwnArgument[Recovery]()
    accelerate = OwnArgument[bool]()
    log = OwnArgument[str | os.PathLike[str] | None]()
    snapshot_every_n_steps: int | None = 1
    _fl_rank: int = 0
    _fl_world_size: int = 1
    _iterator = PersistentIteration()
    _fl_pools = RunningPart(LoaderPools)
    _fl_progress: Progress | None = None
    _fl_plan: Plan | None = None
    _fl_live = RunningPart(weakref.WeakSet[Iteration])
    _fl_monitor = RunningPart(Monitor)
    _fl_ranks: RankPolicy = RankPolicy(None)
    _fl_policy: ErrorPolicy
    _fl_adapts: bool = False
    _fl_resume: dict[str, Any] | None = None
    _fl_epoch: int = 0
    _fl_contract = RunningPart(Contract)
    _fl_step = RunningPart(frameworks.StepState)

    def __init__(
        self,
        dataset: Dataset[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        snapshot_every_n_steps: int | None = 1,
        seed: int | None = None,
        worker_method: str = "auto",
        distributed: Ranks | RankPolicy = None,
        on_error: Action | ErrorPolicy = "raise",
        device: str | torch.device | Delivery | None = None,
        recovery: Recovery | None = None,
        accelerate: bool = True,
        log: str | os.PathLike[str] | None = None,
    ) -> None:
        own: dict[str, Any] = {"seed": seed, "worker_method": worker_method, "on_error": on_error, "recovery": recovery}
        if batch_sampler is not None:
            own = frameworks.inherit_arguments(batch_sampler, own)
        seed = own["seed"] = check_seed(own["seed"])
        own["recovery"] = own["recovery"] or frameworks.OWN["recovery"]
        own |= {"distributed": distributed, "device": device, "accelerate": accelerate, "log": log}
        ranks = RankPolicy.of(distributed)
        rank, world_size = rank_and_world_size(ranks.ranks)
        attributes = vars(self)  # directly: each assignment to the loader passes a function
        attributes |= {**own, "snapshot_every_n_steps": snapshot_every_n_steps, **attributes}
        attributes.update(
            _fl=OwnArguments(**own), _fl_policy=ErrorPolicy.of(own["on_error"]), _fl_ranks=ranks, _fl_rank=rank,
            _fl_world_size=world_size,
        )  # fmt: skip
        if num_workers == "auto":
            self._fl_adapts, num_workers = True, usable_cpus()
        count: int = _plain_integer(num_workers)
        prefetch_factor = _plain_integer(prefetch_factor)
        if shuffle and seed is None and self._fl_world_size > 1:
            raise ArgumentError(
                "distributed= with shuffle=True needs seed=...: without it every rank draws its own order"
            )
        if seed is not None and shuffle and sampler is None and batch_sampler is None and _has_length(dataset):
            sampler, shuffle = Shuffled(len(dataset), seed), None  # type: ignore[arg-type]
        newer = {"in_order": in_order} if "in_order" in _TORCH_ARGUMENTS else {}
        super().__init__(
            dataset, batch_size, shuffle, sampler, batch_sampler, count, collate_fn, pin_memory, drop_last,
            timeout, worker_init_fn, multiprocessing_context, generator,
            prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device, **newer,
        )  # fmt: skip
        if batch_sampler is None:
            frameworks.note_arguments(self)
        self._fl_has_own_order = (sampler is None and batch_sampler is None) or type(self.sampler) is Shuffled
        self.in_order = in_order
        check_method(self)
        check_live(self)
        try:
            policy = self._fl_ranks
            check_ranks(
                dataset, self._fl_rank, self._fl_world_size,
                allows_uneven=policy.uneven == "allow", reads_all=policy.reads_all,
            )  # fmt: skip
        except Exception as error:  # a source may have to be asked for its partitions
            note_rank(error, self._fl_rank, self._fl_world_size)
            raise
        if device is not None:
            usable_device(Delivery.of(device).device)
        if count:
            self._fl_pools.prepare(self)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over the next epoch, or the rest of a loaded one."""
        frameworks.warn_of_fetching_ahead(sys._getframe(1))
        try:
            iteration: Iterator[Any] = self._get_iterator()
        except Exception as error:
            self._fl_monitor.note_error(error)
            note_rank(error, self._fl_rank, self._fl_world_size)
            raise
        return iteration

    def check_worker_number_rationality(self) -> None:
        """Warn of more workers than CPUs, as torch does.

        There is no warning for pools whose workers have CPUs of their own, such as those of a cluster.
        """
        if not runs_elsewhere(self._fl.worker_method):
            super().check_worker_number_rationality()

    def _get_iterator(self) -> Any:
        """Begin an iteration: torch's hook for subclasses.

        Some subclasses call it themselves.
        """
        if self.num_workers == 0 and self.timeout:  # AssertionError, as in torch
            raise AssertionError(f"timeout={self.timeout} needs num_workers > 0: there is no worker to wait for")
        if self.num_workers and self.prefetch_factor == 0:  # the same
            raise AssertionError("prefetch_factor=0 would let workers wait for ever: give a number above 0, or None")
        return start_epoch(self)

    @property
    def multiprocessing_context(self) -> Any:
        """The user's context for worker processes, or None."""
        frameworks.warn_of_rebuild(self, sys._getframe(1))
        return TorchDataLoader.multiprocessing_context.fget(self)  # type: ignore[attr-defined]

    @multiprocessing_context.setter
    def multiprocessing_context(self, context: Any) -> None:
        TorchDataLoader.multiprocessing_context.fset(self, context)  # type: ignore[attr-defined]

    @property
    def worker_init_fn(self) -> Any:
        """The user's function that each worker calls first, or None."""
        frameworks.warn_of_rebuild(self, sys._getframe(1), by_ray=True)
        return self.__dict__.get("worker_init_fn")

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self.__dict__["worker_init_fn"] = function

    def __len__(self) -> int:
        """Batches per epoch on this rank, counted as in torch.

        For a stream, an estimate from the length that it states, as if all ranks had equally many samples.
        """
        if self._fl_world_size == 1 or self._fl_ranks.reads_all:
            return super().__len__()
        if not isinstance(self.dataset, IterableDataset):
            return self._fl_make_plan().length()
        samples = -(-len(self.dataset) // self._fl_world_size)  # type: ignore[arg-type]
        self._IterableDataset_len_called = samples  # type: ignore[assignment]
        if self.batch_size is None:
            return samples
        return samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Not needed: epochs advance automatically. A loaded state of the same epoch stays loaded. A state of another
        epoch is dropped, but that of a live stream continues in the new epoch. `ArgumentError` if `epoch` is negative.
        """
        epoch = operator.index(epoch)
        if epoch < 0:
            raise ArgumentError(f"epoch must be >= 0; got {epoch}")
        self._fl_epoch = epoch
        if self._fl_resume is not None and self._fl_resume["epoch"] != epoch:
            self._fl_resume = {**self._fl_resume, "epoch": epoch, "step": 0} if is_live(self.dataset) else None

    def state_dict(self, *, random: bool = False) -> dict[str, Any]:
        """The position of the loop, as JSON values.

        Inside the loop, the current batch counts as received. The state is under 1 KiB for map-style datasets. Each
        random generator used by the order adds 3.4 KiB, the state of a Mersenne twister. Without `seed`, so does each
        generator that samples use in a worker.

        With `random`, the state also holds the generators of this process (`random`, NumPy, torch's on the CPU), and
        the iteration after `load_state_dict` starts from them. Without `seed`, they determine the samples of
        `num_workers=0` and the order of later epochs.
        """
        together = frameworks.batches_together(sys._getframe(1))
        if together == 1 or self._fl_resume is not None or self._fl_progress is None or self._fl_plan is None:
            return pack_epoch(self, random=random)
        delivered = self._fl_plan.delivered(self._fl_progress.cursor)
        return self._fl_step.at(self._fl_progress, delivered, together, partial(pack_epoch, self, random=random))

    @property
    def _fl_repeats(self) -> bool:
        """True if a batch depends on its position only."""
        return self._fl.seed is not None and not is_stateful(self.dataset)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue exactly at the position of `state`.

        Worker count, worker method, prefetch, rank, world size and batch size may differ; for another rank or world
        size, the states of a partitioned dataset are merged first. Raises `StateError` if the dataset's length or
        files, the order or the seed differ, if the state holds the partitions of another rank, or if it is damaged.
        """
        check_version(state)
        plan = self._fl_make_plan(state)
        plan.with_workers_of(state, self.num_workers, self._fl_rank)
        plan.check_order(state)
        check_process(part_of(state, "random"))
        saved_generator(self, part_of(state, "workers"))
        resume_quarantine(self._fl_policy, None, state)
        self._fl_resume = plan.as_own_state(state, goes_on=frameworks.counts_epochs(sys._getframe(1)))

    def stats(self) -> Stats:
        """Throughput, waiting time, stage times, memory, restarts and skips of all epochs.

        Sums never restart; `since_epoch` has those of the current epoch. Any thread may call it: it never waits for a
        batch.
        """
        return self._fl_monitor.stats()

    @property
    def delivered(self) -> int:
        """Number of batches of the current epoch that the loop has received.

        Batches before a resume count. For a progress bar: `tqdm(loader, initial=loader.delivered)`.
        """
        if self._fl_resume is not None:
            plan = self._fl_make_plan(self._fl_resume)
            return plan.delivered(plan.unpack(self._fl_resume))
        progress = self._fl_progress
        if progress is None or self._fl_plan is None or progress.is_over:
            return 0
        return self._fl_plan.delivered(progress.cursor)

    def batch_at(
        self, step: int, *, epoch: int | None = None, rank: int | None = None, world_size: int | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Any:  # fmt: skip
        """The batch of any step of any rank, built again here.

        Steps count from 0, at the start of `epoch` (by default the current one, or the next one between two epochs), or
        from the position of `state`. With `seed`, random values equal those of the run. The batch does not count as
        delivered, and stays on the CPU. IndexError if the epoch has no such step. `ArgumentError` for live streams, for
        map-style datasets with a state, and without `state` for samplers without random access.
        """
        if epoch is None:
            epoch = max(0, self._fl_epoch - (self._fl_progress is not None and not self._fl_progress.is_over))
        ranks = self._fl_rank if rank is None else rank, self._fl_world_size if world_size is None else world_size
        return rebuild_batch(self, step, epoch, ranks, state)[1].batch

    def report(self, *, lines: bool = False) -> Verdict:
        """The limit of the current epoch, and advice with predicted gains.

        Until the epoch has ten batches, or as many as the previous epoch, the report is on the previous one. With
        `lines`, samples are read in this process for a second, and the verdict also names the lines of the user's code
        that take the time.
        """
        return diagnosis.verdict_of(self, self._fl_monitor, self._fl_pools, quick=False, lines=lines)

    def tune(self) -> tuple[Advice, ...]:
        """Take advice that changes neither order nor values; return it.

        Sets `num_workers` or `prefetch_factor` for the next iteration, as the report predicts. The number of workers
        stays the same if random values or the order depend on it: for datasets that have a state or may draw random
        numbers without `seed`, and for streams without partitions or without `seed`. After a whole epoch of worker
        processes it is known whether samples draw. Warns if only `seed` is missing.
        """
        return diagnosis.tune(self)

    def report_html(self, path: str | os.PathLike[str], *, lines: bool = False) -> None:
        """Write a page on the run so far: one HTML file.

        It shows the verdict, predictions for other arguments, where the time goes, the figures over time, the latest
        batches, and the slowest ones. `lines` is that of `report`. ArgumentError before the first iteration.
        """
        self._fl_monitor.write_page(path, self.report(lines=lines))

    def plan(self) -> ReadingPlan:
        """Plan of reading the dataset, with reasons; to be printed."""
        return read_plan(self)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the latest batches' stages as a Chrome trace, for Perfetto.

        Each worker is a row, each stage a block. Rows are grouped by rank, so traces of several ranks can be merged.
        """
        batches = [] if self._fl_progress is None else self._fl_progress.totals.recent_batches()
        text = json.dumps(chrome_trace(batches, self._fl_monitor.identity), ensure_ascii=False)
        # Perfetto shows an escape in a name as it is. Lone surrogates cannot be written otherwise.
        Path(path).write_text(text, encoding="utf-8", errors="backslashreplace")

    def close(self) -> None:
        """Cancel requests in flight and stop all workers.

        The loader may be iterated again.
        """
        for iteration in live_iterations(self):
            iteration.close()
        self._iterator = None
        self._fl_pools.close()
        self._fl_monitor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        """Arguments and loaded state, without workers.

        A copy begins with the batches that the next iteration of this loader would give.
        """
        # Not the position within an epoch: torch's copies begin one, and part of an epoch would go unnoticed.
        arguments = {name: value for name, value in vars(self).items() if name not in _RUNNING}
        return {**arguments, "_iterator": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A subclass may give its whole dictionary.
        vars(self).update({name: value for name, value in state.items() if name not in _RUNNING})

    def _fl_make_plan(self, state: Mapping[str, Any] | None = None) -> Plan:
        return plan_of(self, self._fl_rank, self._fl_world_size, self._fl_plan, partitions_of(state))


leave_to_python()


def _plain_integer(value: Any) -> Any:
    """Convert integers of other libraries, which JSON does not have."""
    return value if value is None or type(value) is int else int(value) if isinstance(value, Integral) else value


def _has_length(dataset: Any) -> bool:
    return hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
