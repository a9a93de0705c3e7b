"""obstore, loaded such that it works in every process."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ExtensionFileLoader
from pathlib import Path
from typing import Any

from feedline.errors import MissingExtraError
from feedline.extras import load
from feedline.per_process import PerProcess

_NAME = "obstore._obstore"


class _Inheritance:
    """Whether this process was forked from one that had loaded obstore."""

    def __init__(self) -> None:
        self.loaded_before_fork = False

    def look(self) -> None:
        self.loaded_before_fork = self.loaded_before_fork or _NAME in sys.modules


_inheritance = _Inheritance()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_inheritance.look)


def _library() -> Any:
    """The extension module itself: its functions and, in `_store`, its store classes.

    The threads of its runtime live once per process and do not survive a fork: in the child every call would wait for
    ever, through new stores too, because the runtime belongs to the loaded library. A forked child therefore loads the
    library a second time, from a copy, which the dynamic linker takes for another one: it costs about 10 ms, once.
    """
    module = load(_NAME, "stores", "object storage")
    return _second_copy(module.__file__) if _inheritance.loaded_before_fork else module


def _second_copy(file: str) -> Any:
    if not hasattr(os, "memfd_create"):
        raise MissingExtraError(
            "obstore cannot be used in a process that was forked after its parent had used it; "
            'start workers with multiprocessing_context="spawn"'
        )
    fd = os.memfd_create("obstore", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as copy:
            copy.write(Path(file).read_bytes())
        loader = ExtensionFileLoader(_NAME, f"/proc/self/fd/{fd}")
        spec = importlib.util.spec_from_loader(_NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        return module
    finally:
        os.close(fd)


library = PerProcess(_library)
"""`library()` is obstore's extension module for this process."""
