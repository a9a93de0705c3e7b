"""Where the parts of Arrow files and streams lie, whole ones and hostile ones."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.datasets.ipc_layout import DamagedError, Layout, layout_of, unpacked
from feedline.datasets.sparse import end_to_end


def written(rows: list[int], *, stream: bool, legacy: bool = False, dictionary: bool = False) -> bytes:
    file = io.BytesIO()
    texts = pa.array(["a", "b"]).dictionary_encode() if dictionary else pa.array(["a", "b"])
    schema = pa.schema({"x": pa.int64(), "t": texts.type})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=legacy)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, schema, options=options) as writer:
        for count in rows:
            column = pa.DictionaryArray.from_arrays(np.zeros(count, np.int32), texts.dictionary) if dictionary else None
            columns = [pa.array(range(count), pa.int64()), pa.array(["a"] * count) if column is None else column]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return file.getvalue()


def laid_out(data: bytes, block: int = 1 << 20, reads: list[Any] | None = None) -> Layout:
    def blocks(start: int) -> Iterator[tuple[int, memoryview]]:
        for at in range(start, len(data), block):
            if reads is not None:
                reads.append(at)
            yield at, memoryview(data)[at : at + block]

    return layout_of(len(data), lambda spans: [memoryview(data)[start:stop] for start, stop in spans], blocks)


def read(data: bytes, layout: Layout, batch: int) -> Any:
    views = [memoryview(layout.schema), *(memoryview(data)[start:stop] for start, stop in layout.needed(batch))]
    return pa.ipc.open_stream(pa.PythonFile(end_to_end(views), "r")).read_next_batch()


@given(
    rows=st.lists(st.integers(0, 40), max_size=6),
    stream=st.booleans(),
    legacy=st.booleans(),
    dictionary=st.booleans(),
    block=st.integers(8, 3000),
)
def test_each_record_batch_can_be_read_by_itself(
    rows: list[int], stream: bool, legacy: bool, dictionary: bool, block: int
) -> None:
    data = written(rows, stream=stream, legacy=legacy, dictionary=dictionary)
    layout = unpacked(laid_out(data, block).packed())
    assert layout.is_file is not stream
    assert layout.batches[:, 2].tolist() == rows
    for batch in range(len(rows)):
        assert read(data, layout, batch).to_pydict() == {"x": list(range(rows[batch])), "t": ["a"] * rows[batch]}


def test_what_lies_between_is_not_read() -> None:
    data, reads = written([100_000, 5], stream=True), list[int]()
    laid_out(data, 1000, reads)
    assert len(data) > 1_000_000
    assert len(reads) < 10


@given(data=st.data(), stream=st.booleans())
def test_damage_is_an_error_or_leaves_a_layout(data: st.DataObject, stream: bool) -> None:
    whole = bytearray(written([3, 4], stream=stream, dictionary=True))
    for _ in range(data.draw(st.integers(1, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.one_of(st.just(len(whole)), st.integers(0, len(whole))))
    try:
        layout = laid_out(bytes(whole[:cut]), 500)
    except DamagedError:
        return
    assert (layout.batches[:, :2] >= 0).all()
    assert (layout.batches[:, :2] <= cut).all()


@pytest.mark.parametrize("name", ["schema", "batch first", "odd message", "no footer", "footer astray", "damaged"])
def test_what_is_wrong_is_told(name: str) -> None:
    stream, file = written([1, 2], stream=True), written([1, 2], stream=False)
    schema = laid_out(stream).schema
    bad, words = {
        "schema": (stream[:50], "no message begins at byte 0, or it is cut short"),
        "batch first": (stream[len(schema) :], "does not begin with a schema"),
        "odd message": (schema + schema, f"a message of kind 1 lies at byte {len(schema)}"),
        "no footer": (file[:-1], "there is no footer at its end"),
        "footer astray": (file[:400] + file[-10 - int.from_bytes(file[-10:-6], "little") :], "its footer"),
        "damaged": (stream[:8] + b"\xff" * 8 + stream[16:], "its metadata are damaged"),
    }[name]
    with pytest.raises(DamagedError, match=words):
        laid_out(bad)
