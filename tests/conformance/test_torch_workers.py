"""torch's contract for workers: their information, seeds and lifetime."""

from __future__ import annotations

import contextlib
import gc
import os
import queue
import threading
from collections.abc import Callable
from multiprocessing.context import SpawnContext
from typing import Any

import psutil
import pytest
import torch
import torch_datasets as cases
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch_datasets import (
    Changing,
    Counting,
    CountingStream,
    FirstDraw,
    Gate,
    Gated,
    InitialSeed,
    InnerLoader,
    Meeting,
    ThreadCount,
    WorkerFacts,
)

Make = Callable[..., DataLoader[Any]]
Loader = type[DataLoader[Any]]
Held = Callable[[int], Meeting]
GONE_WITHIN_S = 60.0


def facts(loader_class: Loader, held: Held, **arguments: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """The information of each of two workers, in the order of their ids, and the pids that the iterator shows."""
    loader = loader_class(WorkerFacts(held(2), 2), batch_size=None, num_workers=2, **arguments)
    iterator: Any = iter(loader)
    seen = sorted(iterator, key=lambda fact: fact["id"])
    return seen, [worker.pid for worker in iterator._workers]


def test_workers_know_who_they_are(loader_class: Loader, meeting: Held) -> None:
    seen, pids = facts(loader_class, meeting, worker_init_fn=cases.init_mark)
    assert [fact["id"] for fact in seen] == [0, 1]
    assert {fact["num_workers"] for fact in seen} == {2}
    assert [fact["pid"] for fact in seen] == pids
    assert os.getpid() not in pids
    assert [fact["marked_by_init"] for fact in seen] == [0, 1]
    assert all(fact["same_dataset"] for fact in seen)
    assert get_worker_info() is None


def test_worker_seeds_are_torchs(loader_class: Loader, meeting: Held) -> None:
    """`base_seed + id`, the base drawn from the generator given: as torch documents it."""
    seen, _ = facts(loader_class, meeting, generator=torch.Generator().manual_seed(42))
    base = int(torch.empty((), dtype=torch.int64).random_(generator=torch.Generator().manual_seed(42)).item())
    assert [fact["seed"] for fact in seen] == [fact["initial_seed"] for fact in seen] == [base, base + 1]


def test_the_init_function_may_reseed(loader_class: Loader) -> None:
    loader = loader_class(InitialSeed(4), batch_size=2, num_workers=2, worker_init_fn=cases.init_seed)
    assert torch.cat(list(loader)).tolist() == [12345] * 4


def test_the_init_function_may_be_a_method_or_a_closure(loader_class: Loader) -> None:
    seed = 7
    loader = loader_class(InitialSeed(2), num_workers=1, worker_init_fn=lambda _: torch.manual_seed(seed))
    assert torch.cat(list(loader)).tolist() == [7, 7]


def test_workers_use_one_thread_for_torchs_operations(loader_class: Loader) -> None:
    before = torch.get_num_threads()
    assert torch.cat(list(loader_class(ThreadCount(), num_workers=1))).tolist() == [1, 1]
    assert torch.get_num_threads() == before


def test_augmentation_differs_between_epochs(loader_class: Loader) -> None:
    loader = loader_class(FirstDraw(4), num_workers=1)
    first, second = torch.cat(list(loader)), torch.cat(list(loader))
    assert not torch.equal(first, second)


def test_the_number_of_threads_of_the_parent_does_not_matter(loader_class: Loader) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        loader = loader_class(Counting(3), num_workers=1, multiprocessing_context="fork")
        assert torch.cat(list(loader)).tolist() == [0, 1, 2]
    finally:
        torch.set_num_threads(before)


def test_affinity_can_be_set_in_the_init_function(loader_class: Loader) -> None:
    allowed = sorted(os.sched_getaffinity(0))

    class Affinity(Counting):
        def __getitem__(self, index: int) -> Any:
            return sorted(os.sched_getaffinity(0))

    def pin(worker_id: int) -> None:
        os.sched_setaffinity(0, [allowed[-1]])

    assert list(loader_class(Affinity(2), batch_size=None, num_workers=1, worker_init_fn=pin)) == [[allowed[-1]]] * 2
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_convolutions_work_in_workers_after_the_parent_used_them(loader_class: Loader) -> None:
    weight = torch.ones(1, 1, 2)
    signal = torch.ones(1, 1, 24000)
    torch.nn.functional.conv1d(signal, weight)

    class Convolution(Counting):
        def __getitem__(self, index: int) -> Any:
            return torch.nn.functional.conv1d(signal, weight)

    (batch,) = loader_class(Convolution(1), num_workers=1)
    assert batch.shape == (1, 1, 1, 23999)


def pids(iterator: Any) -> list[int]:
    return [worker.pid for worker in iterator._workers]


class TouchesCuda(Dataset[int]):
    """Numbers that a worker computes on a GPU, if it is asked to."""

    def __init__(self, touches: bool) -> None:
        self.touches = touches

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if self.touches:
            torch.cuda._initialized = False  # type: ignore[attr-defined] # as CUDA's handler does after a fork
            torch.cuda.init()
        return index


def test_workers_of_a_process_that_has_initialized_cuda(loader_class: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    training = os.getpid()
    monkeypatch.setattr(torch.cuda, "_initialized", True)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: os.getpid() != training)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)  # without a GPU, CUDA cannot tell
    assert [batch.tolist() for batch in loader_class(TouchesCuda(False), batch_size=2, num_workers=2)] == [
        [0, 1],
        [2, 3],
    ]
    with pytest.raises(RuntimeError, match="Cannot re-initialize CUDA in forked subprocess"):
        list(loader_class(TouchesCuda(True), batch_size=2, num_workers=2))


def test_the_iterator_shows_its_worker_processes(loader_class: Loader) -> None:
    iterator: Any = iter(loader_class(Counting(40), num_workers=2))
    next(iterator)
    assert len(iterator._workers) == 2
    assert all(worker.is_alive() for worker in iterator._workers)
    assert all(psutil.pid_exists(worker.pid) for worker in iterator._workers)


def assert_gone(workers: list[Any]) -> None:
    """Every worker ends, and so does its process."""
    processes = []
    for worker in workers:
        with contextlib.suppress(psutil.NoSuchProcess):
            processes.append(psutil.Process(worker.pid))
    _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN_S)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    for worker in workers:
        worker.join(GONE_WITHIN_S)
        assert not worker.is_alive()


@pytest.mark.parametrize("leave", ["exhausted", "half way", "untouched"])
def test_workers_end_with_their_iterator(loader_class: Loader, leave: str) -> None:
    iterator: Any = iter(loader_class(Counting(40), batch_size=2, num_workers=2))
    workers = list(iterator._workers)
    for _ in range({"exhausted": 20, "half way": 10, "untouched": 0}[leave]):
        next(iterator)
    if leave == "exhausted":
        assert list(iterator) == []
    del iterator
    gc.collect()
    assert_gone(workers)
    if leave != "untouched":  # a worker that has not begun yet may be killed
        assert [worker.exitcode for worker in workers] == [0, 0]


def test_persistent_workers_live_on_and_end_with_the_loader(loader_class: Loader) -> None:
    loader: Any = loader_class(Counting(8), num_workers=2, persistent_workers=True)
    assert loader._iterator is None
    assert torch.cat(list(loader)).tolist() == list(range(8))
    workers, first = list(loader._iterator._workers), pids(loader._iterator)
    assert torch.cat(list(loader)).tolist() == list(range(8))
    assert pids(loader._iterator) == first
    assert all(worker.is_alive() for worker in workers)
    del loader
    gc.collect()
    assert_gone(workers)


def test_workers_that_do_not_persist_are_new_in_every_epoch(loader_class: Loader) -> None:
    dataset = Changing(2)
    loader = loader_class(dataset, num_workers=1)
    assert torch.cat(list(loader)).tolist() == [0, 1]
    dataset.offset = 10
    assert torch.cat(list(loader)).tolist() == [10, 11]
    assert loader._iterator is None


def test_persistent_workers_keep_the_dataset_as_it_was_when_they_started(loader_class: Loader) -> None:
    dataset = Changing(2)
    loader = loader_class(dataset, num_workers=2, persistent_workers=True)
    assert torch.cat(list(loader)).tolist() == [0, 1]
    dataset.offset = 10
    assert torch.cat(list(loader)).tolist() == [0, 1]


class ThreadContext(SpawnContext):
    """Threads that look like processes: how MONAI's ThreadDataLoader passes them."""

    class Process(threading.Thread):  # type: ignore[assignment]
        @property
        def pid(self) -> int:
            return id(self)

        exitcode = None

        def terminate(self) -> None: ...

    def Queue(self, maxsize: int = 0) -> Any:
        return ThreadQueue()


class ThreadQueue(queue.Queue[Any]):
    def close(self) -> None: ...

    def cancel_join_thread(self) -> None: ...


def test_workers_may_be_threads_of_a_context(loader_class: Loader) -> None:
    loader = loader_class(Counting(6), 2, num_workers=2, multiprocessing_context=ThreadContext())
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


def test_setting_the_iterator_to_none_ends_persistent_workers(loader_class: Loader) -> None:
    """Lightning's reset of a loader, which users also call so that workers see a changed dataset."""
    dataset = Changing(2)
    loader: Any = loader_class(dataset, num_workers=1, persistent_workers=True)
    assert torch.cat(list(loader)).tolist() == [0, 1]
    workers = list(loader._iterator._workers)
    loader._iterator = None
    gc.collect()
    assert_gone(workers)
    dataset.offset = 10
    assert torch.cat(list(loader)).tolist() == [10, 11]


@pytest.mark.parametrize("persistent", [False, True])
def test_breaking_off_leaves_the_next_epoch_whole(loader_class: Loader, persistent: bool) -> None:
    loader = loader_class(Counting(30), batch_size=2, num_workers=2, persistent_workers=persistent)
    for _ in range(3):
        for number, batch in enumerate(loader):
            assert batch.tolist() == [2 * number, 2 * number + 1]
            if number == 4:
                break
    assert torch.cat(list(loader)).tolist() == list(range(30))


@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_two_live_iterators_do_not_disturb_each_other(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Counting(12), batch_size=2, num_workers=num_workers)
    first, second = iter(loader), iter(loader)
    seen: dict[str, list[int]] = {"first": [], "second": []}
    for name, iterator in [("first", first), ("first", first), ("second", second), ("first", first)]:
        seen[name] += next(iterator).tolist()
    for name, iterator in [("second", second), ("first", first)]:
        seen[name] += torch.cat(list(iterator)).tolist()
    assert seen == {"first": list(range(12)), "second": list(range(12))}


def test_persistent_workers_serve_one_iterator(loader_class: Loader) -> None:
    loader = loader_class(Counting(12), batch_size=2, num_workers=2, persistent_workers=True)
    first = iter(loader)
    assert next(first).tolist() == [0, 1]
    second = iter(loader)  # begins again, for both
    seen = [next(iterator).tolist() for iterator in (first, second, first, second, first, second)]
    assert seen == [[number, number + 1] for number in range(0, 12, 2)]
    assert next(first, None) is next(second, None) is None
    assert [[one.tolist(), other.tolist()] for one, other in zip(loader, loader, strict=True)] == [
        [[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]],
    ]  # fmt: skip
    assert next(first, None) is None


def test_loaders_of_several_start_methods_live_side_by_side(loader_class: Loader) -> None:
    contexts = [None, "fork", "spawn"]
    iterators = [iter(loader_class(Counting(4), num_workers=1, multiprocessing_context=c)) for c in contexts]
    seen = [[int(next(iterator)) for _ in range(4)] for iterator in iterators]
    assert seen == [[0, 1, 2, 3]] * 3


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_may_run_inside_a_dataset(loader_class: Loader, num_workers: int) -> None:
    loader = loader_class(InnerLoader(loader_class), batch_size=4, num_workers=num_workers)
    assert next(iter(loader)).tolist() == [0, 1, 3, 6]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_loops_nest(make_loader: Make, num_workers: int) -> None:
    outer = make_loader(Counting(3), num_workers=num_workers)
    inner = make_loader(Counting(2), num_workers=num_workers)
    assert [(int(a), int(b)) for a in outer for b in inner] == [(a, b) for a in range(3) for b in range(2)]


@pytest.mark.parametrize("prefetch_factor", [1, 2, 5])
def test_prefetching_changes_nothing(make_loader: Make, prefetch_factor: int) -> None:
    loader = make_loader(Counting(20), batch_size=3, num_workers=2, prefetch_factor=prefetch_factor)
    assert torch.cat(list(loader)).tolist() == list(range(20))


def test_in_order_holds_what_came_early(make_loader: Make, gate: Gate) -> None:
    iterator = iter(make_loader(Gated(8, 2, gate), batch_size=None, num_workers=2))
    seen = [next(iterator), next(iterator)]
    gate.open()
    assert [*seen, *iterator] == list(range(8))


def test_out_of_order_a_slow_sample_holds_no_one_up(make_loader: Make, gate: Gate) -> None:
    loader = make_loader(Gated(10, 2, gate), batch_size=None, num_workers=2, in_order=False)
    iterator = iter(loader)
    early = [next(iterator) for _ in range(4)]
    assert 2 not in early
    gate.open()
    assert sorted([*early, *iterator]) == list(range(10))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_out_of_order_without_competition_is_in_order(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Counting(10), batch_size=3, num_workers=num_workers, in_order=False)
    assert torch.cat(list(loader)).tolist() == list(range(10))


@pytest.mark.filterwarnings("ignore:.*same samples:UserWarning")
def test_out_of_order_streams_give_everything(loader_class: Loader) -> None:
    loader = loader_class(CountingStream(10), batch_size=3, num_workers=2, in_order=False)
    assert sorted(torch.cat(list(loader)).tolist()) == sorted([*range(10), *range(10)])


def test_persistent_workers_may_be_left_out_later(loader_class: Loader) -> None:
    """Each epoch without workers draws a base seed, as the first one does."""

    def epochs(loader_class: Loader) -> list[Any]:
        torch.manual_seed(3)
        loader = loader_class(FirstDraw(4), num_workers=1, persistent_workers=True)
        loader.num_workers = 0
        return [[str(batch) for batch in loader] + [torch.rand(()).item()] for _ in range(3)]

    assert epochs(loader_class) == epochs(DataLoader)
