"""Feeds mutated, truncated and spliced JPEGs to the kernels; run by `test_decode_hostile.py`, which a crash would end.

Usage: images_hostile.py COUNT SEED. Prints how many rows were read and how many were refused.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections import Counter

import numpy as np
import torch
from image_cases import intervals, jpeg
from PIL import Image

from feedline import images
from feedline.images import Recipe

CROPS = [images.RandomBox((0.01, 1.0), (0.1, 10)), images.CenterBox(30), images.WholeBox()]
RECIPES = [
    Recipe((24, 17), crop, 0.5, interpolation, layout, dtype, apply_exif_orientation=dtype != torch.uint8)
    for crop in CROPS
    for interpolation, layout, dtype in (("bilinear", "HWC", torch.uint8), ("bicubic", "CHW", torch.float32))
]


def originals() -> list[bytes]:
    exif = Image.Exif()
    exif[0x0112] = 6
    options = [{}, {"progressive": True}, {"restart_marker_blocks": 2}, {"exif": exif.tobytes()}]
    samplings = ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]
    return [jpeg(64, 48, sampling=sampling, **option) for sampling in samplings for option in options]


def hostile(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(changed)) if rng.random() < 0.4 else rng.randrange(min(700, len(changed)))
        act = rng.randrange(6)
        if act == 0:
            changed[at] = rng.randrange(256)
        elif act == 1:
            changed[at] ^= 1 << rng.randrange(8)
        elif act == 2:
            del changed[at : at + rng.choice([1, 2, 16, 200])]
        elif act == 3:
            changed[at:at] = rng.randbytes(rng.choice([1, 2, 16]))
        elif act == 4:
            changed[at : at + 2] = b"\xff" + bytes([rng.choice([0xC0, 0xC2, 0xC4, 0xD0, 0xD9, 0xDA, 0xDB, 0xDD, 0xE1])])
        else:
            other = rng.choice(others)
            start = rng.randrange(len(other))
            changed[at : at + 50] = other[start : start + rng.randrange(100)]
        if not changed:
            break
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.2 else changed)


def attempt(data: bytes, rng: random.Random) -> str:
    recipe = rng.choice(RECIPES)
    lengths = intervals(jpeg(64, 48, restart_marker_blocks=2)) if rng.random() < 0.3 else None
    if lengths is not None and rng.random() < 0.5:
        lengths = np.array([rng.randrange(1 << 16) for _ in range(rng.randrange(40))], np.uint16)
    try:
        images.read_one(data, recipe, rng.getrandbits(64), grid=lengths)
        images.probe(data)
        if rng.random() < 0.2:
            images.decode(data, apply_exif_orientation=True)
    except images.ImageError:
        return "refused"
    return "read"


def main(count: int, seed: int) -> None:
    warnings.simplefilter("ignore")  # of Pillow's plugins, for what is no longer a JPEG
    Image.MAX_IMAGE_PIXELS = 1 << 19
    rng = random.Random(seed)
    sources = originals()
    print(dict(Counter(attempt(hostile(rng.choice(sources), sources, rng), rng) for _ in range(count))))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
