"""A first run in a hardened container; run by test_shm.py, which removes what such containers lack."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import feedline as fl
from feedline.cli.doctor import machine


class Rows(torch.utils.data.Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.full((64, 1024), index, dtype=torch.int64), fl.sample_rng().random()

    def __len__(self) -> int:
        return 64


def received(**hands: Any) -> list[Any]:
    """Batches of four megabytes each."""
    with fl.DataLoader(Rows(), 8, shuffle=True, seed=0, **hands) as loader:
        return [(rows[:, 0, 0].tolist(), numbers.tolist()) for rows, numbers in loader]


def main() -> None:
    cache, shards = Path(os.environ["XDG_CACHE_HOME"]), Path(sys.argv[1])
    denied = {str(folder) for folder in (shards, Path.home()) if os.access(folder, os.W_OK)}
    effective = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    expected = received()
    equal = [
        received(num_workers=2, worker_method=method, **more) == expected
        for method, more in (("thread", {}), ("process", {}), ("process", {"multiprocessing_context": "forkserver"}))
    ]
    samples = len(list(fl.DataLoader(fl.datasets.TarShards(str(shards / "*.tar")), None, num_workers=1)))
    found = {
        "writable": sorted(denied), "capabilities": int(effective.split()[1], 16), "equal": equal, "samples": samples,
        "indexed": any(path.is_file() for path in cache.rglob("*")), "temporary": tempfile.gettempdir(),
        "services": [each.severity.value for each in machine.examine() if each.name in {"memfd", "pidfd"}],
        "cache": machine.cache(cache / "feedline").severity.value,
    }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
