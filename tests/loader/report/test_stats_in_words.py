"""Numbers in words."""

from __future__ import annotations

import re

import pytest

from feedline.core.wrapping import wrap
from feedline.loader.report import stats


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (72.4, "72 s"),
        (1.25, "1.2 s"),
        (0.9996, "1.0 s"),
        (0.08, "80 ms"),
        (0.0051, "5.1 ms"),
        (0.00099996, "1.0 ms"),
        (0.00035, "350 µs"),
        (0.0000012, "1.2 µs"),
        (1e-9, "under 1 µs"),
        (0, "0 s"),
    ],
)
def test_seconds(value: float, text: str) -> None:
    assert stats.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 %"), (0.012, "1.2 %"), (0.0996, "10 %"), (0.62, "62 %"), (1, "100 %")]
)
def test_share(value: float, text: str) -> None:
    assert stats.share(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 bytes"), (1536, "1.5 KiB"), (38 << 20, "38 MiB"), (3 << 30, "3.0 GiB")]
)
def test_size(value: float, text: str) -> None:
    assert stats.size(value) == text


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [(0, "worker", "no worker"), (1, "batch", "1 batch"), (1200, "batch", "1,200 batches"), (2, "worker", "2 workers")],
)
def test_count(number: int, noun: str, text: str) -> None:
    assert stats.count(number, noun) == text


@pytest.mark.parametrize("width", range(12, 40))
def test_a_number_is_never_separated_from_its_unit(width: int) -> None:
    text = "It waits 29 % of 3.5 ms: 2.4 × as fast, 12 GiB at 5 MB/s, and 7 s are left"
    lines = wrap(text, width, subsequent_indent="  ")
    assert all(len(line) <= width for line in lines)
    assert " ".join(line.strip() for line in lines) == text
    assert not any(re.match(r" *(%|ms|×|GiB|MB|s )", line) for line in lines)
