"""Images decoded by two Ray actors: feedline's Ray pool and Ray Data's `iter_torch_batches`, on the same cluster.

Both decode and crop the same JPEGs with the same function, into batches of 32 in order, in two actors of one CPU each.
Each sample tells when and where it was decoded: the figures count from the moment at which both actors decode, until
the last batch is delivered, and only what was decoded in that time. So nobody pays for the start of actors (Ray Data
starts new ones for each epoch), or gains by samples decoded before. The numbers that Ray Data maps lie in its store
before.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Iterable
from time import time
from typing import Any

import numpy as np
import torch
from PIL import Image

import feedline as fl
from harness import Contest

BATCH, BATCHES = 32, 40

SIDE = 224

NAMES = "image", "time", "actor"

ACTORS, AHEAD = 2, 4
"""Actors, and the batches that each builds ahead."""


def encode(number: int) -> bytes:
    """A JPEG of 500 x 375 that is neither flat nor noise."""
    rng = np.random.default_rng(number)
    small = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8))
    file = io.BytesIO()
    small.resize((500, 375), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def decode(data: bytes) -> tuple[np.ndarray, float, int]:
    """The middle of the image, uint8, (channels, height, width); the time, and the process."""
    image = Image.open(io.BytesIO(data)).convert("RGB").resize((256, 256))
    pixels = np.ascontiguousarray(np.asarray(image)[16 : 16 + SIDE, 16 : 16 + SIDE].transpose(2, 0, 1))
    return pixels, time(), os.getpid()


class Images(torch.utils.data.Dataset[Any]):
    def __init__(self, images: list[bytes]) -> None:
        self.images = images

    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return dict(zip(NAMES, decode(self.images[index % len(self.images)]), strict=True))


class Decoder:
    """What Ray Data calls for each batch of numbers."""

    def __init__(self, images: list[bytes]) -> None:
        self.images = images
        torch.set_num_threads(1)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        samples = [decode(self.images[number % len(self.images)]) for number in batch["id"]]
        return dict(zip(NAMES, map(np.stack, zip(*samples, strict=True)), strict=True))


def rate(batches: Iterable[dict[str, torch.Tensor]]) -> float:
    """Images per second from the moment on at which all actors decode."""
    times, actors = list[float](), list[int]()
    for batch in batches:
        assert batch["image"].shape == (BATCH, 3, SIDE, SIDE), batch["image"].shape
        times += batch["time"].tolist()
        actors += batch["actor"].tolist()
    ended, each = time(), set(actors)
    assert len(times) == BATCH * BATCHES
    assert len(each) == ACTORS, f"{len(each)} actors decoded"
    began = max(min(at for at, one in zip(times, actors, strict=True) if one == actor) for actor in each)
    return sum(at > began for at in times) / (ended - began)


def main() -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    warnings.filterwarnings("ignore")
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    import ray
    import ray.data

    # Logical CPUs: with too few of them, Ray Data would wait for those of the other contestant.
    ray.init("local", num_cpus=8, object_store_memory=1 << 30, include_dashboard=False, log_to_driver=False)
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.execution_options.preserve_order = True
    images = [encode(number) for number in range(64)]
    blocks = ray.data.range(BATCH * BATCHES, override_num_blocks=BATCHES, concurrency=ACTORS).materialize()
    loader = fl.DataLoader(
        Images(images), BATCH, num_workers=ACTORS, worker_method="ray", seed=0, persistent_workers=True,
        prefetch_factor=AHEAD, accelerate=False,
    )  # fmt: skip

    def ray_data() -> float:
        two = ray.data.ActorPoolStrategy(size=ACTORS, max_tasks_in_flight_per_actor=AHEAD)
        built = blocks.map_batches(Decoder, batch_size=BATCH, compute=two, num_cpus=1, fn_constructor_args=(images,))
        return rate(built.iter_torch_batches(batch_size=BATCH, prefetch_batches=AHEAD))

    contest = Contest("images from two Ray actors", unit="images/s", baseline="Ray Data")
    contest.measure("Ray Data", ray_data)
    contest.measure("feedline", lambda: rate(loader))
    contest.run(rounds=int(sys.argv[1]) if sys.argv[1:] else 3).publish("ray")
    loader.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
