"""The fork server and its zygotes: inheritance and end."""

from __future__ import annotations

import functools
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from preloaded import Preloaded
from process_cases import GONE_WITHIN_S, Call, Gate, Once, Squares, launcher_of, request, squares, squares_of
from torch.utils.data._utils.collate import collate_int_fn, default_collate_fn_map

from feedline.loader.building.builder import BatchBuilder
from feedline.workers.process import fork_server
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.settings import registered_collates

OpenPool = Callable[..., ProcessPool]


@pytest.fixture
def open_pool(no_debris: Any) -> Iterator[OpenPool]:
    fork_server.start()
    opened: list[Any] = []

    def open_one(builder: Any, workers: int = 1, **more: Any) -> Any:
        opened.append(launcher_of("zygote", builder))
        opened.append(ProcessPool(opened[-1], workers, **more))
        return opened[-1]

    yield open_one
    while opened:
        opened.pop().close()


class Asking(Squares):
    """Sample `i` is what `questions[i]` returns in the worker."""

    def __init__(self, *questions: Callable[[], Any]) -> None:
        super().__init__(len(questions))
        self.questions = questions

    def __getitem__(self, index: int) -> Any:
        return self.questions[index]()


def answer(pool: ProcessPool) -> Any:
    return pool.submit(request(0, 1)).result().batch[0]


def test_there_is_one_and_it_is_single_threaded(open_pool: OpenPool) -> None:
    fork_server.stop()  # after the death of a branch in another test, the next pool has none
    first, second = open_pool(squares()), open_pool(squares())
    for pool in (first, second):
        assert squares_of(pool.submit(request(0)).result().batch)[0] == 0
    workers = [psutil.Process(pool.processes[0].pid) for pool in (first, second)]
    zygotes = [worker.parent() for worker in workers]
    fork_servers = [zygote.parent() for zygote in zygotes if zygote is not None]
    assert zygotes[0] != zygotes[1]
    assert fork_servers[0] == fork_servers[1]
    assert fork_servers[0] is not None  # the fork server, or a branch below it
    assert psutil.Process(fork_server.start().pid) in [fork_servers[0], *fork_servers[0].parents()]
    for process in (*workers, *zygotes, *fork_servers):
        assert process is not None
        assert process.num_threads() == 1


class Modules:
    """A folder with two modules that record their imports in a file. No other folder has modules of these names."""

    def __init__(self, folder: Path) -> None:
        self.record, self.slow, self.slower = folder / "record", f"slow_{folder.name}", f"slower_{folder.name}"
        self.file = folder / f"{self.slow}.py"


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: Any) -> Iterator[Modules]:
    made = Modules(tmp_path)
    for name in (made.slow, made.slower):
        (tmp_path / f"{name}.py").write_text(
            f"with open({str(made.record)!r}, 'a') as record:\n    record.write('{name}\\n')\n"
            "class Squares:\n"
            "    def __len__(self): return 8\n"
            "    def __getitem__(self, index): return index ** 2\n"
        )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield made
    for name in (made.slow, made.slower):
        sys.modules.pop(name, None)


def test_modules_are_imported_once_for_all_loaders(open_pool: OpenPool, modules: Modules) -> None:
    for name in (modules.slow, modules.slower, modules.slow):
        dataset = importlib.import_module(name).Squares()
        for _ in range(2):
            pool = open_pool(BatchBuilder(dataset, list))
            assert pool.submit(request(0)).result().batch == [0, 1, 4, 9]
    twice = [modules.slow, modules.slower] * 2  # here and in a branch
    assert sorted(modules.record.read_text().split()) == sorted(twice)


def test_edited_code_runs_once_it_is_reloaded(open_pool: OpenPool, modules: Modules) -> None:
    """As in the training process, where the old code runs until the reload."""
    module = importlib.import_module(modules.slow)
    file = modules.file

    def batch() -> Any:
        return open_pool(BatchBuilder(module.Squares(), list)).submit(request(0)).result().batch

    assert batch() == [0, 1, 4, 9]
    # Python recognizes old bytecode by the second and the size of the file.
    file.write_text(file.read_text().replace("** 2", "** (3)"))
    assert batch() == [0, 1, 4, 9]
    importlib.reload(module)
    assert batch() == [0, 1, 8, 27]


def test_a_module_that_cannot_be_imported_is_reported(open_pool: OpenPool, modules: Modules) -> None:
    module = importlib.import_module(modules.slow)
    modules.file.write_text("raise ImportError('a shared library is missing')")
    with pytest.raises(ImportError, match="a shared library is missing"):
        open_pool(BatchBuilder(module.Squares(), list)).submit(request(0)).result()
    assert squares_of(open_pool(squares()).submit(request(0)).result().batch)[0] == 0


def test_a_killed_branch_is_replaced(open_pool: OpenPool, modules: Modules) -> None:
    dataset = importlib.import_module(modules.slow).Squares()
    pool = open_pool(BatchBuilder(dataset, list))
    pool.submit(request(0)).result()
    zygote = psutil.Process(pool.processes[0].pid).parent()
    branch = zygote and zygote.parent()
    assert branch is not None
    branch.kill()
    branch.wait(GONE_WITHIN_S)
    assert open_pool(BatchBuilder(dataset, list)).submit(request(0)).result().batch == [0, 1, 4, 9]


def test_nothing_but_what_was_sent_is_inherited(open_pool: OpenPool, tmp_path: Path) -> None:
    with open(tmp_path / "secret", "w") as secret:
        os.set_inheritable(secret.fileno(), True)
        targets = answer(open_pool(BatchBuilder(Asking(_open_files), list)))
        assert not any("secret" in target for target in targets)


def _open_files() -> list[str]:
    return [str(entry.readlink()) for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]


def test_the_surroundings_are_those_of_the_moment(open_pool: OpenPool, tmp_path: Path, monkeypatch: Any) -> None:
    fork_server.start()
    monkeypatch.setenv("FEEDLINE_TEST", "now")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(tmp_path)
    builder = BatchBuilder(Asking(lambda: (dict(os.environ), str(Path.cwd()))), list)
    environment, folder = answer(open_pool(builder))
    assert (environment["FEEDLINE_TEST"], folder) == ("now", str(tmp_path))
    assert "OMP_NUM_THREADS" not in environment


def test_the_dataset_is_unpickled_once(open_pool: OpenPool, tmp_path: Path) -> None:
    class Counted(Squares):
        def __setstate__(self, state: Any) -> None:
            vars(self).update(state)
            with open(tmp_path / "log", "a") as log:
                log.write("x")

    pool = open_pool(BatchBuilder(Counted()), 3)
    pool.resize(4)
    pool.processes[0].kill()
    for number in range(20):
        assert squares_of(pool.submit(request(number)).result().batch)[0] == 4 * number
    assert (tmp_path / "log").read_text() == "x"


def test_what_workers_write_is_passed_on(open_pool: OpenPool, capfd: Any) -> None:
    pool = open_pool(squares({0: _write}))
    pool.submit(request(0)).result()
    pool.close()
    out, err = capfd.readouterr()
    assert out == "printed\n"
    assert err == "to stderr\nnative\n"


def _write() -> None:
    print("printed")
    print("to stderr", file=sys.stderr)
    os.write(2, b"native\n")


def test_a_worker_may_write_much(open_pool: OpenPool, capfd: Any) -> None:
    pool = open_pool(squares({0: Call(_flood)}))
    pool.submit(request(0)).result()
    pool.close()
    assert capfd.readouterr().err == "x" * 1_000_000


def _flood() -> None:
    sys.stderr.write("x" * 1_000_000)


def test_workers_may_start_processes(open_pool: OpenPool) -> None:
    echo = Call(subprocess.check_output, ["/bin/echo", "hi"])
    assert answer(open_pool(BatchBuilder(Asking(echo), list))) == b"hi\n"


def test_a_grandchild_that_keeps_everything_open(open_pool: OpenPool, tmp_path: Path) -> None:
    """The death of its parent is noticed nevertheless."""
    pid_file = tmp_path / "pid"
    pool = open_pool(squares({2: Call(_leave_a_child_behind, str(pid_file))}, action="skip"))
    built = pool.submit(request(0)).result()
    assert squares_of(built.batch) == [0, 1, 3]
    for pid in pid_file.read_text().split():
        os.kill(int(pid), signal.SIGKILL)


def _leave_a_child_behind(pid_file: str) -> None:
    pid = os.fork()
    if pid == 0:
        signal.pause()
    with open(pid_file, "a") as file:
        file.write(f"{pid}\n")
    os._exit(1)


def test_a_process_looks_like_one_of_multiprocessing(open_pool: OpenPool, tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    pool = open_pool(squares({0: Once(tmp_path, gate)}), 1)
    process = pool.processes[0]
    assert process.is_alive()
    assert process.exitcode is None
    assert process.name == "feedline-0"
    pool.submit(request(0))
    assert gate.wait_for() == process.pid
    process.join(0.01)
    assert process.is_alive()
    process.terminate()
    process.join()
    assert not process.is_alive()
    assert process.exitcode == -signal.SIGTERM
    process.kill()
    assert "ended" in repr(process)


def test_closing_while_the_dataset_is_unpickled(open_pool: OpenPool, tmp_path: Path) -> None:
    gate = Gate(tmp_path)

    class Blocking(Squares):
        def __setstate__(self, state: Any) -> None:
            gate()

    launcher = launcher_of("zygote", BatchBuilder(Blocking()))
    pool = ProcessPool(launcher, 2)
    zygote = psutil.Process(gate.wait_for())
    pool.close()
    launcher.close()
    zygote.wait(GONE_WITHIN_S)
    assert [process.pid for process in pool.processes] == [None, None]
    assert [process.is_alive() for process in pool.processes] == [False, False]


def test_stopping_and_starting_again(open_pool: OpenPool) -> None:
    before = fork_server.start()
    assert fork_server.start() is before
    pool = open_pool(squares())
    fork_server.stop()
    assert not before.is_alive()
    assert not any(process.is_alive() for process in pool.processes)
    assert fork_server.start() is not before
    assert squares_of(open_pool(squares()).submit(request(0)).result().batch)[0] == 0


def test_a_script_without_a_main_guard(preloaded: Preloaded, tmp_path: Path) -> None:
    """And with a module in its folder that is named as one of Python's."""
    (tmp_path / "json.py").write_text("raise RuntimeError('not this one')")
    script, log = tmp_path / "train.py", tmp_path / "output.log"
    script.write_text(SCRIPT)
    with open(os.devnull) as nothing, open(log, "w") as output:  # not in the folder of the script
        streams = {"stdin": nothing.fileno(), "stdout": output.fileno(), "stderr": output.fileno()}
        running = preloaded.start(str(script), **streams)
    try:
        assert (running.wait(250), log.read_text()) == (0, "[Sample(value=0), Sample(value=1)]\n")
    finally:
        running.kill()


SCRIPT = """
import sys
sys.path.remove(sys.path[0])  # a script that imports the real json
import json
from dataclasses import dataclass
from feedline.loader.building.builder import BatchBuilder
from feedline.workers.process.pool import ProcessPool
from feedline.workers.process.zygote import ZygoteLauncher
from feedline.core.schedule import BatchRequest

@dataclass
class Sample:
    value: int

class Mine:
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return Sample(index)

launcher = ZygoteLauncher(BatchBuilder(Mine(), lambda samples: samples))
with ProcessPool(launcher, 1) as pool:
    batch = pool.submit(BatchRequest(0, 0, 0, 2, [0, 1], range(2), None)).result().batch
assert all(isinstance(sample, Sample) for sample in batch)
print(batch)
"""


def test_a_registered_collate_function_may_wrap_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(collate_int_fn)  # which copies torch's `__module__`
    def own(batch: Any, *, collate_fn_map: Any = None) -> Any:
        return collate_int_fn(batch, collate_fn_map=collate_fn_map)

    monkeypatch.setitem(default_collate_fn_map, complex, own)
    assert registered_collates() == {complex: own}
