"""A user's script, whose definitions must reach a worker that never ran it, and return as the script's own."""

from __future__ import annotations

import dataclasses
import enum
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from feedline.workers.transport import MAX_FDS, Inbox, dump_builder


class Pair(NamedTuple):
    x: int
    y: int


class Kind(enum.Enum):
    CAT = 1


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    kind: Kind


class Outer:
    class Inner:
        pass


def helper(i: int) -> Batch:
    return Batch(torch.full((9000,), i), Kind.CAT)


class Dataset:
    table = np.zeros(50_000)

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"batch": helper(i), "pair": Pair(1, 2), "inner": Outer.Inner(), "function": helper}


here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
with dump_builder(Dataset()) as frozen, here, there:
    assert frozen.fd is not None
    worker = Path(__file__).with_name("transport_worker.py")
    arguments = [sys.executable, worker, str(there.fileno()), str(frozen.fd)]
    process = subprocess.Popen(arguments, pass_fds=[there.fileno(), frozen.fd])
    here.send(frozen.skeleton)
    payload, fds, _, _ = socket.recv_fds(here, 1 << 16, MAX_FDS)
    assert process.wait() == 0

sent = Inbox().loads(payload, fds)
assert type(sent["batch"]) is Batch
assert sent["batch"].x.eq(3).all()
assert sent["batch"].kind is Kind.CAT
assert type(sent["pair"]) is Pair
assert type(sent["inner"]) is Outer.Inner
assert sent["function"] is helper
print("by reference")
