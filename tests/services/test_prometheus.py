"""A real Prometheus sees every batch of epochs that are shorter than its scrapes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import torch
from prometheus import prometheus
from servers import program
from torch.utils.data import TensorDataset

import feedline as fl


class Scraped(TensorDataset):
    pass


def test_no_batch_is_lost_between_epochs(tmp_path: Path) -> None:
    loader = fl.DataLoader(Scraped(torch.arange(40)), 4)
    series = 'feedline_batches_total{loader="Scraped"}'
    with fl.serve_metrics(0, "127.0.0.1") as server, prometheus(tmp_path, server.port) as scraper:
        epochs, end = 0, time.monotonic() + 200
        while len(seen := scraper.query(f"count_over_time({series}[1m])")) == 0 or seen[0] < 5:
            assert time.monotonic() < end
            epochs += len(list(loader)) == 10
            time.sleep(0.02)
        while scraper.query(series) != [10 * epochs]:
            assert time.monotonic() < end, (scraper.query(series), epochs)
            time.sleep(0.05)
        assert scraper.query(f"resets({series}[1m])") == [0]
        (median,) = scraper.query('histogram_quantile(0.5, feedline_wait_seconds_bucket{loader="Scraped"})')
        assert 0 < median < 1


def test_the_alert_rules_are_valid() -> None:
    rules = Path(__file__).parents[2] / "deploy" / "monitoring" / "alerts.yaml"
    checked = subprocess.run(
        [program("promtool", "prometheus"), "check", "rules", rules], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert "8 rules found" in checked.stdout
