"""Metrics of all loaders of this process, for Prometheus and OpenTelemetry.

Counters sum over all epochs of a loader, and over loaders that are made again: rates stay correct even if epochs are
shorter than a scrape interval.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Self

from torch.utils.data import get_worker_info

from feedline.core.histogram import octaves
from feedline.core.optional import load
from feedline.errors import ArgumentError
from feedline.loader.monitoring import monitor as monitoring
from feedline.loader.monitoring.monitor import Monitor, monitors
from feedline.loader.report.stats import StageTimes, Stats

_log = logging.getLogger("feedline")


PORT = 9432
"""Port of `serve_metrics` if none is given."""


VARIABLE = "FEEDLINE_METRICS"
"""Environment variable with the port, or the host and port, at which each training process serves its metrics."""


Labels = Mapping[str, str]


_NO_LABELS: Labels = {}


class Reading(NamedTuple):
    """Statistics of one loader at one moment."""

    labels: Labels
    instance: str
    """Distinguishes loaders that have had the same labels."""
    stats: Stats
    waiting_s: float
    verdict: Mapping[str, Any]


class Metric(NamedTuple):
    """A metric, and its values for a reading.

    Its name is without the prefix "feedline_".
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    values: Callable[[Reading], Iterable[tuple[Labels, float | None]]]


def _plain(value: Callable[[Stats], float | None]) -> Callable[[Reading], list[tuple[Labels, float | None]]]:
    return lambda reading: [({}, value(reading.stats))]


def _stage_seconds(reading: Reading) -> Iterator[tuple[Labels, float]]:
    """Seconds of each stage on a CPU, and the rest.

    "all" is the sum, where CPU time was not measured.
    """
    for stage, times in reading.stats.stages.items():
        if times.cpu_s is None:
            yield {"stage": stage, "kind": "all"}, times.total_s
        else:
            yield {"stage": stage, "kind": "cpu"}, min(times.cpu_s, times.total_s)
            yield {"stage": stage, "kind": "wait"}, max(times.total_s - times.cpu_s, 0.0)


def _limiting(reading: Reading) -> Iterator[tuple[Labels, float]]:
    if reading.verdict:
        yield {"stage": reading.verdict["limiting_stage"]}, 1.0


def _gains(reading: Reading) -> Iterator[tuple[Labels, float | None]]:
    for hint in reading.verdict.get("advice", ()):
        yield {"advice": hint["change"]}, hint["gain"]  # the text has figures: a series for each would be too many


METRICS = (
    Metric("batches", "counter", "Batches received by the loop.", _plain(lambda s: s.batches)),
    Metric("samples", "counter", "Samples received by the loop.", _plain(lambda s: s.samples)),
    Metric("stage_seconds", "counter", "Time of each stage, summed over workers.", _stage_seconds),
    Metric("run_delay_seconds", "counter", "Time ready to run, but not run.", _plain(lambda s: s.run_delay_s)),
    Metric("restarts", "counter", "Workers that died and were replaced.", _plain(lambda s: s.restarts)),
    Metric("skipped_samples", "counter", "Samples left out or replaced.", _plain(lambda s: s.skipped)),
    Metric("copied_bytes", "counter", "Bytes copied to the device.", _plain(lambda s: s.copied_nbytes)),
    Metric("copy_seconds", "counter", "Time of the device for copies.", _plain(lambda s: s.copy_s)),
    Metric("store_bytes", "counter", "Bytes received from stores.", _plain(lambda s: s.stores.nbytes)),
    Metric("store_requests", "counter", "Requests to stores.", _plain(lambda s: s.stores.requests)),
    Metric("store_retries", "counter", "Repeated requests to stores.", _plain(lambda s: s.stores.retries)),
    Metric("store_failures", "counter", "Reads from stores that failed.", _plain(lambda s: s.stores.failures)),
    Metric("cache_hits", "counter", "Pieces found in the cache.", _plain(lambda s: s.stores.cache_hits)),
    Metric("cache_misses", "counter", "Pieces the cache had to fetch.", _plain(lambda s: s.stores.cache_misses)),
    Metric("epoch", "gauge", "Number of the current epoch.", _plain(lambda s: s.epoch)),
    Metric("position", "gauge", "Batches received in this epoch.", _plain(lambda s: s.position)),
    Metric("length", "gauge", "Batches of an epoch.", _plain(lambda s: s.length)),
    Metric("ready_batches", "gauge", "Complete batches that wait for the loop.", _plain(lambda s: s.ready)),
    Metric("requests_in_flight", "gauge", "Batches requested, not received.", _plain(lambda s: s.in_flight)),
    Metric("workers", "gauge", "Live workers.", _plain(lambda s: s.workers)),
    Metric("in_flight_bytes", "gauge", "Bytes of batches in flight or held.", _plain(lambda s: s.in_flight_nbytes)),
    Metric("arena_bytes", "gauge", "Transport memory of the workers.", _plain(lambda s: s.arena_nbytes)),
    Metric("worker_resident_bytes", "gauge", "Memory of the workers.", _plain(lambda s: s.worker_nbytes)),
    Metric("padding_share", "gauge", "Share of padding in batches, 0 to 1.", _plain(lambda s: s.padding_share)),
    Metric("sample_read_bytes", "gauge", "Bytes that a sample has read.", _plain(lambda s: s.read_nbytes_per_sample)),
    Metric("sample_bytes", "gauge", "Bytes of a delivered sample.", _plain(lambda s: s.delivered_nbytes_per_sample)),
    Metric("gpu_utilization", "gauge", "Share of time in which the GPU computed.", _plain(lambda s: s.gpu_utilization)),
    Metric("throttled_share", "gauge", "Share of periods cut by the quota.", _plain(lambda s: s.throttled_share)),
    Metric("contended_share", "gauge", "Share of waits for other workers.", _plain(lambda s: s.contended_share)),
    Metric("waiting_seconds", "gauge", "Age of the current wait.", lambda reading: [({}, reading.waiting_s)]),
    Metric("limiting", "gauge", "1 for the stage that limits the loop.", _limiting),
    Metric("predicted_gain", "gauge", "Factor by which advice speeds up the loop.", _gains),
)
"""All metrics but the histograms."""


_LOOP_METRICS = (
    Metric("wait_seconds", "counter", "Time of the loop's waits for batches.", _plain(lambda s: s.wait_s)),
    Metric("step_seconds", "counter", "Time of the steps between batches.", _plain(lambda s: s.step_s)),
)
"""Sums of the histograms of waits and steps, which OpenTelemetry cannot observe."""


_UNITS = {"seconds": "s", "bytes": "By", "share": "1", "utilization": "1", "gain": "1"}
"""Units of OpenTelemetry by the last word of a metric's name."""


def readings() -> list[Reading]:
    """A reading of each loader of this process, without waiting for any."""
    return [_reading(monitor) for monitor in monitors()]


def _reading(monitor: Monitor) -> Reading:
    identity = monitor.identity
    labels = {"loader": identity["loader"], "rank": str(identity["rank"])}
    stats, before = monitor.stats(), monitoring.ended.stats.get(identity["loader"])
    if before is not None:
        stats = stats.plus_loop(before)
    return Reading(labels, identity["instance"], stats, monitor.waiting_s(), monitor.verdict)


class _Highest(NamedTuple):
    """Highest value of a counter so far, of one loader."""

    instance: str
    value: float
    base: float = 0.0
    """Value of the loaders before."""


class MonotonicCounters:
    """Values of counters that never fall.

    Prometheus would take a lower value for a restart of the counter, and count it again as a whole; a new loader that
    comes to the value of the one before would look like no progress.
    """

    def __init__(self) -> None:
        self._highest: dict[tuple[str, frozenset[tuple[str, str]]], _Highest] = {}
        monitoring.ended.are_kept = True

    def value(self, name: str, labels: Labels, instance: str, value: float) -> float:
        """The value, or a higher earlier one.

        CPU times and parts of stages are estimates, which may fall. Counters that are not sums of loops begin again
        with a new loader, and are added to those of the one before.
        """
        key = name, frozenset(labels.items())
        before = self._highest.get(key, _Highest(instance, value))
        base = before.base
        if before.instance != instance and name not in _OF_LOOPS:
            base = before.value
        value = max(base + value, before.value)
        self._highest[key] = _Highest(instance, value, base)
        return value


_OF_LOOPS = frozenset(("batches", "samples", "stage_seconds", "run_delay_seconds", "wait_seconds", "step_seconds"))
"""Counters that contain those of loaders before: see `EndedLoaders`."""


class MetricsCollector:
    """Collector for a registry of prometheus_client.

    `prometheus_client.REGISTRY.register(MetricsCollector())` adds the metrics to an existing endpoint.
    """

    def __init__(self) -> None:
        self._core = load("prometheus_client.core", "metrics", "a Prometheus endpoint")
        self._counters = MonotonicCounters()

    def collect(self) -> Iterator[Any]:
        """The metric families of all loaders, for prometheus_client."""
        now = readings()
        for metric in METRICS:
            yield self._family(metric, now)
        for name, text in (("wait", "Waits of the loop for a batch."), ("step", "Steps between batches.")):
            values = [(_NO_LABELS, reading, reading.stats.loop.get(name)) for reading in now]
            yield self._histogram(f"feedline_{name}_seconds", text, values)
        stages = [({"stage": stage}, each, times) for each in now for stage, times in each.stats.stages.items()]
        yield self._histogram("feedline_stage_duration_seconds", "Times of a stage for one batch.", stages)

    def _family(self, metric: Metric, now: list[Reading]) -> Any:
        kind = self._core.CounterMetricFamily if metric.kind == "counter" else self._core.GaugeMetricFamily
        suffix = "_total" if metric.kind == "counter" else ""
        family = kind(f"feedline_{metric.name}", metric.help)
        for reading in now:
            for labels, value in metric.values(reading):
                if value is not None:
                    all_labels = {**reading.labels, **labels}
                    if metric.kind == "counter":
                        value = self._counters.value(metric.name, all_labels, reading.instance, value)  # noqa: PLW2901 - the same figure
                    family.add_sample(f"feedline_{metric.name}{suffix}", all_labels, value)
        return family

    def _histogram(self, name: str, text: str, values: Sequence[tuple[Labels, Reading, StageTimes | None]]) -> Any:
        family = self._core.HistogramMetricFamily(name, text)
        for labels, reading, times in values:
            if times is not None:
                all_labels = {**reading.labels, **labels}
                for bound, number in octaves(times.histogram):
                    family.add_sample(f"{name}_bucket", {**all_labels, "le": repr(bound)}, number)
                counted = sum(times.histogram)  # of parts of stages, only those that were timed
                family.add_sample(f"{name}_bucket", {**all_labels, "le": "+Inf"}, counted)
                family.add_sample(f"{name}_count", all_labels, counted)
                family.add_sample(f"{name}_sum", all_labels, times.mean_s * counted)
        return family


class MetricsServer:
    """HTTP server of metrics in a daemon thread.

    As a context manager it stops with the block.
    """

    def __init__(self, port: int, host: str) -> None:
        client = load("prometheus_client", "metrics", "a Prometheus endpoint")
        registry = client.CollectorRegistry()
        registry.register(MetricsCollector())
        try:
            self._server, self._thread = client.start_http_server(port, host, registry)
        except (OSError, OverflowError) as error:
            raise ArgumentError(
                f"metrics cannot be served at {host}:{port}: {error}; choose another port, or 0 for any free one"
            ) from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve_metrics(port: int = PORT, host: str = "0.0.0.0") -> MetricsServer:  # noqa: S104 - for scrapes from elsewhere
    """Serve the metrics of all loaders of this process at `/metrics`.

    Needs `feedline[metrics]`. `host` is the address to listen on; the default is reachable from other machines. Port 0
    is any free port: `serve_metrics(0).port`. Raises `ArgumentError` if the port is in use. The server ends with the
    process, or with its `close()`.
    """
    return MetricsServer(port, host)


def add_instruments(meter: Any) -> None:
    """Create instruments for all metrics in an OpenTelemetry meter.

    Their names are those of Prometheus with dots: `feedline.batches`. Of the histograms, `feedline.wait_seconds` and
    `feedline.step_seconds` have the sums. Values are read on request of the meter's reader.
    """
    observation = load("opentelemetry.metrics", "metrics", "OpenTelemetry metrics").Observation
    counters = MonotonicCounters()
    for metric in (*METRICS, *_LOOP_METRICS):
        create = meter.create_observable_counter if metric.kind == "counter" else meter.create_observable_gauge
        create(
            f"feedline.{metric.name}",
            callbacks=[partial(_observe, metric, observation, counters)],
            unit=_UNITS.get(metric.name.rpartition("_")[2], ""),
            description=metric.help,
        )


def _observe(metric: Metric, observation: Any, counters: MonotonicCounters, _: Any) -> Iterator[Any]:
    for reading in readings():
        for labels, value in metric.values(reading):
            if value is not None:
                all_labels = {**reading.labels, **labels}
                if metric.kind == "counter":
                    value = counters.value(metric.name, all_labels, reading.instance, value)  # noqa: PLW2901 - the same figure
                yield observation(value, all_labels)


_served: list[MetricsServer | None] = []
"""The server of `serve_if_configured`, or None after a failure."""


def serve_if_configured() -> None:
    """Serve metrics once per process if the environment variable is set.

    Local rank r takes the r-th port after the given one. A failure is only logged, because it must not stop a training
    run.
    """
    asked = os.environ.get(VARIABLE)
    if not asked or _served or get_worker_info() is not None:
        return
    _served.append(None)
    match = re.fullmatch(r"(?:(.*):)?(\d+)", asked.strip())
    try:
        if match is None:
            raise ArgumentError(f"{VARIABLE} must be a port, or host:port; got {asked!r}")
        port = int(match[2]) + int(os.environ.get("LOCAL_RANK") or 0)
        _served[0] = serve_metrics(port, match[1] or "0.0.0.0")  # noqa: S104 - as above
    except (ImportError, ValueError) as error:
        _log.warning("%s=%s: %s", VARIABLE, asked, error)
