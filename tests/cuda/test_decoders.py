"""Decoders and batched operators on a real GPU: the pixels of the CPU, also while its queue is full."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transform_cases import jpeg, png, random_image, with_orientation

import feedline as fl
from feedline import images
from feedline import transforms as T
from feedline.images import device_decoders

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

THERE = torch.device("cuda")
LONG = 200_000_000
"""Clock cycles: about a tenth of a second on any GPU."""

DECODERS = dict(device_decoders.installed_decoders("cuda")) if torch.cuda.is_available() else {}
DEFAULT = next(iter(DECODERS), None)


def encoded(array: np.ndarray, mode: str = "RGB", **options: Any) -> bytes:
    file = io.BytesIO()
    Image.fromarray(array).convert(mode).save(file, "JPEG", **options)
    return file.getvalue()


PHOTO = random_image(93, 125, 3)
FORMS: dict[str, tuple[bytes, float, int]] = {
    "4:4:4": (encoded(PHOTO, subsampling=0, quality=90), 1, 4),
    "4:2:2": (encoded(PHOTO, subsampling=1), 8, 96),
    "4:2:0": (encoded(PHOTO, subsampling=2), 8, 96),
    "gray": (encoded(PHOTO, "L"), 1, 4),
    "odd sizes": (encoded(random_image(33, 17, 5), subsampling=0), 1, 4),
    "progressive": (encoded(PHOTO, progressive=True, subsampling=0), 1, 4),
    "restarts": (encoded(PHOTO, subsampling=0, restart_marker_blocks=4), 1, 4),
    "turned": (with_orientation(random_image(93, 125, 4), 6), 8, 96),
}
"""Files with the largest mean and single difference of levels.

Decoders round differently, and some do not interpolate colors of half resolution: 4.5 levels on average here.
"""


def file_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def decoded(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.array(images.decode(data))).permute(2, 0, 1)


def difference(name: str, ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float, str]:
    """Mean and largest difference, and a text with both."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), name
    away = (ours.cpu().double() - theirs.double()).abs()
    mean, most = away.mean().item(), away.max().item()
    return (
        mean,
        most,
        f"{name}: mean difference {mean:.4f}, largest {most:.4f}, equal {(away == 0).double().mean():.2%}",
    )


@pytest.fixture
def decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(device_decoders, "decoder_of", lambda _: DECODERS[request.param])
    return DECODERS[request.param]


each_decoder = pytest.mark.parametrize("decoder", DECODERS, indirect=True)


def test_a_decoder_is_installed() -> None:
    if not DECODERS:
        pytest.skip("no decoder of images for a GPU is installed")
    print("decoders:", ", ".join(DECODERS))


@each_decoder
def test_pixels_are_those_of_the_cpu(decoder: Any) -> None:
    files = [file_of(data) for data, _, _ in FORMS.values()]
    found = decoder(files, THERE)
    texts, wrong = [], []
    for (name, (data, mean_limit, limit)), levels in zip(FORMS.items(), found, strict=True):
        if levels is None:
            texts.append(f"{name}: refused")
            wrong += [name] if name in ("4:4:4", "4:2:0") else []
            continue
        mean, most, text = difference(name, levels, decoded(data))
        texts.append(text)
        wrong += [name] if mean > mean_limit or most > limit else []
    print("\n".join(texts))
    assert not wrong, "\n".join(texts)


@each_decoder
def test_nothing_is_read_or_written_too_early(decoder: Any) -> None:
    """The queue is full at each call: decoding must wait for readers of its memory, and readers for it."""
    photos = [jpeg(random_image(96, 128, seed)) for seed in range(8)]
    files = [file_of(data) for data in photos]
    alone = [levels.cpu() for levels in decoder(files, THERE)]
    kept, sums, wanted = [], [], []
    for turn in range(20):
        victims = [
            torch.full((3, 96, 128), (turn + place) % 256, dtype=torch.uint8, device=THERE) for place in range(8)
        ]
        torch.cuda._sleep(LONG // 10)
        sums += [victim.double().sum() for victim in victims]
        wanted += [(turn + place) % 256 * 3 * 96 * 128 for place in range(8)]
        del victims  # their memory is free for the decoder, but is read after the sleep only
        kept.append([levels.clone() for levels in decoder(files, THERE)])
        for file, data in zip(files, photos, strict=True):
            file.zero_()  # a worker writes the next batch into the memory
            file.copy_(file_of(data))
    overwritten = sum(total.item() != value for total, value in zip(sums, wanted, strict=True))
    wrong = sum(not torch.equal(levels.cpu(), one) for turn in kept for levels, one in zip(turn, alone, strict=True))
    assert (overwritten, wrong) == (0, 0), f"{overwritten} of 160 tensors overwritten, {wrong} of 160 images wrong"


@each_decoder
def test_refused_files_are_decoded_by_the_cpu(decoder: Any) -> None:
    photos = [encoded(random_image(40, 50, 1), subsampling=0), png(random_image(30, 30, 2)), encoded(PHOTO, "L")]
    before = device_decoders.counts()
    found = device_decoders.decode_on_device([file_of(data) for data in photos], THERE)
    for number, (levels, data) in enumerate(zip(found, photos, strict=True)):
        mean, _, text = difference(f"file {number}", levels, decoded(data))
        assert levels.is_cuda
        assert mean <= 1, text
    after = device_decoders.counts()
    assert after.decoded - before.decoded == 3
    assert after.fallbacks - before.fallbacks in (0, 1), after  # some decoders read PNG
    damaged = photos[0][:300]
    with pytest.raises(images.ImageError) as caught:
        device_decoders.decode_on_device([file_of(data) for data in (photos[0], damaged, b"no image")], THERE)
    assert caught.value.row in (1, 2)
    again = device_decoders.decode_on_device([file_of(photos[0])], THERE)
    assert torch.equal(again[0], found[0])


@each_decoder
@pytest.mark.parametrize("method", ["thread", "process"])
def test_a_loader_names_damaged_files_and_gets_on(decoder: Any, method: str, tmp_path: Path) -> None:
    for number in range(16):
        place = tmp_path / "ab"[number % 2] / f"{number:02d}.jpg"
        place.parent.mkdir(exist_ok=True)
        data = encoded(random_image(60 + number, 90 - number, number), subsampling=0)
        place.write_bytes(data[: len(data) // 2] if number == 5 else png(random_image(50, 60)) if number == 6 else data)
    train = T.imagenet_train(32)
    arguments: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seed": 3, "num_workers": 2, "on_error": "skip"}
    with fl.DataLoader(fl.datasets.ImageFolder(tmp_path, train), **arguments) as loader:
        expected = list(loader)
    data = fl.datasets.ImageFolder(tmp_path, T.DecodeOnDevice(train))
    with fl.DataLoader(data, **arguments, worker_method=method, device="cuda") as loader:
        got = list(loader)
        stats = loader.stats()
    assert [labels.tolist() for _, labels in got] == [labels.tolist() for _, labels in expected]
    for number, ((ours, _), (theirs, _)) in enumerate(zip(got, expected, strict=True)):
        mean, _, text = difference(f"batch {number}", ours, theirs)
        assert mean < 0.05, text
    # The batch of the damaged file is read again, sample by sample, and decoded by the workers.
    assert (stats.decoded_on_device, stats.decode_fallbacks) == (12, 1), stats
    assert 0 <= stats.hidden_device_decode_s <= stats.device_decode_s > 0, stats


SHAPES = [(48, 64)] * 12
SIZES = [(40 + 3 * row, 70 - row) for row in range(12)]
KEYS = np.random.default_rng(5).integers(0, 2**64, 12, np.uint64)
NORMALIZE = T.Normalize(T.IMAGENET_MEAN, T.IMAGENET_STD)
JITTER = T.ColorJitter(0.4, 0.4, 0.4, 0.2)
LEVEL = 1.01 / 255 / min(T.IMAGENET_STD)

OPERATORS: dict[str, tuple[Any, float]] = {
    "resized crop": (T.RandomResizedCrop((24, 20)), 1),
    "bicubic resized crop": (T.RandomResizedCrop(40, interpolation="bicubic"), 2),
    "resize": (T.Resize((30, 70)), 1),
    "resize and center crop": (T.Compose([T.Resize(20), T.CenterCrop((28, 30))]), 1),
    "center crop": (T.CenterCrop((60, 50)), 0),
    "crop": (T.RandomCrop(32), 0),
    "padded crop": (T.RandomCrop((52, 80), padding=(30, 12), fill=(9, 80, 200)), 0),
    "reflected crop": (T.RandomCrop(40, padding=8, padding_mode="reflect"), 0),
    "flips": (T.Compose([T.CenterCrop(40), T.RandomHorizontalFlip(), T.RandomVerticalFlip(0.7)]), 0),
    "jitter": (T.Compose([T.CenterCrop(40), JITTER]), 0),
    "gray": (T.Compose([T.CenterCrop(40), T.Grayscale(3)]), 0),
    "random gray": (T.Compose([T.CenterCrop(40), T.RandomGrayscale(0.5)]), 0),
    "blur": (T.Compose([T.CenterCrop(40), T.GaussianBlur((5, 7), (0.3, 2.0))]), 1),
    "normalize": (T.Compose([T.CenterCrop(40), NORMALIZE]), 1e-5),
    "levels last": (T.Compose([T.CenterCrop(40), T.ToTensor(torch.uint8, layout="HWC")]), 0),
    "erasing": (T.Compose([T.CenterCrop(40), NORMALIZE, T.RandomErasing(0.8, value=0.5)]), 1e-5),
    "erasing with noise": (T.Compose([T.CenterCrop(40), NORMALIZE, T.RandomErasing(0.8, value="random")]), 1e-5),
    "erased levels": (T.Compose([T.CenterCrop(40), T.RandomErasing(0.8, value=(3, 100, 200))]), 0),
    "apply": (T.Compose([T.CenterCrop(40), T.RandomApply([T.RandomVerticalFlip(), JITTER], 0.5)]), 0),
    "choice": (T.Compose([T.CenterCrop(40), T.RandomChoice([T.RandomVerticalFlip(), JITTER])]), 0),
    "training": (T.imagenet_train(24), LEVEL),
    "evaluation": (T.imagenet_eval(24, 28), LEVEL),
}
"""Transforms with their largest difference to the CPU."""


@pytest.mark.parametrize("sizes", [SHAPES, SIZES], ids=["one size", "sizes"])
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_give_the_numbers_of_the_cpu(name: str, sizes: Any) -> None:
    transform, limit = OPERATORS[name]
    photos = [torch.from_numpy(random_image(*size, row)).permute(2, 0, 1) for row, size in enumerate(sizes)]
    batch, there = (torch.stack(photos), torch.stack(photos).cuda()) if sizes is SHAPES else (photos, None)
    there = [photo.cuda() for photo in photos] if there is None else there
    torch.cuda._sleep(LONG // 10)
    ours = T.OnBatch(transform)(there, KEYS)
    assert ours.is_cuda
    _, most, text = difference(name, ours, T.OnBatch(transform)(batch, KEYS))
    assert most <= limit, text


def test_means_that_are_halves_are_rounded_as_on_the_cpu() -> None:
    """A division by a number is another operation on a GPU."""
    sides = [(7, 14), (10, 13), (22, 3), (49, 2)]
    contrast = T.OnBatch(T.ColorJitter(contrast=(0.5, 0.5)))
    for height, width in sides:
        photos = torch.arange(200, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, height, width).contiguous()
        photos[:, :, :, : width // 2] += 1
        photos[:, :, height // 2 :, width // 2 : width - width // 2] += 1
        keys = np.arange(200, dtype=np.uint64)
        assert torch.equal(contrast(photos.cuda(), keys).cpu(), contrast(photos, keys)), (height, width)


@pytest.mark.parametrize("mixture", [T.MixUp(12), T.CutMix(12)], ids=["MixUp", "CutMix"])
def test_mixtures_give_the_numbers_of_the_cpu(mixture: Any) -> None:
    numbers, labels = torch.rand(12, 3, 20, 30), torch.arange(12)
    ours, ours_labels = T.OnBatch(mixture)((numbers.cuda(), labels.cuda()), KEYS)
    theirs, theirs_labels = T.OnBatch(mixture)((numbers, labels), KEYS)
    for name, one, other in (("images", ours, theirs), ("labels", ours_labels, theirs_labels)):
        _, most, text = difference(name, one, other)
        assert most <= 1e-6, text


def test_operators_do_not_wait_for_the_queue() -> None:
    """A wait in an operator would stop the loop from enqueueing its steps."""
    photos = torch.from_numpy(np.stack([random_image(48, 64, row) for row in range(12)])).permute(0, 3, 1, 2)
    # So many rows that their places in crops are more than CUDA takes from memory that is not page-locked.
    batch, keys = photos.cuda().repeat(24, 1, 1, 1), np.random.default_rng(6).integers(0, 2**64, 288, np.uint64)
    sizes = [torch.from_numpy(random_image(*size, 7)).permute(2, 0, 1).cuda() for size in SIZES]
    numbers, labels = torch.rand(288, 3, 20, 30).cuda(), torch.arange(288).cuda()
    calls: dict[str, Callable[[], Any]] = {}
    for name, (transform, _) in OPERATORS.items():
        calls[name] = partial(T.OnBatch(transform), batch, keys)
    for name in ("resized crop", "resize and center crop", "crop", "padded crop", "reflected crop", "training"):
        calls[f"{name}, images of several sizes"] = partial(T.OnBatch(OPERATORS[name][0]), sizes, KEYS)
    for mixture in (T.MixUp(288), T.CutMix(288)):
        calls[repr(mixture)] = partial(T.OnBatch(mixture), (numbers, labels), keys)
    took_s, waited = dict[str, float](), list[str]()
    for name, call in calls.items():
        call()  # libraries of matrix products wait when they are loaded
        for _ in range(2):  # in the first turn, torch allocates page-locked memory, which may wait
            torch.cuda.synchronize()
            torch.cuda._sleep(2 * LONG)
            ahead = torch.cuda.current_stream().record_event()
            started = time.perf_counter()
            call()
            took_s[name], is_queued = time.perf_counter() - started, not ahead.query()
        if not is_queued:
            waited.append(name)
    torch.cuda.synchronize()
    figures = {name: round(seconds, 3) for name, seconds in took_s.items()}
    print(f"seconds of calls behind 0.2 s of work: {figures}")
    assert not waited, f"{waited} returned only after the work before; seconds of all calls: {figures}"
