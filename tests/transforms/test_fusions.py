"""Transforms from outside: one class each, and one row of `FUSIONS` to run as part of another step."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils.data import default_collate
from transform_cases import jpeg, random_image

import feedline as fl
from feedline import SampleRng
from feedline.errors import ArgumentError
from feedline.images import ImageError
from feedline.transforms import (
    FUSIONS,
    CenterCrop,
    Compose,
    Draws,
    ImageSpec,
    Normalize,
    PlannedStep,
    RandomApply,
    RandomChoice,
    RandomCrop,
    RandomErasing,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Resize,
    ToTensor,
    Transform,
    register_fusion,
    unregister_fusion,
)
from feedline.transforms.native_steps import Window

Pixels = NDArray[np.uint8]
KEYS = np.random.default_rng(7).integers(0, 2**64, 12, np.uint64)


@dataclass(frozen=True)
class LevelTable(Transform):
    """Replaces each level by an entry of a table."""

    table: tuple[int, ...]
    is_random = False

    def apply(self, image: Pixels, rng: Draws) -> Pixels:
        return np.array(self.table, np.uint8)[image]


@dataclass(frozen=True)
class Mirror(Transform):
    """Always exchanges left and right; the result is a view with a negative stride."""

    is_random = False

    def apply(self, image: Pixels, rng: Draws) -> Pixels:
        return image[:, ::-1]


@dataclass(frozen=True)
class Brighten(Transform):
    """Adds up to `most` levels, the same for all pixels."""

    most: int

    def apply(self, image: Pixels, rng: Draws) -> Pixels:
        return np.minimum(image.astype(np.int64) + rng.below(self.most + 1), 255).astype(np.uint8)


@dataclass(frozen=True)
class Halve(Transform):
    """Every second row and column."""

    is_random = False

    def apply(self, image: Pixels, rng: Draws) -> Pixels:
        return image[::2, ::2]

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        if spec is None or spec.size is None:
            return spec
        return replace(spec, size=(-(-spec.size[0] // 2), -(-spec.size[1] // 2)))


@dataclass(frozen=True)
class Negative(Transform):
    """Changes the sign of a tensor."""

    is_random = False
    accepts_tensors = True

    def apply(self, image: Any, rng: Draws) -> Any:
        return -image


def fuse_tables(before: PlannedStep, after: PlannedStep) -> PlannedStep:
    assert isinstance(before.step, LevelTable)
    assert isinstance(after.step, LevelTable)
    both = np.array(after.step.table)[list(before.step.table)]
    return replace(after, step=LevelTable(tuple(both.tolist())))


def fuse_mirror(before: PlannedStep, after: PlannedStep) -> PlannedStep | None:
    window = before.step
    assert isinstance(window, Window)
    if window.recipe.flip or window.conversion is not None:
        return None
    return replace(before, step=replace(window, recipe=replace(window.recipe, flip=1.0)))


@pytest.fixture
def rows() -> Iterator[None]:
    """The rows of this module's transforms, removed afterwards."""
    register_fusion(LevelTable, LevelTable, fuse_tables)
    register_fusion(Window, Mirror, fuse_mirror)
    yield
    unregister_fusion(LevelTable, LevelTable)
    unregister_fusion(Window, Mirror)


INVERT = LevelTable(tuple(range(255, -1, -1)))
POSTERIZE = LevelTable(tuple(level & 0xE0 for level in range(256)))
NORMALIZE = Normalize([0.5], [0.25])

PIPELINES: list[tuple[list[Transform], int]] = [
    ([RandomResizedCrop(16), INVERT, POSTERIZE, NORMALIZE], 3),
    ([RandomCrop(16), INVERT, POSTERIZE, INVERT, ToTensor()], 3),
    ([RandomResizedCrop(16), Mirror()], 1),
    ([RandomResizedCrop(16), Mirror(), NORMALIZE], 1),
    ([Resize((16, 20)), Mirror(), NORMALIZE], 1),
    ([Resize(32), CenterCrop(16), Mirror(), INVERT, NORMALIZE], 3),
    ([RandomResizedCrop(16), RandomHorizontalFlip(), Mirror(), NORMALIZE], 3),
]


def ordinary(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def samples(transform: Transform) -> list[Any]:
    sources = [jpeg(random_image(48, 64, seed=seed)) for seed in range(len(KEYS))]
    return [transform(source, SampleRng(key)) for source, key in zip(sources, KEYS.tolist(), strict=True)]


@pytest.mark.parametrize(("transforms", "count"), PIPELINES, ids=repr)
def test_a_registered_row_gives_the_pixels_of_both_steps(
    transforms: list[Transform], count: int, request: pytest.FixtureRequest
) -> None:
    apart = Compose(transforms)
    expected = default_collate(samples(apart))
    request.getfixturevalue("rows")
    fused = Compose(transforms)
    assert len(fused.plan.steps) == count
    assert len(fused.plan.steps) < len(apart.plan.steps) or count == 3
    assert torch.equal(default_collate(samples(fused)), expected)
    sources = [jpeg(random_image(48, 64, seed=seed)) for seed in range(len(KEYS))]
    for plan in (apart.plan, fused.plan, pickle.loads(pickle.dumps(fused.plan))):
        assert torch.equal(plan.batch(sources, KEYS, ordinary, threads=2), expected)
    assert fused.plan.supports_threads is (count == 1)


@pytest.mark.parametrize(
    "transform",
    [
        Compose([RandomResizedCrop(16), Brighten(90)]),
        Compose([Brighten(90), RandomResizedCrop(16), Mirror()]),
        Compose([RandomCrop(16), Mirror(), Brighten(20), NORMALIZE]),
        Compose([RandomResizedCrop(17), Halve()]),
        Compose([RandomResizedCrop(17), Halve(), NORMALIZE, Negative(), RandomErasing(0.5)]),
        Compose([RandomResizedCrop(16), RandomApply([Brighten(90), Mirror()])]),
        Compose([RandomResizedCrop(16), RandomChoice([Brighten(90), Mirror()]), ToTensor()]),
    ],
    ids=repr,
)
def test_a_transform_from_outside_is_one_class(transform: Transform) -> None:
    one_by_one = default_collate(samples(transform))
    sources = [jpeg(random_image(48, 64, seed=seed)) for seed in range(len(KEYS))]
    assert torch.equal(transform.plan.batch(sources, KEYS, ordinary), one_by_one)
    assert pickle.loads(pickle.dumps(transform)) == transform
    assert all(sample.flags.c_contiguous for sample in samples(transform) if isinstance(sample, np.ndarray))


def test_its_randomness_is_the_samples() -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    levels = [int(Brighten(50)(image, SampleRng(key))[0, 0, 0]) for key in range(400)]
    assert levels == [Draws(key).below(51) for key in range(400)]
    assert set(levels) == set(range(51))
    assert Brighten(50).plan.is_random
    assert not Mirror().plan.is_random


def test_it_gets_an_array_for_every_input() -> None:
    array = random_image(8, 9)
    expected = array[:, ::-1]
    for image in (array, torch.tensor(array).permute(2, 0, 1)):
        assert np.array_equal(Mirror()(image), expected)
    foreign = Compose([lambda image: image.rotate(180), Mirror()])
    assert np.array_equal(foreign(array), array[::-1])
    assert torch.equal(Compose([ToTensor(), Negative()])(array), -ToTensor()(array))


def test_hooks_of_lowered_transforms_are_those_of_their_steps() -> None:
    crop, pipeline = RandomResizedCrop(16), Compose([RandomResizedCrop(16), NORMALIZE])
    array = random_image(48, 64)
    assert np.array_equal(crop.apply(array, Draws(3)), crop(array, SampleRng(3)))
    assert torch.equal(pipeline.apply(array, Draws(3)), pipeline(array, SampleRng(3)))
    assert crop.infer(ImageSpec()) == ImageSpec((16, 16))
    assert pipeline.infer(ImageSpec()) == pipeline.plan.spec


def test_datasets_read_batches_with_it(rows: None, tmp_path: Any) -> None:
    (tmp_path / "class").mkdir()
    for seed in range(6):
        (tmp_path / "class" / f"{seed}.jpg").write_bytes(jpeg(random_image(48, 64, seed=seed)))
    transform = Compose([RandomResizedCrop(16), Mirror(), INVERT, POSTERIZE])
    dataset = fl.datasets.ImageFolder(tmp_path, transform)
    [inline] = fl.DataLoader(dataset, 6, seed=1)
    [processes] = fl.DataLoader(dataset, 6, seed=1, num_workers=1, worker_method="process")
    assert torch.equal(inline[0], processes[0])
    one_by_one = [transform(tmp_path / "class" / f"{seed}.jpg", SampleRng(0)).shape for seed in range(6)]
    assert tuple(inline[0].shape) == (6, *one_by_one[0])


@dataclass(frozen=True)
class Forgetful(Halve):
    """Changes the size without declaring it."""

    def infer(self, spec: ImageSpec | None) -> ImageSpec | None:
        return spec


@dataclass(frozen=True)
class Floating(Mirror):
    """Returns levels that are no uint8."""

    def apply(self, image: Pixels, rng: Draws) -> Any:
        return image / 255


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (
            Forgetful(),
            r"uint8 of shape \(8, 8, 3\), but .* promised torch.uint8 of shape \(16, 16, 3\)",
        ),
        (Floating(), r"float64 of shape \(16, 16, 3\), but .* promised torch.uint8"),
    ],
)
def test_a_batch_refuses_samples_that_were_not_inferred(transform: Transform, message: str) -> None:
    pipeline = Compose([RandomResizedCrop(16), transform])
    with pytest.raises(ArgumentError, match=message):
        pipeline.plan.batch([random_image(48, 64)], KEYS[:1], ordinary)


def test_levels_that_are_not_uint8_are_refused_by_the_next_step() -> None:
    with pytest.raises(ArgumentError, match=r"array of float64 .*levels are uint8"):
        Compose([Floating(), Mirror()])(random_image(8, 8))


def test_a_subclass_is_not_fused_by_the_row_of_its_base(rows: None) -> None:
    @dataclass(frozen=True)
    class Reversed(LevelTable):
        def apply(self, image: Pixels, rng: Draws) -> Pixels:
            return super().apply(image, rng)[::-1]

    pipeline = Compose([INVERT, Reversed(INVERT.table)])
    assert len(pipeline.plan.steps) == 2
    assert np.array_equal(pipeline(random_image(8, 8)), random_image(8, 8)[::-1])


def test_a_pair_has_one_function(rows: None) -> None:
    register_fusion(LevelTable, LevelTable, fuse_tables)  # the same again, as when a module is imported twice
    with pytest.raises(ArgumentError, match="LevelTable and LevelTable already have a function"):
        register_fusion(LevelTable, LevelTable, fuse_mirror)
    with pytest.raises(ArgumentError, match="Window and RandomHorizontalFlip already have a function"):
        register_fusion(Window, RandomHorizontalFlip, fuse_mirror)
    with pytest.raises(ArgumentError, match=r"give two classes of transforms or steps, not LevelTable\("):
        register_fusion(INVERT, LevelTable, fuse_tables)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="give a function of the two planned steps, not 3"):
        register_fusion(Mirror, LevelTable, 3)  # type: ignore[arg-type]
    assert (Mirror, LevelTable) not in FUSIONS


@dataclass(frozen=True)
class Empty(Transform):
    """Defines nothing."""


def test_a_transform_without_apply_is_named() -> None:
    with pytest.raises(NotImplementedError, match=r"Empty must define apply\(image, rng\)"):
        Empty()(random_image(8, 8))


def test_a_failing_source_is_named_with_its_row() -> None:
    sources: list[Any] = [random_image(48, 64)] * 20
    sources[17] = b"no image"
    for transform in (Mirror(), Compose([Mirror(), RandomCrop(16)])):
        with pytest.raises(ImageError, match="the image could not be read") as caught:
            Compose([transform, RandomResizedCrop(16)]).plan.batch(sources, KEYS[:1].repeat(20), ordinary)
        assert caught.value.row == 17
