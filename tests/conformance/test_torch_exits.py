"""Every end of a training process ends its workers, and exit code and last output give the reason."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from diagonals import at_night
from preloaded import Preloaded

SCRIPT = Path(__file__).with_name("leaving.py")
WITHIN_S = 200.0
GONE_WITHIN_S = 60.0


@dataclass
class Ending:
    """How a process ended."""

    code: int
    batches: int | None
    stderr: str


class Trainer:
    """The process of `leaving.py`, in its own session, in which all processes that it starts stay."""

    def __init__(self, server: Preloaded, errors: Path, *arguments: str) -> None:
        self._errors = errors
        stdin, out = os.pipe(), os.pipe()
        with open(errors, "wb") as log:
            self.process = server.start(str(SCRIPT), *arguments, stdin=stdin[0], stdout=out[1], stderr=log.fileno())
        os.close(stdin[0])
        os.close(out[1])
        self._stdin, self._stdout = open(stdin[1], "wb", buffering=0), open(out[0], "rb", buffering=0)  # noqa: SIM115

    def workers(self) -> list[int]:
        """The pids of its workers, once the first batch is there."""
        line = self._stdout.readline()
        assert line, self._errors.read_text()
        pids: list[int] = json.loads(line)
        return pids

    def go_on(self) -> Ending:
        """Let it continue to its end."""
        self._stdin.write(b"\n")
        code = self.process.wait(WITHIN_S)
        os.set_blocking(self._stdout.fileno(), False)  # a process that is left may hold the other end
        out = self._stdout.read()
        return Ending(code, int(out) if out else None, self._errors.read_text())

    def family(self) -> list[psutil.Process]:
        """All running processes of the session."""
        return [process for process in psutil.process_iter() if self._is_kin(process)]

    def _is_kin(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) == self.process.pid and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, ProcessLookupError):
            return False

    def assert_no_family(self) -> None:
        """Nothing of it is left."""
        _, alive = psutil.wait_procs(self.family(), timeout=GONE_WITHIN_S)
        assert not [(process.pid, process.cmdline()) for process in alive if process.is_running()]

    def close(self) -> None:
        """Kill what is left of it."""
        self.process.kill()
        for process in self.family():
            process.kill()
        self._stdin.close()
        self._stdout.close()


@pytest.fixture
def run(preloaded: Preloaded, tmp_path: Path) -> Iterator[object]:
    started: list[Trainer] = []

    def start(*arguments: str) -> Trainer:
        started.append(Trainer(preloaded, tmp_path / f"errors-{len(started)}", *arguments))
        return started[-1]

    yield start
    for trainer in started:
        trainer.close()


loaders = pytest.mark.parametrize("loader", [pytest.param("torch", marks=pytest.mark.reference), "feedline"])
streams = pytest.mark.parametrize("stream", [[], ["--stream"]], ids=["map", "stream"])
holds = pytest.mark.parametrize("hold", [[], ["--hold"]], ids=["drop", "hold"])


def ending(run: object, loader: str, how: str, *options: str, workers: int = 2) -> Ending:
    """Run to the end; the workers must run at first, and no process may run afterwards."""
    trainer: Trainer = run(loader, how, "--workers", str(workers), *options)  # type: ignore[operator]
    pids = trainer.workers()
    assert len(pids) == workers
    assert all(psutil.pid_exists(pid) for pid in pids)
    end = trainer.go_on()
    trainer.assert_no_family()
    return end


@loaders
@pytest.mark.parametrize(
    ("how", "more"),
    [
        *(("nothing", ["--stream"]), ("break", []), ("nothing", ["--persistent"])),
        ("break", ["--persistent", "--stream"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_a_loop_that_ends(run: object, loader: str, how: str, more: list[str]) -> None:
    end = ending(run, loader, how, *more, "--hold")
    assert end.code == 0, end.stderr
    assert end.batches == (3 if how == "break" else 40)
    assert "Traceback" not in end.stderr


@loaders
@pytest.mark.parametrize(
    ("stream", "hold", "workers"),
    [
        *(([], ["--hold"], 0), ([], ["--hold"], 2), (["--stream"], [], 2)),
        *at_night(([], [], 0), ([], [], 2), (["--stream"], ["--hold"], 2)),
    ],
)
def test_an_error_in_the_loop(run: object, loader: str, stream: list[str], hold: list[str], workers: int) -> None:
    """An iterator that the traceback holds must not keep the workers."""
    end = ending(run, loader, "loader_error", *stream, *hold, workers=workers)
    assert end.code == 1
    assert "RuntimeError: loader error" in end.stderr


@loaders
@holds
def test_an_exit_in_the_loop(run: object, loader: str, hold: list[str]) -> None:
    assert ending(run, loader, "loader_exit", *hold).code == 5


@loaders
@streams
def test_a_killed_loop(run: object, loader: str, stream: list[str]) -> None:
    assert ending(run, loader, "loader_kill", *stream).code == -signal.SIGKILL


@loaders
def test_an_interrupted_loop(run: object, loader: str) -> None:
    end = ending(run, loader, "loader_interrupt")
    assert end.code in (-signal.SIGINT, 130, 1)
    assert "KeyboardInterrupt" in end.stderr


@loaders
@streams
def test_an_error_in_a_worker(run: object, loader: str, stream: list[str]) -> None:
    end = ending(run, loader, "worker_error", *stream)
    assert end.code == 1
    assert "RuntimeError" in end.stderr
    assert "worker error" in end.stderr


@loaders
@streams
def test_a_killed_worker(run: object, loader: str, stream: list[str]) -> None:
    """torch raises an error that names the worker; feedline replaces the worker and loses nothing."""
    end = ending(run, loader, "worker_kill", *stream)
    if loader == "torch":
        assert end.code == 1
        assert "DataLoader worker (pid" in end.stderr or is_broken_connection(end)
    else:
        assert (end.code, end.batches) == (0, 40), end.stderr


def is_broken_connection(end: Ending) -> bool:
    """torch's loop may find the broken connection before the death, and its error then does not name the worker."""
    broken = "ConnectionResetError" in end.stderr or "EOFError" in end.stderr
    return broken and "RuntimeError" not in end.stderr


@loaders
@pytest.mark.parametrize(("how", "cause"), [("worker_segfault", "Segmentation fault"), ("worker_exit", "7")])
def test_a_sample_that_kills_its_worker(run: object, loader: str, how: str, cause: str) -> None:
    end = ending(run, loader, how)
    assert end.code == 1
    if loader == "torch" and is_broken_connection(end):
        return
    assert "RuntimeError" in end.stderr or "WorkerDiedError" in end.stderr
    assert "DataLoader worker" in end.stderr
    assert loader == "torch" or cause in end.stderr


KEEPING = """
import resource, torch
from {module} import DataLoader

class Noise(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        return torch.randn(600)

kept = []
try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    for batch in DataLoader(Noise(), batch_size=2, num_workers=1):
        kept.append(batch)
    assert len(kept) == 200
except RuntimeError as error:
    assert "ulimit -n" in str(error), error
    assert {may_run_out}
"""


@pytest.mark.parametrize(
    ("module", "may_run_out"),
    [pytest.param("torch.utils.data", True, marks=pytest.mark.reference), ("feedline", False)],
)
def test_kept_batches_and_a_low_limit_of_descriptors(
    preloaded: Preloaded, module: str, may_run_out: bool, tmp_path: Path
) -> None:
    """torch runs out of descriptors and names the remedy; a batch of feedline that is kept holds none."""
    script, log = tmp_path / "keeping.py", tmp_path / "output.log"
    script.write_text(KEEPING.format(module=module, may_run_out=may_run_out))
    assert preloaded.run(script, log, WITHIN_S) == 0, log.read_text()


BIG_INDICES = """
import torch
from {module} import DataLoader

class Empty(torch.utils.data.Dataset):
    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        return torch.empty(0)

if __name__ == "__main__":
    iterator = iter(DataLoader(Empty(), batch_size=40960, num_workers=1, persistent_workers={persistent}))
    for batch in iterator:
        assert batch.numel() == 0
        raise RuntimeError("error of my own")
"""


@pytest.mark.parametrize("module", [pytest.param("torch.utils.data", marks=pytest.mark.reference), "feedline"])
@pytest.mark.parametrize("persistent", [False, True])
def test_an_error_while_large_requests_wait_in_line(
    preloaded: Preloaded, module: str, persistent: bool, tmp_path: Path
) -> None:
    script, log = tmp_path / "big_indices.py", tmp_path / "output.log"
    script.write_text(BIG_INDICES.format(module=module, persistent=persistent))
    assert preloaded.run(script, log, WITHIN_S) == 1
    assert "RuntimeError: error of my own" in log.read_text()
