"""Replacement of torch's DataLoader in a whole process."""

from __future__ import annotations

import gc
import sys
import warnings
from types import ModuleType
from typing import Self

from torch.utils.data import DataLoader as TorchDataLoader

from feedline.loader.dataloader import DataLoader


class patch_torch:  # noqa: N801 - a function that is a context manager, too
    """Replace `torch.utils.data.DataLoader` by feedline's class in every loaded module.

    For frameworks that build loaders themselves, such as Accelerate. Call it before or after their import. It returns
    an object whose `undo()` restores torch's class; a `with` block does so at its end. Existing loaders and subclasses
    are not changed, and no `isinstance` recognizes them while torch's class is replaced: a warning counts such loaders.
    torchdata's StatefulDataLoader is not changed either, whenever it is imported.
    """

    def __init__(self) -> None:
        if count := _count_torchs():
            warnings.warn(
                f"loaders of torch's class exist already ({count}). Frameworks no longer recognize them as loaders, and"
                " Accelerate's prepare() returns them as they are, neither shared nor moved: call"
                " feedline.patch_torch() before you create loaders",
                stacklevel=2,
            )
        self._replaced = list(_references(TorchDataLoader))
        for module, name in self._replaced:
            setattr(module, name, DataLoader)

    def undo(self) -> None:
        """Restore torch's class. Idempotent."""
        while self._replaced:
            module, name = self._replaced.pop()
            setattr(module, name, TorchDataLoader)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()


def _count_torchs() -> int:
    """Number of loaders in use whose class is not feedline's."""
    if not any(map(_is_torchs, gc.get_objects())):
        return 0
    gc.collect()  # those that nothing refers to do not count
    return sum(map(_is_torchs, gc.get_objects()))


def _is_torchs(thing: object) -> bool:
    return issubclass(type(thing), TorchDataLoader) and not issubclass(type(thing), DataLoader)


def _references(cls: type) -> list[tuple[ModuleType, str]]:
    found = []
    for module_name, module in list(sys.modules.items()):
        if _is_patched(module_name):
            found += [(module, name) for name, value in list(getattr(module, "__dict__", {}).items()) if value is cls]
    return found


def _is_patched(module: str) -> bool:
    root = module.partition(".")[0]
    if root == "torch":
        return module in {"torch.utils.data", "torch.utils.data.dataloader"}
    return root not in {"feedline", "torchdata"}
