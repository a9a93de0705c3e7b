"""Ctrl-C while the `feedline` command imports libraries, which takes seconds."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePath

_EXIT_CODE = 130
"""Exit code of a program that Ctrl-C has ended, as shells report it."""


@contextmanager
def quiet_imports() -> Iterator[None]:
    """Let Ctrl-C end the command without a traceback.

    In any other program, it raises KeyboardInterrupt as usual.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not (is_main and _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler):
        yield
        return
    # Not an exception: libraries turn one that comes while they are imported into errors of their own.
    signal.signal(signal.SIGINT, lambda *_: os._exit(_EXIT_CODE))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """True in the process of the command, not in its workers."""
    if sys.argv[:1] == ["-m"]:  # the module is not known yet
        _, _, module = " ".join(sys.orig_argv).partition(" -m ")
        return re.match(r"feedline[. ]|feedline$", module) is not None
    # Spawned processes have the `argv` of their parent.
    return bool(sys.argv) and PurePath(sys.argv[0]).stem == "feedline" and sys.argv[0] in sys.orig_argv
