"""Feeds mutated JPEGs and lengths to the grid; run by `test_grid_hostile.py`, which a crash would end.

Usage: grid_hostile.py COUNT SEED. Prints the numbers of rewritten files and of assembled parts.
"""

from __future__ import annotations

import random
import sys

import numpy as np
from grid_cases import SAMPLINGS, packed
from image_cases import jpeg

from feedline import _native


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Changed bytes (most of them in the header), cut off, spliced, or all of it."""
    changed = bytearray(data)
    for _ in range(rng.choice([0, 1, 1, 2, 5])):
        at = rng.randrange(min(len(changed), 700) if rng.random() < 0.7 else len(changed))
        changed[at] = rng.choice([0, 1, 0x7F, 0x80, 0xD0, 0xD9, 0xFF, rng.randrange(256)])
    if rng.random() < 0.2:
        del changed[rng.randrange(len(changed)) :]
    if rng.random() < 0.1:
        at = rng.randrange(len(changed) + 1)
        changed[at:at] = changed[: rng.randrange(len(changed) + 1)]
    return bytes(changed)


def hostile(lengths: np.ndarray, rng: random.Random) -> np.ndarray:
    """Lengths that are wrong, but often of the right number or the right sum."""
    changed = lengths.copy()
    for _ in range(rng.choice([0, 0, 1, 3])):
        first, second = rng.randrange(len(changed)), rng.randrange(len(changed))
        moved = min(int(changed[first]), 0xFFFF - int(changed[second]), rng.choice([1, 2, 1000, 65_535]))
        changed[first] -= moved
        changed[second] += moved
    if rng.random() < 0.2:
        changed[rng.randrange(len(changed))] = rng.randrange(65_536)
    return changed[: rng.randrange(len(changed) + 1)].copy() if rng.random() < 0.05 else changed


def main(count: int, seed: int) -> None:
    rng = random.Random(seed)
    plain = [jpeg(200, 150, sampling=sampling, quality=95) for sampling in SAMPLINGS]
    plain.append(jpeg(200, 150, quality=95, progressive=True))
    grids = [packed(one) for one in plain]
    rewritten = assembled = 0
    for _ in range(count):
        rewritten += isinstance(_native.grid_rewrite(mutated(rng.choice(plain), rng)), tuple)
        whole = rng.choice(grids)
        file, lengths = mutated(whole.jpeg, rng), hostile(whole.lengths, rng)
        _native.grid_measure(file)
        for _ in range(4):
            x, y = rng.choice([0, rng.randrange(200), -5, 2**31 - 1]), rng.randrange(-2, 150)
            width, height = rng.choice([1, 30, 200 - min(x, 199), 2**31 - 1]), rng.randrange(-1, 60)
            box = (x, y, width, height)
            assembled += _native.grid_assemble(file, lengths, box, rng.choice([1, 2, 4, 8, 0, -1, 9])) is not None
    print(rewritten, assembled)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
