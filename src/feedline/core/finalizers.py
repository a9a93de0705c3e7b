"""Finalizers that never wait for locks of their own thread.

Python may collect garbage at any allocation, also between two lines that hold a lock of feedline or of the user. A
finalizer that takes the same lock, or joins a thread that does, would then wait forever. The same holds for a handler
of a signal, which Python runs between any two lines of the main thread.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


class _DeferredFinalizers(threading.local):
    """Context in which the current thread runs no finalizer of `run`."""

    depth = 0

    # A separate statement, in C, takes the lock itself. An interrupt inside these methods can leave `depth` too high.
    # Finalizers then run in threads of their own, but no lock stays taken.
    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


deferred_finalizers = _DeferredFinalizers()
"""`with deferred_finalizers, lock:` guards a lock that finalizers take, too."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no garbage within the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


_phases: dict[str, Any] = dict.fromkeys(("start", "stop"))
"""Phases of the latest collection; the present one is the last key."""


# Together they move the key to the end. No other thread runs between them. They are in C: an interrupt (Ctrl-C) that
# came during a collection would be raised in a callback in Python, and lost.
gc.callbacks[:0] = _phases.pop, _phases.__setitem__


def _is_collecting() -> bool:
    """True during a garbage collection of any thread.

    Another collection does not begin then.
    """
    return list(_phases)[-1] == "start"


class _ForkedChild:
    """Finalizers of collections in a child whose fork handlers still run.

    Python's own handler drops every thread that started in the child before it, and that thread fails.
    """

    def __init__(self) -> None:
        self._ready = os.getpid()
        self._waiting: list[tuple[Callable[..., object], tuple[object, ...]]] = []

    def defer(self, finalizer: Callable[..., object], arguments: tuple[object, ...]) -> bool:
        """Run the finalizer after the handlers; False if they have run."""
        if self._ready == os.getpid():
            return False
        self._waiting.append((finalizer, arguments))
        return True

    def run_deferred(self) -> None:
        """Run the waiting finalizers, after Python's own handler."""
        self._ready, waiting, self._waiting = os.getpid(), self._waiting, []
        for finalizer, arguments in waiting:
            _run_in_thread(finalizer, arguments)


_forked_child = _ForkedChild()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked_child.run_deferred)


def run(finalizer: Callable[..., object], *arguments: object) -> None:
    """Run `finalizer` here, or in a thread of its own.

    It needs the thread during garbage collections, and inside `deferred_finalizers`.
    """
    if not (deferred_finalizers.depth or _is_collecting()):
        finalizer(*arguments)
    elif not _forked_child.defer(finalizer, arguments):
        _run_in_thread(finalizer, arguments)


def _run_in_thread(finalizer: Callable[..., object], arguments: tuple[object, ...]) -> None:
    thread = threading.Thread(target=finalizer, args=arguments, name="feedline-finalizer")
    try:
        thread.start()
    except RuntimeError:  # Python is about to exit, or there are too many threads
        finalizer(*arguments)
