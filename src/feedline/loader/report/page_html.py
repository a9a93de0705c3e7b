"""Report page: one HTML file with all figures of a run.

It needs no other file and no network, and adapts to phones and to dark mode.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from feedline.core.histogram import REORDER
from feedline.core.stage_parts import is_part
from feedline.core.telemetry import MAIN
from feedline.loader.report.charts import Series, bars, line_chart, timeline
from feedline.loader.report.figures import rates, times_of
from feedline.loader.report.raised import raised_error_of
from feedline.loader.report.stats import count, is_block, seconds, share, size
from feedline.loader.report.totals import RecentBatch

_SHOWN_BATCHES = 24
"""Batches of the timeline."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """Figures of a loader on one rank, with their history."""

    figures: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]] = ()
    batches: Sequence[RecentBatch] = ()
    run: int = 0
    """Number of the run, which is 0 for the newest."""
    name: str = ""
    """Name of the loader, where its label is not enough."""
    start_s: float | None = None
    """Seconds from 1970 to the start of the log; None without a log."""

    @property
    def loader(self) -> str:
        """Name of the loader, which ranks share."""
        return self.name or str(self.figures["loader"])

    @property
    def wait_share(self) -> float:
        """Share of the run in which the loop waited."""
        return self.figures["wait_s"] / self.figures["wall_s"] if self.figures["wall_s"] else 0.0


def page(reports: Sequence[RankReport], notes: Sequence[str] = ()) -> str:
    """The text of the page for runs, loaders and ranks.

    Reports of a run are next to each other. `notes` are sentences on what the logs lack.
    """
    first = reports[0]
    title = f"feedline · {first.figures['script']} · {first.figures['loader']}"
    runs: dict[int, list[RankReport]] = {}
    for report in reports:
        runs.setdefault(report.run, []).append(report)
    body = [_header(next(iter(runs.values()))), _notes(notes)]
    shown: list[RankReport] = []
    for place, of_run in enumerate(runs.values()):
        loaders: dict[str, list[RankReport]] = {}
        for report in of_run:
            loaders.setdefault(report.loader, []).append(report)
        inner = _run(loaders)
        body.append(inner if len(runs) == 1 else _one_of_runs(inner, of_run, is_newest=place == 0))
        shown += [report for of_loader in loaders.values() for report in of_loader]
    figures = json.dumps([dict(report.figures) for report in shown]).replace("</", "<\\/")
    script = f"<script>{_file('page.js')}</script>"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{_file('page.css')}</style></head>\n<body><main>\n{''.join(body)}</main>\n"
        f'<script type="application/json" id="figures">{figures}</script>\n{script}</body></html>\n'
    )


def _notes(notes: Sequence[str]) -> str:
    return f'<ul class="notes">{"".join(f"<li>{escape(note)}</li>" for note in notes)}</ul>\n' if notes else ""


def _run(loaders: Mapping[str, Sequence[RankReport]]) -> str:
    """Sections of all loaders and ranks of a run.

    Of several, the one whose loop waited longest is open.
    """
    # Loaders of one process do different work: only the ranks of one loader are compared.
    compared = [_ranks(of_loader, alone=len(loaders) == 1) for of_loader in loaders.values() if len(of_loader) > 1]
    of_run = [report for of_loader in loaders.values() for report in of_loader]
    errors = _errors(of_run)
    if len(of_run) == 1:
        return errors + _rank(of_run[0])
    has_ranks = len({report.figures["rank"] for report in of_run}) > 1
    longest = max(of_run, key=lambda report: report.figures["wait_s"])
    folded = (
        _fold(
            _rank_title(each, has_loaders=len(loaders) > 1, has_ranks=has_ranks), _rank(each), is_open=each is longest
        )
        for each in of_run
    )
    return "".join((errors, *compared, *folded))


def errors_of(reports: Sequence[RankReport]) -> list[tuple[str, str]]:
    """Headlines and details of the first errors that ended loops.

    Of many, the last headline counts those that are left out.
    """
    found = [
        (raised, report) for report in reports if (raised := raised_error_of(report.figures)) and not raised.went_on
    ]
    has_ranks = len({report.figures["rank"] for report in reports}) > 1
    has_loaders = len({report.loader for report in reports}) > 1
    errors = [
        (raised.headline(_subject(report, has_ranks=has_ranks, has_loaders=has_loaders)), raised.details)
        for raised, report in sorted(found, key=lambda each: each[0].time_s)
    ]
    more = [(f"Other ranks and loaders raised {count(len(errors) - _MOST_ERRORS, 'more error')}", "")]
    return errors[:_MOST_ERRORS] + (more if len(errors) > _MOST_ERRORS else [])


def _subject(report: RankReport, *, has_ranks: bool, has_loaders: bool) -> str:
    """Name of a loader or rank that begins a sentence."""
    names = [f"Rank {report.figures['rank']}"] * has_ranks + [report.loader] * has_loaders
    return ", ".join(names) or "The loader"


_MOST_ERRORS = 4


def _errors(reports: Sequence[RankReport]) -> str:
    """Sections of the first errors that ended loops."""
    return "".join(
        _section(headline, f"<p>{escape(details)}</p>" if details else "", "verdict raised")
        for headline, details in errors_of(reports)
    )


def _fold(title: str, inner: str, *, is_open: bool) -> str:
    return f"<details{' open' * is_open}><summary>{escape(title)}</summary>\n{inner}</details>\n"


def _one_of_runs(inner: str, reports: Sequence[RankReport], *, is_newest: bool) -> str:
    """A run with its start; folded, except for the newest."""
    figures = reports[0].figures
    started = moment(min(report.start_s or report.figures["time_s"] for report in reports))
    wall_s = sum(report.figures["wall_s"] for report in reports)
    waits = share(sum(report.figures["wait_s"] for report in reports) / wall_s) if wall_s else "nothing"
    title = f"Run from {started} · {figures['script']} on {figures['host']} · waits {waits}"
    return _fold(title, inner, is_open=is_newest)


def moment(time_s: float) -> str:
    """A date and time, to the second."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _file(name: str) -> str:
    return (Path(__file__).parent / name).read_text(encoding="utf-8")


def _header(reports: Sequence[RankReport]) -> str:
    """Title of the page, from the reports of the newest run."""
    figures = reports[0].figures
    ranks = len({report.figures["rank"] for report in reports})
    loaders = dict.fromkeys(report.figures["loader"] for report in reports)
    when = datetime.fromtimestamp(figures["time_s"], UTC).strftime("%Y-%m-%d %H:%M UTC")
    where = f"{figures['host']} · process {figures['pid']}" if ranks == 1 else f"{ranks} ranks"
    return (
        f"<header><h1>{escape(figures['script'])} · {escape(', '.join(loaders))}</h1>"
        f"<p>{escape(where)} · {when} · epoch {figures['epoch']}, {count(figures['batches'], 'batch')}, "
        f"{count(figures['samples'], 'sample')}</p></header>\n"
    )


def _ranks(reports: Sequence[RankReport], *, alone: bool) -> str:
    """A table of a loader's ranks that names the slow one."""
    slow = slowest_rank(reports)
    rows = [
        [
            f"{report.figures['rank']}" + (" ← slowest" if report is slow else ""),
            escape(report.figures["host"]),
            share(report.wait_share),
            seconds(_mean(report.figures, "wait")),
            seconds(_mean(report.figures, "step")),
            escape(report.figures["verdict"].get("limiting_stage", "")),
        ]
        for report in reports
    ]
    text = _slow_text(slow, reports)
    title = "Ranks" if alone else f"Ranks of {reports[0].loader}"
    return _section(title, f"<p>{escape(text)}</p>" + _table(("rank", "host", "waits", "wait", "step", "limit"), rows))


def slowest_rank(reports: Sequence[RankReport]) -> RankReport:
    """The rank with the longest waits per batch.

    If ranks step together, the others wait for it during their steps.
    """
    return max(reports, key=lambda report: _mean(report.figures, "wait"))


def _slow_text(slow: RankReport, reports: Sequence[RankReport]) -> str:
    others = [_mean(report.figures, "wait") for report in reports if report is not slow]
    wait, usual = _mean(slow.figures, "wait"), sorted(others)[len(others) // 2]
    if wait < 1.5 * usual + 1e-3:
        return f"All ranks wait about equally: {seconds(usual)} to {seconds(wait)} per batch."
    return (
        f"Rank {slow.figures['rank']} on {slow.figures['host']} is the slow one: it waits {seconds(wait)} per batch "
        f"for its data, others {seconds(usual)}. Where ranks step together, all of them wait for it."
    )


def _mean(figures: Mapping[str, Any], stage: str) -> float:
    times = figures["loop"].get(stage)
    return times["total_s"] / times["count"] if times and times["count"] else 0.0


def _rank_title(report: RankReport, *, has_loaders: bool, has_ranks: bool) -> str:
    """Name and share of waiting of one of several loaders or ranks."""
    names = [f"Rank {report.figures['rank']}"] * has_ranks + [report.loader] * (has_loaders or not has_ranks)
    if report.start_s is not None and report.loader != report.figures["loader"]:
        names.append(f"from {moment(report.start_s)}")
    return " · ".join((*names, f"waits {share(report.wait_share)}"))


def _rank(report: RankReport) -> str:
    return "".join(
        (_verdict(report), _lines(report), _tiles(report), _what_if(report), _where(report), _over_time(report),
         _timeline(report), _stages(report), _slowest(report), _skipped(report), _incidents(report), _settings(report))
    )  # fmt: skip


def _verdict(report: RankReport) -> str:
    verdict = report.figures["verdict"]
    if not verdict:
        return _section("Verdict", "<p>No batch has been delivered yet.</p>")
    return (
        f'<section class="verdict"><h2>{escape(verdict["headline"])}</h2><p>{escape(verdict["explanation"])}</p>'
        f"{_remedies(verdict['advice'])}</section>\n"
    )


def _remedies(advice: Sequence[Mapping[str, Any]]) -> str:
    """A table of the advice; empty without any."""
    rows = [[_remedy(hint), f'<span class="gain">{escape(hint.get("range", ""))}</span>'] for hint in advice]
    return _table(("remedy", "predicted gain"), rows) if rows else ""


def _remedy(hint: Mapping[str, Any]) -> str:
    if "range" not in hint:  # of an earlier version, whose text has the gain
        return escape(hint["text"])
    return f"<b>{escape(hint['change'])}</b><br>{escape(hint['why'])}" if hint["why"] else escape(hint["change"])


def _tiles(report: RankReport) -> str:
    figures = report.figures
    wall_s = figures["wall_s"]
    latest = [figures, *reversed(report.history)]
    memory = next((point["worker_nbytes"] for point in latest if point["worker_nbytes"]), 0)  # workers may have ended
    tiles = [
        ("samples/s", f"{figures['samples'] / wall_s:,.0f}" if wall_s else "–"),
        ("waits, all epochs", share(report.wait_share)),
        ("step", seconds(_mean(figures, "step"))),
        ("first batch", seconds(figures["startup_s"] / _epochs(figures))),
        ("batches in memory", size(figures["in_flight_nbytes"])),
        ("workers' memory", size(memory) if memory else "–"),
    ]
    for name, words in (
        ("read_nbytes_per_sample", "read a sample"),
        ("delivered_nbytes_per_sample", "delivered a sample"),
    ):
        if figures.get(name):
            tiles.append((words, size(figures[name])))
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(name)}</span></div>" for name, value in tiles)
    return f'<section class="tiles">{cells}</section>\n'


def _epochs(figures: Mapping[str, Any]) -> int:
    """Epochs of this process."""
    # The first batch of each has a wait, but no step before it.
    waits, steps = (figures["loop"].get(stage, {}).get("count", 0) for stage in ("wait", "step"))
    return max(int(waits) - int(steps), 1)


def _lines(report: RankReport) -> str:
    rows = [
        [share(line["share"]), escape(line["where"]), f"<code>{escape(line['text'])}</code>"]
        for line in report.figures.get("lines", ())
    ]
    return _section("Lines that take the time of samples", _table(("", "", ""), rows)) if rows else ""


def _what_if(report: RankReport) -> str:
    """Controls for settings, over a table of predicted rates."""
    predicted = report.figures.get("what_if", ())
    cells = {(cell["num_workers"], cell["prefetch_factor"]): cell for cell in predicted if cell["in_order"]}
    if not cells:
        return ""
    now = next((cell for cell in predicted if cell["is_now"]), None)
    factors = sorted({factor for _, factor in cells})
    rate = report.figures["samples"] / report.figures["wall_s"] if report.figures["wall_s"] else 0.0
    known = {number for number, _ in cells}
    kept = known.intersection((*_TABLE_COUNTS, -1 if now is None else now["num_workers"]))
    rows = [
        [f"{number}", *(_predicted(cells.get((number, factor)), rate) for factor in factors)] for number in sorted(kept)
    ]
    heads = ("num_workers", *(f"prefetch_factor={factor}" for factor in factors))
    note = "<p>Samples/s as the model predicts them, with the gain over today.</p>"
    return _section("What if", _CONTROLS + _table(heads, rows) + note)


_TABLE_COUNTS = (0, 1, 2, 4, 8, 16)


_CONTROLS = (
    '<form class="what-if" hidden><label>num_workers <b></b><input type="range" name="num_workers"></label>'
    '<label>prefetch_factor <b></b><input type="range" name="prefetch_factor"></label>'
    '<label><input type="checkbox" name="in_order"> in_order</label><output></output></form>\n'
)
"""Hidden until the script of the page has filled them: without scripts, the table is there."""


def _predicted(cell: Mapping[str, Any] | None, rate: float) -> str:
    if cell is None:
        return ""
    text = f"{rate * cell['gain']:,.0f} · {cell['gain']:.2f} ×"
    return f"<b>{text} now</b>" if cell["is_now"] else text


def _where(report: RankReport) -> str:
    """Bars of the time of the loop and of each stage."""
    figures = report.figures
    rows = [("loop", [("step", figures["step_s"]), ("wait", figures["wait_s"])])]
    for stage, times in figures["stages"].items():
        if stage == REORDER:  # which takes no time of a worker or the loop
            continue
        name = f"· {stage}" if is_part(stage) else stage
        if times["cpu_s"] is None:
            rows.append((name, [("CPU and waiting", times["total_s"])]))
        else:
            cpu_s = min(times["cpu_s"], times["total_s"])
            rows.append((name, [("CPU", cpu_s), ("waiting", times["total_s"] - cpu_s)]))
    note = (
        "<p>Stages are summed over workers; those with a dot are parts of fetch and collate. Waiting is time without "
        "the CPU: files, network, locks, other programs.</p>"
    )
    return _section("Where the time goes", bars(rows) + note)


def _over_time(report: RankReport) -> str:
    points = report.history
    moving = [pair for pair in pairwise(points) if pair[1]["batches"] > pair[0]["batches"]]
    if len(moving) < 2:
        return ""
    times = list(times_of(moving, points[0]["time_s"]))
    # A rate is that of the time before its point.
    samples, shares = zip(*(rates(*moving[max(place - 1, 0)]) for place in range(len(moving) + 1)), strict=True)
    charts = [
        line_chart(Series("samples/s", [0, *times], samples)),
        line_chart(Series("waits, %", [0, *times], [100 * waited for waited in shares]), ceiling=100),
    ]
    # At the end of an epoch, nothing is left to be ready.
    during = [(time, later) for time, (_, later) in zip(times, moving, strict=True) if later.get("event") != "epoch"]
    if during:
        ready = Series("ready batches", [time for time, _ in during], [float(later["ready"]) for _, later in during])
        charts.append(line_chart(ready, span_s=times[-1]))
    # At the end of an epoch, workers may have ended: that is no measurement of their memory.
    measured = [(time, later["worker_nbytes"]) for time, (_, later) in zip(times, moving, strict=True)]
    memory = [(time, nbytes / (1 << 20)) for time, nbytes in measured if nbytes]
    if memory:
        charts.append(line_chart(Series("workers' memory, MiB", *zip(*memory, strict=True)), span_s=times[-1]))
    return _section("Over time", "".join(charts))


def _timeline(report: RankReport) -> str:
    batches = report.batches[-_SHOWN_BATCHES:]
    blocks = [
        (_row_name(timed[3], timed[0]), timed[0], timed[1] / 1e9, timed[2] / 1e9, batch.number)
        for batch in batches
        for timed in batch.spans
        if is_block(timed[0])
    ]
    if not blocks:
        return ""
    # What the loop does while it waits lies on top of the wait.
    blocks.sort(key=lambda block: block[1] not in ("wait", "step"))
    title = f"The last {len(batches)} batches" if len(batches) > 1 else "The last batch"
    return _section(title, timeline(blocks))


def _row_name(worker: int, stage: str) -> str:
    if stage == "sample":
        return "sampler"
    return "loop" if worker == MAIN else f"worker {worker}"


def _stages(report: RankReport) -> str:
    figures = report.figures
    names = ("p50_s", "p90_s", "p99_s", "max_s")
    rows = [
        [escape(stage), f"{times['count']:,}", *(seconds(times[name]) for name in names), seconds(times["total_s"])]
        for stage, times in {**figures["loop"], **figures["stages"]}.items()
    ]
    return _section("Stages, per batch", _table(("stage", "times", "p50", "p90", "p99", "most", "sum"), rows))


def _slowest(report: RankReport) -> str:
    slowest = report.figures["slowest"]
    rows = [
        [
            f"{batch['epoch']}", f"{batch['number']:,}", escape(batch["stage"]), seconds(batch["seconds"]),
            escape(", ".join(map(str, batch["indices"])) + (" …" if len(batch["indices"]) > 3 else "")),
            escape(batch["address"]),
        ]
        for batch in slowest
    ]  # fmt: skip
    if not rows:
        return ""
    # Streams have no indices, and most datasets no addresses.
    shown = [place for place in range(len(_SLOW_HEADS)) if any(row[place] for row in rows)]
    cells = [[row[place] for place in shown] for row in rows]
    return _section("Slowest batches", _table([_SLOW_HEADS[place] for place in shown], cells), "slowest")


_SLOW_HEADS = ("epoch", "batch", "stage", "took", "samples", "first sample")


def _skipped(report: RankReport) -> str:
    latest = reversed(report.figures.get("latest_skipped", ()))  # logs of older runs have no list
    rows = [[f"{epoch}", f"{position:,}", escape(str(index))] for epoch, position, index in latest]
    return _section("Skipped samples, latest first", _table(("epoch", "position", "index"), rows)) if rows else ""


def _incidents(report: RankReport) -> str:
    figures, stores = report.figures, report.figures["stores"]
    rows = [
        ["samples skipped or replaced", f"{figures['skipped']:,}"],
        ["workers that died and were replaced", f"{figures['restarts']:,}"],
        ["ready to run, but not run", seconds(figures["run_delay_s"])],
    ]
    raised = raised_error_of(figures)
    if raised is not None and raised.went_on:
        rows.insert(0, ["latest error", escape(raised.text)])
    if figures["padding_share"] is not None:
        rows.append(["padding in batches", share(figures["padding_share"])])
    if figures["throttled_share"] is not None:
        rows.append(["periods cut short by the CPU quota", share(figures["throttled_share"])])
    if figures.get("gpu_utilization") is not None:
        rows.append(["GPU in use at the end", share(figures["gpu_utilization"])])
    if figures.get("contended_share"):
        rows.append(["workers waited for a lock of another worker", share(figures["contended_share"])])
    if figures["worker_growth_nbytes"] is not None:
        rows.append(["growth of the workers per epoch", _growth(figures["worker_growth_nbytes"])])
    rows += [
        [f"stores: {escape(_STORE_WORDS.get(name, name.replace('_', ' ')))}", _amount(name, amount)]
        for name, amount in stores.items()
    ]
    return _section("Incidents and stores", _table(("", ""), rows))


_STORE_WORDS = {"nbytes": "received", "waited_s": "waited before retries"}
"""Names of figures whose unit is in their value."""


def _amount(name: str, amount: float) -> str:
    """A figure of the stores with its unit."""
    return size(amount) if name == "nbytes" else seconds(amount) if name == "waited_s" else f"{amount:,}"


def _growth(nbytes: float) -> str:
    return size(nbytes) if nbytes >= 0 else f"−{size(-nbytes)}"


def _settings(report: RankReport) -> str:
    figures = report.figures
    rows = [[escape(name), escape(str(value))] for name, value in figures["settings"].items()]
    return _section("Settings", _table(("", ""), [["dataset", escape(figures["dataset"])], *rows]))


def _section(title: str, inner: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return f"<section{attribute}><h2>{escape(title)}</h2>\n{inner}</section>\n"


def _table(heads: Iterable[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are HTML already."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>\n'
