"""Ranks of a stream with unequal numbers of batches: the remedies of the documentation work."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from preloaded import Preloaded

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "distributed.md"
BEGIN = """
import os
import sys

import datasets
import torch._dynamo  # which DistributedDataParallel imports: once for both ranks
import torch.distributed as dist

other = os.fork()
rank, place = int(other == 0), sys.argv[1]
dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=2)
"""
END = """
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
seen = [steps]
loader = fl.DataLoader(loader.dataset, batch_size=4, distributed="auto")
for shadowing in (torch.distributed.algorithms.Join([model]), model.join()):
    seen.append(0)
    with shadowing:
        for batch in loader:
            model(batch["x"][:, None].float()).sum().backward()
            seen[-1] += len(batch["x"])
with open(f"{place}.{rank}", "w") as report:
    print(*seen, file=report)
dist.destroy_process_group()
if other:
    assert os.waitpid(other, 0) == (other, 0)
"""


@pytest.mark.nightly  # it imports datasets and torch's compiler; tests/loader/ranks has the policies
def test_no_rank_hangs(preloaded: Preloaded, tmp_path: Path) -> None:
    block = re.search(r"^```python\n([^`]*RankPolicy\(uneven.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    code, said = preloaded.run_code(f"{BEGIN}{block[1]}{END}", tmp_path, str(tmp_path / "meeting"))
    assert code == 0, said
    reported = [(tmp_path / f"meeting.{rank}").read_text().split() for rank in range(2)]
    assert reported == [["10", "60", "60"], ["10", "40", "40"]]
