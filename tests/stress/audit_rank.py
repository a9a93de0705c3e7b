"""One rank of a job that is killed; run by test_audit_kills.py.

`audit_rank.py FOLDER RANK WORLD STATE`: continues from the state in the file STATE, if it exists, and appends its own
state after each step to `FOLDER/states.RANK`, up to the end of the second epoch.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import feedline as fl

SAMPLES = 600


def main(folder: Path, rank: int, world: int, state: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(SAMPLES))
    ranks, log = (rank, world), folder / "run.{rank}.jsonl"
    loader = fl.DataLoader(data, 4, shuffle=True, seed=3, distributed=ranks, log=log)
    if state.exists():
        loader.load_state_dict(json.loads(state.read_text()))
    with open(folder / f"states.{rank}", "wb", buffering=0) as states:
        while loader.state_dict()["epoch"] < 2:
            states.writelines(json.dumps(loader.state_dict()).encode() + b"\n" for _ in loader)
        states.write(b"end\n")
    loader.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
