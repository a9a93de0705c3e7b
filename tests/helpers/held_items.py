"""A mapping whose items a shallow copy shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from typing import Any


class HeldItems(MutableMapping[str, Any]):
    """A mapping that keeps its items in another object."""

    def __init__(self, items: Any, holder: Callable[[Any], Any] = dict, name: str = "") -> None:
        self._items, self.name = holder(items), name

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)
