"""Batches of images from two Ray actors: feedline's Ray pool and Ray Data's `iter_torch_batches`, on the same cluster.

Both build batches of 32 with the same function, in two actors of one CPU each: of JPEGs that are decoded and cropped,
and of images in memory, which show the cost of the pool itself. With *equal settings*, both give batches in
order, and are 12 of them ahead. With *default settings*, only actors and batch size are given: Ray Data keeps no order,
chooses blocks, and is as far ahead as its memory allows; feedline keeps the order, is 4 batches ahead, and accelerates
the decoding of Pillow's images, which it must not with equal settings.

Each sample records when and where it was made. The figures are of samples made from the moment at which both actors
work until the last batch is delivered, without the first third. So they contain no start of actors (Ray Data starts new
ones for each epoch, feedline's are kept), no samples made earlier, and no end of the other contestant: each waits until
the processes of the other are idle. The numbers that Ray Data maps are in its store beforehand.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, sleep, time
from typing import Any

import numpy as np
import psutil
import torch
from PIL import Image

import feedline as fl
from harness import Contest

BATCH = 32

SIDE = 224

ACTORS, AHEAD = 2, 4
"""Actors, and the batches that Ray Data has in flight for each, and as many prefetched."""


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
    """Images that `load` makes of `stored`, repeatedly."""

    def __init__(self, stored: list[Any], load: Callable[[Any], np.ndarray], batches: int) -> None:
        self.stored, self.load, self.batches = stored, load, batches

    def __len__(self) -> int:
        return BATCH * self.batches

    def __getitem__(self, index: int) -> dict[str, Any]:
        image = self.load(self.stored[index % len(self.stored)])
        return {"image": image, "time": time(), "actor": os.getpid()}


class Mapped:
    """The function that Ray Data calls for each batch of numbers."""

    def __init__(self, images: Images) -> None:
        self.images = images
        torch.set_num_threads(1)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        samples = [self.images[number] for number in batch["id"]]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}


def rest() -> None:
    """Wait until the processes of the cluster are idle: Ray ends and starts some after each epoch of Ray Data."""
    give_up = monotonic() + 60
    used, was = cpu_s(), -1.0
    while used - was > 0.1 and monotonic() < give_up:
        sleep(1)
        used, was = cpu_s(), used


def cpu_s() -> float:
    """CPU time of all processes of the cluster."""
    total = 0.0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def rate(batches: Iterable[dict[str, torch.Tensor]], count: int) -> float:
    """Images per second, counted once all actors work and a third is delivered."""
    times, actors, delivered = list[float](), list[int](), list[float]()
    for batch in batches:
        assert batch["image"].shape == (BATCH, 3, SIDE, SIDE), batch["image"].shape
        times += batch["time"].tolist()
        actors += batch["actor"].tolist()
        delivered.append(time())
    assert len(delivered) == count
    each = set(actors)
    assert len(each) == ACTORS, f"{len(each)} actors worked"
    firsts = [min(at for at, one in zip(times, actors, strict=True) if one == actor) for actor in each]
    began = max(*firsts, delivered[count // 3])
    return sum(at > began for at in times) / (delivered[-1] - began)


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
    encoded = [encode(number) for number in range(64)]
    rounds = int(sys.argv[1]) if sys.argv[1:] else 3
    for name, images in (
        ("Ray actors that decode images", Images(encoded, decode, 60)),
        ("Ray actors with images in memory", Images([decode(each) for each in encoded], np.asarray, 240)),
    ):
        contend(name, images, rounds)
    ray.shutdown()


def contend(name: str, images: Images, rounds: int) -> None:
    """One contest over these images."""
    import ray.data

    count = images.batches
    blocks = ray.data.range(BATCH * count, override_num_blocks=count, concurrency=ACTORS).materialize()
    free = ray.data.range(BATCH * count).materialize()
    shared = {"num_workers": ACTORS, "worker_method": "ray", "seed": 0}
    equal = fl.DataLoader(
        images, BATCH, **shared, persistent_workers=True, prefetch_factor=AHEAD + AHEAD // ACTORS, accelerate=False
    )
    default = fl.DataLoader(images, BATCH, **shared, persistent_workers=True)

    def ray_data(rows: Any, *, in_order: bool, in_flight: int | None, **ahead: int) -> float:
        ray.data.DataContext.get_current().execution_options.preserve_order = in_order
        two = ray.data.ActorPoolStrategy(size=ACTORS, max_tasks_in_flight_per_actor=in_flight)
        built = rows.map_batches(Mapped, batch_size=BATCH, compute=two, num_cpus=1, fn_constructor_args=(images,))
        rest()
        return rate(built.iter_torch_batches(batch_size=BATCH, **ahead), count)

    def feedline(loader: Any) -> float:
        rest()
        return rate(loader, count)

    for loader in (equal, default):
        while len({actor for batch in loader for actor in batch["actor"].tolist()}) < ACTORS:
            pass  # one of them still starts

    contest = Contest(name, unit="images/s", baseline="Ray Data, equal settings")
    contest.measure(
        "Ray Data, equal settings",
        lambda: ray_data(blocks, in_order=True, in_flight=AHEAD, prefetch_batches=AHEAD),
    )
    contest.measure("feedline, equal settings", lambda: feedline(equal))
    contest.measure("Ray Data, default settings", lambda: ray_data(free, in_order=False, in_flight=None))
    contest.measure("feedline, default settings", lambda: feedline(default))
    contest.run(rounds).publish("ray")
    equal.close()
    default.close()


if __name__ == "__main__":
    main()
