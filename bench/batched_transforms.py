"""Augmentation of whole batches: feedline's operators, torchvision v2's and kornia's, on the same tensors.

torchvision draws one set of numbers for the whole batch, unless it is called for each image; kornia draws for each
image. feedline does so, too, unless it is called with equal keys, which are one draw for all. So "by image" and
"kornia" do the same work as "feedline", and "v2, one draw" the same as "feedline, one draw", which uses another
key in each call. A crop with one draw copies nothing. Mixtures draw once in torchvision, and for each image here. "In
place" writes to its own copy of the batch, as a `Delivery` may. Peers are found in the folder that PEERS names, where
`pip install --no-deps --target` has put them. On the CPU all run in one thread, and CPU time counts; on a GPU, batches
are larger, and the time until the results are there. A peer that fails is left out by name. Arguments: the device, a
word that chooses operators, and "check" to run each once; with either, nothing is stored.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from itertools import cycle
from time import perf_counter, process_time
from typing import Any

import numpy as np
import torch

sys.path[:0] = [os.environ["PEERS"]]

import kornia.augmentation as kornia  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from feedline import transforms  # noqa: E402
from harness import RESULTS, Contest, Outcome, file_name, machine  # noqa: E402

ON_CUDA = sys.argv[1:2] == ["cuda"]
BATCH, HEIGHT, WIDTH, SIZE, CLASSES = 256 if ON_CUDA else 32, 256, 320, 224, 1000
ROUNDS = 5 if ON_CUDA else 7
ONE, EACH, KORNIA = "v2 of torchvision, one draw", "v2 of torchvision, by image", "kornia"
OURS, OURS_ONE = "feedline", "feedline, one draw"
LEAST_S = 0.03
MEAN, STD = transforms.IMAGENET_MEAN, transforms.IMAGENET_STD


class Levels:
    """kornia on levels, from and to uint8: it takes numbers from 0 to 1."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return (self.step(images.float().div_(255)) * 255).round_().to(torch.uint8)


def cases() -> dict[str, tuple[Any, Any, Any, bool]]:
    """Operators of feedline, torchvision and kornia, and a flag for those that take numbers."""
    jitter = (0.4, 0.4, 0.4, 0.1)
    ours = [
        transforms.RandomResizedCrop(SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ColorJitter(*jitter),
        transforms.Normalize(MEAN, STD),
    ]
    theirs = [
        v2.RandomResizedCrop(SIZE, antialias=True),
        v2.RandomHorizontalFlip(),
        v2.ColorJitter(*jitter),
        v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]),
    ]
    cornea = [
        kornia.RandomResizedCrop((SIZE, SIZE)),
        kornia.RandomHorizontalFlip(),
        kornia.ColorJitter(*jitter, p=1.0),
        kornia.Normalize(torch.tensor(MEAN), torch.tensor(STD)),
    ]
    names = ("resized crop", "flip", "color", "normalize")
    wrapped = [*map(Levels, cornea[:3]), Scaled(cornea[3])]
    steps = {name: (*three, False) for name, *three in zip(names, ours, theirs, wrapped, strict=True)}
    blur = Levels(kornia.RandomGaussianBlur((9, 9), (0.1, 2.0), p=1.0))
    return {
        **steps,
        "blur": (transforms.GaussianBlur(9), v2.GaussianBlur(9), blur, False),
        "crop": (transforms.RandomCrop(SIZE), v2.RandomCrop(SIZE), Levels(kornia.RandomCrop((SIZE, SIZE))), False),
        "padded crop": (
            transforms.RandomCrop((HEIGHT, WIDTH), padding=4),
            v2.RandomCrop((HEIGHT, WIDTH), padding=4),
            Levels(kornia.RandomCrop((HEIGHT, WIDTH), padding=4)),
            False,
        ),
        "crop and flip": (
            transforms.Compose([transforms.RandomCrop(SIZE), transforms.RandomHorizontalFlip()]),
            v2.Compose([v2.RandomCrop(SIZE), v2.RandomHorizontalFlip()]),
            Levels(kornia.ImageSequential(kornia.RandomCrop((SIZE, SIZE)), kornia.RandomHorizontalFlip())),
            False,
        ),
        "flip of all": (
            transforms.RandomHorizontalFlip(1.0),
            v2.RandomHorizontalFlip(1.0),
            Levels(kornia.RandomHorizontalFlip(p=1.0)),
            False,
        ),
        "erasing": (transforms.RandomErasing(1.0), v2.RandomErasing(1.0), kornia.RandomErasing(p=1.0), True),
        "train": (transforms.Compose(ours), v2.Compose(theirs), Scaled(kornia.ImageSequential(*cornea)), False),
    }


class Scaled:
    """kornia on the numbers of levels."""

    def __init__(self, step: Any) -> None:
        self.step = step

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return self.step(images.float().div_(255))


class Rate:
    """Images per second of CPU time; of wall time on a GPU, which continues after a call."""

    def __init__(self, run: Callable[[], object]) -> None:
        self.run, self.calls = run, 0

    def __call__(self) -> float:
        if not self.calls:  # calls with one draw differ, and some take microseconds, so a figure is of many calls
            self.run()
            self.calls = 1 + int(LEAST_S / self.seconds(1))
        return BATCH * self.calls / self.seconds(self.calls)

    def seconds(self, calls: int) -> float:
        clock = perf_counter if ON_CUDA else process_time
        if ON_CUDA:
            torch.cuda.synchronize()
        started = clock()
        for _ in range(calls):
            self.run()
        if ON_CUDA:
            torch.cuda.synchronize()
        return max(1e-6, clock() - started)


def main(device: str, only: str, check: str) -> None:
    torch.set_num_threads(1)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (BATCH, 3, HEIGHT, WIDTH), np.uint8)).to(device)
    keys = np.random.default_rng(0).integers(0, 2**64, BATCH, np.uint64)
    labels, each = torch.arange(BATCH, device=device), cycle(keys)
    outcomes = {}
    for name, (ours, theirs, cornea, is_numbers) in cases().items():
        if only not in name:
            continue
        batch = images.float().div(255) if is_numbers else images
        on_batch, in_place = transforms.OnBatch(ours), transforms.OnBatch(ours, inplace=True)
        own = batch.clone()
        outcomes[name] = contend(f"batched {name} on {device}", check, {
            ONE: lambda theirs=theirs, batch=batch: theirs(batch),
            EACH: lambda theirs=theirs, batch=batch: torch.stack(list(map(theirs, batch))),
            KORNIA: lambda cornea=cornea, batch=batch: cornea(batch),
            OURS: lambda on_batch=on_batch, batch=batch: on_batch(batch, keys),
            OURS_ONE: lambda on_batch=on_batch, batch=batch: on_batch(batch, np.full(BATCH, next(each))),
            "feedline, in place": lambda in_place=in_place, own=own: in_place(own, keys),
        })  # fmt: skip
    numbers = images.float().div(255)
    for name in ("MixUp", "CutMix"):
        ours, theirs = transforms.OnBatch(getattr(transforms, name)(CLASSES)), getattr(v2, name)(num_classes=CLASSES)
        outcomes[name] = contend(f"batched {name} on {device}", check, {
            ONE: lambda theirs=theirs: theirs(numbers, labels),
            OURS: lambda ours=ours: ours((numbers, labels), keys),
        })  # fmt: skip
    if not only and not check:
        publish(f"batched transforms on {device}", outcomes)


def contend(name: str, check: str, contestants: dict[str, Callable[[], object]]) -> Outcome:
    contest = Contest(name, unit="images/s", baseline=ONE)
    for contestant, run in contestants.items():
        if contestant in (KORNIA, EACH) and not _works(contestant, run):
            continue
        contest.measure(contestant, Rate(run))
    outcome = contest.run(rounds=1, warm_up=0) if check else contest.run(ROUNDS)
    outcome.show()
    return outcome


def _works(peer: str, run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception as error:  # noqa: BLE001 - a peer of another version fails in many ways
        print(f"{peer} is left out: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]:.120}")
        return False
    return True


def publish(name: str, outcomes: dict[str, Outcome]) -> None:
    """Write one table of all operators, with ratios to contestants that do the same work."""
    where, versions = (
        machine(),
        {name: metadata.version(name) for name in ("feedline", "torch", "torchvision", "kornia")},
    )
    lines = ["| | feedline, images/s | to v2 by image | to kornia | one draw, to v2 |", "|---|---:|---:|---:|---:|"]
    for operator, outcome in outcomes.items():
        rates = {standing.name: standing.median for standing in outcome.standings}
        drawn = rates.get(OURS_ONE, rates[OURS])
        ratios = [f"{rates[OURS] / rates[peer]:.2f}" if peer in rates else "" for peer in (EACH, KORNIA)]
        lines.append(f"| {operator} | {rates[OURS]:,.0f} | {' | '.join(ratios)} | {drawn / rates[ONE]:.2f} |")
    rounds = len(next(iter(outcomes.values())).standings[0].runs)
    listed = ", ".join(f"{package} {version}" for package, version in versions.items() if package != "feedline")
    today = datetime.now(UTC).date()
    place = str(where["gpu"]) if ON_CUDA else f"{where['cores']} cores of {where['cpu']}"
    lines += ["", f"Medians of {rounds} rounds; {listed}; {place}, {today}."]
    result = {"machine": where, "versions": versions, "lines": lines}
    result["outcomes"] = {operator: asdict(outcome) for operator, outcome in outcomes.items()}
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (RESULTS / f"{file_name(name)}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*(sys.argv[1:4] + ["cpu", "", ""][len(sys.argv) - 1 :]))
