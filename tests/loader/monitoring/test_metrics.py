"""Metrics: read by Prometheus' own parser and by OpenTelemetry's SDK, over epochs, while a loop hangs."""

from __future__ import annotations

import json
import logging
import math
import re
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client.parser import text_string_to_metric_families
from torch.utils.data import TensorDataset

import feedline as fl
from feedline.loader.monitoring import metrics, monitor


class Photos(TensorDataset):
    pass


class Odd(TensorDataset):
    pass


Odd.__name__ = 'Odd "name"\n\\'


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the loaders of the test have metrics, not those that another test holds."""
    monkeypatch.setattr(monitor, "_monitors", type(monitor._monitors)())
    monkeypatch.setattr(monitor, "ended", monitor.EndedLoaders())
    monkeypatch.setattr(metrics, "_served", [])


@pytest.fixture
def loader() -> Iterator[fl.DataLoader[Any]]:
    with fl.DataLoader(Photos(torch.arange(40)), 4) as loader:
        yield loader


def scrape(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def value(families: dict[str, Any], name: str, family: str = "", **labels: str) -> float:
    (found,) = (
        sample.value
        for sample in families[family or name.removesuffix("_total")].samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
    return float(found)


def test_counters_go_on_over_epochs(loader: fl.DataLoader[Any]) -> None:
    with fl.serve_metrics(0, "127.0.0.1") as server:
        for epoch in range(3):
            list(loader)
            families = scrape(server.port)
            assert value(families, "feedline_batches_total", loader="Photos", rank="0") == 10 * (epoch + 1)
            assert value(families, "feedline_samples_total") == 40 * (epoch + 1)
            assert (value(families, "feedline_epoch"), value(families, "feedline_position")) == (epoch, 10)


def test_histograms_are_cumulative_and_complete(loader: fl.DataLoader[Any]) -> None:
    list(loader)
    stats = loader.stats()
    with fl.serve_metrics(0, "127.0.0.1") as server:
        families = scrape(server.port)
    for name in ("wait", "step"):
        family = families[f"feedline_{name}_seconds"]
        assert family.type == "histogram"
        buckets = [sample for sample in family.samples if sample.name.endswith("_bucket")]
        numbers = [sample.value for sample in buckets]
        assert numbers == sorted(numbers)
        assert [float(sample.labels["le"]) for sample in buckets][-1] == math.inf
        assert numbers[-1] == stats.loop[name].count == value(families, f"feedline_{name}_seconds_count", family.name)
        total = value(families, f"feedline_{name}_seconds_sum", family.name)
        assert total == pytest.approx(stats.loop[name].total_s)
    assert {sample.labels["stage"] for sample in families["feedline_stage_duration_seconds"].samples} >= {"fetch"}


def test_every_family_is_named_and_explained(loader: fl.DataLoader[Any]) -> None:
    list(loader)
    with fl.serve_metrics(0, "127.0.0.1") as server:
        families = scrape(server.port)
    assert all(name.startswith("feedline_") and family.documentation for name, family in families.items())
    cpu = value(families, "feedline_stage_seconds_total", stage="fetch", kind="cpu")
    waited = value(families, "feedline_stage_seconds_total", stage="fetch", kind="wait")
    assert cpu + waited == pytest.approx(loader.stats().stages["fetch"].total_s)
    assert "feedline_limiting" in families


def test_parts_of_stages_are_served(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((64, 100), np.float32))
    loader = fl.DataLoader(fl.datasets.ArrayFile(tmp_path / "rows.npy"), 8)
    list(loader)
    with fl.serve_metrics(0, "127.0.0.1") as server:
        families = scrape(server.port)
    assert "read files" in {sample.labels["stage"] for sample in families["feedline_stage_seconds"].samples}
    assert value(families, "feedline_sample_read_bytes") == value(families, "feedline_sample_bytes") == 400


@pytest.mark.parametrize(
    ("name", "wanted"),
    [("stage_seconds", [10.0, 10.0, 11.0, 11.0, 11.0, 12.0]), ("restarts", [10.0, 10.0, 11.0, 11.0, 13.0, 23.0])],
)
def test_counters_never_fall(name: str, wanted: list[float]) -> None:
    """CPU times are estimates, which fall when they are corrected."""
    counters = metrics.MonotonicCounters()
    estimates = [("one", 10.0), ("one", 9.9), ("one", 11.0), ("one", 2.0), ("two", 2.0), ("two", 12.0)]
    assert [counters.value(name, {"stage": "decode"}, *each) for each in estimates] == wanted


def test_loaders_that_are_made_again_continue_their_counters(tmp_path: Path) -> None:
    """As the validation of each epoch, of which a scrape sees the last one only."""
    with fl.serve_metrics(0, "127.0.0.1") as server:
        waits = 0.0
        for _ in range(3):
            loader = fl.DataLoader(Photos(torch.arange(8)), 4)
            list(loader)
            waits += loader.stats().loop["wait"].total_s
            del loader
        loader = fl.DataLoader(Photos(torch.arange(8)), 4)
        list(loader)
        families = scrape(server.port)
    waits += loader.stats().loop["wait"].total_s
    assert value(families, "feedline_batches_total") == 8
    assert value(families, "feedline_samples_total") == 32
    assert value(families, "feedline_wait_seconds_count", "feedline_wait_seconds") == 8
    assert value(families, "feedline_wait_seconds_sum", "feedline_wait_seconds") == pytest.approx(waits)
    assert (
        value(families, "feedline_stage_duration_seconds_count", "feedline_stage_duration_seconds", stage="fetch") == 8
    )
    assert value(families, "feedline_epoch") == 0
    assert loader.stats().batches == 2


def test_several_loaders_and_odd_names_have_labels_of_their_own() -> None:
    loaders = [fl.DataLoader(kind(torch.arange(8)), 4) for kind in (Photos, Photos, Odd)]
    for loader in loaders:
        list(loader)
    with fl.serve_metrics(0, "127.0.0.1") as server:
        samples = scrape(server.port)["feedline_batches"].samples
    assert {sample.labels["loader"] for sample in samples} == {"Photos", "Photos-2", Odd.__name__}


def test_a_wait_can_be_seen_while_it_lasts() -> None:
    gate, arrived = threading.Event(), threading.Event()

    class Slow(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 4:
                arrived.set()
                gate.wait(60)
            return super().__getitem__(index)

    loader = fl.DataLoader(Slow(torch.arange(8)), 4)
    training = threading.Thread(target=lambda: list(loader))
    with fl.serve_metrics(0, "127.0.0.1") as server:
        training.start()
        assert arrived.wait(60)
        families = scrape(server.port)
        gate.set()
        training.join()
    assert value(families, "feedline_waiting_seconds") > 0
    assert value(families, "feedline_batches_total") == 1


def test_a_port_in_use_is_named() -> None:
    with (
        fl.serve_metrics(0, "127.0.0.1") as server,
        pytest.raises(fl.errors.ArgumentError, match=f"127.0.0.1:{server.port}: .*choose another port"),
    ):
        fl.serve_metrics(server.port, "127.0.0.1")


@pytest.mark.parametrize("rank", ["", "2"])
def test_a_variable_starts_the_endpoint_of_each_rank(
    rank: str, loader: fl.DataLoader[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fl.serve_metrics(0, "127.0.0.1") as free:
        port = free.port
    monkeypatch.setenv("FEEDLINE_METRICS", f"127.0.0.1:{port - int(rank or 0)}")
    monkeypatch.setenv("LOCAL_RANK", rank)
    for _ in range(2):
        list(loader)
    (server,) = metrics._served
    assert server is not None
    with server:
        assert value(scrape(port), "feedline_batches_total") == 20


def test_a_wrong_variable_is_logged_once_and_stops_nothing(
    loader: fl.DataLoader[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FEEDLINE_METRICS", "yes")
    with caplog.at_level(logging.WARNING, "feedline"):
        for _ in range(2):
            assert len(list(loader)) == 10
    (record,) = caplog.records
    assert "must be a port, or host:port; got 'yes'" in record.message


def test_opentelemetry_reads_the_same_figures(loader: fl.DataLoader[Any]) -> None:
    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    fl.add_instruments(provider.get_meter("training"))
    for _ in range(2):
        list(loader)
    data = reader.get_metrics_data()
    assert data is not None
    units = {
        metric.name: metric.unit
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    points = {
        metric.name: [(dict(point.attributes), point.value) for point in metric.data.data_points]
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
    provider.shutdown()
    assert points["feedline.batches"] == [({"loader": "Photos", "rank": "0"}, 20)]
    assert points["feedline.epoch"] == [({"loader": "Photos", "rank": "0"}, 1)]
    stats = loader.stats()
    assert [points[f"feedline.{name}_seconds"][0][1] for name in ("wait", "step")] == [stats.wait_s, stats.step_s]
    assert [units[f"feedline.{name}"] for name in ("step_seconds", "sample_bytes", "batches")] == ["s", "By", ""]


MONITORING = Path(__file__).parents[3] / "deploy" / "monitoring"


@pytest.mark.parametrize("name", ["alerts.yaml", "grafana.json"])
def test_alerts_and_board_use_metrics_that_exist(name: str) -> None:
    suffix = {"counter": "_total", "gauge": ""}
    known = {f"feedline_{metric.name}{suffix[metric.kind]}" for metric in metrics.METRICS}
    histograms = ("wait_seconds", "step_seconds", "stage_duration_seconds")
    known |= {f"feedline_{each}_{part}" for each in histograms for part in ("sum", "bucket", "count")}
    used = set(re.findall(r"\bfeedline_\w+", (MONITORING / name).read_text(encoding="utf-8")))
    assert used
    assert used <= known


def test_the_panels_of_the_board_are_queries_that_do_not_overlap() -> None:
    board = json.loads((MONITORING / "grafana.json").read_text(encoding="utf-8"))
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(board["panels"]) == len({panel["id"] for panel in board["panels"]})
    assert all(
        '{loader=~"$loader",rank=~"$rank"}' in each["expr"] for panel in board["panels"] for each in panel["targets"]
    )
    assert {each["name"] for each in board["templating"]["list"]} == {"datasource", "loader", "rank"}
