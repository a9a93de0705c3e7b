"""Screens of `feedline top`, for 80 columns and for 40."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from time import localtime, strftime
from typing import Any

from rich.text import Text

from feedline.cli.top.keys import ScreenState
from feedline.cli.top.reading import LoaderReading, WorkerReading
from feedline.core.wrapping import wrap
from feedline.loader.report.figures import rates
from feedline.loader.report.parts import part_shares
from feedline.loader.report.raised import raised_error_of
from feedline.loader.report.stats import count, seconds, share, size

NARROW = 60
"""Width below which a loader takes one line per subject."""


_STEPS = "▁▂▃▄▅▆▇█"


_BAR = 10


_LONG_S = 1.0
"""Wait of the loop from which the screen shows its duration in place of rates."""


_SLOW_S = 5.0
"""Time on one batch from which a worker is marked as slow."""


_ERROR_LINES = 6
"""Most lines of an error."""


_WORKER_LINES = 17
"""Height of the workers where the output has none. The last line counts the workers that are left out."""


def screen(
    before: LoaderReading | None,
    now: LoaderReading,
    width: int,
    view: ScreenState | None = None,
    height: int | None = None,
) -> list[Text]:
    """The screen of one loader, of at most `width` columns.

    Rates cover the time since the reading `before`, or the last seconds if `before` is None. With a `height`, advice
    and then workers are left out until the lines fit, but never the worker that is slowest.
    """
    view = view or ScreenState()
    lines = [*_head(now, width), *_error(now, width), _loop(before, now, width), _queue(now, width)]
    further = [*_parts(now, width), *_stores(now, width), *_incidents(now, width)]
    verdict = _verdict(now, width, view)
    room = _WORKER_LINES
    if height is not None:
        further = further[: max(0, height - len(lines) - 1)]
        verdict = _cut(verdict, height - len(lines) - len(further) - 1)
        room = height - len(lines) - len(further) - len(verdict)
    lines += [*_workers(before, now, width, view, room), *further, *verdict]
    for line in lines:
        line.truncate(width, overflow="ellipsis")
    return lines


def _cut(lines: list[Text], most: int) -> list[Text]:
    """The first lines, with a sign where some are left out."""
    if len(lines) <= most or most < 1:
        return lines[: max(0, most)]
    *kept, last = lines[:most]
    return [*kept, Text(f"{last.plain} …", style=last.style)]


def _head(now: LoaderReading, width: int) -> list[Text]:
    """Process, loader and place in the data, in one or two lines."""
    figures = now.figures
    rank = f" · rank {figures['rank']}" if figures["world_size"] > 1 else ""
    length = figures["length"]
    number, due = _next_batch(now)
    place = f"epoch {number} · {due:,}" + (f" of {length:,}" if length else "")
    timed = place + _time_left(now)
    loader = f"{figures['loader']}{rank}"
    if width < NARROW:
        long, short = f"{figures['script']} {now.pid} · {loader}", f"{now.pid} · {loader}"
        return [
            Text(long if len(long) <= width else short, style="bold"),
            Text(timed if len(timed) <= width else place),
        ]
    what = f"{loader} · {timed}"
    names = (f"feedline · {figures['script']} {now.pid} · ", f"{figures['script']} {now.pid} · ", f"{now.pid} · ")
    text = Text(next((name + what for name in names if len(name + what) <= width), what), style="bold")
    clock = strftime("%H:%M:%S", localtime(now.time_s))
    if text.cell_len + len(clock) + 2 <= width:
        text.append(clock.rjust(width - text.cell_len), "dim")
    return [text]


def _time_left(now: LoaderReading) -> str:
    """Time left in the epoch at its speed so far, if known."""
    figures = now.figures
    epoch = figures.get("since_epoch", {})
    _, due = _next_batch(now)
    if not figures["length"] or not epoch.get("batches") or due >= figures["length"] or not now.phase_start_ns:
        return ""
    left_s = (figures["length"] - due) * epoch["wall_s"] / epoch["batches"]
    return f" · {_duration(left_s)} left"


def _duration(value: float) -> str:
    if value < 100:
        return seconds(value)
    minutes = round(value / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"


def _error(now: LoaderReading, width: int) -> list[Text]:
    """The error that has ended the loop, wrapped; empty without one."""
    raised = raised_error_of(now.figures)
    if raised is None or raised.went_on or now.phase_start_ns or now.batches > raised.batches:
        return []
    indent = " " * 7
    lines = [
        Text(line, style=style)
        for text, style in ((f"error  {raised.error}", "bold red"), (f"{indent}{raised.details}", ""))
        for line in wrap(text, width, subsequent_indent=indent)
    ]
    return _cut(lines, _ERROR_LINES)


def _loop(before: LoaderReading | None, now: LoaderReading, width: int) -> Text:
    if now.waiting_s >= _LONG_S:
        due, length = _next_batch(now)[1], now.figures["length"]
        what = "the next epoch" if length and due == length else f"batch {due:,}"
        text = Text.assemble("loop   ", (f"has waited {_duration(now.waiting_s)}", "bold red"))
        return text.append(f"  for {what}") if text.cell_len + len(what) + 6 <= width else text
    history = now.figures["history"]
    samples_per_s, wait_share = _rates(before, now, history)
    is_known = bool(now.figures["batches"])  # a loader's first figures may be later than its first batches
    if not now.phase_start_ns:
        text = Text.assemble("loop   ", ("at rest", "dim"))
    elif is_known:
        text = Text.assemble("loop   ", (f"waits {share(wait_share)}", _shade(wait_share)))
    else:
        return Text("loop   has begun")
    if not is_known:
        return text
    text.append(f"  {samples_per_s:,.{samples_per_s < _FEW_SAMPLES:d}f} samples/s")
    if width >= NARROW:
        text.append(f"  step {seconds(_mean(now.figures, 'step'))}  wait {seconds(_mean(now.figures, 'wait'))}  ")
        text.append(sparkline([wait for _, wait in _series(history)][-(width - text.cell_len) :]), "cyan")
    return text


_FEW_SAMPLES = 9.95
"""Samples per second below which a rate has a decimal."""


def _next_batch(now: LoaderReading) -> tuple[int, int]:
    """Current epoch, and the number of the next batch in it.

    The figures may describe an earlier epoch, but `now.batches` is always current.
    """
    figures = now.figures
    number, due, length = (
        figures["epoch"],
        int(figures["position"] + now.batches - figures["batches"]),
        figures["length"],
    )
    over = max(due - 1, 0) // length if length else 0
    return number + over, due - over * length if over else due


def _rates(before: LoaderReading | None, now: LoaderReading, history: Sequence[Any]) -> tuple[float, float]:
    if before is not None and before.figures["batches"] < now.figures["batches"]:
        return rates(before.figures, now.figures)
    if len(history) > 1:
        return rates(_point(history[-2]), now.figures)
    return rates(dict.fromkeys(("samples", "wait_s", "step_s"), 0), now.figures)


def _point(values: Sequence[Any]) -> Mapping[str, Any]:
    return dict(zip(("time_s", "epoch", "batches", "samples", "wait_s", "step_s", "ready"), values, strict=False))


def _series(history: Sequence[Any]) -> list[tuple[float, float]]:
    points = [_point(values) for values in history]
    return [rates(earlier, later) for earlier, later in pairwise(points)]


def sparkline(shares: Sequence[float]) -> str:
    """Bar chart with one character per value between 0 and 1."""
    return "".join(_STEPS[min(int(value * len(_STEPS)), len(_STEPS) - 1)] for value in shares)


def _mean(figures: Mapping[str, Any], stage: str) -> float:
    times = figures["loop"].get(stage)
    return times["total_s"] / times["count"] if times else 0.0


def _shade(wait_share: float) -> str:
    return "green" if wait_share < 0.05 else "yellow" if wait_share < 0.3 else "bold red"


def _queue(now: LoaderReading, width: int) -> Text:
    ready, ahead = now.figures["ready"], now.figures["ahead"]
    if not ahead:
        text = "no workers: built by the loop" if width < NARROW else "no workers: the loop builds each batch itself"
        return Text.assemble("ready  ", (text, "dim"))
    if width < NARROW:
        return Text(f"ready  {ready} of {ahead} batches")
    return Text.assemble("ready  ", (_bar(ready / ahead), "cyan"), f"  {ready} of {ahead} batches")


def _parts(now: LoaderReading, width: int) -> list[Text]:
    """Share of each stage in building a batch, and bytes per sample."""
    figures = now.figures
    shares = part_shares({stage: times["total_s"] for stage, times in figures.get("stages", {}).items()})
    shown = [f"{stage} {share(part)}" for stage, part in shares.items() if part >= _SHOWN_SHARE]
    for name, verb in (("read_nbytes_per_sample", "read"), ("delivered_nbytes_per_sample", "delivered")):
        if shown and figures.get(name):
            shown.append(f"{size(figures[name])} {verb} a sample")
    if not shown:
        return []
    text, *more = shown
    for each in more if width >= NARROW else ():
        if len(text) + len(each) + 9 <= width:
            text = f"{text}  {each}"
    return [Text(f"build  {text}"[:width])]


_SHOWN_SHARE = 0.03
"""Share of building a batch below which a stage is left out."""


def _bar(filled: float) -> str:
    full = round(min(max(filled, 0.0), 1.0) * _BAR)
    return "█" * full + "░" * (_BAR - full)


def _workers(before: LoaderReading | None, now: LoaderReading, width: int, view: ScreenState, room: int) -> list[Text]:
    """A line for each worker, longest at its batch first, within `room`."""
    earlier = {worker.pid: worker for worker in before.workers} if before is not None else {}
    wall_s = (now.now_ns - before.now_ns) / 1e9 if before is not None else 0.0
    fits = len(now.workers) <= room
    if view.order == "number" and (width < NARROW or not fits):
        view = replace(view, order="busy")
    shown = _sorted(now.workers, earlier, view)[: len(now.workers) if fits else max(1, room - 1)]
    if width < NARROW:
        lines = [_narrow_worker(worker) for worker in shown]
    else:
        lines = [_worker(worker, earlier.get(worker.pid), wall_s) for worker in shown]
    if not fits and room > 1:
        lines.append(Text(f"       and {count(len(now.workers) - len(shown), 'more worker')}", style="dim"))
    return lines


def _sorted(
    workers: Sequence[WorkerReading], earlier: Mapping[int, WorkerReading], view: ScreenState
) -> Sequence[WorkerReading]:
    def cpu_s(worker: WorkerReading) -> float:
        before = earlier.get(worker.pid)
        return worker.cpu_s - (before.cpu_s if before is not None else 0.0)

    keys: dict[str, Callable[[WorkerReading], float]] = {
        "busy": lambda worker: worker.busy_s or 0.0,
        "CPU": cpu_s,
        "memory": lambda worker: worker.nbytes,
    }
    return workers if view.order == "number" else sorted(workers, key=keys[view.order], reverse=True)


def _narrow_worker(worker: WorkerReading) -> Text:
    name = f"worker {worker.worker:<3} "
    if worker.busy_s is None:
        return Text(f"{name}idle", style="dim")
    sample = "" if worker.index is None else f"  sample {worker.index:,}"
    state = _STATES.get(worker.state, "")
    return Text(f"{name}{_duration(worker.busy_s):<7}{sample}{state and f'  {state}'}", style=_age(worker))


_STATES = {"D": "disk", "T": "stopped", "Z": "ended"}
"""Words for the states of a process that explain a wait."""


def _worker(worker: WorkerReading, earlier: WorkerReading | None, wall_s: float) -> Text:
    cpu = (worker.cpu_s - earlier.cpu_s) / wall_s if earlier is not None and wall_s > 0 else None
    bar = " " * 16 if cpu is None else f"{_bar(cpu)} {share(min(cpu, 9.99)):>5}"
    text = Text(f"{worker.worker:>5}  {bar}  {size(worker.nbytes):>8}  ")
    if worker.busy_s is None:
        return text.append("idle", "dim")
    what = _STATES.get(worker.state, "")
    sample = "" if worker.index is None else f", sample {worker.index:,}"
    more = f", {what}" if what else ""
    return text.append(f"{_duration(worker.busy_s)} at batch {worker.batch:,}{sample}{more}", _age(worker))


def _age(worker: WorkerReading) -> str:
    return "bold red" if (worker.busy_s or 0) >= _SLOW_S else ""


def _stores(now: LoaderReading, width: int) -> list[Text]:
    stores, gpu = now.figures["stores"], now.figures.get("gpu_utilization")
    parts = [] if gpu is None else [f"GPU {share(gpu)}"]
    if stores:
        parts += [f"stores {size(stores.get('nbytes', 0))}", count(stores.get("requests", 0), "request")]
    if stores.get("retries"):
        parts.append("1 retry" if stores["retries"] == 1 else f"{stores['retries']:,} retries")
    looked_up = stores.get("cache_hits", 0) + stores.get("cache_misses", 0)
    if looked_up:
        parts.append(f"cache {share(stores.get('cache_hits', 0) / looked_up)}")
    return _packed(parts, width)


def _incidents(now: LoaderReading, width: int) -> list[Text]:
    figures = now.figures
    parts = []
    if figures["skipped"]:
        parts.append(f"{count(figures['skipped'], 'sample')} skipped")
    if figures["restarts"]:
        parts.append(f"{count(figures['restarts'], 'worker')} restarted")
    if figures["throttled_share"]:
        parts.append(f"CPU quota used up in {share(figures['throttled_share'])} of the time")
    return _packed(parts, width, "yellow")


def _packed(parts: Sequence[str], width: int, style: str = "") -> list[Text]:
    """Wrapped text with as many whole parts as fit."""
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] += f" · {part}"
        else:
            lines.append(part)
    return [Text(line, style=style) for line in lines]


def _verdict(now: LoaderReading, width: int, view: ScreenState) -> list[Text]:
    verdict = now.figures["verdict"]
    if not verdict:
        return []
    most = len(verdict["advice"]) if view.has_all_advice else 1 if width < NARROW else 2
    lines = [Text(verdict["headline"], style="bold")]
    lines += [Text(f"→ {hint['text']}") for hint in verdict["advice"][:most]]
    return [part for line in lines for part in _wrap(line, width)]


def _wrap(text: Text, width: int) -> list[Text]:
    further = "  " if text.plain.startswith("→") else ""
    return [Text(line, style=text.style) for line in wrap(text.plain, width, subsequent_indent=further)]
