"""A training process that stays in the phase that its arguments name, for others to kill; run by test_kill_parent.py.

It writes "step" to stdout after the first batch, and then waits for the end of stdin.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from process_cases import Gate

import feedline


class Staying:
    """Eight numbers; blocks in the phase `where` until the gate is opened."""

    def __init__(self, where: str, gate: Gate) -> None:
        self.where, self.gate = where, gate

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if self.where == "fetching" and index == 1:
            self.gate()
        return torch.tensor(index)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.where == "unpickling":
            self.gate()


def existing_gate(folder: Path) -> Gate:
    gate = Gate.__new__(Gate)
    gate.reached, gate.opened = folder / "gate-reached", folder / "gate-opened"
    return gate


def main(where: str, context: str, folder: str) -> None:
    gate = existing_gate(Path(folder))
    if context == "zygote":
        multiprocessing.set_start_method("forkserver")

    def init(worker_id: int) -> None:
        if where == "starting":
            gate()

    loader = feedline.DataLoader(
        Staying(where, gate),
        num_workers=2,
        worker_init_fn=None if context in {"spawn", "forkserver"} else init,
        multiprocessing_context=None if context in {"default", "zygote"} else context,
        persistent_workers=True,
    )
    iterator = iter(loader)
    next(iterator)
    if where == "forking" and os.fork() == 0:
        signal.pause()
    print("step", flush=True)
    if where in {"stepping", "forking"}:
        sys.stdin.read()
    for _ in iterator:
        pass
    if where == "leaving":
        next(iter(loader))


if __name__ == "__main__":
    main(*sys.argv[1:])
