"""torch's `pin_memory=True`: batches in page-locked memory of torch's own allocator."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from feedline.loader.device import backend
from feedline.loader.device.stage import Closing, Depth, Flights, InFlight, StageStatistics, host_nbytes


class PinStage(Closing):
    """Copies batches into page-locked memory on one background thread, by torch's own rules for nested batches.

    Transport slots are never handed out page-locked here: torch's allocator knows when a copy that the loop
    enqueued from its memory has ended, and of ours it would not. The thread lives from `start` to `close`.
    """

    def __init__(self, depth_nbytes: int | None = None, pin: Callable[[Any], Any] = pin_memory) -> None:
        self._pin = pin
        self._flights: Flights[Future[Any]] = Flights(Depth(depth_nbytes))
        self._thread: ThreadPoolExecutor | None = None
        self._copied_nbytes = 0

    def start(self, batch: Any) -> InFlight[Future[Any]]:
        """Hand the batch to the thread."""
        if self._thread is None:
            self._thread = _pinning_thread()
        nbytes = host_nbytes(batch)
        self._copied_nbytes += nbytes
        return self._flights.enter(self._thread.submit(self._pin, batch), nbytes)

    def finish(self, moving: InFlight[Future[Any]]) -> Any:
        """The page-locked batch; waits for the thread. Raises what `pin_memory` of a custom type raised."""
        future = self._flights.leave(moving)
        try:
            return future.result()
        except Exception as error:
            error.add_note("feedline: while the batch was copied to page-locked memory (pin_memory=True)")
            raise

    def has_room(self) -> bool:
        """See `Stage`."""
        return self._flights.has_room()

    def statistics(self) -> StageStatistics:
        """See `Stage`."""
        flights = self._flights
        return StageStatistics(len(flights), flights.nbytes, flights.peak_nbytes, self._copied_nbytes)

    def close(self) -> None:
        """Join the thread, after what it was given; another iterator may still wait for that."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


def _pinning_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "feedline-pin", initializer=partial(_enter, backend.index()))


def _enter(index: int | None) -> None:
    torch.set_num_threads(1)  # of this thread alone: copies of large tensors leave the other cores to the workers
    if index is not None:
        backend.select(index)
