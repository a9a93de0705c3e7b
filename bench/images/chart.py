"""One contest as a bar chart (SVG): one bar per contestant, fastest first; limits are dashed lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Result = dict[str, Any]

OURS, PEER, LINE, INK, FAINT = "#e4572e", "#a9b4c2", "#3d5a80", "#1f2933", "#6b7785"
PALE = {OURS: "#f5b8a6", PEER: "#d9dfe6"}
STYLE = {
    # Text stays text: a quarter of the size, and sharp at every scale.
    "svg.fonttype": "none",
    "svg.hashsalt": "feedline",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "text.color": INK,
}
HEIGHT, HEAD = 0.27, 0.78
"""Heights in inches: of a bar with its gap, and of the head above the bars."""

STORED = {"raw.beton", "decoded"}
"""Forms that hold pixels: another task, shown by pale bars."""


def draw(result: Result, path: Path) -> None:
    """Write the chart of one contest."""
    limits = [e for e in result["entrants"] if e["kind"] == "limit"]
    bars = sorted((e for e in result["entrants"] if e["kind"] != "limit"), key=lambda e: e["median"])
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.6, HEIGHT * len(bars) + HEAD))
        below = 0.06 / figure.get_figheight()
        axes = figure.add_axes((0.285, below, 0.705, 1 - below - HEAD / figure.get_figheight()))
        _bars(axes, bars)
        for limit in limits:
            _limit(axes, limit, len(bars))
        axes.set_xlim(0, 1.24 * max(e["high"] for e in [*bars, *limits]))
        axes.set_ylim(-0.5, len(bars) - 0.5)
        axes.xaxis.set_visible(False)
        axes.spines[:].set_visible(False)
        _add_heading(figure, result["title"], _subtitle(result, bars))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})


def _bars(axes: Axes, bars: list[Result]) -> None:
    for row, e in enumerate(bars):
        ours = e["kind"] == "ours"
        color = OURS if ours else PEER
        axes.barh(row, e["median"], height=0.74, color=PALE[color] if e["reads"] in STORED else color)
        axes.hlines(row, e["low"], e["high"], color=INK, linewidth=0.9, alpha=0.5)
        axes.annotate(
            f"{e['median']:,.0f}  ·  {e['ratio']:.1f}×",
            (max(e["high"], e["median"]), row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            size=9,
            weight="bold" if ours else "normal",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
        )
    axes.set_yticks(range(len(bars)), [e["name"] for e in bars])
    axes.tick_params(length=0, labelsize=9.5)
    for label, e in zip(axes.get_yticklabels(), bars, strict=True):
        label.set(color=INK, weight="bold" if e["kind"] == "ours" else "normal")


def _limit(axes: Axes, limit: Result, rows: int) -> None:
    axes.axvline(limit["median"], color=LINE, linewidth=1.1, linestyle=(0, (4, 3)), zorder=0)
    summary = f"{limit['name']}: {limit['median']:,.0f}"
    axes.text(limit["median"], rows - 0.45, summary, color=LINE, size=8.5, ha="center", va="bottom")


def _subtitle(result: Result, bars: list[Result]) -> str:
    summary = f"images per second, times {result['baseline']}; {result['task']['workers']} workers"
    return f"{summary}; pale: pixels stored ready" if any(e["reads"] in STORED for e in bars) else summary


def _add_heading(figure: Figure, title: str, subtitle: str) -> None:
    top = figure.get_figheight()
    figure.text(0.012, 1 - 0.1 / top, title, size=12, weight="bold", va="top")
    figure.text(0.012, 1 - 0.34 / top, subtitle, size=9, color=FAINT, va="top")
