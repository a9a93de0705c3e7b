"""Import of optional dependencies on first use."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from feedline.errors import MissingExtraError


def load(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional dependency.

    MissingExtraError names `what`, which needs it, and the pip command; `extra` is the name in `pip install
    'feedline[extra]'`. A package that is installed but fails to import (a build for another platform, say) has a
    message of its own, with the error as its cause.
    """
    try:
        return import_module(module)
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == module.partition(".")[0]:
            raise MissingExtraError(
                f"{what} needs {module}, which is not installed: pip install 'feedline[{extra}]'"
            ) from None
        raise MissingExtraError(
            f"{what} needs {module}, which is installed but cannot be imported ({type(error).__name__}: {error});"
            f" reinstall it: pip install --force-reinstall 'feedline[{extra}]'"
        ) from error
