"""Settings of Python and common libraries that fresh processes take over."""

from __future__ import annotations

import decimal
import importlib
import locale
import logging
import multiprocessing
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data._utils.collate as torchs_collate

from feedline.core.definitions import module_of_code

_REGISTRY: dict[Any, Callable[..., Any]] = torchs_collate.default_collate_fn_map


class LibrarySettings(NamedTuple):
    """Settings that a script makes once for its whole process.

    Pickles with types of Python's own library only: it is unpickled before the user's modules can be imported.
    """

    recursion_limit: int
    locale: str
    decimal: decimal.Context
    log_levels: dict[str, int]
    numpy_errors: dict[str, Any]
    deterministic: bool
    deterministic_warns: bool
    grad: bool
    authkey: bytes
    pillow: dict[str, Any]

    @classmethod
    def capture(cls) -> LibrarySettings:
        """Capture the settings of this process and thread."""
        levels = {logger.name: logger.level for logger in _loggers()}
        deterministic, warns = _determinism()
        return cls(
            recursion_limit=sys.getrecursionlimit(),
            locale=locale.setlocale(locale.LC_ALL),
            decimal=decimal.getcontext().copy(),
            log_levels={name: level for name, level in levels.items() if level != logging.NOTSET},
            numpy_errors=dict(np.geterr()),
            deterministic=deterministic,
            deterministic_warns=warns,
            grad=torch.is_grad_enabled(),
            authkey=bytes(multiprocessing.current_process().authkey),
            pillow=_pillow_settings(),
        )

    def apply(self) -> None:
        """Make these the settings of the calling process."""
        with suppress(RecursionError):  # the limit is below the current depth
            sys.setrecursionlimit(self.recursion_limit)
        with suppress(locale.Error):
            locale.setlocale(locale.LC_ALL, self.locale)
        decimal.setcontext(self.decimal)
        # Also the defaults: this process may be forked from one that took over other settings.
        for name in {each.name for each in _loggers()} | set(self.log_levels):
            logger = logging.getLogger(None if name == "root" else name)
            logger.setLevel(self.log_levels.get(name, logging.NOTSET))
        np.seterr(**self.numpy_errors)
        if (self.deterministic, self.deterministic_warns) != _determinism():
            # Only then: torch imports its compiler with SymPy for this, which takes longer than to import torch.
            torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        torch.set_grad_enabled(self.grad)
        multiprocessing.current_process().authkey = self.authkey
        for place, default in _PILLOW_DEFAULTS.items():
            module, _, name = place.rpartition(".")
            if place in self.pillow or module in sys.modules:
                with suppress(ImportError):
                    setattr(importlib.import_module(module), name, self.pillow.get(place, default))


def _loggers() -> list[logging.Logger]:
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    return [logger for logger in loggers if isinstance(logger, logging.Logger)]


def _determinism() -> tuple[bool, bool]:
    """Two flags of torch: deterministic algorithms required, and warn only."""
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


_PILLOW_DEFAULTS = {"PIL.ImageFile.LOAD_TRUNCATED_IMAGES": False, "PIL.Image.MAX_IMAGE_PIXELS": 89478485}


def _pillow_settings() -> dict[str, Any]:
    """Changed settings of Pillow, if it is imported."""
    # Looked up and not imported: every start would wait for Pillow, also of those who do not use it.
    found = {}
    for place, default in _PILLOW_DEFAULTS.items():
        module, _, name = place.rpartition(".")
        value = getattr(sys.modules.get(module), name, default)
        if value != default:
            found[place] = value
    return found


def registered_collates() -> dict[Any, Callable[..., Any]]:
    """Functions that users have registered with torch's `default_collate`, by type."""
    own = torchs_collate.__name__
    return {kind: function for kind, function in _REGISTRY.items() if module_of_code(function) != own}


def register_collates(functions: dict[Any, Callable[..., Any]]) -> None:
    """Register collate functions with torch's `default_collate`."""
    _REGISTRY.update(functions)
