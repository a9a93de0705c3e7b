"""Claim: `DecodeOnDevice` feeds a GPU faster than all CPUs of the machine decode.

The first table is of the decoders alone: batches of JPEGs of 500×375 pixels to RGB levels on the device, by each
installed package, and by the native kernels in one thread per CPU. The second one is of loaders: the training pipeline
of ImageNet into batches on the device. The peers are feedline's workers, which decode on all CPUs and send either
numbers or levels, and, where they are installed, torchvision in torch's DataLoader with the prefetcher of tutorials,
DALI with mixed decoding, and FFCV. With "cpu" as its argument the script runs without a GPU, to check itself.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import torch
from peers import Batches, Contest, add_optional, dali_jpegs, ffcv, optional, prefetched, publish
from PIL import Image

import feedline as fl
from feedline import images, transforms
from feedline.images import device_decoders

ON_CUDA = sys.argv[1:2] != ["cpu"]
IMAGES, BATCH, SIZE, ROUNDS = (4096, 256, 224, 3) if ON_CUDA else (16, 8, 64, 1)
DISTINCT = min(IMAGES, 256)
WORKERS = len(os.sched_getaffinity(0)) if ON_CUDA else 1
NORMALIZE = transforms.Normalize(transforms.IMAGENET_MEAN, transforms.IMAGENET_STD)
DEFAULT = device_decoders.decoder_of
NUMBERS, LEVELS, SHARED = "feedline, workers", "feedline, workers, levels", "feedline, on the device and by workers"
STARTED = perf_counter()


def phase(name: str) -> None:
    """Print the seconds since the start behind a phase of the script."""
    print(f"{perf_counter() - STARTED:.0f} s: {name}", flush=True)


def write(folder: Path, count: int) -> None:
    """`count` names of distinct images, which are written once."""
    with ThreadPoolExecutor(WORKERS) as threads:
        photos = list(threads.map(photo, range(min(count, DISTINCT))))
    places = [folder / f"class{number % 8}" / f"{number:05d}.jpg" for number in range(count)]
    for number, place in enumerate(places):
        place.parent.mkdir(exist_ok=True)
        if number < len(photos):
            place.write_bytes(photos[number])
        else:
            os.link(places[number % len(photos)], place)


def photo(seed: int) -> bytes:
    """Soft shapes with grain, which compress to the size of photographs."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize((500, 375), Image.Resampling.BICUBIC)
    grain = rng.integers(-12, 13, (375, 500, 3))
    levels = (np.asarray(coarse).astype(int) + grain).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "JPEG", quality=85)
    return file.getvalue()


def loader(folder: Path, transform: Any, device: Any) -> fl.DataLoader[Any]:
    data = fl.datasets.ImageFolder(folder, transform)
    return fl.DataLoader(
        data, BATCH, shuffle=True, seed=0, drop_last=True, num_workers=WORKERS, persistent_workers=True, device=device
    )


def epoch(batches: Callable[[], Iterator[Any]], device: str) -> Callable[[], None]:
    def run() -> None:
        for batch, _ in batches():
            assert (batch.device.type, batch.dtype) == (device, torch.float32)
        if device == "cuda":
            torch.cuda.synchronize()

    return run


def decoders(device: str) -> dict[str, Any]:
    """The installed decoders by the last words of their packages, the default one first."""
    found = {name.removeprefix("nvidia."): decode for name, decode in device_decoders.installed_decoders(device)}
    print(f"decoders for {device}: {', '.join(found) or 'none'}; the first one is the default")
    return found


def variants() -> dict[str, Any]:
    """Decoders of nvImageCodec with other settings than feedline's, where it is installed."""
    package = optional("nvimgcodec with other settings", lambda: import_module("nvidia.nvimgcodec"))
    if package is None:
        return {}
    kinds = package.BackendKind
    others = [package.Backend(kind) for kind in (kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU, kinds.CPU_ONLY)]
    shared = package.LoadHintPolicy.ADAPTIVE_MINIMIZE_IDLE_TIME
    half = [package.Backend(kinds.HW_GPU_ONLY, 0.5, shared), *others]
    settings = {
        "colors not interpolated": {"options": ":fancy_upsampling=0"},
        "without hardware": {"backends": others},
        "hardware and kernels": {"backends": half},
        "hardware and kernels, colors not interpolated": {"backends": half, "options": ":fancy_upsampling=0"},
    }
    return {f"nvimgcodec, {name}": device_decoders._nvimgcodec(**each) for name, each in settings.items()}


def by_decoder(decode: Any, batches: Callable[[], Iterator[Any]]) -> Callable[[], Iterator[Any]]:
    """Batches of a loader whose process decodes by `decode`, or as it would without."""

    def run() -> Iterator[Any]:
        device_decoders.decoder_of = DEFAULT if decode is None else lambda _: decode
        return batches()

    return run


def decoders_alone(files: list[bytes], found: dict[str, Any], device: str) -> None:
    """Whole images; the same number of files in each call."""
    encoded = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for file in files]
    here = f"native kernels, {WORKERS} threads"
    contest = Contest(f"decoders of JPEGs on {device}", unit="images/s", baseline=here)
    threads = ThreadPoolExecutor(WORKERS)
    contest.add(here, lambda: list(threads.map(images.decode, files)), len(files))

    def by(decode: Any) -> Callable[[], None]:
        def run() -> None:
            levels = decode(encoded, torch.device(device))
            torch.cuda.synchronize()
            refused = sum(each is None for each in levels)
            assert not refused, f"{refused} of {len(files)} files refused"

        return run

    wanted = [torch.from_numpy(images.decode(file).copy()).permute(2, 0, 1).double() for file in files[:8]]
    for name, decode in (found | variants() if found else found).items():
        if optional(name, lambda decode=decode: (by(decode)(), True)[1]):
            contest.add(name, by(decode), len(files))
            levels = zip(decode(encoded[:8], torch.device(device)), wanted, strict=True)
            away = torch.stack([(ours.cpu().double() - theirs).abs() for ours, theirs in levels])
            print(f"{name}: mean difference to the CPU {away.mean():.3f} levels, largest {away.max():.0f}")
    publish(contest.run(2 * ROUNDS, warm_up=int(ON_CUDA)), on_cuda=device == "cuda")
    threads.shutdown()


def torchvision(folder: Path, device: str) -> Batches:
    """torch's DataLoader with its pin thread, torchvision's ImageFolder and v2, and the prefetcher of tutorials."""
    from torchvision import datasets
    from torchvision.transforms import v2

    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    normalize = v2.Normalize(transforms.IMAGENET_MEAN, transforms.IMAGENET_STD)
    steps = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), *scale, normalize])
    loader = torch.utils.data.DataLoader(
        datasets.ImageFolder(str(folder), steps), BATCH, shuffle=True, drop_last=True, num_workers=WORKERS,
        persistent_workers=True, pin_memory=device == "cuda",
    )  # fmt: skip
    return lambda: prefetched(iter(loader))


def main(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        print("bench/gpu/decode.py: no CUDA device, nothing to measure")
        return
    count = IMAGES if device == "cuda" else 2 * BATCH
    found = decoders(device)
    with TemporaryDirectory() as place:
        folder = Path(place, "photos")
        folder.mkdir()
        write(folder, count)
        files = [path.read_bytes() for path in sorted(folder.rglob("*.jpg"))[:BATCH]]
        phase(f"{count} files written")
        optional("the table of decoders", lambda: decoders_alone(files, found, device))
        phase("decoders measured")
        contest, there = loaders(folder, files, found, device, count)
        outcome = contest.run(ROUNDS, warm_up=0)  # each has run an epoch before
        publish(outcome, on_cuda=device == "cuda")
        report(outcome, there)
        phase("loaders measured")


def loaders(
    folder: Path, files: list[bytes], found: dict[str, Any], device: str, count: int
) -> tuple[Contest, dict[str, fl.DataLoader[Any]]]:
    """The contest of loaders, and those that decode on the device; each has run an epoch."""
    train = transforms.imagenet_train(SIZE)
    steps = transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor(torch.uint8)
    normalized = fl.Delivery(device, transform=transforms.OnBatch(NORMALIZE, inplace=True))
    there = {name: loader(folder, transforms.DecodeOnDevice(train), device) for name in found or ["on the device"]}

    def shared() -> Batches:
        device_decoders.decoder_of = DEFAULT
        split = transforms.DecodeOnDevice.measured(train, files, device, WORKERS)
        print(f"{SHARED}: {split.cpu_share:.0%} of the images by workers")
        both = loader(folder, split, device)
        return by_decoder(None, lambda: iter(both))

    def of(each: fl.DataLoader[Any]) -> Callable[[], Batches]:
        return lambda: lambda: iter(each)

    photos, file = Photos(folder), folder.with_suffix(".beton")
    makes: dict[str, Callable[[], Batches]] = {
        NUMBERS: of(loader(folder, train, device)),
        LEVELS: of(loader(folder, transforms.Compose(steps), normalized)),
        **{
            f"feedline, {name}": partial(by_decoder, found.get(name), lambda each=each: iter(each))
            for name, each in there.items()
        },
        SHARED: shared,
        "torch and torchvision": lambda: torchvision(folder, device),
        "DALI": lambda: dali_jpegs(folder, BATCH, SIZE, WORKERS, device),
        "FFCV": lambda: ffcv(photos, file, BATCH, WORKERS, device, SIZE),
    }
    contest = Contest(f"decode on {device}", unit="images/s", baseline=NUMBERS)
    for name, make in makes.items():
        add_optional(contest, name, make, lambda batches: epoch(batches, device), count)
        phase(f"{name}: an epoch")
    return contest, there


class Photos:
    """Decoded images and labels, for the writer of FFCV."""

    def __init__(self, folder: Path) -> None:
        self.places = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> tuple[Image.Image, int]:
        return Image.open(self.places[number]).convert("RGB"), 0


def report(outcome: Any, device_loaders: dict[str, fl.DataLoader[Any]]) -> None:
    """Ratios to the faster of the two ways by workers, and the images that the CPU had to decode."""
    best = max(each.median for each in outcome.standings if each.name in (NUMBERS, LEVELS))
    for standing in outcome.standings:
        print(f"{standing.name}: {standing.median / best:.2f} of the best by {WORKERS} CPUs")
    for name, each in device_loaders.items():
        stats = each.stats()
        on_device, refused = stats.decoded_on_device, stats.decode_fallbacks
        # Without an accelerator, the native kernels decode, and nothing is counted.
        print(f"{name}: {on_device} images sent to the GPU, {refused} of them decoded by the CPU")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cuda")
