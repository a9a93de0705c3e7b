"""Conformance checks of image transforms."""

from __future__ import annotations

import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image

from feedline.core.rng import SampleRng, derive_each
from feedline.core.tensors import allocate_tensor
from feedline.testing.difference import check_same
from feedline.transforms import Compose, Transform

_SIZES = ((96, 128), (128, 96), (112, 112), (150, 97))


def check_transform(transform: Any) -> None:
    """Raise `AssertionError` for the first promise that a transform of images breaks.

    `transform` is a `Transform`, or a callable that a `Compose` may hold. On RGB images of about 100 x 100 pixels, the
    function checks that:

    - the result depends only on the image and the random key, after any other calls and in any thread;
    - the input image does not change, and shares no memory with the result;
    - arrays, PIL images and PNG files with the same pixels give the same result;
    - the transform can be pickled;
    - a batch, if the plan of the transform supports batches, equals the single samples.
    """
    transform = transform if isinstance(transform, Transform) else Compose([transform])
    images = [_image(number, size) for number, size in enumerate(_SIZES)]
    keys = derive_each((5,), np.arange(len(images)))
    expected = _apply(transform, images, keys)
    _check_input(transform, images, keys)
    _check_pure(transform, images, keys, expected)
    _check_sources(transform, images, keys, expected)
    _check_pickle(transform, images, keys, expected)
    _check_threads(transform, images, keys, expected)
    _check_batch(transform, images, keys, expected)


def _image(number: int, size: tuple[int, int]) -> Any:
    """RGB image, uint8 (height, width, 3), with smooth areas and noise."""
    rng = np.random.default_rng(number)
    height, width = size
    coarse = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
    soft = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    return (soft + rng.integers(-16, 17, soft.shape)).clip(0, 255).astype(np.uint8)


def _png(image: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()


def _apply(transform: Transform, sources: Any, keys: Any) -> list[Any]:
    return [_as_tensor(transform(source, SampleRng(key))) for source, key in zip(sources, keys.tolist(), strict=True)]


def _as_tensor(sample: Any) -> Any:
    """Arrays and PIL images as tensors; other samples unchanged."""
    if isinstance(sample, (np.ndarray, Image.Image)):
        return torch.from_numpy(np.array(sample))
    return sample


def _check_input(transform: Transform, images: list[Any], keys: Any) -> None:
    for image, key in zip(images, keys.tolist(), strict=True):
        given = image.copy()
        result = transform(given, SampleRng(key))
        assert np.array_equal(given, image), "the image that a transform gets must be left unchanged"
        if isinstance(result, (np.ndarray, torch.Tensor)):
            shares = np.may_share_memory(given, np.asarray(result))
            assert not shares, "the result of a transform must not share memory with the image that it gets"


def _check_pure(transform: Transform, images: list[Any], keys: Any, expected: list[Any]) -> None:
    torch.manual_seed(0)
    backwards = _apply(transform, images[::-1], keys[::-1])[::-1]
    promise = "the same image and the same key must give the same sample (draw from the rng of the call)"
    check_same(expected, backwards, promise)


def _check_sources(transform: Transform, images: list[Any], keys: Any, expected: list[Any]) -> None:
    sources = {
        "PIL images": [Image.fromarray(image) for image in images],
        "PNG files": [_png(image) for image in images],
    }
    for name, each in sources.items():
        check_same(expected, _apply(transform, each, keys), f"{name} must give the same samples as arrays")


def _check_pickle(transform: Transform, images: list[Any], keys: Any, expected: list[Any]) -> None:
    try:
        copy = pickle.loads(pickle.dumps(transform))
    except Exception as error:
        raise AssertionError(f"the transform must survive pickling, to reach worker processes: {error!r}") from error
    check_same(expected, _apply(copy, images, keys), "an unpickled transform must give the same samples")
    check_same(expected, _apply(transform, images, keys), "pickling must not change the transform")


def _check_threads(transform: Transform, images: list[Any], keys: Any, expected: list[Any]) -> None:
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: _apply(transform, images, keys), range(8)):
            check_same(expected, got, "several threads must be able to use a transform at once")


def _check_batch(transform: Transform, images: list[Any], keys: Any, expected: list[Any]) -> None:
    plan = transform.plan
    if not plan.batchable:
        return
    for threads in (1, 3):
        batch = plan.batch([_png(image) for image in images], keys, allocate_tensor, threads=threads)
        promise = f"a batch made by {threads} thread(s) must equal the single samples"
        check_same(expected, list(batch.unbind()), promise)
