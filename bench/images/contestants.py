"""The contestants of each contest, and their settings."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from images.corpus import CORPORA, Corpus
from images.environments import ENVIRONMENTS
from images.peers.task import Task

WORKERS = 2
OWN = "own"
"""The environment that feedline itself is installed in."""


@dataclass(frozen=True, slots=True, eq=False)
class Entrant:
    """`module` of peers/ with `options`, run in `environment`, reading the corpus as `form`.

    `package` is the one whose version is reported. A `limit` is not a loader, but an upper bound for the same work.
    """

    name: str
    environment: str
    module: str
    form: str
    options: dict[str, Any] = field(default_factory=dict)
    package: str = "torch"
    note: str = ""
    limit: bool = False

    @property
    def ours(self) -> bool:
        return self.environment == OWN

    @property
    def version(self) -> str:
        """Version of `package`, from the pins; feedline's own is reported with the machine."""
        return "" if self.ours else f"{self.package} {ENVIRONMENTS[self.environment].pins[self.package]}"


AREA = "shrinks with OpenCV's area filter"
SCALED = "decodes at 1/2 to 1/8 where it can: not Pillow's pixels"
BASELINE = "torch + PIL"

ENTRANTS = (
    Entrant(BASELINE, "torch", "torch_files", "files", {"decoder": "pil"}, "pillow"),
    Entrant("torch + Pillow-SIMD", "pillow-simd", "torch_files", "files", {"decoder": "pil"}, "pillow-simd"),
    Entrant(
        "torch + simplejpeg + OpenCV", "torch", "torch_files", "files", {"decoder": "simplejpeg"}, "simplejpeg", AREA
    ),
    Entrant("WebDataset + PIL", "torch", "peer_webdataset", "tar", {"decoder": "pil"}, "webdataset"),
    Entrant(
        "WebDataset + simplejpeg", "torch", "peer_webdataset", "tar", {"decoder": "simplejpeg"}, "webdataset", AREA
    ),
    Entrant("DALI on the CPU", "dali", "peer_dali", "files", {}, "nvidia-dali-cuda120", "decodes the box only"),
    Entrant(
        "SPDL, its own decoder", "torch", "peer_spdl", "files", {"decoder": "ffmpeg"}, "spdl_core", "FFmpeg's swscale"
    ),
    Entrant("SPDL + simplejpeg", "torch", "peer_spdl", "files", {"decoder": "simplejpeg"}, "spdl_core", AREA),
    Entrant(
        "FFCV, JPEG", "ffcv", "peer_ffcv", "jpg.beton", {"form": "jpg"}, "ffcv",
        f"{AREA}; its file holds images encoded again",
    ),
    Entrant("FFCV, raw pixels", "ffcv", "peer_ffcv", "raw.beton", {"form": "raw"}, "ffcv", f"{AREA}; decodes nothing"),
    Entrant("Mosaic Streaming + PIL", "mosaic", "peer_mosaic", "mds", {"decoder": "pil"}, "mosaicml-streaming"),
    Entrant("LitData + PIL", "torch", "peer_litdata", "litdata", {"decoder": "pil"}, "litdata"),
    Entrant("Grain + PIL", "torch", "peer_grain", "files", {"decoder": "pil"}, "grain"),
    Entrant(
        "libjpeg-turbo alone", "torch", "full_decode", "files", {}, "simplejpeg",
        "every image decoded whole in plain threads: no crop, no resize, no batch", limit=True,
    ),
    Entrant("feedline, threads", OWN, "peer_feedline", "files", {"form": "files", "workers": "thread"}),
    Entrant("feedline, processes", OWN, "peer_feedline", "files", {"form": "files", "workers": "process"}),
    Entrant("feedline, auto", OWN, "peer_feedline", "files", {"form": "files", "workers": "auto"}),
    Entrant(
        "feedline, threads, scaled decode", OWN, "peer_feedline", "files",
        {"form": "files", "workers": "thread", "scaled": True}, note=SCALED,
    ),
    Entrant(
        "feedline, grid-packed tar, scaled decode", OWN, "peer_feedline", "grid", {"form": "grid", "scaled": True},
        note=SCALED,
    ),
    Entrant("feedline, tar shards", OWN, "peer_feedline", "tar", {"form": "tar"}),
    Entrant(
        "feedline, grid-packed tar", OWN, "peer_feedline", "grid", {"form": "grid"},
        note="ordinary tars of ordinary JPEGs, rewritten without loss by `feedline pack --grid`",
    ),
    Entrant(
        "feedline, decoded tar", OWN, "peer_feedline", "decoded", {"form": "decoded"},
        note="pixels, written by `feedline pack --decoded`; decodes nothing",
    ),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Event:
    """One contest: the same work on a corpus by all entrants except those in `without`."""

    name: str
    title: str
    corpus: Corpus
    recipe: str
    scale: tuple[float, float]
    size: int
    output: str
    batch: int
    images: int
    without: frozenset[str] = frozenset()
    """Names of entrants that do not take part."""
    workers: int = WORKERS

    def task(self, batches: int | None = None) -> Task:
        """The work of one turn, or of a turn with this many batches."""
        images = self.images if batches is None else min(self.images, batches * self.batch)
        return Task(
            str(self.corpus.root), self.corpus.image_count, self.recipe, self.size, self.scale, self.output,
            self.batch, images, self.workers,
        )  # fmt: skip

    def entrants(self, only: Iterable[str] = ()) -> list[Entrant]:
        """The participants whose names contain one of `only`, or all if it is empty."""
        words = [word.lower() for word in only]
        able = [entrant for entrant in ENTRANTS if entrant.name not in self.without]
        return [e for e in able if not words or any(word in e.name.lower() for word in words)]


WHOLE = (0.08, 1.0)
SMALL = (0.005, 0.05)
"""Of 12 megapixels: boxes of about 210 to 900 pixels a side."""
NOT_LARGE = frozenset({
    "FFCV, raw pixels", "feedline, decoded tar",  # pixels of such photographs would fill the disk
    "WebDataset + PIL", "WebDataset + simplejpeg", "Mosaic Streaming + PIL", "LitData + PIL", "Grain + PIL",
    "SPDL, its own decoder",  # their additions to a decoder cost nothing here, and their turns are long
})  # fmt: skip

MANY = frozenset(entrant.name for entrant in ENTRANTS) - {
    BASELINE, "DALI on the CPU", "Mosaic Streaming + PIL", "LitData + PIL",
    "feedline, threads", "feedline, processes", "feedline, tar shards",
}  # fmt: skip

NEVER_SCALED = frozenset({"feedline, threads, scaled decode", "feedline, grid-packed tar, scaled decode"})
"""Entrants for which images are too small to be decoded at a fraction of their size."""

_SMALL, _LARGE, _TINY = CORPORA["500x375"], CORPORA["12-megapixel"], CORPORA["64x64"]

EVENTS = (
    Event(
        "images 500x375, uint8", "500 × 375: random resized crop to 224, uint8",
        _SMALL, "random", WHOLE, 224, "uint8", 256, 1536, NEVER_SCALED,
    ),
    Event(
        "images 500x375, 8 workers", "500 × 375 with 8 workers each, on two cores: comparison of memory",
        _SMALL, "random", WHOLE, 224, "uint8", 256, 4096, MANY, 8,
    ),
    Event(
        "images 500x375, float32", "500 × 375: random resized crop to 224, normalized float32",
        _SMALL, "random", WHOLE, 224, "float32", 128, 1024,  # with 256, all entrants together would fill 24 GiB
        NEVER_SCALED,
    ),
    Event(
        "images 12-megapixel, validation", "12 megapixels: shorter side to 256, center crop 224",
        _LARGE, "center", WHOLE, 224, "uint8", 8, 32, NOT_LARGE,
    ),
    Event(
        "images 12-megapixel, small crops", "12 megapixels: random crops of 0.5 to 5 % of the area, to 224",
        _LARGE, "random", SMALL, 224, "uint8", 8, 32, NOT_LARGE,
    ),
    Event(
        "images 64x64, uint8", "64 × 64 thumbnails: random resized crop to 56",
        _TINY, "random", WHOLE, 56, "uint8", 256, 4096, NEVER_SCALED,
    ),
)  # fmt: skip
