"""Shuffled reads of single records: LMDB compared with a bare loop, MDS with Mosaic's own loader.

Mosaic writes the shards. The bare loop over LMDB runs in two variants: one drops each value at once, and so reuses
the same memory; the other keeps a batch of values, as every loader must.
"""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lmdb
import numpy as np
from torch.utils.data import DataLoader

import feedline as fl
from harness import Contest

sys.path[1:1] = [str(Path(__file__).parents[1] / name) for name in ("tests/helpers", "tests/helpers/writers")]

from peers import peers  # noqa: E402
from slim import without_init  # noqa: E402 - in the folders added above

SEED, BATCH = 0, 64
VALUES, VALUE_NBYTES = 4_000, 100_000
SAMPLES, TOKENS = 60_000, 512


def values(folder: Path) -> Path:
    rng = random.Random(SEED)
    with lmdb.open(str(folder), map_size=1 << 30) as environment, environment.begin(write=True) as transaction:
        for i in range(VALUES):
            transaction.put(b"%08d" % i, rng.randbytes(VALUE_NBYTES))
    return folder


def bare(folder: Path, keep: int) -> None:
    order = np.random.default_rng(SEED).permutation(VALUES).tolist()
    environment = lmdb.open(str(folder), readonly=True, lock=False, readahead=False)
    with environment, environment.begin(buffers=True) as transaction:
        for start in range(0, VALUES, keep):
            batch = [bytes(transaction.get(b"%08d" % i)) for i in order[start : start + keep]]
    del batch


def read(loader: Any) -> None:
    """Read one epoch; as in a training loop, one batch is kept while the next is made."""
    held = None
    with loader:
        for batch in loader:
            held = batch
    del held


def lmdb_contest(folder: Path) -> None:
    contest = Contest("LMDB shuffled 100 kB values", unit="values/s", baseline="bare loop, keeping a batch")
    contest.add("bare loop, keeping a batch", lambda: bare(folder, BATCH), VALUES)
    contest.add("bare loop, forgetting", lambda: bare(folder, 1), VALUES)

    def many() -> None:
        dataset = fl.datasets.LMDB(folder, "{:08d}")
        order = np.random.default_rng(SEED).permutation(VALUES)
        batch = None
        for start in range(0, VALUES, BATCH):
            batch = dataset.__getitems__(order[start : start + BATCH])
        del batch

    contest.add("feedline, the dataset alone", many, VALUES)
    for keys in ("{:08d}", None):
        name = "enumerated keys" if keys is None else "numbered keys"
        contest.add(
            f"feedline, {name}",
            lambda keys=keys: read(
                fl.DataLoader(fl.datasets.LMDB(folder, keys), BATCH, shuffle=True, seed=SEED, collate_fn=list)
            ),
            VALUES,
        )
    contest.run(rounds=7).publish("lmdb")


def write_mds(folder: Path) -> Path:
    from streaming.base.format.mds.writer import MDSWriter

    rng = np.random.default_rng(SEED)
    columns = {"id": "int", "tokens": f"ndarray:uint16:{TOKENS}"}
    with MDSWriter(out=str(folder), columns=columns, size_limit=1 << 23) as writer:
        for i in range(SAMPLES):
            writer.write({"id": i, "tokens": rng.integers(0, 50_000, TOKENS, np.uint16)})
    return folder


def mosaic(folder: Path, workers: int) -> Callable[[], None]:
    from streaming.base.dataset import StreamingDataset

    def run() -> None:
        dataset = StreamingDataset(local=str(folder), shuffle=True, batch_size=BATCH, shuffle_seed=SEED)
        seen = sum(len(batch["id"]) for batch in DataLoader(dataset, BATCH, num_workers=workers))
        assert seen == SAMPLES

    return run


def mosaic_at_random(folder: Path) -> None:
    """Its dataset under torch's own sampler, without its planning of epochs."""
    from streaming.base.local import LocalDataset

    read_all(DataLoader(LocalDataset(str(folder)), BATCH, shuffle=True))


def read_all(loader: Any) -> None:
    assert sum(len(batch["id"]) for batch in loader) == SAMPLES


def ours(folder: Path, order: str, workers: int) -> Callable[[], None]:
    def run() -> None:
        dataset = fl.datasets.MDS(folder)
        settings: dict[str, Any] = {"shuffle": True}
        if order == "window":
            settings = {"sampler": fl.samplers.ShardShuffled(dataset.shard_sizes, seed=SEED, window=4)}
        with fl.DataLoader(dataset, BATCH, num_workers=workers, seed=SEED, **settings) as loader:
            read_all(loader)

    return run


def mds_contest(folder: Path) -> None:
    contest = Contest("MDS shuffled 1 kB samples", unit="samples/s", baseline="Mosaic, 0 workers")
    contest.add("Mosaic, 0 workers", mosaic(folder, 0), SAMPLES)
    contest.add("Mosaic, 2 workers", mosaic(folder, 2), SAMPLES)
    contest.add("Mosaic's LocalDataset, 0 workers", lambda: mosaic_at_random(folder), SAMPLES)
    for workers in (0, 2):
        contest.add(f"feedline, {workers} workers", ours(folder, "any", workers), SAMPLES)
    contest.add("feedline, shards by window, 0 workers", ours(folder, "window", 0), SAMPLES)
    contest.run(rounds=5).publish("numpy")


def folders() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        for name in ("lmdb", "mds"):
            yield Path(folder, name)


def main() -> None:
    sys.path.append(str(peers()))
    without_init("streaming", "streaming.base")
    made = folders()
    lmdb_contest(values(next(made)))
    mds_contest(write_mds(next(made)))
    made.close()


if __name__ == "__main__":
    main()
