"""A scheme from outside: its store is opened by address, cached, read by datasets, and known to worker processes."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Preloaded

import feedline as fl
from feedline import stores
from feedline.errors import ArgumentError, MissingExtraError

OBJECTS = {f"bucket/{n}.txt": b"%d" % n for n in range(8)}


class DictStore:
    """Objects of a dictionary: the whole protocol of a store."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._prefix = url.partition("://")[2].rstrip("/") + "/"

    def _data(self, path: str) -> bytes:
        try:
            return OBJECTS[self._prefix + path]
        except KeyError:
            raise stores.ObjectNotFoundError(f"{stores.join(self.url, path)}: there is no such object") from None

    def info(self, path: str) -> stores.ObjectInfo:
        data = self._data(path)
        return stores.ObjectInfo(path, len(data), data.hex())

    def size(self, path: str) -> int:
        return self.info(path).size

    def read(self, path: str, start: int = 0, stop: int | None = None, *, version: str | None = None) -> memoryview:
        data, info = memoryview(self._data(path)), self.info(path)
        if version not in (None, info.version):
            raise stores.ObjectChangedError(f"{stores.join(self.url, path)} changed: it is {info.version} now")
        if (info.size if stop is None else stop) > info.size or start > info.size:
            raise stores.RangeError(f"{stores.join(self.url, path)}: the object has only {info.size} bytes")
        return data[start:stop]

    def read_many(
        self, path: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None
    ) -> list[memoryview]:
        return [self.read(path, start, stop, version=version) for start, stop in ranges]

    def list(self, prefix: str = "") -> Iterator[stores.ObjectInfo]:
        paths = sorted(path.removeprefix(self._prefix) for path in OBJECTS if path.startswith(self._prefix + prefix))
        return map(self.info, paths)


def open_dict(url: str, options: Any, policy: stores.StorePolicy) -> stores.Store:
    return DictStore(url)


class Opens(torch.utils.data.Dataset[bytes]):
    """Opens the store in the worker, by its address."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> bytes:
        return bytes(stores.open_store("mem2://bucket").read(f"{index}.txt"))


class OpensAtUnpickling(Opens):
    """Opens it while the worker unpickles the dataset."""

    def __getstate__(self) -> str:
        return "mem2://bucket"

    def __setstate__(self, url: str) -> None:
        self.sizes = [stores.open_store(url).size(f"{n}.txt") for n in range(8)]


@pytest.fixture
def mem2() -> Iterator[None]:
    stores.register_scheme("mem2", stores.Scheme(open_dict))
    yield
    stores.unregister_scheme("mem2")


@pytest.mark.usefixtures("mem2")
@pytest.mark.parametrize("cached", [False, True], ids=["bare", "cached"])
def test_datasets_read_it(tmp_path: Path, cached: bool) -> None:
    cache = tmp_path / "cache" if cached else None
    before = stores.statistics().cache_misses
    for paths in ("mem2://bucket/*.txt", "mem2://bucket/{0..7}.txt", "MEM2://bucket/[0-7].txt"):
        files = fl.datasets.Files(paths, decode="text", cache=cache)
        assert [files[n] for n in range(8)] == [str(n) for n in range(8)]
    assert (stores.statistics().cache_misses > before) == cached
    lines = fl.datasets.Lines("mem2://bucket/", cache=cache)
    assert len(lines) == 8
    with pytest.raises(stores.ObjectNotFoundError, match=r"mem2://bucket/9\.txt"):
        fl.datasets.Lines("mem2://bucket/9.txt", cache=cache)


@pytest.mark.usefixtures("mem2")
@pytest.mark.parametrize(
    ("method", "dataset"),
    [
        *(("process", dataset) for dataset in (Opens, OpensAtUnpickling, fl.datasets.Files)),
        *((method, Opens) for method in ("fork", "thread")),
        pytest.param("spawn", Opens, marks=pytest.mark.nightly),
    ],
)
def test_workers_know_it(method: str, dataset: Any) -> None:
    data = dataset(*["mem2://bucket/*.txt"] if dataset is fl.datasets.Files else [])
    how: dict[str, Any] = {"worker_method": method} if method in ("process", "thread") else {}
    if not how:
        how = {"worker_method": "process", "multiprocessing_context": method}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # workers that are forked after all
        batches = list(fl.DataLoader(data, 4, num_workers=1, collate_fn=list, **how))
    assert [sample for batch in batches for sample in batch] == [b"%d" % n for n in range(8)]


IN_MAIN = """
import feedline as fl
from collections.abc import Iterator
from test_schemes import DictStore

class MainStore(DictStore):
    pass

def open_it(url, options, policy):
    return MainStore(url)

class Opens:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return bytes(fl.stores.open_store("main+dict://bucket").read(f"{index}.txt"))

if __name__ == "__main__":
    fl.stores.register_scheme("main+dict", fl.stores.Scheme(open_it))
    loader = fl.DataLoader(Opens(), 4, num_workers=1, collate_fn=b"".join, worker_method="process")
    print(b"".join(loader).decode())
"""


def test_workers_know_what_the_main_program_defines(preloaded: Preloaded, tmp_path: Path) -> None:
    path = f"import sys, warnings\nwarnings.simplefilter('error')\nsys.path.append({str(Path(__file__).parent)!r})\n"
    assert preloaded.run_code(path + IN_MAIN, tmp_path) == (0, "01234567\n")


def test_one_that_cannot_be_pickled_reaches_forked_workers() -> None:
    lock = threading.Lock()
    stores.register_scheme("mem3", stores.Scheme(lambda url, options, policy: DictStore(url) if lock else open_dict))
    try:
        data = fl.datasets.Files("mem3://bucket/*.txt")
        batches = list(fl.DataLoader(data, 4, num_workers=1, collate_fn=list, worker_method="process"))
    finally:
        stores.unregister_scheme("mem3")
    assert [sample for batch in batches for sample in batch] == [b"%d" % n for n in range(8)]


@pytest.mark.usefixtures("mem2")
def test_registering_it_a_second_time_replaces_it() -> None:
    stores.register_scheme("mem2", stores.Scheme(open_dict, host="none"))
    assert stores.split("mem2://bucket/x") == ("mem2://", "bucket/x")


@pytest.mark.parametrize(
    ("row", "address", "place"),
    [
        ({}, "mem2://b/my%20x", ("mem2://b", "my%20x")),
        ({"quoted": True}, "mem2://b/my%20x%3F", ("mem2://b", "my x?")),
        ({"host": "none"}, "mem2://b/x", ("mem2://", "b/x")),
        ({"host": "optional"}, "mem2://b", ("mem2://", "b")),
        ({"host": "optional"}, "mem2://b/x", ("mem2://b", "x")),
        ({"user": "any"}, "mem2://a:b@c/x", ("mem2://a:b@c", "x")),
    ],
)
@pytest.mark.usefixtures("mem2")
def test_a_row_says_how_addresses_are_written(row: dict[str, Any], address: str, place: tuple[str, str]) -> None:
    stores.register_scheme("mem2", stores.Scheme(open_dict, **row))
    assert stores.split(address) == place
    assert stores.split(stores.join(*place)) == place


@pytest.mark.parametrize(
    ("row", "address", "words"),
    [
        ({}, "mem2:///x", "names no bucket or server"),
        ({}, "mem2://me:secret@b/x", "contains credentials"),
        ({"user": "refused"}, "mem2://me@b/x", "contains credentials"),
        ({"quoted": True}, "mem2://b/x?y=1", "followed by a query"),
    ],
)
@pytest.mark.usefixtures("mem2")
def test_a_row_defines_which_addresses_are_refused(row: dict[str, Any], address: str, words: str) -> None:
    stores.register_scheme("mem2", stores.Scheme(open_dict, **row))
    with pytest.raises(ArgumentError, match=words):
        stores.split(address)


def test_an_object_that_is_no_scheme_is_refused() -> None:
    good = stores.Scheme(open_dict)
    wrong: list[tuple[Any, Any, str]] = [
        (3, good, r"register_scheme\(3\): a scheme must be a string of lower-case"),
        ("Mem", good, r"'Mem'.* lower-case letters"),
        ("mem2", open_dict, r"takes a stores\.Scheme\(\.\.\.\), not function"),
        ("mem2", stores.Scheme("mem2:open"), r"Scheme\(open=\.\.\.\) must be a function .*, not 'mem2:open'"),  # type: ignore[arg-type]
        ("mem2", stores.Scheme(open_dict, host="bucket"), "one of 'required', 'optional', 'none'; got 'bucket'"),  # type: ignore[arg-type]
        ("mem2", stores.Scheme(open_dict, user=True), "one of 'refused', 'name', 'any'; got True"),  # type: ignore[arg-type]
        ("s3", good, "feedline opens s3:// itself"),
    ]
    for name, scheme, message in wrong:
        with pytest.raises(ArgumentError, match=message):
            stores.register_scheme(name, scheme)
    for name in ("mem2", "s3"):
        with pytest.raises(ArgumentError, match="no such scheme was registered"):
            stores.unregister_scheme(name)


@pytest.mark.usefixtures("mem2")
def test_a_store_without_listings_is_asked_for_each_object() -> None:
    stores.register_scheme("mem2", stores.Scheme(open_dict, lists=False))
    assert len(fl.datasets.Lines("mem2://bucket/{0..7}.txt")) == 8
    with pytest.raises(stores.ObjectNotFoundError, match="mem2://bucket/gone: there is no such object"):
        fl.datasets.Lines("mem2://bucket/gone")


@pytest.mark.usefixtures("mem2")
def test_a_missing_package_is_named_with_its_install_command() -> None:
    def needs(url: str, options: Any, policy: stores.StorePolicy) -> stores.Store:
        raise ModuleNotFoundError("No module named 'mem2client'", name="mem2client")

    stores.register_scheme("mem2", stores.Scheme(needs, install="feedline-mem2"))
    with pytest.raises(MissingExtraError, match=r"mem2://bucket needs mem2client.*pip install 'feedline-mem2'"):
        stores.open_store("mem2://bucket")
    stores.register_scheme("mem2", stores.Scheme(needs))
    with pytest.raises(ModuleNotFoundError, match="mem2client"):
        stores.open_store("mem2://bucket")


@pytest.mark.parametrize("name", ["s3", "file", "memory", "*", "Mem2", "mem2://", "2mem", ""])
def test_names_that_cannot_be_registered(name: str) -> None:
    with pytest.raises(ArgumentError, match="register_scheme"):
        stores.register_scheme(name, stores.Scheme(open_dict))
    assert name not in stores.SCHEMES or stores.SCHEMES[name].open is not open_dict


def test_a_row_is_a_scheme() -> None:
    with pytest.raises(ArgumentError, match=r"takes a stores\.Scheme"):
        stores.register_scheme("mem2", open_dict)  # type: ignore[arg-type]
