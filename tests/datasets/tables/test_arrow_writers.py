"""Arrow files of other writers, several streams in one file, and damage, on this machine and in a store."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from diagonals import diagonal
from format_cases import equal

from feedline.datasets import Arrow
from feedline.errors import SampleError

Put = Callable[[bytes], Any]


def written(*batches: Any, schema: Any = None, stream: bool = False, legacy: bool = False) -> bytes:
    file, options = io.BytesIO(), pa.ipc.IpcWriteOptions(use_legacy_format=legacy)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(
        file, schema or batches[0].schema, options=options
    ) as writer:
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
    """The footer of a file has its schema; the bytes after the first ones need not have it."""

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

    @pytest.mark.parametrize(
        ("end", "padding", "second_is_legacy"),
        [
            *(("legacy stream", 0, True), ("legacy stream", 4, False), ("legacy stream", 64, True)),
            *(("end marker of 4 bytes", 0, False), ("end marker of 4 bytes", 4, True)),
            ("end marker of 4 bytes", 64, False),
        ],
    )
    def test_behind_an_end_marker_of_4_bytes(self, put: Put, end: str, padding: int, second_is_legacy: bool) -> None:
        """The end marker of streams before Arrow 0.15."""
        first = written(BATCH, stream=True, legacy=end == "legacy stream")
        if end != "legacy stream":
            first = first[:-8] + bytes(4)
        second = written(BATCH.slice(10), stream=True, legacy=second_is_legacy)
        dataset = Arrow(put(first + bytes(padding) + second))
        assert dataset.shard_sizes.tolist() == [30, 20]
        assert [sample["x"].item() for sample in dataset.__getitems__([0, 29, 30, 49])] == [0, 29, 10, 29]

    def test_another_schema_is_refused(self, put: Put) -> None:
        source = put(written(BATCH, stream=True) + written(CODED, stream=True))
        with pytest.raises(SampleError, match=r"t\.arrow cannot be read: it is damaged.*\(streams follow each other"):
            Arrow(source)

    def test_other_bytes_behind_a_stream_are_refused(self, put: Put) -> None:
        source = put(written(BATCH, stream=True) + b"something else")
        with pytest.raises(SampleError, match=r"t\.arrow cannot be read: it is damaged"):
            Arrow(source)


class TestFilesInOneFile:
    """Files that follow each other are refused: the last footer names places in the first file."""

    EMPTY = BATCH.slice(0, 0)
    FILES: ClassVar[dict[str, tuple[bytes, bytes]]] = {
        "equal": (written(BATCH), written(BATCH)),
        "longer first": (written(BATCH, BATCH), written(BATCH)),
        "longer second": (written(BATCH), written(BATCH, BATCH)),
        "first without rows": (written(EMPTY), written(BATCH)),
        "second without rows": (written(BATCH), written(EMPTY)),
        "second without batches": (written(BATCH), written(schema=BATCH.schema)),
        "dictionaries": (written(CODED), written(CODED)),
    }

    @pytest.mark.parametrize(("name", "padding"), diagonal([*FILES], [0, 64]))
    def test_whole_files_are_refused(self, put: Put, name: str, padding: int) -> None:
        first, second = self.FILES[name]
        source = put(first + bytes(padding) + second)
        with pytest.raises(SampleError, match=r"t\.arrow cannot be read: .*it consists of several files"):
            Arrow(source)

    @pytest.mark.parametrize("file_is_first", [False, True])
    def test_a_file_and_a_stream_are_refused(self, put: Put, file_is_first: bool) -> None:
        parts = [written(BATCH), written(BATCH, stream=True)]
        source = put(b"".join(parts if file_is_first else reversed(parts)))
        with pytest.raises(SampleError, match=r"t\.arrow cannot be read: it is damaged"):
            Arrow(source)


def with_big_endian_schema(buffer: bytes, slot: int) -> bytes:
    """The FlatBuffer of a footer or message with a big-endian schema, which is in that field."""
    data = bytearray(buffer)

    def number(form: str, at: int) -> int:
        value: int = struct.unpack_from(form, data, at)[0]
        return value

    root = number("<I", 0)
    field = root + number("<H", root - number("<i", root) + 4 + 2 * slot)
    schema = field + number("<I", field)
    fields = schema - number("<i", schema)
    # The field for the endianness is left out for little-endian, so the fields of the schema get other offsets.
    data += bytes(-len(data) % 8)
    copy, size = len(data), number("<H", fields)
    data += data[fields : fields + size] + bytes(-size % 8)
    struct.pack_into("<i", data, schema, schema - copy)
    struct.pack_into("<H", data, copy + 4, len(data) - schema)
    return bytes(data) + struct.pack("<h6x", 1)


def big_endian(data: bytes, *, stream: bool) -> bytes:
    """An Arrow file or stream whose schema says that its numbers are big-endian."""
    if stream:
        nbytes = int.from_bytes(data[4:8], "little")
        schema = with_big_endian_schema(data[8 : 8 + nbytes], 2)
        return data[:4] + len(schema).to_bytes(4, "little") + schema + data[8 + nbytes :]
    nbytes = int.from_bytes(data[-10:-6], "little")
    footer = with_big_endian_schema(data[-10 - nbytes : -10], 1)
    return data[: -10 - nbytes] + footer + len(footer).to_bytes(4, "little") + data[-6:]


@pytest.mark.parametrize(
    ("stream", "columns"), [(False, None), (True, None), (False, ["x"]), (True, ["t"]), (False, ["v"])]
)
def test_big_endian_numbers_are_read(put: Put, stream: bool, columns: list[str] | None) -> None:
    numbers, texts = np.arange(30) + 1000, [f"text {row}" for row in range(30)]
    pairs = np.arange(60, dtype=np.int16) + 500
    batch = pa.record_batch(
        {"x": pa.array(numbers), "t": pa.array(texts), "v": pa.FixedSizeListArray.from_arrays(pa.array(pairs), 2)}
    )
    data = big_endian(written(batch, stream=stream), stream=stream)
    for buffer in (numbers, pairs, np.frombuffer(batch["t"].buffers()[1], np.int32, 31)):
        assert data.count(buffer.tobytes()) == 1
        data = data.replace(buffer.tobytes(), buffer.byteswap().tobytes())
    samples = Arrow(put(data), columns).__getitems__([0, 1, 29])
    assert equal(samples, Arrow(pa.Table.from_batches([batch]), columns).__getitems__([0, 1, 29]))


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
    with pytest.raises(SampleError, match=r"t\.arrow.*(damaged|cannot be read)"):
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


def test_a_type_that_the_library_does_not_know_is_no_damage(put: Put) -> None:
    """Integers of 128 bits, as polars writes them."""
    data = written(pa.record_batch({"x": [1, 2]}), stream=True)
    assert data.count(b"\x40\0\0\0") == 1  # the bits of the integers
    with pytest.raises(
        SampleError, match=r"t\.arrow cannot be read: it has a type .* 64 bits .*; write it with"
    ) as caught:
        Arrow(put(data.replace(b"\x40\0\0\0", b"\x80\0\0\0")))
    assert "damaged" not in str(caught.value)


def test_a_column_name_that_is_not_text_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    table = pa.table({"damaged": [1, 2, 3]})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    path.write_bytes(path.read_bytes().replace(b"damaged", b"\x80amaged"))
    with pytest.raises(SampleError, match=r"x.arrow is damaged: text of its schema is not UTF-8 .*; write it again"):
        Arrow(path)
