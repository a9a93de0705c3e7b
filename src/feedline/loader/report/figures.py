"""Statistics as JSON values: for the page, the run log, and loggers."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from feedline.loader.report.advice import case_of
from feedline.loader.report.layout import gain_of, number
from feedline.loader.report.model import Model
from feedline.loader.report.remedy import Advice
from feedline.loader.report.stats import SlowBatch, StageTimes, Stats
from feedline.loader.report.verdict import Verdict

_PLAIN = (
    "batches", "samples", "wall_s", "wait_s", "startup_s", "closing_s", "step_s", "step_cpu_s", "run_delay_s",
    "lock_s", "lock_share", "others_cpus", "in_flight_nbytes", "arena_nbytes", "copied_nbytes", "copy_s", "restarts",
    "skipped", "workers", "epoch", "position", "length", "ready", "in_flight", "worker_nbytes", "worker_growth_nbytes",
    "padding_share", "throttled_share", "contended_share", "outside_share", "gpu_utilization",
    "read_nbytes_per_sample", "delivered_nbytes_per_sample",
)  # fmt: skip


_SHOWN_INDICES = 4


def figures_of(stats: Stats) -> dict[str, Any]:
    """All figures of a loader as JSON values."""
    figures: dict[str, Any] = {name: getattr(stats, name) for name in _PLAIN}
    figures["stages"] = {stage: stage_figures(times) for stage, times in stats.stages.items()}
    figures["loop"] = {stage: stage_figures(times) for stage, times in stats.loop.items()}
    figures["stores"] = {name: amount for name, amount in asdict(stats.stores).items() if amount}
    figures["latest_skipped"] = [
        [epoch, position, plain_index(index)] for epoch, position, index in stats.latest_skipped
    ]
    figures["slowest"] = [_slow_figures(batch) for batch in stats.slowest]
    if stats.since_epoch is not None:
        epoch = stats.since_epoch
        figures["since_epoch"] = {
            name: getattr(epoch, name) for name in ("batches", "samples", "wall_s", "wait_s", "step_s", "skipped")
        }
    return figures


def stage_figures(times: StageTimes) -> dict[str, Any]:
    """The times of a stage as JSON values, in seconds."""
    return {
        "count": times.count,
        "total_s": times.total_s,
        "cpu_s": times.cpu_s,
        "p50_s": times.quantile_s(0.5),
        "p90_s": times.quantile_s(0.9),
        "p99_s": times.quantile_s(0.99),
        "max_s": times.max_s,
        "workers": len([worker for worker in times.workers if worker >= 0]),
    }


def _slow_figures(batch: SlowBatch) -> dict[str, Any]:
    names = ("stage", "seconds", "worker", "epoch", "number", "address")
    return {**{name: getattr(batch, name) for name in names}, "indices": plain_indices(batch.indices, _SHOWN_INDICES)}


def plain_indices(indices: Any, most: int) -> list[Any]:
    """The first indices as JSON values.

    A request without batching has a single index.
    """
    few = indices[:most] if isinstance(indices, Sequence | np.ndarray) and not isinstance(indices, str) else [indices]
    return [plain_index(index) for index in few]


def plain_index(index: Any) -> Any:
    """An index as a JSON value."""
    try:
        return operator.index(index)
    except Exception:  # noqa: BLE001 - arrays and tensors of several elements have an __index__ that raises
        return str(index)


def advice_text(advice: Advice) -> str:
    """A piece of advice in words, with its predicted gain."""
    if advice.basis == "bound":
        return f"{advice} (at most {number(advice.high)} ×)"
    if advice.low == advice.high:  # of a quick verdict, which has no ranges
        return f"{advice} ({number(advice.gain)} ×)"
    return f"{advice} ({number(advice.gain)} ×, {number(advice.low)}–{number(advice.high)})"


def verdict_figures(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON values."""
    return {
        "limiting_stage": verdict.limiting_stage,
        "headline": verdict.headline,
        "explanation": verdict.explanation,
        "advice": [
            {
                "text": advice_text(advice),
                "change": advice.change,
                "gain": advice.gain,
                "range": gain_of(advice),
                "why": advice.text if advice.arguments else "",
            }
            for advice in verdict.advice
        ],
    }


def what_if(model: Model) -> list[dict[str, Any]]:
    """Predicted gains of numbers of workers, prefetch factors and orders."""
    context = model.context
    present = _setting(context.num_workers, context.prefetch_factor, context.in_order)
    counts = sorted({*_WORKER_COUNTS, context.num_workers})
    factors = sorted({*_FACTORS, context.prefetch_factor})
    inline = _setting(0, factors[0], in_order=True)
    settings = [_setting(number, factor, order) for number in counts[1:] for factor in factors for order in _ORDERS]
    rows = []
    for arguments in (inline, *settings):
        case = case_of(model, arguments)
        if case is not None:
            is_now = arguments == present or present["num_workers"] == arguments["num_workers"] == 0
            rows.append({**arguments, "gain": 1.0 if is_now else model.gain(case), "is_now": is_now})
    return rows


def _setting(number: int, factor: int, in_order: bool) -> dict[str, Any]:
    return {"num_workers": number, "prefetch_factor": factor, "in_order": in_order}


_WORKER_COUNTS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32)


_FACTORS = (2, 4, 8)


_ORDERS = (True, False)


def rates(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> tuple[float, float]:
    """(samples per second, share of waiting) between two figures of one loader."""
    wall_s = later["wait_s"] + later["step_s"] - earlier["wait_s"] - earlier["step_s"]
    if wall_s <= 0:
        return 0.0, 0.0
    share = (later["wait_s"] - earlier["wait_s"]) / wall_s
    return (later["samples"] - earlier["samples"]) / wall_s, min(max(share, 0.0), 1.0)


def times_of(pairs: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], start_s: float) -> Iterator[float]:
    """Seconds from the start to the later point of each pair.

    Where the clock was set back, the time of the loop counts instead.
    """
    passed_s, last_s = 0.0, start_s
    for earlier, later in pairs:
        by_clock_s = later["time_s"] - last_s
        by_loop_s = later["wait_s"] + later["step_s"] - earlier["wait_s"] - earlier["step_s"]
        passed_s += by_clock_s if by_clock_s >= 0 else max(by_loop_s, 0.0)
        last_s = later["time_s"]
        yield passed_s
