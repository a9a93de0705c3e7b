"""Images decoded by two Ray actors: feedline's Ray pool and Ray Data's `iter_torch_batches`, on the same cluster.

Both decode and crop the same JPEGs with the same function, into batches of 32 in order. The figures count from the
first batch to the last, so neither pays for the start of its actors. Ray Data starts new ones for each epoch.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image

import feedline as fl
from harness import Contest

BATCH = 32
BATCHES = 16
SIDE = 224


def encode(number: int) -> bytes:
    """A JPEG of 500 x 375 that is neither flat nor noise."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    file = io.BytesIO()
    small.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(data: bytes) -> np.ndarray:
    """The middle of the image, uint8, (channels, height, width)."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((256, 256))
    return np.ascontiguousarray(np.asarray(image)[16 : 16 + SIDE, 16 : 16 + SIDE].transpose(2, 0, 1))


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, images: list[bytes]) -> None:
        self.images = images

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(decode(self.images[index % len(self.images)]))


class Decoder:
    """What Ray Data calls for each batch of numbers."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images
        torch.set_num_threads(1)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"image": np.stack([decode(self.images[number % len(self.images)]) for number in batch["id"]])}


def rate(batches: Iterable[torch.Tensor]) -> float:
    """Images per second after the first batch."""
    iterator = iter(batches)
    next(iterator)
    started, count = perf_counter(), 0
    for batch in iterator:
        assert batch.shape == (BATCH, 3, SIDE, SIDE), batch.shape
        count += len(batch)
    return count / (perf_counter() - started)


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    warnings.filterwarnings("ignore")
    import ray
    import ray.data

    ray.init("local", num_cpus=4, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    images = [encode(number) for number in range(64)]
    blocks = ray.data.range(BATCH * BATCHES, override_num_blocks=BATCHES)
    loader = fl.DataLoader(
        Images(images), BATCH, num_workers=2, worker_method="ray", seed=0, persistent_workers=True, prefetch_factor=4,
        accelerate=False,
    )  # fmt: skip

    def ray_data() -> float:
        two = ray.data.ActorPoolStrategy(size=2)
        built = blocks.map_batches(Decoder, batch_size=BATCH, compute=two, num_cpus=1, fn_constructor_args=(images,))
        return rate(each["image"] for each in built.iter_torch_batches(batch_size=BATCH, prefetch_batches=4))

    contest = Contest("images from two Ray actors", unit="images/s", baseline="Ray Data")
    contest.measure("Ray Data", ray_data)
    contest.measure("feedline", lambda: rate(loader))
    contest.run(rounds=int(sys.argv[1]) if sys.argv[1:] else 5).publish("ray")
    loader.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
