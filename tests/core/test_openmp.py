"""Workers whose operations use several threads of GNU OpenMP, as the training process did before it forked them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = """
import torch
import feedline as fl

class Sums(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.ones(1 << 20).add(index).sum()

def use_threads(worker):
    torch.set_num_threads(2)

torch.set_num_threads(2)
for epoch in range(2):
    torch.ones(1 << 20).add(1).sum()
    with fl.DataLoader(Sums(), batch_size=2, num_workers=2, worker_init_fn=use_threads) as loader:
        print([int(value) >> 20 for batch in loader for value in batch])
print(torch.get_num_threads())
"""


def test_forked_workers_do_not_wait_for_threads_of_the_training_process(tmp_path: Path) -> None:
    """With torch's DataLoader, this script hangs."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    # A new interpreter: one that was forked itself keeps its threads.
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, check=False, timeout=300)
    order = str(list(range(1, 9)))
    assert (done.returncode, done.stdout.splitlines()) == (0, [order, order, "2"]), done.stderr
    assert "waits for a lock" not in done.stderr
