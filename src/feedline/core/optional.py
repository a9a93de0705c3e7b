"""Import of optional dependencies on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from feedline.errors import MissingExtraError


def load(module: str, extra: str, what: str) -> Any:
    """Import a module of an optional dependency.

    MissingExtraError names the pip command and `what`, the feature that needs the module; `extra` is the name in `pip
    install 'feedline[extra]'`. A package that is installed but fails to import, such as a build for another platform,
    has a message of its own, with the error as its cause.
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


def load_standard(module: str, what: str) -> Any:
    """Import a standard module that some builds of Python lack.

    Python is built without modules whose library is missing, such as `lzma`. MissingExtraError names `what`.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingExtraError(
            f"{what} needs Python's module {module}, which this build of Python lacks ({error}): use a Python that has"
            " it, or decompress the file"
        ) from None


def after_import(module: str, act: Callable[[], object]) -> None:
    """Call `act` once `module` has been imported: now, or later.

    The call does not import the module. If another module is imported before the import of this one has ended, `act` is
    called at the first import after that.
    """
    if _is_imported(module):
        act()
    else:
        sys.meta_path.insert(0, _ImportWatcher(module, act))


def _is_imported(module: str) -> bool:
    """True if the import of a module has ended."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return module in sys.modules and not getattr(spec, "_initializing", False)


class _ImportWatcher(MetaPathFinder):
    """Finder that acts after the import of one module."""

    def __init__(self, module: str, act: Callable[[], object]) -> None:
        self._module, self._act = module, act

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002 - the protocol
        target: ModuleType | None = None,  # noqa: ARG002 - the protocol
    ) -> ModuleSpec | None:
        """The spec of the watched module, with a loader that acts."""
        if self in sys.meta_path and _is_imported(self._module):
            sys.meta_path.remove(self)
            self._act()
            return None
        if fullname != self._module or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is None:
            sys.meta_path.insert(0, self)  # it may be found later
        elif spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._act()

            setattr(spec.loader, "exec_module", exec_module)  # noqa: B010 - a method of this one loader
        return spec
