"""Decoding of images on a device, by a thread ahead of delivery."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from time import monotonic_ns
from typing import Any
from weakref import finalize, ref

import torch

from feedline.core.caches import PerProcess
from feedline.core.threads import WAKE_S
from feedline.core.tree import map_leaves
from feedline.loader.device.backend import Backend, Event
from feedline.loader.device.stage import moves_itself, times_s


class HostTime:
    """A time of the host, as an event that has passed."""

    def __init__(self) -> None:
        self._ns = monotonic_ns()

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Do nothing."""

    def elapsed_time(self, end_event: HostTime) -> float:
        """Milliseconds to a later time."""
        return (end_event._ns - self._ns) / 1e6


_decoders = PerProcess(threading.Lock)
"""Held by the thread that decodes on an accelerator: all loaders of a process share the decoders of a device."""


class Decoding:
    """Images that the thread decodes.

    `needed` marks the point where the loop begins to wait for them.
    """

    def __init__(
        self, images: Any, device: torch.device, backend: Backend | None, thread: threading.Thread | None
    ) -> None:
        self._images, self._device, self._backend, self._thread = images, device, backend, thread
        # No threading.Event: its own lock could be held by this thread, below the handler of a signal that closes.
        self._running = threading.Lock()
        self._running.acquire()
        self._error: BaseException | None = None
        self._decoded: Any = None
        self.started: Event | None = None
        self.stopped: Event | None = None
        self.needed: Event | None = None
        self.has_ended = self.is_counted = False

    def run(self) -> None:
        """Decode the images, and keep them or the error."""
        try:
            if self._backend is None:
                started: Event = HostTime()
                self._decoded = self._images.to(self._device)
                stopped: Event = HostTime()
            else:
                stream = self._backend.decode_stream()
                with _decoders(), self._backend.on(stream):
                    started = self._backend.record(stream)
                    self._decoded = self._images.to(self._backend.device)
                    stopped = self._backend.record(stream)
            self.started, self.stopped = started, stopped
        except BaseException as error:  # noqa: BLE001 - raised where the loop needs the images
            self._error = error
        self.has_ended = True
        self._images = None  # the device has read the files: their memory is free for the workers
        self._running.release()

    def result(self) -> Any:
        """Wait for the images; raises the error of their decoding."""
        while not self.has_ended:
            is_alive = self._thread is not None and self._thread.is_alive()
            if is_alive:
                if self._running.acquire(timeout=WAKE_S):
                    self._running.release()
            elif not self.has_ended:
                self.run()  # in a forked child, or if the thread was ended before it got these images
        if self._error is not None:
            raise self._error
        return self._decoded


class DecodeThread:
    """Decodes encoded images of batches in their order, ahead of delivery.

    On accelerators with streams it has a stream of its own, so that it waits neither for copies nor for the loop's
    steps. Images whose batch is dropped before their turn are not decoded. The thread lives from `start` to `close`.
    """

    def __init__(self, device: torch.device, backend: Backend | None = None) -> None:
        self._device, self._backend = device, backend
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[ref[Decoding] | None] | None = None
        self._end: Callable[[], Any] = lambda: None
        self._owner = 0
        self._timed: deque[tuple[Event, Event, Event]] = deque()
        self.decode_s = self.hidden_s = 0.0
        """Seconds of decoding, and its part in which the loop did not wait."""

    def start(self, images: Any) -> Decoding:
        """Hand images to the thread; `finish` replaces the result."""
        # Variables: the handler of a signal may close this object between two lines.
        queue, thread = self._queue, self._thread
        if queue is None or self._owner != os.getpid():  # a forked child has no thread
            queue = SimpleQueue()
            thread = threading.Thread(target=_decode_all, args=(queue,), name="feedline-device-decode", daemon=True)
            thread.start()
            self._end = finalize(self, queue.put, None)
            self._thread, self._queue, self._owner = thread, queue, os.getpid()
        decoding = Decoding(images, self._device, self._backend, thread)
        queue.put(ref(decoding))
        return decoding

    def finish(self, batch: Any) -> Any:
        """The batch with its decoded images, for the calling thread.

        Raises the error of their decoding. After an interrupt it may be called again.
        """
        return map_leaves(self._wait, batch, moves_itself)

    def close(self) -> None:
        """Join the thread after its work.

        Another iterator may still wait for that work.
        """
        thread, self._thread, self._queue = self._thread, None, None
        if thread is not None and self._owner == os.getpid():
            self._end()
            thread.join()
        with suppress(IndexError):  # the loop may count the last ones meanwhile
            while self._timed:
                self._timed[0][1].synchronize()
                self._count()

    def _wait(self, leaf: Any) -> Any:
        if not isinstance(leaf, Decoding):
            return leaf
        backend = self._backend
        if leaf.needed is None:  # not after an interrupt
            leaf.needed = HostTime() if backend is None else backend.record(backend.current_stream())
        images = leaf.result()
        assert leaf.started is not None and leaf.stopped is not None  # noqa: PT018
        if backend is not None:
            current = backend.current_stream()
            backend.wait(current, leaf.stopped)
            # The memory belongs to the stream of the decoder, whose allocator could reuse it while the loop reads it.
            backend.record_stream(images, current)
        if not leaf.is_counted:
            leaf.is_counted = True
            self._timed.append((leaf.started, leaf.stopped, leaf.needed))
        with suppress(IndexError):  # another thread closes the loader
            while self._timed and self._timed[0][1].query():
                self._count()
        return images

    def _count(self) -> None:
        total_s, hidden_s = times_s(*self._timed.popleft())
        self.decode_s += total_s
        self.hidden_s += hidden_s


def _decode_all(queue: SimpleQueue[ref[Decoding] | None]) -> None:
    while (reference := queue.get()) is not None:
        decoding = reference()
        if decoding is not None:  # else its batch was dropped
            decoding.run()
        del decoding
