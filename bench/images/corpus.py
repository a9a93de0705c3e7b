"""The images of the contests: parts of a few real photographs, with grain, as JPEG files of one size.

No corpus of thousands of photographs can be included or downloaded here, so one is created. Every file is a different
part of a photograph that installed packages ship, enlarged or reduced to the corpus's size. Enlarging removes detail;
film grain adds enough for the bytes per image to match a camera's JPEG, because decoding time depends on bytes. The
files depend on the versions of the packages only, not on the order in which they are made.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata
from io import BytesIO
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from feedline.core.rng import SampleRng, derive
from feedline.loader.monitoring.resources import usable_cpus
from image_files import installed_photos

CACHE = Path(__file__).parents[2] / "build" / "bench" / "images"
RECIPE = 1
"""Part of the manifest: images of another recipe are created again."""

QUALITY = 90
DARK = {"galaxies", "retina"}
"""Mostly black photographs, of which the grain would leave nothing recognizable."""

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Corpus:
    """`image_count` JPEG files of `size` (width, height) in class folders, of about `nbytes` each.

    `nbytes` is None for any size. `part` is the smallest and largest share of a photograph's side that an image shows.
    """

    name: str
    image_count: int
    size: tuple[int, int]
    nbytes: int | None
    part: tuple[float, float]

    @property
    def root(self) -> Path:
        """The folder of the files and of all other forms of them."""
        return CACHE / self.name

    @property
    def files(self) -> Path:
        return self.root / "files"


CORPORA = {
    corpus.name: corpus
    for corpus in (
        Corpus("500x375", 4000, (500, 375), 110_000, (0.55, 1.0)),
        Corpus("12-megapixel", 64, (4000, 3000), 4_000_000, (0.7, 1.0)),
        Corpus("64x64", 20_000, (64, 64), None, (0.2, 1.0)),
    )
}


@dataclass(frozen=True, slots=True)
class CorpusImage:
    """The `number`-th image of its class, which is the name of the photograph."""

    label: str
    number: int

    @property
    def file(self) -> str:
        return f"{self.label}/{self.label}-{self.number:05d}.jpg"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The finished corpus: size and number of files, their classes, the mean of all pixels (red, green, blue)."""

    corpus: str
    recipe: int
    pillow: str
    image_count: int
    nbytes: int
    classes: tuple[str, ...]
    mean: tuple[float, float, float]


def corpus_images(corpus: Corpus) -> list[CorpusImage]:
    """Every image of the corpus, classes in turns."""
    labels = sorted(_photos())
    return [CorpusImage(labels[i % len(labels)], i // len(labels)) for i in range(corpus.image_count)]


def manifest(corpus: Corpus) -> Manifest | None:
    """The manifest of the last complete run, or None if it had another recipe or size."""
    path = corpus.root / "manifest.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text(encoding="utf-8"))
    found = Manifest(**{**data, "classes": tuple(data["classes"]), "mean": tuple(data["mean"])})
    return found if (found.recipe, found.image_count) == (RECIPE, corpus.image_count) else None


def write(corpus: Corpus, tick: Callable[[], None] = lambda: None) -> Manifest:
    """Make all files, calling `tick` after each, and then the manifest."""
    chosen = corpus_images(corpus)
    for label in {image.label for image in chosen}:
        (corpus.files / label).mkdir(parents=True, exist_ok=True)

    def make(image: CorpusImage) -> tuple[int, NDArray[np.float64]]:
        pixels = draw_pixels(corpus, image)
        data = encode_jpeg(pixels)
        (corpus.files / image.file).write_bytes(data)
        tick()
        return len(data), pixels.mean(axis=(0, 1))

    with ThreadPoolExecutor(usable_cpus()) as pool:  # Pillow and NumPy do most of it without the GIL
        made = list(pool.map(make, chosen))
    return _describe(corpus, chosen, made)


def draw_pixels(corpus: Corpus, image: CorpusImage) -> Pixels:
    """The pixels of one image, a function of the corpus's recipe and the image's name."""
    plain = _part(corpus, image)
    if corpus.nbytes is None:
        return plain
    return _add_grain(plain, _grain(corpus, image.label), image)


def encode_jpeg(pixels: Pixels) -> bytes:
    """A usual JPEG file: baseline, color at half the resolution."""
    buffer = BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=QUALITY, subsampling="4:2:0")
    return buffer.getvalue()


def attribution() -> str:
    """The authors of the photographs."""
    rows = [f"- {p.label}: {p.title}, {p.credit}, {p.license}, {p.origin}" for p in installed_photos()]
    head = "Every file is a part of one of these photographs, resized, with film grain, encoded again:\n\n"
    return head + "\n".join(rows) + "\n"


@cache
def _photos() -> dict[str, Image.Image]:
    return {photo.label: photo.load() for photo in installed_photos() if photo.label not in DARK}


def _part(corpus: Corpus, image: CorpusImage) -> Pixels:
    """A part of the photograph in the corpus's aspect ratio, resized, mirrored half of the time."""
    photo, (width, height) = _photos()[image.label], corpus.size
    rng = SampleRng(derive(corpus.name, image.label, image.number)).generator
    zoom = min(photo.width / width, photo.height / height) * rng.uniform(*corpus.part)
    left = rng.uniform(0, photo.width - width * zoom)
    top = rng.uniform(0, photo.height - height * zoom)
    box = (left, top, left + width * zoom, top + height * zoom)
    pixels = np.asarray(photo.resize(corpus.size, Image.Resampling.BICUBIC, box=box))
    return pixels[:, ::-1] if rng.random() < 0.5 else pixels


def _add_grain(pixels: Pixels, strength: float, image: CorpusImage) -> Pixels:
    """The image with normal noise of standard deviation `strength`, equal in all channels."""
    rng = SampleRng(derive(image.label, image.number, "grain")).generator
    noise = rng.standard_normal(pixels.shape[:2], np.float32)[..., None] * np.float32(strength)
    return np.clip(pixels + noise, 0, 255).astype(np.uint8)


@cache
def _grain(corpus: Corpus, label: str) -> float:
    """The strength of grain that gives a photograph's images the intended size, by bisection."""
    assert corpus.nbytes is not None
    tries = [_window(_part(corpus, image)) for image in (CorpusImage(label, number) for number in range(3))]
    wanted = corpus.nbytes * tries[0].shape[0] * tries[0].shape[1] / (corpus.size[0] * corpus.size[1])
    low, high = 0.0, 40.0
    for _ in range(8):
        middle = (low + high) / 2
        size = np.mean([len(encode_jpeg(_add_grain(tried, middle, CorpusImage(label, 0)))) for tried in tries])
        low, high = (middle, high) if size < wanted else (low, middle)
    return low


def _window(pixels: Pixels) -> Pixels:
    """The middle, in place of an image that takes long to encode."""
    height, width = (min(side, 1000) for side in pixels.shape[:2])
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return pixels[top : top + height, left : left + width]


def _describe(corpus: Corpus, chosen: Iterable[CorpusImage], made: list[tuple[int, NDArray[np.float64]]]) -> Manifest:
    red, green, blue = np.mean([mean for _, mean in made], axis=0).round(3).tolist()
    nbytes = sum(size for size, _ in made)
    classes = tuple(sorted({image.label for image in chosen}))
    manifest = Manifest(corpus.name, RECIPE, metadata.version("pillow"), len(made), nbytes, classes, (red, green, blue))
    (corpus.root / "ATTRIBUTION.md").write_text(attribution(), encoding="utf-8")
    (corpus.root / "manifest.json").write_text(json.dumps(asdict(manifest), indent=2) + "\n", encoding="utf-8")
    return manifest
