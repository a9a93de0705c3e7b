"""Patterns of addresses: braces expanded offline, globs by one listing."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from glob import glob
from itertools import product
from math import prod
from pathlib import Path

from feedline.core.paths import Pathlike
from feedline.errors import ArgumentError, ObjectNotFoundError
from feedline.stores.base import FolderLister, ObjectInfo, Store
from feedline.stores.cache import cache_of, without_cache
from feedline.stores.urls import check_no_secrets, is_local, join, local_path, scheme_row, split, split_query

_BRACES = re.compile(r"\{([^{}]*)\}")


_NUMBERS = re.compile(r"(\d+)\.\.(\d+)(?:\.\.-?(\d+))?")


_BRACE = re.compile(r"[{}]")


MAGIC = re.compile(r"[*?\[]")


_GROUP = re.compile(r"\[(!?)([^]/]+)\]")


_MOST_PATHS = 10_000_000


def braces(pattern: str) -> list[str]:
    """Expand the braces of a pattern as a shell does.

    `a{0..2}.tar` is a0.tar, a1.tar, a2.tar; `{train,val}` are both; `{0..10..5}` has steps of 5, and `{3..1}` counts
    down. A leading zero gives all numbers the width of the longer one. ArgumentError for other braces.
    """
    parts = _BRACES.split(pattern)
    if _BRACE.search("".join(parts[::2])):
        raise ArgumentError(f"{pattern}: braces must be closed, and cannot be nested")
    choices = [_choices(part, pattern) if at % 2 else [part] for at, part in enumerate(parts)]
    if prod(map(len, choices)) > _MOST_PATHS:
        raise ArgumentError(f"{pattern} stands for more than {_MOST_PATHS:,} names; pass several patterns")
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
    if step == 0 or abs(last - first) // step >= _MOST_PATHS:
        raise ArgumentError(
            f"{pattern}: {{{inner}}} has no end, or stands for more than {_MOST_PATHS:,} names; give a step other than "
            "0, or a shorter range"
        )
    count = abs(last - first) // step + 1
    return [f"{first + (step if last >= first else -step) * n:0{width}}" for n in range(count)]


def expand_braces(path: str, exists: Callable[[str], bool] = os.path.exists) -> list[str]:
    """Expand a local path with braces, unless it exists as written.

    Braces in the name of an existing folder are not expanded, either: `run{1}/{0..2}.tar` are three files in `run{1}`
    if that exists.
    """
    if not _BRACE.search(path) or exists(path):
        return [path]
    try:
        return braces(path)
    except ArgumentError:
        named = [folder for folder in Path(path).parents if _BRACE.search(str(folder)) and exists(str(folder))]
        if not named:
            raise
        return [str(named[0] / each) for each in braces(str(Path(path).relative_to(named[0])))]


def expand(patterns: Pathlike | Sequence[Pathlike], open_store: Callable[[str], Store]) -> list[str]:
    """Expand one or several patterns into addresses, in order.

    The matches of one glob are sorted. Only `*`, `**`, `?` and `[...]` query the store, once each. ObjectNotFoundError
    names a glob that matches nothing. A file or object whose name looks like a glob is found by that name.
    """
    addresses: list[str] = []
    for address in [patterns] if isinstance(patterns, (str, os.PathLike)) else patterns:
        pattern = os.fspath(address)
        if is_local(pattern):
            for path in expand_braces(local_path(pattern)):
                addresses += _files(path) if MAGIC.search(path) and not Path(path).exists() else [path]
        else:
            check_no_secrets(pattern, is_object=True)
            for plain in expand_address(pattern):
                is_glob = MAGIC.search(split_query(plain)[0])
                addresses += _objects(plain, open_store) if is_glob else [plain]
    return addresses


def expand_address(pattern: str) -> list[str]:
    """Expand the braces of an address, but not those in its query."""
    plain, query = split_query(pattern)
    return [each + query for each in braces(plain)]


def _files(pattern: str) -> list[str]:
    names = [name for name in glob(pattern, recursive=True) if Path(name).is_file()]  # noqa: PTH207
    return _sort_matches(names, pattern)


def _objects(pattern: str, open_store: Callable[[str], Store]) -> list[str]:
    root, path = split(pattern)
    infos = matching_objects(open_store(root), path, matcher(path))
    return _sort_matches([join(root, info.path) for info in infos], pattern)


def matching_objects(store: Store, pattern: str, matches: Callable[[str], bool]) -> list[ObjectInfo]:
    """The object of exactly that name, or else the matching objects.

    As for local paths, `img[1].txt` is first tried as a name, then as a pattern.
    """
    if not scheme_row(store.url).lists:
        with suppress(ObjectNotFoundError):
            return [store.info(pattern)]
    found = []
    for info in candidates(store, pattern):
        if info.path == pattern and not pattern.endswith("/"):
            return [info]
        if matches(info.path):
            found.append(info)
    return found


def candidates(store: Store, pattern: str, below: str = "") -> Iterable[ObjectInfo]:
    """List objects that include all matches of a glob below a folder.

    For a glob that stays within one folder, only that folder is listed, if the store can. `below` is not a pattern.
    """
    folder, slash, name = pattern.rpartition("/")
    bare = without_cache(store)
    if MAGIC.search(folder) or "**" in name or not isinstance(bare, FolderLister):
        return store.list(below + MAGIC.split(pattern, maxsplit=1)[0])
    infos = bare.list_folder(below + folder + slash)
    if (cache := cache_of(store)) is not None:
        for info in infos:
            cache.record_info(info)
    return infos


_SHORT_FORMS = frozenset({"tgz", "tzst", "tbz2", "txz"})
"""Endings of compressed tars that do not begin with the ending of the plain form."""


def first_forms(paths: Iterable[str], pattern: str) -> list[str]:
    """Matches of a pattern that ends with braces, each in one form.

    If both `a.txt` and `a.txt.gz` match `*.txt{,.gz}`, the file whose ending is first in the braces is used. Endings
    that do not begin with the first one, as in `*.{h5,hdf5}`, name other files.
    """
    if not pattern.endswith("}"):
        return list(paths)
    endings = pattern[pattern.rindex("{") + 1 : -1].split(",")
    ranks = {
        ending: rank for rank, ending in enumerate(endings) if ending.startswith(endings[0]) or ending in _SHORT_FORMS
    }
    found = dict[str, tuple[int, str]]()
    for path in paths:
        ending = max((each for each in ranks if path.endswith(each)), key=len, default="")
        stem, form = path.removesuffix(ending), (ranks.get(ending, 0), path)
        found[stem] = min(found.get(stem, form), form)
    return [path for _, path in found.values()]


def _sort_matches(names: list[str], pattern: str) -> list[str]:
    if not names:
        raise ObjectNotFoundError(f"{pattern}: nothing matches")
    return sorted(names)


def matcher(pattern: str) -> Callable[[str], bool]:
    """A predicate for the paths of objects that match a glob.

    Markers of folders, which end with `/`, never match, and leading dots only explicitly, as in a shell: indexes are
    hidden files.
    """
    matches, hidden = glob_regex(pattern).fullmatch, "/." in f"/{pattern}"
    return lambda path: not path.endswith("/") and bool(matches(path)) and (hidden or "/." not in f"/{path}")


def glob_regex(pattern: str) -> re.Pattern[str]:
    """Translate a glob into a regular expression.

    `*`, `?` and `[...]` stay within one part of a path, `**/` is any number of parts.
    """
    out, at = [], 0
    while at < len(pattern):
        if pattern.startswith("**/", at):
            out.append("(?:[^/]*/)*")  # empty parts, too: keys of S3 may have them
            at += 3
        elif pattern.startswith("**", at):
            out.append(".*")
            at += 2
        elif (group := _GROUP.match(pattern, at)) is not None:
            out.append(f"(?!/)[{'^' if group[1] else ''}{_character_set(group[2])}]")
            at = group.end()
        else:
            out.append({"*": "[^/]*", "?": "[^/]"}.get(pattern[at], re.escape(pattern[at])))
            at += 1
    try:
        return re.compile("".join(out), re.DOTALL)
    except re.error as error:  # [b-a]
        raise ArgumentError(f"{pattern!r} is not a valid pattern: {error}") from None


def _character_set(inner: str) -> str:
    """Escape the inside of a bracket expression, except its ranges."""
    out, at = [], 0
    while at < len(inner):
        is_range = inner[at + 1 : at + 2] == "-" and at + 2 < len(inner)
        out.append("-".join(map(re.escape, inner[at : at + 3 : 2])) if is_range else re.escape(inner[at]))
        at += 3 if is_range else 1
    return "".join(out)
