"""Installed packages that the processes of all loaders need, imported once for all of them."""

from __future__ import annotations

import gc
import os
import sys
import types
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path

SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment in which OpenMP, OpenBLAS and MKL start no threads as they are loaded.

A process with threads must not be forked.
"""


_PRESENT = {"__main__", "__mp_main__", "feedline", "numpy", "torch"}
"""Packages that a fork server has, and scripts, which are pickled by value."""


_INSTALLED = {"site-packages", "dist-packages"}


def packages_behind(names: Collection[str]) -> frozenset[str]:
    """Modules of installed packages among these, and those that the project's own modules use.

    Modules of the project are left out: they may be edited or reloaded while this process runs.
    """
    found: set[str] = set()
    seen = set(names)
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        module = sys.modules.get(name)
        if module is None or name.partition(".")[0] in _PRESENT:
            continue
        folders = _folders(module)
        if _INSTALLED & folders:
            found.add(name)
        elif folders and name.partition(".")[0] not in sys.stdlib_module_names:
            used = _used_by(module) - seen
            seen |= used
            waiting += used
    return frozenset(found)


def import_all(names: Iterable[str]) -> None:
    """Import modules, as far as possible, in a process that is then forked."""
    os.environ.update(SINGLE_THREADED)
    for name in sorted(names):
        # Who unpickles the dataset runs into the same error, and reports it.
        with suppress(Exception, SystemExit):
            import_module(name)
    gc.collect()
    gc.freeze()


def _folders(module: types.ModuleType) -> set[str]:
    file = getattr(module, "__file__", None)
    return set(Path(file).parts) if isinstance(file, str) else set()


def _used_by(module: types.ModuleType) -> set[str]:
    """Modules whose objects are attributes of a module."""
    values = list(vars(module).values())
    modules = {value.__name__ for value in values if isinstance(value, types.ModuleType)}
    owners = {getattr(value, "__module__", None) for value in values if isinstance(value, (type, types.FunctionType))}
    return modules | {owner for owner in owners if isinstance(owner, str)}
