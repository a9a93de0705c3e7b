"""Reads mutated JPEGs with feedline and with Pillow; both must refuse the same files, and read the same pixels.

Run by `test_decode_verdicts.py`, and for hours by `make fuzz`. Usage: verdicts.py COUNT SEED. Prints the numbers
of files read and refused. Ends at the first difference, and writes its file to `verdict-SEED.jpg`.
"""

from __future__ import annotations

import io
import random
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from crafted_jpegs import crafted
from image_cases import by_pillow, encoded, jpeg, photo
from images_hostile import hostile
from PIL import Image, ImageFile, ImageOps

from feedline import images
from feedline.images import Recipe, native

RECIPES = [
    Recipe((24, 17), images.RandomBox((0.01, 1.0), (0.1, 10)), flip=0.5),
    Recipe((12, 30), images.WholeBox(), interpolation="bicubic"),
    Recipe((20, 20), images.CenterBox(30), apply_exif_orientation=True),
]


def tags(*entries: tuple[int, int, int], order: str = "little") -> bytes:
    """EXIF of entries (tag, type, value), each a value of four bytes at most."""
    head = b"II*\0" if order == "little" else b"MM\0*"
    rows = b""
    for tag, kind, value in sorted(entries):
        nbytes = 2 if kind == 3 else 4
        data = value.to_bytes(nbytes, order).ljust(4, b"\0")
        rows += tag.to_bytes(2, order) + kind.to_bytes(2, order) + (1).to_bytes(4, order) + data
    return b"Exif\0\0" + head + (8).to_bytes(4, order) + len(entries).to_bytes(2, order) + rows + bytes(4)


def with_segment(data: bytes, marker: int, content: bytes) -> bytes:
    """Insert a segment before all others."""
    return data[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2) + content + data[2:]


def originals() -> list[bytes]:
    options: list[dict[str, Any]] = [
        {},
        {"progressive": True},
        {"restart_marker_blocks": 2},
        {"exif": tags((0x0112, 3, 6), (0x0128, 3, 2), (0x011A, 4, 72))},
        {"exif": tags((0x0112, 4, 3), order="big"), "dpi": (72, 72)},
        {"comment": b"words", "icc_profile": bytes(200)},
    ]
    samplings = ["4:4:4", "4:2:2", "4:2:0", "4:1:1", "4:4:0", "gray", "RGB"]
    files = [jpeg(64, 48, sampling=sampling, **option) for sampling in samplings for option in options]
    factors = [((4, 2), (1, 1), (1, 1)), ((2, 4), (1, 1), (1, 1)), ((2, 2), (1, 2), (2, 1)), ((3, 1), (1, 1), (1, 1))]
    for number, factor in enumerate(factors):
        files += [crafted(70, 60, factor, number, restart=restart) for restart in (0, 2)]
        files.append(crafted(70, 60, factor, number, interleaved=False))
    plain = jpeg(64, 48, 1, quality=95)
    resources = (
        b"Photoshop 3.0\0" + b"8BIM\x03\xed\0\0" + (16).to_bytes(4) + bytes(16) + b"8BIM\x04\x04\x03abc\0\0\0\2ab"
    )
    packet = b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="8"/>'
    files += [with_segment(plain, 0xED, resources), with_segment(plain, 0xE1, packet)]
    files.append(encoded(photo(64, 48), "MPO", save_all=True, append_images=[photo(64, 48, 1)]))
    return files


def damaged(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """Change the header, or leave it as it is and change the entropy-coded data only."""
    scan = data.find(b"\xff\xda")
    act = rng.randrange(8)
    if act == 0 or scan < 0:
        return hostile(data, others, rng)
    at = rng.randrange(scan + 8, len(data))
    if act <= 2:
        return data[:at]
    changed = bytearray(data)
    if act <= 4:
        changed[at : at + rng.choice([0, 2])] = b"\xff" + bytes([rng.choice([rng.randrange(256), 0xD0, 0xD9, 0xDA])])
    else:
        for _ in range(rng.choice([1, 1, 3, 9])):
            changed[rng.randrange(scan + 8, len(data))] = rng.choice([0, 0xFF, rng.randrange(256)])
    return bytes(changed)


def pillows(data: bytes, *, oriented: bool = False) -> np.ndarray | None:
    """Pixels by Pillow; None if it refuses the file, with any exception."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            return np.asarray((ImageOps.exif_transpose(image) if oriented else image).convert("RGB"))
    except Exception:  # noqa: BLE001 - its plugins may raise anything
        return None


def ours(data: bytes, recipe: Recipe | None, key: int, plan: Any) -> np.ndarray | None:
    """Pixels of the whole image, or of the row that `recipe` describes."""
    try:
        if recipe is None:
            return images.decode(data)
        if plan is None:
            return images.read_one(data, recipe, key).numpy()
        out = np.empty((1, *recipe.shape), np.uint8)
        return out[0] if plan.read([data], out, np.array([key], np.uint64), None, 0, 1) is None else None
    except images.ImageError:
        return None


def wanted(data: bytes, recipe: Recipe | None, key: int) -> np.ndarray | None:
    pixels = pillows(data, oriented=recipe is not None and recipe.apply_exif_orientation)
    if pixels is None or recipe is None:
        return pixels
    geometry = images.geometry(recipe, key, pixels.shape[1], pixels.shape[0])
    return by_pillow(Image.fromarray(pixels), geometry, recipe.interpolation)


def attempt(data: bytes, rng: random.Random, counts: Counter[str]) -> bool:
    """Compare one file; False for a difference."""
    ImageFile.LOAD_TRUNCATED_IMAGES = rng.random() < 0.2
    recipe, key = rng.choice([None, *RECIPES]), rng.getrandbits(64)
    expected, got = wanted(data, recipe, key), ours(data, recipe, key, None)
    counts["refused" if expected is None else "read"] += 1
    if expected is None or got is None:
        return expected is None and got is None
    if recipe is not None:
        counts["read natively"] += ours(data, recipe, key, native.plan_of(recipe)) is not None
    return np.array_equal(expected, got)


def main(count: int, seed: int) -> None:
    warnings.simplefilter("ignore")  # of Pillow, for damaged tags and large images
    Image.MAX_IMAGE_PIXELS = 1 << 18
    rng = random.Random(seed)
    sources, counts = originals(), Counter[str]()
    for _ in range(count):
        data = damaged(rng.choice(sources), sources, rng)
        state = rng.getstate()
        if not attempt(data, rng, counts):
            rng.setstate(state)
            Path(f"verdict-{seed}.jpg").write_bytes(data)
            raise SystemExit(f"verdict-{seed}.jpg is read differently; so far {dict(counts)}")
    print(dict(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
