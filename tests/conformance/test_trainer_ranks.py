"""Two ranks of Lightning and of Accelerate: each sample once, in one order, and an exact resume."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from peers import lightning
from preloaded import Preloaded

WITHIN_S = 240.0

LIGHTNING = """
import json, logging, pathlib
import lightning as pl, torch
import feedline as fl

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
data = [torch.tensor([float(number)]) for number in range(26)]


class Model(pl.LightningModule):
    def __init__(self, **arguments):
        super().__init__()
        self.layer, self.seen, self.arguments = torch.nn.Linear(1, 1), [], arguments

    def train_dataloader(self):
        return fl.DataLoader(data, 4, shuffle=True, seed=0, on_error="skip", **self.arguments)

    def training_step(self, batch, _):
        self.seen += batch.flatten().int().tolist()
        return self.layer(batch / 26).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.001)

    def on_train_end(self):
        loader = self.trainer.train_dataloader
        assert (type(loader), loader.seed, loader.on_error) == (fl.DataLoader, 0, "skip")
        pathlib.Path(f"{len(self.arguments)}.{self.global_rank}").write_text(json.dumps(self.seen))


for arguments in ({}, {"distributed": "auto"}):
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False)
    pl.Trainer(
        accelerator="cpu", devices=2, strategy="ddp_fork", max_epochs=1, use_distributed_sampler=not arguments, **quiet
    ).fit(Model(**arguments))
"""

ACCELERATE = """
import json, os, pathlib, socket
import torch
import torch.multiprocessing
import feedline as fl

fl.patch_torch()
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([index, int(fl.sample_rng().integers(1 << 30))])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter([torch.tensor([index, index]) for index in range(24)])


def lists(batches):
    return [batch.tolist() for batch in batches]


def rank(number, port):
    place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    found = {}
    modes = (), ("split_batches",), ("dispatch_batches",), ("dispatch_batches", "split_batches")
    for name, data in [*((mode, Rows()) for mode in modes), (("dispatch_batches",), Stream())]:
        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**dict.fromkeys(name, True)))

        def prepared():
            return accelerator.prepare(fl.DataLoader(data, 4, shuffle=isinstance(data, Rows), seed=5))

        loader, seen, states = prepared(), [], []
        for batch in loader:
            seen += lists([batch])
            states.append(loader.state_dict())
        rests = []
        for state in states[:-1]:
            resumed = prepared()
            resumed.load_state_dict(state)
            rests.append(lists(resumed))
        if "dispatch_batches" not in name:
            assert [row[0] for batch in lists(skip_first_batches(prepared(), 1)) for row in batch] == [
                row[0] for batch in seen[1:] for row in batch
            ]
        found[" ".join([type(data).__name__, *name])] = [seen, rests]
    pathlib.Path(f"ranks.{number}").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
torch.multiprocessing.start_processes(rank, (port,), nprocs=2, start_method="fork")
"""


@pytest.fixture
def server() -> Iterator[Preloaded]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(lightning())])
        started = Preloaded("-W", "ignore", ends_quickly=True)
    with started:
        yield started


def run(code: str, server: Preloaded, folder: Path) -> None:
    (folder / "job.py").write_text(code)
    assert server.run(folder / "job.py", folder / "job.log", WITHIN_S) == 0, (folder / "job.log").read_text()


@pytest.mark.nightly
def test_lightnings_sampler_and_ours_share_the_samples_of_an_epoch(server: Preloaded, tmp_path: Path) -> None:
    run(LIGHTNING, server, tmp_path)
    for arguments in (0, 1):
        ranks = [json.loads((tmp_path / f"{arguments}.{rank}").read_text()) for rank in range(2)]
        assert [len(each) for each in ranks] == [13, 13]
        assert sorted(ranks[0] + ranks[1]) == list(range(26))


def test_accelerate_shares_batches_and_resumes_on_two_ranks(server: Preloaded, tmp_path: Path) -> None:
    run(ACCELERATE, server, tmp_path)
    ranks: list[dict[str, Any]] = [json.loads((tmp_path / f"ranks.{rank}").read_text()) for rank in range(2)]
    assert len(ranks[0]) == 5
    for name in ranks[0]:
        rows = sorted(row for each in ranks for batch in each[name][0] for row in batch)
        assert [index for index, _ in rows] == list(range(24))
        for seen, rests in (each[name] for each in ranks):
            assert rests == [seen[step:] for step in range(1, len(seen))], name
