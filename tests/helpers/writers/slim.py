"""Packages without their `__init__`, which imports modules for training only."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType


def without_init(*names: str) -> None:
    """Make these packages of one library importable part by part."""
    spec = find_spec(names[0].partition(".")[0])
    assert spec is not None
    assert spec.submodule_search_locations is not None
    for name in names:
        package = ModuleType(name)
        package.__path__ = [str(Path(spec.submodule_search_locations[0]).joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
