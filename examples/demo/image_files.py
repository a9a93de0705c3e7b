"""The images of the demo: crops of photographs, and handwritten digits, as JPEG files in class folders."""

from __future__ import annotations

import importlib.util
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

import feedline as fl

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from numpy.typing import NDArray

RECIPE = "images-2"
"""Name of the folder. Change it with the way images are made, so that old and new files never mix."""

QUALITY = 90
DIGIT_PIXELS = 128


@dataclass(frozen=True, slots=True)
class Photo:
    """One photograph inside an installed package."""

    label: str
    package: str
    file: str
    title: str
    credit: str
    license: str
    origin: str

    def path(self) -> Path | None:
        """Path of the file; None when the package, or this file of it, is not installed."""
        return _path_in_package(self.package, self.file)

    def load(self) -> Image.Image:
        """The photograph, decoded, as RGB."""
        path = self.path()
        if path is None:
            raise fl.errors.MissingExtraError(
                f"{self.file} is missing from the package {self.package}. Reinstall it with: {_INSTALL}"
            )
        with Image.open(path) as image:
            return image.convert("RGB")


_INSTALL = "pip install matplotlib scikit-image scikit-learn"

_CC_BY = "CC BY 2.0 (https://creativecommons.org/licenses/by/2.0/)"
_CC0 = "CC0 1.0"
_PUBLIC = "public domain"

PHOTOS = (
    Photo(
        "astronaut",
        "skimage",
        "data/astronaut.png",
        "Eileen Collins",
        "NASA",
        _PUBLIC,
        "https://flic.kr/p/r9qvLn",
    ),
    Photo("cat", "skimage", "data/chelsea.png", "Chelsea the cat", "Stefan van der Walt", _CC0, "scikit-image"),
    Photo(
        "china",
        "sklearn",
        "datasets/images/china.jpg",
        "china.jpg",
        "danielbuechele",
        _CC_BY,
        "https://www.flickr.com/photos/danielbuechele/6061409035/",
    ),
    Photo("coffee", "skimage", "data/coffee.png", "A cup of coffee", "Rachel Michetti", _CC0, "scikit-image"),
    Photo(
        "flower",
        "sklearn",
        "datasets/images/flower.jpg",
        "flower.jpg",
        "vultilion",
        _CC_BY,
        "https://www.flickr.com/photos/vultilion/6056698931/",
    ),
    Photo(
        "galaxies",
        "skimage",
        "data/hubble_deep_field.jpg",
        "Hubble eXtreme Deep Field",
        "NASA",
        _PUBLIC,
        "http://hubblesite.org/newscenter/archive/releases/2012/37/image/a/",
    ),
    Photo(
        "hopper",
        "matplotlib",
        "mpl-data/sample_data/grace_hopper.jpg",
        "Grace Hopper",
        "United States Navy",
        _PUBLIC,
        "matplotlib",
    ),
    Photo(
        "retina",
        "skimage",
        "data/retina.jpg",
        "Fundus photograph of a normal left eye",
        "Mikael Häggström",
        _CC0,
        "https://commons.wikimedia.org/wiki/File:Fundus_photograph_of_normal_left_eye.jpg",
    ),
    Photo(
        "rocket",
        "skimage",
        "data/rocket.jpg",
        "Launch of DSCOVR on a Falcon 9",
        "SpaceX",
        _PUBLIC,
        "https://www.flickr.com/photos/spacexphotos/16511594820/",
    ),
)

DIGITS_CREDIT = (
    "E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits (test set), UCI Machine Learning "
    "Repository, CC BY 4.0 (https://creativecommons.org/licenses/by/4.0/), as shipped by scikit-learn"
)


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The `number`-th image of a class."""

    label: str
    number: int

    @property
    def path(self) -> str:
        """Path below the root of the image set; the folder is named after the class."""
        return f"{self.label}/{self.label}-{self.number:05d}.jpg"


@dataclass(frozen=True, slots=True)
class ImageSet:
    """A set of image files. Each file has the same bytes in small and large sets."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[ImageFile, ...]

    def missing(self) -> list[ImageFile]:
        """The files that do not exist yet."""
        return [file for file in self.files if not (self.root / file.path).exists()]

    def nbytes(self) -> int:
        """Total size of the files in bytes."""
        return sum((self.root / file.path).stat().st_size for file in self.files)


def plan_images(directory: Path, count: int) -> ImageSet:
    """Spread `count` images evenly over the classes; crops of photographs replace digits that run out."""
    photos = [photo.label for photo in installed_photos()]
    available = {label: len(scans) for label, scans in _digits_by_class().items()}
    even = count // (len(photos) + len(available))
    numbers = {label: min(even, number) for label, number in available.items()}
    rest = count - sum(numbers.values())
    numbers |= {label: rest // len(photos) + (i < rest % len(photos)) for i, label in enumerate(photos)}
    files = tuple(ImageFile(label, i) for label in sorted(numbers) for i in range(numbers[label]))
    return ImageSet(directory / RECIPE, tuple(sorted(numbers)), files)


def write_images(images: ImageSet, files: list[ImageFile], tick: Callable[[], None]) -> None:
    """Write `files` and call `tick` after each. An interrupted run leaves complete files only."""
    for label in images.classes:
        (images.root / label).mkdir(parents=True, exist_ok=True)
    (images.root / "ATTRIBUTION.md").write_text(attribution(), encoding="utf-8")
    photos = {photo.label: photo.load() for photo in installed_photos()}
    digits = _digits_by_class()

    def make(file: ImageFile) -> None:
        is_digit = file.label in digits
        image = _enlarge(digits[file.label][file.number]) if is_digit else _random_crop(photos, file)
        _save(image, images.root / file.path)

    with ThreadPoolExecutor() as pool:  # Pillow resizes and encodes without the GIL
        for _ in pool.map(make, files):
            tick()


def attribution() -> str:
    """Text of ATTRIBUTION.md: sources, authors and licenses of the images."""
    rows = (f"| {p.label} | {p.title} | {p.credit} | {p.license} | {p.origin} |" for p in installed_photos())
    return _ATTRIBUTION.format(quality=QUALITY, pixels=DIGIT_PIXELS, photos="\n".join(rows), digits=DIGITS_CREDIT)


_ATTRIBUTION = """\
# Sources of these images

They were made by feedline's `make demo` from images that installed Python packages ship. They are **not** a data
set of thousands of photographs: every file in a photograph's folder is a random crop of that one photograph, resized
and encoded again as JPEG (quality {quality}); every digit is a scan of 8×8 pixels, enlarged to {pixels}×{pixels} and
encoded as JPEG. They show how fast images are fed, not how well a model learns.

| folder | image | by | license | from |
|---|---|---|---|---|
{photos}

`digit-*`: {digits}.
"""


def installed_photos() -> list[Photo]:
    """The photographs that are installed; at least two, or `MissingExtraError`."""
    photos = [photo for photo in PHOTOS if photo.path()]
    if len(photos) < 2:
        raise fl.errors.MissingExtraError(
            "the demo crops photographs that scikit-learn, scikit-image and matplotlib ship, and too few of them are "
            f"installed. Install them with: {_INSTALL}"
        )
    return photos


def load_digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Handwritten digits of scikit-learn: scans, uint8 (N, 8, 8), and labels; empty if not installed."""
    path = _path_in_package("sklearn", "datasets/data/digits.csv.gz")
    if path is None:
        return np.empty((0, 8, 8), np.uint8), np.empty(0, np.int64)
    table = np.loadtxt(path, delimiter=",")
    return (table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _digits_by_class() -> dict[str, NDArray[np.uint8]]:
    scans, digits = load_digits()
    return {f"digit-{digit}": scans[digits == digit] for digit in np.unique(digits)}


def _enlarge(scan: NDArray[np.uint8]) -> Image.Image:
    return Image.fromarray(scan).resize((DIGIT_PIXELS, DIGIT_PIXELS), Image.Resampling.BICUBIC)


def _random_crop(photos: Mapping[str, Image.Image], file: ImageFile) -> Image.Image:
    """A crop with 35 to 100 % of each side, resized to a longer side of 500 to 700 pixels."""
    photo = photos[file.label]
    rng = np.random.default_rng([zlib.crc32(file.label.encode()), file.number])
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


def _path_in_package(package: str, file: str) -> Path | None:
    # find_spec does not import the package: scikit-image alone would take a second.
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / file
    return path if path.is_file() else None
