"""Steps of torchvision on frames, by the name of their class.

Random numbers are drawn by the steps' own methods, or as these do, from the size of the image. So a sequence of steps
takes the same numbers from torch's generator as it does on a Pillow image. Parameters are read when a step runs, as
torchvision does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from PIL import Image

from feedline.images.crops import Box
from feedline.transforms.color import SATURATION, adjust
from feedline.transforms.recognized.frame import Frame, RefusedError

Apply = Callable[[Any, Frame], bool]
"""`apply(step, frame)` changes the frame and returns True, or returns False to leave the image to the step itself.

If it returns False, the frame is unchanged and nothing was drawn.
"""


@dataclass(frozen=True, slots=True)
class FrameStep:
    """Function on frames, and the library's functions that it replaces."""

    apply: Apply
    functions: tuple[str, ...] = ()


def image_of_size(frame: Frame) -> Image.Image:
    """Image without pixels, for methods that only read its size."""
    image = Image.Image()
    image._size, image._mode = (frame.width, frame.height), "L" if frame.gray else "RGB"
    return image


def parameters(step: Any, frame: Frame) -> dict[str, Any]:
    """Parameters of a v2 transform, drawn by the transform's own method."""
    make = getattr(step, "make_params", None) or step._get_params  # the name until torchvision 0.21
    drawn: dict[str, Any] = make([image_of_size(frame)])
    return drawn


def draw_bernoulli(p: Any) -> bool:
    """Result of `torch.rand(1) < p`, which torch compares in float32."""
    return torch.empty(1).uniform_().item() < float(np.float32(p))


_FILTERS = {"bilinear": False, "bicubic": True, 2: False, 3: True}


def _bicubic(step: Any, frame: Frame) -> bool | None:
    """True for bicubic, False for bilinear, None if the kernels lack it."""
    if step.antialias is False:  # a warning of torchvision
        return None
    if frame.tensor_of is not None and not step.antialias:  # None is True for images, and False for tensors
        return None
    name = getattr(step.interpolation, "value", step.interpolation)
    return _FILTERS.get(name) if isinstance(name, (str, int)) else None


def _torch_cannot_resize(size: tuple[int, int], frame: Frame) -> bool:
    """True for (1, 1): torch cannot resize all tensors to this size."""
    return frame.tensor_of is not None and size == (1, 1)


def _is_pair(size: Any) -> bool:
    if not isinstance(size, (list, tuple)) or len(size) != 2:
        return False
    height, width = size
    return type(height) is int and type(width) is int and height > 0 and width > 0


def random_resized_crop(step: Any, frame: Frame) -> bool:
    """Crop and resize; v1 and v2 draw the same numbers."""
    bicubic = _bicubic(step, frame)
    if bicubic is None or not _is_pair(step.size) or _torch_cannot_resize((step.size[0], step.size[1]), frame):
        return False
    ratio = tuple(step.ratio)
    left, top, width, height = _draw_box(frame.width, frame.height, tuple(step.scale), ratio, *_log_bounds(ratio))
    frame.crop(left, top, width, height)
    frame.resize(step.size[0], step.size[1], bicubic)
    return True


@lru_cache(maxsize=64)
def _log_bounds(ratio: tuple[float, ...]) -> tuple[float, float]:
    """Logarithms of the ratios in torch's float32 arithmetic."""
    low, high = torch.log(torch.tensor(ratio)).tolist()
    return low, high


def _draw_box(
    width: int, height: int, scale: tuple[float, ...], ratio: tuple[float, ...], low: float, high: float
) -> Box:
    area = height * width
    number = torch.empty(1)
    for _ in range(_ATTEMPTS):
        target = area * number.uniform_(scale[0], scale[1]).item()
        aspect = number.uniform_(low, high).exp_().item()
        w, h = round(math.sqrt(target * aspect)), round(math.sqrt(target / aspect))
        if 0 < w <= width and 0 < h <= height:
            whole = torch.empty(1, dtype=torch.int64)
            top = int(whole.random_(0, height - h + 1).item())
            return int(whole.random_(0, width - w + 1).item()), top, w, h
    shape = width / height
    w, h = width, height
    if shape < min(ratio):
        h = round(w / min(ratio))
    elif shape > max(ratio):
        w = round(h * max(ratio))
    return (width - w) // 2, (height - h) // 2, w, h


_ATTEMPTS = 10


def resize(step: Any, frame: Frame) -> bool:
    bicubic = _bicubic(step, frame)
    size = None if bicubic is None else _resized_shape(step.size, step.max_size, frame)
    if size is None or _torch_cannot_resize(size, frame):
        return False
    frame.resize(size[0], size[1], bool(bicubic))
    return True


def _resized_shape(size: Any, most: Any, frame: Frame) -> tuple[int, int] | None:
    """Height and width after `Resize`; None if torchvision refuses the arguments."""
    if _is_pair(size):
        return None if most is not None else (size[0], size[1])
    if isinstance(size, (list, tuple)) and len(size) == 1:
        size = size[0]
    if not (size is None or type(size) is int) or not (most is None or type(most) is int):
        return None
    short, long = sorted((frame.width, frame.height))
    if size is None:
        if most is None:
            return None
        size, longer = int(most * short / long), most
    else:
        longer = int(size * long / short)
        if most is not None and most <= size:
            return None
        if most is not None and longer > most:
            size, longer = int(most * size / longer), most
    return (longer, size) if frame.width <= frame.height else (size, longer)


def center_crop(step: Any, frame: Frame) -> bool:
    if not _is_pair(step.size):
        return False
    height, width = step.size
    # The smaller half of the padding comes first; the rest is cropped, rounded half to even.
    left, top = (max(0, size - full) // 2 for size, full in ((width, frame.width), (height, frame.height)))
    if frame.layout is not None and (width > frame.width or height > frame.height):
        return False
    across = round((max(frame.width, width) - width) / 2.0) - left
    down = round((max(frame.height, height) - height) / 2.0) - top
    frame.crop(across, down, width, height)
    return True


def _pads_with_black(step: Any) -> bool:
    return step.padding_mode == "constant" and type(step.fill) in (int, float) and int(step.fill) == 0


def _sides(padding: Any) -> tuple[int, int, int, int] | None:
    """Padding of v1 as (left, top, right, bottom); None if not supported."""
    each = (padding,) if type(padding) is int else tuple(padding) if isinstance(padding, (list, tuple)) else ()
    if len(each) not in (1, 2, 4) or not all(type(side) is int and side >= 0 for side in each):
        return None
    left, top, right, bottom = each * (4 // len(each))
    return left, top, right, bottom


def random_crop_v1(step: Any, frame: Frame) -> bool:
    if not _is_pair(step.size):
        return False
    left = top = 0
    width, height = frame.width, frame.height
    if step.padding is not None:
        sides = _sides(step.padding)
        if sides is None or (any(sides) and not _pads_with_black(step)):
            return False
        left, top = sides[:2]
        width, height = width + left + sides[2], height + top + sides[3]
    high, wide = step.size
    if height < high or width < wide:
        if not (step.pad_if_needed and _pads_with_black(step)):
            return False
        across, down = max(0, wide - width), max(0, high - height)
        left, top, width, height = left + across, top + down, width + 2 * across, height + 2 * down
    if (height, width) == (high, wide):  # then nothing is drawn
        frame.crop(-left, -top, wide, high)
        return True
    at_top = torch.randint(0, height - high + 1, (1,)).item()
    at_left = torch.randint(0, width - wide + 1, (1,)).item()
    frame.crop(int(at_left) - left, int(at_top) - top, wide, high)
    return True


def random_crop_v2(step: Any, frame: Frame) -> bool:
    if not _is_pair(step.size) or not (_pads_with_black(step) or (step.padding is None and not step.pad_if_needed)):
        return False
    height, width = step.size
    sides = step.padding or (0, 0, 0, 0)  # left, right, top, bottom
    if min(sides) < 0 or (frame.layout is not None and (any(sides) or step.pad_if_needed)):
        return False
    if not step.pad_if_needed and (
        frame.height + sides[2] + sides[3] < height or frame.width + sides[0] + sides[1] < width
    ):
        return False
    drawn = parameters(step, frame)
    left, top = drawn["padding"][:2]
    frame.crop(drawn["left"] - left, drawn["top"] - top, width, height)
    return True


def horizontal_flip(step: Any, frame: Frame) -> bool:
    if draw_bernoulli(step.p):
        frame.flip_horizontally()
    return True


def vertical_flip(step: Any, frame: Frame) -> bool:
    if draw_bernoulli(step.p):
        frame.flip_vertically()
    return True


def _replace(frame: Frame, levels: Any) -> None:
    opened = frame.opened
    frame.__init__(levels, levels.shape[1], levels.shape[0])  # type: ignore[misc]
    frame.opened = opened


def grayscale(step: Any, frame: Frame) -> bool:
    if step.num_output_channels != 3 or frame.gray:
        return False
    _replace(frame, adjust(frame.materialize(), [(SATURATION, 0.0)]))
    return True


def random_grayscale(step: Any, frame: Frame) -> bool:
    if frame.gray:
        return False
    if draw_bernoulli(step.p):
        _replace(frame, adjust(frame.materialize(), [(SATURATION, 0.0)]))
    return True


def _jitter(frame: Frame, order: Any, factors: tuple[float | None, ...]) -> bool:
    changes = [(which, factor) for which in order.tolist() if (factor := factors[which]) is not None]
    if any(which == _HUE and not -0.5 <= factor <= 0.5 for which, factor in changes):
        raise RefusedError("torchvision refuses this hue")
    if changes:
        _replace(frame, adjust(frame.materialize(), changes))
    return True


_HUE = 3


def color_jitter_v1(step: Any, frame: Frame) -> bool:
    if frame.gray:
        return False
    order, *factors = step.get_params(step.brightness, step.contrast, step.saturation, step.hue)
    return _jitter(frame, order, tuple(factors))


def color_jitter_v2(step: Any, frame: Frame) -> bool:
    if frame.gray:
        return False
    drawn = parameters(step, frame)
    names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
    return _jitter(frame, drawn["fn_idx"], tuple(drawn[name] for name in names))


_V1 = "torchvision.transforms.transforms."
_V2 = "torchvision.transforms.v2."


_CROPS = ("crop", "resize", "resized_crop", "get_dimensions", "_compute_resized_output_size")


FRAME_STEPS: dict[str, FrameStep] = {
    _V1 + "RandomResizedCrop": FrameStep(random_resized_crop, _CROPS),
    _V1 + "Resize": FrameStep(resize, _CROPS),
    _V1 + "CenterCrop": FrameStep(center_crop, ("center_crop", "pad", *_CROPS)),
    _V1 + "RandomCrop": FrameStep(random_crop_v1, ("pad", *_CROPS)),
    _V1 + "RandomHorizontalFlip": FrameStep(horizontal_flip, ("hflip",)),
    _V1 + "RandomVerticalFlip": FrameStep(vertical_flip, ("vflip",)),
    _V1 + "Grayscale": FrameStep(grayscale, ("rgb_to_grayscale",)),
    _V1 + "RandomGrayscale": FrameStep(random_grayscale, ("rgb_to_grayscale",)),
    _V1 + "ColorJitter": FrameStep(
        color_jitter_v1, ("adjust_brightness", "adjust_contrast", "adjust_saturation", "adjust_hue")
    ),
    _V2 + "_geometry.RandomResizedCrop": FrameStep(random_resized_crop),
    _V2 + "_geometry.Resize": FrameStep(resize),
    _V2 + "_geometry.CenterCrop": FrameStep(center_crop),
    _V2 + "_geometry.RandomCrop": FrameStep(random_crop_v2),
    _V2 + "_geometry.RandomHorizontalFlip": FrameStep(horizontal_flip),
    _V2 + "_geometry.RandomVerticalFlip": FrameStep(vertical_flip),
    _V2 + "_color.Grayscale": FrameStep(grayscale),
    _V2 + "_color.RandomGrayscale": FrameStep(random_grayscale),
    _V2 + "_color.ColorJitter": FrameStep(color_jitter_v2),
}
"""Functions that execute steps of torchvision on frames, by the name of the step's class."""


_FLIPS = ("RandomHorizontalFlip", "RandomVerticalFlip")


TENSOR_STEPS = frozenset(
    _V2 + "_geometry." + name for name in ("RandomResizedCrop", "Resize", "CenterCrop", "RandomCrop", *_FLIPS)
)
"""Classes that change a tensor as they change an image, except for the rounding of a resize."""


def resizes_tensors_of_levels() -> bool:
    """True if torch resizes uint8 tensors by the algorithm of the kernels.

    On other CPUs, torchvision converts them to floats before.
    """
    return torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")


CONVERSIONS = frozenset(
    {
        *(_V1 + name for name in ("ToTensor", "PILToTensor", "ConvertImageDtype", "Normalize")),
        *(_V2 + "_type_conversion." + name for name in ("PILToTensor", "ToImage", "ToPureTensor")),
        *(_V2 + "_misc." + name for name in ("ToDtype", "ConvertImageDtype", "Normalize")),
        _V2 + "_deprecated.ToTensor",
    }
)
"""Classes that map each level to a number that does not depend on the position in the image."""


SEQUENCES = frozenset({_V1 + "Compose", _V2 + "_container.Compose", "torch.nn.modules.container.Sequential"})


RANDOM_APPLIES = {_V1 + "RandomApply": True, _V2 + "_container.RandomApply": False}
"""Classes that run their steps with a probability; True for those that also run them at a draw equal to it."""


ERASERS = frozenset({_V1 + "RandomErasing", _V2 + "_augment.RandomErasing"})
"""Classes that return the tensor itself, or a changed copy of it."""


_AUGMENTS = ("AutoAugment", "RandAugment", "TrivialAugmentWide", "AugMix")
_COLORS = ("RandomInvert", "RandomPosterize", "RandomSolarize", "RandomAutocontrast", "RandomEqualize")
_WARPS = ("Pad", "RandomPerspective", "RandomRotation", "RandomAffine")


LIBRARY_STEPS = frozenset(
    {
        *("torchvision.transforms.autoaugment." + name for name in _AUGMENTS),
        *(_V1 + name for name in (*_COLORS, *_WARPS, "GaussianBlur", "RandomAdjustSharpness", "ElasticTransform")),
        *(_V2 + "_auto_augment." + name for name in _AUGMENTS),
        *(_V2 + "_color." + name for name in (*_COLORS, "RandomAdjustSharpness", "RandomPhotometricDistort")),
        *(_V2 + "_geometry." + name for name in (*_WARPS, "ElasticTransform", "RandomZoomOut", "ScaleJitter")),
        _V2 + "_misc.GaussianBlur",
    }
)
"""Classes that run only the library's code, and use only the pixels of a Pillow image."""
