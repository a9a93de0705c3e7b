"""Packs a folder, and kills itself with SIGKILL at a chosen moment; run by `test_pack_kill.py`.

Usage: pack_until.py SOURCE DEST MOMENT COUNT. MOMENT is a function of the operating system, and COUNT the
number of the call at which the process dies.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from feedline.cli.pack import PackOptions, ShardSize, pack
from feedline.core import paths

MOMENTS: dict[str, tuple[Any, str]] = {
    "replace": (Path, "replace"),
    "fsync": (os, "fsync"),
    "unlink": (Path, "unlink"),
    "open": (paths, "open"),
}


def dying(call: Callable[..., Any], count: int) -> Callable[..., Any]:
    """`call`, until call number `count`, which kills the process."""
    calls = 0

    def called(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments, **named)

    return called


def main(source: str, folder: str, moment: str, count: int) -> None:
    if moment == "samples":

        def report(reported: Any) -> None:
            if reported.done >= count:
                os.kill(os.getpid(), signal.SIGKILL)
    else:

        def report(reported: Any) -> None:
            pass

        owner, name = MOMENTS[moment]
        setattr(owner, name, dying(getattr(owner, name, open), count))
    pack([source], Path(folder), PackOptions(shard_size=ShardSize(samples=7), grid=True), 2, report)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
