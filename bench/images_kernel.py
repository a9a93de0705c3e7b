"""The image kernels on one core with files in memory, compared with Pillow and with a plain decode.

Pillow gets the same boxes. The plain decode by libjpeg-turbo produces every pixel and does nothing with it. The rows of
the kernels are cropped, resized and normalized, with Pillow's pixels: pixels outside the crop are not decoded. With
`scaled_decode`, where rows are no longer Pillow's, a crop that is shrunk is decoded at a fraction of its size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO

import numpy as np
import torch
from PIL import Image

from feedline import images
from feedline.images import Recipe, native
from harness import Contest
from images.corpus import CORPORA, corpus_images, draw_pixels, encode_jpeg

IMAGE_COUNTS = {"500x375": 256, "12-megapixel": 4, "64x64": 4000}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LAWS = {"RandomResizedCrop": images.RandomBox(), "Resize, CenterCrop": images.CenterBox(256)}


def pillow(datas: Sequence[bytes], recipe: Recipe, keys: np.ndarray) -> None:
    """Each image decoded whole, as in torchvision's datasets."""
    for data, key in zip(datas, keys.tolist(), strict=True):
        image = Image.open(BytesIO(data)).convert("RGB")
        plan = images.geometry(recipe, key, *image.size)
        x, y, width, height = plan.box
        resized = image.crop((x, y, x + width, y + height)).resize(plan.full[::-1], Image.Resampling.BILINEAR)
        left, top, width, height = plan.window
        np.asarray(resized.crop((left, top, left + width, top + height)))


def plain_decode(datas: Sequence[bytes], size: tuple[int, int]) -> None:
    """All pixels of each image, always into the same memory."""
    out = np.empty((size[1], size[0], 3), np.uint8)
    for data in datas:
        assert native.native.image_decode(data, out, False) is None  # by libjpeg alone


def contest(corpus_name: str, law_name: str, side: int) -> None:
    corpus = CORPORA[corpus_name]
    count = IMAGE_COUNTS[corpus_name]
    datas = [encode_jpeg(draw_pixels(corpus, image)) for image in corpus_images(corpus)[:count]]
    keys = np.arange(count, dtype=np.uint64)
    levels = Recipe((side, side), LAWS[law_name], flip=0.5)
    scaled = replace(levels, scaled_decode=True)
    floats = replace(levels, layout="CHW", dtype=torch.float32, mean=MEAN, std=STD)
    outs = {
        recipe: np.empty((count, *recipe.shape), dtype)
        for recipe, dtype in ((levels, "u1"), (scaled, "u1"), (floats, "f4"))
    }
    title = f"images kernel {corpus_name}, {law_name}({side}), one core"
    match = Contest(title, unit="images/s", baseline="libjpeg-turbo, plain decode")
    match.add("libjpeg-turbo, plain decode", lambda: plain_decode(datas, corpus.size), count)
    match.add("Pillow, decode and resize", lambda: pillow(datas, levels, keys), count)
    match.add("feedline, uint8 HWC", lambda: images.read_batch(datas, levels, outs[levels], keys), count)
    match.add("feedline, scaled decode", lambda: images.read_batch(datas, scaled, outs[scaled], keys), count)
    match.add("feedline, float32 CHW", lambda: images.read_batch(datas, floats, outs[floats], keys), count)
    match.run().publish("pillow")


if __name__ == "__main__":
    contest("500x375", "RandomResizedCrop", 224)
    contest("500x375", "Resize, CenterCrop", 224)
    contest("12-megapixel", "RandomResizedCrop", 224)
    contest("12-megapixel", "Resize, CenterCrop", 224)
    contest("64x64", "RandomResizedCrop", 64)
