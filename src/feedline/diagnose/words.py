"""Numbers as an engineer writes them down."""

from __future__ import annotations

_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


def seconds(value: float) -> str:
    """Two significant digits at least: "1.2 s", "80 ms", "5.1 ms", "350 µs"."""
    for unit, name in _UNITS:
        if value >= 0.995 * unit:
            return f"{_digits(value / unit)} {name}"
    return "0 s" if value <= 0 else "under 1 µs"


def share(value: float) -> str:
    """A share of 1 in per cent; small ones with a digit after the point."""
    percent = 100 * value
    return f"{percent:.1f} %" if 0 < percent < 9.95 else f"{percent:.0f} %"


def size(nbytes: float) -> str:
    """Bytes in the largest unit that leaves at least one of it."""
    for unit, name in _SIZES:
        if nbytes >= unit:
            return f"{_digits(nbytes / unit)} {name}"
    return f"{nbytes:.0f} bytes"


def count(number: int, noun: str) -> str:
    """How many: "1 worker", "2,000 workers", "no worker"."""
    if number == 1:
        return f"1 {noun}"
    if not number:
        return f"no {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def _digits(value: float) -> str:
    return f"{value:.1f}" if value < 9.95 else f"{value:.0f}"
