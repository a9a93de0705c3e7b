"""Ray Train with two workers: the script of the how-to, and loaders that Ray rebuilds."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from feedline.loader.report.audit import audit
from feedline.loader.report.audit_log import read_audit_log

pytestmark = [pytest.mark.stress, pytest.mark.nightly, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs/how-to/trainers/ray-train.md"
WITHIN_S = 800.0

PREPARED = """
import sys
import warnings
from pathlib import Path

import ray.train
import ray.train.torch
import torch

import feedline as fl


def train(config):
    data = torch.utils.data.TensorDataset(torch.arange(24.0))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        built = ray.train.torch.prepare_data_loader(fl.DataLoader(data, 3, shuffle=True, seed=0))
        wrapped = ray.train.torch.prepare_data_loader(
            fl.DataLoader(data, 3, shuffle=True, seed=0, distributed="auto"), add_dist_sampler=False
        )
        seen = [[value for (batch,) in loader for value in batch.tolist()] for loader in (built, wrapped)]
    texts = [str(each.message) for each in said]
    rank = ray.train.get_context().get_world_rank()
    Path(config["folder"], f"{rank}.txt").write_text(repr((seen, texts)))
    ray.train.report({"rank": rank})


ray.init("local", num_cpus=2, object_store_memory=100_000_000)
scaling = ray.train.ScalingConfig(num_workers=2)
storage = ray.train.RunConfig(name="run", storage_path=sys.argv[1])
ray.train.torch.TorchTrainer(
    train, train_loop_config={"folder": sys.argv[1]}, scaling_config=scaling, run_config=storage
).fit()
ray.shutdown()
"""


def run(code: str, folder: Path) -> Path:
    """The results of a job in the folder that its workers share."""
    script, shared = folder / "train.py", folder / "shared"
    script.write_text(code, encoding="utf-8")
    shared.mkdir()
    done = subprocess.run([sys.executable, script, shared], capture_output=True, text=True, timeout=WITHIN_S)
    assert done.returncode == 0, done.stderr[-20_000:]
    return shared


def test_a_group_that_fails_continues_at_its_checkpoint(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    shared = run(block, tmp_path)
    records = [record for log in sorted(shared.glob("*.audit")) for record in read_audit_log(log)]
    found = audit(records)
    assert not found.faults, found.faults
    assert list(found.proven.values()) == [120]
    assert found.attempts == 2


def test_loaders_that_ray_takes_apart_say_what_is_lost(tmp_path: Path) -> None:
    shared = run(PREPARED, tmp_path)
    ranks = [eval((shared / f"{rank}.txt").read_text()) for rank in range(2)]
    for _, texts in ranks:
        assert any("builds torch's DataLoader from them: seed=0, exact resume" in text for text in texts)
        assert any("one batch ahead" in text and "get_device()" in text for text in texts)
    for number in range(2):  # with Ray's sampler, and with ours
        assert sorted(ranks[0][0][number] + ranks[1][0][number]) == [float(value) for value in range(24)]
