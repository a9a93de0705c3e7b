"""Stores whose server fails, does not answer, throttles or has no ranges."""

from __future__ import annotations

import io
import os
import pickle
import re
import signal
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest
import torch
from preloaded import Preloaded
from web_servers import Handler, serving

import feedline as fl
from feedline import stores
from feedline.core.threads import CancelScope, WaitCancelledError
from feedline.errors import ArgumentError
from feedline.stores.obstore_errors import translate_error

PATIENT = stores.Retry(deadline_s=10_000, idle_timeout_s=10_000)
KEYS = {"access_key_id": "key", "secret_access_key": "secret", "region": "us-east-1"}


class FailingServer:
    """S3 for reading, with objects of one bucket `b` and all kinds of faults."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.status: int | None = None
        self.ranges = True
        self.silent = False
        self.asked = threading.Event()
        self.failing_pages: set[int] = set()
        self.pages = 0
        self.release = threading.Event()
        self.url = ""

    def answer(self, handler: Handler) -> tuple[int, dict[str, str], bytes]:
        self.asked.set()
        if self.silent:
            self.release.wait()
        if self.status is not None:
            return self.status, {}, b""
        url = urlsplit(handler.path)
        if "list-type" in url.query:
            return self.page({name: values[0] for name, values in parse_qs(url.query).items()})
        data = self.objects.get(unquote(url.path).removeprefix("/b/"))
        if data is None:
            return 404, {}, b""
        reported = {"ETag": '"1"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT", "Accept-Ranges": "bytes"}
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers.get("Range") or "")
        if wanted is None or not self.ranges:
            return 200, reported, data
        start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
        if start >= len(data):
            return 416, {}, b""
        return 206, {**reported, "Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"}, data[start:stop]

    def page(self, query: dict[str, str]) -> tuple[int, dict[str, str], bytes]:
        self.pages += 1
        if self.pages in self.failing_pages:
            return 500, {}, b""
        behind = query.get("continuation-token") or query.get("start-after", "")
        prefix, deep = query.get("prefix", ""), "delimiter" not in query
        below = [name for name in sorted(self.objects) if name > behind and name.startswith(prefix)]
        names = [name for name in below if deep or "/" not in name.removeprefix(prefix)]
        page, more = names[:100], len(names) > 100
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified>"
            f"<Size>{len(self.objects[name])}</Size><ETag>&quot;1&quot;</ETag></Contents>"
            for name in page
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        truncated = f"<IsTruncated>{str(more).lower()}</IsTruncated>"
        return 200, {}, f"<ListBucketResult>{items}{token}{truncated}</ListBucketResult>".encode()


class Asked(Handler):
    def do_GET(self) -> None:
        status, headers, body = self.state.answer(self)
        self.answer(status, body, headers)


@pytest.fixture
def server() -> Iterator[FailingServer]:
    with serving(Asked, FailingServer()) as listening:
        listening.state.url = listening.url
        yield listening.state
        listening.state.release.set()


def options_for(server: FailingServer, **more: Any) -> dict[str, Any]:
    return {"endpoint": server.url, **KEYS, **more}


def opened(server: FailingServer, cache: Path | None = None, **more: Any) -> stores.Store:
    return stores.open_store("s3://b", options=options_for(server, **more), cache=cache)


def test_patience_is_an_option_like_others_of_datasets_too(server: FailingServer) -> None:
    server.status = 500
    quick = stores.Retry(attempts=3, first_wait_s=0, max_wait_s=0)
    with pytest.raises(stores.StoreUnavailableError, match="3 attempts failed"):
        fl.datasets.TarShards("s3://b/{0..1}.tar", options=options_for(server, retry=quick))
    with pytest.raises(stores.StoreUnavailableError, match="3 attempts failed"):
        fl.datasets.Files("s3://b/*.jpg", options=options_for(server, retry=quick))
    variables = {"retry": quick, "endpoint": server.url, "skip_signature": True}
    with pytest.raises(stores.StoreUnavailableError, match="3 attempts failed"):
        pickle.loads(pickle.dumps(stores.open_store("s3://b", options=variables))).size("f")


def test_patience_with_a_folder_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    options = {"retry": stores.Retry(), "requests": stores.Requests()}
    assert stores.open_store(tmp_path, options=options).read("f") == b"x"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"retry": 5}, r"retry takes a stores\.Retry\(\.\.\.\), not int"),
        ({"requests": "many"}, r"requests takes a stores\.Requests\(\.\.\.\), not str"),
        ({"secret_access_key": 3}, "s3://b: the option 'secret_access_key' must be text, .* type int"),
        ({"region": None}, "the option 'region' must be text"),
        ({"connect_timeout": "x"}, "the option 'connect_timeout' must be a time such as \"30s\""),
        ({"skip_signature": "maybe"}, "the option 'skip_signature' must be True or False"),
        ({"proxy_url": "::"}, "the option 'proxy_url' must be the address of a proxy"),
        ({"root_certificate": "x"}, "the option 'root_certificate' must be certificates in PEM format"),
        ({"nope": "x"}, "'nope' is not valid"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words) as caught:
        stores.open_store("s3://b", options={**KEYS, **wrong}).size("f")
    assert "secret'" not in str(caught.value)


def test_a_policy_is_given_once() -> None:
    with pytest.raises(ArgumentError, match="retry is given twice"):
        stores.open_store("s3://b", retry=stores.Retry(), options={"retry": stores.Retry()})


READS: dict[str, Callable[[stores.Store], object]] = {
    "range": lambda store: store.read("f", 0, 3),
    "whole": lambda store: store.read("f"),
    "ranges": lambda store: store.read_many("f", [(0, 3), (9_000_000, 9_000_003)]),
    "info": lambda store: store.info("f"),
    "list": lambda store: list(store.list()),
}


@pytest.mark.parametrize(
    ("read", "status", "cached"),
    [
        *((read, status, False) for read in READS for status in (None, 500)),
        *(("range", None, True), ("ranges", 500, True)),  # a cache requests missing data from the same store
    ],
)
def test_waits_for_a_store_end_when_not_wanted(
    server: FailingServer, tmp_path: Path, read: str, status: int | None, cached: bool
) -> None:
    server.status, server.silent = status, status is None
    store, ends, scope = opened(server, tmp_path if cached else None, retry=PATIENT), list[Exception](), CancelScope()

    def run() -> None:
        with scope.enter():
            try:
                READS[read](store)
            except WaitCancelledError as error:
                ends.append(error)

    reader = threading.Thread(target=run)
    reader.start()
    assert server.asked.wait(60)
    scope.cancel()
    reader.join(60)
    assert len(ends) == 1


INTERRUPTED = """
import sys, threading
import torch, feedline as fl
url, cache, what = sys.argv[1:]
retry = fl.stores.Retry(deadline_s=10_000, idle_timeout_s=10_000)
options = {"endpoint": url, "skip_signature": True, "retry": retry}
store = fl.stores.open_store("s3://b", options=options, cache=cache or None)

class Objects(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    traits = fl.Traits()
    def ranges(self, indices):
        return [(store, fl.stores.ObjectRange(f"{i}", 0, 9)) for i in indices.tolist()] if cache else []
    def __getitem__(self, i):
        return len(store.read(f"{i}", 0, 9))

if what == "loader":
    list(fl.DataLoader(Objects(), 4))
elif what == "threads":
    list(fl.DataLoader(Objects(), 4, num_workers=2, worker_method="thread"))
elif what == "dataset":
    fl.datasets.TarShards("s3://b/{0..9}.tar", options=options)
else:
    {"range": lambda: store.read("f", 0, 3), "whole": lambda: store.read("f"), "list": lambda: [*store.list()]}[what]()
"""


INTERRUPTIBLE = {"range": "both", "whole": "silent", "list": "failing", "dataset": "silent", "loader": "both",
                 "cached loader": "failing", "threads": "both", "cached threads": "silent"}  # fmt: skip


@pytest.mark.parametrize(
    ("what", "status"),
    [
        pytest.param(what, status, id=f"{what}, {name}")
        for what, wanted in INTERRUPTIBLE.items()
        for name, status in (("silent", None), ("failing", 500))
        if wanted in ("both", name)
    ],
)
def test_ctrl_c_waits_for_no_store(
    server: FailingServer, tmp_path: Path, what: str, status: int | None, preloaded: Preloaded
) -> None:
    server.status, server.silent = status, status is None
    script, errors = tmp_path / "interrupted.py", tmp_path / "errors"
    script.write_text(INTERRUPTED)
    cache = str(tmp_path / "cache") if "cached" in what else ""
    child = preloaded.start_quietly(script, errors, server.url, cache, what.removeprefix("cached "))
    try:
        assert server.asked.wait(60)
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(60) == -signal.SIGINT
        assert "KeyboardInterrupt" in errors.read_text()
    finally:
        child.kill()


@pytest.mark.parametrize(("status", "cached"), [(None, False), (500, False), (None, True)])
def test_closing_a_loader_waits_for_no_store(
    server: FailingServer, tmp_path: Path, status: int | None, cached: bool
) -> None:
    server.objects["f"] = bytes(100)
    store = opened(server, tmp_path if cached else None, retry=PATIENT)
    store.info("f")
    server.status, server.silent = status, status is None
    loader = fl.DataLoader(_Spans(store), 2, num_workers=2, worker_method="thread")
    server.asked.clear()
    reader = threading.Thread(target=_next_of, args=(loader,))
    reader.start()
    assert server.asked.wait(60)
    loader.close()
    reader.join(60)
    assert not reader.is_alive()
    for worker in [thread for thread in threading.enumerate() if thread.name in ("feedline-0", "feedline-1")]:
        worker.join(60)
        assert not worker.is_alive()


def _next_of(loader: Any) -> None:
    with suppress(Exception):
        next(iter(loader))


class _Spans(torch.utils.data.Dataset[int]):
    def __init__(self, store: stores.Store) -> None:
        self.store = store

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        return len(self.store.read("f", index, index + 1))


STORES = ["local", "remote", "cached", "foreign"]


@pytest.fixture(params=STORES)
def ten_bytes(request: pytest.FixtureRequest, server: FailingServer, tmp_path: Path) -> stores.Store:
    """A store with `f`, which holds ten bytes, and `empty`."""
    contents = {"f": b"0123456789", "empty": b""}
    server.objects.update(contents)
    if request.param == "local":
        for name, data in contents.items():
            (tmp_path / name).write_bytes(data)
        return stores.open_store(tmp_path)
    if request.param == "foreign":
        fsspec = pytest.importorskip("fsspec")
        fsspec.filesystem("memory").pipe({f"/ten/{name}": data for name, data in contents.items()})
        return stores.open_store("memory://ten")
    return opened(server, tmp_path if request.param == "cached" else None)


def test_ranges_within_an_object(ten_bytes: stores.Store) -> None:
    for start, stop in ((0, 10), (3, 3), (0, None), (7, None), (10, None), (10, 10)):
        assert ten_bytes.read("f", start, stop) == b"0123456789"[start:stop]
    assert ten_bytes.read("empty") == b""
    assert ten_bytes.read("empty", 0, 0) == b""


@pytest.mark.parametrize(("start", "stop"), [(-5, None), (-5, 3), (5, 3), (-3, -1)])
def test_ranges_that_are_none(ten_bytes: stores.Store, start: int, stop: int | None) -> None:
    with pytest.raises(ArgumentError, match=r"f: bytes \[.*\) are not a valid range"):
        ten_bytes.read("f", start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 11), (50, None), (50, 60), (0, 1 << 50), (0, 1 << 70)])
def test_ranges_beyond_the_end(ten_bytes: stores.Store, start: int, stop: int | None) -> None:
    with pytest.raises(stores.RangeError, match=r"f, bytes \[\d+, \d+\): .*"):
        ten_bytes.read("f", start, stop)


def test_a_huge_range_of_another_version_is_reported_as_such(server: FailingServer) -> None:
    server.objects["f"] = b"0123456789"
    with pytest.raises(stores.ObjectChangedError, match="version old was requested"):
        opened(server).read("f", 0, 1 << 50, version="old")


def test_whole_objects_are_read_from_servers_without_ranges(server: FailingServer, tmp_path: Path) -> None:
    large = bytes(range(256)) * 40_000
    server.objects, server.ranges = {"f": b"0123456789", "large": large}, False
    store = opened(server)
    assert store.read("f") == b"0123456789"
    assert store.read("f", 0, 10) == b"0123456789"
    assert opened(server, tmp_path).read("f", 3) == b"3456789"
    assert store.read("large") == large
    for start, stop in ((0, 3), (3, 10), (3, None)):
        with pytest.raises(stores.RangeError, match="the server ignores ranges"):
            store.read("f", start, stop)


@pytest.mark.parametrize("pattern", ["a/*.txt", "a/", "*.txt"])
@pytest.mark.parametrize("cached", [False, True], ids=["bare", "cached"])
def test_a_pattern_within_a_folder_does_not_go_through_those_below(
    server: FailingServer, tmp_path: Path, pattern: str, cached: bool
) -> None:
    server.objects = {f"{folder}{number:05}.txt": b"x" for number in range(1000) for folder in ("a/deep/", "z/")}
    server.objects |= {f"{folder}{number}.txt": b"top" for number in range(3) for folder in ("a/", "")}
    options = {"endpoint": server.url, "skip_signature": True}
    found = fl.datasets.Lines(f"s3://b/{pattern}", inside="*.txt", options=options, cache=tmp_path if cached else None)
    assert (list(found), server.pages) == (["top"] * 3, 1)
    if "*" in pattern:
        folder = pattern.removesuffix("*.txt")
        names = stores.expand(f"s3://b/{pattern}", options=options)
        assert (names, server.pages) == ([f"s3://b/{folder}{number}.txt" for number in range(3)], 2)


def test_a_listing_continues_where_a_page_failed(server: FailingServer) -> None:
    server.objects = {f"{number:05}": b"x" for number in range(3000)}
    server.failing_pages = {2, 3, 7, 11, 13, 17, 19, 23, 29, 31}
    quick = stores.Retry(attempts=3, first_wait_s=0, max_wait_s=0)
    assert [info.path for info in opened(server, retry=quick).list()] == sorted(server.objects)
    assert server.pages == 30 + 10


def test_a_name_that_is_no_path_does_not_stop_a_listing(server: FailingServer) -> None:
    server.objects = {"a.bin": b"x", "d//e.bin": b"odd", "f%2Fg.bin": b"y"}
    store = opened(server)
    assert [info.path for info in store.list()] == ["a.bin", "d//e.bin", "f%2Fg.bin"]
    assert store.read("d//e.bin") == b"odd"


def test_a_name_that_cannot_be_listed_is_named() -> None:
    text = 'Encountered object with invalid path: Path "d//e.bin" contained empty path segment'
    error = translate_error(ValueError(text), "gs://b")
    with pytest.raises(
        stores.StoreError, match=r"gs://b: there is an object named 'd//e\.bin', .* Rename or remove it"
    ):
        raise error


def test_names_for_a_web_server_are_shown_as_they_must_be(server: FailingServer) -> None:
    store = stores.open_store(server.url)
    with pytest.raises(stores.StoreError, match=rf"as in {server.url}/part-\{{000\.\.127\}}\.tar"):
        list(store.list())
    with pytest.raises(stores.StoreError, match=rf"as in {server.url}/data/part-"):
        list(store.list("data/"))


def test_training_survives_an_outage(server: FailingServer) -> None:
    tar = io.BytesIO()
    with tarfile.open(fileobj=tar, mode="w") as archive:
        for number in range(100):
            member = tarfile.TarInfo(f"{number:03}.cls")
            member.size = 3
            archive.addfile(member, io.BytesIO(f"{number:03}".encode()))
    server.objects["0.tar"] = tar.getvalue()
    retry = stores.Retry(first_wait_s=0.001, max_wait_s=0.001)  # some dozens of attempts
    dataset = fl.datasets.TarShards("s3://b/0.tar", ("cls",), options=options_for(server, retry=retry))
    before = stores.statistics().retries
    server.status = 500

    def recover() -> None:
        while stores.statistics().retries < before + 30:
            server.asked.clear()
            server.asked.wait(1)
        server.status = None

    watcher = threading.Thread(target=recover)
    watcher.start()
    with fl.DataLoader(dataset, 10) as loader:
        assert len(list(loader)) == 10
    watcher.join()
