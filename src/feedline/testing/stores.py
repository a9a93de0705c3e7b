"""Conformance checks of stores."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from feedline.errors import ObjectChangedError, ObjectNotFoundError, RangeError
from feedline.stores.base import ObjectInfo

_MOST_OBJECTS = 20
_MISSING = "feedline-check-store/no-such-object"


def check_store(store: Any, contents: Mapping[str, bytes] | None = None) -> None:
    """Raise `AssertionError` for the first promise that a store breaks.

    `contents` are objects of the store, by path. Without `contents`, the first 20 objects of `list()` are compared with
    themselves. Whole objects are read, so they should be small. One must have at least two bytes. The function checks
    that:

    - `url`, `info`, `size`, `read`, `read_many` and `list` agree with each other and with `contents`;
    - views are read-only and stay valid;
    - listings are in the order of paths, and select by prefix;
    - ranges past the end raise `RangeError`, negative and reversed ranges `ValueError`, missing objects
      `ObjectNotFoundError`, and other versions `ObjectChangedError`, each with the name of the object;
    - the store can be pickled, and shared by threads.
    """
    absent = [name for name in ("url", "info", "size", "read", "read_many", "list") if not hasattr(store, name)]
    assert not absent, f"the store lacks {', '.join(absent)}: feedline.stores.Store lists the members of a store"
    listed = list(islice(store.list(), None if contents else _MOST_OBJECTS))
    expected = {info.path: bytes(store.read(info.path)) for info in listed} if contents is None else dict(contents)
    largest = max(expected, key=lambda path: len(expected[path]), default=None)
    if largest is None or len(expected[largest]) < 2:
        raise AssertionError("the store has no object of two bytes or more to read: put some into it")
    _check_listing(store, listed, expected, contents is not None)
    for path, content in expected.items():
        _check_object(store, path, content)
    _check_bad_ranges(store, largest, len(expected[largest]))
    _check_missing(store)
    _check_version(store, largest)
    _check_pickle(store, largest, expected[largest])
    _check_threads(store, expected)


def _check_listing(store: Any, listed: list[ObjectInfo], expected: Mapping[str, bytes], is_complete: bool) -> None:
    paths = [info.path for info in listed]
    assert paths == sorted(set(paths)), f"list() must give every path once, in order, but gave {paths}"
    for info in listed:
        assert info == store.info(info.path), f"list() and info() disagree: {info} and {store.info(info.path)}"
    if is_complete:
        missing = sorted(expected.keys() - set(paths))
        assert not missing, f"list() must give every object at any depth, but left out {missing}"
    for path in expected:
        # A prefix is a prefix of the text, not a folder.
        for prefix in (path, path[: len(path) // 2], path[: path.rfind("/") + 1]):
            got = [info.path for info in store.list(prefix)]
            assert got == sorted(set(got)), f"list({prefix!r}) must give every path once, in order, but gave {got}"
            assert path in got, f"list({prefix!r}) must give {path!r}, but gave {got}"
            others = [each for each in got if not each.startswith(prefix)]
            assert not others, f"list({prefix!r}) must only give paths with this prefix, but gave {others}"
    got = [info.path for info in store.list(_MISSING)]
    assert not got, f"list({_MISSING!r}) must give nothing, but gave {got}"


def _check_object(store: Any, path: str, content: bytes) -> None:
    nbytes, info = len(content), store.info(path)
    assert (info.path, info.size) == (path, nbytes), f"info({path!r}) of {nbytes} bytes must not be {info}"
    assert info.version == store.info(path).version, f"info({path!r}) must give the same version of the same content"
    assert store.size(path) == nbytes, f"size({path!r}) must be {nbytes}, but is {store.size(path)}"
    half = nbytes // 2
    # All views are kept until the end: this reveals a store that reuses their memory.
    views = [
        ("", 0, nbytes, store.read(path)),
        (f", {half}", half, nbytes, store.read(path, half)),
        (f", 0, {half}", 0, half, store.read(path, 0, half)),
        (f", {half}, {half}", half, half, store.read(path, half, half)),
        (f", {nbytes}", nbytes, nbytes, store.read(path, nbytes)),
        (f", version={info.version!r}", 0, nbytes, store.read(path, version=info.version)),
    ]
    ranges = [(half, nbytes), (0, half), (0, nbytes), (half, half), (0, half)]
    many = store.read_many(path, ranges, version=info.version)
    assert len(many) == len(ranges), f"read_many({path!r}, {ranges}) must give a view for each range"
    assert len(store.read_many(path, [])) == 0, f"read_many({path!r}, []) must give nothing"
    for arguments, start, stop, view in views:
        _check_view(f"read({path!r}{arguments})", view, content[start:stop])
    for (start, stop), view in zip(ranges, many, strict=True):
        _check_view(f"the view of ({start}, {stop}) in read_many({path!r}, {ranges})", view, content[start:stop])


def _check_view(call: str, view: Any, content: bytes) -> None:
    assert isinstance(view, memoryview), f"{call} must be a memoryview, but is {type(view).__name__}"
    assert view.readonly, f"{call} must be read-only"
    assert view == content, f"{call} must hold the {len(content)} bytes of that range, but holds {view.nbytes} others"


def _check_bad_ranges(store: Any, path: str, nbytes: int) -> None:
    for start, stop in ((nbytes - 1, nbytes + 1), (nbytes + 5, nbytes + 6)):
        _check_raises(RangeError, store.read, path, start, stop)
        _check_raises(RangeError, store.read_many, path, [(0, 1), (start, stop)])
    for start, stop in ((-1, 1), (1, 0)):
        _check_raises(ValueError, store.read_many, path, [(start, stop)])


def _check_missing(store: Any) -> None:
    for method, *arguments in (
        *((store.info,), (store.size,), (store.read,), (store.read, 0, 1)),
        (store.read_many, [(0, 1)]),
    ):
        _check_raises(ObjectNotFoundError, method, _MISSING, *arguments)


def _check_version(store: Any, path: str) -> None:
    _check_raises(ObjectChangedError, store.read, path, version="another")
    _check_raises(ObjectChangedError, store.read_many, path, [(0, 1)], version="another")


def _check_raises(
    kind: type[Exception], method: Callable[..., Any], path: str, *arguments: Any, **options: Any
) -> None:
    words = [*map(repr, (path, *arguments)), *(f"{name}={value!r}" for name, value in options.items())]
    call = f"{method.__name__}({', '.join(words)})"
    try:
        method(path, *arguments, **options)
    except Exception as error:
        if not isinstance(error, kind):
            raise AssertionError(f"{call} must raise {kind.__name__}, but raised {error!r}") from error
        # The last part of the path is enough: a message may quote the whole address.
        if path.rpartition("/")[2] not in str(error):
            text = f"the {type(error).__name__} of {call} must name the object, but says {str(error)!r}"
            raise AssertionError(text) from error
    else:
        raise AssertionError(f"{call} must raise {kind.__name__}, but returned")


def _check_pickle(store: Any, path: str, content: bytes) -> None:
    try:
        copy = pickle.loads(pickle.dumps(store))
    except Exception as error:
        raise AssertionError(f"the store must survive pickling, to reach worker processes: {error!r}") from error
    assert copy.url == store.url, f"an unpickled store must have the same url: {copy.url!r} is not {store.url!r}"
    assert copy.read(path) == content, f"an unpickled store must read the same bytes of {path!r}"


def _check_threads(store: Any, expected: Mapping[str, bytes]) -> None:
    with ThreadPoolExecutor(8) as threads:
        for path, view in threads.map(lambda path: (path, store.read(path)), [*expected] * 4):
            assert view == expected[path], f"several threads must be able to read at once, but {path!r} differs"
