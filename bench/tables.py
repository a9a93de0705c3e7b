"""Rows of Parquet, Arrow and Hugging Face tables, shuffled, batches of 1,024; compared with torch over `datasets`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch.utils.data import DataLoader, Dataset

import datasets
import feedline as fl
from harness import Contest
from loaders import rate

SEED = 0
ROWS = 1_000_000
BATCH = 1024


class Each(Dataset[Any]):
    """A `datasets.Dataset` that is read one row at a time."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def made(folder: Path) -> tuple[Any, Path, Path]:
    """One table in three forms: saved by `datasets`, as Parquet, and as an Arrow file."""
    rng = np.random.default_rng(SEED)
    table = pa.table(
        {
            "id": np.arange(ROWS),
            "label": rng.integers(0, 10, ROWS),
            "price": rng.random(ROWS, np.float32),
            "features": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(ROWS * 16, np.float32)), 16),
        }
    )
    pq.write_table(table, folder / "t.parquet", row_group_size=100_000)
    with pa.ipc.new_file(folder / "t.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)
    datasets.disable_progress_bars()
    datasets.Dataset(table).save_to_disk(folder / "hf")
    return datasets.load_from_disk(folder / "hf").with_format("torch"), folder / "t.parquet", folder / "t.arrow"


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        hugging, parquet, arrow = made(Path(name))
        race = Contest(
            "rows of a table, shuffled, batches of 1,024", unit="rows/s", baseline="torch, datasets, each row"
        )
        for workers in (0, 2):
            arguments: Any = {"batch_size": BATCH, "shuffle": True, "num_workers": workers}
            for told, theirs in (("each row", Each(hugging)), ("__getitems__", hugging)):
                who = f"torch, datasets, {told}" + f", {workers} workers" * bool(workers)
                race.measure(who, rate(lambda d=theirs, a=arguments: DataLoader(d, **a), BATCH, most_s=1))
        ours = {
            "HuggingFace": fl.datasets.HuggingFace(hugging),
            "Arrow": fl.datasets.Arrow(arrow),
            "Parquet": fl.datasets.Parquet(parquet),
        }
        for told, dataset in ours.items():
            for workers in (0, 2):
                arguments = {"batch_size": BATCH, "shuffle": True, "seed": SEED, "num_workers": workers}
                who = f"feedline, {told}, {workers} workers"
                race.measure(who, rate(lambda d=dataset, a=arguments: fl.DataLoader(d, **a), BATCH, most_s=1))
        order = fl.samplers.ShardShuffled(ours["Parquet"].shard_sizes, SEED, window=4)
        shards = {"batch_size": BATCH, "sampler": order, "seed": SEED}
        race.measure(
            "feedline, Parquet, ShardShuffled",
            rate(lambda: fl.DataLoader(ours["Parquet"], **shards), BATCH, most_s=1),
        )
        race.run(rounds=5).publish("datasets", "pyarrow")


if __name__ == "__main__":
    main()
