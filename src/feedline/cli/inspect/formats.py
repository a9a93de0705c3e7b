"""Recognition of formats by file names and markers."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path, PurePosixPath

from feedline.datasets.formats import FORMATS, Format, register_installed
from feedline.errors import ArgumentError
from feedline.stores import AccessDeniedError, ObjectNotFoundError, Store, StoreError, open_store
from feedline.stores.urls import is_local, local_path, scheme_row

_MOST_NAMES = 1000
"""Most names in a folder that are examined."""


def format_of(sources: Sequence[str]) -> Format:
    """The common format of all sources; `ArgumentError` if there is none."""
    register_installed()
    found = {source: _format_of(source) for source in sources}
    if len({format_.label for format_ in found.values()}) > 1:
        each = ", ".join(f"{source} holds {format_.label}" for source, format_ in found.items())
        raise ArgumentError(f"{each}: inspect one format at a time")
    return next(iter(found.values()))


def _format_of(source: str) -> Format:
    path = Path(local_path(source))
    named = next((each for each in FORMATS.values() if each.matches(source.rstrip("/"))), None)
    if named is not None and (named.is_folder or not path.is_dir()):
        return named
    if is_local(source) and not path.exists():
        raise ArgumentError(f"{source} does not exist")
    if path.is_file():
        raise ArgumentError(f"{source} has no known format: {_list_formats()}")
    names = [*islice(_names(source), _MOST_NAMES)]
    found = _by_marker(source, names) or _by_names(names)
    if found is None:
        raise ArgumentError(f"{source} has no files of a known format: {_list_formats()}")
    return found


def _list_formats() -> str:
    patterns = {each.label: ", ".join(each.all_names or each.markers) for each in FORMATS.values()}
    return "known formats are " + ", ".join(f"{label} ({names})" for label, names in patterns.items() if names)


def _by_marker(source: str, names: Sequence[str]) -> Format | None:
    marked = [(each, marker) for each in FORMATS.values() for marker in each.markers if marker in names]
    return next((each for each, marker in marked if each.has_marker(_content(each, source, marker))), None)


def _content(format_: Format, source: str, name: str) -> bytes:
    """Contents of a marker file; empty if the format ignores them."""
    if format_.accepts is None:
        return b""
    if is_local(source):
        return Path(local_path(source), name).read_bytes()
    return bytes(open_store(source.rstrip("/")).read(name))


def _by_names(names: Sequence[str]) -> Format | None:
    """The format of highest precedence; among equals, of the first file."""
    formats = [each for each in FORMATS.values() if not each.named_only]
    found = [each for name in names for each in formats if each.matches(name) and not (each.top_only and "/" in name)]
    return max(found, key=lambda each: each.precedence, default=None)


def _names(source: str) -> Iterator[str]:
    """Paths of files in a folder; only markers without a listing."""
    if is_local(source):
        yield from _files(local_path(source))
        return
    store = open_store(source.rstrip("/"))
    if not scheme_row(source).lists:
        yield from _found_markers(store)
        return
    yield from (info.path for info in store.list())


def _markers() -> list[str]:
    return list(dict.fromkeys(marker for each in FORMATS.values() for marker in each.markers))


def _found_markers(store: Store) -> list[str]:
    """The markers in a folder of a store without listings.

    Raises the store's error if there is none.
    """
    found, failures = list[str](), list[StoreError]()
    for marker in _markers():
        try:
            store.info(marker)
        except (ObjectNotFoundError, AccessDeniedError) as error:  # some servers deny access to missing objects
            failures.append(error)
        else:
            found.append(marker)
    if not found:
        raise next((each for each in failures if isinstance(each, AccessDeniedError)), failures[0])
    return found


def _files(folder: str) -> Iterator[str]:
    markers = set(_markers())
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(each for each in folders if not each.startswith("."))
        inner = PurePosixPath(Path(place).relative_to(folder).as_posix())
        yield from (str(inner / name) for name in sorted(names) if not name.startswith(".") or name in markers)
