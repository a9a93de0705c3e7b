"""The contract of every store, on stores without a server, and properties of local files."""

from __future__ import annotations

import mmap
import os
import pickle
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import fsspec
import pytest
from preloaded import IMPORTS_FEEDLINE, Preloaded

from feedline import stores
from feedline.core.caches import LRUCache

CONTENT = random.Random(1).randbytes(300_000)
OBJECTS = {"a/0.bin": CONTENT, "a/1.bin": b"one", "a/b/2.bin": b"two", "ab/3.bin": b"", "c d/ü%20#?": b"odd"}


def filled(folder: Path) -> Path:
    for name, data in OBJECTS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(params=["local", "fsspec", "cached"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[stores.Store]:
    if request.param == "fsspec":
        root, system = f"/{uuid4().hex}", fsspec.filesystem("memory")
        for name, data in OBJECTS.items():
            system.pipe_file(f"{root}/{name}", data)
        yield stores.open_store(f"memory:/{root}")
        system.rm(root, recursive=True)
    elif request.param == "cached":
        cache = stores.Cache(tmp_path / "cache", limit="10 MB", piece_nbytes=70_000)
        yield stores.open_store(filled(tmp_path / "data"), cache=cache)
    else:
        yield stores.open_store(filled(tmp_path / "data"))


def test_sizes_and_versions(store: stores.Store) -> None:
    for name, data in OBJECTS.items():
        assert store.size(name) == len(data)
        info = store.info(name)
        assert (info.path, info.size) == (name, len(data))
        assert info == store.info(name)


def test_reads(store: stores.Store) -> None:
    for name, data in OBJECTS.items():
        whole = store.read(name)
        assert whole == data
        assert whole.readonly
    assert store.read("a/0.bin", 100) == CONTENT[100:]
    assert store.read("a/0.bin", 100, 170_000) == CONTENT[100:170_000]
    assert store.read("a/0.bin", 7, 7) == b""
    assert store.read("a/0.bin", len(CONTENT)) == b""
    assert store.read("a/0.bin", 5, version=store.info("a/0.bin").version) == CONTENT[5:]


def test_many_ranges_in_any_order(store: stores.Store) -> None:
    rng = random.Random(2)
    starts = [rng.randrange(len(CONTENT)) for _ in range(200)]
    ranges = [(start, min(len(CONTENT), start + rng.randrange(5_000))) for start in starts]
    ranges += [ranges[0], (0, len(CONTENT)), (3, 3)]
    found = store.read_many("a/0.bin", ranges)
    assert [bytes(view) for view in found] == [CONTENT[start:stop] for start, stop in ranges]
    assert store.read_many("a/0.bin", []) == []


def test_listing(store: stores.Store) -> None:
    assert [info.path for info in store.list()] == sorted(OBJECTS)
    assert [info.path for info in store.list("a")] == ["a/0.bin", "a/1.bin", "a/b/2.bin", "ab/3.bin"]
    assert [info.path for info in store.list("a/")] == ["a/0.bin", "a/1.bin", "a/b/2.bin"]
    assert [(info.path, info.size) for info in store.list("a/1")] == [("a/1.bin", 3)]
    assert list(store.list("zzz")) == []
    assert all(info == store.info(info.path) for info in store.list())


def test_a_listing_of_linked_folders(tmp_path: Path) -> None:
    filled(tmp_path / "outside")
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "own").touch()
    (tmp_path / "data" / "a" / "up").symlink_to("..")
    (tmp_path / "data" / "a" / "itself").symlink_to(".")
    (tmp_path / "data" / "linked").symlink_to("../outside/a")
    listed = [info.path for info in stores.open_store(tmp_path / "data").list()]
    assert listed == ["a/own", "linked/0.bin", "linked/1.bin", "linked/b/2.bin"]
    assert stores.expand(tmp_path / "data" / "linked" / "**") == [str(tmp_path / "data" / each) for each in listed[1:]]
    assert [info.path for info in stores.open_store(tmp_path / "data").list("linked/b")] == listed[3:]


def test_a_listing_leaves_out_links_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"1")
    (tmp_path / "b").symlink_to("nowhere")
    assert [info.path for info in stores.open_store(str(tmp_path)).list()] == ["a"]


def test_a_folder_that_cannot_be_listed_is_named(tmp_path: Path) -> None:
    place = os.open(tmp_path, os.O_RDONLY)
    for _ in range(20):  # longer than a path may be; root can read any other folder
        os.mkdir("x" * 250, dir_fd=place)
        inner = os.open("x" * 250, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    os.close(place)
    with pytest.raises(OSError, match=r"too long: .*/xxx"):
        list(stores.open_store(tmp_path).list())
    assert list(stores.open_store(tmp_path).list("y")) == []


def test_missing_files_are_named(store: stores.Store) -> None:
    for ask in (store.info, store.size, store.read, lambda path: store.read(path, 0, 1)):
        with pytest.raises(stores.ObjectNotFoundError, match=r"a/nothing") as caught:
            ask("a/nothing")
        assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(stores.ObjectNotFoundError):
        store.read("a/0.bin/below", 0, 1)


def test_impossible_ranges(store: stores.Store) -> None:
    for start, stop in ((299_990, 300_001), (400_000, 400_001)):
        with pytest.raises(stores.RangeError, match=rf"0\.bin, bytes \[{start}, {stop}\): .* only 300000 bytes"):
            store.read("a/0.bin", start, stop)
    for start, stop in ((-1, 5), (9, 3)):
        with pytest.raises(ValueError, match=rf"0\.bin: bytes \[{start}, {stop}\) are not a valid range"):
            store.read_many("a/0.bin", [(start, stop)])


def test_another_version_is_refused(store: stores.Store) -> None:
    with pytest.raises(stores.ObjectChangedError, match=r"1\.bin has changed .*: version before was requested"):
        store.read("a/1.bin", version="before")


def test_a_store_travels_by_its_address(store: stores.Store) -> None:
    store.read("a/0.bin", 0, 1000)
    pickled = pickle.dumps(store)
    assert len(pickled) < 1500
    again = pickle.loads(pickled)
    assert (again.url, repr(again)) == (store.url, repr(store))
    assert again.read("a/0.bin", 10, 20) == CONTENT[10:20]


def test_threads_may_share_a_store(store: stores.Store) -> None:
    def read(seed: int) -> bool:
        start = random.Random(seed).randrange(200_000)
        return store.read("a/0.bin", start, start + 90_000) == CONTENT[start : start + 90_000]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(100)))


def test_a_forked_process_reads_on(store: stores.Store) -> None:
    store.read("a/0.bin", 0, 1000)
    child = os.fork()
    if child == 0:
        os._exit(0 if store.read("a/0.bin") == CONTENT and stores.statistics().retries == 0 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_relative_folder_means_the_same_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "data")
    monkeypatch.chdir(tmp_path)
    store = stores.open_store("data")
    monkeypatch.chdir("/")
    assert store.read("a/1.bin") == b"one"


def test_ranges_of_a_local_file_are_views_of_its_pages(tmp_path: Path) -> None:
    store = stores.open_store(filled(tmp_path))
    first, second = store.read("a/0.bin", 0, 100_000), store.read("a/0.bin", 50_000, 60_000)
    assert isinstance(first.obj, mmap.mmap)
    assert first.obj is second.obj


def test_a_replaced_file_is_read_again_and_old_views_stay(tmp_path: Path) -> None:
    store = stores.open_store(filled(tmp_path))
    old, version = store.read("a/0.bin", 0, 100_000), store.info("a/0.bin").version
    (tmp_path / "new").write_bytes(CONTENT[::-1])
    (tmp_path / "new").replace(tmp_path / "a/0.bin")
    assert store.read("a/0.bin", 0, 100_000) == CONTENT[::-1][:100_000]
    assert old == CONTENT[:100_000]
    with pytest.raises(stores.ObjectChangedError, match=r"0\.bin has changed"):
        store.read("a/0.bin", 0, 5, version=version)


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_few_files_are_kept_open(tmp_path: Path) -> None:
    for number in range(300):
        (tmp_path / f"{number}").write_bytes(CONTENT[:70_000])
    store, before = stores.open_store(tmp_path), open_files()
    for number in range(300):
        assert store.read(f"{number}", 5, 9) == CONTENT[5:9]
    assert open_files() - before <= 64


def test_recent_keeps_the_last_used_values() -> None:
    recent = LRUCache[str, int](2)
    recent.put("a", 1)
    recent.put("b", 2)
    assert recent.get("a") == 1
    recent.put("c", 3)
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)
    recent.drop("a")
    recent.drop("a")
    assert recent.get("a") is None


IMPORT = f"""
{IMPORTS_FEEDLINE}
clients = {{"obstore", "fsspec", "boto3"}}
for name in [name for name in sys.modules if name.partition(".")[0] in clients]:
    del sys.modules[name]
import feedline

print(clients & {{*sys.modules}})
"""


def test_importing_feedline_loads_no_client(preloaded: Preloaded, tmp_path: Path) -> None:
    assert preloaded.run_code(IMPORT, tmp_path) == (0, "set()\n")
