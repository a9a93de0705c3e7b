from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.datasets import Lines, PackedStrings
from feedline.datasets.strings import PackedBytes
from feedline.errors import SampleError, StateError

TEXTS = ["", "a", "häßlich", "日本語", "", "line\nbreak"]
any_text = st.text(st.characters(exclude_categories=[]), max_size=8)  # lone surrogates too


@given(st.lists(any_text, max_size=30), st.data())
def test_is_the_list_it_was_made_from(texts: list[str], data: st.DataObject) -> None:
    packed = PackedStrings(iter(texts))
    assert list(packed) == texts
    assert len(packed) == len(texts)
    assert packed[::-2] == texts[::-2]
    if texts:
        index = data.draw(st.integers(-len(texts), len(texts) - 1))
        assert packed[index] == texts[index]
        assert packed.__getitems__([index, 0]) == [texts[index], texts[0]]
    assert pickle.loads(pickle.dumps(packed)) == packed


def test_file_names_of_any_bytes_survive() -> None:
    name = os.fsdecode(b"\xff\xfe.jpg")
    assert os.fsencode(PackedStrings([name])[0]) == b"\xff\xfe.jpg"


def test_more_strings_than_one_block() -> None:
    texts = [str(i) for i in range(10_000)]
    packed = PackedStrings(texts)
    assert list(packed) == texts
    assert packed[9_999] == "9999"
    assert packed.nbytes == 8 * 10_001 + sum(map(len, texts))


@pytest.mark.parametrize("index", [6, -7])
def test_an_index_out_of_range_is_named(index: int) -> None:
    with pytest.raises(IndexError, match=f"{index} is out of range for PackedStrings with 6 samples"):
        PackedStrings(TEXTS)[index]


def test_compares_and_describes_itself() -> None:
    assert PackedStrings(["a"]) != PackedStrings(["b"])
    assert PackedStrings(["a"]) != ["a"]
    assert "häßlich" in PackedStrings(TEXTS)
    assert repr(PackedStrings(["abc"])) == "<PackedStrings: 1 strings, 19 bytes>"


def test_pickles_out_of_band() -> None:
    buffers: list[Any] = []
    packed = PackedStrings(map(str, range(10_000)))
    assert len(pickle.dumps(packed, protocol=5, buffer_callback=buffers.append)) < 1000
    assert len(buffers) == 2


@pytest.mark.parametrize("length", [8, 9])
def test_keys_of_one_length_pickle_once(length: int) -> None:
    packed = PackedBytes.of(bytes(8) if number else bytes(length) for number in range(10_000))
    data = pickle.dumps(packed)
    assert len(data) < packed.nbytes + 1000
    assert pickle.loads(data).many(np.array([0, 7])) == [bytes(length), bytes(8)]


class TestFiles:
    def test_saved_and_mapped(self, tmp_path: Path) -> None:
        PackedStrings(TEXTS).save(tmp_path / "texts")
        mapped = PackedStrings.open(tmp_path / "texts")
        assert list(mapped) == TEXTS
        assert [path.name for path in tmp_path.iterdir()] == ["texts"]

    def test_a_mapped_one_pickles_by_path(self, tmp_path: Path) -> None:
        PackedStrings(map(str, range(1000))).save(tmp_path / "texts")
        data = pickle.dumps(PackedStrings.open(tmp_path / "texts"))
        assert len(data) < 500
        assert pickle.loads(data)[999] == "999"

    @pytest.mark.parametrize("texts", [TEXTS[::-1], TEXTS[1:]])
    def test_one_that_was_saved_again_is_not_taken_for_the_first(self, tmp_path: Path, texts: list[str]) -> None:
        PackedStrings(TEXTS).save(tmp_path / "texts")
        mapped = PackedStrings.open(tmp_path / "texts")
        data = pickle.dumps(mapped)
        PackedStrings(texts).save(tmp_path / "texts")
        os.utime(tmp_path / "texts", ns=(1, 1))
        assert list(mapped) == TEXTS
        with pytest.raises(StateError, match=r"texts has changed since it was opened: it was saved again; open it"):
            pickle.loads(data)

    def test_none_at_all(self, tmp_path: Path) -> None:
        PackedStrings().save(tmp_path / "none")
        assert list(PackedStrings.open(tmp_path / "none")) == []

    def test_lines_of_a_text_file(self, tmp_path: Path) -> None:
        (tmp_path / "lines.txt").write_text("first\n\nthird ß", encoding="utf-8")
        assert list(PackedStrings.from_lines(tmp_path / "lines.txt")) == ["first", "", "third ß"]

    def test_lines_are_those_of_the_dataset(self, tmp_path: Path) -> None:
        (tmp_path / "lines.txt").write_bytes(b"\xef\xbb\xbfa\rb\r\nc\xc2\x85\n\r\n\n\xef\xbb\xbfd\r")
        assert list(PackedStrings.from_lines(tmp_path / "lines.txt")) == list(Lines(tmp_path / "lines.txt"))

    def test_a_damaged_file_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "texts"
        PackedStrings(TEXTS).save(path)
        os.truncate(path, path.stat().st_size - 1)
        with pytest.raises(SampleError, match=r"has \d+ bytes, its header describes \d+"):
            PackedStrings.open(path)
        path.write_bytes(b"something else")
        with pytest.raises(SampleError, match="is not a file of PackedStrings"):
            PackedStrings.open(path)

    def test_a_failed_save_leaves_nothing(self, tmp_path: Path) -> None:
        (tmp_path / "texts").mkdir()
        with pytest.raises(OSError, match="texts"):
            PackedStrings(TEXTS).save(tmp_path / "texts")
        assert [path.name for path in tmp_path.iterdir()] == ["texts"]
