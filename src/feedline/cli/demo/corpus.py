"""The demo's corpus: crops of a few real photographs, and handwritten digits, as JPEG files in class folders."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from feedline.cli.demo import sources
from feedline.cpus import usable_cpus
from feedline.rng import SampleRng, derive

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from numpy.typing import NDArray

RECIPE = "pictures-1"
"""Names the folder: a change in how pictures are made gets another one, and never mixes with what was made before."""

QUALITY = 90
DIGIT_PIXELS = 128


@dataclass(frozen=True, slots=True)
class Picture:
    """One file to be made: the `number`-th picture of its class."""

    label: str
    number: int

    @property
    def file(self) -> str:
        """Where it lies below the corpus folder; the class is the folder's name."""
        return f"{self.label}/{self.label}-{self.number:05d}.jpg"


@dataclass(frozen=True, slots=True)
class Corpus:
    """What the demo trains on. A picture is the same file whatever the number of pictures asked for."""

    root: Path
    classes: tuple[str, ...]
    pictures: tuple[Picture, ...]

    def missing(self) -> list[Picture]:
        """The pictures that were not written yet."""
        return [picture for picture in self.pictures if not (self.root / picture.file).exists()]

    def nbytes(self) -> int:
        """The size of the files, in bytes."""
        return sum((self.root / picture.file).stat().st_size for picture in self.pictures)


def plan(directory: Path, count: int) -> Corpus:
    """`count` pictures spread evenly over the classes; photographs make up for digits that run out."""
    photos = [photo.label for photo in sources.photos()]
    available = {f"digit-{digit}": number for digit, number in enumerate(_digit_counts())}
    even = count // (len(photos) + len(available))
    numbers = {label: min(even, number) for label, number in available.items()}
    rest = count - sum(numbers.values())
    numbers |= {label: rest // len(photos) + (i < rest % len(photos)) for i, label in enumerate(photos)}
    pictures = tuple(Picture(label, i) for label in sorted(numbers) for i in range(numbers[label]))
    return Corpus(directory / RECIPE, tuple(sorted(numbers)), pictures)


def write(corpus: Corpus, pictures: list[Picture], tick: Callable[[], None]) -> None:
    """Make the files of `pictures`, calling `tick` after each; what was written stays whole if this is killed."""
    for label in corpus.classes:
        (corpus.root / label).mkdir(parents=True, exist_ok=True)
    (corpus.root / "ATTRIBUTION.md").write_text(attribution(), encoding="utf-8")
    photos = {photo.label: sources.pixels(photo) for photo in sources.photos()}
    digits = _digits_by_class()

    def make(picture: Picture) -> None:
        image = _digit(digits[picture.label][picture.number]) if picture.label in digits else _crop(photos, picture)
        _save(image, corpus.root / picture.file)

    with ThreadPoolExecutor(usable_cpus()) as pool:  # Pillow resizes and encodes without the GIL
        for _ in pool.map(make, pictures):
            tick()


def attribution() -> str:
    """The text that lies beside the files: what they are, and whose."""
    rows = (f"| {p.label} | {p.title} | {p.credit} | {p.licence} | {p.origin} |" for p in sources.photos())
    return _ATTRIBUTION.format(
        quality=QUALITY, pixels=DIGIT_PIXELS, photos="\n".join(rows), digits=sources.DIGITS_CREDIT
    )


_ATTRIBUTION = """\
# Where these pictures come from

They were made by `feedline demo` out of pictures that installed Python packages ship. They are **not** a data set of
thousands of photographs: every file in a photograph's folder is a random crop of that one photograph, resized and
encoded again as JPEG (quality {quality}); every digit is a scan of 8×8 pixels, enlarged to {pixels}×{pixels} and
encoded as JPEG. They show how fast pictures are fed, not how well a model learns.

| folder | picture | by | licence | from |
|---|---|---|---|---|
{photos}

`digit-*`: {digits}.
"""


def _digits_by_class() -> dict[str, NDArray[np.uint8]]:
    scans, digits = sources.digits()
    return {f"digit-{digit}": scans[digits == digit] for digit in np.unique(digits)}


def _digit_counts() -> list[int]:
    return [len(scans) for scans in _digits_by_class().values()]


def _digit(scan: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(scan).resize((DIGIT_PIXELS, DIGIT_PIXELS), Image.Resampling.BICUBIC)


def _crop(photos: Mapping[str, Image.Image], picture: Picture) -> Image.Image:
    """A part of the photograph, 35 to 100 % of each side, with a longer side of 500 to 700 pixels."""
    photo = photos[picture.label]
    rng = SampleRng(derive(picture.label, picture.number)).generator
    width, height = (int(side * rng.uniform(0.35, 1)) for side in photo.size)
    left, top = int(rng.integers(photo.width - width + 1)), int(rng.integers(photo.height - height + 1))
    zoom = int(rng.integers(500, 701)) / max(width, height)
    size = (max(1, round(width * zoom)), max(1, round(height * zoom)))
    return photo.resize(size, Image.Resampling.BILINEAR, box=(left, top, left + width, top + height))


def _save(image: Image.Image, path: Path) -> None:
    encoded = BytesIO()
    image.save(encoded, "JPEG", quality=QUALITY)
    unfinished = path.with_suffix(".part")
    unfinished.write_bytes(encoded.getbuffer())
    unfinished.replace(path)
