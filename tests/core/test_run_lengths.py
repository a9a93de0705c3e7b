"""Sums of run-length encoded integers: the examples of ORC's specification, and equal results of kernel and NumPy."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feedline.core.run_lengths import _run_length_sums_numpy, run_length_sums, run_length_values


@pytest.mark.parametrize(
    ("version", "signed", "text", "values"),
    [
        (1, False, "6100 07", [7] * 100),
        (1, False, "61ff 64", [*range(100, 0, -1)]),
        (1, False, "fb 02 03 06 07 0b", [2, 3, 6, 7, 11]),
        (1, True, "fe 03 04", [-2, 2]),
        (2, False, "0a 2710", [10000] * 5),
        (2, False, "5e03 5ca1 ab1e dead beef", [23713, 43806, 57005, 48879]),
        (
            2,
            False,
            "8e13 2b21 07d0 1e00 1470 2832 3c46 505a 646e 7882 8c96 a0aa b4be fce8",
            [2030, 2000, 2020, 1000000, *range(2040, 2191, 10)],
        ),
        (2, False, "c609 0202 2242 4246", [2, 3, 5, 7, 11, 13, 17, 19, 23, 29]),
        (2, True, "c000 03 00", [-2]),
        (2, False, "7e00 ffffffffffffffff", [-1]),
    ],
)
def test_runs_of_each_form(version: int, signed: bool, text: str, values: list[int]) -> None:
    data = bytes.fromhex(text)
    assert run_length_values(data, version, signed=signed).tolist() == values
    total = sum(value for value in values if value > 0)
    assert run_length_sums(data, version, signed=signed) == (len(values), min(values), max(values), total)


def _outcome(sums: Any, data: bytes, version: int, signed: bool) -> Any:
    try:
        return sums(data, version, signed=signed)
    except ValueError:
        return "damaged"


_PATCHED = bytes.fromhex("8e13 2b21 07d0 1e00 1470 2832 3c46 505a 646e 7882 8c96 a0aa b4be fce8")
_heads = st.sampled_from([b"", _PATCHED, _PATCHED[:4], b"\x8e\xff", b"\xc6\x09\x02", b"\x7f\xff", b"\xc1\xff", b"\xff"])


@example(b"\x90\x00\x00\x21\x00\x00", 2, False)
@example(_PATCHED[:-2] + b"\xff\x00", 2, False)
@example(b"\x40", 2, True)
@example(b"\xff" * 12, 1, True)
@given(st.builds(bytes.__add__, _heads, st.binary(max_size=600)), st.sampled_from([1, 2]), st.booleans())
def test_sums_equal_their_numpy_form(data: bytes, version: int, signed: bool) -> None:
    wanted = _outcome(_run_length_sums_numpy, data, version, signed)
    assert _outcome(run_length_sums, data, version, signed) == wanted


@pytest.mark.parametrize("version", [1, 2])
def test_cut_runs_are_refused(version: int) -> None:
    data = bytes.fromhex("6100 07" if version == 1 else "5e03 5ca1 ab1e dead beef")
    for stop in range(1, len(data)):
        with pytest.raises(ValueError, match="damaged"):
            run_length_sums(data[:stop], version, signed=False)
