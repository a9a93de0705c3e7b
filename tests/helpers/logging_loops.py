"""A training loop that logs the figures of its loader, with the logger named by its argument.

`python logging_loops.py LOGGER RESULTS [PACKAGES]`: writes what the logger's own reader finds, as JSON, and logs to the
folder of that file. The folder PACKAGES contains the logger.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

import feedline as fl

Log = Callable[[Mapping[str, float], int], object]
Read = Callable[[], Mapping[str, float]]

STEPS = 6


def train(log: Log) -> None:
    """The callback of docs/how-to/diagnose.md, in a loop."""
    with fl.DataLoader(torch.utils.data.TensorDataset(torch.arange(8 * STEPS)), batch_size=8) as loader:
        for step, _ in enumerate(loader):
            log(loader.stats().flat(), step)


def tensorboard(folder: Path) -> Read:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        train(lambda figures, step: [writer.add_scalar(name, number, step) for name, number in figures.items()])

    def read() -> Mapping[str, float]:
        events = EventAccumulator(str(folder))
        events.Reload()
        return {name: events.Scalars(name)[-1].value for name in events.Tags()["scalars"]}

    return read


def wandb(folder: Path) -> Read:
    os.environ["WANDB_ERROR_REPORTING"] = "false"
    import wandb

    settings = wandb.Settings(console="off", x_disable_stats=True, x_disable_meta=True, silent=True)
    with wandb.init(project="feedline", dir=folder, mode="offline", settings=settings) as run:
        train(lambda figures, step: run.log(dict(figures), step=step))
        run.log({}, step=STEPS)  # the figures of a step are kept when the next one begins
        found = {name: number for name, number in dict(run.summary).items() if not name.startswith("_")}
    assert list(folder.glob("wandb/offline-run-*/run-*.wandb"))
    return lambda: found


def mlflow(folder: Path) -> Read:
    os.environ.update(MLFLOW_ALLOW_FILE_STORE="true", MLFLOW_DISABLE_TELEMETRY="true")
    import mlflow

    mlflow.set_tracking_uri((folder / "runs").as_uri())
    with mlflow.start_run() as run:
        train(lambda figures, step: mlflow.log_metrics(dict(figures), step=step))
    client = mlflow.MlflowClient()

    def read() -> Mapping[str, float]:
        metrics = client.get_run(run.info.run_id).data.metrics
        assert all(client.get_metric_history(run.info.run_id, name)[-1].step == STEPS - 1 for name in metrics)
        return metrics

    return read


LOGGERS = {"tensorboard": tensorboard, "wandb": wandb, "mlflow": mlflow}


if __name__ == "__main__":
    logger, results, *packages = sys.argv[1:]
    sys.path[1:1] = packages
    os.chdir(Path(results).parent)
    found = LOGGERS[logger](Path(results).parent)()
    Path(results).write_text(json.dumps(dict(found)))
