"""Write the fuzzer's seeds: small JPEGs of every kind.

Each is followed by 24 bytes of options. Run it with tests/helpers on the path.
"""

from __future__ import annotations

import io
import random
import sys
from itertools import product
from pathlib import Path

from crafted_jpegs import all_factors, crafted
from PIL import Image

_OPTIONS_NBYTES = 24


def jpegs() -> list[bytes]:
    """Gray and color JPEGs with all kinds of features.

    They cover all sampling factors, sequential and progressive scans, restart markers and orientations.
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
    return files


def _encoded(image: Image.Image, subsampling: str, progressive: bool, interval: int, exif: bytes) -> bytes:
    file = io.BytesIO()
    chroma = {} if image.mode == "L" else {"subsampling": subsampling}
    image.save(file, "JPEG", progressive=progressive, restart_marker_blocks=interval, exif=exif, **chroma)
    return file.getvalue()


def main(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for number, jpeg in enumerate(jpegs()):
        (folder / f"seed-{number:03}").write_bytes(jpeg + rng.randbytes(_OPTIONS_NBYTES))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
