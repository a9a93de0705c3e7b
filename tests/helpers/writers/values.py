"""The samples that the peers write and the tests expect, created on both sides."""

from __future__ import annotations

import io
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from PIL import Image

COUNT = 20

MDS_COLUMNS = {
    "int": "int",
    "str": "str",
    "bytes": "bytes",
    **{name: name for name in ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64")},
    **{name: name for name in ("float16", "float32", "float64", "str_int", "str_float", "str_decimal", "json")},
    "any_array": "ndarray",
    "int16_array": "ndarray:int16",
    "wide_array": "ndarray:uint8",
    "fixed_array": "ndarray:float32:2,3",
    "jpeg": "jpeg",
    "png": "png",
    "pil": "pil",
    "pngs": "list[png]",
    "jpegs": "jpeg_array",
}


def random_image(seed: int, size: tuple[int, int] = (9, 7)) -> Image.Image:
    """Noise, of a width and a height."""
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8)
    return Image.fromarray(pixels)


def jpeg(seed: int, size: tuple[int, int] = (9, 7)) -> bytes:
    """The bytes of a JPEG file."""
    file = io.BytesIO()
    random_image(seed, size).save(file, "JPEG", quality=95)
    return file.getvalue()


def mds_samples() -> Iterator[dict[str, Any]]:
    """One for each column of MDS_COLUMNS."""
    for i in range(COUNT):
        numbers = {name: i for name in MDS_COLUMNS if name.startswith(("uint", "int", "float")) and "_" not in name}
        yield {
            **numbers,
            "str": "é" * i,
            "bytes": bytes(range(i)),
            "str_int": -(10**30) - i,
            "str_float": i / 7,
            "str_decimal": Decimal(i) / 7,
            "json": {"list": [i, None, "ü"]},
            "any_array": np.arange(i + 1, dtype=np.int32).reshape(1, -1),
            "int16_array": np.full((2, i + 1), -i, np.int16),
            "wide_array": np.full((1, 300), i, np.uint8),
            "fixed_array": np.full((2, 3), i / 3, np.float32),
            **{name: random_image(i) for name in ("jpeg", "png", "pil")},
            "pngs": [random_image(i), random_image(i + 1, (3, 4))][: i % 3],
            "jpegs": [jpeg(i), jpeg(i + 1)],
        }


TEXT_COLUMNS = {"id": "int", "score": "float", "text": "str"}


def text_samples() -> Iterator[dict[str, Any]]:
    """Samples of Mosaic's shards of text, which quote nothing."""
    for i in range(COUNT):
        yield {"id": i - 5, "score": i / 7, "text": 'ü"' * i}


def litdata_samples(kind: str) -> list[Any]:
    """The samples of each of LitData's folders."""
    return [_LITDATA[kind](i) for i in range(COUNT)]


def _leaves(i: int) -> dict[str, Any]:
    return {
        "int": i - 5,
        "float": i / 3,
        "bool": i % 2 == 0,
        "str": "é" * i,
        "bytes": bytes(range(i)),
        "flat": torch.arange(i + 1, dtype=torch.int16),
        "tensor": torch.full((2, i), i / 7, dtype=torch.float16),
        "none_of_it": torch.empty(0, 3),
        "vector": np.arange(i, dtype=np.uint16),
        "matrix": np.full((2, 3), i / 3),
        "flags": torch.tensor([[True, i % 2 == 0]]),
        "pil": random_image(i),
    }


_LITDATA = {
    "leaves": _leaves,
    "tuples": lambda i: (i, [float(i), {"x": np.full(3, i)}]),
    "bare": lambda i: torch.full((2, 2), i),
    "rows": lambda i: {"id": i, "text": None if i % 3 == 0 else "ü" * i, "more": {"list": [i] * (i % 3), "flag": True}},
    "mixed": lambda i: {
        "x": torch.full((2, 2), i),
        "mapping": {"words": ["a", "b"] * (i % 2), "deep": [{"k": i, "v": None}]},
    },
    "batch": lambda i: {"x": torch.arange(40), "id": i},
    "chunk": lambda i: {"x": torch.arange(40), "id": i},
    "sample": lambda i: {"x": torch.arange(40), "id": i},
    "tokens": lambda i: torch.arange(7 + i, dtype=torch.int64) + 100 * i,
    "words": lambda i: np.arange(7 + i, dtype=np.uint16) + 100 * i,
}
LITDATA_KINDS = tuple(_LITDATA)


def examples() -> list[dict[str, Any]]:
    """The examples in the TFRecord file, as the writer of the package `tfrecord` takes them."""
    return [
        {
            "label": (i - 3, "int"),
            "box": ([i / 2, 0.0, -1.5, 1e30], "float"),
            "many": (list(range(-i, 40 * i, 7)) or [0], "int"),
            "name": (f"größe {i}".encode(), "byte"),
            "image": (jpeg(i, (24, 18)), "byte"),
            "raw": (np.full((2, 3), i, np.uint8).tobytes(), "byte"),
        }
        for i in range(COUNT)
    ]


def sequences() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Context and feature lists of sequence examples of 0 to 3 steps, as `tfrecord` takes them."""
    return [
        (
            {"id": (i, "int"), "tags": ([f"tag {k}".encode() for k in range(i)], "byte")}
            | ({"score": (i / 2, "float")} if i % 2 else {}),
            {
                "boxes": ([[float(t), 1, 2, 3] for t in range(i)], "float"),
                "tokens": ([list(range(t + 1)) for t in range(i)], "int"),
                "frames": ([[jpeg(t)] for t in range(i)], "byte"),
            },
        )
        for i in range(4)
    ]
