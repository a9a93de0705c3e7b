"""Modules that workers need, imported once for all loaders.

Only for workers that inherit nothing from the training process.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.machinery import ModuleSpec

SINGLE_THREADED = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Environment in which OpenMP, OpenBLAS and MKL start no threads when loaded, because a process with threads must not
fork.
"""


_PRESENT = {"__main__", "__mp_main__", "feedline", "numpy", "torch"} | sys.stdlib_module_names
"""Modules that need no import: those of a fork server, and scripts, which are pickled by value."""


Imports = Mapping[str, ModuleSpec]
"""Names and specs of modules to import.

A module that this process has reloaded since has another spec, and other code.
"""


def imports_of(names: Iterable[str]) -> Imports:
    """Modules of these names that a fork server has to import."""
    found = {}
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        if spec is not None and name.partition(".")[0] not in _PRESENT:
            found[name] = spec
    return found


class ImportRecord:
    """Modules that a branch of the fork server has imported."""

    def __init__(self) -> None:
        self._imported: dict[str, ModuleSpec] = {}

    def has(self, imports: Imports) -> bool:
        """True if all of these modules are recorded with the same specs."""
        return all(self._imported.get(name) is spec for name, spec in imports.items())

    def is_outdated(self, imports: Imports) -> bool:
        """True if one of the modules has been reloaded here since."""
        return any(self._imported.get(name, spec) is not spec for name, spec in imports.items())

    def add(self, imports: Imports) -> None:
        """Record an import."""
        self._imported.update(imports)

    def clear(self) -> None:
        """Forget all imports, for a new branch."""
        self._imported.clear()


def import_all(names: Iterable[str]) -> None:
    """Import modules before forks; skip those that fail.

    Freezes the garbage collector, and keeps numeric libraries single-threaded.
    """
    os.environ.update(SINGLE_THREADED)
    for name in sorted(names):
        # Who unpickles the dataset runs into the same error, and reports it.
        with suppress(Exception, SystemExit):
            import_module(name)
    gc.collect()
    gc.freeze()
