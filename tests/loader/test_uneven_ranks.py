"""Ranks of a stream with unequal numbers of batches: the remedies of the documentation work."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "distributed.md"
BEGIN = """
import sys
import torch.distributed as dist

rank, place = int(sys.argv[1]), sys.argv[2]
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
print(*seen)
dist.destroy_process_group()
"""


def test_no_rank_hangs(tmp_path: Path) -> None:
    block = re.search(r"^```python\n([^`]*RankPolicy\(uneven.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert block is not None
    (tmp_path / "train.py").write_text(f"{BEGIN}{block[1]}{END}")
    command = [sys.executable, tmp_path / "train.py"]
    ranks = [
        subprocess.Popen([*command, str(rank), tmp_path / "meeting"], stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        reported = [rank.communicate(timeout=240)[0].split() for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert reported == [["10", "60", "60"], ["10", "40", "40"]]
