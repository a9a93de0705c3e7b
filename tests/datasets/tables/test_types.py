"""Compatible files, chosen columns and members, and the types that `datasets` stores with them."""

from __future__ import annotations

import io
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import Arrow, Parquet
from feedline.datasets.tables.types import kinds_of, strip_metadata
from feedline.errors import ArgumentError, SampleError


def write(path: Path, table: Any) -> None:
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)


def both(folder: Path, suffix: str, one: Any, other: Any) -> Any:
    """A dataset of two files with a column of these."""
    for name, column in (("a", one), ("b", other)):
        write(folder / f"{name}.{suffix}", pa.table({"x": column}))
    return (Parquet if suffix == "parquet" else Arrow)([folder / f"a.{suffix}", folder / f"b.{suffix}"])


class TestFilesTogether:
    @pytest.mark.parametrize(
        ("suffix", "one", "other"),
        [
            ("parquet", pa.timestamp("us"), pa.timestamp("ns")),
            ("arrow", pa.timestamp("us"), pa.int64()),
            ("parquet", pa.timestamp("us"), pa.timestamp("us", "UTC")),
            ("arrow", pa.timestamp("us", "UTC"), pa.timestamp("us", "Europe/Berlin")),
            ("parquet", pa.date32(), pa.int32()),
            ("arrow", pa.time64("us"), pa.int64()),
            ("parquet", pa.duration("ms"), pa.duration("s")),
            ("arrow", pa.int32(), pa.int64()),
        ],
        ids=str,
    )
    def test_that_hold_other_things_are_refused(self, tmp_path: Path, suffix: str, one: Any, other: Any) -> None:
        with pytest.raises(SampleError) as caught:
            both(tmp_path, suffix, pa.array([1], one), pa.array([1], other))
        parts = (f"column 'x' is {one} in ", f"a.{suffix}, but {other} in ", f"b.{suffix}; rewrite one of them")
        assert all(part in str(caught.value) for part in parts)

    def test_that_differ_far_within_name_the_member(self, tmp_path: Path) -> None:
        columns = [pa.array([[{"at": 1}]], pa.list_(pa.struct({"at": pa.timestamp(unit)}))) for unit in ("us", "ms")]
        with pytest.raises(SampleError, match=r"column 'x\.at' is timestamp\[us\] in .*, but timestamp\[ms\] in "):
            both(tmp_path, "parquet", *columns)

    def test_that_differ_in_a_fixed_list_are_refused(self, tmp_path: Path) -> None:
        columns = [pa.array([[1, 2]], pa.list_(kind, 2)) for kind in (pa.date32(), pa.int32())]
        with pytest.raises(SampleError, match="column 'x' is fixed_size_list<"):
            both(tmp_path, "arrow", *columns)

    @pytest.mark.parametrize("suffix", ["parquet", "arrow"])
    @pytest.mark.parametrize(
        ("one", "other", "read"),
        [
            (pa.array(["a"]), pa.array(["b"]).dictionary_encode(), ["a", "b"]),
            (pa.array(["a"]), pa.array(["b"], pa.large_string()), ["a", "b"]),
            (pa.array([1], pa.date32()), pa.array([2], pa.date32()).dictionary_encode(), [1, 2]),
            (pa.array([Decimal("1.5")]), pa.array([2.5]), [1.5, 2.5]),
            (pa.array([Decimal("1.5")]), pa.array([Decimal("2.25")], pa.decimal128(9, 4)), [1.5, 2.25]),
            (pa.array([[1]]), pa.array([[2]], pa.large_list(pa.int64())), [[1], [2]]),
        ],
        ids=["dictionary", "wide", "dates", "decimal and float", "decimals", "lists"],
    )
    def test_that_mean_the_same_are_read(
        self, tmp_path: Path, suffix: str, one: Any, other: Any, read: list[Any]
    ) -> None:
        dataset = both(tmp_path, suffix, one, other)
        found = [sample["x"] for sample in dataset]
        assert [value if isinstance(value, str) else value.tolist() for value in found] == read


IMAGE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
IMAGES = pa.table(
    {
        "image": pa.array([{"bytes": b"one", "path": None}, {"bytes": b"two", "path": "b.png"}], IMAGE),
        "images": pa.array([[{"bytes": b"x", "path": None}], []], pa.list_(IMAGE)),
        "label": [3, 4],
    }
)
FEATURES = {
    "image": {"_type": "Image"},
    "images": {"feature": {"_type": "Audio"}, "_type": "List"},
    "label": {"dtype": "int64", "_type": "Value"},
}


def noted(table: Any, features: Any) -> Any:
    return table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})


class TestMembers:
    @pytest.fixture(params=["parquet", "arrow", "far"])
    def images(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Function that opens a dataset of chosen columns."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        if request.param == "far":
            file = io.BytesIO()
            with pa.ipc.new_file(file, IMAGES.schema) as writer:
                writer.write_table(IMAGES)
            address = f"memory://kinds/{tmp_path.name}.arrow"
            fsspec.filesystem("memory").pipe(address.removeprefix("memory:/"), file.getvalue())
            return lambda columns: Arrow(address, columns)
        path = tmp_path / f"t.{request.param}"
        write(path, IMAGES)
        return lambda columns: (Parquet if request.param == "parquet" else Arrow)(path, columns)

    def test_are_chosen_by_path(self, images: Any) -> None:
        dataset = images(["images.bytes", "label", "image.bytes"])
        first = {"images": [{"bytes": b"x"}], "label": 3, "image": {"bytes": b"one"}}
        sample = dataset[0]
        assert list(sample) == list(first)
        assert {**sample, "label": sample["label"].item()} == first
        batch = images(["image.bytes"]).read_batch(BatchRead(np.array([0, 1]), allocate_tensor))
        assert batch == {"image": {"bytes": [b"one", b"two"]}}

    def test_of_one_column_and_the_column_itself_make_one(self, images: Any) -> None:
        assert images(["image.bytes", "image.path"])[1] == {"image": {"bytes": b"two", "path": "b.png"}}
        assert images(["image.bytes", "image"])[1] == {"image": {"bytes": b"two", "path": "b.png"}}

    @pytest.mark.parametrize(
        ("column", "there"),
        [
            ("image.size", r"image\.bytes, image\.path"),
            ("label.size", "label, which has no members"),
            ("other.size", "image, images, label"),
        ],
    )
    def test_that_are_not_there_are_named_with_those_that_are(self, images: Any, column: str, there: str) -> None:
        with pytest.raises(ArgumentError, match=rf"column '{column}' is not in .*; there are {there}$"):
            images([column])

    def test_are_not_taken_for_columns_whose_names_have_dots(self) -> None:
        table = pa.table({"a": [{"b": 1}], "a.b": [2], "c.d": [{"e.f": 3, "e": 4}]})
        assert Arrow(table, ["a.b"])[0]["a.b"].item() == 2
        kind = kinds_of(table.schema, ["a.b", "c.d.e.f"], "t")
        assert [name for name, _ in kind.fields] == ["a.b", "c.d"]
        assert dict(kind.fields)["c.d"].left_out == {"e"}  # type: ignore[union-attr]

    def test_cannot_be_compared_by_filters(self, tmp_path: Path) -> None:
        write(tmp_path / "t.parquet", IMAGES)
        with pytest.raises(ArgumentError, match=r"filters: 'image\.path' is a member of a column; only whole columns"):
            Parquet(tmp_path, ["label"], filters=[("image.path", "==", "b.png")])


class TestImagesOfHuggingFace:
    def rows(self, features: Any = FEATURES, **options: Any) -> Any:
        return Arrow(noted(IMAGES, features), **options)

    def test_have_an_empty_path_if_it_is_null(self) -> None:
        sample = self.rows()[0]
        assert (sample["image"], sample["images"]) == ({"bytes": b"one", "path": ""}, [{"bytes": b"x", "path": ""}])
        assert self.rows()[1]["image"]["path"] == "b.png"

    def test_have_one_in_parquet_too(self, tmp_path: Path) -> None:
        pq.write_table(noted(IMAGES, FEATURES), tmp_path / "a.parquet")
        assert Parquet(tmp_path / "a.parquet")[0]["image"] == {"bytes": b"one", "path": ""}

    def test_may_be_read_without_it(self) -> None:
        assert self.rows(columns=["image.bytes"])[0] == {"image": {"bytes": b"one"}}

    @pytest.mark.parametrize("nulls", [{"image": "raise"}, {"image.path": "raise"}], ids=str)
    def test_unless_that_shall_raise(self, nulls: Any) -> None:
        with pytest.raises(SampleError, match=r"column 'image\.path' is null"):
            self.rows(nulls=nulls)[0]

    def test_or_something_else_is_given(self) -> None:
        assert self.rows(nulls="?")[0]["image"]["path"] == "?"
        assert self.rows(nulls={"image": b"?"})[0]["image"]["path"] == ""

    @pytest.mark.parametrize(
        "features", [{}, None, [], {"image": {"bytes": {"dtype": "binary", "_type": "Value"}}}, {"image": "Image"}]
    )
    def test_are_those_that_are_noted_as_such(self, features: Any) -> None:
        with pytest.raises(SampleError, match=r"column 'image\.path' is null; pass nulls=\{'image\.path': ''\}"):
            self.rows(features)[0]

    def test_may_be_in_structs_and_in_lists_of_either_notation(self) -> None:
        columns = {"s": pa.array([{"p": IMAGES["images"][0].as_py()}], pa.struct({"p": pa.list_(IMAGE)}))}
        for feature in ({"p": [{"_type": "Image"}]}, {"feature": {"p": {"_type": "Image"}}, "_type": "Sequence"}):
            sample = Arrow(noted(pa.table(columns), {"s": feature}))[0]
            assert sample == {"s": {"p": [{"bytes": b"x", "path": ""}]}}

    def test_without_bytes_are_named(self) -> None:
        table = pa.table({"image": pa.array([None], IMAGE)})
        with pytest.raises(SampleError, match=r"column 'image\.bytes' is null; pass nulls=\{'image\.bytes': b''\}"):
            Arrow(noted(table, FEATURES))[0]

    def test_are_noted_in_what_is_kept_of_a_schema(self) -> None:
        schema = noted(IMAGES, FEATURES).schema
        pandas = schema.with_metadata({**schema.metadata, "pandas": "{}"})
        assert kinds_of(strip_metadata(pandas), None, "t").fields[0][1].fields[1][1].absent == ""  # type: ignore[union-attr]
        assert strip_metadata(pandas).metadata == strip_metadata(schema).metadata
        assert not strip_metadata(IMAGES.schema).metadata
