"""Scripts in forks whose new memory is filled with another byte than 0: memory that is not written shows."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import sys
from pathlib import Path

from preloaded import Preloaded

M_PERTURB = -6


def printed_by(preloaded: Preloaded, folder: Path, script: Path, *arguments: str) -> str:
    """What a script prints, run in `folder`; an error or a crash fails the test."""
    log = folder / "output.log"
    with open(os.devnull) as nothing, log.open("w") as output:
        streams = {"stdin": nothing.fileno(), "stdout": output.fileno(), "stderr": output.fileno()}
        running = preloaded.start(__file__, str(script), *arguments, **streams, cwd=folder)
    try:
        code = running.wait(280.0)
    finally:
        running.kill()
    printed = log.read_text()
    assert code == 0, printed[-4000:]
    return printed


if __name__ == "__main__":
    faulthandler.enable()
    assert ctypes.CDLL(None).mallopt(M_PERTURB, 165) == 1
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
