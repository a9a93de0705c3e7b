"""Replacements of missing values; the advice of errors is accepted and helps."""

from __future__ import annotations

import ast
import re
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from diagonals import diagonal

from feedline.core.dataset import BatchRead
from feedline.datasets import Arrow, Parquet
from feedline.errors import ArgumentError, SampleError


class Case(NamedTuple):
    """A column with a null in row 1, and that row if the advice is taken."""

    column: Any
    filled: Any
    name: str = "c"


PAIR = pa.struct({"n": pa.int16(), "t": pa.string()})
CASES = {
    "integers": Case(pa.array([1, None], pa.int8()), 0),
    "floats": Case(pa.array([1.0, None], pa.float32()), "nan"),
    "booleans": Case(pa.array([True, None]), False),
    "texts": Case(pa.array(["a", None]), ""),
    "bytes": Case(pa.array([b"a", None]), b""),
    "bytes of one length": Case(pa.array([b"abc", None], pa.binary(3)), b""),
    "dates": Case(pa.array([1, None], pa.date32()), 0),
    "times": Case(pa.array([1, None], pa.timestamp("us", "UTC")), 0),
    "decimals": Case(pa.array([Decimal("1.5"), None]), "nan"),
    "dictionary": Case(pa.array(["a", None]).dictionary_encode(), ""),
    "lists": Case(pa.array([[1], None]), []),
    "lists of texts": Case(pa.array([["a"], None]), []),
    "lists of lists": Case(pa.array([[[1]], [None, [2]]]), [[], [2]]),
    "items": Case(pa.array([[1], [2, None]]), [2, 0]),
    "fixed size": Case(pa.array([[1, 2], None], pa.list_(pa.int32(), 2)), [0, 0]),
    "items of a fixed size": Case(pa.array([[1, 2], [3, None]], pa.list_(pa.float64(), 2)), [3.0, "nan"]),
    "texts of a fixed size": Case(pa.array([["a", "b"], None], pa.list_(pa.string(), 2)), []),
    "struct": Case(pa.array([{"n": 1, "t": "a"}, None], PAIR), {"n": 0, "t": ""}),
    "member": Case(pa.array([{"n": 1, "t": "a"}, {"n": 2, "t": None}], PAIR), {"n": 2, "t": ""}),
    "list in a struct": Case(pa.array([{"l": [1]}, None]), {"l": []}),
    "structs in lists": Case(
        pa.array([[], [{"n": None, "t": "a"}, None]], pa.list_(PAIR)), [{"n": 0, "t": "a"}, {"n": 0, "t": ""}]
    ),
    "name with a dot": Case(pa.array([1, None]), 0, name="a.b"),
}


def opened(case: Case, folder: Path, kind: str, **options: Any) -> Any:
    table = pa.table({case.name: case.column, "other": [1.0, 2.0]})
    if kind == "arrow":
        return Arrow(table, **options)
    pq.write_table(table, folder / "t.parquet")
    return Parquet(folder / "t.parquet", **options)


def plain(value: Any) -> Any:
    """Without tensors, and with a text for NaN, which is not equal to itself."""
    if isinstance(value, torch.Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return "nan" if value != value else value  # noqa: PLR0124


def advised(error: SampleError) -> Any:
    found = re.search(r"pass nulls=(.+) to fill nulls", str(error))
    assert found, error
    return ast.literal_eval(found.group(1))


@pytest.mark.parametrize(("case", "kind"), diagonal([*CASES.values()], ["arrow", "parquet"]), ids=CASES)
def test_the_advice_of_an_error_helps(case: Case, kind: str, tmp_path: Path) -> None:
    for policy in ("raise", {"other": 0}, 0.5, "nan"):
        dataset, sample = as_advised(case, kind, policy, tmp_path)
        filled = case.filled
        if policy == 0.5:  # which floats can hold
            filled = ast.literal_eval(repr(filled).replace("'nan'", "0.5"))
        assert plain(sample[case.name]) == filled, policy
        batch = dataset.read_batch(BatchRead(np.array([1]), lambda shape, dtype: torch.empty(shape, dtype=dtype)))
        assert set(batch) == {case.name, "other"}, policy


def as_advised(case: Case, kind: str, policy: Any, folder: Path) -> tuple[Any, Any]:
    """The dataset, opened as its errors advise, and its row 1."""
    nulls = policy
    for _ in range(4):  # a struct has several members, each of which is named when the others are filled
        dataset = opened(case, folder, kind, nulls=nulls)
        try:
            return dataset, dataset[1]
        except SampleError as error:
            nulls = advised(error)
    raise AssertionError(f"from {policy!r} to {nulls!r}, what errors advise does not help")


class TestPaths:
    TABLE = pa.table({"c": pa.array([{"n": 1, "t": "a"}, None], PAIR), "d": pa.array([[{"n": None}], []])})

    def test_a_value_for_a_struct_is_for_what_in_it_can_hold_it(self) -> None:
        rows = Arrow(self.TABLE, nulls={"c": (7, "?"), "d": 8})
        assert plain(rows[1]["c"]) == {"n": 7, "t": "?"}
        assert plain(rows[0]["d"]) == [{"n": 8}]

    def test_a_value_for_a_member_goes_before_that_of_its_struct(self) -> None:
        rows = Arrow(self.TABLE, nulls={"c": ("?", 7), "c.n": 9, "d.n": 8})
        assert plain(rows[1]["c"]) == {"n": 9, "t": "?"}
        assert plain(rows[0]["d"]) == [{"n": 8}]

    def test_raise_for_a_member_goes_before_what_is_given_for_its_struct(self) -> None:
        with pytest.raises(SampleError, match=r"column 'c\.n' is null; pass nulls="):
            Arrow(self.TABLE, nulls={"c": ("?", 7), "c.n": "raise"})[1]

    def test_a_name_with_a_dot_is_no_member(self) -> None:
        table = pa.table({"a.b": [1, None], "a": [1, 2]})
        with pytest.raises(SampleError, match=r"column 'a\.b' is null"):
            Arrow(table, nulls={"a": 0})[1]

    def test_members_that_are_not_there_are_named(self) -> None:
        with pytest.raises(
            ArgumentError, match=r"nulls names the column 'c\.x', which is not read; there are c, c\.n, c\.t, d, d\.n"
        ):
            Arrow(self.TABLE, nulls={"c.x": 0})


class TestLists:
    def test_are_empty_whatever_the_bytes_of_a_null(self) -> None:
        offsets, validity = pa.py_buffer(np.array([0, 2, 3], np.int32)), pa.py_buffer(b"\x02")
        column = pa.ListArray.from_buffers(pa.list_(pa.int64()), 2, [validity, offsets], children=[pa.array([1, 2, 3])])
        rows = Arrow(pa.table({"c": column}), nulls=[])
        assert [sample["c"].tolist() for sample in rows.__getitems__([0, 1])] == [[], [3]]
        assert rows[0]["c"].dtype == torch.int64

    def test_and_their_items_may_both_be_filled(self) -> None:
        table = pa.table({"c": [[1, None], None]})
        for nulls in (([], 7), {"c": (7, [])}):
            assert [sample["c"].tolist() for sample in Arrow(table, nulls=nulls)] == [[1, 7], []]

    def test_that_are_not_empty_stand_for_nothing(self) -> None:
        with pytest.raises(ArgumentError, match=r"no column can hold \[0\]"):
            Arrow(pa.table({"c": [[1], None]}), nulls=[0])


class TestCheck:
    TABLE = pa.table({"i": pa.array([1, None], pa.int8()), "s": ["a", None], "b": [b"a", None]})

    @pytest.mark.parametrize(
        ("columns", "nulls"),
        [
            (["i"], "nam"),
            (["i"], None),
            (["i"], -1.5),
            (["i"], 1000),
            (["i"], "nan"),
            (["i", "b"], ""),
            (["s"], "nan"),
            (["s", "b"], 0),
            (["i", "s"], (0, b"")),
        ],
    )
    def test_what_no_column_can_hold_is_refused(self, columns: list[str], nulls: Any) -> None:
        with pytest.raises(ArgumentError, match=r"nulls: no column can hold .*; (i is int8|s is string)"):
            Arrow(self.TABLE, columns, nulls=nulls)

    def test_a_float_that_would_be_infinite_is_refused(self) -> None:
        table = pa.table({"f": pa.array([None], pa.float32())})
        for value in (1e300, -1e39, 10**400):
            with pytest.raises(ArgumentError, match=r"nulls: no column can hold .*; f is float$"):
                Arrow(table, nulls=value)
        for value in (float("inf"), -(2.0**120), "nan"):
            assert np.isclose(Arrow(table, nulls=value)[0]["f"], float(value), equal_nan=True)

    @pytest.mark.parametrize("nulls", [{"i": "nan"}, {"i": None}, {"i": 1000}, {"i": ("", 0)}])
    def test_what_the_column_cannot_hold_is_refused(self, nulls: Any) -> None:
        with pytest.raises(ArgumentError, match=r"nulls: column 'i' cannot hold .*; i is int8$"):
            Arrow(self.TABLE, nulls=nulls)

    @pytest.mark.parametrize(
        ("nulls", "why"),
        [
            (1000, "and 1000 does not fit int8; pass nulls=(1000, 0)"),
            ("nan", "and NaN does not fit int8; pass nulls=('nan', 0)"),
            (("nan", 0.5), "and NaN does not fit int8 and 0.5 does not fit int8; pass nulls=('nan', 0.5, 0)"),
        ],
    )
    def test_an_error_says_why_a_value_does_not_fit(self, nulls: Any, why: str) -> None:
        with pytest.raises(SampleError) as caught:
            Arrow(self.TABLE.append_column("f", pa.array([1.0, 2.0])), nulls=nulls)[1]
        assert f"row 1 of the table: column 'i' is null, {why} to fill nulls" in str(caught.value)
