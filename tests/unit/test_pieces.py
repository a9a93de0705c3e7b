"""Ranges cut out of pieces that are in memory."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from feedline.stores.cache import Pieces

CONTENT = random.Random(0).randbytes(1000)


@given(st.integers(1, 1200), st.integers(0, 1000), st.integers(0, 1000))
def test_a_range_is_what_lies_there(piece_nbytes: int, a: int, b: int) -> None:
    start, stop = sorted((a, b))
    data = {
        number: memoryview(CONTENT[number * piece_nbytes : (number + 1) * piece_nbytes])
        for number in range(start // piece_nbytes, -(-stop // piece_nbytes))
    }
    found = Pieces(data, piece_nbytes).cut(start, stop)
    assert found == CONTENT[start:stop]
    if start < stop and start // piece_nbytes == (stop - 1) // piece_nbytes:
        piece = np.frombuffer(data[start // piece_nbytes], np.uint8)
        assert np.shares_memory(np.frombuffer(found, np.uint8), piece)
