"""Plans: fusion, whole batches, and errors that name their row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transform_cases import difference, first_recipe, jpeg, ordinary, png, random_image

from feedline import SampleRng, images
from feedline import transforms as T
from feedline.core.rng import derive, torch_keys
from feedline.errors import ArgumentError, SampleError
from feedline.images import CenterBox, RandomBox, Recipe, WholeBox
from feedline.transforms import IMAGENET_MEAN, IMAGENET_STD, imagenet_eval, imagenet_train, plan
from feedline.transforms.native_steps import Window

NORMALIZE = T.Normalize(IMAGENET_MEAN, IMAGENET_STD)
NUMBERS = {"mean": IMAGENET_MEAN, "std": IMAGENET_STD, "layout": "CHW"}

SOURCES: Sequence[Any] = [
    *(random_image(40 + 7 * i, 90 - 5 * i, seed=i) for i in range(6)),
    *(jpeg(random_image(300, 400 + i, seed=i)) for i in range(6)),
    *(png(random_image(60, 44, seed=i)) for i in range(6)),
]


def test_a_foreign_callable_has_no_plan() -> None:
    assert plan(lambda image: image) is None
    assert plan(None) is None
    assert isinstance(plan(T.Resize(8)), T.ImagePlan)


@pytest.mark.parametrize(
    ("transforms", "recipe"),
    [
        ([T.RandomResizedCrop(32)], Recipe((32, 32), RandomBox())),
        (
            [T.RandomResizedCrop((32, 24), (0.5, 1), (1, 2), "bicubic"), T.RandomHorizontalFlip(0.3)],
            Recipe((32, 24), RandomBox((0.5, 1), (1, 2)), flip=0.3, interpolation="bicubic"),
        ),
        (
            [T.RandomResizedCrop(32), T.RandomHorizontalFlip(), NORMALIZE],
            Recipe((32, 32), RandomBox(), flip=0.5, dtype=torch.float32, **NUMBERS),
        ),
        (
            [T.Resize(40), T.CenterCrop(32), T.ToTensor(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD, torch.bfloat16)],
            Recipe((32, 32), CenterBox(40), dtype=torch.bfloat16, **NUMBERS),
        ),
        ([T.Resize(40, "bicubic"), T.CenterCrop(48)], Recipe((48, 48), CenterBox(40), interpolation="bicubic")),
        (
            [T.Resize((30, 20)), T.RandomHorizontalFlip(), T.ToTensor()],
            Recipe((30, 20), WholeBox(), flip=0.5, dtype=torch.float32, layout="CHW"),
        ),
        ([T.RandomResizedCrop(32), T.ToTensor(torch.uint8)], Recipe((32, 32), RandomBox(), layout="CHW")),
        (
            [T.RandomResizedCrop(32), T.ToTensor(torch.uint8, "HWC"), NORMALIZE],
            Recipe((32, 32), RandomBox(), dtype=torch.float32, mean=IMAGENET_MEAN, std=IMAGENET_STD),
        ),
        (
            [T.RandomResizedCrop(32), T.Normalize([0.5], [0.25])],
            Recipe((32, 32), RandomBox(), dtype=torch.float32, layout="CHW", mean=(0.5,) * 3, std=(0.25,) * 3),
        ),
    ],
)
def test_steps_that_the_kernels_can_combine_are_one_call(transforms: list[T.Transform], recipe: Recipe) -> None:
    for pipeline in (T.Compose(transforms), T.Compose([T.Compose(transforms[:1]), T.Compose(transforms[1:])])):
        assert len(pipeline.plan.steps) == 1
        assert first_recipe(pipeline) == recipe
        assert pipeline.plan.batchable


@pytest.mark.parametrize(
    ("transforms", "count"),
    [
        ([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.RandomHorizontalFlip()], 2),
        ([T.RandomResizedCrop(32), T.ColorJitter(0.1), NORMALIZE], 3),
        ([T.RandomResizedCrop(32), NORMALIZE, T.Normalize([0.5], [0.5])], 2),
        ([T.Resize(40), T.RandomHorizontalFlip(), T.CenterCrop(32)], 3),
        ([T.ColorJitter(0.1), T.RandomResizedCrop(32), T.RandomHorizontalFlip(), NORMALIZE], 2),
        ([T.Resize((40, 40)), T.CenterCrop(32)], 2),
        ([T.RandomCrop(32), T.RandomHorizontalFlip(), T.ToTensor(), NORMALIZE], 3),
    ],
)
def test_steps_that_cannot_be_fused_stay_separate(transforms: list[T.Transform], count: int) -> None:
    assert len(T.Compose(transforms).plan.steps) == count


def test_a_fused_flip_takes_the_number_after_the_box_and_else_its_own() -> None:
    array = random_image()
    crop, both = T.RandomResizedCrop(16), T.Compose([T.RandomResizedCrop(16), T.RandomHorizontalFlip(1.0)])
    for key in range(20):
        assert difference(both(array, SampleRng(key)), crop(array, SampleRng(derive(key, 0)))[:, ::-1]) == 0
    alone, after = T.RandomHorizontalFlip(), T.Compose([T.Resize((90, 120)), T.RandomHorizontalFlip()])
    for key in range(20):
        assert difference(after(array, SampleRng(key)), alone(array, SampleRng(derive(key, 1)))) == 0


PIPELINES: list[T.Transform] = [
    T.RandomResizedCrop(16),
    T.RandomCrop(24, padding=2, padding_mode="reflect"),
    imagenet_train(16),
    imagenet_eval(16, 20),
    imagenet_train(16, torch.bfloat16),
    T.Resize((12, 18)),
    T.Compose([T.RandomResizedCrop(16), T.ToTensor(torch.uint8)]),
    T.Compose([T.RandomResizedCrop(16), T.RandomHorizontalFlip(), T.ColorJitter(0.4, 0.4, 0.4, 0.1), NORMALIZE]),
    T.Compose([T.RandomResizedCrop(16), T.RandomVerticalFlip(), T.RandomGrayscale(), T.GaussianBlur(3)]),
    T.Compose([T.RandomResizedCrop(16), NORMALIZE, T.RandomErasing(0.7, value="random")]),
    T.Compose([T.RandomResizedCrop(16), T.ToTensor(), T.RandomErasing(0.7), T.Normalize([0.5], [0.5], torch.bfloat16)]),
    T.Compose([T.RandomResizedCrop(16), T.ToTensor(torch.uint8), T.RandomErasing(0.7, value="random")]),
    T.Compose([T.RandomCrop(16), T.ToTensor(torch.uint8), T.RandomApply([T.RandomErasing(0.7, value=(1, 2, 3))])]),
    T.Compose([T.RandomCrop(16), NORMALIZE, T.RandomApply([T.RandomErasing(0.7, value=-1)]), T.RandomApply([])]),
    T.Compose([T.Resize(40), T.RandomCrop(32), T.RandomHorizontalFlip(), T.ToTensor()]),
    T.Compose([T.Resize((40, 40)), T.CenterCrop(16), NORMALIZE]),
    T.Compose([T.ColorJitter(0.4), T.RandomResizedCrop(16), T.RandomHorizontalFlip(), NORMALIZE]),
    T.Compose([T.RandomCrop(16), T.Grayscale(), T.Normalize([0.5], [0.25])]),
    T.Compose([T.RandomResizedCrop(16), T.Grayscale()]),
    T.Compose([T.RandomResizedCrop(16), T.Grayscale(3), T.RandomErasing(0.8, value=(9, 8, 7))]),
    T.Compose(
        [T.RandomResizedCrop(16), T.RandomApply([T.ColorJitter(0.5)], 0.8), T.RandomApply([T.RandomVerticalFlip()])]
    ),
    T.Compose([T.RandomChoice([T.RandomResizedCrop(16), T.RandomCrop(16)]), T.RandomApply([NORMALIZE], 1.0)]),
]


@pytest.mark.parametrize("transform", PIPELINES, ids=repr)
def test_a_batch_is_its_samples_bit_for_bit(transform: T.Transform) -> None:
    found = transform.plan
    if not found.batchable:
        with pytest.raises(ArgumentError, match=r"make them one by one with sample\(\), or crop or resize"):
            found.batch(SOURCES, None, ordinary)
        return
    keys = np.random.default_rng(0).integers(0, 2**64, len(SOURCES), np.uint64)
    samples = [found.sample(source, SampleRng(key)) for source, key in zip(SOURCES, keys.tolist(), strict=True)]
    expected = default_collate(samples)
    for threads in (1, 4):
        batch = found.batch(SOURCES, keys, ordinary, threads=threads)
        assert batch.dtype == expected.dtype
        assert torch.equal(batch, expected)
    if found.is_random:
        assert not torch.equal(found.batch(SOURCES, keys + np.uint64(1), ordinary), expected)


@pytest.mark.parametrize(
    "transform",
    [imagenet_train(16), T.Compose([T.Resize(40), T.RandomCrop(24)]), T.Compose([T.RandomCrop(24), NORMALIZE])],
)
def test_grids_reach_the_decoder_and_change_nothing(transform: T.Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [jpeg(random_image(64, 96, seed=i)) for i in range(3)]
    grids = [np.full(5 + i, 9, np.uint16) for i in range(3)]  # these fit no file, so that the plain way is taken
    seen: list[Any] = []
    one, many = images.read_one, images.read_batch

    def read_one(source: Any, recipe: Recipe, key: int | None = None, *, grid: Any = None) -> torch.Tensor:
        seen.append(grid)
        return one(source, recipe, key, grid=grid)

    def read_batch(*arguments: Any, grids: Any = None, threads: int = 1) -> None:
        seen.extend(grids or [])
        many(*arguments, grids=grids, threads=threads)

    monkeypatch.setattr(images, "read_one", read_one)
    monkeypatch.setattr(images, "read_batch", read_batch)
    keys = np.arange(3, dtype=np.uint64)
    expected = transform.plan.batch(files, keys, ordinary)
    seen.clear()
    assert torch.equal(transform.plan.batch(files, keys, ordinary, grids), expected)
    if isinstance(transform.plan.steps[0].step, Window):
        assert [grid is own for grid, own in zip(seen, grids, strict=True)] == [True] * 3
    seen.clear()
    sample = transform.plan.sample(files[1], SampleRng(1), grids[1])
    assert torch.equal(torch.as_tensor(sample), expected[1])
    if not isinstance(transform.plan.steps[0].step, T.RandomCrop):
        assert seen[0] is grids[1]


def test_only_samples_of_known_shape_are_batchable() -> None:
    assert not T.Resize(40).plan.batchable
    assert not T.ToTensor().plan.batchable
    assert not T.Compose([]).plan.batchable
    assert not T.Compose([T.RandomResizedCrop(8), T.OnArray(np.asarray)]).plan.batchable
    assert not T.Compose([T.RandomResizedCrop(8), T.RandomApply([T.Grayscale()])]).plan.batchable
    assert not T.Compose([T.RandomResizedCrop(8), T.RandomChoice([T.Resize(4), T.Resize((4, 5))])]).plan.batchable
    assert T.Compose([T.RandomResizedCrop(8), T.RandomChoice([T.Resize(4), T.CenterCrop(4)])]).plan.batchable
    assert T.Compose([T.ToTensor(), T.Normalize([0.5], [0.5])]).plan.spec is not None


def test_plans_know_whether_they_draw() -> None:
    assert imagenet_train().plan.is_random
    assert not imagenet_eval().plan.is_random
    assert not T.Compose([T.Resize(4), T.Grayscale(), T.OnArray(np.asarray), T.ToTensor()]).plan.is_random
    assert T.Compose([T.Resize(4), T.RandomVerticalFlip()]).plan.is_random


def test_without_keys_torch_decides_as_one_by_one() -> None:
    found = imagenet_train(16).plan
    torch.manual_seed(3)
    expected = found.batch(SOURCES, torch_keys(len(SOURCES)), ordinary)
    torch.manual_seed(3)
    assert torch.equal(found.batch(SOURCES, None, ordinary), expected)
    torch.manual_seed(3)
    assert torch.equal(default_collate([found.sample(source) for source in SOURCES]), expected)


def test_no_rows_make_an_empty_batch() -> None:
    for transform in (imagenet_train(16), T.Compose([T.RandomCrop(16), T.ColorJitter(0.1), NORMALIZE])):
        assert transform.plan.batch([], None, ordinary).shape == (0, 3, 16, 16)


def test_the_batch_is_in_the_given_memory() -> None:
    made: list[torch.Tensor] = []

    def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(ordinary(shape, dtype))
        return made[-1]

    for transform in PIPELINES:
        if transform.plan.batchable:
            assert transform.plan.batch(SOURCES, None, empty) is made[-1]


@pytest.mark.parametrize(
    ("transform", "row"),
    [
        (imagenet_train(16), 37),
        (T.Compose([T.RandomResizedCrop(16), T.ColorJitter(0.1)]), 0),
        (T.Compose([T.RandomResizedCrop(16), T.ColorJitter(0.1)]), 37),
        (T.Compose([T.RandomResizedCrop(16), T.ColorJitter(0.1), NORMALIZE]), 5),
        (T.Compose([T.RandomCrop(16), NORMALIZE]), 37),
        (T.Compose([T.Resize(20), T.RandomCrop(16)]), 5),
    ],
    ids=repr,
)
def test_a_bad_image_is_reported_with_its_row_and_path(transform: T.Transform, row: int, tmp_path: Path) -> None:
    sources: list[Any] = [random_image()] * 40
    sources[row] = b"no image"
    with pytest.raises(images.ImageError, match=r"could not be read") as caught:
        transform.plan.batch(sources, None, ordinary)
    assert caught.value.row == row
    assert f"row {row}" in str(caught.value) or "row" not in str(caught.value)
    sources[row] = str(tmp_path / "bad.jpg")
    (tmp_path / "bad.jpg").write_bytes(b"no image")
    with pytest.raises(images.ImageError, match=r"bad\.jpg could not be read") as caught:
        transform.plan.batch(sources, None, ordinary)
    assert caught.value.row == row


@pytest.mark.parametrize("row", [0, 20])
def test_an_image_that_does_not_fit_is_reported_with_its_row(row: int) -> None:
    sources = [random_image()] * 30
    sources[row] = random_image(8, 8)
    with pytest.raises(SampleError, match=rf"the image in row {row}: RandomCrop.* of 8 × 8 pixels") as caught:
        T.RandomCrop(16).plan.batch(sources, None, ordinary)
    assert isinstance(caught.value, images.ImageError)
    assert caught.value.row == row


def test_images_of_different_sizes_cannot_slip_into_one_batch() -> None:
    """A callable of torch's collate would refuse them, too; the plan does so before anything is read."""
    with pytest.raises(ArgumentError, match=r"shape is not known beforehand"):
        T.Resize(16).plan.batch([random_image(), random_image(40, 90)], None, ordinary)


def turned(image: Any) -> Any:
    return image.transpose(-1, -2)


def second(image: Any) -> Any:
    return image[1:2].expand(3, -1, -1)


@dataclass(frozen=True)
class View(T.Transform):
    """A step that returns a view of its tensor."""

    function: Any
    accepts_tensors = True
    is_random = False

    def apply(self, image: Any, rng: Any) -> Any:
        return self.function(image)


@pytest.mark.parametrize("function", [turned, second, lambda image: image[:1].expand(3, -1, -1), lambda image: image])
def test_steps_may_return_views_of_a_row(function: Any) -> None:
    found = T.Compose([T.Resize((8, 8)), T.ToTensor(), View(function)]).plan
    keys = np.arange(3, dtype=np.uint64)
    samples = [found.sample(source, SampleRng(key)) for key, source in enumerate(SOURCES[:3])]
    assert torch.equal(found.batch(SOURCES[:3], keys, ordinary), default_collate(samples))


def test_gray_images_cannot_slip_into_a_batch_of_rgb() -> None:
    gray = [random_image(20, 30)[:, :, :1]] * 2
    with pytest.raises(ArgumentError, match=r"a sample came out with shape \(1, 16, 16\) in a batch of \(3, 16, 16\)"):
        T.Compose([T.RandomCrop(16), T.ToTensor()]).plan.batch(gray, None, ordinary)
