"""The folder of this user that holds what can be made again: indexes, descriptions, decompressed shards."""

from __future__ import annotations

import os


def user_cache(*names: str) -> str:
    """The place with these names in `~/.cache/feedline`, or below `XDG_CACHE_HOME`; it may not be there yet."""
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111 - for thousands of shards
    return os.path.join(root, "feedline", *names)  # noqa: PTH118 - as above
