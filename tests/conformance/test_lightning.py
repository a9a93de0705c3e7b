"""Lightning's trainer: with feedline's loaders it sees the batches that it sees with torch's, and resumes exactly."""

from __future__ import annotations

import importlib
import logging
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from peers import lightning
from torch.utils.data import DataLoader, Dataset

import feedline as fl

pytestmark = pytest.mark.filterwarnings("ignore")


class Rows(Dataset[Any]):
    """Rows that draw from the global generators."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index + random.random(), float(torch.rand(1))])


@pytest.fixture(scope="module")
def pl() -> Any:
    """Lightning, imported by its tests only: other test processes stay small, and fork the faster."""
    sys.path.append(str(lightning()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its imports of torch warn
        return importlib.import_module("lightning")


def recording(pl: Any) -> Any:
    """A model that trains one layer, and keeps every batch that it gets."""

    class Recording(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)
            self.seen: list[Any] = []

        def _step(self, stage: str, batch: torch.Tensor) -> Any:
            self.seen.append((stage, batch.tolist()))
            return self.layer(batch).sum()

        def training_step(self, batch: torch.Tensor, _: int) -> Any:
            return self._step("train", batch)

        def validation_step(self, batch: torch.Tensor, _: int) -> Any:
            return self._step("validate", batch)

        def predict_step(self, batch: torch.Tensor, _: int) -> Any:
            return self._step("predict", batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.001)

    return Recording()


@pytest.fixture(autouse=True)
def quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def trainer(pl: Any, folder: Path, **arguments: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return pl.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=folder, **quiet, **arguments)


def test_all_stages_get_the_batches_of_torchs_loader(pl: Any, tmp_path: Path) -> None:
    """With `seed_everything(workers=True)`, which adds a `worker_init_fn`."""

    def run(loader_class: Any) -> Any:
        pl.seed_everything(1, workers=True, verbose=False)
        model, runner = recording(pl), trainer(pl, tmp_path, enable_checkpointing=False)
        train, rest = loader_class(Rows(), 4, shuffle=True, num_workers=2), loader_class(Rows(), 4)
        runner.fit(model, train, rest)
        runner.validate(model, rest, verbose=False)
        runner.predict(model, rest)
        return model.seen, model.layer.weight.tolist()

    theirs = run(DataLoader)
    assert run(fl.DataLoader) == theirs
    assert len(theirs[0]) == 2 + 10 + 10 + 5 + 5


def test_a_run_continues_from_a_checkpoint_in_mid_epoch(pl: Any, tmp_path: Path) -> None:
    def run(checkpoint: Path | None, **arguments: Any) -> Any:
        pl.seed_everything(2, workers=True, verbose=False)
        model = recording(pl)
        trainer(pl, tmp_path, **arguments).fit(
            model, fl.DataLoader(Rows(), 4, shuffle=True, seed=5), ckpt_path=checkpoint
        )
        return model

    saving = pl.pytorch.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=1, save_top_k=-1)
    whole = run(None, callbacks=[saving])
    for step in (3, 5, 8):
        resumed = run(tmp_path / f"step={step}.ckpt", enable_checkpointing=False)
        assert resumed.seen == whole.seen[step:]
        assert torch.equal(resumed.layer.weight, whole.layer.weight)
