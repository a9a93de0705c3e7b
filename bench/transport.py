"""Large batches between processes, compared with torch's shared memory and a bare ring of copied memory."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import feedline as fl
from feedline.workers.transport import MAX_FDS, Arena, Inbox
from harness import Contest
from loaders import rate

SAMPLE = (3, 224, 224)
BATCH_SIZE = 256
NBYTES = BATCH_SIZE * 3 * 224 * 224
WORKERS = 2
AHEAD = 2
"""Batches requested from each worker in advance: torch's prefetch_factor."""

Serve = Callable[[int, socket.socket], None]


def samples() -> list[torch.Tensor]:
    return list(torch.randint(0, 255, (BATCH_SIZE, *SAMPLE), dtype=torch.uint8).unbind())


class Samples(Dataset[torch.Tensor]):
    """Samples that cost nothing: collate and transport remain."""

    def __init__(self) -> None:
        self.samples = samples()

    def __len__(self) -> int:
        return 10_000 * BATCH_SIZE

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index % BATCH_SIZE]


def own_collate(batch: list[torch.Tensor]) -> torch.Tensor:
    """A common collate function; torch then copies its result into shared memory."""
    return torch.stack(batch)


class Crew:
    """Forked workers that answer every byte with a batch, in turns."""

    def __init__(self, serve: Serve, receive: Callable[[int, socket.socket], Any]) -> None:
        self._receive = receive
        self._channels = []
        for worker in range(WORKERS):
            mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            if os.fork() == 0:
                mine.close()
                torch.set_num_threads(1)
                with contextlib.suppress(ConnectionError):  # the bench is over
                    serve(worker, theirs)
                os._exit(0)
            theirs.close()
            self._channels.append(mine)

    def __iter__(self) -> Iterator[Any]:
        asked = 0
        for _ in range(AHEAD):
            for channel in self._channels:
                channel.send(bytes([asked % 256]))
            asked += 1
        while True:
            for worker, channel in enumerate(self._channels):
                yield self._receive(worker, channel)
                channel.send(bytes([asked % 256]))
            asked += 1

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
        for _ in self._channels:
            os.wait()


def ours(make: Callable[[list[torch.Tensor], Arena], Any]) -> Crew:
    """Every batch through an arena and an inbox."""

    def serve(_: int, channel: socket.socket) -> None:
        arena, source = Arena(), samples()
        while channel.recv(1):
            message = arena.dumps(make(source, arena))
            socket.send_fds(channel, [message.payload], message.fds)
            message.sent()

    inboxes = [Inbox() for _ in range(WORKERS)]

    def receive(worker: int, channel: socket.socket) -> Any:
        payload, fds, _, _ = socket.recv_fds(channel, 1 << 16, MAX_FDS)
        return inboxes[worker].loads(payload, fds)

    return Crew(serve, receive)


def collated(source: list[torch.Tensor], arena: Arena) -> torch.Tensor:
    return torch.stack(source, out=arena.empty((BATCH_SIZE, *SAMPLE), torch.uint8))


def private(source: list[torch.Tensor], _: Arena) -> torch.Tensor:
    return torch.stack(source)


def ring() -> Crew:
    """No pickling, no bookkeeping: the worker copies into one of a few fixed places and signals."""
    places = AHEAD + 2
    memory = np.frombuffer(mmap.mmap(-1, WORKERS * places * NBYTES), np.uint8).reshape(WORKERS, places, NBYTES)

    def serve(worker: int, channel: socket.socket) -> None:
        source = np.random.default_rng(0).integers(0, 255, NBYTES, np.uint8)
        while order := channel.recv(1):
            np.copyto(memory[worker, order[0] % places], source)
            channel.send(order)

    def receive(worker: int, channel: socket.socket) -> np.ndarray[Any, Any]:
        return memory[worker, channel.recv(1)[0] % places]

    return Crew(serve, receive)


def overhead() -> float:
    """Seconds of Python per batch of two tensors, one in a slot and one small, on both sides."""
    batches, labels = 2000, torch.arange(BATCH_SIZE)
    with Arena() as arena, Inbox() as inbox:
        start = perf_counter()
        for _ in range(batches):
            message = arena.dumps((arena.empty((BATCH_SIZE, *SAMPLE), torch.uint8), labels))
            inbox.loads(message.payload, message.fds)
        return (perf_counter() - start) / batches


def main() -> None:
    dataset = Samples()
    arguments = {"batch_size": BATCH_SIZE, "num_workers": WORKERS, "prefetch_factor": AHEAD}
    race = Contest("38.5 MB batches through processes", unit="GB/s", baseline="torch, default collate")
    race.measure("torch, default collate", rate(lambda: DataLoader(dataset, **arguments), NBYTES / 1e9))
    race.measure(
        "torch, own collate", rate(lambda: DataLoader(dataset, collate_fn=own_collate, **arguments), NBYTES / 1e9)
    )
    race.measure("feedline", rate(lambda: fl.DataLoader(dataset, worker_method="process", **arguments), NBYTES / 1e9))
    race.measure("feedline transport, collated into the slot", rate(lambda: ours(collated), NBYTES / 1e9))
    race.measure("feedline transport, copied into the slot", rate(lambda: ours(private), NBYTES / 1e9))
    race.measure("bare ring of copied memory", rate(ring, NBYTES / 1e9))
    race.run(rounds=5).publish()

    race = Contest("transport overhead of a batch", unit="s", baseline="feedline transport")
    race.measure("feedline transport", overhead)
    race.run(rounds=5).publish()


if __name__ == "__main__":
    main()
