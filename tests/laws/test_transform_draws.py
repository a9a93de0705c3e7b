"""Laws of transforms: torchvision's distributions, addressed randomness, and one result on every path."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.utils.data import Dataset, default_collate
from transform_cases import first_geometry, first_recipe, ordinary, png, random_image

import feedline as fl
from feedline import SampleRng, images
from feedline import transforms as T
from feedline.core.rng import Draws, derive
from feedline.transforms import imagenet_train

Floats = NDArray[np.float64]

DRAWN = 4000
"""Samples of each distribution. Seeds are fixed, so a test that passes once always does."""


def alike(found: Sequence[float], expected: Sequence[float]) -> bool:
    """Kolmogorov and Smirnov's test of two samples, at a level of one false alarm in 10^5."""
    places = np.sort(np.concatenate([found, expected]))
    shares = [np.searchsorted(np.sort(sample), places, "right") / len(sample) for sample in (found, expected)]
    scale = math.sqrt((len(found) + len(expected)) / (len(found) * len(expected)))
    return bool(np.abs(shares[0] - shares[1]).max() < math.sqrt(-math.log(1e-5 / 2) / 2) * scale)


def even(counts: Sequence[int], weights: Sequence[float] | None = None) -> bool:
    """Pearson's chi-square test within six standard deviations: a false alarm in 10^8 runs."""
    shares = np.ones(len(counts)) if weights is None else np.asarray(weights, float)
    expected = shares / shares.sum() * sum(counts)
    freedom = len(counts) - 1
    statistic = float(((np.asarray(counts) - expected) ** 2 / expected).sum())
    return abs(statistic - freedom) < 6 * math.sqrt(2 * freedom)


def documented_box(
    rng: np.random.Generator, height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[int, int, int, int]:
    """(y, x, height, width) by torchvision's documentation of RandomResizedCrop."""
    for _ in range(10):
        area = height * width * rng.uniform(*scale)
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(rng.integers(0, height - tall + 1)), int(rng.integers(0, width - wide + 1)), tall, wide
    tall, wide = height, width
    if width / height < ratio[0]:
        tall = round(width / ratio[0])
    elif width / height > ratio[1]:
        wide = round(height * ratio[1])
    return (height - tall) // 2, (width - wide) // 2, tall, wide


@pytest.mark.parametrize("shape", [(90, 120), (400, 60)])
@pytest.mark.parametrize(("scale", "ratio"), [((0.08, 1.0), (3 / 4, 4 / 3)), ((0.3, 0.9), (0.5, 1.0))])
def test_boxes_are_torchvisions(shape: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]) -> None:
    transform = T.Compose([T.RandomResizedCrop(8, scale, ratio), T.RandomHorizontalFlip()])
    array, rng = np.zeros((*shape, 3), np.uint8), np.random.default_rng(1)
    boxes = np.array([first_geometry(transform, key, array).box for key in range(DRAWN)])
    expected = np.array([documented_box(rng, *shape, scale, ratio) for _ in range(DRAWN)])[:, [1, 0, 3, 2]]
    for of in (
        lambda box: box[:, 0],
        lambda box: box[:, 1],
        lambda box: box[:, 2] * box[:, 3],
        lambda box: box[:, 2] / box[:, 3],
        lambda box: box[:, 0] / np.maximum(1, shape[1] - box[:, 2]),
        lambda box: box[:, 1] / np.maximum(1, shape[0] - box[:, 3]),
    ):
        assert alike(of(boxes), of(expected))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_probabilities_are_kept(p: float) -> None:
    array = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    for transform in (
        T.RandomHorizontalFlip(p),
        T.RandomVerticalFlip(p),
        T.RandomGrayscale(p),
        T.RandomApply([T.RandomVerticalFlip(1.0)], p),
        T.RandomErasing(p, scale=(0.3, 0.3), ratio=(1.0, 1.0), value=77),
        T.Compose([T.Resize((2, 2)), T.RandomHorizontalFlip(p)]),
    ):
        changed = sum(bool((transform(array, SampleRng(key)) != array).any()) for key in range(DRAWN))
        assert even([changed, DRAWN - changed], [p, 1 - p]), transform


def test_flips_after_a_random_crop_are_fair_and_independent_of_the_box() -> None:
    transform = T.Compose([T.RandomResizedCrop(8), T.RandomHorizontalFlip(0.5)])
    array = np.zeros((90, 120, 3), np.uint8)
    drawn = [first_geometry(transform, key, array) for key in range(DRAWN)]
    wide = np.median([each.box[2] for each in drawn])
    seen = [(each.flip, bool(each.box[2] > wide)) for each in drawn]
    counts = [seen.count(each) for each in FOUR]
    large = sum(is_large for _, is_large in seen) / DRAWN
    assert even(counts, [large if is_large else 1 - large for _, is_large in FOUR])


FOUR = [(flip, large) for flip in (False, True) for large in (False, True)]


def test_random_crops_begin_anywhere() -> None:
    rows, columns = np.meshgrid(np.arange(9, dtype=np.uint8), np.arange(7, dtype=np.uint8), indexing="ij")
    array = np.stack([rows, columns, rows], axis=2)
    corners = [T.RandomCrop((4, 3), padding=None)(array, SampleRng(key))[0, 0, :2] for key in range(DRAWN)]
    counts = np.zeros((6, 5), int)
    np.add.at(counts, tuple(np.array(corners).T), 1)
    assert even(counts.ravel().tolist())


def test_color_jitter_draws_torchvisions_factors_in_any_order() -> None:
    jitter = T.ColorJitter(0.4, (0.5, 3.0), 0.9, 0.2)
    drawn = [jitter.adjustments(Draws(key)) for key in range(DRAWN)]
    orders = [tuple(which for which, _ in each) for each in drawn]
    assert even([orders.count(order) for order in sorted(set(orders))])
    assert len(set(orders)) == 24
    rng = np.random.default_rng(2)
    for which, (low, high) in enumerate([(0.6, 1.4), (0.5, 3.0), (0.1, 1.9), (-0.2, 0.2)]):
        assert alike([dict(each)[which] for each in drawn], rng.uniform(low, high, DRAWN).tolist())


def test_brightness_above_one_begins_at_zero() -> None:
    assert T.ColorJitter(brightness=2.5).brightness == (0.0, 3.5)


def test_steps_without_an_effect_are_left_out() -> None:
    assert T.ColorJitter().adjustments(Draws(0)) == []
    assert [which for which, _ in T.ColorJitter(hue=0.1).adjustments(Draws(0))] == [3]


def documented_erasing(rng: np.random.Generator, height: int, width: int) -> tuple[int, int, int, int] | None:
    """(y, x, height, width) by torchvision's documentation of RandomErasing."""
    for _ in range(10):
        area = height * width * rng.uniform(0.02, 0.33)
        aspect = math.exp(rng.uniform(math.log(0.3), math.log(3.3)))
        tall, wide = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if tall < height and wide < width:
            return int(rng.integers(0, height - tall + 1)), int(rng.integers(0, width - wide + 1)), tall, wide
    return None


@pytest.mark.parametrize("shape", [(40, 60), (12, 90)])
def test_erased_parts_are_torchvisions(shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    parts = [T.RandomErasing(1.0).choose_part(Draws(key), *shape) for key in range(DRAWN)]
    found = [(y.start, x.start, y.stop - y.start, x.stop - x.start) for y, x in filter(None, parts)]
    expected = [part for part in (documented_erasing(rng, *shape) for _ in range(DRAWN)) if part is not None]
    assert abs(len(found) - len(expected)) < 6 * (1 + DRAWN - len(expected)) ** 0.5
    for place in range(4):
        assert alike([part[place] for part in found], [part[place] for part in expected])


def test_choices_follow_their_weights() -> None:
    array = np.zeros((1, 1, 3), np.uint8)
    parts = [T.Resize((1, 1 + place)) for place in range(3)]
    for weights in (None, [1.0, 2.0, 5.0]):
        choice = T.RandomChoice(parts, weights)
        chosen = [choice(array, SampleRng(key)).shape[1] - 1 for key in range(DRAWN)]
        assert even([chosen.count(place) for place in range(3)], weights)


def test_blurs_draw_any_sigma_of_their_interval() -> None:
    array = np.zeros((9, 9, 3), np.uint8)
    array[4, 4] = 255
    peaks = [int(T.GaussianBlur(9, (0.5, 2.0))(array, SampleRng(key))[4, 4, 0]) for key in range(DRAWN)]
    rng = np.random.default_rng(4)
    places = np.arange(-4, 5)
    expected = []
    for sigma in rng.uniform(0.5, 2.0, DRAWN):
        bell = np.exp(-0.5 * (places / sigma) ** 2)
        expected.append(round(255 * float(1 / bell.sum()) ** 2))
    assert alike(peaks, expected)


def test_draws_are_uniform_and_apart() -> None:
    numbers = [Draws(key).unit() for key in range(DRAWN)]
    stream = Draws(0)
    assert even(np.histogram(numbers, 50, (0, 1))[0].tolist())
    assert even(np.histogram([stream.unit() for _ in range(DRAWN)], 50, (0, 1))[0].tolist())


keys = st.integers(0, 2**64 - 1)


@given(keys, st.integers(1, 2**40))
def test_numbers_below_a_bound_stay_below_it(key: int, count: int) -> None:
    assert 0 <= Draws(key).below(count) < count


@given(keys, st.lists(st.floats(0, 1e9), min_size=1, max_size=5).filter(lambda weights: sum(weights) > 0))
def test_a_transform_of_weight_zero_is_never_chosen(key: int, weights: list[float]) -> None:
    assert weights[Draws(key).weighted_index(weights)] > 0


# One result on every path

geometries = st.sampled_from(
    [
        T.RandomResizedCrop(12),
        T.RandomResizedCrop((9, 14), interpolation="bicubic"),
        T.Resize((15, 11)),
        T.RandomCrop(10, padding=3),
        T.RandomCrop(13, pad_if_needed=True, padding_mode="edge"),
        T.CenterCrop((10, 30)),
        T.Compose([T.Resize(14), T.CenterCrop(12)]),
        T.Compose([T.Resize(14), T.RandomCrop(12)]),
    ]
)
changes = st.lists(
    st.sampled_from(
        [
            T.RandomHorizontalFlip(),
            T.RandomVerticalFlip(0.3),
            T.ColorJitter(0.3, 0.3, 0.3, 0.1),
            T.ColorJitter(hue=0.5),
            T.RandomGrayscale(0.4),
            T.GaussianBlur(3),
            T.RandomErasing(0.6, value="random"),
            T.RandomApply([T.RandomHorizontalFlip(), T.ColorJitter(0.2)], 0.6),
            T.RandomChoice([T.RandomVerticalFlip(), T.RandomHorizontalFlip()]),
            T.RandomResizedCrop((10, 8)),
            T.Grayscale(3),
        ]
    ),
    max_size=4,
)
ends = st.sampled_from(
    [
        [],
        [T.ToTensor()],
        [T.ToTensor(torch.uint8)],
        [T.ToTensor(torch.uint8), T.RandomErasing(0.5, value="random")],
        [T.Normalize([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])],
        [T.ToTensor(layout="HWC"), T.Normalize([0.5], [0.2], torch.bfloat16)],
        [T.Normalize([0.5], [0.2]), T.RandomErasing(0.5, value="random")],
        [T.Grayscale(), T.Normalize([0.5], [0.2])],
        [T.Grayscale()],
    ]
)
sources = st.lists(
    st.sampled_from([*(random_image(20 + 9 * i, 50 - 6 * i, seed=i) for i in range(4)), png(random_image(31, 17))]),
    min_size=1,
)


@given(geometries, changes, ends, sources, keys)
def test_a_batch_is_its_samples_and_a_sample_is_a_call(
    geometry: T.Transform, between: list[T.Transform], end: list[T.Transform], given: list[Any], key: int
) -> None:
    transform = T.Compose([geometry, *between, *end])
    own = np.arange(len(given), dtype=np.uint64) ^ np.uint64(key)
    samples = [transform.plan.sample(image, SampleRng(int(k))) for image, k in zip(given, own, strict=True)]
    batch = transform.plan.batch(given, own, ordinary)
    assert torch.equal(batch, default_collate(samples))
    again = transform(given[0], SampleRng(int(own[0])))
    assert type(again) is type(samples[0])
    assert torch.equal(torch.as_tensor(again), torch.as_tensor(samples[0]))


@given(geometries, changes, keys)
def test_fusing_changes_nothing(geometry: T.Transform, between: list[T.Transform], key: int) -> None:
    """The steps one by one, each with the key of its place; a flip right after a random box, with the box's key."""
    steps = [geometry, *between]
    image, flips = random_image(40, 33), False
    expected = T.Compose(steps)(image, SampleRng(key))
    for place, step in enumerate(steps):
        before = steps[place - 1] if place else None
        if isinstance(step, T.RandomHorizontalFlip) and isinstance(before, T.RandomResizedCrop):
            image = image[:, ::-1] if flips else image
            continue
        own = derive(key, place)
        if isinstance(step, T.RandomResizedCrop):
            recipe = replace(first_recipe(step), flip=0.5)
            flips = images.geometry(recipe, own, image.shape[1], image.shape[0]).flip
        image = step.plan.run(image, own)
    assert np.array_equal(image, expected)


class Images(Dataset[Any]):
    """A user's dataset that passes the generator on."""

    traits = fl.Traits(thread_safe=True)

    def __init__(self, transform: Callable[..., Any]) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        return self.transform(random_image(40, 50, seed=index), fl.sample_rng()), index


@pytest.mark.parametrize(
    "transform", [imagenet_train(16), T.Compose([T.RandomResizedCrop(16), T.ColorJitter(0.4), T.RandomErasing()])]
)
def test_inline_threads_and_processes_agree(transform: T.Transform, no_debris: Any) -> None:
    epochs = []
    for arguments in ({"num_workers": 0}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 2}):
        with fl.DataLoader(Images(transform), batch_size=8, shuffle=True, seed=5, **arguments) as loader:
            epochs.append([batch for _ in range(2) for batch in loader])
    for epoch in epochs[1:]:
        for (found, found_at), (expected, expected_at) in zip(epoch, epochs[0], strict=True):
            assert torch.equal(found_at, expected_at)
            assert torch.equal(found, expected)
    assert not torch.equal(epochs[0][0][0], epochs[0][3][0])
