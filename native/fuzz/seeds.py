"""Write the fuzzers' seeds: small JPEGs of every kind, in a folder for each target.

Each is followed by 24 bytes of options. Run it with tests/helpers on the path.
"""

from __future__ import annotations

import io
import random
import sys
from itertools import product
from pathlib import Path
from typing import Any

from crafted_jpegs import all_factors, crafted
from grid_cases import SAMPLINGS, packed
from image_cases import encoded, jpeg
from PIL import Image

_OPTIONS_NBYTES = 24
_GRIDS = 128, 128
"""Width and height that give a grid with any sampling factors."""


def jpegs() -> list[bytes]:
    """Gray and color JPEGs with all kinds of features.

    They cover all sampling factors, sequential and progressive scans, restart markers, orientations, and the segments
    that cameras and editors write.
    """
    gray = Image.radial_gradient("L").resize((61, 45))
    color = Image.merge("RGB", (gray, gray.transpose(Image.Transpose.ROTATE_180), gray))
    exif = Image.Exif()
    exif[0x0112] = 6
    options = product((gray, color), ("4:4:4", "4:2:2", "4:2:0"), (False, True), (0, 2), (b"", exif.tobytes()))
    files = [_encoded(image, subsampling, *more) for image, subsampling, *more in options]
    for number, factors in enumerate(all_factors()):
        files.append(crafted(61, 77, factors, number, restart=number % 3))
        files.append(crafted(61, 77, factors, number, interleaved=False))
    return files + _with_further_segments(color)


def _encoded(image: Image.Image, subsampling: str, progressive: bool, interval: int, exif: bytes) -> bytes:
    chroma: dict[str, Any] = {} if image.mode == "L" else {"subsampling": subsampling}
    return encoded(image, progressive=progressive, restart_marker_blocks=interval, exif=exif, **chroma)


def _with_further_segments(color: Image.Image) -> list[bytes]:
    packet = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf tiff:Orientation="8"/></x:xmpmeta>'
    several = io.BytesIO()
    color.save(several, "MPO", save_all=True, append_images=[color])
    return [
        encoded(color, xmp=packet, comment="words"),
        encoded(color, icc_profile=bytes(300), dpi=(72, 72), optimize=True),
        encoded(color, keep_rgb=True, quality=100),
        encoded(color.convert("CMYK")),
        several.getvalue(),
    ]


def grids() -> list[bytes]:
    """JPEGs that get a grid, and what they become."""
    plain = [jpeg(*_GRIDS, sampling=sampling, quality=90) for sampling in SAMPLINGS]
    plain.append(jpeg(*_GRIDS, quality=90, progressive=True))
    return plain + [packed(each).jpeg for each in plain]


def write(folder: Path, files: list[bytes]) -> None:
    """One file for each seed; options are the same in every run."""
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(files):
        (folder / f"seed-{number:03}").write_bytes(data + rng.randbytes(_OPTIONS_NBYTES))


def main(folder: Path) -> None:
    write(folder / "images", jpegs())
    write(folder / "grids", grids())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
