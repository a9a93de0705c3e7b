"""However and whenever the training process ends, all that it started ends with it, within a second."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from process_cases import GONE_WITHIN_S, Gate, gone

pytestmark = [pytest.mark.stress, pytest.mark.alone]

FOLDER = Path(__file__).parent
PHASES = ["starting", "fetching", "stepping"]
RUNS = [("unpickling", "zygote"), *((phase, context) for phase in PHASES for context in ("default", "zygote"))]


class Training:
    """The process of `kill_training.py`, in a process group of its own, as in a terminal."""

    def __init__(self, phase: str, context: str, folder: Path) -> None:
        self.gate = Gate(folder)
        paths = [str(FOLDER.parent), *sys.path]
        self.process = subprocess.Popen(
            [sys.executable, str(FOLDER / "kill_training.py"), phase, context, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            start_new_session=True,
        )
        if phase in {"stepping", "forking", "leaving"}:
            assert self.process.stdout is not None
            assert self.process.stdout.readline() == "step\n", self.process.communicate()[1]
        else:
            pidfd = os.pidfd_open(self.process.pid)
            self.gate.wait_for(pidfd)
            os.close(pidfd)

    def descendants(self) -> dict[int, str]:
        """Of every process that it has started, at whatever remove: a pidfd, and what it is."""
        return {
            os.pidfd_open(process.pid): f"{process.pid} {process.name()}"
            for process in psutil.Process(self.process.pid).children(recursive=True)
        }

    def interrupt(self) -> None:
        """As Ctrl-C does: the signal goes to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Any]:
    started: list[Training] = []

    def start(phase: str, context: str = "default") -> Training:
        started.append(Training(phase, context, tmp_path))
        return started[-1]

    yield start
    for training in started:
        training.process.kill()
        training.process.communicate()


def assert_gone(descendants: dict[int, str]) -> None:
    assert descendants
    left = [name for pidfd, name in descendants.items() if not gone(pidfd)]
    for pidfd in descendants:
        os.close(pidfd)
    assert not left, f"alive after {GONE_WITHIN_S} s: {left}"


@pytest.mark.parametrize(("phase", "context"), RUNS)
def test_kill(train: Any, phase: str, context: str) -> None:
    training = train(phase, context)
    descendants = training.descendants()
    training.process.kill()
    assert_gone(descendants)


@pytest.mark.parametrize("phase", ["fetching", "stepping"])
@pytest.mark.parametrize("context", ["spawn", "forkserver"])
def test_kill_with_another_start_method(train: Any, context: str, phase: str) -> None:
    training = train(phase, context)
    descendants = training.descendants()
    training.process.kill()
    assert_gone(descendants)


@pytest.mark.parametrize("context", ["default", "zygote"])
def test_kill_while_a_worker_is_stopped(train: Any, context: str) -> None:
    training = train("stepping", context)
    descendants = training.descendants()
    relatives = psutil.Process(training.process.pid).children(recursive=True)
    workers = [process for process in relatives if process.name().startswith("feedline-")]
    assert workers
    for worker in workers:
        worker.suspend()
    training.process.kill()
    assert_gone(descendants)


def test_kill_while_a_forked_child_of_the_users_lives_on(train: Any) -> None:
    """It has inherited every descriptor; the workers must not wait for it to close them."""
    training = train("forking")
    (forked,) = [p for p in psutil.Process(training.process.pid).children() if not p.children()]
    descendants = training.descendants()
    os.close(next(pidfd for pidfd, name in descendants.items() if name.startswith(f"{forked.pid} ")))
    descendants = {pidfd: name for pidfd, name in descendants.items() if not name.startswith(f"{forked.pid} ")}
    training.process.kill()
    assert_gone(descendants)
    assert forked.is_running()
    forked.kill()


@pytest.mark.parametrize(("phase", "context"), RUNS)
def test_interrupt(train: Any, phase: str, context: str) -> None:
    training = train(phase, context)
    descendants = training.descendants()
    training.interrupt()
    _, stderr = training.process.communicate(timeout=30)
    assert training.process.returncode == -signal.SIGINT
    assert stderr.count("Traceback") == stderr.count("KeyboardInterrupt") == 1
    assert_gone(descendants)


def test_exit_with_live_iterators(train: Any) -> None:
    training = train("leaving")
    descendants = training.descendants()
    _, stderr = training.process.communicate(timeout=30)
    assert (training.process.returncode, stderr) == (0, "")
    assert_gone(descendants)
