"""An epoch over shards on a real S3 server 40 ms away: feedline compared with WebDataset and Mosaic.

One contest over a link of 1 Gbit/s, one limited only per request, as in a cloud. Each contestant has two workers.
"Bare" is the rate of concurrent range requests of obstore for the same bytes. Needs the servers of the tests:
scripts/system-packages --test.
"""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import tarfile
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import obstore
from obstore.store import S3Store

import feedline as fl
from feedline.datasets import TarShards
from harness import Contest
from images.environments import ENVIRONMENTS, ROOT
from remote_servers import EACH, GIGABIT, LATENCY_S, S3, proxied, radosgw
from settled import settled

PEERS = Path(__file__).parent / "remote_peers"
SHARDS, SAMPLES_EACH, NBYTES = 32, 300, 110_000
SAMPLES, BATCH, WORKERS = SHARDS * SAMPLES_EACH, 64, 2
MEGABYTES = SAMPLES * NBYTES / 1e6
AT_ONCE, RANGE = 32, 1 << 20
FIELDS, DECODERS = ("bin", "cls"), {"bin": bytes}
ATTEMPTS = 5
"""Mosaic's workers sometimes read a shard that another one is still fetching, and fail."""


def write_tars(folder: Path) -> None:
    """Tars in WebDataset's layout: per sample a member of random bytes and one with a label."""
    folder.mkdir(parents=True)
    rng = random.Random(0)
    for shard in range(SHARDS):
        with tarfile.open(folder / f"train-{shard:03}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(SAMPLES_EACH):
                for ending, data in (("bin", rng.randbytes(NBYTES)), ("cls", b"%d" % rng.randrange(1000))):
                    member = tarfile.TarInfo(f"{shard:03}{number:05}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def upload(server: S3, folder: Path) -> str:
    """A bucket with all files of a folder."""
    return server.bucket({str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*")})


def bare(server: S3, bucket: str) -> Callable[[], None]:
    store = _opened(server, bucket)
    sizes = {meta["path"]: meta["size"] for meta in obstore.list(store, "tars").collect()}
    places = [(path, start) for path, size in sizes.items() for start in range(0, size, RANGE)]

    def read(place: tuple[str, int]) -> int:
        path, start = place
        return len(obstore.get_range(store, path, start=start, end=min(start + RANGE, sizes[path])))

    def run() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert sum(pool.map(read, places)) == sum(sizes.values())

    return run


def remote(server: S3, bucket: str, cache: Path | None) -> TarShards:
    """The dataset; from the second time on, the index of the tars exists."""
    keys = {name: fl.stores.FromEnv(f"BENCH_{name.upper()}") for name in ("access_key_id", "secret_access_key")}
    os.environ.update({f"BENCH_{name.upper()}": server.options[name] for name in keys})
    options = {**server.options, **keys}  # secrets are not sent to worker processes
    return TarShards(f"s3://{bucket}/tars/train-*.tar", FIELDS, decode=DECODERS, cache=cache, options=options)


def loader(dataset: TarShards, method: Any = "auto", workers: int = WORKERS) -> fl.DataLoader:
    order = fl.samplers.ShardShuffled(dataset.shard_sizes, 0, 4)
    return fl.DataLoader(dataset, BATCH, sampler=order, num_workers=workers, collate_fn=list, worker_method=method)


def epoch(batches: fl.DataLoader) -> None:
    assert sum(map(len, batches)) == SAMPLES


def ours(server: S3, bucket: str, method: str, cache: Callable[[], Path | None]) -> Callable[[], None]:
    """From opening the dataset to the end of its first epoch."""

    def run() -> None:
        with loader(remote(server, bucket, cache()), method) as batches:
            epoch(batches)

    return run


def without_index(server: S3, bucket: str, folder: Path) -> Callable[[], None]:
    """The very first epoch: the tars are read into the cache to find the samples."""

    def run() -> None:
        before = os.environ["XDG_CACHE_HOME"]
        os.environ["XDG_CACHE_HOME"] = str(folder / uuid4().hex)
        try:
            ours(server, bucket, "thread", lambda: folder / uuid4().hex)()
        finally:
            os.environ["XDG_CACHE_HOME"] = before

    return run


def peer(environment: str, script: str, server: S3, task: Callable[[], dict[str, Any]]) -> Callable[[], float]:
    """Megabytes per second of an epoch in the peer's own environment, without its imports, with its workers."""
    there = ENVIRONMENTS[environment]
    there.make()
    keys = {"AWS_ACCESS_KEY_ID": server.access_key_id, "AWS_SECRET_ACCESS_KEY": server.secret_access_key}
    variables = {**there.surroundings(), **keys, "S3_ENDPOINT_URL": server.endpoint, "AWS_REGION": "us-east-1"}

    def measure() -> float:
        for _ in range(ATTEMPTS):
            task_text = json.dumps({**task(), "batch": BATCH, "workers": WORKERS})
            done = subprocess.run(
                [there.python, PEERS / script, task_text], env=variables, capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                return MEGABYTES / float(json.loads(done.stdout.splitlines()[-1])["seconds"])
            print(f"{script} failed; trying again: {done.stderr.splitlines()[-1]}")
        raise RuntimeError(f"{script} failed {ATTEMPTS} times")

    return measure


def sign_urls(server: S3, bucket: str) -> list[str]:
    """Signed URLs, which grant read access to the tars for an hour."""
    paths = [f"tars/train-{shard:03}.tar" for shard in range(SHARDS)]
    return list(obstore.sign(_opened(server, bucket), "GET", paths, timedelta(hours=1)))


def _opened(server: S3, bucket: str) -> Any:
    options = {**server.options, "region": "us-east-1"}
    return S3Store(bucket, config=options, client_options={"allow_http": True})


def main() -> None:
    with tempfile.TemporaryDirectory(dir=ROOT / "build") as name, radosgw(Path(name, "ceph")) as server:
        folder = Path(name)
        write_tars(folder / "data" / "tars")
        mosaic = ENVIRONMENTS["mosaic"]
        mosaic.make()
        command = [
            str(mosaic.python),
            str(PEERS / "write_shards.py"),
            str(folder / "data/tars"),
            str(folder / "data/mds"),
        ]
        subprocess.run(command, check=True, env=mosaic.surroundings())
        bucket = upload(server, folder / "data")
        with settled(folder):
            with proxied(server, latency_s=LATENCY_S, nbytes_per_s=GIGABIT) as far:
                by_gigabit(far, bucket, folder)
                from_warm_cache(far, bucket, folder)
            with proxied(server, latency_s=LATENCY_S, nbytes_per_s_each=EACH) as far:
                by_requests(far, bucket, folder)


def by_gigabit(far: S3, bucket: str, folder: Path) -> None:
    race = _against_bare("an epoch of tars from S3 40 ms away, cold", far, bucket)
    for name, method in (("threads", "thread"), ("processes", "process")):
        race.add(f"feedline, {name}, cold cache", ours(far, bucket, method, _fresh_cache(folder)), MEGABYTES)
    race.add("feedline, threads, cold cache, no index", without_index(far, bucket, folder), MEGABYTES)
    race.add("feedline, threads, no cache", ours(far, bucket, "thread", lambda: None), MEGABYTES)
    _with_peers(race, far, bucket, folder)
    race.run(rounds=2, warm_up=0).publish("obstore")


def by_requests(far: S3, bucket: str, folder: Path) -> None:
    race = _against_bare("an epoch of tars from S3, 85 MB a second each request, cold", far, bucket)
    for name, method in (("threads", "thread"), ("processes", "process")):
        race.add(f"feedline, {name}, cold cache", ours(far, bucket, method, _fresh_cache(folder)), MEGABYTES)
    _with_peers(race, far, bucket, folder)
    race.run(rounds=3, warm_up=0).publish("obstore")


def _against_bare(title: str, far: S3, bucket: str) -> Contest:
    race = Contest(title, unit="MB/s", baseline="bare range requests")
    race.add("bare range requests", bare(far, bucket), MEGABYTES)
    return race


def _fresh_cache(folder: Path) -> Callable[[], Path]:
    return lambda: folder / uuid4().hex


def _with_peers(race: Contest, far: S3, bucket: str, folder: Path) -> None:
    urls = sign_urls(far, bucket)
    race.measure(
        "WebDataset, pipe:curl", peer("torch", "webdataset_tars.py", far, lambda: {"urls": urls, "samples": SAMPLES})
    )
    shards = lambda: {"remote": f"s3://{bucket}/mds", "local": str(_fresh_cache(folder)()), "samples": SAMPLES}  # noqa: E731
    race.measure("Mosaic, its own shards", peer("mosaic", "mosaic_shards.py", far, shards))


def from_warm_cache(far: S3, bucket: str, folder: Path) -> None:
    """An epoch from a warm cache: in a new process, and later.

    A new process has to look up its objects in the store, and to check each piece. There are no workers: threads that
    copy bytes wait for each other, for any source.
    """
    warm, tars = folder / "warm", folder / "data" / "tars"
    ours(far, bucket, "thread", lambda: warm)()
    near = lambda: TarShards(tars, FIELDS, decode=DECODERS)  # noqa: E731
    race = Contest("an epoch of tars from a warm cache", unit="MB/s", baseline="local tars")
    race.add("local tars", lambda: first_epoch(near()), MEGABYTES)
    race.add("feedline, warm cache", lambda: first_epoch(remote(far, bucket, warm)), MEGABYTES)
    with loader(near(), workers=0) as local, loader(remote(far, bucket, warm), workers=0) as cached:
        race.add("local tars, later epochs", lambda: epoch(local), MEGABYTES)
        race.add("feedline, warm cache, later epochs", lambda: epoch(cached), MEGABYTES)
        race.run(rounds=7, warm_up=1).publish("obstore")


def first_epoch(dataset: TarShards) -> None:
    with loader(dataset, workers=0) as batches:
        epoch(batches)


if __name__ == "__main__":
    os.environ.setdefault("XDG_CACHE_HOME", str(ROOT / "build" / "bench"))
    main()
