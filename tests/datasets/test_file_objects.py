"""File objects over byte ranges, for libraries that read files."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.datasets import file_objects
from feedline.datasets.file_objects import BlockFile, RangeFile, SparseFile, merge_ranges

BLOCK = 16


class FakeFile:
    """Remote bytes; records the requested ranges."""

    name, version = "blob", "1"

    def __init__(self, data: bytes) -> None:
        self.data, self.nbytes = data, len(data)
        self.asked: list[tuple[int, int]] = []
        self.collecting: list[bool] = []

    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        if any(not 0 <= start <= stop <= self.nbytes for start, stop in spans):
            raise ValueError(spans)
        self.asked += spans
        self.collecting.append(gc.isenabled())
        return [memoryview(self.data)[start:stop] for start, stop in spans]


@pytest.fixture(scope="module", autouse=True)
def _small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(file_objects, "_BLOCK_NBYTES", BLOCK)
        patch.setattr(file_objects, "_BLOCKS", 2)
        yield


def far(blob: Any) -> BlockFile:
    return BlockFile(blob)


def read_through(file: RangeFile, data: bytes, steps: Sequence[tuple[str, int, int]]) -> None:
    """Apply the same operations to a file and to one of Python's, and compare the results."""
    whole = io.BytesIO(data)
    for how, place, nbytes in steps:
        if how == "read":
            assert bytes(file.read(nbytes)) == whole.read(nbytes)
        elif how == "into":
            into, expected = bytearray(max(0, nbytes)), bytearray(max(0, nbytes))
            assert file.readinto(memoryview(into)) == whole.readinto(expected)
            assert into == expected
        else:
            offset, whence = {"set": (place, 0), "on": (nbytes, 1), "end": (-1, 2)}[how]
            assert file.seek(offset, whence) == whole.seek(offset, whence)
        assert file.tell() == whole.tell()


contents = st.binary(min_size=1, max_size=80)
cuts = st.lists(st.tuples(st.integers(0, 80), st.integers(0, 80)), max_size=5)
steps = st.lists(
    st.tuples(st.sampled_from(["set", "on", "end", "read", "into"]), st.integers(0, 90), st.integers(-1, 90)).filter(
        lambda step: step[0] != "on" or step[2] >= 0
    ),
    max_size=12,
)


@given(data=contents, cuts=cuts, steps=steps)
def test_a_sparse_file_reads_like_a_whole_one(data: bytes, cuts: Any, steps: Any) -> None:
    spans = merge_ranges([(min(a, b, len(data)), min(max(a, b), len(data))) for a, b in cuts])
    read_through(SparseFile(len(data), spans, FakeFile(data).read), data, steps)


@given(data=contents, cuts=cuts, steps=steps)
def test_a_far_file_reads_like_a_near_one(data: bytes, cuts: Any, steps: Any) -> None:
    file = far(FakeFile(data))
    read_through(file, data, steps)
    file.seek(0)
    with file.holding([(min(a, b, len(data)), min(max(a, b), len(data))) for a, b in cuts]):
        read_through(file, data, steps)


def test_bytes_read_before_are_neither_requested_again_nor_copied() -> None:
    blob = FakeFile(bytes(range(100)))
    sparse = SparseFile(100, [(10, 20), (50, 60)], blob.read)
    sparse.seek(52)
    assert sparse.read(4).obj is blob.data
    assert blob.asked == [(10, 20), (50, 60)]
    sparse.seek(15)
    assert bytes(sparse.read(10)) == bytes(range(15, 25))
    assert blob.asked[2:] == [(15, 25)]


def test_a_remote_file_caches_blocks_and_requests_no_held_bytes() -> None:
    blob = FakeFile(bytes(range(100)))
    file = far(blob)
    for place in (3, 5, 11):
        file.seek(place)
        file.read(4)
    assert blob.asked == [(0, 16)]
    file.seek(14)
    file.read(4)
    assert blob.asked[1:] == [(16, 32)]
    with file.holding([(60, 70), (40, 50), (60, 70)]):
        assert blob.asked[2:] == [(40, 50), (60, 70)]
        file.seek(41)
        assert file.read(9).obj is blob.data
    assert blob.asked[4:] == []
    file.seek(40)
    file.read(30)
    assert blob.asked[4:] == [(40, 70)], "longer than a block: just that, and what was held is gone"


def test_spans_held_by_one_thread_are_not_visible_to_others() -> None:
    blob = FakeFile(bytes(range(100)))
    file = far(blob)

    def look() -> None:
        file.seek(42)
        file.read(2)

    with file.holding([(40, 50)]):
        other = threading.Thread(target=look)
        other.start()
        other.join()
    assert blob.asked == [(40, 50), (32, 48)]


def test_nothing_is_collected_while_a_library_waits_for_bytes() -> None:
    blob = FakeFile(bytes(100))
    far(blob).read(8)
    assert blob.collecting == [False]
    assert gc.isenabled()


class Unreadable(FakeFile):
    def read(self, spans: Sequence[tuple[int, int]]) -> list[memoryview]:
        if spans:
            raise ConnectionError("gone")
        return []


@pytest.mark.parametrize("kind", ["far", "sparse"])
def test_a_read_that_fails_does_not_move_and_lets_go_of_the_memory(kind: str) -> None:
    blob, into = Unreadable(bytes(9)), bytearray(4)
    file = far(blob) if kind == "far" else SparseFile(9, [], blob.read)
    file.seek(2)
    with pytest.raises(ConnectionError) as caught:
        file.readinto(memoryview(into))
    assert file.tell() == 2
    assert caught.value.__traceback__ is not None
    into.clear()  # BufferError if the error, which is still there, held it


def test_a_closed_file_frees_its_bytes() -> None:
    data = bytearray(100)
    sparse = SparseFile(100, [(0, 100)], lambda spans: [memoryview(data)[start:stop] for start, stop in spans])
    assert (sparse.readable(), sparse.seekable(), sparse.writable()) == (True, True, False)
    with pytest.raises(BufferError):
        data.clear()
    sparse.close()
    assert sparse.closed
    data.clear()
