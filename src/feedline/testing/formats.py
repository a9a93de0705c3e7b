"""Conformance checks of formats, on this machine and in stores."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from feedline.core.store_metrics import statistics
from feedline.core.torch_wrappers import batch_getter, ranges_of
from feedline.errors import ObjectChangedError, SampleError
from feedline.stores.base import ObjectInfo, Store
from feedline.stores.cache import Cache
from feedline.stores.local import LocalStore
from feedline.stores.schemes import Scheme, StorePolicy, register_scheme, unregister_scheme
from feedline.testing.datasets import check_dataset, samples_at_once, samples_of
from feedline.testing.difference import check_same

_SCHEME = "feedline-check"
"""Scheme of addresses whose host is the name of a temporary folder."""


_PIECE_NBYTES = 1000


def check_format(
    open_dataset: Callable[..., Any],
    files: Mapping[str, bytes],
    *,
    collate_fn: Callable[[Any], Any] | None = None,
    checks_length: bool = True,
) -> None:
    """Raise `AssertionError` for the first promise that a format breaks.

    `open_dataset` is the class of the dataset, or a function. It is called as `open_dataset(root, index_dir=...)`, in
    some calls with `cache=`, and opens the files below the folder or address `root`. `files` are the contents of small
    files by path, with some samples each. `collate_fn` is passed to loaders. With `checks_length=False`, a format need
    not notice a truncated file.

    The function checks that:

    - the dataset passes `check_dataset` for files on this machine, and for the same files in a store;
    - both datasets give the same samples;
    - `shard_sizes` add up to the length, and `address` names a file;
    - `ranges` name all data that are read from a store with a cache, and are empty for files on this machine;
    - a changed object raises `ObjectChangedError`, an address without objects `FileNotFoundError`, and a truncated file
      `SampleError`, each with the name.
    """
    with _places(files) as places:
        near, far = (open_dataset(root, index_dir=places.index_dir) for root in (places.near, places.far))
        expected = _samples(near)
        check_dataset(near, collate_fn=collate_fn)
        _check_shards(near, places.near)
        assert not _ranges(near), "ranges must be empty for files of this machine: there is nothing to fetch"
        check_same(expected, _samples(far), "files in a store must give the same samples as files of this machine")
        check_dataset(far, collate_fn=collate_fn)
        _check_shards(far, places.far)
        cached = open_dataset(places.far, index_dir=places.index_dir, cache=places.cache)
        _check_ranges(cached, expected)
        if checks_length:
            _check_cuts(open_dataset, files, places)
        _check_changes(open_dataset, far, files, places)


class _CheckFolders:
    """Folders of a check."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.near, self.far = str(folder / "near"), f"{_SCHEME}://{folder.name}"
        self.index_dir, self.cache = folder / "indexes", Cache(folder / "cache", piece_nbytes=_PIECE_NBYTES)

    def write(self, place: str, files: Mapping[str, bytes]) -> None:
        for name, data in files.items():
            path = self.folder / place / name
            path.parent.mkdir(parents=True, exist_ok=True)
            written = self.folder / "written"
            written.write_bytes(data)
            written.replace(path)  # a mapped file must not be truncated


@contextmanager
def _places(files: Mapping[str, bytes]) -> Iterator[_CheckFolders]:
    with tempfile.TemporaryDirectory(prefix="feedline-check-") as folder:
        places = _CheckFolders(Path(folder))
        places.index_dir.mkdir()
        for place in ("near", "far"):
            places.write(place, files)
        register_scheme(_SCHEME, Scheme(_open_folder))
        try:
            yield places
        finally:
            unregister_scheme(_SCHEME)


class _FolderStore:
    """The files of a folder as objects of a store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files = LocalStore(str(Path(tempfile.gettempdir(), url.partition("://")[2], "far")))

    def info(self, path: str) -> ObjectInfo:
        return self._files.info(path)

    def size(self, path: str) -> int:
        return self._files.size(path)

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        return self._files.read(path, start, stop, version=version)

    def read_many(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> list[memoryview]:
        return self._files.read_many(path, ranges, version=version)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._files.list(prefix)


def _open_folder(url: str, options: object, policy: StorePolicy) -> Store:  # noqa: ARG001 - of the protocol
    return _FolderStore(url)


def _samples(dataset: Any) -> list[Any]:
    return samples_of(dataset, np.arange(len(dataset)))


def _check_shards(dataset: Any, root: str) -> None:
    sizes = getattr(dataset, "shard_sizes", None)
    total = len(dataset) if sizes is None else int(np.sum(sizes))
    assert total == len(dataset), f"shard_sizes must add up to {len(dataset)} samples, not {total}"
    if hasattr(dataset, "address"):
        file, _ = dataset.address(len(dataset) - 1)
        assert str(file).startswith(root), f"address must name a file below {root}, not {file}"


def _ranges(dataset: Any) -> list[Any]:
    named = ranges_of(dataset)
    return [] if named is None else list(named(np.arange(len(dataset))))


def _check_ranges(dataset: Any, expected: list[Any]) -> None:
    dataset[0]  # headers may be read with the first sample
    wanted = _ranges(dataset)
    assert wanted, "ranges must name the data read from a store with a cache, so that loaders can prefetch them"
    for store, (path, start, stop) in wanted:
        store.fetch_range(path, start, stop)
    before = statistics().cache_misses
    read = samples_of if batch_getter(dataset) is None else samples_at_once
    check_same(expected, read(dataset, np.arange(len(dataset))), "a cache must not change samples")
    assert statistics().cache_misses == before, "ranges must name all data that are read, but more were fetched"


def _check_cuts(open_dataset: Callable[..., Any], files: Mapping[str, bytes], places: _CheckFolders) -> None:
    name = max(files, key=lambda name: len(files[name]))
    places.write("cut", {**files, name: files[name][:-1]})
    root = str(places.folder / "cut")
    _check_raises(
        SampleError, lambda: _samples(open_dataset(root, index_dir=places.index_dir)), [name], "a truncated file"
    )


def _check_changes(
    open_dataset: Callable[..., Any], dataset: Any, files: Mapping[str, bytes], places: _CheckFolders
) -> None:
    places.write("far", {name: data + b"more" for name, data in files.items()})
    _check_raises(ObjectChangedError, lambda: _samples(dataset), [*files], "an object that changed")
    for name in files:
        (places.folder / "far" / name).unlink()
    _check_raises(
        FileNotFoundError,
        lambda: _samples(open_dataset(places.far, index_dir=places.index_dir)),
        [places.far],
        "an address without objects",
    )


def _check_raises(kind: type[Exception], read: Callable[[], Any], names: Sequence[str], what: str) -> None:
    """Check that `read` raises an error of this class with a name."""
    try:
        read()
    except Exception as error:
        if not isinstance(error, kind):
            raise AssertionError(f"{what} must raise {kind.__name__}, but raised {error!r}") from error
        if not any(name in str(error) for name in names):
            text = f"the {type(error).__name__} of {what} must name it ({' or '.join(names)}), but says {str(error)!r}"
            raise AssertionError(text) from error
    else:
        raise AssertionError(f"{what} must raise {kind.__name__}, but the read succeeded")
