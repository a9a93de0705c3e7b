"""Labels that identify loader, rank and run in published figures."""

from __future__ import annotations

import os
import socket
import sys
from secrets import token_hex
from typing import Any

from torch.utils.data import get_worker_info

from feedline.errors import ArgumentError
from feedline.loader.monitoring.resources import rank_and_world_size
from feedline.loader.plan import Plan

LOG_VARIABLE = "FEEDLINE_LOG"
"""Environment variable with the path of the run log of all loaders."""


_PROCESS = token_hex(6)
"""Name of this process and its forks: a restarted container has the same host and process id."""


_SETTINGS = "batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory", "in_order", "drop_last"


_OWN_SETTINGS = ("worker_method", "seed", "device")


def identity_of(loader: Any, plan: Plan, label: str) -> dict[str, Any]:
    """Label, rank, process and settings of a loader, as JSON values."""
    rank, world_size = _rank_of(loader, plan)
    return {
        "loader": label,
        "rank": rank,
        "world_size": world_size,
        "instance": token_hex(6),
        "process": _PROCESS,
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "script": os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "python",  # noqa: PTH119 - 7 times as fast
        "dataset": type(loader.dataset).__name__,
        "settings": _settings_of(loader),
    }


def _settings_of(loader: Any) -> dict[str, Any]:
    settings = {name: getattr(loader, name, None) for name in _SETTINGS}
    settings |= {name: getattr(loader._fl, name) for name in _OWN_SETTINGS}
    return {name: _plain(value) for name, value in settings.items()}


def log_path(loader: Any) -> str | os.PathLike[str] | None:
    """Path of the run log, if one is configured.

    None in worker processes.
    """
    if get_worker_info() is not None:
        return None
    return loader._fl.log if loader._fl.log is not None else os.environ.get(LOG_VARIABLE) or None


def _rank_of(loader: Any, plan: Plan) -> tuple[int, int]:
    """Rank and world size of the data, or else of the process."""
    if loader._fl_world_size > 1:
        return loader._fl_rank, loader._fl_world_size
    share = getattr(plan.schedule, "share", None)  # that of a DistributedSampler
    if share is not None and share.world_size > 1:
        return share.rank, share.world_size
    try:
        return rank_and_world_size("auto")
    except ArgumentError:  # variables of another program
        return 0, 1


_PLAIN = (str, int, float, bool)


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, _PLAIN) else str(value)
