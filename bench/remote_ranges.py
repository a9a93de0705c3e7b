"""Many range reads from a real S3 server 40 ms away: feedline compared with concurrent reads of obstore.

Needs the servers of the tests: scripts/system-packages --test.
"""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from uuid import uuid4

import obstore
from obstore.store import S3Store

from feedline import stores
from harness import Contest
from remote_servers import GIGABIT, LATENCY_S, S3, proxied, radosgw

OBJECTS, SIZE, RANGE = 8, 64 << 20, 1 << 20
AT_ONCE = 32
LONG = 4
MEGABYTES = OBJECTS * SIZE / 1e6


def ranges() -> list[tuple[str, int]]:
    """Every byte of every object once, in random order."""
    places = [(f"{number}.bin", start) for number in range(OBJECTS) for start in range(0, SIZE, RANGE)]
    random.Random(0).shuffle(places)
    return places


def bare_threads(server: S3, bucket: str) -> Callable[[], None]:
    store = bare(server, bucket)

    def read(place: tuple[str, int]) -> int:
        path, start = place
        return len(obstore.get_range(store, path, start=start, end=start + RANGE))

    def run() -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            assert sum(pool.map(read, ranges())) == OBJECTS * SIZE

    return run


def bare_asyncio(server: S3, bucket: str) -> Callable[[], None]:
    store = bare(server, bucket)

    async def read(place: tuple[str, int], limit: asyncio.Semaphore) -> int:
        async with limit:
            return len(await obstore.get_range_async(store, place[0], start=place[1], length=RANGE))

    async def read_all() -> None:
        limit = asyncio.Semaphore(AT_ONCE)
        assert sum(await asyncio.gather(*[read(place, limit) for place in ranges()])) == OBJECTS * SIZE

    return lambda: asyncio.run(read_all())


def bare(server: S3, bucket: str) -> Any:
    options = {**server.options, "region": "us-east-1"}
    return S3Store(bucket, config=options, client_options={"allow_http": True})


def ours(server: S3, bucket: str, passes: int = 1) -> Callable[[], None]:
    """One reader per object, like the workers of a loader; all share one store."""
    requests = stores.Requests(max_concurrent=AT_ONCE, gap_nbytes=0, max_nbytes=RANGE)
    return reading(lambda: stores.open_store(f"s3://{bucket}", options=server.options, requests=requests), passes)


def cached(server: S3, bucket: str, cache: Callable[[], stores.Cache]) -> Callable[[], None]:
    """The same through a cache, which fetches pieces of its own size."""
    return reading(lambda: stores.open_store(f"s3://{bucket}", options=server.options, cache=cache()))


def reading(opened: Callable[[], stores.Store], passes: int = 1) -> Callable[[], None]:
    def run() -> None:
        store = opened()
        wanted: dict[str, list[tuple[int, int]]] = {}
        for path, start in ranges():
            wanted.setdefault(path, []).append((start, start + RANGE))
        with ThreadPoolExecutor(OBJECTS) as readers:
            found = readers.map(lambda item: sum(map(len, store.read_many(*item))), [*wanted.items()] * passes)
            assert sum(found) == OBJECTS * SIZE * passes

    return run


def copied(store: stores.Store) -> Callable[[], None]:
    def run() -> None:
        total = 0
        for path, start in ranges():
            total += len(bytes(store.read(path, start, start + RANGE)))
        assert total == OBJECTS * SIZE

    return run


def main() -> None:
    with tempfile.TemporaryDirectory() as name, radosgw(Path(name, "ceph")) as server:
        folder, objects = Path(name), {f"{number}.bin": os.urandom(SIZE) for number in range(OBJECTS)}
        bucket = server.bucket(objects)
        with proxied(server, latency_s=LATENCY_S, nbytes_per_s=GIGABIT) as far:
            compare_cold(far, bucket, folder, "1 MiB ranges from S3 40 ms away by 1 Gbit/s")
        with proxied(server, latency_s=LATENCY_S) as far:
            compare_cold(far, bucket, folder, "1 MiB ranges from S3 40 ms away")
            compare_warm(far, bucket, folder, objects)
            with proxied(server, latency_s=LATENCY_S, share=0.05) as faulty:
                compare_faults(far, faulty, bucket)


def compare_cold(far: S3, bucket: str, folder: Path, name: str) -> None:
    race = Contest(name, unit="MB/s", baseline="obstore, 32 threads")
    race.add("obstore, 32 threads", bare_threads(far, bucket), MEGABYTES)
    race.add("obstore, asyncio", bare_asyncio(far, bucket), MEGABYTES)
    race.add("feedline", ours(far, bucket), MEGABYTES)
    fresh = lambda: stores.Cache(folder / uuid4().hex, limit="2 GB")  # noqa: E731
    race.add("feedline, cold cache", cached(far, bucket, fresh), MEGABYTES)
    race.run(rounds=5).publish("obstore")


def compare_warm(far: S3, bucket: str, folder: Path, objects: dict[str, bytes]) -> None:
    for name, data in objects.items():
        (folder / "local").mkdir(exist_ok=True)
        (folder / "local" / name).write_bytes(data)
    cache = stores.Cache(folder / "warm", limit="2 GB")
    cached(far, bucket, lambda: cache)()
    race = Contest("1 MiB ranges from a warm cache", unit="MB/s", baseline="local files")
    race.add("local files", copied(stores.open_store(folder / "local")), MEGABYTES)
    store = stores.open_store(f"s3://{bucket}", options=far.options, cache=cache)
    race.add("feedline, warm cache", copied(store), MEGABYTES)
    race.run(rounds=3).publish("obstore")


def compare_faults(far: S3, faulty: S3, bucket: str) -> None:
    """Compare with and without faults, in runs so long that a pause requested by a server has little effect."""
    race = Contest("1 MiB ranges with faults on 5 % of requests", unit="MB/s", baseline="no faults")
    for name, server in (("no faults", far), ("faults", faulty)):
        run = ours(server, bucket, LONG)
        race.add(name, run, MEGABYTES * LONG)
    race.run(rounds=3).publish("obstore")
    print(stores.statistics())


if __name__ == "__main__":
    main()
