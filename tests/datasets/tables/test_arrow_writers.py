"""Arrow files of other writers, several streams in one file, and damage, on this machine and in a store."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pytest

from feedline.datasets import Arrow
from feedline.errors import SampleError

Put = Callable[[bytes], Any]


def written(*batches: Any, stream: bool = False) -> bytes:
    file = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return file.getvalue()


@pytest.fixture(params=["here", "far"])
def put(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    """Stores bytes as an Arrow file; gives its path or address."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    system = fsspec.filesystem("memory")

    def stored(data: bytes) -> Any:
        (tmp_path / "t.arrow").write_bytes(data)
        system.pipe("/writers/t.arrow", data)
        return tmp_path / "t.arrow" if request.param == "here" else "memory://writers/t.arrow"

    yield stored
    system.rm("/writers", recursive=True)


BATCH = pa.record_batch({"x": pa.array(range(30)), "t": pa.array([f"{row % 3}" for row in range(30)])})
CODED = BATCH.set_column(1, "t", BATCH["t"].dictionary_encode())


class TestSchemas:
    """The footer of a file tells its schema; what lies behind the first bytes need not."""

    @pytest.mark.parametrize("batch", [BATCH, CODED], ids=["plain", "dictionary"])
    def test_no_schema_at_the_beginning(self, put: Put, batch: Any) -> None:
        data = bytearray(written(batch, batch))
        nbytes = 8 + int.from_bytes(data[12:16], "little")
        data[8 : 8 + nbytes] = bytes(nbytes)
        source = put(bytes(data))
        for columns in (None, ["x"], ["t"]):
            assert Arrow(source, columns).__getitems__([0, 59]) == Arrow(
                pa.Table.from_batches([batch] * 2), columns
            ).__getitems__([0, 59])

    def test_another_schema_at_the_beginning(self, put: Put) -> None:
        other = written(pa.record_batch({"t": pa.array(["a"]), "x": pa.array([1.5])}), stream=True)
        other = other[: 8 + int.from_bytes(other[4:8], "little")]
        data = bytearray(written(BATCH))
        room = 8 + int.from_bytes(data[12:16], "little")
        assert len(other) <= room
        data[8 : 8 + len(other)] = other
        sample = Arrow(put(bytes(data)), ["x"])[29]
        assert sample["x"].item() == 29


class TestStreamsInOneFile:
    """Streams that follow each other are read as one."""

    @pytest.mark.parametrize("padding", [0, 64])
    @pytest.mark.parametrize("batch", [BATCH, CODED], ids=["plain", "dictionary"])
    def test_all_rows_are_read(self, put: Put, batch: Any, padding: int) -> None:
        second = batch
        if batch is CODED:
            second = batch.set_column(1, "t", pa.array(["z", "y", "x"] * 10).dictionary_encode())
        data = written(batch, batch, stream=True) + written(second, stream=True) + bytes(padding)
        dataset = Arrow(put(data))
        assert dataset.shard_sizes.tolist() == [30, 30, 30]
        assert [sample["t"] for sample in dataset.__getitems__([0, 59, 60])] == [
            "0",
            "2",
            "z" if batch is CODED else "0",
        ]
        assert dataset[89]["x"].item() == 29

    def test_another_schema_is_refused(self, put: Put) -> None:
        source = put(written(BATCH, stream=True) + written(CODED, stream=True))
        with pytest.raises(SampleError, match=r"t\.arrow is no whole Arrow file or stream \(streams follow each other"):
            Arrow(source)

    def test_other_bytes_behind_a_stream_are_refused(self, put: Put) -> None:
        source = put(written(BATCH, stream=True) + b"something else")
        with pytest.raises(SampleError, match=r"t\.arrow is no whole Arrow file or stream"):
            Arrow(source)


DAMAGED: dict[str, tuple[Any, int, bytes]] = {
    "text": (pa.array(["abc", "defg", "h"] * 20), 4, np.int32(0x7FFFFFF0).tobytes()),
    "negative": (pa.array(["abc", "defg", "h"] * 20), 4, np.int32(-5).tobytes()),
    "list": (pa.array([[1, 2], [3], [4, 5]] * 20), 4, np.int32(0x7FFFFFF0).tobytes()),
    "texts": (pa.array([["ab", "c"], ["d"], ["e"]] * 20), 4, np.int32(0x7FFFFFF0).tobytes()),
    "view": (pa.array(["a text that is a view"] * 60, pa.string_view()), 8, np.array([7, 1 << 30], "<i4").tobytes()),
    "list view": (pa.array([[1, 2], [3], [4]] * 20, pa.list_view(pa.int64())), 4, np.int32(0x7FFFFFF0).tobytes()),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_offsets_are_an_error(put: Put, name: str) -> None:
    column, at, bad = DAMAGED[name]
    data = bytearray(written(pa.record_batch({"c": column, "other": pa.array(range(60))})))
    found = pa.ipc.open_file(pa.py_buffer(bytes(data))).get_batch(0)["c"]
    first = bytes(data).index(bytes(next(each for each in found.buffers() if each is not None))[:24])
    data[first + at : first + at + len(bad)] = bad
    source = put(bytes(data))
    with pytest.raises(SampleError, match=r"t\.arrow.*(damaged|no whole Arrow file|cannot be read)"):
        Arrow(source, ["c"]).__getitems__([0, 1, 59])
    assert Arrow(source, ["other"])[59]["other"].item() == 59


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()])
def test_texts_that_are_not_utf8_are_named_by_row(put: Put, kind: Any) -> None:
    column = pa.array([b"good", b"\xff\xfe", b"a longer text than a view has"]).cast(
        pa.binary() if kind == pa.string() else pa.binary_view()
    )
    dataset = Arrow(put(written(pa.record_batch({"c": column.view(kind)}))))
    assert [dataset[0]["c"], dataset[2]["c"]] == ["good", "a longer text than a view has"]
    with pytest.raises(SampleError, match=r"t\.arrow, row 1: column 'c' is not UTF-8 .* store it as binary"):
        dataset[1]
