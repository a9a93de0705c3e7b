"""Google Cloud Storage's protocol with a server of it, and its access control."""

from __future__ import annotations

import gzip
import json
import logging
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import KINDS, FaultProxy, Faults, fault_proxy
from format_cases import equal
from gcs import GCS, Guard, guard
from google_cases import without_credentials
from packing_cases import feedline
from secret_cases import kept_in, shown_by
from tar_cases import image_shards

import feedline as fl
from feedline import stores
from feedline import transforms as T
from feedline.datasets import Lines, TarShards

Faulty = tuple[GCS, FaultProxy]
Environment = dict[str, str]

BIG = random.Random(1).randbytes(5_000_000)
OBJECTS = {"train/0.bin": BIG, "train/1.bin": b"one", "train/sub/2.bin": b"two", "training": b"", "ü %20#?+&": b"odd"}
QUICK = stores.Retry(first_wait_s=0.01, max_wait_s=0.1)
CROP = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])


@pytest.fixture(autouse=True)
def anonymous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without credentials, and no cloud around it."""
    without_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, "127.0.0.1:1")


@pytest.fixture(scope="session")
def guarded(gcs: GCS, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guard]:
    with guard(tmp_path_factory.mktemp("guard"), gcs) as front:
        yield front


@pytest.fixture
def faulty_gcs(gcs: GCS) -> Iterator[Faulty]:
    with fault_proxy(gcs.endpoint) as proxy:
        yield GCS(proxy.endpoint()), proxy


@pytest.fixture(scope="session")
def bucket(gcs: GCS) -> str:
    return gcs.bucket(OBJECTS)


def opened(server: GCS, bucket: str, **more: Any) -> stores.Store:
    return stores.open_store(f"gs://{bucket}", **{"options": server.options, "retry": QUICK, **more})


def random_ranges(count: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    dice = random.Random(seed)
    starts = [dice.randrange(len(BIG) - most) for _ in range(count)]
    return [(start, start + dice.randrange(most)) for start in starts]


def test_objects_and_ranges_equal_the_stored_bytes(gcs: GCS, bucket: str, tmp_path: Path) -> None:
    ranges = random_ranges(100, 9000)
    for cache in (None, tmp_path / "cache"):
        store = opened(gcs, bucket, cache=cache)
        for path, data in OBJECTS.items():
            assert store.size(path) == len(data)
            assert store.read(path) == data
        found = store.read_many("train/0.bin", ranges)
        assert all(data == BIG[start:stop] for data, (start, stop) in zip(found, ranges, strict=True))


def test_listings_and_look_ups_report_the_same_versions(gcs: GCS, bucket: str) -> None:
    store = opened(gcs, bucket)
    assert [info.path for info in store.list()] == sorted(OBJECTS)
    for prefix, expected in (("train", 4), ("train/", 3), ("train/s", 1), ("nothing", 0)):
        assert len(list(store.list(prefix))) == expected
    assert all(info == store.info(info.path) for info in store.list())
    below = stores.open_store(f"gcs://{bucket}/train", options={**gcs.options, "endpoint": f"{gcs.endpoint}/"})
    assert [info.path for info in below.list()] == ["0.bin", "1.bin", "sub/2.bin"]
    assert below.read("sub/2.bin") == b"two"


@pytest.mark.parametrize(
    ("ask", "kind", "words"),
    [
        (lambda store: store.read("no"), stores.ObjectNotFoundError, "no: there is no such object"),
        (lambda store: store.size("no"), stores.ObjectNotFoundError, "no: there is no such object"),
        (lambda store: store.read("train/1.bin", 0, 5), stores.RangeError, r"train/1.bin, bytes \[0, 5\): .* 3 bytes"),
        (lambda store: store.read("train/1.bin", 7, 9), stores.RangeError, r"train/1.bin, bytes \[7, 9\)"),
        (
            lambda store: store.read("train/1.bin", 0, 3, version="v0"),
            stores.ObjectChangedError,
            "has changed .*: version v0",
        ),
    ],
)
def test_unreadable_objects_are_named(
    gcs: GCS, bucket: str, ask: Callable[[stores.Store], Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=rf"gs://{bucket}/?.*{words}") as caught:
        ask(opened(gcs, bucket))
    assert caught.value.__context__ is None


def test_a_bucket_that_is_not_there(gcs: GCS) -> None:
    with pytest.raises(stores.ObjectNotFoundError, match="gs://no-such-bucket/x: there is no such object"):
        opened(gcs, "no-such-bucket").read("x")


def test_an_object_that_changes_between_reads(gcs: GCS, tmp_path: Path) -> None:
    bucket = gcs.bucket({"x": b"a" * 5000})
    plain = opened(gcs, bucket)
    kept = opened(gcs, bucket, cache=stores.Cache(tmp_path / "cache", limit="1 MB", piece_nbytes=1000))
    version = plain.info("x").version
    assert kept.read("x", 0, 1000) == b"a" * 1000
    gcs.put(bucket, {"x": b"b" * 5000})
    for change in (lambda: plain.read("x", 0, 10, version=version), lambda: kept.read("x", 500, 1500)):
        with pytest.raises(stores.ObjectChangedError, match=f"gs://{bucket}/x has changed"):
            change()
    assert kept.read("x", 500, 1500) == b"b" * 1000


def test_objects_that_google_decompresses_have_no_ranges(gcs: GCS) -> None:
    bucket = gcs.bucket({})
    gcs.put(bucket, {"x.jsonl": gzip.compress(b"{}\n" * 1000)}, contentEncoding="gzip")
    with pytest.raises(
        stores.RangeError, match=rf"gs://{bucket}/x\.jsonl.*Content-Encoding: gzip.*without that header"
    ):
        opened(gcs, bucket).read("x.jsonl", 0, 10)


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_by_itself(faulty_gcs: Faulty, bucket: str, kind: str) -> None:
    server, proxy = faulty_gcs
    proxy.forced.append(kind)
    assert opened(server, bucket).read("train/0.bin", 1_000_000, 1_400_000) == BIG[1_000_000:1_400_000]
    assert proxy.happened[kind] == 1


@pytest.mark.usefixtures("hurried")
def test_faults_on_one_request_in_twenty_change_no_byte(faulty_gcs: Faulty, bucket: str) -> None:
    server, proxy = faulty_gcs
    proxy.faults = Faults(share=0.05, slow_s=0.1, kinds=tuple(kind for kind in KINDS if kind != "503 Retry-After"))
    store = opened(server, bucket, requests=stores.Requests(gap_nbytes=0, max_concurrent=16))
    ranges = random_ranges(300, 30_000)
    found = store.read_many("train/0.bin", ranges)
    assert all(data == BIG[start:stop] for data, (start, stop) in zip(found, ranges, strict=True))
    assert sum(proxy.happened[kind] for kind in proxy.faults.kinds)


@pytest.mark.usefixtures("hurried")
def test_retries_ask_no_other_server(faulty_gcs: Faulty, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own metadata server, here the proxy, would be one."""
    server, proxy = faulty_gcs
    for name in ("GCE_METADATA_HOST", "GCE_METADATA_IP"):
        monkeypatch.setenv(name, proxy.endpoint().removeprefix("http://"))
    for options in (server.options, {"endpoint": server.endpoint, "bearer_token": "any"}):
        before = proxy.happened.total()
        proxy.forced.extend(["503", "503"])
        assert opened(server, bucket, options=options).read("train/1.bin", 0, 3) == b"one"
        assert proxy.happened.total() - before == 3


def test_a_server_that_throttles_a_service_account_is_left_alone_for_a_second_each_time(
    faulty_gcs: Faulty, guarded: Guard, bucket: str
) -> None:
    server, proxy = faulty_gcs
    store = opened(server, bucket, options={"endpoint": server.endpoint, "service_account_key": guarded.key})
    before = stores.statistics()
    proxy.forced.extend(["503 Retry-After", "503"])
    assert store.read("train/1.bin", 0, 3) == b"one"
    assert stores.statistics().waited_s - before.waited_s >= 2.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twenty samples in three tars, and lines."""
    folder = tmp_path_factory.mktemp("shards")
    image_shards(folder, [7, 1, 12])
    (folder / "lines.txt").write_text("".join(f"line {number}\n" for number in range(50)))
    return folder


@pytest.fixture(scope="module")
def shards(gcs: GCS, folder: Path) -> str:
    return gcs.bucket({f"train/{path.name}": path.read_bytes() for path in folder.iterdir()})


@pytest.mark.parametrize("method", ["thread", "process"])
def test_loaders_deliver_the_samples_of_the_files(
    guarded: Guard, folder: Path, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Also in processes, which get the name of the variable that holds the key."""

    def batches(data: Any, **how: Any) -> list[Any]:
        with fl.DataLoader(data, 6, shuffle=True, seed=7, **how) as loader:
            return list(loader)

    monkeypatch.setenv("TESTS_KEY", guarded.key)
    options = {"endpoint": guarded.endpoint, "service_account_key": stores.FromEnv("TESTS_KEY")}
    how = {"num_workers": 2, "worker_method": method}
    near = TarShards(folder, ("jpg", "cls"), transform=CROP)
    far = TarShards(
        f"gs://{shards}/train/*.tar", ("jpg", "cls"), transform=CROP, cache=tmp_path / "cache", options=options
    )
    assert equal(batches(far, **how), batches(near))
    lines = Lines(f"gs://{shards}/train/lines.txt", options=options)
    assert equal(batches(lines, **how), batches(Lines(folder / "lines.txt")))


def test_the_command_reads_from_the_emulator_that_googles_tools_use(
    gcs: GCS, shards: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for server in (gcs.endpoint, gcs.endpoint.removeprefix("http://")):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", server)
        assert feedline("index", f"gs://{shards}/train/*.tar", "--into", tmp_path / server[:4]).exit_code == 0
        assert len(list((tmp_path / server[:4]).rglob("train-*"))) == 3


WAYS: dict[str, Callable[[Guard, Path], tuple[dict[str, Any], Environment]]] = {
    "a token": lambda guard, _: ({"bearer_token": guard.token}, {}),
    "a key": lambda guard, _: ({"service_account_key": guard.key}, {}),
    "a file": lambda _, file: ({"service_account": str(file)}, {}),
    "GOOGLE_SERVICE_ACCOUNT": lambda _, file: ({}, {"GOOGLE_SERVICE_ACCOUNT": str(file)}),
    "GOOGLE_SERVICE_ACCOUNT_KEY": lambda guard, _: ({}, {"GOOGLE_SERVICE_ACCOUNT_KEY": guard.key}),
    "GOOGLE_APPLICATION_CREDENTIALS": lambda _, file: ({}, {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}),
    "gcloud's own file": lambda _, file: ({}, {"HOME": str(file.parents[2])}),
    "the machine's own": lambda guard, _: ({}, {"GCE_METADATA_HOST": guard.host}),
}


@pytest.mark.parametrize("way", WAYS)
def test_accepted_credentials(
    guarded: Guard, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    file = tmp_path / "home" / ".config" / "gcloud" / "application_default_credentials.json"
    file.parent.mkdir(parents=True)
    file.write_text(guarded.key)
    options, variables = WAYS[way](guarded, file)
    for name, value in {"GOOGLE_BASE_URL": guarded.endpoint, **variables}.items():
        monkeypatch.setenv(name, value)
    store = stores.open_store(f"gs://{bucket}", options=options)
    assert store.read("train/1.bin") == b"one"
    assert [info.path for info in store.list("train/1")] == ["train/1.bin"]


def test_refused_credentials(guarded: Guard, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def reading(**options: Any) -> Any:
        store = stores.open_store(f"gs://{bucket}", options={"endpoint": guarded.endpoint, **options})
        return store.read("train/1.bin")

    for options in ({"bearer_token": "wrong"}, {"skip_signature": True}):
        with pytest.raises(stores.AccessDeniedError, match=rf"gs://{bucket}/train/1\.bin: .*\(status 401\).*options="):
            reading(**options)
    monkeypatch.setenv("GCE_METADATA_HOST", guarded.host + "/nothing")
    monkeypatch.setenv("GCE_METADATA_IP", guarded.host + "/nothing")
    with pytest.raises(
        stores.AccessDeniedError,
        match=rf"gs://{bucket}/train/1\.bin: no credentials were found.*GOOGLE_APPLICATION_CREDENTIALS.*skip_signature",
    ):
        reading()


@pytest.mark.usefixtures("hurried")
def test_secrets_show_nowhere(
    faulty_gcs: Faulty, guarded: Guard, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Errors with their tracebacks and causes, representations, logs, pickles, statistics, the cache's files."""
    server, proxy = faulty_gcs
    caplog.set_level(logging.DEBUG)
    shown = ""
    retry = stores.Retry(attempts=2, first_wait_s=0, max_wait_s=0)
    account = json.loads(guarded.key)
    broken = json.dumps({**account, "client_email": ["secret-account"]})
    for secret in (
        {"service_account_key": guarded.key},
        {"service_account_key": broken},
        {"service_account": guarded.key},
        {"bearer_token": guarded.token},
    ):
        options = {"endpoint": server.endpoint, **secret}
        store = opened(server, bucket, options=options, retry=retry, cache=tmp_path / "cache")
        shown += shown_by(store, proxy)
    text = shown + caplog.text + "".join(proxy.happened)
    kept = kept_in(tmp_path / "cache")
    assert "AccessDeniedError" in text
    assert "StoreUnavailableError" in text
    private = account["private_key"].splitlines()[3]
    for secret_text in (private, account["client_email"], guarded.token, "secret-account", "X-Goog-Signature"):
        assert secret_text not in text
        assert secret_text.encode() not in kept
