"""Ranges from pieces that are in memory."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from feedline.stores.cache import MissingPieceError, Pieces

CONTENT = random.Random(0).randbytes(1000)


@given(st.integers(1, 1200), st.integers(0, 1000), st.integers(0, 1000))
def test_a_range_has_the_bytes_of_its_pieces(piece_nbytes: int, a: int, b: int) -> None:
    start, stop = sorted((a, b))
    data = {
        number: memoryview(CONTENT[number * piece_nbytes : (number + 1) * piece_nbytes])
        for number in range(start // piece_nbytes, -(-stop // piece_nbytes))
    }
    found = Pieces(data.get, piece_nbytes).cut(start, stop)
    assert found == CONTENT[start:stop]
    if start < stop and start // piece_nbytes == (stop - 1) // piece_nbytes:
        piece = np.frombuffer(data[start // piece_nbytes], np.uint8)
        assert np.shares_memory(np.frombuffer(found, np.uint8), piece)


def test_a_missing_piece_is_an_error_and_a_present_one_is_looked_up_once() -> None:
    asked = list[int]()

    def find(number: int) -> memoryview | None:
        asked.append(number)
        return memoryview(CONTENT[:100]) if number == 0 else None

    pieces = Pieces(find, 100)
    assert pieces.cut(0, 100) == pieces.cut(0, 100) == CONTENT[:100]
    with pytest.raises(MissingPieceError):
        pieces.cut(99, 101)
    assert asked == [0, 1]
