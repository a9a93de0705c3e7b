"""Optional dependencies: loaded when first needed, and named with their pip command when they are not there."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from feedline.errors import MissingExtraError


def load(module: str, extra: str, what: str) -> Any:
    """The module of an optional dependency; MissingExtraError says that `what` needs it and how to install it.

    `extra` is the name in `pip install 'feedline[extra]'`. A package that is there but fails to import (a build for
    another platform, say) is told apart from one that is missing, with its own error as the cause.
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
