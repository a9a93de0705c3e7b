"""Finalizers that never wait for a lock that their own thread holds.

Python may collect garbage at any allocation, also between two lines that hold a lock. A finalizer that takes the same
lock would then wait forever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _HeldOff(threading.local):
    """Context in which the current thread runs no finalizer of `run`."""

    depth = 0

    # The lock itself stays a statement of its own, in C: an interrupt inside these methods can leave `depth` too high,
    # which costs a thread per finalizer, but never a lock that stays held.
    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


held_off = _HeldOff()
"""`with held_off, lock:` guards a lock that finalizers take, too."""


def run(finalizer: Callable[[], object]) -> None:
    """Run `finalizer` here, or inside `held_off` in a thread of its own."""
    if held_off.depth:
        threading.Thread(target=finalizer, name="feedline-finalizer").start()
    else:
        finalizer()
