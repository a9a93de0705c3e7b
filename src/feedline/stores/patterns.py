"""Many addresses written as one: braces without asking anybody, `*` by one listing."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from glob import glob
from itertools import product
from os import PathLike, fspath
from pathlib import Path

from feedline.errors import ArgumentError
from feedline.stores.addresses import Address, join, scheme_of, split
from feedline.stores.problems import ObjectNotFoundError
from feedline.stores.protocol import Store

_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERS = re.compile(r"(\d+)\.\.(\d+)(?:\.\.(\d+))?")
MAGIC = re.compile(r"[*?\[]")
_GROUP = re.compile(r"\[(!?)([^]/]+)\]")
_MOST = 10_000_000


def braces(pattern: str) -> list[str]:
    """`a{0..2}.tar` is a0.tar, a1.tar, a2.tar; `{train,val}` are both; leading zeros give all numbers that width."""
    parts = _BRACES.split(pattern)
    if "{" in "".join(parts[::2]) or "}" in "".join(parts[::2]):
        raise ArgumentError(f"{pattern}: braces must be closed, and may not hold others")
    choices = [_choices(part, pattern) if at % 2 else [part] for at, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


def _choices(inner: str, pattern: str) -> list[str]:
    numbers = _NUMBERS.fullmatch(inner)
    if numbers is None:
        if "," not in inner:
            raise ArgumentError(f"{pattern}: {{{inner}}} is neither a range such as {{000..127}} nor a list {{a,b}}")
        return inner.split(",")
    first, last, step = int(numbers[1]), int(numbers[2]), int(numbers[3] or 1)
    padded = any(len(number) > 1 and number.startswith("0") for number in numbers.groups()[:2])
    width = max(len(numbers[1]), len(numbers[2])) if padded else 0
    if step == 0 or abs(last - first) // step >= _MOST:
        raise ArgumentError(f"{pattern}: {{{inner}}} has no end, or stands for more than {_MOST:,} names")
    count = abs(last - first) // step + 1
    return [f"{first + (step if last >= first else -step) * n:0{width}}" for n in range(count)]


def expand(patterns: Address | Sequence[Address], open_store: Callable[[str], Store]) -> list[str]:
    """The addresses that one pattern, or several, stand for, in the order given; those of one glob are sorted.

    Only `*`, `**`, `?` and `[...]` ask the store, once each. ObjectNotFoundError names a glob that matches nothing.
    A local file whose own name looks like a pattern is that file.
    """
    listed: Sequence[Address] = [patterns] if isinstance(patterns, (str, PathLike)) else patterns
    found: list[str] = []
    for address in listed:
        pattern = fspath(address)
        local = pattern.removeprefix("file://") if scheme_of(pattern) == "file" else None
        if local is not None and Path(local).exists():
            found.append(local)
            continue
        for plain in braces(pattern):
            found.extend(_globbed(plain, open_store) if MAGIC.search(plain) else [plain])
    return found


def _globbed(pattern: str, open_store: Callable[[str], Store]) -> list[str]:
    if scheme_of(pattern) == "file":
        path = pattern.removeprefix("file://")
        names = [name for name in glob(path, recursive=True, include_hidden=True) if Path(name).is_file()]  # noqa: PTH207
    else:
        root, path = split(pattern)
        fixed, matches = MAGIC.split(path, maxsplit=1)[0], translated(path).fullmatch
        names = [join(root, info.path) for info in open_store(root).list(fixed) if matches(info.path)]
    if not names:
        raise ObjectNotFoundError(f"{pattern}: nothing matches")
    return sorted(names)


def translated(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: `*` and `?` stay within one part of a path, `**/` is any number of parts."""
    out, at = [], 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out.append("(?:[^/]+/)*")
            at += 3
        elif pattern.startswith("**", at):
            out.append(".*")
            at += 2
        elif (group := _GROUP.match(pattern, at)) is not None:
            out.append(f"[{'^' if group[1] else ''}{group[2].replace(chr(92), chr(92) * 2)}]")
            at = group.end()
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(pattern[at], re.escape(pattern[at])))
            at += 1
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error as error:  # [b-a]
        raise ArgumentError(f"{pattern!r} is no pattern: {error}") from None
