"""Markers of folders, which are objects but no files.

Consoles, Hadoop and rclone make an empty object `folder/` for a folder, and Azure one named `folder`. obstore lists all
of them without the final slash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence

from feedline.core.threads import DaemonPool
from feedline.stores.base import ObjectInfo

_HADOOP = "_$folder$"


def without_markers(
    infos: Sequence[ObjectInfo], is_object: Callable[[str], bool], folders: Collection[str] = ()
) -> list[ObjectInfo]:
    """Leave out markers of folders; `infos` are sorted by path.

    `folders` are known ones. Of other empty objects that may be markers, `is_object(path)` asks the store.
    """
    paths = [info.path for info in infos]
    doubtful = [path for path in (info.path for info in infos if not info.size) if not path.endswith("/")]
    markers = {path for path in doubtful if path in folders or path.endswith(_HADOOP) or _has_children(path, paths)}
    left = [path for path in doubtful if path not in markers]
    with DaemonPool() as pool:
        markers.update(path for path, there in zip(left, pool.map(is_object, left), strict=True) if not there)
    return [info for info in infos if info.path not in markers and not info.path.endswith("/")]


def _has_children(path: str, paths: Sequence[str]) -> bool:
    at = bisect_left(paths, f"{path}/")
    return at < len(paths) and paths[at].startswith(f"{path}/")
