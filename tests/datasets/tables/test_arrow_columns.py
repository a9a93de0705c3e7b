"""Bytes of Arrow objects that are read for some of their columns, and the resulting samples."""

from __future__ import annotations

import io
import pickle
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from preloaded import Preloaded

import feedline as fl
from feedline.datasets import Arrow
from feedline.datasets.tables.arrow_batches import validate_batch
from feedline.datasets.tables.arrow_messages import Layout, layout_of, unpack_layout
from feedline.errors import SampleError
from feedline.stores import Cache
from feedline.stores.fsspec import ForeignStore

ROWS = 60
WIDE = [bytes(range(256)) * 800] * ROWS
"""Rows of a column, so far apart that nothing else is read with them."""


def written(batches: Any, *, stream: bool = False, **options: Any) -> bytes:
    file = io.BytesIO()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(file, batches[0].schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return file.getvalue()


def laid_out(data: bytes) -> Layout:
    def read(spans: Any) -> list[memoryview]:
        return [memoryview(data)[start:stop] for start, stop in spans]

    return unpack_layout(layout_of(len(data), read, lambda start: iter([(start, memoryview(data)[start:])])))


class Bucket:
    """A store in memory that records the requested ranges."""

    address = "memory://columns/t.arrow"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[tuple[int, int]] = []
        read_many = ForeignStore.read_many

        def recorded(store: ForeignStore, path: str, ranges: Any, **more: Any) -> Any:
            self.asked += ranges
            return read_many(store, path, ranges, **more)

        monkeypatch.setattr(ForeignStore, "read_many", recorded)

    def put(self, data: bytes) -> None:
        fsspec.filesystem("memory").pipe("/columns/t.arrow", data)

    def asked_by(self, fetch: Callable[[], Any]) -> tuple[Any, list[tuple[int, int]]]:
        """The samples, and the requested ranges."""
        self.asked.clear()
        return fetch(), list(self.asked)


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield Bucket(monkeypatch)
    fsspec.filesystem("memory").rm("/columns", recursive=True)


def nbytes(spans: list[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


class TestDictionaries:
    """Only the dictionary messages of the chosen columns are read."""

    @staticmethod
    def batches() -> list[Any]:
        """Batches whose dictionaries change or grow, and a large dictionary that stays."""
        texts = [["a", "b", "a"], ["b", "c", "d"], ["e", "e", "f"]]
        large = pa.array([f"{row:05}" * 200 for row in range(100)])
        plain = pa.DictionaryArray.from_arrays(pa.array([5, 6, 7], pa.int8()), large)
        return [
            pa.record_batch({"plain": plain, "t": pa.array(each).dictionary_encode(), "x": pa.array([1, 2, 3])})
            for each in texts
        ]

    @pytest.mark.parametrize("deltas", [False, True], ids=["replaced", "deltas"])
    def test_that_change_within_a_stream(self, bucket: Bucket, deltas: bool) -> None:
        batches = self.batches()
        if deltas:
            grown = [pa.array(list("abcdef")[:count]) for count in (2, 4, 6)]
            codes = [pa.array(each, pa.int32()) for each in ([0, 1, 0], [1, 2, 3], [4, 4, 5])]
            columns = [pa.DictionaryArray.from_arrays(*each) for each in zip(codes, grown, strict=True)]
            batches = [batch.set_column(1, "t", each) for batch, each in zip(batches, columns, strict=True)]
        bucket.put(written(batches, stream=True, emit_dictionary_deltas=deltas))
        dataset = Arrow(bucket.address, ["t"])
        samples, asked = bucket.asked_by(lambda: dataset.__getitems__(range(9)))
        assert "".join(sample["t"] for sample in samples) == "ababcdeef"
        assert nbytes(asked) < 5000  # the other dictionary has 100,000
        assert Arrow(bucket.address, ["plain"])[8]["plain"] == "00007" * 200

    def test_within_lists_and_within_each_other(self, bucket: Bucket) -> None:
        inner = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1, 0], pa.int8()), ["one", "two"])
        lists = pa.ListArray.from_arrays([0, 1, 3, 4], inner)
        values = pa.StructArray.from_arrays([pa.array([7, 8]), inner[:2]], ["n", "d"])
        both = pa.DictionaryArray.from_arrays(pa.array([1, 1, 0], pa.int8()), values)
        bucket.put(written([pa.record_batch({"l": lists, "first": inner[:3], "s": both})]))
        samples = Arrow(bucket.address, ["s", "l"]).__getitems__(range(3))
        assert [sample["l"] for sample in samples] == [["two"], ["one", "two"], ["one"]]
        assert [(each["s"]["n"].item(), each["s"]["d"]) for each in samples] == [(8, "one"), (8, "one"), (7, "two")]

    def test_one_that_is_not_there_is_named(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        bucket.put(written(self.batches(), stream=True))
        dataset = Arrow(bucket.address, ["t"])
        monkeypatch.setattr(Layout, "needed", lambda *_: [])
        with pytest.raises(
            SampleError, match=r"record batch 1 of .*t\.arrow cannot be read: it is damaged.*[Dd]ictionary"
        ):
            dataset[4]


class TestWholes:
    """All columns are requested at once, and record batches of older writers are read, too."""

    BATCHES = (pa.record_batch({"x": pa.array(range(ROWS)), "s": pa.array(["text"] * ROWS, pa.string_view())}),)

    def test_before_1_0(self, bucket: Bucket) -> None:
        data = written(self.BATCHES, metadata_version=pa.ipc.MetadataVersion.V4)
        bucket.put(data)
        dataset = Arrow(bucket.address, ["s"], cache_nbytes=0)
        sample, asked = bucket.asked_by(lambda: dataset[5])
        assert sample == {"s": "text"}
        assert nbytes(asked) == 16 * ROWS

    def test_all_columns_are_requested_at_once(self, bucket: Bucket) -> None:
        data = written(self.BATCHES)
        bucket.put(data)
        dataset = Arrow(bucket.address)
        _, asked = bucket.asked_by(lambda: dataset[5])
        assert asked == [tuple(laid_out(data).batches[0, [0, 2]].tolist())]

    @pytest.mark.parametrize("columns", [["x"], None])
    @pytest.mark.parametrize("buffer", [(-8, 5), (8, -1), (1 << 40, 8), (1 << 62, 1 << 62)])
    def test_buffers_outside_of_their_batch_are_named(
        self, bucket: Bucket, columns: list[str] | None, buffer: tuple[int, int]
    ) -> None:
        data = bytearray(written(self.BATCHES))
        start, body, _, _ = laid_out(bytes(data)).batches[0].tolist()
        at = bytes(data).index(np.array([0, 8 * ROWS], np.int64).tobytes(), start, body)
        data[at : at + 16] = np.array(buffer, np.int64).tobytes()
        bucket.put(bytes(data))
        dataset = Arrow(bucket.address, columns)
        with pytest.raises(
            SampleError, match=r"record batch 0 of memory://columns/t\.arrow cannot be read: it is damaged"
        ):
            dataset[5]


class TestMemory:
    """Bytes that were read in addition are not held as long as the rows."""

    def test_bytes_that_were_parsed_are_freed(self) -> None:
        data = np.frombuffer(written([pa.record_batch({"x": pa.array(range(100))})] * 50, stream=True), np.uint8)
        blocks: list[weakref.ref[Any]] = []
        most = 0

        def coming(start: int) -> Iterator[tuple[int, memoryview]]:
            nonlocal most
            for at in range(start, len(data), 1000):
                block = data[at : at + 1000].copy()
                blocks.append(weakref.ref(block))
                most = max(most, sum(each() is not None for each in blocks))
                yield at, memoryview(block)

        layout = unpack_layout(
            layout_of(len(data), lambda spans: [data[start:stop].data for start, stop in spans], coming)
        )
        assert len(layout.batches) == 50
        assert most <= 3

    def test_little_of_much_is_copied(self, bucket: Bucket) -> None:
        bucket.put(written([pa.record_batch({"narrow": pa.array(range(ROWS)), "wide": pa.array(WIDE)})]))
        dataset, before = Arrow(bucket.address, ["narrow"]), pa.total_allocated_bytes()
        assert dataset[5]["narrow"].item() == 5
        assert pa.total_allocated_bytes() - before < 10_000 < len(WIDE[0])


class TestRows:
    """Rows of record batches that cannot be kept."""

    BATCHES = tuple(
        pa.record_batch(
            {
                "x": pa.array([None if row % 7 == 3 else row for row in range(at, at + 20)], pa.int32()),
                "v": pa.array([[row, row + 1] for row in range(at, at + 20)], pa.list_(pa.float32(), 2)),
                "flag": pa.array([row % 3 == 0 for row in range(at, at + 20)]),
                "wide": pa.array(WIDE[:20]),
            }
        )
        for at in (0, 20, 40)
    )

    def test_all_of_a_batch_at_once(self, bucket: Bucket) -> None:
        bucket.put(written(self.BATCHES))
        dataset = Arrow(bucket.address, ["v", "flag"], cache_nbytes=0)
        places = [59, -60, 3, 3, 21]
        samples, asked = bucket.asked_by(lambda: dataset.__getitems__(places))
        assert [sample["v"].tolist() for sample in samples] == [[59, 60], [0, 1], [3, 4], [3, 4], [21, 22]]
        assert [sample["flag"].item() for sample in samples] == [False, True, True, True, True]
        assert nbytes(asked) == 4 * 8 + 3  # the flags of rows 0 and 3 are one byte
        assert dataset.__getitems__([]) == []

    def test_one_of_many_images_is_read_without_the_others(self, bucket: Bucket) -> None:
        images = [bytes([row]) * 50_000 for row in range(40)]
        table = pa.table({"image": [{"bytes": image, "path": str(row)} for row, image in enumerate(images)]})
        bucket.put(written(table.to_batches()))
        dataset = Arrow(bucket.address, cache_nbytes=0)
        sample, asked = bucket.asked_by(lambda: dataset[17])
        assert sample["image"] == {"bytes": images[17], "path": "17"}
        assert nbytes(asked) == 2 * 8 + 50_000 + 2  # two offsets each, and what lies between them
        with fl.DataLoader(dataset, 4, shuffle=True, seed=0, num_workers=2, worker_method="thread") as loader:
            assert sorted(each for batch in loader for each in batch["image"]["bytes"]) == images
        again = pickle.loads(pickle.dumps(dataset))
        assert again[-1]["image"]["path"] == "39"

    def test_a_null_is_named_by_object_and_row(self, bucket: Bucket) -> None:
        bucket.put(written(self.BATCHES))
        dataset = Arrow(bucket.address, ["x"], cache_nbytes=0)
        assert dataset[44]["x"].item() == 44
        with pytest.raises(SampleError, match=r"memory://columns/t\.arrow, row 45: column 'x' is null"):
            dataset.__getitems__([1, 45, 2])
        filled = Arrow(bucket.address, ["x"], cache_nbytes=0, nulls=-1)
        assert [sample["x"].item() for sample in filled.__getitems__([1, 45, 2, 3])] == [1, -1, 2, -1]

    def test_wanted_are_the_chosen_buffers(self, bucket: Bucket, tmp_path: Path) -> None:
        bucket.put(written(self.BATCHES))
        cache = Cache(tmp_path / "cache", limit="10 MB")
        dataset = Arrow(bucket.address, ["v"], cache_nbytes=0, cache=cache)
        assert [want.stop - want.start for _, want in dataset.ranges(np.array([3, -1]))] == [160, 160]
        assert dataset.ranges(np.array([], np.int64)) == []

    def test_compressed_ones_are_kept_nevertheless(self, bucket: Bucket) -> None:
        bucket.put(written(self.BATCHES, compression="lz4"))
        dataset = Arrow(bucket.address, ["v"], cache_nbytes=0)
        assert dataset[45]["v"].tolist() == [45, 46]
        assert bucket.asked_by(lambda: dataset[46])[1] == []

    @pytest.mark.parametrize("method", ["thread", "process"])
    def test_in_workers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
        monkeypatch.chdir(tmp_path)
        Path("t.arrow").write_bytes(written(self.BATCHES))
        far = Arrow("local://t.arrow", ["v", "flag"], cache_nbytes=0)
        near = Arrow("t.arrow", ["v", "flag"])
        assert pickle.loads(pickle.dumps(far))[7]["v"].tolist() == [7, 8]
        with fl.DataLoader(far, 7, shuffle=True, seed=1, num_workers=2, worker_method=method) as loader:
            found = [(batch["v"].tolist(), batch["flag"].tolist()) for batch in loader]
        with fl.DataLoader(near, 7, shuffle=True, seed=1) as loader:
            assert found == [(batch["v"].tolist(), batch["flag"].tolist()) for batch in loader]


def test_types_within_types(bucket: Bucket) -> None:
    tensors = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int8(), [2, 2]), pa.array([[1, 2, 3, 4], [5, 6, 7, 8]], pa.list_(pa.int8(), 4))
    )
    columns = {
        "s": pa.StructArray.from_arrays([tensors, pa.array(["a", "b"])], ["t", "u"]),
        "l": pa.FixedSizeListArray.from_arrays(tensors, 1),
        "wide": pa.array(WIDE[:2]),
    }
    bucket.put(written([pa.record_batch(columns)]))
    for cache_nbytes in (0, 1 << 20):
        sample = Arrow(bucket.address, ["l", "s"], cache_nbytes=cache_nbytes)[1]
        assert (sample["s"]["t"].tolist(), sample["s"]["u"]) == ([[5, 6], [7, 8]], "b")
        assert sample["l"].tolist() == [[[5, 6], [7, 8]]]
        assert Arrow(bucket.address, ["l"], cache_nbytes=cache_nbytes)[0]["l"].tolist() == [[[1, 2], [3, 4]]]


@pytest.mark.parametrize("column", ["x", "s"])
def test_damaged_buffers_are_named_with_their_record_batch(bucket: Bucket, column: str) -> None:
    batches = [pa.record_batch({"x": pa.array(range(1000)), "s": pa.array(["text"] * 1000)})] * 2
    data = bytearray(written(batches, compression="zstd"))
    bucket.put(bytes(data))
    reading = Arrow(bucket.address, [column])
    _, asked = bucket.asked_by(lambda: reading[1000])
    first = min(start for start, _ in asked)
    data[first : first + 16] = bytes(range(16))
    bucket.put(bytes(data))
    dataset = Arrow(bucket.address, [column])
    assert column in dataset[999]
    with pytest.raises(SampleError, match=r"record batch 1 of memory://columns/t\.arrow cannot be read: it is damaged"):
        dataset[1000]


NAMES = pa.dictionary(pa.int8(), pa.string())
NUMBERS = pa.dictionary(pa.int8(), pa.int16())


@pytest.mark.parametrize("cache_nbytes", [0, 1 << 20])
@pytest.mark.parametrize(
    "kind",
    [
        pa.struct({"p": NAMES}),
        pa.struct({"p": pa.struct({"q": NAMES, "r": pa.int8()})}),
        pa.list_(pa.struct({"p": NAMES}), 2),
        pa.struct({"p": pa.list_(NAMES, 1)}),
        pa.list_(NUMBERS, 2),
        pa.struct({"p": pa.list_(pa.list_(NUMBERS, 2), 1)}),
    ],
    ids=str,
)
def test_indices_below_nulls_point_nowhere(bucket: Bucket, kind: Any, cache_nbytes: int, tmp_path: Path) -> None:
    """pyarrow writes 0 there, into an empty dictionary, and then calls its own file invalid."""
    data = written([pa.record_batch({"a": pa.array([None, None], kind)})])
    bucket.put(data)
    (tmp_path / "a.arrow").write_bytes(data)
    for source in (bucket.address, tmp_path / "a.arrow"):
        with pytest.raises(SampleError, match=r"row 1.*: column 'a.* is null"):
            Arrow(source, ["a"], cache_nbytes=cache_nbytes)[1]


def test_indices_are_checked_without_pyarrows_functions(preloaded: Preloaded, tmp_path: Path) -> None:
    columns = {"a": pa.array([None], pa.struct({"p": NAMES})), "b": pa.array(["one"]).dictionary_encode()}
    (tmp_path / "a.arrow").write_bytes(written([pa.record_batch(columns)]))
    code, output = preloaded.run_code(READING, tmp_path)
    assert (code, output) == (0, "{'a': {'p': ''}, 'b': 'one'}\n")


READING = """
from pathlib import Path
import fsspec
from feedline.datasets import Arrow
fsspec.filesystem("memory").pipe("/a.arrow", Path("a.arrow").read_bytes())
print(Arrow("memory://a.arrow", nulls={"a.p": ""})[0])
"""


@pytest.mark.parametrize("layout", ["dictionary", "struct", "list", "fixed-size list"])
def test_indices_out_of_a_dictionary_are_damage(layout: str) -> None:
    names = pa.DictionaryArray.from_arrays(pa.array([0, 5], pa.int8()), pa.array(["only one"]), safe=False)
    column = {
        "dictionary": names,
        "struct": pa.StructArray.from_arrays([names], ["p"]),
        "list": pa.ListArray.from_arrays(pa.array([0, 2], pa.int32()), names),
        "fixed-size list": pa.FixedSizeListArray.from_arrays(names, 2),
    }[layout]
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        validate_batch(pa.record_batch({"a": column}))


def test_texts_that_are_not_utf8_hide_no_damage() -> None:
    text = pa.array([b"\xff", b"fine"]).view(pa.string())
    offsets = pa.array([0, 9, 1], pa.int32()).buffers()[1]
    lists = pa.Array.from_buffers(pa.list_(pa.string()), 2, [None, offsets], children=[text])
    assert validate_batch(pa.record_batch({"text": text})).num_rows == 2
    with pytest.raises(pa.ArrowInvalid, match="out of bounds"):
        validate_batch(pa.record_batch({"text": text, "lists": lists}))


@pytest.mark.parametrize("name", ["Arrow", "Parquet"])
def test_of_many_files_only_the_first_is_read_beyond_its_footer(bucket: Bucket, name: str) -> None:
    """Every rank reads the footers of all files, so small files may not cost more than they hold."""
    content = np.random.default_rng(0).bytes(200_000)
    urls = [f"memory://columns/{number:02}.{name.lower()}" for number in range(12)]
    for number, url in enumerate(urls):
        # The footer of one is longer than those before it.
        columns = {"x": [content], **{f"{'long' * 30}{each}": [number] for each in range(90 * (number == 7))}}
        table, file = pa.table(columns), io.BytesIO()
        if name == "Parquet":
            pq.write_table(table, file, compression="none", write_statistics=False)
        else:
            with pa.ipc.new_file(file, table.schema) as writer:
                writer.write_table(table)
        fsspec.filesystem("memory").pipe(url.removeprefix("memory:/"), file.getvalue())
    opening = partial(getattr(fl.datasets, name), urls, columns=["x"])
    data, asked = bucket.asked_by(opening)
    assert max(stop - start for start, stop in asked) == 64 << 10
    assert sum(stop - start for start, stop in asked) < 200_000
    assert [bytes(sample["x"]) for sample in data] == [content] * 12
    assert bucket.asked_by(opening)[1] == [], "footers are kept"
