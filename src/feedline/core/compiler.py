"""feedline's code in functions that torch compiles."""

from __future__ import annotations

import sys
from pathlib import Path
from pkgutil import iter_modules

from feedline.core.optional import after_import

_TRACED = "transforms"
"""The one room whose code torch may compile: its operators for whole batches are torch's."""


def leave_to_python() -> None:
    """Let torch's compiler run feedline's code as plain Python.

    torch's own loader runs so in a compiled function with a loop over it; only what the dataset calls is compiled.
    Without this, feedline's functions would be compiled as well, and calls into the kernels can then fail. Does not
    import the compiler.
    """
    after_import("torch._dynamo.trace_rules", _skip_rooms)


def _skip_rooms() -> None:
    add = getattr(sys.modules["torch._dynamo.trace_rules"], "add", None)
    if add is None:
        return
    package = Path(__file__).parents[1]
    for room in iter_modules([str(package)]):
        if room.name != _TRACED:
            add(f"{package.name}.{room.name}")
