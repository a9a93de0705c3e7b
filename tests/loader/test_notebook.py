"""Cells of a notebook, run as ipykernel runs them: in `__main__`, on an event loop, after errors and interrupts."""

from __future__ import annotations

import json
from pathlib import Path

from preloaded import Preloaded

WITHIN_S = 60.0

CELLS = {
    "imports": """
import os, random, signal
import numpy as np, torch, psutil
from torch.utils.data import Dataset, DataLoader as TorchDataLoader
from feedline import DataLoader
""",
    "dataset": """
SCALE = 1
class Numbers(Dataset):
    def __len__(self): return 10
    def __getitem__(self, index):
        return torch.tensor([index * SCALE, torch.randint(99, ()).item(), random.randrange(99), np.random.randint(99)])
def epochs(cls):
    torch.manual_seed(0)
    loader = cls(Numbers(), 3, shuffle=True, num_workers=2)
    return [[batch.tolist() for batch in loader] for _ in range(2)]
""",
    "as torch": "results.append(epochs(DataLoader) == epochs(TorchDataLoader))",
    "redefined": """
SCALE = 10
class Numbers(Dataset):
    def __len__(self): return 4
    def __getitem__(self, index): return index * SCALE
loader = DataLoader(Numbers(), 2, num_workers=2, collate_fn=lambda samples: samples)
results.append(list(loader))
""",
    "changed": "SCALE = 3; results.append(list(loader))",
    "error": """
class Broken(Numbers):
    def __getitem__(self, index): return 1 // (2 - index)
for batch in DataLoader(Broken(), 1, num_workers=1): results.append(batch.item())
""",
    "interrupt": """
class Interrupting(Numbers):
    kernel, interrupts = os.getpid(), True
    def __getitem__(self, index):
        if index == 2 and self.interrupts:
            self.interrupts = False
            os.kill(self.kernel, signal.SIGINT)
        return index
waiting = DataLoader(Interrupting(), 1, num_workers=1)
for batch in waiting: pass
""",
    "again": "Interrupting.interrupts = False; results.append([batch.item() for batch in waiting])",
    "no workers left": """
import gc, sys
del waiting, loader, sys.last_value
gc.collect()
results.append(len(psutil.wait_procs(psutil.Process().children(recursive=True), 20)[1]))
""",
}

EXPECTED = ["error: ZeroDivisionError", "interrupt: KeyboardInterrupt"]

KERNEL = """
import asyncio, json, sys, warnings
warnings.simplefilter("ignore")
cells, results, errors = json.loads({cells!r}), [], []
async def run(name, cell):
    try:
        exec(compile(cell, f"<{{name}}>", "exec"), globals())
    except BaseException as error:
        sys.last_value = error
        errors.append(f"{{name}}: {{type(error).__name__}}")
loop = asyncio.new_event_loop()
for name, cell in cells.items():
    loop.run_until_complete(run(name, cell))
loop.close()
with open(sys.argv[1], "w") as file:
    json.dump([results, errors], file)
"""


def test_cells_are_run_again_changed_and_interrupted(preloaded: Preloaded, tmp_path: Path) -> None:
    script, log, outcome = tmp_path / "kernel.py", tmp_path / "log", tmp_path / "outcome"
    script.write_text(KERNEL.format(cells=json.dumps(CELLS)))
    code = preloaded.run(script, log, WITHIN_S, str(outcome))
    assert (code, log.read_text()) == (0, "")
    results, errors = json.loads(outcome.read_text())
    assert errors == EXPECTED
    assert results == [True, [[0, 10], [20, 30]], [[0, 3], [6, 9]], 0, 1, [0, 1, 2, 3], 0]
