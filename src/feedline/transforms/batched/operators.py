"""Batched operators of steps, by the class of the step.

An operator gets images and one key per row, and draws the same numbers from a key as the step does for one sample.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from feedline.core.dataset import Keys
from feedline.core.devices import uploaded
from feedline.core.rng import Draws, DrawsEach, derive_each
from feedline.errors import ArgumentError, SampleError, note
from feedline.images.crops import center_offset
from feedline.transforms import erasing
from feedline.transforms.batched import levels, resample
from feedline.transforms.batched.moves import cropped, flip_in_place, leading_moves, moved, one_key
from feedline.transforms.color import SATURATION, ColorJitter, GaussianBlur, Grayscale, RandomGrayscale, gaussian
from feedline.transforms.compose import ApplyWithProbability, RandomChoice
from feedline.transforms.erasing import RandomErasing
from feedline.transforms.geometry import CenterCrop, RandomCrop, RandomHorizontalFlip, RandomVerticalFlip
from feedline.transforms.native_steps import Conversion, ResizeShortest, Window, resize_recipe
from feedline.transforms.steps import Identity, PlannedStep, Step


class ImageRows(NamedTuple):
    """Images of a batch on their way through the operators.

    `images` is a tensor (batch, channels, height, width), or a list of images of different sizes. `is_owned`: the
    operators may write into the tensor.
    """

    images: Any
    is_owned: bool = False

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width of each image."""
        return [tuple(image.shape[-2:]) for image in self.images]


Operator = Callable[[Any, ImageRows, Keys], ImageRows]


def apply_steps(steps: Sequence[PlannedStep], rows: ImageRows, keys: Keys) -> ImageRows:
    """Apply steps to all rows, each with its own keys."""
    at = 0
    while at < len(steps):
        moves = leading_moves(steps[at:])
        if moves and levels.is_faster_by_rows(_first(rows)):
            rows = _move(moves, rows, keys)
            at += len(moves)
        else:
            rows = _apply_step(steps[at], rows, keys)
            at += 1
    return rows


def _move(moves: Sequence[PlannedStep], rows: ImageRows, keys: Keys) -> ImageRows:
    if not isinstance(rows.images, torch.Tensor) and isinstance(moves[0].step, RandomCrop):
        parts = [moved(image[None], moves, keys[row : row + 1]) for row, image in enumerate(rows.images)]
        return _one_batch(parts, type(moves[0].step).__name__)
    before = stacked(rows, type(moves[0].step).__name__)
    if rows.is_owned and flip_in_place(before, moves, keys):
        return ImageRows(before, is_owned=True)
    return _made_of(rows, moved(before, moves, keys))


def _apply_step(planned: PlannedStep, rows: ImageRows, keys: Keys) -> ImageRows:
    if type(planned.step) in _ON_LEVELS:
        _check_levels(planned, rows)
    try:
        return OPERATORS[type(planned.step)](planned.step, rows, planned.keys(keys))
    except NotImplementedError as error:  # how torch says that a backend lacks an operator
        note(
            error,
            f"feedline: {planned.name} on {_first(rows).device} needs an operator that torch {torch.__version__} lacks"
            " there: leave it in the dataset's transform, which runs on the CPU",
        )
        raise


def _first(rows: ImageRows) -> torch.Tensor:
    first: torch.Tensor = rows.images if isinstance(rows.images, torch.Tensor) else rows.images[0]
    return first


def _check_levels(planned: PlannedStep, rows: ImageRows) -> None:
    images = (rows.images,) if isinstance(rows.images, torch.Tensor) else rows.images
    dtypes = {each.dtype for each in images} - {torch.uint8}
    if dtypes:
        raise SampleError(
            f"{planned.name} takes uint8 levels, 0 to 255, but the images are {dtypes.pop()}: put it before ToTensor"
            " and Normalize, or convert with (images * 255).to(torch.uint8)"
        )


def check_steps(steps: Sequence[PlannedStep]) -> None:
    """Raise ArgumentError for the first step without a batched operator."""
    for planned in steps:
        if type(planned.step) not in OPERATORS:
            raise ArgumentError(
                f"{planned.name} has no batched operator, so it cannot be applied to tensors of a whole batch: leave it"
                " in the dataset's transform, which runs on the CPU"
            )
        check_steps([inner for plan in _plans_in(planned.step) for inner in plan.steps])


def has_step(steps: Sequence[PlannedStep], kinds: tuple[type[Step], ...]) -> bool:
    """True if a step, or one inside it, is of these classes."""
    return any(
        isinstance(planned.step, kinds) or any(has_step(plan.steps, kinds) for plan in _plans_in(planned.step))
        for planned in steps
    )


def _plans_in(step: Step) -> list[Any]:
    if isinstance(step, ApplyWithProbability):
        return [step.plan]
    return [part.plan for part in step.transforms] if isinstance(step, RandomChoice) else []


def _window(step: Window, rows: ImageRows, keys: Keys) -> ImageRows:
    shown = resample.geometries(step.recipe, keys, rows.sizes)
    resized = ImageRows(resample.resampled(rows.images, shown, step.recipe.interpolation), is_owned=True)
    return resized if step.conversion is None else _convert(step.conversion, resized, keys)


def _resize(step: ResizeShortest, rows: ImageRows, keys: Keys) -> ImageRows:
    sizes = [step.resized(*size) for size in rows.sizes]
    if isinstance(rows.images, torch.Tensor):
        return _made_of(rows, resample.resized(rows.images, sizes[0], step.interpolation))
    recipes = [resize_recipe(size, step.interpolation, step.scaled_decode) for size in sizes]
    each = zip(recipes, rows.images, strict=True)
    return _join([_window(Window(recipe), ImageRows(image[None]), keys[:1]).images[0] for recipe, image in each])


def _join(images: list[torch.Tensor]) -> ImageRows:
    """Stack images of equal shape and dtype, else keep the list."""
    alike = len({(image.shape, image.dtype) for image in images}) == 1
    return ImageRows(torch.stack(images), is_owned=True) if alike else ImageRows(images)


def stacked(rows: ImageRows, name: str) -> torch.Tensor:
    """Images as one tensor; SampleError if their shapes or dtypes differ."""
    if isinstance(rows.images, torch.Tensor):
        return rows.images
    kinds = sorted({_kind(image) for image in rows.images})
    if len(kinds) > 1:
        raise SampleError(
            f"{name} needs images of one shape and dtype, but the batch has {len(kinds)} kinds, {kinds[0]} and"
            f" {kinds[-1]} (channels, height, width) among them: crop or resize all to one size, and convert all to"
            " one dtype, before"
        )
    return torch.stack(list(rows.images))


def _kind(image: torch.Tensor) -> str:
    return f"{image.dtype} of shape {tuple(image.shape)}"


def _made_of(rows: ImageRows, images: torch.Tensor) -> ImageRows:
    """Result of an operator on `rows`.

    Owned unless it shares memory with images of the user.
    """
    if rows.is_owned or not isinstance(rows.images, torch.Tensor):  # a list has been stacked
        return ImageRows(images, is_owned=True)
    before, after = (each.untyped_storage().data_ptr() for each in (rows.images, images))
    return ImageRows(images, is_owned=before != after)


def _own_memory(rows: ImageRows, name: str) -> torch.Tensor:
    """Images as one tensor that may be written to; see `stacked`."""
    images = stacked(rows, name)
    return images if rows.is_owned or images is not rows.images else images.clone()


def _flip(step: RandomHorizontalFlip | RandomVerticalFlip, rows: ImageRows, keys: Keys) -> ImageRows:
    axis = -1 if isinstance(step, RandomHorizontalFlip) else -2
    flips = DrawsEach(keys).unit() < step.p
    images = stacked(rows, type(step).__name__)
    if not flips.any():
        return rows._replace(images=images)
    images = _own_memory(rows, type(step).__name__)
    at = uploaded(np.flatnonzero(flips), images.device)
    images.index_copy_(0, at, images.index_select(0, at).flip(axis))
    return ImageRows(images, is_owned=True)


def _center(step: CenterCrop, rows: ImageRows, keys: Keys) -> ImageRows:  # noqa: ARG001 - not random
    parts = []
    for image in [rows.images] if isinstance(rows.images, torch.Tensor) else rows.images:
        top, left = (center_offset(length, side) for length, side in zip(image.shape[-2:], step.size, strict=True))
        parts.append(resample.cropped(image, top, left, step.size))
    return ImageRows(parts[0], rows.is_owned) if isinstance(rows.images, torch.Tensor) else _join(parts)


def _crop(step: RandomCrop, rows: ImageRows, keys: Keys) -> ImageRows:
    if isinstance(rows.images, torch.Tensor):
        return ImageRows(_crop_all(step, rows.images, keys), is_owned=True)
    if step.padding_mode == "constant" and len({(len(image), image.dtype) for image in rows.images}) == 1:
        return ImageRows(_crop_each(step, rows.images, keys), is_owned=True)
    each = enumerate(rows.images)
    parts = [_crop_all(step, image[None], keys[row : row + 1]) for row, image in each]
    return _one_batch(parts, type(step).__name__)


def _crop_each(step: RandomCrop, images: Sequence[torch.Tensor], keys: Keys) -> torch.Tensor:
    """Crop images of different sizes by one copy each, into constant padding."""
    channels, (tall, wide) = len(images[0]), step.size
    out = _padding(step, images[0], channels).expand(len(images), -1, tall, wide).contiguous()
    for part, image, key in zip(out, images, keys.tolist(), strict=True):
        height, width = image.shape[-2:]
        top, left = step.corner(Draws(key), height, width)
        y, x = max(0, top), max(0, left)
        bottom, right = min(height, top + tall), min(width, left + wide)
        if y < bottom and x < right:
            part[:, y - top : bottom - top, x - left : right - left].copy_(image[:, y:bottom, x:right])
    return out


def _padding(step: RandomCrop, images: torch.Tensor, channels: int) -> torch.Tensor:
    """Level of each channel in constant padding, (1, channels, 1, 1)."""
    fill = torch.tensor(step.levels(channels), dtype=images.dtype, device="cpu").expand(channels)
    return uploaded(fill.contiguous(), images.device).view(1, -1, 1, 1)


def _one_batch(parts: list[torch.Tensor], name: str) -> ImageRows:
    """One tensor of batches with one row each; SampleError if they differ."""
    return ImageRows(stacked(ImageRows([part[0] for part in parts]), name), is_owned=True)


def _crop_all(step: RandomCrop, images: torch.Tensor, keys: Keys) -> torch.Tensor:
    """Crop all rows by one gather, each at its own corner."""
    lines, columns = (np.arange(side)[None] for side in images.shape[-2:])
    places = cropped(step, DrawsEach(keys), lines, columns)
    y, x = (uploaded(each, images.device) for each in places)
    batch = torch.arange(len(images), device=images.device)[:, None, None]
    down, across = y[:, :, None], x[:, None, :]
    parts = images.permute(0, 2, 3, 1)[batch, down, across].permute(0, 3, 1, 2)  # -1 takes the last one
    if step.padding_mode != "constant":
        return parts.contiguous()
    return torch.where(((down >= 0) & (across >= 0))[:, None], parts, _padding(step, images, images.shape[1]))


def _jitter(step: ColorJitter, rows: ImageRows, keys: Keys) -> ImageRows:
    images = stacked(rows, "ColorJitter")
    changes = [step.adjustments(Draws(key)) for key in keys.tolist()]
    return ImageRows(levels.adjusted(images, changes), is_owned=True)


def _to_gray(images: torch.Tensor, chosen: Sequence[int] | None = None) -> torch.Tensor:
    picked = range(len(images)) if chosen is None else chosen
    changes: list[list[tuple[int, float]]] = [[] for _ in range(len(images))]
    for row in picked:
        changes[row] = [(SATURATION, 0.0)]
    return levels.adjusted(images, changes)


def _gray(step: Grayscale, rows: ImageRows, keys: Keys) -> ImageRows:  # noqa: ARG001 - not random
    images = stacked(rows, "Grayscale")
    gray = levels.luma(images.float()).to(images.dtype) if images.shape[1] == 3 else images
    return _made_of(rows, gray if step.num_output_channels == 1 else gray.repeat(1, 3, 1, 1))


def _random_gray(step: RandomGrayscale, rows: ImageRows, keys: Keys) -> ImageRows:
    images = stacked(rows, "RandomGrayscale")
    chosen = np.flatnonzero(DrawsEach(keys).unit() < step.p).tolist()
    return ImageRows(_to_gray(images, chosen), is_owned=True) if chosen else rows._replace(images=images)


def _blur(step: GaussianBlur, rows: ImageRows, keys: Keys) -> ImageRows:
    images = stacked(rows, "GaussianBlur")
    step.check_size(*images.shape[-2:])
    sigmas = DrawsEach(keys).between(*step.sigma).tolist()
    across, down = (np.stack([gaussian(taps, sigma) for sigma in sigmas]) for taps in step.kernel_size)
    return ImageRows(levels.blurred(images.float(), across, down).to(images.dtype), is_owned=True)


def _convert(step: Conversion, rows: ImageRows, keys: Keys) -> ImageRows:  # noqa: ARG001 - not random
    images = stacked(rows, "the conversion to numbers")
    if images.dtype == torch.uint8:
        if step.dtype == torch.uint8:
            return _made_of(rows, _laid_out(images, step.layout))
        images = images.to(torch.float32).div_(255.0)
    elif not images.is_floating_point():
        raise SampleError(
            f"the conversion to numbers takes uint8 levels, 0 to 255, or floating-point numbers, but the images are"
            f" {images.dtype}: convert them with images.to(torch.uint8) before"
        )
    else:
        images = images.to(torch.float32, copy=step.mean is not None)
    if step.mean is not None and step.std is not None:
        mean, std = (_per_channel(values, images) for values in (step.mean, step.std))
        images.sub_(mean).div_(std)
    return _made_of(rows, _laid_out(images.to(step.dtype), step.layout))


def _per_channel(values: tuple[float, ...], images: torch.Tensor) -> torch.Tensor:
    if len(values) not in (1, images.shape[1]):
        raise SampleError(
            f"Normalize has {len(values)} means, but the images have {images.shape[1]} channel(s): give one mean and"
            " std per channel, or make them RGB with Grayscale(num_output_channels=3)"
        )
    return uploaded(torch.tensor(values, dtype=torch.float32, device="cpu"), images.device).view(-1, 1, 1)


def _laid_out(images: torch.Tensor, layout: str) -> torch.Tensor:
    return images if layout == "CHW" else images.permute(0, 2, 3, 1).contiguous()


def _erase(step: RandomErasing, rows: ImageRows, keys: Keys) -> ImageRows:
    images = _own_memory(rows, "RandomErasing")
    is_levels = not images.is_floating_point()
    distinct = keys[:1] if one_key(keys) is not None else keys
    parts = [step.choose_part(Draws(key), *images.shape[-2:]) for key in distinct.tolist()]
    if len(parts) < len(images):  # one draw for all
        if step.value != "random":
            _fill(step, images, parts[0])
            return ImageRows(images, is_owned=True)
        parts *= len(images)
    if step.value != "random" and not levels.is_faster_by_rows(images):
        return ImageRows(_erase_all(step, images, parts), is_owned=True)
    if step.value != "random":
        values = _values(step, images).view(-1, 1, 1)
        for row, part in enumerate(parts):
            if part is not None:
                images[row, :, part[0], part[1]] = values
        return ImageRows(images, is_owned=True)
    rows_keys = zip(images, parts, keys.tolist(), strict=True)
    inside = [(row[:, part[0], part[1]], key) for row, part, key in rows_keys if part is not None]
    if inside:
        noises = torch.cat([_noise(key, each, is_levels).reshape(-1) for each, key in inside])
        there = torch.split(uploaded(noises, images.device), [each.numel() for each, _ in inside])
        for (each, _), noise in zip(inside, there, strict=True):
            each.copy_(noise.view(each.shape))
    return ImageRows(images, is_owned=True)


def _values(step: RandomErasing, images: torch.Tensor) -> torch.Tensor:
    """Value of each channel, of the images' kind."""
    values = step.values(images.shape[1], are_levels=not images.is_floating_point())
    return uploaded(torch.tensor(values, device="cpu").to(images.dtype), images.device)


def _fill(step: RandomErasing, images: torch.Tensor, part: tuple[slice, slice] | None) -> None:
    """Erase the same part of all images."""
    if part is not None:
        images[..., part[0], part[1]] = _values(step, images).view(-1, 1, 1)


def _noise(key: int, inside: torch.Tensor, is_levels: bool) -> torch.Tensor:
    channels, height, width = inside.shape
    if is_levels:  # drawn for (height, width, channels), as of an image
        return torch.from_numpy(erasing.noise(key, (height, width, channels), is_normal=False)).permute(2, 0, 1)
    return torch.from_numpy(erasing.noise(key, (channels, height, width), is_normal=True))


def _erase_all(step: RandomErasing, images: torch.Tensor, parts: Sequence[Any]) -> torch.Tensor:
    none = slice(0, 0)
    edges = [[(part or (none, none))[axis] for part in parts] for axis in (0, 1)]
    inside = []
    for length, each in zip(images.shape[-2:], edges, strict=True):
        bounds = uploaded(torch.tensor([(one.start, one.stop) for one in each], device="cpu"), images.device)
        at = torch.arange(length, device=images.device)
        inside.append((at >= bounds[:, :1]) & (at < bounds[:, 1:]))
    mask = (inside[0][:, :, None] & inside[1][:, None, :])[:, None]
    return torch.where(mask, _values(step, images).view(1, -1, 1, 1), images)


def _apply(step: ApplyWithProbability, rows: ImageRows, keys: Keys) -> ImageRows:
    chosen = np.flatnonzero(DrawsEach(keys).unit() < step.p)
    return _replace_chosen(step.plan.steps, rows, chosen, derive_each((), keys, "applied"))


def _choose(step: RandomChoice, rows: ImageRows, keys: Keys) -> ImageRows:
    count = len(step.transforms)
    picks = np.array([Draws(key).weighted_index(step.p or (1.0,) * count) for key in keys.tolist()])
    inner = derive_each((), keys, "chosen")
    parts = [(np.flatnonzero(picks == number), part.plan.steps) for number, part in enumerate(step.transforms)]
    parts = [(at, steps) for at, steps in parts if len(at)]
    results = [_apply_to_chosen(steps, rows, at, inner) for at, steps in parts]
    if len(results) == 1:
        return results[0]
    images = [stacked(result, "RandomChoice") for result in results]
    out = images[0].new_empty((len(keys), *images[0].shape[1:]))
    for (at, steps), some in zip(parts, images, strict=True):
        _check_alike("RandomChoice", (images[0], _with(parts[0][1])), (some, _with(steps)))
        out.index_copy_(0, uploaded(at, out.device), some)
    return ImageRows(out, is_owned=True)


def _check_alike(name: str, *results: tuple[torch.Tensor, str]) -> None:
    """Raise SampleError for two results that do not fit in one batch.

    Each is given with its origin.
    """
    (one, first), (other, second) = ((_kind(images[0]), origin) for images, origin in results)
    if one != other:
        raise SampleError(
            f"{name} makes {one} {first}, and {other} {second}: a batch needs images of one shape and dtype. Put crops,"
            f" resizes and conversions before or behind {name}"
        )


def _with(steps: Sequence[PlannedStep]) -> str:
    return f"with {' and '.join(planned.name for planned in steps)}"


def _apply_to_chosen(steps: Sequence[PlannedStep], rows: ImageRows, chosen: np.ndarray, keys: Keys) -> ImageRows:
    """Apply the steps to the chosen rows, and return only these."""
    if isinstance(rows.images, torch.Tensor):
        picked: Any = rows.images.index_select(0, uploaded(chosen, rows.images.device))
    else:
        picked = [rows.images[row] for row in chosen.tolist()]
    return apply_steps(steps, ImageRows(picked, is_owned=isinstance(picked, torch.Tensor)), keys[chosen])


def _replace_chosen(steps: Sequence[PlannedStep], rows: ImageRows, chosen: np.ndarray, keys: Keys) -> ImageRows:
    """Apply the steps to the chosen rows, and return the whole batch."""
    if not len(chosen):
        return rows
    images = _own_memory(rows, "RandomApply")
    result = stacked(_apply_to_chosen(steps, ImageRows(images), chosen, keys), "RandomApply")
    if len(chosen) == len(images):
        return ImageRows(result, is_owned=True)
    _check_alike("RandomApply", (result, _with(steps)), (images, "without"))
    images.index_copy_(0, uploaded(chosen, images.device), result)
    return ImageRows(images, is_owned=True)


def _identity(step: Identity, rows: ImageRows, keys: Keys) -> ImageRows:  # noqa: ARG001 - does nothing
    return rows


OPERATORS: dict[type[Step], Operator] = {
    Window: _window,
    ResizeShortest: _resize,
    CenterCrop: _center,
    RandomCrop: _crop,
    RandomHorizontalFlip: _flip,
    RandomVerticalFlip: _flip,
    ColorJitter: _jitter,
    Grayscale: _gray,
    RandomGrayscale: _random_gray,
    GaussianBlur: _blur,
    Conversion: _convert,
    RandomErasing: _erase,
    ApplyWithProbability: _apply,
    RandomChoice: _choose,
    Identity: _identity,
}
"""Operators by the exact class of the step: a subclass may override `apply`."""


_ON_LEVELS = {Window, ResizeShortest, ColorJitter, Grayscale, RandomGrayscale, GaussianBlur}
"""Steps that take uint8 levels only; the others also take floating-point numbers."""
