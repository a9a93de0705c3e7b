"""JPEGs written block by block, with any sampling factors, which the installed encoders cannot write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product
from math import ceil

import numpy as np

Factors = Sequence[tuple[int, int]]
"""Sampling factors (horizontal, vertical) of each component, 1 to 4."""

AC_SYMBOLS = [run << 4 | size for run in range(16) for size in range(1, 11)] + [0x00, 0xF0]
"""Symbol i has the code i of eight bits; DC symbol i has the code i of four bits."""

AC_CODES = {symbol: f"{code:08b}" for code, symbol in enumerate(AC_SYMBOLS)}

MOST_BLOCKS = 10
"""Blocks that an MCU may hold; components with more are written one scan each."""


def crafted(
    width: int, height: int, factors: Factors, seed: int = 0, *, interleaved: bool = True, restart: int = 0
) -> bytes:
    """Write a baseline JPEG of random waves; `restart` is the number of MCUs between restart markers."""
    planes = [_blocks(rows, columns, seed + i) for i, (rows, columns) in enumerate(_sides(width, height, factors))]
    groups = [range(len(factors))] if interleaved else [[i] for i in range(len(factors))]
    scans = b"".join(_scan(width, height, factors, planes, group, restart) for group in groups)
    return b"\xff\xd8" + _tables() + _frame(width, height, factors) + _interval(restart) + scans + b"\xff\xd9"


def all_factors() -> Iterator[Factors]:
    """All sampling factors of a first component and two equal others that fit one MCU and that libjpeg reads."""
    for h, v, ch, cv in product((1, 2, 3, 4), repeat=4):
        whole = max(h, ch) % h == max(h, ch) % ch == max(v, cv) % v == max(v, cv) % cv == 0
        if whole and h * v + 2 * ch * cv <= MOST_BLOCKS:
            yield ((h, v), (ch, cv), (ch, cv))


def _most(factors: Factors) -> tuple[int, int]:
    return max(h for h, _ in factors), max(v for _, v in factors)


def _sides(width: int, height: int, factors: Factors) -> list[tuple[int, int]]:
    """Blocks of each component, padded to whole MCUs: (rows, columns)."""
    most_h, most_v = _most(factors)
    columns, rows = ceil(width / (8 * most_h)), ceil(height / (8 * most_v))
    return [(rows * v, columns * h) for h, v in factors]


def _blocks(rows: int, columns: int, seed: int) -> np.ndarray:
    """Quantized coefficients (rows, columns, 64) in the order of the file."""
    rng = np.random.default_rng(seed)
    blocks = np.zeros((rows, columns, 64), np.int64)
    blocks[..., 0] = rng.integers(-90, 90, (rows, columns))
    for order in range(1, 64):
        blocks[..., order] = rng.integers(-20, 21, (rows, columns)) * (rng.random((rows, columns)) < 2 / order)
    return blocks


def _segment(marker: int, content: bytes) -> bytes:
    return bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2) + content


def _tables() -> bytes:
    dc = bytes([0x00, 0, 0, 0, 12, *[0] * 12, *range(12)])
    ac = bytes([0x10, *[0] * 7, len(AC_SYMBOLS), *[0] * 8, *AC_SYMBOLS])
    return _segment(0xDB, bytes([0, *[10] * 64])) + _segment(0xC4, dc) + _segment(0xC4, ac)


def _frame(width: int, height: int, factors: Factors) -> bytes:
    components = b"".join(bytes([i + 1, h << 4 | v, 0]) for i, (h, v) in enumerate(factors))
    return _segment(0xC0, bytes([8]) + height.to_bytes(2) + width.to_bytes(2) + bytes([len(factors)]) + components)


def _interval(restart: int) -> bytes:
    return _segment(0xDD, restart.to_bytes(2)) if restart else b""


def _scan(
    width: int, height: int, factors: Factors, planes: list[np.ndarray], group: Sequence[int], restart: int
) -> bytes:
    header = bytes([len(group)]) + b"".join(bytes([i + 1, 0]) for i in group) + bytes([0, 63, 0])
    data, bits, means = bytearray(), list[str](), dict.fromkeys(group, 0)
    blocks = {i: planes[i].tolist() for i in group}
    for number, mcu in enumerate(_mcus(width, height, factors, group)):
        if restart and number and number % restart == 0:
            data += _packed("".join(bits)) + bytes([0xFF, 0xD0 + (number // restart - 1) % 8])
            bits, means = [], dict.fromkeys(group, 0)
        for component, row, column in mcu:
            block = blocks[component][row][column]
            bits += _coded(block, block[0] - means[component])
            means[component] = block[0]
    return _segment(0xDA, header) + bytes(data) + _packed("".join(bits))


def _mcus(width: int, height: int, factors: Factors, group: Sequence[int]) -> Iterator[list[tuple[int, int, int]]]:
    """Blocks (component, row, column) of each MCU, in the order of the file."""
    most_h, most_v = _most(factors)
    if len(group) == 1:
        h, v = factors[group[0]]
        columns, rows = ceil(ceil(width * h / most_h) / 8), ceil(ceil(height * v / most_v) / 8)
        yield from ([(group[0], row, column)] for row in range(rows) for column in range(columns))
        return
    for y, x in product(range(ceil(height / (8 * most_v))), range(ceil(width / (8 * most_h)))):
        yield [
            (i, y * factors[i][1] + row, x * factors[i][0] + column)
            for i in group
            for row in range(factors[i][1])
            for column in range(factors[i][0])
        ]


def _coded(block: list[int], difference: int) -> Iterator[str]:
    """Bits of a block."""
    size, number = _sized(difference)
    yield f"{size:04b}{number}"
    last = 0
    for at, value in enumerate(block):
        if value and at:
            runs, run = divmod(at - last - 1, 16)
            size, number = _sized(value)
            yield AC_CODES[0xF0] * runs + AC_CODES[run << 4 | size] + number
            last = at
    if not block[63]:
        yield AC_CODES[0]


@cache
def _sized(value: int) -> tuple[int, str]:
    """Number of bits of a value, and these bits."""
    size = abs(value).bit_length()
    return size, f"{value if value > 0 else value + (1 << size) - 1:0{size}b}" if size else ""


def _packed(bits: str) -> bytes:
    bits += "1" * (-len(bits) % 8)
    return int("1" + bits, 2).to_bytes(len(bits) // 8 + 1)[1:].replace(b"\xff", b"\xff\x00")
