"""Decimals of every width, precision and scale are equal to Python's conversion to float64."""

from __future__ import annotations

import random
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.datasets import Arrow, Parquet

WIDTHS = {pa.decimal32: 9, pa.decimal64: 18, pa.decimal128: 38, pa.decimal256: 76}


@st.composite
def columns(draw: Any) -> tuple[list[Decimal | None], Any]:
    """Decimals, some of them null, and their Arrow type."""
    make = draw(st.sampled_from([*WIDTHS]))
    precision = draw(st.integers(1, WIDTHS[make]))
    # pyarrow makes a value of a negative scale from one of scale 0, which must fit in the width.
    scale = draw(st.integers(max(-3, precision - WIDTHS[make]), precision))
    limit = 10**precision - 1
    unscaled = draw(st.lists(st.none() | st.integers(-limit, limit), min_size=1, max_size=20))
    exact = Context(prec=100)
    return [None if each is None else Decimal(each).scaleb(-scale, exact) for each in unscaled], make(precision, scale)


@given(columns())
def test_every_decimal_is_the_nearest_float64(column: tuple[list[Decimal | None], Any]) -> None:
    values, kind = column
    data = Arrow(pa.table({"x": pa.array([*values, None, *values], kind).slice(1)}), nulls=0)
    read = [data[row]["x"].item() for row in range(len(data))]
    expected = [0.0 if value is None else float(value) for value in [*values, None, *values][1:]]
    assert read == expected


def random_decimals(precision: int, scale: int) -> list[Decimal]:
    draw = random.Random(precision)
    return [Decimal(draw.randrange(-(10**precision) + 1, 10**precision)).scaleb(-scale) for _ in range(1000)]


@pytest.mark.parametrize(("precision", "scale"), [(9, 3), (15, 2), (18, 3), (28, 10)])
def test_a_parquet_column_has_the_floats_of_python(tmp_path: Path, precision: int, scale: int) -> None:
    values = random_decimals(precision, scale)
    pq.write_table(pa.table({"x": pa.array(values, pa.decimal128(precision, scale))}), tmp_path / "a.parquet")
    read = [sample["x"].item() for sample in Parquet(tmp_path / "a.parquet").__getitems__(range(1000))]
    assert read == [float(value) for value in values]


def test_decimals_within_lists_and_dictionaries() -> None:
    values = random_decimals(9, 3)[:6]
    column = pa.array(values, pa.decimal128(9, 3))
    table = pa.table(
        {
            "fixed": pa.FixedSizeListArray.from_arrays(column, 2),
            "list": pa.ListArray.from_arrays([0, 1, 3, 6], column),
            "coded": column.dictionary_encode().slice(3),
        }
    )
    rows = [Arrow(table)[row] for row in range(3)]
    floats = np.array(values, np.float64)
    assert [row["fixed"].tolist() for row in rows] == floats.reshape(3, 2).tolist()
    assert [row["list"].tolist() for row in rows] == [floats[:1].tolist(), floats[1:3].tolist(), floats[3:].tolist()]
    assert [row["coded"].item() for row in rows] == floats[3:].tolist()


def test_an_empty_column_of_decimals() -> None:
    table = pa.table({"x": pa.array([[], []], pa.list_(pa.decimal128(9, 3)))})
    assert Arrow(table)[1]["x"].shape == (0,)
