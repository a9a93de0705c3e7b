"""Keys of `feedline top`, and the view that they change."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

Order = Literal["number", "busy", "CPU", "memory"]


ORDERS: tuple[Order, ...] = ("number", "busy", "CPU", "memory")


@dataclass(frozen=True, slots=True)
class ScreenState:
    """State of the screen, beyond the figures."""

    is_paused: bool = False
    order: Order = "number"
    """Order of the workers: by number, or largest first."""
    has_all_advice: bool = False
    has_keyboard: bool = False
    """The last line then names the keys."""

    def after(self, key: str) -> ScreenState:
        """The state after a key; keys without a meaning change nothing."""
        if key in ("p", " "):
            return replace(self, is_paused=not self.is_paused)
        if key == "s":
            return replace(self, order=ORDERS[(ORDERS.index(self.order) + 1) % len(ORDERS)])
        if key == "a":
            return replace(self, has_all_advice=not self.has_all_advice)
        return self

    def help(self, width: int) -> str:
        """Last line of the screen: the keys, in full if they fit."""
        long = (
            f"[q]uit  [p]ause{'d' if self.is_paused else ''}  [s]ort by {self.order}  "
            f"[a]dvice{': all' if self.has_all_advice else ''}"
        )
        return long if len(long) <= width else "q p s a"


class Keyboard:
    """Single keys of a terminal, or none."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    @property
    def is_available(self) -> bool:
        """True if keys can be read."""
        return self._descriptor is not None

    def wait(self, seconds: float) -> str:
        """The key pressed within `seconds`; empty if there is none."""
        if self._descriptor is None:
            time.sleep(seconds)
            return ""
        if not select.select([self._descriptor], [], [], seconds)[0]:
            return ""
        pressed = os.read(self._descriptor, 16).decode(errors="ignore")[:1]
        if not pressed:  # the terminal is closed
            self._descriptor = None
        return pressed


@contextmanager
def keyboard(descriptor: int | None = None) -> Iterator[Keyboard]:
    """The keyboard of standard input, read key by key in the block.

    Ctrl-C still raises `KeyboardInterrupt`. There are no keys if standard input is not a terminal, or if this process
    is in the terminal's background.
    """
    descriptor = _terminal() if descriptor is None else descriptor
    if descriptor is None:
        yield Keyboard(None)
        return
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keyboard(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _terminal() -> int | None:
    try:
        descriptor = sys.stdin.fileno()
        is_ours = os.isatty(descriptor) and os.tcgetpgrp(descriptor) == os.getpgrp()
    except (OSError, ValueError, AttributeError):  # closed, or replaced by an object of a test
        return None
    return descriptor if is_ours else None
