"""Over many messages neither memory nor descriptors grow, whichever process drops the batches."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from debris import left_names, shared_names
from rounds import rounds
from transport_peer import Peer

from feedline.workers.transport import Arena

pytestmark = [
    pytest.mark.stress,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

MESSAGES = rounds(300, 1000)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def make(number: int, arena: Arena) -> dict[str, Any]:
    """Images made in a slot, masked ones copied into one, small values, a long list, and the worker's resources."""
    return {
        "images": arena.empty((16, 3, 64, 64), torch.float32).fill_(number),
        "mask": torch.full((16, 64 + number % 7, 64), number),
        "features": [np.full(3000 + 500 * i, number) for i in range(6)],
        "labels": torch.full((16,), number),
        "captions": [f"caption {i} of {number}" for i in range(4000)],
        "descriptors": open_descriptors(),
        "rss": psutil.Process().memory_info().rss,
    }


def check(batch: dict[str, Any], number: int) -> None:
    assert (batch["images"].numpy() == number).all()
    assert (batch["mask"].numpy() == number).all()
    assert all((feature == number).all() for feature in batch["features"])
    assert batch["captions"][-1] == f"caption 3999 of {number}"


def test_many_messages_use_the_memory_of_the_first_ones() -> None:
    names = shared_names()
    kept: list[dict[str, Any]] = []
    samples, rss = [], []
    with Peer(make) as peer:
        for number in range(MESSAGES):
            kept.append(peer.ask(number))
            check(kept[-1], number)
            check(kept[0], number - len(kept) + 1)
            kept = kept[-3:]
            if (number + 1) % (MESSAGES // 10) == 0:
                arena = peer.statistics()
                rss.append(kept[-1]["rss"])
                samples.append((arena.slots, arena.created, kept[-1]["descriptors"], open_descriptors()))
        assert peer.inbox.statistics().nbytes == arena.nbytes
    assert len(set(samples[3:])) == 1, samples
    assert rss[-1] < rss[0] + (4 << 20)
    assert not left_names(names)
    check(kept[0], MESSAGES - 3)


def test_batches_may_die_in_any_thread() -> None:
    batches: queue.Queue[tuple[int, dict[str, Any]] | None] = queue.Queue(maxsize=8)
    failures: list[BaseException] = []

    def consume() -> None:
        while (item := batches.get()) is not None:
            try:
                check(item[1], item[0])
            except AssertionError as error:
                failures.append(error)
            del item

    threads = [threading.Thread(target=consume) for _ in range(4)]
    with Peer(make) as peer:
        for thread in threads:
            thread.start()
        for number in range(MESSAGES // 2):
            batches.put((number, peer.ask(number)))
        for _ in threads:
            batches.put(None)
        for thread in threads:
            thread.join()
        assert not failures
        assert peer.statistics().lent_nbytes == 0
        assert peer.statistics().slots < 200
