"""Charts as inline SVG, with colors of the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from feedline.loader.report.stats import seconds, share

_WIDTH, _HEIGHT = 640, 120


_ROW = 22


_LABEL = 76


@dataclass(frozen=True, slots=True)
class Series:
    """Values over time, in seconds since the first one."""

    title: str
    times_s: Sequence[float]
    values: Sequence[float]


def line_chart(series: Series, ceiling: float | None = None, span_s: float = 0.0) -> str:
    """A chart of one series; the vertical axis begins at 0.

    The horizontal one has the length of the series, or of `span_s` if that is longer.
    """
    top = ceiling or max(series.values, default=0.0) or 1.0
    span = max(span_s, *series.times_s[-1:]) or 1.0
    points = " ".join(
        f"{_WIDTH * time / span:.1f},{_HEIGHT - _HEIGHT * min(value / top, 1):.1f}"
        for time, value in zip(series.times_s, series.values, strict=True)
    )
    last = series.values[-1] if series.values else 0.0
    title = f"{series.title}: {last:,.4g} now, at most {max(series.values, default=0.0):,.4g}, in {seconds(span)}"
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg class="line" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'preserveAspectRatio="none" role="img" aria-label="{escape(title)}"><polyline points="{points}"/></svg>'
        "</figure>\n"
    )


def bars(rows: Sequence[tuple[str, Sequence[tuple[str, float]]]]) -> str:
    """A bar per row, divided into its parts.

    The longest one fills the width.
    """
    longest = max((sum(value for _, value in parts) for _, parts in rows), default=0.0) or 1.0
    lines = []
    for name, parts in rows:
        total = sum(value for _, value in parts) or 1.0
        words = ", ".join(f"{part} {seconds(value)} ({share(value / total)})" for part, value in parts)
        pieces = "".join(
            f'<i class="{_class(part)}" style="width:{100 * value / longest:.2f}%" title="{escape(words)}"></i>'
            for part, value in parts
        )
        lines.append(
            f'<div class="bar"><span>{escape(name)}</span><div>{pieces}</div><small>{escape(words)}</small></div>'
        )
    return "".join(lines)


def timeline(blocks: Iterable[tuple[str, str, float, float, int]]) -> str:
    """Blocks of stages in rows: (row, stage, start, stop, batch), in seconds."""
    blocks = list(blocks)
    rows = sorted({row for row, *_ in blocks}, key=lambda row: (row.startswith("worker"), len(row), row))
    begin, end = min(start for _, _, start, _, _ in blocks), max(stop for _, _, _, stop, _ in blocks)
    span = (end - begin) or 1.0
    shapes = [f'<text x="0" y="{_ROW * place + 15}">{escape(row)}</text>' for place, row in enumerate(rows)]
    for row, stage, start, stop, batch in blocks:
        left = _LABEL + (_WIDTH - _LABEL) * (start - begin) / span
        width = max((_WIDTH - _LABEL) * (stop - start) / span, 0.5)
        title = f"{stage}, batch {batch}: {seconds(stop - start)}"
        shapes.append(
            f'<rect class="{_class(stage)}" x="{left:.2f}" y="{_ROW * rows.index(row) + 2}" width="{width:.2f}" '
            f'height="{_ROW - 4}"><title>{escape(title)}</title></rect>'
        )
    height = _ROW * len(rows)
    stages = sorted({stage for _, stage, *_ in blocks})
    legend = "".join(f'<span><i class="{_class(stage)}"></i>{escape(stage)}</span>' for stage in stages)
    return (
        f'<div class="scroll"><svg class="time" viewBox="0 0 {_WIDTH} {height}" role="img" '
        f'aria-label="Timeline of {seconds(span)}">{"".join(shapes)}</svg></div>'
        f'<p class="legend">{legend}<span>{seconds(span)} in all</span></p>\n'
    )


_KNOWN = (
    "step", "wait", "fetch", "read", "decode", "transform", "collate", "serialize", "receive", "sample", "copy", "CPU",
    "waiting",
)  # fmt: skip


def _class(name: str) -> str:
    kind = name.partition(" ")[0]  # "read s3://bucket"
    return f"c-{kind}" if kind in _KNOWN else "c-other"
