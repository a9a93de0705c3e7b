"""JPEGs with a grid: their growth, and the speed of crops, on one core with files in memory.

The plain path decodes only the pixels of the crop, but has to parse the stream from the top to the crop's last row.
With a grid (`feedline pack --grid`) it parses only the intervals that the crop touches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from feedline import images
from feedline.cli.pack.encode import Lengths, rewrite_with_grid
from feedline.images import RandomBox, Recipe
from harness import Contest
from images.corpus import CORPORA, corpus_images, draw_pixels, encode_jpeg

IMAGE_COUNTS = {"500x375": 256, "12-megapixel": 8}
SMALL = RandomBox((0.005, 0.02))


class Gridded(NamedTuple):
    """The images of a corpus, without and with a grid, and the lengths of its intervals."""

    plain: Sequence[bytes]
    jpegs: Sequence[bytes]
    lengths: Sequence[Lengths]


def add_grid(corpus_name: str) -> Gridded:
    corpus = CORPORA[corpus_name]
    plain = [encode_jpeg(draw_pixels(corpus, image)) for image in corpus_images(corpus)[: IMAGE_COUNTS[corpus_name]]]
    made = [rewrite_with_grid(jpeg) for jpeg in plain]
    lengths = [one.lengths for one in made if one.lengths is not None]
    assert len(lengths) == len(plain), next(one.reason for one in made if one.lengths is None)
    return Gridded(plain, [one.jpeg for one in made], lengths)


def growth(corpus_name: str, corpus: Gridded) -> None:
    number = len(corpus.plain)
    plain, grid = (sum(map(len, jpegs)) / number for jpegs in (corpus.plain, corpus.jpegs))
    index = sum(lengths.nbytes for lengths in corpus.lengths) / number
    contest = Contest(f"grid size {corpus_name}", unit="bytes per image", baseline="plain")
    contest.measure("plain", lambda: plain)
    contest.measure("grid", lambda: grid)
    contest.measure("grid and its index", lambda: grid + index)
    contest.run(rounds=1, warm_up=0).publish()


def crops(title: str, corpus: Gridded, crop: RandomBox) -> None:
    recipe = Recipe((224, 224), crop, flip=0.5)
    number = len(corpus.plain)
    out = np.empty((number, *recipe.shape), np.uint8)
    keys = np.arange(number, dtype=np.uint64)
    contest = Contest(f"grid {title}, one core", unit="images/s", baseline="plain")
    contest.add("plain", lambda: images.read_batch(corpus.plain, recipe, out, keys), number)
    contest.add("grid", lambda: images.read_batch(corpus.jpegs, recipe, out, keys, grids=corpus.lengths), number)
    contest.run().publish()


def rewriting(corpus_name: str, corpus: Gridded) -> None:
    contest = Contest(f"grid rewriting {corpus_name}, one core", unit="images/s", baseline="rewrite")
    contest.add("rewrite", lambda: [rewrite_with_grid(jpeg) for jpeg in corpus.plain], len(corpus.plain))
    contest.run(rounds=3).publish()


if __name__ == "__main__":
    for name in IMAGE_COUNTS:
        corpus = add_grid(name)
        growth(name, corpus)
        rewriting(name, corpus)
        crops(f"{name}, RandomResizedCrop(224)", corpus, RandomBox())
        if name == "12-megapixel":
            crops(f"{name}, crops of 0.5 to 2 % of the area", corpus, SMALL)
