"""The pictures that installed packages ship, with whom to thank for them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feedline.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class Photo:
    """One photograph inside an installed package."""

    label: str
    package: str
    file: str
    title: str
    credit: str
    licence: str
    origin: str

    def path(self) -> Path | None:
        """Where the file lies; None when the package, or this file of it, is not installed."""
        return _inside(self.package, self.file)


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


def photos() -> list[Photo]:
    """The photographs that are installed here; at least two, or `MissingExtraError`."""
    found = [photo for photo in PHOTOS if photo.path()]
    if len(found) < 2:
        raise MissingExtraError(
            "the demo cuts up photographs that scikit-learn, scikit-image and matplotlib ship, and too few of them "
            "are installed. Install them with: pip install 'feedline[demo]'"
        )
    return found


def pixels(photo: Photo) -> Image.Image:
    """The photograph, decoded, as RGB."""
    path = photo.path()
    if path is None:
        raise MissingExtraError(f"{photo.file} of the package {photo.package} is not there any more")
    with Image.open(path) as image:
        return image.convert("RGB")


def digits() -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """scikit-learn's handwritten digits: pictures uint8 (N, 8, 8) and their digits; none when it is not installed."""
    path = _inside("sklearn", "datasets/data/digits.csv.gz")
    if path is None:
        return np.empty((0, 8, 8), np.uint8), np.empty(0, np.int64)
    table = np.loadtxt(path, delimiter=",")
    return (table[:, :-1] * (255 / 16)).astype(np.uint8).reshape(-1, 8, 8), table[:, -1].astype(np.int64)


def _inside(package: str, file: str) -> Path | None:
    """A file of a package that is not imported for it: scikit-image alone would take a second."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / file
    return path if path.is_file() else None
