"""Google Cloud Storage, where obstore's names and needs differ from those of the other stores."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any


def settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """What obstore is opened with: the server by its name `base_url`, be it an `endpoint` or Google's emulator."""
    own = {_name(option): value for option, value in config.items()}
    server = own.pop("endpoint", None) or own.get("base_url") or os.environ.get("GOOGLE_BASE_URL")
    emulator = os.environ.get("STORAGE_EMULATOR_HOST")
    if emulator and not server:  # HOST:PORT or an address, and no credentials: as Google's own libraries do
        server = emulator if "://" in emulator else f"http://{emulator}"
        own = {"skip_signature": True, **own}
    return {**own, "base_url": str(server).rstrip("/")} if server else own


def _name(option: str) -> str:
    return option.lower().removeprefix("google_")
