"""The end of an epoch of worker processes: they end while the last steps run, and nothing else changes."""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from diagonals import at_night, diagonal
from process_cases import Faulty, Squares
from rounds import rounds
from torch.utils.data import IterableDataset, get_worker_info

import feedline as fl
from feedline.core.proc import ProcessStat, stat_of
from feedline.loader.monitoring import machine
from feedline.loader.monitoring.machine import MachineFigures, SystemFigures
from feedline.workers.process.pool import ProcessPool

ENDS_WITHIN_S = 60.0

END_WHEN_ANSWERED = ProcessPool.end_when_answered

PROCESSES: dict[str, Any] = {"num_workers": 2, "worker_method": "process"}


def join(workers: list[Any]) -> None:
    for worker in workers:
        worker.join(ENDS_WITHIN_S)
        assert not worker.is_alive()


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"seed": 0, "shuffle": True},
        {"seed": 0, "in_order": False},
        {"seed": 0, "device": fl.Delivery("cpu", dtype=torch.float64)},
        {"num_workers": 8},
    ],
)
def test_workers_end_before_the_loop_asks_for_more(
    arguments: dict[str, Any], no_debris: Any, caplog: pytest.LogCaptureFixture
) -> None:
    loader = fl.DataLoader(Squares(20), 4, **{**PROCESSES, **arguments})
    for _ in range(2):
        batches = iter(loader)
        for _ in range(len(loader)):
            next(batches)
        workers = batches._workers
        join(workers)
        assert loader.stats().workers == len(batches._workers) == loader.num_workers
        with pytest.raises(StopIteration):
            next(batches)
        assert {worker.exitcode for worker in workers} == {0}
        assert loader.stats().workers == 0
    assert not caplog.records


def test_persistent_workers_stay(no_debris: Any) -> None:
    with fl.DataLoader(Squares(20), 4, persistent_workers=True, **PROCESSES) as loader:
        pids = set[tuple[int, ...]]()
        for _ in range(2):
            batches = iter(loader)
            assert len(list(batches)) == 5
            assert all(worker.is_alive() for worker in batches._workers)
            pids.add(tuple(worker.pid for worker in batches._workers))
        assert len(pids) == 1


class Drawing(Squares):
    """Squares with two random numbers, which the worker draws."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index), random.random(), torch.rand(2)


class Counters(IterableDataset[Any]):
    """Each worker counts to a number of its own, and draws."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        number = 0 if info is None else info.id
        for count in range(9 + 4 * number):
            yield number, count, random.random()


class Late(Squares):
    """Squares, of which the samples `broken` cannot be read."""

    def __init__(self, *broken: int) -> None:
        super().__init__(20)
        self.broken = broken

    def __getitem__(self, index: int) -> Any:
        if index in self.broken:
            raise ValueError(f"sample {index} is broken")
        return super().__getitem__(index)


def history(make: Callable[[], Any], leave_at: int | None) -> list[str]:
    """Batches, errors and states of two epochs; with `leave_at`, the first is left after that batch and resumed."""
    torch.manual_seed(3)
    random.seed(3)
    seen: list[str] = []
    loader = make()
    for epoch in range(2):
        batches, taken = iter(loader), 0
        while True:
            try:
                seen.append(repr(next(batches)))
            except StopIteration:
                break
            except ValueError as error:
                seen.append(str(error).splitlines()[0])
            taken += 1
            state = loader.state_dict(random=True)
            seen.append(repr(state))
            if epoch == 0 and taken == leave_at:
                loader.close()
                loader = make()
                loader.load_state_dict(state)
                batches = iter(loader)
        seen.append(repr(loader.state_dict(random=True)))
    loader.close()
    return seen


CASES: dict[str, Callable[[], Any]] = {
    "seeded": lambda: fl.DataLoader(Drawing(20), 4, shuffle=True, seed=1, **PROCESSES),
    "drawing": lambda: fl.DataLoader(Drawing(20), 4, shuffle=True, **PROCESSES),
    "stream": lambda: fl.DataLoader(Counters(), 4, **PROCESSES),
    "last broken": lambda: fl.DataLoader(Late(19), 4, **PROCESSES),
    "both last broken": lambda: fl.DataLoader(Late(12, 19), 4, **PROCESSES),
    "skipping": lambda: fl.DataLoader(Faulty(), 3, on_error="skip", seed=0, **PROCESSES),
}


BOTH = [("drawing", 4), ("stream", 5), ("last broken", 4)]


@pytest.mark.parametrize(
    ("case", "leave_at"),
    # Left before the last batch or after it; at night, those whose workers draw or fail there at both, and never.
    [*diagonal([*CASES], (4, 5)), ("stream", None), *at_night(*BOTH, ("drawing", None), ("last broken", None))],
)
def test_batches_and_states_are_those_of_workers_that_stay(
    case: str, leave_at: int | None, no_debris: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = list[bool]()

    def note(pool: ProcessPool, before: Callable[[], object]) -> bool:
        asked.append(END_WHEN_ANSWERED(pool, before))
        return asked[-1]

    monkeypatch.setattr(ProcessPool, "end_when_answered", note)
    found = history(CASES[case], leave_at)
    assert case.endswith("last broken") or any(asked)
    monkeypatch.setattr(ProcessPool, "end_when_answered", lambda *_: False)
    assert found == history(CASES[case], leave_at)
    assert not [record for record in caplog.records if "worker" in record.message]


def test_the_figures_of_workers_that_have_ended_count_until_the_epoch_ends(
    no_debris: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Counter[int]()
    keep = MachineFigures.keep_workers

    def counted(pid: int) -> ProcessStat | None:
        read[pid] += 1
        return stat_of(pid)

    def begin(figures: MachineFigures, pids: Iterable[int]) -> None:
        read.clear()
        figures._system = SystemFigures()  # as after a second
        keep(figures, pids)

    monkeypatch.setattr(machine, "stat_of", counted)
    monkeypatch.setattr(MachineFigures, "keep_workers", begin)
    with fl.DataLoader(Squares(20), 4, **PROCESSES) as loader:
        for _ in range(2):
            batches = iter(loader)
            next(batches)
            pids = {worker.pid for worker in batches._workers}  # waits for their start
            for _ in range(len(loader) - 1):
                next(batches)
            join(batches._workers)
            assert loader.stats().worker_nbytes > 1 << 20
            with pytest.raises(StopIteration):
                next(batches)
            assert [read[pid] for pid in pids] == [1, 1]
            assert loader._fl_monitor.history.points[-1].worker_nbytes > 1 << 20
        assert loader.stats().worker_growth_nbytes is not None


class Interrupter:
    """Raises KeyboardInterrupt at the `at`-th function of feedline that is called from the end of the workers on.

    Figures are one function: what their modules call among themselves changes nothing of the loop.
    """

    def __init__(self, at: int) -> None:
        self.at, self.count, self.place = at, 0, ""

    def method(self) -> Callable[[ProcessPool, Callable[[], object]], bool]:
        """`end_when_answered`, which begins to count."""

        def end_when_answered(pool: ProcessPool, before: Callable[[], object]) -> bool:
            sys.settrace(self.trace)
            return END_WHEN_ANSWERED(pool, before)

        return end_when_answered

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        caller = frame.f_back.f_code.co_filename if frame.f_back is not None else ""
        if event == "call" and "/feedline/" in frame.f_code.co_filename and "/loader/report/" not in caller:
            self.count += 1
            if self.count == self.at:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return None


def test_interrupts_of_the_last_batch_lose_nothing(no_debris: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    former = sys.gettrace()
    for at in range(1, 1000, rounds(6, 1)):
        interrupter = Interrupter(at)
        monkeypatch.setattr(ProcessPool, "end_when_answered", interrupter.method())
        with fl.DataLoader(Squares(8), 4, num_workers=1, worker_method="process", seed=0) as loader:
            batches = iter(loader)
            seen = list[int]()
            while len(seen) < 2:
                try:
                    seen.append(int(next(batches)[0, 0]))
                except KeyboardInterrupt:
                    continue
                finally:
                    sys.settrace(former)
            assert next(batches, None) is None
            assert seen == [0, 4], interrupter.place
        if not interrupter.place:
            return
