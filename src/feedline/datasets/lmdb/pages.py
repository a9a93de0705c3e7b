"""A check of the pages of an LMDB file.

LMDB does not check its pages: with a damaged page, it may read outside of the memory map, which crashes the process.
Therefore, pages are checked before the library reads them. The check follows the tree of a database from its root,
level by level, and compares every header, node and reference with its bounds. It reads branch and leaf pages, but no
values: a read of each large value's first page would take minutes for a million images on a cold disk.

Numbers are little endian. A page begins with its number (8 bytes), 2 unused bytes, its type (2), and the ends of its
array of node offsets and of its free space (2 each). The first two pages are meta pages: after their header are a magic
number and version (4 each), address and size of the map (8 each), the records of the free list and of the main database
(48 each), the last page and the transaction (8 each).
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from feedline.core.kernels import Int64s

_MAGIC = 0xBEEFC0DE


_META = struct.Struct("<88x48sQQ")
"""The record of the main database, the last page, the transaction."""


_RECORD = struct.Struct("<IHHQQQQQ")
"""Size of fixed values, flags, depth; numbers of branch, leaf and large pages, and of entries; the root."""


_HEADER, _NODE = 16, 8


_BRANCH, _LEAF, _FIXED = 1, 2, 0x22
"""Types of pages. A page of the last type has values of one size, without nodes."""


_LISTS, _DIRTY = (0x42, 0x62), 0x10
"""Types of pages within a node, of nodes and of values of one size; and a flag that has no meaning in files."""


_IN_PAGES, _IS_RECORD, _HAS_SEVERAL = 1, 2, 4
"""Flags of nodes: a value in pages of its own; the record of another tree; several values."""


_SORTED_VALUES, _FIXED_VALUES = 4, 0x10
"""Flags of a database: keys may have several values; these have one size."""


_MAX_DEPTH = 32
"""The limit of LMDB itself."""


_PAGES_AT_ONCE = 4096
"""Number of pages checked by one call of NumPy's functions, which bounds the memory."""


_NO_ROOT = 2**64 - 1


_NO_PAGES: Int64s = np.empty(0, np.int64)


class Tree(NamedTuple):
    """The tree of one database, or of the values of one key."""

    root: int
    has_several: bool
    """True if keys may have several values."""
    fixed_nbytes: int
    """The size of the values of pages without nodes."""


class MainTree(NamedTuple):
    """The tree of the main database, and the last page of all."""

    tree: Tree | None
    """None if the database is empty."""
    last_page: int


class DamageError(Exception):
    """A page is damaged. Internal to the check."""


class Pages:
    """The pages of a mapped file, up to the number `last`."""

    def __init__(self, data: memoryview, page_nbytes: int, last: int) -> None:
        self._bytes: NDArray[np.uint8] = np.frombuffer(data, np.uint8)[: page_nbytes * (last + 1)]
        self._halves = self._bytes.view("<u2")
        self._page_nbytes, self._last = page_nbytes, last

    def check(self, tree: Tree) -> None:
        """Raise DamageError unless all references of a tree stay within its pages."""
        self._need(tree.root <= self._last, "leads astray")
        pages, seen = np.array([tree.root], np.int64), 0
        for _ in range(_MAX_DEPTH):
            if not len(pages):
                return
            seen += len(pages)
            self._need(bool((pages > 1).all() and (pages <= self._last).all()) and seen <= self._last, "leads astray")
            parts = (pages[first : first + _PAGES_AT_ONCE] for first in range(0, len(pages), _PAGES_AT_ONCE))
            pages = np.concatenate([self._children(part, tree) for part in parts])
        raise DamageError("the tree of pages has no end")

    def _children(self, pages: Int64s, tree: Tree) -> Int64s:
        """Check pages of one level; returns the pages to which they refer."""
        starts = pages * self._page_nbytes
        kinds, sizes = self._number(starts + 10), np.full(len(starts), self._page_nbytes)
        kind = int(kinds[0])
        self._need(np.isin(kinds, (_BRANCH, _LEAF, _FIXED)) & (kinds == kind), "has a wrong type")
        self._need(self._number(starts, 4) == pages, "has another number")
        if kind == _FIXED:
            self._check_fixed(starts, sizes, np.full(len(starts), tree.fixed_nbytes))
            return _NO_PAGES
        nodes, stops = self._nodes(starts, sizes, 2 if kind == _BRANCH else 1)
        if kind == _BRANCH:
            low, high, highest = (self._number(nodes + at) for at in (0, 2, 4))
            children: Int64s = low + (high << 16) + (highest << 32)
            return children
        self._check_values(nodes, stops, tree)
        return _NO_PAGES

    def _nodes(self, starts: Int64s, sizes: Int64s, least: int) -> tuple[Int64s, Int64s]:
        """Places of all nodes, and the end of each page."""
        counts, upper = self._counts(starts, sizes)
        self._need(counts >= least, "has too few nodes")
        page_starts = np.repeat(starts, counts)
        rows = np.arange(len(page_starts)) - np.repeat(np.cumsum(counts) - counts, counts)
        places, stops = self._number(page_starts + _HEADER + 2 * rows), np.repeat(sizes, counts)
        inside = (places >= np.repeat(upper, counts)) & (places + _NODE <= stops) & (places % 2 == 0)
        self._need(inside, "has a node out of bounds")
        self._need(places + _NODE + self._number(page_starts + places + 6) <= stops, "has a key out of bounds")
        return page_starts + places, page_starts + stops

    def _counts(self, starts: Int64s, sizes: Int64s) -> tuple[Int64s, Int64s]:
        """Number of nodes of each page, and start of its nodes."""
        lower, upper = self._number(starts + 12), self._number(starts + 14)
        self._need((lower >= _HEADER) & (lower <= upper) & (upper <= sizes), "has wrong bounds")
        return (lower - _HEADER) // 2, upper

    def _check_values(self, nodes: Int64s, stops: Int64s, tree: Tree) -> None:
        low, high, flags, key = (self._number(nodes + at) for at in (0, 2, 4, 6))
        starts, nbytes, is_large = nodes + _NODE + key, low + (high << 16), flags == _IN_PAGES
        several = (_HAS_SEVERAL, _HAS_SEVERAL | _IS_RECORD) if tree.has_several else ()
        self._need(np.isin(flags, (0, _IN_PAGES, _IS_RECORD, *several)), "has a value of an unknown kind")
        self._need(starts + np.where(is_large, 8, nbytes) <= stops, "has a value out of bounds")
        self._need((flags & _IS_RECORD == 0) | (nbytes == _RECORD.size), "has a damaged record of a database")
        self._check_large(self._number(starts[is_large], 4), nbytes[is_large])
        self._check_lists(starts[flags == _HAS_SEVERAL], nbytes[flags == _HAS_SEVERAL])
        for start in starts[flags == _HAS_SEVERAL | _IS_RECORD].tolist():
            values = tree_of(self._bytes[start : start + _RECORD.size].tobytes())
            if values is not None:
                self.check(values)

    def _check_large(self, pages: Int64s, nbytes: Int64s) -> None:
        """Check the bounds of large values.

        They begin after the header of a page.
        """
        count = -(-(_HEADER + nbytes) // self._page_nbytes)
        self._need((pages > 1) & (pages + count - 1 <= self._last), "refers to a large value out of bounds")

    def _check_lists(self, starts: Int64s, sizes: Int64s) -> None:
        """Check pages within nodes, which hold the values of one key."""
        self._need(sizes >= _HEADER, "has a list of values out of bounds")
        kinds = self._number(starts + 10) & ~_DIRTY
        self._need(np.isin(kinds, _LISTS), "has a list of values of a wrong type")
        is_fixed = kinds == _LISTS[1]
        self._nodes(starts[~is_fixed], sizes[~is_fixed], 1)
        self._check_fixed(starts[is_fixed], sizes[is_fixed], self._number(starts[is_fixed] + 8))

    def _check_fixed(self, starts: Int64s, sizes: Int64s, each: Int64s) -> None:
        counts, _ = self._counts(starts, sizes)
        self._need((counts > 0) & (_HEADER + counts * each <= sizes), "has values out of bounds")

    def _number(self, places: Int64s, halves: int = 1) -> Int64s:
        """The numbers at these places, of `halves` times two bytes."""
        number = np.zeros(len(places), np.int64)
        for at in range(halves):
            number |= self._half(places + 2 * at) << 16 * at
        return number

    def _half(self, places: Int64s) -> Int64s:
        if not (places & 1).any():
            return self._halves[places // 2].astype(np.int64)
        return self._bytes[places] | self._bytes[places + 1].astype(np.int64) << 8

    def _need(self, holds: Any, what: str) -> None:
        if not np.all(holds):
            raise DamageError(f"a page {what}")


def page_nbytes(head: bytes) -> int:
    """The page size by the first bytes; DamageError for no LMDB file."""
    nbytes = int.from_bytes(head[40:44], "little")
    if head[16:20] != _MAGIC.to_bytes(4, "little") or nbytes not in (1 << bits for bits in range(8, 17)):
        raise DamageError("its first page is not that of an LMDB file (MDB_INVALID)")
    return nbytes


def main_tree(data: memoryview, page_nbytes: int) -> MainTree:
    """The main database of the latest transaction."""
    metas = (_META.unpack(data[start : start + _META.size]) for start in (0, page_nbytes))
    record, last, _ = max(metas, key=lambda meta: int(meta[2]))
    return MainTree(tree_of(record), last)


def tree_of(record: bytes) -> Tree | None:
    """The tree of a database by its record; None without pages."""
    nbytes, flags, _, _, _, _, _, root = _RECORD.unpack(record)
    if root == _NO_ROOT:
        return None
    return Tree(root, bool(flags & _SORTED_VALUES), nbytes if flags & _FIXED_VALUES else 0)
