"""A worker at its limits. Argument: the scarce resource."""

from __future__ import annotations

import resource
import sys

import torch

from feedline.workers.transport import Arena, Inbox, SlotMemoryError

arena, inbox = Arena(), Inbox()


def carry(nbytes: int) -> torch.Tensor:
    message = arena.dumps(torch.ones(nbytes, dtype=torch.uint8))
    return inbox.loads(message.payload, message.fds)


kept = [carry(1_000_000)]
if sys.argv[1] == "size":
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 20, 4 << 20))
    wanted = 10_000_000
else:
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    wanted = 500_000
try:
    kept.append(carry(wanted))
except SlotMemoryError as error:
    print(error)
kept.clear()
assert carry(900_000).eq(1).all()
final = carry(1_000)  # the interpreter ends while batches live
