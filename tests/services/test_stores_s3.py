"""A production S3 server, behind a proxy that injects faults."""

from __future__ import annotations

import logging
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ceph import S3
from fault_proxy import KINDS, FaultProxy, Faults
from secret_cases import kept_in, shown_by

import feedline as fl
from feedline import stores
from feedline.errors import ArgumentError

Faulty = tuple[S3, FaultProxy]

BIG = random.Random(1).randbytes(20_000_000)
OBJECTS = {"train/0.bin": BIG, "train/1.bin": b"one", "train/sub/2.bin": b"two", "training": b"", "ü %20#?+": b"odd"}
QUICK = stores.Retry(first_wait_s=0.01, max_wait_s=0.1)


@pytest.fixture(scope="session")
def bucket(s3: S3) -> str:
    return s3.bucket(OBJECTS)


def opened(server: S3, bucket: str, **more: Any) -> stores.Store:
    return stores.open_store(f"s3://{bucket}", options=server.options, **{"retry": QUICK, **more})


@pytest.fixture
def store(s3: S3, bucket: str) -> stores.Store:
    return opened(s3, bucket)


def random_ranges(count: int, most: int, seed: int = 0) -> list[tuple[int, int]]:
    dice = random.Random(seed)
    starts = [dice.randrange(len(BIG) - most) for _ in range(count)]
    return [(start, start + dice.randrange(most)) for start in starts]


def test_objects_equal_the_stored_bytes(store: stores.Store) -> None:
    for name, data in OBJECTS.items():
        assert store.read(name) == data
        assert store.info(name).size == len(data)


def test_ranges_equal_the_stored_bytes(store: stores.Store) -> None:
    ranges = [*random_ranges(300, 100_000), (0, len(BIG)), (5, 5)]
    found = store.read_many("train/0.bin", ranges)
    assert all(data == BIG[start:stop] for data, (start, stop) in zip(found, ranges, strict=True))
    assert store.read("train/0.bin", 19_999_990) == BIG[-10:]


def test_near_ranges_share_requests(store: stores.Store) -> None:
    before = stores.statistics().requests
    store.read_many("train/0.bin", [(at, at + 500) for at in range(0, 1_000_000, 1000)])
    assert stores.statistics().requests - before == 1


def test_listing(store: stores.Store, s3: S3, bucket: str) -> None:
    assert [info.path for info in store.list()] == sorted(OBJECTS)
    assert [info.path for info in store.list("train")] == ["train/0.bin", "train/1.bin", "train/sub/2.bin", "training"]
    assert [info.path for info in store.list("train/")] == ["train/0.bin", "train/1.bin", "train/sub/2.bin"]
    assert next(store.list("train/0.bin")) == store.info("train/0.bin")
    below = stores.open_store(f"s3://{bucket}/train", options=s3.options)
    assert [info.path for info in below.list()] == ["0.bin", "1.bin", "sub/2.bin"]
    assert below.read("1.bin") == b"one"
    assert below.url == f"s3://{bucket}/train"


def test_globs(s3: S3, bucket: str) -> None:
    pattern = f"s3://{bucket}/train/**/*.bin"
    assert stores.expand(pattern, options=s3.options) == [
        f"s3://{bucket}/train/{name}" for name in ("0.bin", "1.bin", "sub/2.bin")
    ]
    with pytest.raises(stores.ObjectNotFoundError, match=r"\*\.tar: nothing matches"):
        stores.expand(f"s3://{bucket}/*.tar", options=s3.options)


def test_credentials_come_from_the_environment(s3: S3, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", s3.options[name])
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    store = stores.open_store(f"s3://{bucket}")
    assert store.read("train/1.bin") == b"one"
    assert pickle.loads(pickle.dumps(store)).read("train/1.bin") == b"one"


WRONG: dict[str, tuple[Callable[[stores.Store], Any], type[Exception], str]] = {
    "missing": (lambda store: store.read("train/9.bin"), stores.ObjectNotFoundError, "train/9.bin: .*no such object"),
    "size": (lambda store: store.size("train/9.bin"), stores.ObjectNotFoundError, "train/9.bin: .*no such object"),
    "past": (lambda store: store.read("train/1.bin", 1, 4), stores.RangeError, r"1\.bin, bytes \[1, 4\): .* 3 bytes"),
    "beyond": (lambda store: store.read("train/1.bin", 5, 9), stores.RangeError, r"bytes \[5, 9\): .*ends before"),
    "path": (lambda store: store.read("train/../1.bin"), ArgumentError, "not a path within a store"),
    "version": (
        lambda store: store.read("train/1.bin", version="v0"),
        stores.ObjectChangedError,
        "has changed .*: version v0",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_unreadable_objects_are_named(store: stores.Store, name: str) -> None:
    ask, kind, words = WRONG[name]
    with pytest.raises(kind, match=words) as caught:
        ask(store)
    assert caught.value.__context__ is None
    assert stores.statistics().failures


def test_wrong_credentials_buckets_and_users(s3: S3, bucket: str) -> None:
    wrong_secret = S3(s3.endpoint, s3.access_key_id, "wrong-secret")
    unknown_key = S3(s3.endpoint, "UNKNOWNKEY", s3.secret_access_key)
    for server, name, kind, words in (
        (wrong_secret, bucket, stores.AccessDeniedError, "the secret key does not belong to the access key"),
        (unknown_key, bucket, stores.AccessDeniedError, "the server does not know the access key"),
        (s3.other_user(), bucket, stores.AccessDeniedError, "the credentials may not read it"),
        (s3, "no-such-bucket", stores.ObjectNotFoundError, "there is no such bucket"),
    ):
        store = opened(server, name)
        with pytest.raises(kind, match=f"s3://{name}/train/1.bin: {words}"):
            store.read("train/1.bin")
        with pytest.raises(kind, match=f"s3://{name}"):
            list(store.list())
        assert stores.statistics().retries < 10_000


def test_expired_credentials(faulty_s3: Faulty, bucket: str) -> None:
    server, proxy = faulty_s3
    proxy.forced.append("expired")
    with pytest.raises(stores.AccessDeniedError, match=r"have expired .*renew them, then resume"):
        opened(server, bucket).read("train/1.bin", 0, 3)


def test_a_server_that_is_not_there(bucket: str) -> None:
    unreachable = S3("http://127.0.0.1:1")
    retry = stores.Retry(attempts=3, first_wait_s=0, max_wait_s=0)
    with pytest.raises(stores.StoreUnavailableError, match=r"3 attempts failed .*: no connection\. Check the server"):
        opened(unreachable, bucket, retry=retry).read("train/1.bin")
    with pytest.raises(ArgumentError, match="endpoint is the address of a server"):
        opened(S3("nonsense"), bucket).read("train/1.bin")


def test_an_object_that_changes_between_reads(s3: S3, tmp_path: Path) -> None:
    bucket = s3.bucket({"x": b"a" * 5000})
    plain = opened(s3, bucket)
    kept = opened(s3, bucket, cache=stores.Cache(tmp_path, limit="1 MB", piece_nbytes=1000))
    version = plain.info("x").version
    assert kept.read("x", 0, 1000) == b"a" * 1000
    s3.put(bucket, {"x": b"b" * 5000})
    with pytest.raises(stores.ObjectChangedError, match=f"s3://{bucket}/x has changed"):
        plain.read("x", 0, 10, version=version)
    with pytest.raises(stores.ObjectChangedError, match=f"s3://{bucket}/x has changed"):
        kept.read("x", 500, 1500)
    assert kept.read("x", 500, 1500) == b"b" * 1000
    assert plain.read("x", 0, 10) == b"b" * 10


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_by_itself(faulty_s3: Faulty, bucket: str, kind: str) -> None:
    server, proxy = faulty_s3
    store = opened(server, bucket)
    before = stores.statistics()
    proxy.forced.append(kind)
    assert store.read("train/0.bin", 1_000_000, 1_400_000) == BIG[1_000_000:1_400_000]
    after = stores.statistics()
    assert proxy.happened[kind] == 1
    assert after.retries - before.retries == (kind != "slow")
    assert after.truncated - before.truncated == (kind == "short")
    assert after.throttled - before.throttled == kind.startswith("503")


def test_a_server_that_throttles_is_left_alone_for_a_second_each_time(faulty_s3: Faulty, bucket: str) -> None:
    server, proxy = faulty_s3
    before = stores.statistics()
    proxy.forced.extend(["503 Retry-After", "503"])
    assert opened(server, bucket).read("train/1.bin", 0, 3) == b"one"
    assert stores.statistics().waited_s - before.waited_s >= 2.0


@pytest.mark.usefixtures("hurried")
def test_faults_on_one_request_in_twenty_change_no_byte(faulty_s3: Faulty, bucket: str, tmp_path: Path) -> None:
    server, proxy = faulty_s3
    proxy.faults = Faults(share=0.05, slow_s=0.1, kinds=tuple(kind for kind in KINDS if kind != "503 Retry-After"))
    cache = stores.Cache(tmp_path, limit="100 MB", piece_nbytes=100_000)
    requests = stores.Requests(gap_nbytes=0, max_concurrent=16)
    for store in (opened(server, bucket, requests=requests), opened(server, bucket, requests=requests, cache=cache)):
        for seed in range(3):
            ranges = random_ranges(200, 30_000, seed)
            found = store.read_many("train/0.bin", ranges)
            assert all(data == BIG[start:stop] for data, (start, stop) in zip(found, ranges, strict=True))
        assert [info.path for info in store.list()] == sorted(OBJECTS)
    assert all(proxy.happened[kind] for kind in proxy.faults.kinds)


@pytest.mark.usefixtures("hurried")
def test_everything_fails(faulty_s3: Faulty, bucket: str) -> None:
    server, proxy = faulty_s3
    proxy.faults = Faults(share=1.0, kinds=("reset", "503"))
    retry = stores.Retry(attempts=4, first_wait_s=0, max_wait_s=0)
    with pytest.raises(stores.StoreUnavailableError, match="4 attempts failed") as caught:
        opened(server, bucket, retry=retry).read_many("train/0.bin", random_ranges(20, 1000))
    assert isinstance(caught.value, ConnectionError)


def test_a_forked_process_reads_on(store: stores.Store) -> None:
    assert store.read("train/1.bin") == b"one"
    child = os.fork()
    if child == 0:
        grandchild = os.fork()
        if grandchild:
            _, status = os.waitpid(grandchild, 0)
        good = store.read("train/0.bin", 5, 5_000_000) == BIG[5:5_000_000] and store.size("train/1.bin") == 3
        os._exit(0 if good and (not grandchild or status == 0) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert store.read("train/1.bin") == b"one"


class Ranges:
    """A dataset of 200 ranges of one remote object."""

    def __init__(self, store: stores.Store) -> None:
        self.store = store
        self.ranges = random_ranges(200, 5000)

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, index: int) -> int:
        start, stop = self.ranges[index]
        return sum(self.store.read("train/0.bin", start, stop))


@pytest.mark.parametrize("context", [None, "fork"])
def test_workers_read_through_the_store_and_a_shared_cache(
    s3: S3, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str | None
) -> None:
    monkeypatch.setenv("TEST_KEY", s3.access_key_id)
    monkeypatch.setenv("TEST_SECRET", s3.secret_access_key)
    options = {
        "endpoint": s3.endpoint,
        "access_key_id": stores.FromEnv("TEST_KEY"),
        "secret_access_key": stores.FromEnv("TEST_SECRET"),
    }
    cache = stores.Cache(tmp_path, limit="100 MB", piece_nbytes=1 << 20)
    data = Ranges(stores.open_store(f"s3://{bucket}", options=options, cache=cache))
    assert data[0] == sum(BIG[slice(*data.ranges[0])])  # read here before the workers start
    loader = fl.DataLoader(
        data,
        batch_size=10,
        num_workers=2,
        worker_method="process",
        multiprocessing_context=context,  # type: ignore[arg-type]
    )
    with loader:
        found = [int(number) for batch in loader for number in batch]
    assert found == [sum(BIG[start:stop]) for start, stop in data.ranges]


@pytest.mark.usefixtures("hurried")
def test_secrets_show_nowhere(faulty_s3: Faulty, bucket: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Errors with their tracebacks and causes, representations, logs, pickles, statistics, the cache's files."""
    server, proxy = faulty_s3
    caplog.set_level(logging.DEBUG)
    shown = ""
    retry = stores.Retry(attempts=2, first_wait_s=0, max_wait_s=0)
    for secret in (server.secret_access_key, "another-secret-of-the-tests"):
        options = {**server.options, "secret_access_key": secret}
        store = stores.open_store(f"s3://{bucket}", options=options, retry=retry, cache=tmp_path / "cache")
        shown += shown_by(store, proxy)
    text = shown + caplog.text + "".join(proxy.happened)
    kept = kept_in(tmp_path / "cache")
    assert "AccessDeniedError" in text
    assert "StoreUnavailableError" in text
    for secret in (server.secret_access_key, "another-secret-of-the-tests", server.access_key_id, "X-Amz-Signature"):
        assert secret not in text
        assert secret.encode() not in kept
