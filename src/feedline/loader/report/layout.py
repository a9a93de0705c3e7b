"""Text of a verdict, for width and characters of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from feedline.core.wrapping import wrap
from feedline.loader.report.remedy import Advice
from feedline.loader.report.stats import seconds

NARROW = 60
"""Columns below which advice has no table."""


def paragraph(text: str, width: int) -> str:
    """Wrapped text."""
    return "\n".join(wrap(text, width))


def table(advice: Iterable[Advice], period_s: float, width: int) -> Iterator[str]:
    """Lines of each advice: change, times, gain."""
    for each in advice:
        yield from _wide(each, period_s, width) if width >= NARROW else _narrow(each, period_s, width)


def gain_of(advice: Advice) -> str:
    """The gain with its range, such as "4.3 × (4.0–4.4)"."""
    if advice.basis == "bound":
        return f"at most {number(advice.high)} ×"
    if advice.low == advice.high:  # of a quick verdict, which has no ranges
        return f"{number(advice.gain)} ×"
    return f"{number(advice.gain)} × ({number(advice.low)}–{number(advice.high)})"


def number(value: float) -> str:
    """A factor as text, with at least two digits."""
    return f"{value:.2f}" if value < 1.995 else f"{value:.1f}" if value < 9.95 else f"{value:,.0f}"


def _times(advice: Advice, period_s: float) -> str:
    if advice.basis != "replayed" or period_s <= 0:
        return ""
    return f"{seconds(period_s)} → {seconds(period_s / advice.gain)}"


def _wide(advice: Advice, period_s: float, width: int) -> Iterator[str]:
    figures = f"{_times(advice, period_s):>18}{gain_of(advice):>20}"
    room = width - len(figures) - 3
    if advice.arguments and len(advice.change) <= room:
        yield f"→ {advice.change:<{room}} {figures}".rstrip()
        yield from _indent(advice.text, width)
        return
    lines = list(_indent(str(advice), width, "→ "))
    last = gain_of(advice)
    if len(lines[-1]) + len(last) + 3 <= width:
        lines[-1] = f"{lines[-1]:<{width - len(last)}}{last}"
    else:
        lines.append(f"{last:>{width}}")
    yield from lines


def _narrow(advice: Advice, period_s: float, width: int) -> Iterator[str]:
    yield from _indent(str(advice), width, "→ ")
    times = _times(advice, period_s)
    yield from _indent(f"{times}, {gain_of(advice)}" if times else gain_of(advice), width)


def _indent(text: str, width: int, first: str = "  ") -> list[str]:
    return wrap(text, width, initial_indent=first, subsequent_indent="  ")
