"""An environment without Google credentials."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def without_credentials(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    """Google's variables are unset, and the home folder is empty."""
    for name in os.environ:
        if name.startswith(("GOOGLE_", "STORAGE_EMULATOR_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
