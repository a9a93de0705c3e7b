"""Everything that a script has set, opened, registered or shared reaches its workers, as it reaches torch's."""

from __future__ import annotations

import ctypes
import decimal
import importlib
import logging
import multiprocessing
import os
import platform
import resource
import signal
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image, ImageFile
from preloaded import Preloaded
from process_cases import default_start_method
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset

import feedline as fl
from feedline.errors import NotPicklableError
from feedline.images import accelerate_pillow, pillow_obstacle
from feedline.workers.process import environment, fork_server, worker_main

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")

LOADERS = [TorchDataLoader, fl.DataLoader]
METHODS = ["fork", "forkserver"]


@pytest.fixture(params=["torch", "feedline", "feedline, fork server"])
def load(request: Any) -> Callable[..., list[Any]]:
    """Lists the batches of a loader with two workers: torch's, ours by fork, and ours from the fork server."""
    resource_tracker.ensure_running()
    method = "forkserver" if "server" in request.param else "fork"
    if method == "forkserver":
        fork_server.start()
    loader_class: Any = TorchDataLoader if request.param == "torch" else fl.DataLoader

    def run(dataset: Any, **arguments: Any) -> list[Any]:
        with default_start_method(method):
            return list(loader_class(dataset, **{"num_workers": 2, "batch_size": 2, "collate_fn": list, **arguments}))

    return run


@pytest.fixture(params=["torch", "feedline"])
def fork_load(request: Any) -> Callable[..., list[Any]]:
    """The same by fork only, for things that can only be inherited."""
    loader_class: Any = TorchDataLoader if request.param == "torch" else fl.DataLoader

    def run(dataset: Any, **arguments: Any) -> list[Any]:
        return list(loader_class(dataset, **{"num_workers": 2, "batch_size": 2, "collate_fn": list, **arguments}))

    return run


class Asking(Dataset[Any]):
    """Four samples, each of which is what a function returns in the worker."""

    def __init__(self, question: Callable[[], Any]) -> None:
        self.question = question

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return self.question()


def only(batches: list[list[Any]]) -> Any:
    """The answer that all workers give."""
    answers = [answer for batch in batches for answer in batch]
    assert len(answers) == 4
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def library_settings() -> tuple[Any, ...]:
    return (
        np.geterr()["divide"],
        sys.getrecursionlimit(),
        decimal.getcontext().prec,
        logging.getLogger("feedline.tests").level,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        ImageFile.LOAD_TRUNCATED_IMAGES,
    )


def test_settings_of_libraries(load: Callable[..., list[Any]], monkeypatch: Any) -> None:
    limit = sys.getrecursionlimit()
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    monkeypatch.setattr(logging.getLogger("feedline.tests"), "level", 5)
    try:
        sys.setrecursionlimit(3456)
        torch._C._set_deterministic_algorithms(True)  # torch's function imports its compiler first, for seconds
        with np.errstate(divide="raise"), decimal.localcontext() as context, torch.no_grad():
            context.prec = 7
            assert only(load(Asking(library_settings))) == ("raise", 3456, 7, 5, True, False, True)
    finally:
        torch._C._set_deterministic_algorithms(False)
        sys.setrecursionlimit(limit)


def test_unchanged_settings_import_nothing(preloaded: Preloaded, tmp_path: Path) -> None:
    """torch imports its compiler for `use_deterministic_algorithms`, and every clean worker would wait for it."""
    script = (
        "import sys; from feedline.workers.process import zygote_main, zygote; "
        "captured = zygote.LibrarySettings.capture(); before = set(sys.modules); captured.apply(); "
        "print(sorted(set(sys.modules) - before), 'torch._dynamo' in before)"
    )
    assert preloaded.run_code(script, tmp_path) == (0, "[] False\n")


@pytest.mark.parametrize("limit", [None, 7])
def test_the_length_of_tracebacks(fork_load: Callable[..., list[Any]], monkeypatch: Any, limit: int | None) -> None:
    if limit is not None:
        monkeypatch.setattr(sys, "tracebacklimit", limit, raising=False)
    assert only(fork_load(Asking(lambda: getattr(sys, "tracebacklimit", None)))) == limit


def test_seeding_a_worker_formats_no_stack_of_the_training_process(monkeypatch: Any) -> None:
    stacks: list[int] = []
    manual_seed = torch.manual_seed

    def watched(seed: int) -> Any:
        stacks.append(len(traceback.format_stack()))
        return manual_seed(seed)

    monkeypatch.setattr(torch, "manual_seed", watched)
    with fl.DataLoader(Asking(lambda: stacks), 2, num_workers=2, collate_fn=list) as loader:
        assert only(list(loader)) == [0]


def test_settings_and_modules_of_the_project(fork_load: Callable[..., list[Any]], monkeypatch: Any) -> None:
    """A module that was made at run time, and changed between two epochs."""
    config: Any = types.ModuleType("feedline_tests_config")
    exec("SIZE = 32\ndef size():\n    return SIZE", config.__dict__)
    monkeypatch.setitem(sys.modules, "feedline_tests_config", config)
    assert only(fork_load(Asking(config.size))) == 32
    config.SIZE = 64
    assert only(fork_load(Asking(config.size))) == 64


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("loader_class", LOADERS)
def test_changes_since_the_last_epoch(loader_class: Any, persistent: bool) -> None:
    values = [1]
    loader = loader_class(Asking(lambda: values[0]), 2, num_workers=2, collate_fn=list, persistent_workers=persistent)
    assert only(list(loader)) == 1
    values[0] = 2
    assert only(list(loader)) == (1 if persistent else 2)
    if isinstance(loader, fl.DataLoader):
        loader.close()


class Surroundings(Dataset[Any]):
    """Settings of the worker's process."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, _: int) -> list[Any]:
        return [
            os.environ.get("FEEDLINE_TESTS"), str(Path.cwd()), str(torch.get_default_dtype()), np.geterr()["divide"],
            logging.getLogger("feedline_tests").level, ImageFile.LOAD_TRUNCATED_IMAGES,
        ]  # fmt: skip


def test_fresh_workers_get_the_settings_of_their_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with default_start_method("spawn"), fl.DataLoader(Surroundings(), None, num_workers=1) as loader:
        assert list(loader) == [Surroundings()[0]]
        monkeypatch.setenv("FEEDLINE_TESTS", "new")
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        logger, former = logging.getLogger("feedline_tests"), np.seterr(divide="raise")
        logger.setLevel(logging.ERROR)
        torch.set_default_dtype(torch.float64)
        try:
            assert list(loader) == [Surroundings()[0]]
        finally:
            torch.set_default_dtype(torch.float32)
            logger.setLevel(logging.NOTSET)
            np.seterr(**former)


class Cached(Dataset[Any]):
    """The forum's cache: the first epoch fills an `mp.Array`, later ones read it."""

    def __init__(self) -> None:
        self.shared = multiprocessing.Array(ctypes.c_float, 8)
        self.rows = torch.from_numpy(np.ctypeslib.as_array(self.shared.get_obj()))
        self.filled = False

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if not self.filled:
            self.rows[index] = index + 1
        return self.rows[index].item()


def test_a_cache_that_workers_fill(fork_load: Callable[..., list[Any]]) -> None:
    dataset = Cached()
    fork_load(dataset)
    dataset.filled = True
    assert fork_load(dataset) == [[1, 2], [3, 4], [5, 6], [7, 8]]


class Noting(Dataset[Any]):
    def __init__(self, seen: Any) -> None:
        self.seen = seen

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        self.seen[index] = index * index
        return index


def test_a_dict_of_a_manager(load: Callable[..., list[Any]]) -> None:
    with multiprocessing.Manager() as manager:
        seen = manager.dict()
        assert load(Noting(seen)) == [[0, 1], [2, 3]]
        assert dict(seen) == {0: 0, 1: 1, 2: 4, 3: 9}


class Block(Dataset[Any]):
    def __init__(self, name: str) -> None:
        self.name = name

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        block = shared_memory.SharedMemory(self.name)
        value = block.buf[index]
        block.close()
        return value


def test_shared_memory_stays_when_workers_end(load: Callable[..., list[Any]]) -> None:
    block = shared_memory.SharedMemory(create=True, size=16)
    try:
        block.buf[:4] = b"abcd"
        assert load(Block(block.name)) == [[97, 98], [99, 100]]
        again = shared_memory.SharedMemory(block.name)  # FileNotFoundError if a worker's tracker has removed it
        again.close()
    finally:
        block.close()
        block.unlink()


class Text(Dataset[Any]):
    def __init__(self, path: Path) -> None:
        self.file = path.open()

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> str:
        self.file.seek(3 * index)
        return self.file.read(2)


def test_an_open_text_file(fork_load: Callable[..., list[Any]], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("aa bb cc dd")
    dataset = Text(tmp_path / "text")
    try:
        assert fork_load(dataset, num_workers=1) == [["aa", "bb"], ["cc", "dd"]]
    finally:
        dataset.file.close()


def test_an_open_text_file_is_never_pickled(tmp_path: Path) -> None:
    fork_server.start()
    (tmp_path / "text").write_text("aa bb cc dd")
    dataset = Text(tmp_path / "text")
    with default_start_method("spawn"), pytest.raises(TypeError, match="TextIOWrapper") as caught:
        list(fl.DataLoader(dataset, num_workers=1))
    dataset.file.close()
    assert any(r"dataset.file" in note or ".file (type" in note for note in caught.value.__notes__)
    assert not isinstance(caught.value, NotPicklableError)


class Ranks(IterableDataset[Any]):
    """Shards by the process group, as WebDataset's `split_by_node` does."""

    def __iter__(self) -> Iterator[int]:
        rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        return iter(range(rank, 8, size))


def test_the_process_group(fork_load: Callable[..., list[Any]], tmp_path: Path) -> None:
    # Registers the backend.
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", rank=1, world_size=2, store=fake.FakeStore())
    try:
        assert fork_load(Ranks(), num_workers=1, batch_size=4) == [[1, 3, 5, 7]]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("loader_class", LOADERS)
def test_children_that_the_process_ignores(loader_class: Any, caplog: Any) -> None:
    former = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        for _ in range(2):
            assert only(list(loader_class(Asking(lambda: 1), 2, num_workers=2, collate_fn=list))) == 1
    finally:
        signal.signal(signal.SIGCHLD, former)
    assert not caplog.records


def test_an_embedded_interpreter_without_an_executable(monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "executable", None)
    assert only(list(fl.DataLoader(Asking(lambda: 1), 2, num_workers=2, collate_fn=list))) == 1


def test_a_thread_of_an_executor_forks_workers_that_end_quietly(capfd: pytest.CaptureFixture[str]) -> None:
    with ThreadPoolExecutor(1) as executor:
        loader = fl.DataLoader(Asking(lambda: 1), 2, num_workers=2, collate_fn=list)
        assert only(executor.submit(list, loader).result()) == 1
        executor.submit(loader.close).result()
    assert capfd.readouterr().err == ""


def test_handlers_of_signals(fork_load: Callable[..., list[Any]]) -> None:
    former = signal.signal(signal.SIGUSR1, _on_signal)
    try:
        assert only(fork_load(Asking(lambda: signal.getsignal(signal.SIGUSR1) is _on_signal)))
    finally:
        signal.signal(signal.SIGUSR1, former)


def _on_signal(*_: object) -> None:
    raise AssertionError("it is never sent")


class Subclass(torch.Tensor):
    pass


class Subclassed(Dataset[Any]):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Any:
        sample: Any = torch.full((10_000,), float(index)).as_subclass(Subclass)
        sample.origin = str(index)
        return sample


def test_tensor_subclasses_come_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ((first, second),) = list(fl.DataLoader(Subclassed(), 2, num_workers=1, collate_fn=list))
    assert (type(first), first.origin, second.origin, second[0].item()) == (Subclass, "0", "1", 1)


def test_a_process_for_a_gpu(preloaded: Preloaded, tmp_path: Path) -> None:
    """Dataset and collate function are in the script, which multiprocessing calls `__mp_main__` in its children."""
    script, log = tmp_path / "train.py", tmp_path / "output.log"
    script.write_text(SPAWNING)
    assert preloaded.run(script, log, 250) == 0, log.read_text()
    assert log.read_text() == "[1, 5, 9, 13]\n"


SPAWNING = """
import torch.multiprocessing
import feedline

class Numbers:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return index

def add(samples):
    return sum(samples)

def train(rank):
    print(list(feedline.DataLoader(Numbers(), 2, num_workers=1, collate_fn=add)), flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


@pytest.mark.parametrize("accelerate", [True, False])
def test_what_all_workers_need_is_imported_once(accelerate: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """In the training process, which is not accelerated by it."""
    (tmp_path / "accelerations.py").write_text(
        "import os\nIMPORTED_BY, ACCELERATED = os.getpid(), []\ndef accelerate(): ACCELERATED.append(os.getpid())\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "accelerations", raising=False)
    monkeypatch.setattr(worker_main, "_ACCELERATIONS", {"decimal": ("accelerations", "accelerate")})

    def ask() -> tuple[int, int] | None:
        module: Any = sys.modules.get("accelerations")
        return module and (module.IMPORTED_BY, len(module.ACCELERATED))

    for _ in range(2):
        batches = list(fl.DataLoader(Asking(ask), 2, num_workers=2, collate_fn=list, accelerate=accelerate))
        assert only(batches) == ((os.getpid(), 1) if accelerate else None)
    if accelerate:
        assert sys.modules["accelerations"].ACCELERATED == []


@pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))
@pytest.mark.parametrize("accelerate", [True, False])
def test_accelerated_pillow_of_the_training_process(accelerate: bool) -> None:
    """`accelerate=False` gives the workers Pillow as it is, also if the script has accelerated its own process."""

    def is_accelerated() -> bool:
        return Image.Image.resize.__module__ != "PIL.Image" or hasattr(Image.Image.resize, "__wrapped__")

    with accelerate_pillow(), accelerate_pillow():
        loader = fl.DataLoader(Asking(is_accelerated), 2, num_workers=2, collate_fn=list, accelerate=accelerate)
        assert only(list(loader)) is accelerate
        assert is_accelerated()


class PagesOfSamples:
    """Sample: number of pages that the process has touched for the first time while it made and freed 32 MiB."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        parts = [b"x" * (8 << 20) for _ in range(4)]  # not of NumPy, which asks for huge pages
        del parts
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have other parameters")
def test_workers_reuse_freed_memory() -> None:
    touched = list(fl.DataLoader(PagesOfSamples(), None, num_workers=1, worker_method="process"))[-1]
    assert int(touched) < 400


@pytest.mark.parametrize("variable", ["MALLOC_TRIM_THRESHOLD_", None])
def test_parameters_of_malloc_are_left_to_the_user(monkeypatch: Any, variable: str | None) -> None:
    monkeypatch.setattr(environment, "is_allocator_set", environment.is_allocator_set.__wrapped__)
    set_parameters: list[tuple[int, int]] = []
    monkeypatch.setattr(environment, "_mallopt", lambda *parameter: set_parameters.append(parameter))
    if variable:
        monkeypatch.setenv(variable, "131072")
    environment.keep_freed_memory()
    assert bool(set_parameters) is (variable is None)
