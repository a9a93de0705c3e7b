"""Batched operators: the numbers and pixels of single samples with the same keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from transform_cases import random_image

import feedline as fl
from feedline import transforms as T
from feedline.core.rng import Draws, DrawsEach, batch_keys
from feedline.errors import ArgumentError, SampleError
from feedline.transforms.batched import levels, moves, on_batch, operators, resample

COUNT = 12
KEYS = np.random.default_rng(5).integers(0, 2**64, COUNT, np.uint64)
PHOTOS = [random_image(48, 64, seed) for seed in range(COUNT)]
BATCH = torch.from_numpy(np.stack(PHOTOS)).permute(0, 3, 1, 2).contiguous()
NORMALIZE = T.Normalize(T.IMAGENET_MEAN, T.IMAGENET_STD)

EXACT: dict[str, T.Transform] = {
    "nothing": T.Compose([]),
    "horizontal flip": T.RandomHorizontalFlip(),
    "vertical flip": T.RandomVerticalFlip(0.7),
    "center crop": T.CenterCrop((30, 40)),
    "center crop with border": T.CenterCrop((60, 50)),
    "crop": T.RandomCrop(32),
    "crop with padding": T.RandomCrop(48, padding=(3, 9), fill=(9, 80, 200)),
    "crop with reflection": T.RandomCrop((40, 70), padding=8, padding_mode="reflect"),
    "crop of small images": T.RandomCrop((60, 60), pad_if_needed=True, padding_mode="symmetric"),
    "flips": T.Compose([T.RandomHorizontalFlip(), T.RandomVerticalFlip(), T.RandomHorizontalFlip(1.0)]),
    "flips and crop": T.Compose(
        [T.RandomVerticalFlip(), T.RandomCrop((40, 70), padding=8, fill=7), T.RandomHorizontalFlip()]
    ),
    "crops and flip": T.Compose(
        [T.RandomCrop(60, padding=9, fill=(1, 2, 3)), T.RandomHorizontalFlip(), T.RandomCrop(66, padding=6, fill=90)]
    ),
    "flip and reflection": T.Compose(
        [T.RandomHorizontalFlip(), T.RandomCrop((60, 80), padding=9, padding_mode="reflect")]
    ),
    "jitter": T.ColorJitter(0.4, 0.4, 0.4, 0.2),
    "hue": T.ColorJitter(hue=0.5),
    "brightness": T.ColorJitter(brightness=(0.2, 3.0)),
    "gray": T.Grayscale(),
    "gray in three channels": T.Grayscale(3),
    "random gray": T.RandomGrayscale(0.5),
    "gray jitter": T.Compose([T.Grayscale(), T.ColorJitter(0.5, 0.5, 0.5, 0.5)]),
    "to tensor": T.ToTensor(),
    "levels last": T.ToTensor(torch.uint8, layout="HWC"),
    "normalize": NORMALIZE,
    "normalize to bfloat16": T.Normalize([0.5], [0.2], torch.bfloat16),
    "normalize numbers": T.Compose([T.ToTensor(), NORMALIZE]),
    "normalize gray": T.Compose([T.Grayscale(), T.Normalize([0.5], [0.2])]),
    "erase levels": T.RandomErasing(0.8, value=(3, 100, 200)),
    "erase numbers": T.Compose([NORMALIZE, T.RandomErasing(0.8, value=0.5)]),
    "erase with noise": T.Compose([NORMALIZE, T.RandomErasing(0.8, value="random")]),
    "erase levels with noise": T.RandomErasing(0.8, value="random"),
    "apply": T.RandomApply([T.RandomVerticalFlip(), T.ColorJitter(0.5)], 0.5),
    "apply to none": T.RandomApply([T.ColorJitter(0.5), T.ToTensor()], 0.0),
    "choice": T.RandomChoice([T.RandomVerticalFlip(), T.ColorJitter(0.5), T.RandomCrop((48, 64), padding=4)]),
    "chain": T.Compose([T.RandomCrop(32), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4), NORMALIZE]),
}

CLOSE: dict[str, T.Transform] = {
    "resized crop": T.RandomResizedCrop((24, 20)),
    "bicubic resized crop": T.RandomResizedCrop(40, interpolation="bicubic"),
    "enlarged crop": T.RandomResizedCrop((90, 100), scale=(0.05, 0.3)),
    "resized crop and flip": T.Compose([T.RandomResizedCrop(24), T.RandomHorizontalFlip()]),
    "resize": T.Resize(20),
    "resize both": T.Resize((30, 70)),
    "resize and center crop": T.Compose([T.Resize(30), T.CenterCrop(24)]),
    "resize and larger center crop": T.Compose([T.Resize(20), T.CenterCrop((28, 30))]),
    "blur": T.GaussianBlur((5, 7), (0.3, 2.0)),
}


def expected(transform: T.Transform, keys: Any = KEYS) -> torch.Tensor:
    """Single samples, channels first as in a batch of tensors."""
    samples = [transform.plan.run(photo, key) for photo, key in zip(PHOTOS, keys.tolist(), strict=True)]
    first = samples[0]
    if isinstance(first, torch.Tensor):
        return torch.stack(samples)
    return torch.from_numpy(np.stack(samples)).permute(0, 3, 1, 2)


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The kernels, then the operators of the CPU, then those of devices, on tensors of the CPU."""

    def each() -> Iterator[str]:
        yield "kernels"
        monkeypatch.setattr(on_batch, "uses_kernels", lambda *_: False)
        yield "rows"
        monkeypatch.setattr(levels, "is_faster_by_rows", lambda _: False)
        yield "whole"

    return each()


@pytest.mark.parametrize("name", EXACT)
def test_batches_equal_samples(ways: Iterator[str], name: str) -> None:
    before, wanted = BATCH.clone(), expected(EXACT[name])
    for way in ways:
        got = T.OnBatch(EXACT[name])(BATCH, KEYS)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), way
        assert torch.equal(got, wanted), way
        assert torch.equal(BATCH, before), way


@pytest.mark.parametrize("name", EXACT)
def test_in_place_the_images_are_the_same(ways: Iterator[str], name: str) -> None:
    wanted = expected(EXACT[name])
    for way in ways:
        images = BATCH.clone()
        got = T.OnBatch(EXACT[name], inplace=True)(images, KEYS)
        assert torch.equal(got, wanted), way


@pytest.mark.parametrize("name", EXACT)
def test_equal_keys_are_one_draw_for_all(ways: Iterator[str], name: str) -> None:
    before = BATCH.clone()
    for way in ways:
        for key in KEYS[:3]:
            keys = np.full(len(BATCH), key)
            wanted = torch.cat([T.OnBatch(EXACT[name])(image[None], keys[:1]) for image in BATCH])
            got = T.OnBatch(EXACT[name])(BATCH, keys)
            assert torch.equal(got, wanted), way
            assert torch.equal(BATCH, before), way


SMALL = [random_image(9, 11, seed) for seed in range(2)]


@given(
    key=st.integers(0, 2**64 - 1),
    flips=st.tuples(*[st.booleans()] * 4),
    size=st.tuples(st.integers(1, 14), st.integers(1, 14)) | st.just(SMALL[0].shape[:2]),
    padding=st.sampled_from([0, (1, 4), (0, 9, 6, 2), 30]),
    fill=st.sampled_from([0, 90]),
)
def test_one_draw_moves_all_images_as_it_moves_each(
    key: int, flips: tuple[bool, ...], size: tuple[int, int], padding: Any, fill: int
) -> None:
    left, up, right, down = flips
    before = [T.RandomHorizontalFlip(float(left)), T.RandomVerticalFlip(float(up))]
    behind = [T.RandomHorizontalFlip(float(right)), T.RandomVerticalFlip(float(down))]
    steps = T.Compose([*before, T.RandomCrop(size, padding, pad_if_needed=True, fill=fill), *behind])
    batch = torch.from_numpy(np.stack(SMALL)).permute(0, 3, 1, 2)
    wanted = torch.from_numpy(np.stack([steps.plan.run(image, key) for image in SMALL])).permute(0, 3, 1, 2)
    keys = np.full(2, key, np.uint64)
    assert torch.equal(T.OnBatch(steps)(batch, keys), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moves, "SHIFTED_NBYTES", 0)
        for dtype in (torch.uint8, torch.bfloat16, torch.float64):
            images = batch.to(dtype, memory_format=torch.contiguous_format)
            got = T.OnBatch(steps)(images, keys)
            assert torch.equal(got, wanted.to(dtype))
            assert torch.equal(images, batch.to(dtype))


def test_an_empty_batch_is_one_of_the_new_size_and_dtype(ways: Iterator[str]) -> None:
    wanted = {name: T.OnBatch(transform)(BATCH[:1], KEYS[:1])[:0] for name, transform in (EXACT | CLOSE).items()}
    for way in ways:
        for name, transform in (EXACT | CLOSE).items():
            got = T.OnBatch(transform)(BATCH[:0], KEYS[:0])
            assert (got.shape, got.dtype) == (wanted[name].shape, wanted[name].dtype), (way, name)
    for mix in (T.MixUp(3), T.CutMix(3)):
        images, labels = T.OnBatch([NORMALIZE, mix])((BATCH[:0], torch.arange(0)), KEYS[:0])
        assert (images.shape, labels.shape) == (BATCH[:0].shape, (0, 3))


@pytest.mark.parametrize("count", [1, len(BATCH)])
def test_steps_behind_a_crop_with_one_draw_leave_the_batch_alone(count: int) -> None:
    images = BATCH[:count].clone()
    steps = T.Compose([T.RandomCrop((20, images.shape[3])), T.RandomErasing(1.0), T.RandomHorizontalFlip(1.0)])
    got = T.OnBatch(steps)(images, np.full(count, KEYS[0]))
    assert torch.equal(images, BATCH[:count])
    wanted = torch.cat([T.OnBatch(steps)(image[None], KEYS[:1]) for image in images])
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64], ids=str)
def test_without_inplace_no_pair_of_steps_changes_the_batch(ways: Iterator[str], dtype: torch.dtype) -> None:
    erase = T.RandomErasing(1.0)
    last = [T.RandomVerticalFlip(), erase, NORMALIZE, T.RandomApply([erase, NORMALIZE])]
    first = {name: part for name, part in (EXACT | CLOSE).items() if not isinstance(part, T.Compose)}
    images = (BATCH[:2] if dtype == torch.uint8 else BATCH[:2] / 255).to(dtype)
    before, done = images.clone(), set()
    for way in ways:
        for name, part in first.items():
            for behind in last:
                for keys in (KEYS[:2], KEYS[[0, 0]]):
                    with suppress(ArgumentError, SampleError):  # some steps take levels only
                        T.OnBatch([part, behind])(images, keys)
                        done.add((way, name))
                    assert torch.equal(images, before), (way, part, behind)
    assert len(done) > 3 * 12


def test_in_place_only_what_changes_is_written() -> None:
    for transform, images in (
        (T.Compose([T.RandomHorizontalFlip(), T.RandomVerticalFlip()]), BATCH.clone()),
        (T.RandomErasing(0.8, value=0.5), BATCH / 255),
    ):
        before, wanted = images.clone(), T.OnBatch(transform)(images, KEYS)
        assert torch.equal(images, before)
        got = T.OnBatch(transform, inplace=True)(images, KEYS)
        assert got.data_ptr() == images.data_ptr()
        assert torch.equal(got, wanted)


def test_in_place_rows_that_share_memory_are_left_alone() -> None:
    one = BATCH[:1].clone()
    flip = T.RandomHorizontalFlip()
    got = T.OnBatch(flip, inplace=True)(one.expand(COUNT, -1, -1, -1), KEYS)
    assert torch.equal(one, BATCH[:1])
    assert torch.equal(got, T.OnBatch(flip)(one.repeat(COUNT, 1, 1, 1), KEYS))


@pytest.mark.parametrize("name", CLOSE)
def test_resampled_batches_are_one_level_away_at_most(ways: Iterator[str], name: str) -> None:
    wanted = expected(CLOSE[name]).int()
    for way in ways:
        got = T.OnBatch(CLOSE[name])(BATCH, KEYS).int()
        assert got.shape == wanted.shape, way
        assert (got - wanted).abs().max() <= 1, way


def test_a_whole_pipeline_is_within_its_tolerance() -> None:
    train = T.imagenet_train(32)
    got, wanted = T.OnBatch(train)(BATCH, KEYS), expected(train)
    assert (got - wanted).abs().max() <= 1.01 / 255 / min(T.IMAGENET_STD)


@pytest.mark.parametrize(
    "transform",
    [
        T.imagenet_train(24),
        T.imagenet_eval(24, 28),
        T.RandomResizedCrop(40, interpolation="bicubic"),
        T.Compose([T.Resize(20), T.RandomCrop(16)]),
        T.Compose([T.RandomCrop((60, 66), padding=4, fill=(9, 80, 200), pad_if_needed=True), T.Resize(20)]),
    ],
)
def test_images_of_different_sizes_become_one_batch(ways: Iterator[str], transform: T.Transform) -> None:
    photos = [random_image(40 + 3 * row, 70 - row, row) for row in range(COUNT)]
    samples = [transform.plan.run(photo, key) for photo, key in zip(photos, KEYS.tolist(), strict=True)]
    wanted = torch.stack([torch.as_tensor(sample) for sample in samples])
    is_levels = wanted.dtype == torch.uint8
    wanted, tolerance = (wanted.permute(0, 3, 1, 2), 1) if is_levels else (wanted, 1.01 / 255 / min(T.IMAGENET_STD))
    for way in ways:
        got = T.OnBatch(transform)([torch.from_numpy(photo).permute(2, 0, 1) for photo in photos], KEYS)
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), way
        assert (got.double() - wanted.double()).abs().max() <= tolerance, way


class Launches(TorchDispatchMode):
    """Counts operators that are launches on a device: all except views and empty memory."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func.__name__.startswith(("empty", "new_empty", "_unsafe_view")))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("transform", [T.imagenet_train(8), T.RandomCrop(8)])
def test_images_of_different_sizes_are_one_launch_each(transform: T.Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are a number that hardly depends on the batch."""
    monkeypatch.setattr(on_batch, "uses_kernels", lambda *_: False)
    monkeypatch.setattr(levels, "is_faster_by_rows", lambda _: False)
    photos = [torch.full((3, 20 + row % 7, 30 - row % 5), row, dtype=torch.uint8) for row in range(200)]
    with Launches() as launches:
        T.OnBatch(transform)(photos, np.arange(200, dtype=np.uint64))
    assert launches.count <= 200 + 300


@given(st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=5))
def test_many_streams_draw_the_numbers_of_single_ones(keys: list[int]) -> None:
    each, alone = DrawsEach(np.array(keys, np.uint64)), [Draws(key) for key in keys]
    assert each.unit().tolist() == [one.unit() for one in alone]
    assert each.permutation(4).tolist() == [one.permutation(4) for one in alone]
    assert each.between(0.3, 1.7).tolist() == [one.between(0.3, 1.7) for one in alone]
    assert each.below(7).tolist() == [one.below(7) for one in alone]


def test_loaders_give_the_same_batches_with_any_workers() -> None:
    data = torch.utils.data.TensorDataset(BATCH, torch.arange(COUNT))
    pipeline = T.OnBatch([T.RandomResizedCrop(16), T.RandomHorizontalFlip(), NORMALIZE, T.MixUp(COUNT), T.CutMix()])

    def batches(**arguments: Any) -> list[Any]:
        def collated(samples: list[Any]) -> Any:
            return pipeline(fl.collate.default(samples))

        with fl.DataLoader(data, 4, shuffle=True, seed=1, collate_fn=collated, **arguments) as loader:
            return [tensor for batch in loader for tensor in batch]

    plain = batches()
    for arguments in ({"num_workers": 2, "worker_method": "thread"}, {"num_workers": 1, "worker_method": "process"}):
        assert all(map(torch.equal, plain, batches(**arguments)))
    assert plain[1].shape == (4, COUNT)
    assert torch.allclose(plain[1].sum(1), torch.ones(4))


def test_keys_of_a_collate_function_are_not_those_of_samples() -> None:
    seen: list[Any] = []

    def collated(samples: list[Any]) -> Any:
        seen.append((fl.sample_rng(0).key, int(batch_keys(len(samples))[0])))
        more = batch_keys(7)  # such as several crops of each sample
        assert more[:2].tolist() == batch_keys(2).tolist()
        crops.extend(more.tolist())
        return samples

    crops: list[int] = []
    list(fl.DataLoader(range(4), 2, seed=0, collate_fn=collated))
    assert all(key != other for key, other in seen)
    assert len({other for _, other in seen}) == 2
    assert len(crops) == len({*crops}) == 14


class OwnFlip(T.RandomHorizontalFlip):
    def apply(self, image: Any, rng: Any) -> Any:
        return image


@pytest.mark.parametrize(
    "transform", [OwnFlip(), T.Compose([np.flipud]), T.RandomApply([OwnFlip()]), T.RandomChoice([OwnFlip()])]
)
def test_steps_without_an_operator_are_named(transform: T.Transform) -> None:
    with pytest.raises(ArgumentError, match="has no batched operator"):
        T.OnBatch(transform)


@pytest.mark.parametrize(
    ("pipeline", "batch", "message"),
    [
        (T.OnBatch(NORMALIZE), torch.zeros(3, 4, 5), r"not a tensor of shape \(3, 4, 5\)"),
        (T.OnBatch(NORMALIZE), torch.zeros(2, 5, 5, 3), r"not a tensor of shape \(2, 5, 5, 3\)"),
        (T.OnBatch(NORMALIZE), ([torch.zeros(5, 4)],), r"not an image of shape \(5, 4\)"),
        (
            T.OnBatch(NORMALIZE),
            [torch.zeros(3, 5, 4), torch.zeros(3, 4, 4)],
            "needs images of one shape and dtype, but the batch has 2",
        ),
        (T.OnBatch(NORMALIZE, images="image"), {"x": BATCH}, r"looks for the field 'image' in a dict of \['x'\]"),
        (T.OnBatch(T.MixUp(3)), BATCH, "MixUp mixes labels, too"),
        (T.OnBatch(T.MixUp(3)), (BATCH, torch.arange(COUNT)), "put it after ToTensor or Normalize"),
        (T.OnBatch(T.CutMix(3)), (BATCH, torch.arange(COUNT)), "labels from 0 to 11: classes are numbered from 0 to 2"),
        (
            T.OnBatch(T.CutMix(3)),
            (BATCH, torch.zeros(COUNT, 2, dtype=torch.int64)),
            "shares .batch, num_classes.; these are",
        ),
        (
            T.OnBatch(T.ColorJitter(0.5)),
            BATCH / 255,
            "ColorJitter takes uint8 levels.* torch.float32: put it",
        ),
        (T.OnBatch(T.RandomResizedCrop(8)), BATCH.half(), "RandomResizedCrop takes uint8 levels"),
        (T.OnBatch(T.GaussianBlur(99)), BATCH, "reaches beyond an image of 48 × 64"),
        (T.OnBatch(T.RandomCrop(100)), BATCH, "needs more than an image of 48 × 64"),
        (T.OnBatch(NORMALIZE), BATCH[:, :1], "Normalize has 3 means, but the images have 1 channel"),
        (
            T.OnBatch(T.MixUp(3)),
            (BATCH / 255, torch.rand(COUNT)),
            "shares .batch, num_classes.; these are torch.float32",
        ),
        (T.OnBatch(T.RandomCrop(4)), [BATCH[0], BATCH[1] / 255], "of one shape and dtype, but the batch has 2"),
        (T.OnBatch(T.CenterCrop(4)), [BATCH[0], BATCH[1] / 255], "of one shape and dtype, but the batch has 2"),
        (T.OnBatch(T.Resize(4)), [BATCH[0], BATCH[1][:1]], "of one shape and dtype, but the batch has 2"),
        (T.OnBatch(NORMALIZE), BATCH.long(), "takes uint8 levels.* but the images are torch.int64"),
        (T.OnBatch(T.RandomCrop(48, padding=1, fill=(1, 2, 3))), BATCH[:, :1], "3 levels in fill, but the image has 1"),
    ],
    ids=[
        "rank",
        "layout",
        "image",
        "sizes",
        "field",
        "no labels",
        "levels",
        "classes",
        "shares",
        "numbers",
        "crop of numbers",
        "blur",
        "crop",
        "means",
        "targets",
        "levels and numbers",
        "levels and numbers, centered",
        "gray among RGB",
        "integers",
        "fill",
    ],
)
def test_bad_batches_are_named(ways: Iterator[str], pipeline: T.OnBatch, batch: Any, message: str) -> None:
    for _ in ways:
        with pytest.raises(SampleError, match=message):
            pipeline(batch)


def test_fields_may_be_counted_from_the_end() -> None:
    flip = T.RandomHorizontalFlip(1.0)
    for batch in ((BATCH, 1), [BATCH, 1]):
        assert torch.equal(T.OnBatch(flip, images=-2)(batch)[0], BATCH.flip(-1))
    mixed = T.OnBatch([NORMALIZE, T.MixUp(COUNT)], images=-2, labels=-1)((BATCH, torch.arange(COUNT)))
    assert mixed[1].shape == (COUNT, COUNT)


@pytest.mark.parametrize("size", [(48, 64), (20, 20)])
def test_blurs_take_any_memory_format(ways: Iterator[str], size: tuple[int, int]) -> None:
    blur, batch = T.GaussianBlur((5, 7)), BATCH[:, :, : size[0], : size[1]]
    for _ in ways:
        wanted = T.OnBatch(blur)(batch.contiguous(), KEYS)
        for images in (batch, batch.contiguous(memory_format=torch.channels_last)):
            assert torch.equal(T.OnBatch(blur)(images, KEYS), wanted)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            T.RandomChoice([T.RandomHorizontalFlip(), T.ToTensor()]),
            r"RandomChoice makes torch.uint8 of .* with RandomHorizontalFlip, and torch.float32 of .* with ToTensor: ",
        ),
        (
            T.RandomChoice([T.Compose([T.RandomVerticalFlip(), T.CenterCrop(30)]), T.CenterCrop(20)]),
            r"\(3, 30, 30\) with RandomVerticalFlip and CenterCrop, and torch.uint8 of shape \(3, 20, 20\) with Cent",
        ),
        (
            T.RandomApply([T.Grayscale()]),
            r"makes torch.uint8 of .*1, 48, 64.* with Grayscale, and .*3, 48, 64.* without: .* behind RandomApply",
        ),
        (T.RandomApply([T.ColorJitter(0.4), T.ToTensor()]), r"with ColorJitter and ToTensor, and torch.uint8 of shape"),
    ],
)
def test_unlike_results_of_a_random_step_are_named(ways: Iterator[str], transform: T.Transform, message: str) -> None:
    for way in ways:
        by_samples = way == "kernels" and T.OnBatch(transform)._suits_kernels
        with pytest.raises(SampleError, match="OnBatch needs images of one shape and dtype" if by_samples else message):
            T.OnBatch(transform)(BATCH, KEYS)


def test_a_mixture_comes_last_and_needs_its_numbers() -> None:
    with pytest.raises(ArgumentError, match="transforms of images must come before MixUp and CutMix"):
        T.OnBatch([T.MixUp(3), NORMALIZE])
    with pytest.raises(ArgumentError, match=r"MixUp\(alpha=0\): give a number above 0"):
        T.MixUp(3, alpha=0)
    with pytest.raises(ArgumentError, match="CutMix needs num_classes"):
        T.OnBatch(T.CutMix())((BATCH, torch.arange(COUNT)), KEYS)
    with pytest.raises(ArgumentError, match=r"12 images, but keys of shape \(3,\)"):
        T.OnBatch(NORMALIZE)(BATCH, KEYS[:3])


def test_containers_keep_their_kind() -> None:
    pipeline = T.OnBatch(T.CenterCrop(8), images="x")
    got = pipeline({"x": BATCH, "name": "n"}, KEYS)
    assert (got["x"].shape[-1], got["name"]) == (8, "n")
    assert type(T.OnBatch(T.CenterCrop(8))((BATCH, 3), KEYS)) is tuple


def test_products_and_rows_resample_alike_where_a_window_leaves_the_image() -> None:
    recipe: Any = T.Compose([T.Resize(20), T.CenterCrop((28, 30))]).plan.steps[0].step
    shown = resample.geometries(recipe.recipe, KEYS, [(48, 64)] * COUNT)
    products = resample.resample_by_products(BATCH, shown, "bilinear").int()
    assert (products - resample.resample_rows(BATCH, shown, "bilinear").int()).abs().max() <= 1
    assert products[:, :, 0].max() == 0


def test_an_operator_that_the_backend_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> Any:
        raise NotImplementedError("aten::index_copy is not implemented for the MPS device")

    monkeypatch.setattr(levels, "is_faster_by_rows", lambda _: False)
    monkeypatch.setitem(operators.OPERATORS, T.RandomVerticalFlip, lacking)
    with pytest.raises(NotImplementedError, match="index_copy") as caught:
        T.OnBatch([T.RandomHorizontalFlip(), T.RandomVerticalFlip()])(BATCH, KEYS)
    (note,) = caught.value.__notes__
    assert "RandomVerticalFlip" in note
    assert "on cpu" in note
    assert "leave it in the dataset's transform" in note


class Counted(NamedTuple("Counted", [("images", Any), ("count", Any)])):
    """A batch whose constructor takes other arguments than its fields."""

    __slots__ = ()

    def __new__(cls, images: torch.Tensor) -> Any:
        return super().__new__(cls, images, len(images))


def test_a_named_tuple_keeps_its_type_without_its_constructor() -> None:
    got = T.OnBatch(EXACT["center crop"])(Counted(BATCH), KEYS)
    assert type(got) is Counted
    assert got.count == COUNT
    assert got.images.shape[2:] == (30, 40)
