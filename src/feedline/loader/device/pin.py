"""Stage for torch's `pin_memory=True`: batches in torch's page-locked memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch.utils.data._utils.pin_memory import pin_memory

from feedline.loader.device import backend
from feedline.loader.device.stage import TWO_BATCHES, Closing, Depth, Flights, InFlight, StageStatistics, host_nbytes


class PinStage(Closing):
    """Copies batches into page-locked memory on a background thread.

    Nested batches follow torch's rules. Transport slots are not page-locked in place: torch's allocator knows when
    copies from its own memory have ended, but not when copies from a slot have.
    The thread lives from `start` to `close`.
    """

    def __init__(self, depth: Depth = TWO_BATCHES, pin: Callable[[Any], Any] = pin_memory) -> None:
        self._pin = pin
        self._flights: Flights[Future[Any]] = Flights(depth)
        self._thread: ThreadPoolExecutor | None = None
        self._copied_nbytes = 0

    def start(self, batch: Any) -> InFlight[Future[Any]]:
        """Hand the batch to the thread."""
        if self._thread is None:
            self._thread = _start_thread()
        nbytes = host_nbytes(batch)
        self._copied_nbytes += nbytes
        return self._flights.enter(self._thread.submit(self._pin, batch), nbytes)

    def finish(self, moving: InFlight[Future[Any]]) -> Any:
        """Wait for the page-locked batch.

        Raises the exceptions of `pin_memory` methods of custom types.
        """
        future = self._flights.leave(moving)
        try:
            return future.result()
        except Exception as error:
            error.add_note("feedline: while copying the batch to page-locked memory (pin_memory=True)")
            raise

    def has_room(self) -> bool:
        """See `Stage`."""
        return self._flights.has_room()

    def statistics(self) -> StageStatistics:
        """See `Stage`."""
        flights = self._flights
        return StageStatistics(len(flights), flights.nbytes, flights.peak_nbytes, self._copied_nbytes)

    def close(self) -> None:
        """Join the thread after its submitted work.

        Another iterator may still wait for that work.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()


def _start_thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, "feedline-pin", initializer=partial(_init_thread, backend.index()))


def _init_thread(index: int | None) -> None:
    torch.set_num_threads(1)  # for this thread only: copies of large tensors must not take the workers' cores
    if index is not None:
        backend.select(index)
