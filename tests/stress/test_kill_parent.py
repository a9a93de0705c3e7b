"""Every end of the training process, at any time, ends all of its descendants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from diagonals import at_night
from preloaded import Preloaded
from process_cases import GONE_WITHIN_S, Gate, gone

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("kill_training.py")
WITHIN_S = 200.0
PHASES = ["starting", "fetching", "stepping"]
# Workers of a zygote begin and fetch as those of a snapshot do, and a fork server imports torch first.
RUNS = [
    *((phase, "default") for phase in PHASES),
    *(("unpickling", "zygote"), ("stepping", "zygote")),
    *at_night(("starting", "zygote"), ("fetching", "zygote")),
]


class Training:
    """The process of `kill_training.py`, in a process group of its own, as in a terminal."""

    def __init__(self, server: Preloaded, phase: str, context: str, folder: Path) -> None:
        self.gate, self._errors = Gate(folder), folder / "errors"
        stdin, stdout = os.pipe(), os.pipe()
        with open(self._errors, "wb") as log:
            streams = {"stdin": stdin[0], "stdout": stdout[1], "stderr": log.fileno()}
            self.process = server.start(str(SCRIPT), phase, context, str(folder), **streams)
        os.close(stdin[0])
        os.close(stdout[1])
        self._stdin, self._stdout = open(stdin[1], "wb", buffering=0), open(stdout[0], "rb", buffering=0)  # noqa: SIM115
        if phase in {"stepping", "forking", "leaving"}:
            assert self._stdout.readline() == b"step\n", self._errors.read_text()
        else:
            pidfd = os.pidfd_open(self.process.pid)
            self.gate.wait_for(pidfd)
            os.close(pidfd)

    def descendants(self) -> dict[int, str]:
        """A pidfd and a description of each of its descendants."""
        return {os.pidfd_open(each.pid): f"{each.pid} {each.name()}" for each in self.processes()}

    def processes(self) -> list[psutil.Process]:
        """All of its descendants."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def interrupt(self) -> None:
        """As Ctrl-C does: the signal goes to the whole group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def go_on(self) -> tuple[int, str]:
        """Let it reach its end; returns its exit code and its last output."""
        self._stdin.close()
        return self.process.wait(WITHIN_S), self._errors.read_text()

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self._stdin.close()
        self._stdout.close()


@pytest.fixture
def train(preloaded: Preloaded, tmp_path: Path) -> Iterator[Any]:
    started: list[Training] = []

    def start(phase: str, context: str = "default") -> Training:
        started.append(Training(preloaded, phase, context, tmp_path))
        return started[-1]

    yield start
    for training in started:
        training.close()


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


@pytest.mark.parametrize(("context", "phase"), [("spawn", "stepping"), *at_night(("forkserver", "fetching"))])
def test_kill_with_another_start_method(train: Any, context: str, phase: str) -> None:
    training = train(phase, context)
    descendants = training.descendants()
    training.process.kill()
    assert_gone(descendants)


@pytest.mark.parametrize("context", ["default", *at_night("zygote")])
def test_kill_while_a_worker_is_stopped(train: Any, context: str) -> None:
    training = train("stepping", context)
    # A worker has the name of its forker until it has asked the kernel to be killed with it.
    while not {"feedline-0", "feedline-1"} <= {each.name() for each in training.processes()}:
        time.sleep(0.01)
    descendants = training.descendants()
    for process in training.processes():
        if process.name().startswith("feedline-"):
            process.suspend()
    training.process.kill()
    assert_gone(descendants)


def test_kill_while_a_forked_child_of_the_users_lives_on(train: Any) -> None:
    """It has inherited every descriptor; the workers must not wait for it to close them."""
    training = train("forking")
    children = psutil.Process(training.process.pid).children()
    (forked,) = [each for each in children if not each.children() and not each.name().startswith("feedline")]
    descendants = training.descendants()
    os.close(next(pidfd for pidfd, name in descendants.items() if name.startswith(f"{forked.pid} ")))
    descendants = {pidfd: name for pidfd, name in descendants.items() if not name.startswith(f"{forked.pid} ")}
    training.process.kill()
    assert_gone(descendants)
    assert forked.is_running()
    forked.kill()


@pytest.mark.parametrize(
    ("phase", "context"),
    [*((phase, "default") for phase in PHASES), ("stepping", "zygote"), *at_night(("unpickling", "zygote"))],
)
def test_interrupt(train: Any, phase: str, context: str) -> None:
    training = train(phase, context)
    descendants = training.descendants()
    training.interrupt()
    code, stderr = training.go_on()
    assert code == -signal.SIGINT
    assert stderr.count("Traceback") == stderr.count("KeyboardInterrupt") == 1
    assert_gone(descendants)


def test_exit_with_live_iterators(train: Any) -> None:
    training = train("leaving")
    descendants = training.descendants()
    assert training.go_on() == (0, "")
    assert_gone(descendants)
