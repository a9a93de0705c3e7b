"""Transforms as values: arguments, printing, pickling, accepted input, and the source of their randomness."""

from __future__ import annotations

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transform_cases import difference, jpeg, png, random_image

import feedline as fl
from feedline import SampleRng
from feedline import transforms as T
from feedline.errors import ArgumentError, FeedlineError, SampleError
from feedline.transforms import IMAGENET_MEAN, IMAGENET_STD, imagenet_eval, imagenet_train

EVERY: list[T.Transform] = [
    T.RandomResizedCrop(32),
    T.RandomResizedCrop((32, 40), scale=(0.5, 1), ratio=(1, 1), interpolation="bicubic"),
    T.Resize(40),
    T.Resize((40, 30)),
    T.CenterCrop(24),
    T.RandomCrop(24),
    T.RandomCrop((24, 20), padding=(1, 2), pad_if_needed=True, fill=(1, 2, 3), padding_mode="constant"),
    T.RandomHorizontalFlip(),
    T.RandomVerticalFlip(0.25),
    T.ColorJitter(0.4, (0.5, 2), 0, 0.1),
    T.Grayscale(),
    T.Grayscale(3),
    T.RandomGrayscale(0.5),
    T.GaussianBlur((5, 3), 0.7),
    T.RandomErasing(value="random"),
    T.RandomErasing(value=(1, 2, 3)),
    T.ToTensor(),
    T.ToTensor(torch.uint8, "HWC"),
    T.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    T.Normalize([0.5], [0.5], torch.bfloat16),
    T.Compose([]),
    T.RandomApply([T.ColorJitter(0.2), T.GaussianBlur(3)], 0.8),
    T.RandomChoice([T.RandomVerticalFlip(), T.RandomHorizontalFlip()], p=[1, 3]),
    imagenet_train(32),
    imagenet_eval(32, 40),
    T.Compose(
        [T.Compose([T.RandomResizedCrop(32)]), T.RandomHorizontalFlip(), T.RandomApply([T.Grayscale(3)]), T.ToTensor()]
    ),
]
by_name = pytest.mark.parametrize("transform", EVERY, ids=lambda transform: type(transform).__name__)


def same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and one.dtype == other.dtype and bool((one == other).all())


@by_name
def test_it_is_a_value_that_pickles(transform: T.Transform) -> None:
    again = eval(repr(transform), {**vars(fl.transforms), "torch": torch})
    assert again == transform
    assert hash(again) == hash(transform)
    with pytest.raises(AttributeError):
        setattr(transform, next(iter(transform.__dataclass_fields__)), 1)  # type: ignore[attr-defined]
    expected = transform(random_image(), SampleRng(1))
    for moved in (pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert moved == transform
        assert same(moved(random_image(), SampleRng(1)), expected)
    assert pickle.loads(pickle.dumps(transform.plan)) == transform.plan


@by_name
def test_it_leaves_the_image_as_it_was_and_gives_memory_of_its_own_kind(transform: T.Transform) -> None:
    array = random_image()
    before = array.copy()
    result = transform(array, SampleRng(2))
    assert difference(array, before) == 0
    if isinstance(result, np.ndarray):
        assert result.dtype == np.uint8
        assert result.flags.c_contiguous
        torch.from_numpy(result.copy())
    else:
        assert result.is_contiguous()


@by_name
def test_every_kind_of_image_gives_the_same(transform: T.Transform, tmp_path: Path) -> None:
    array = random_image()
    (tmp_path / "a.png").write_bytes(png(array))
    kinds = [
        Image.fromarray(array),
        Image.fromarray(array).convert("RGBA"),
        torch.tensor(array).permute(2, 0, 1),
        tmp_path / "a.png",
        str(tmp_path / "a.png"),
        png(array),
        memoryview(png(array)),
        np.frombuffer(png(array), np.uint8),
        np.asfortranarray(array),
    ]
    expected = transform(array, SampleRng(3))
    for image in kinds:
        assert same(transform(image, SampleRng(3)), expected), type(image)


@pytest.mark.parametrize(
    "transform",
    [
        T.RandomResizedCrop(16),
        T.Compose([T.Resize(20), T.CenterCrop(16), T.RandomHorizontalFlip()]),
        T.Resize(20),
        T.RandomCrop((16, 24), padding=5, fill=7),
        T.ColorJitter(0.4, 0.4),
        T.GaussianBlur(3),
        T.RandomErasing(1.0, value=200),
        T.ToTensor(),
        T.ToTensor(torch.uint8, "HWC"),
        T.Compose([T.RandomResizedCrop(16), T.Normalize([0.5], [0.2])]),
        T.RandomApply([T.RandomVerticalFlip()]),
    ],
)
def test_gray_images_come_out_as_one_channel_of_rgb_would(transform: T.Transform) -> None:
    gray = random_image()[:, :, 0]
    rgb = transform(np.repeat(gray[:, :, None], 3, axis=2), SampleRng(0))
    first = rgb[:1] if rgb.shape[0] == 3 else rgb[:, :, :1]
    for image in (gray, gray[:, :, None], Image.fromarray(gray), torch.tensor(gray)[None], torch.tensor(gray)):
        assert same(transform(image, SampleRng(0)), first), type(image)


def test_a_result_is_never_the_memory_that_was_given() -> None:
    array = random_image()
    for transform in (T.Compose([]), T.RandomVerticalFlip(0.0), T.CenterCrop((90, 120)), T.RandomErasing(0.0)):
        for image in (array, Image.fromarray(array), torch.tensor(array).permute(2, 0, 1), png(array)):
            result = transform(image)
            assert result.flags.writeable
            result[...] = 0
    assert difference(array, random_image()) == 0
    numbers = torch.rand(3, 8, 8)
    before = numbers.clone()
    for transform in (T.Compose([]), T.ToTensor(), T.RandomErasing(0.0), T.RandomApply([T.ToTensor()], 0.0)):
        for image in (numbers, numbers[:, 2:]):
            transform(image).zero_()
    assert torch.equal(numbers, before)


@pytest.mark.parametrize("shape", [(1, 5, 3), (5, 1, 3), (1, 1, 1)])
def test_flips_of_one_line_are_contiguous(shape: tuple[int, int, int]) -> None:
    for flip in (T.RandomVerticalFlip(1.0), T.RandomHorizontalFlip(1.0)):
        result = T.Compose([T.ColorJitter(0.3), flip])(np.full(shape, 7, np.uint8), SampleRng(1))
        assert min(result.strides) > 0
        assert torch.from_numpy(result).shape == shape


def test_many_threads_may_share_one() -> None:
    transform = pickle.loads(pickle.dumps(EVERY[-3]))
    expected = [transform(random_image(), SampleRng(key)) for key in range(40)]
    transform = pickle.loads(pickle.dumps(transform))  # not compiled yet
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda key: transform(random_image(), SampleRng(key)), range(40)))
    assert all(map(same, found, expected))


# Sources of randomness


def test_a_key_gives_one_image_and_keys_give_many() -> None:
    crop, array = T.RandomResizedCrop(16), random_image()
    assert same(crop(array, SampleRng(1)), crop(array, SampleRng(1)))
    assert len({crop(array, SampleRng(key)).tobytes() for key in range(20)}) == 20


def test_a_numpy_generator_gives_one_key_after_the_other() -> None:
    crop, array = T.RandomResizedCrop(16), random_image()
    generator = np.random.default_rng(0)
    keys = np.random.default_rng(0).integers(0, 2**64, 2, np.uint64)
    for key in keys.tolist():
        assert same(crop(array, generator), crop(array, SampleRng(key)))
    two_views = [crop(array, rng) for rng in [SampleRng(5).generator] * 2]
    assert not same(*two_views)


def test_without_a_generator_torch_decides() -> None:
    crop, array = T.RandomResizedCrop(16), random_image()
    torch.manual_seed(0)
    found = [crop(array) for _ in range(3)]
    torch.manual_seed(0)
    assert all(map(same, found, [crop(array) for _ in range(3)]))
    assert not same(found[0], found[1])


def test_other_generators_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"rng must be a feedline\.SampleRng or a numpy.* not a int"):
        T.RandomResizedCrop(16)(random_image(), 5)  # type: ignore[arg-type]


def test_appending_changes_nothing_before() -> None:
    array = random_image()
    steps = [
        T.RandomCrop(60),
        T.RandomVerticalFlip(),
        T.ColorJitter(0.4, 0.4),
        T.RandomHorizontalFlip(),
        T.RandomErasing(0.0),
    ]
    for count in range(1, len(steps)):
        some, more = T.Compose(steps[:count]), T.Compose(steps[: count + 1])
        for key in range(10):
            last = more.plan.steps[-1]
            assert same(
                last.step.apply(some(array, SampleRng(key)), T.Draws(last.key(key))), more(array, SampleRng(key))
            )


def test_two_of_a_kind_draw_different_numbers() -> None:
    array = np.arange(2 * 2 * 3, dtype=np.uint8).reshape(2, 2, 3)
    twice = T.Compose([T.RandomHorizontalFlip(), T.RandomHorizontalFlip()])
    turned = [not same(twice(array, SampleRng(key)), array) for key in range(400)]
    assert 130 < sum(turned) < 270


# Refused arguments


class InterpolationMode(Enum):
    """As torchvision's."""

    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    NEAREST = "nearest"


def test_interpolation_may_come_from_other_libraries() -> None:
    expected = T.RandomResizedCrop(8, interpolation="bicubic")
    assert T.RandomResizedCrop(8, interpolation=InterpolationMode.BICUBIC) == expected  # type: ignore[arg-type]
    assert T.RandomResizedCrop(8, interpolation=Image.Resampling.BICUBIC) == expected  # type: ignore[arg-type]
    assert T.Resize(8, Image.Resampling.BILINEAR) == T.Resize(8)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: T.RandomResizedCrop(0), r"RandomResizedCrop\(size=0\): give one number of pixels, at least 1"),
        (lambda: T.RandomResizedCrop((1, 2, 3)), r"size=\(1, 2, 3\)\): give one number of pixels"),
        (lambda: T.RandomResizedCrop(22.4), r"size=22\.4\): give one number of pixels"),
        (lambda: T.CenterCrop("224"), r"CenterCrop\(size='224'\)"),
        (lambda: T.RandomResizedCrop(8, scale=(1, 0.08)), r"the lower bound comes first; write scale=\(0\.08, 1\.0\)"),
        (lambda: T.RandomResizedCrop(8, scale=(0, 1)), r"scale=\(0, 1\)\): the lower bound must be above 0"),
        (lambda: T.RandomResizedCrop(8, ratio=(2, 1)), r"write ratio=\(1\.0, 2\.0\)"),
        (lambda: T.RandomResizedCrop(8, ratio=0.5), r"ratio=0\.5\): give two numbers, the lower and the upper bound"),
        (lambda: T.Resize(8, InterpolationMode.NEAREST), r"interpolation='nearest'\): choose 'bilinear' or 'bicubic'"),
        (lambda: T.Resize(8, Image.Resampling.LANCZOS), r"choose 'bilinear' or 'bicubic'"),
        (lambda: T.RandomHorizontalFlip(1.5), r"RandomHorizontalFlip\(p=1\.5\): a probability lies between 0 and 1"),
        (lambda: T.RandomVerticalFlip(-1), r"p=-1\): a probability"),
        (lambda: T.RandomGrayscale("much"), r"p='much'\): a probability"),
        (lambda: T.RandomCrop(8, padding=(1, 2, 3)), r"padding=\(1, 2, 3\)\): give one number of pixels, \(x, y\) or"),
        (lambda: T.RandomCrop(8, padding=-1), r"padding=-1\)"),
        (lambda: T.RandomCrop(8, fill=256), r"fill=256\): give a level from 0 to 255"),
        (lambda: T.RandomCrop(8, padding_mode="wrap"), r"padding_mode='wrap'\): choose 'constant' or 'edge' or"),
        (lambda: T.Normalize([0.5], [0]), r"std=\[0\]\): a channel cannot be divided by 0"),
        (lambda: T.Normalize([0.5] * 2, [1] * 2), r"mean=\[0\.5, 0\.5\]\): give a sequence of 1 or 3 finite numbers"),
        (lambda: T.Normalize([0.5], [1] * 3), r"there are 1 means: give as many"),
        (lambda: T.Normalize(0.5, 0.5), r"mean=0\.5\): give a sequence"),
        (lambda: T.Normalize([0.5], [0.5], torch.uint8), r"dtype=torch\.uint8\): choose torch\.float32 or"),
        (lambda: T.ToTensor(torch.float64), r"dtype=torch\.float64\): choose torch\.uint8 or"),
        (lambda: T.ToTensor(layout="NCHW"), r"layout='NCHW'\): choose 'HWC' or 'CHW'"),
        (lambda: T.ColorJitter(-0.1), r"brightness=-0\.1\): a single number is at or above 0"),
        (lambda: T.ColorJitter(contrast=(2, 1)), r"contrast=\(2, 1\)\): the lower bound comes first"),
        (lambda: T.ColorJitter(hue=0.6), r"hue=0\.6\): a single number lies between 0 and 0\.5"),
        (lambda: T.ColorJitter(hue=(-1, 0)), r"hue=\(-1, 0\)\): both bounds must lie between -0\.5 and 0\.5"),
        (lambda: T.ColorJitter(saturation=float("nan")), r"saturation=nan"),
        (lambda: T.Grayscale(2), r"num_output_channels=2\): choose 1 or 3"),
        (lambda: T.GaussianBlur(4), r"kernel_size=4\): give odd numbers"),
        (lambda: T.GaussianBlur(3, sigma=0), r"sigma=\(0, 0\)\): the lower bound must be above 0"),
        (lambda: T.RandomErasing(scale=(0, 2)), r"scale=\(0, 2\)\): both bounds must lie between 0 and 1"),
        (lambda: T.RandomErasing(value="noise"), r"value='noise'\): choose 'random'"),
        (lambda: T.RandomApply([T.Resize(8)], p=2), r"RandomApply\(p=2\)"),
        (lambda: T.RandomChoice([]), r"RandomChoice\(transforms=\[\]\): there must be one to choose"),
        (lambda: T.RandomChoice([T.Resize(8)], p=[0]), r"weights are at or above 0, and not all of them 0"),
        (lambda: T.RandomChoice([T.Resize(8)], p=[1, 2]), r"p=\[1, 2\]\): give a sequence of 1 finite numbers"),
        (lambda: T.Compose([T.Resize(8), None]), r"Compose: transforms\[1\] is None; give transforms"),
        (lambda: T.Compose([T.Resize]), r"transforms\[0\] is <class"),
        (lambda: T.Compose(T.Resize(8)), r"give a list of transforms"),
        (lambda: T.Compose([T.ToTensor(), T.Resize(8)]), r"Resize cannot follow the conversion to a tensor: put it"),
        (lambda: T.Compose([T.ToTensor(layout="HWC"), T.RandomErasing()]), r"put it before ToTensor\(layout='HWC'\)"),
        (lambda: T.RandomApply([T.Normalize([0.5], [0.5]), T.ColorJitter()]), r"ColorJitter cannot follow"),
    ],
)
def test_arguments_that_cannot_work_are_named_with_a_remedy(build: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (None, r"not an image: a NoneType; give a PIL image, a uint8 array \(H, W, 3\)"),
        ({"image": 1}, r"not an image: a dict"),
        (np.zeros((8, 8, 3)), r"an array of float64 with shape \(8, 8, 3\); levels are uint8.*\(array \* 255\)"),
        (np.zeros((3, 8, 8), np.uint8), r"pass array\.transpose\(1, 2, 0\)"),
        (np.zeros((8, 8, 4), np.uint8), r"there is a fourth channel: pass array\[:, :, :3\]"),
        (np.zeros((2, 8, 8, 3), np.uint8), r"this looks like a batch: pass its images one by one"),
        (np.zeros((0, 8, 3), np.uint8), r"shape \(0, 8, 3\)"),
        (torch.zeros(8, 8, 3, dtype=torch.uint8), r"pass tensor\.permute\(2, 0, 1\)"),
        (torch.zeros(3, 8, 8), r"a tensor of torch\.float32 on cpu.*put ToTensor and Normalize last"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), r"tensors are \(channels, height, width\)"),
    ],
)
def test_an_object_that_is_no_image_is_reported(image: Any, message: str) -> None:
    for transform in (T.RandomResizedCrop(4), T.Resize(4), T.RandomCrop(4), T.ColorJitter(0.1)):
        with pytest.raises(ArgumentError, match=message):
            transform(image)


@pytest.mark.parametrize("transform", [T.RandomResizedCrop(4), T.Resize(4), T.RandomCrop(4)])
def test_a_file_that_is_no_image_is_named(transform: T.Transform, tmp_path: Path) -> None:
    path = tmp_path / "notes.jpg"
    path.write_bytes(b"not an image")
    with pytest.raises(SampleError, match=r"notes\.jpg could not be read"):
        transform(path)
    with pytest.raises(FileNotFoundError, match=r"missing\.jpg"):
        transform(tmp_path / "missing.jpg")
    with pytest.raises(FeedlineError):
        transform(jpeg(random_image())[:30])


def test_images_that_are_too_small_are_reported() -> None:
    with pytest.raises(SampleError, match=r"RandomCrop.*more than an image of 90 × 120 pixels.*pad_if_needed=True"):
        T.RandomCrop(100)(random_image())
    with pytest.raises(SampleError, match=r"GaussianBlur.*reaches beyond an image of 90 × 120 pixels"):
        T.GaussianBlur(201)(random_image())
    with pytest.raises(SampleError, match=r"Normalize has 3 means, but the image has 1 channel"):
        T.Compose([T.Grayscale(), T.Normalize(IMAGENET_MEAN, IMAGENET_STD)])(random_image())
    with pytest.raises(SampleError, match=r"has 3 values, but the image has 1 channel"):
        T.RandomErasing(1.0, value=(1, 2, 3))(random_image()[:, :, 0])
    for image in (random_image(8, 8)[:, :, 0], random_image(8, 9)[:, :, 0]):
        with pytest.raises(SampleError, match=r"has 3 levels in fill, but the image has 1 channel"):
            T.RandomCrop(8, padding=1, fill=(1, 2, 3))(image)


def test_erasing_with_what_is_no_level_is_for_numbers() -> None:
    erasing = T.RandomApply([T.RandomErasing(1.0, value=-1)], 1.0)
    with pytest.raises(ArgumentError, match=r"value=-1\.0\): levels lie between 0 and 255; or put it after Normalize"):
        erasing(random_image())
    assert T.Compose([T.ToTensor(), erasing])(random_image()).min() == -1


# Callables of other libraries


def test_a_foreign_callable_gets_a_pil_image_and_may_give_anything() -> None:
    seen: list[Any] = []

    def foreign(image: Any) -> Any:
        seen.append(image)
        return image.rotate(90)

    array = random_image()
    pipeline = T.Compose([T.Resize((20, 20)), foreign, T.RandomHorizontalFlip(1.0), foreign, T.ToTensor(torch.uint8)])
    expected = np.rot90(np.rot90(T.Resize((20, 20))(array))[:, ::-1])
    assert torch.equal(pipeline(array), torch.tensor(expected.copy()).permute(2, 0, 1))
    assert [type(image) for image in seen] == [Image.Image] * 2
    assert pipeline.plan.spec is None
    assert not pipeline.plan.batchable


def test_a_foreign_callable_at_the_head_gets_the_image_itself() -> None:
    image = Image.fromarray(random_image()).convert("RGBA")
    assert T.Compose([lambda given: given])(image) is image
    assert isinstance(T.Compose([lambda given: given])(png(random_image())), Image.Image)
    gray = T.Compose([T.Grayscale(), lambda given: given])(image)
    assert gray.mode == "L"


def test_a_foreign_callable_after_the_numbers_gets_the_tensor() -> None:
    doubled = T.Compose([T.ToTensor(), lambda tensor: tensor * 2, T.Normalize([1.0], [2.0])])
    array = random_image()
    torch.testing.assert_close(doubled(array), (T.ToTensor()(array) * 2 - 1) / 2)


def test_a_foreign_callable_gets_a_tensor_as_it_is() -> None:
    levels = torch.tensor(random_image()).permute(2, 0, 1)
    assert T.Compose([lambda given: given])(levels) is levels
    kept = T.Compose([T.ToTensor(torch.uint8), lambda tensor: tensor.flip(-1)])(random_image())
    assert torch.equal(kept, levels.flip(-1))


def test_a_foreign_callable_may_want_the_generator() -> None:
    def noisy(array: Any, rng: Any) -> Any:
        return array + rng.integers(0, 2, array.shape, np.uint8) * (array < 255)

    twice = T.Compose([T.OnArray(noisy), T.OnArray(noisy)])
    array = np.zeros((50, 50, 3), np.uint8)
    assert same(twice(array, SampleRng(1)), twice(array, SampleRng(1)))
    assert not same(twice(array, SampleRng(1)), twice(array, SampleRng(2)))
    assert set(np.unique(twice(array, SampleRng(1)))) == {0, 1, 2}  # each had its own


def test_foreign_parts_print_as_they_are() -> None:
    assert repr(T.Compose([len, T.OnArray(len)])) == f"Compose([\n    {len!r},\n    OnArray(fn={len!r}),\n])"


def test_a_transform_may_stay_away_or_be_chosen() -> None:
    array = random_image()
    sometimes = T.RandomApply([T.RandomVerticalFlip(1.0), T.RandomHorizontalFlip(1.0)], 0.5)
    results = {sometimes(array, SampleRng(key)).tobytes() for key in range(20)}
    assert results == {array.tobytes(), array[::-1, ::-1].tobytes()}
    assert same(T.RandomApply(T.RandomVerticalFlip(1.0), 1.0)(array), array[::-1].copy())
    chosen = T.RandomChoice([T.RandomVerticalFlip(1.0), T.Resize((4, 4)), np.asarray], p=[1, 1, 0])
    assert {chosen(array, SampleRng(key)).shape for key in range(20)} == {array.shape, (4, 4, 3)}
