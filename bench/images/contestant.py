"""A contestant's process: started once, then asked for one epoch at a time."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event as Signal
from typing import Any, Self

from harness import file_name
from images.contestants import Entrant
from images.corpus import CACHE, Manifest
from images.environments import ENVIRONMENTS, PEERS, ROOT
from images.peers.task import Task
from images.weigh import Tree, Weight

LOGS = CACHE / "logs"


class DisqualifiedError(Exception):
    """A contestant died or delivered wrong batches; the message names it, and the fault."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One epoch: images per second, and CPU seconds of all processes per 1,000 images."""

    rate: float
    cpu_s_per_1000: float


class Contestant:
    """The process of a contestant; leaving the block ends it with all its descendants."""

    def __init__(self, entrant: Entrant, task: Task, manifest: Manifest) -> None:
        self.entrant, self.task, self.manifest = entrant, task, manifest
        self.turns: list[Turn] = []
        self.weight = Weight(0, 0)
        self.log = LOGS / f"{file_name(entrant.name)}.log"
        self.process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is None:
            return
        children = self.tree.descendants() if self.process.poll() is None else []
        self.process.kill()
        self.process.communicate()
        for child in children:
            if child.is_running():
                child.kill()

    def start(self) -> None:
        """Start the process and wait until it is ready."""
        LOGS.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                _command(self.entrant, self.task),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=None if self.entrant.ours else ENVIRONMENTS[self.entrant.environment].surroundings(),
            )
        self._answer()

    @property
    def tree(self) -> Tree:
        assert self.process is not None
        return Tree(self.process.pid)

    def weigh_in(self) -> None:
        """One uncounted epoch, which warms up: its memory is measured, and its batches are checked."""
        done = Signal()
        with ThreadPoolExecutor(1) as pool:
            weight = pool.submit(self.tree.peak, Path(self.task.root), done)
            try:
                answer = self._epoch()
            finally:
                done.set()
            self.weight = weight.result()
        self._check(answer)
        self.tree.settle()

    def turn(self) -> float:
        """One counted epoch; returns its rate."""
        _read_through(Path(self.task.form(self.entrant.form)))
        before = self.tree.cpu_s()
        answer = self._epoch()
        self.tree.settle()
        spent = self.tree.cpu_s() - before
        self._check(answer)
        worked = answer["images"] + answer["thrown_away"]
        self.turns.append(Turn(answer["images"] / answer["seconds"], 1000 * spent / worked))
        return self.turns[-1].rate

    def _epoch(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has died, which the missing answer reports
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(errors="replace").strip().splitlines() or ["and said nothing"]
            raise DisqualifiedError(f"{self.entrant.name} died: {said[-1]} (see {self.log.relative_to(ROOT)})")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _check(self, answer: dict[str, Any]) -> None:
        fault = fault_of(answer, self.task, self.manifest, delivers=not self.entrant.limit)
        if fault:
            raise DisqualifiedError(f"{self.entrant.name} {fault}")


def _read_through(form: Path) -> None:
    """Read the files into the page cache, from which other contestants may have evicted them."""
    for path in [form] if form.is_file() else sorted(form.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


def fault_of(answer: dict[str, Any], task: Task, manifest: Manifest, *, delivers: bool = True) -> str | None:
    """The fault of an epoch, or None. Shapes and dtypes were checked batch by batch."""
    if answer["images"] != task.images:
        return f"delivered {answer['images']} images; expected {task.images}"
    if not delivers:
        return None
    # An endless stream begins its next epoch within a turn, and may then repeat a batch.
    if answer["different"] < max(2, answer["batches"] * 3 // 4):
        return f"delivered {answer['batches']} batches, of which only {answer['different']} differ"
    if not set(answer["labels"]) <= set(range(len(manifest.classes))) or len(answer["labels"]) < 2:
        return f"delivered the labels {answer['labels']}; expected those of {len(manifest.classes)} classes"
    # Centers of photographs are slightly brighter than their borders, and a few small crops differ much.
    tolerance = 12 + 200 / task.images**0.5
    if any(abs(a - b) > tolerance for a, b in zip(answer["mean"], manifest.mean, strict=True)):
        return f"delivered pixels of mean {answer['mean']}; expected about {list(manifest.mean)}"
    return None


def _command(entrant: Entrant, task: Task) -> list[str]:
    python = sys.executable if entrant.ours else str(ENVIRONMENTS[entrant.environment].python)
    return [python, str(PEERS / "serve.py"), entrant.module, task.dumps(), json.dumps(entrant.options)]
