"""`OnBatch`: a pipeline applied to whole batches of tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from feedline.core.dataset import Keys
from feedline.core.rng import batch_keys, derive_each
from feedline.core.tensors import allocate_tensor
from feedline.core.tree import like_named_tuple
from feedline.errors import ArgumentError, SampleError
from feedline.transforms.base import Transform
from feedline.transforms.batched.mixing import SampleMixing
from feedline.transforms.batched.operators import ImageRows, apply_steps, check_steps, has_step, stacked
from feedline.transforms.color import ColorJitter, GaussianBlur, RandomGrayscale
from feedline.transforms.compose import Compose
from feedline.transforms.native_steps import ResizeShortest, Window
from feedline.transforms.plan import ImagePlan

FieldName = int | str


class OnBatch:
    """Transforms of whole batches, on the device of the batch.

    `on_batch(batch)` or `on_batch(batch, keys)`. The batch is a tensor of images, or a tuple, list or dict with images
    and labels at the fields `images` and `labels`. Images are uint8 levels or numbers (batch, channels, height, width)
    with 3 channels (RGB) or 1 (gray), or a list of images of different sizes, which a crop or resize makes one tensor.

    `transforms` are image transforms of feedline, then `MixUp` or `CutMix`. Each row draws from its own key, of
    `keys`, uint64 (batch,): the numbers that the transforms would draw for a sample with this key. Without `keys`, a
    collate function within a loader gets those of its samples; elsewhere they come from torch's generator.

    On the CPU, uint8 images go through the native kernels where these are faster, and the results are those of single
    images. On other devices each transform is one launch, or a few, and results differ by at most one level where an
    image is resized or blurred, in bicubic resizes rarely by two; all others are equal. The input is left unchanged,
    and the result may share memory with it. With `inplace`, a tensor of images may be written to, which avoids a copy
    where flips and erasing change a part of it: for batches that nothing else refers to, such as collated batches and
    those that a `Delivery` has moved to another device. With `batch_size=None`, a batch that was on the device already
    is the dataset's own. Callables of other libraries, and subclasses with an `apply` of their own, raise an
    ArgumentError.
    """

    def __init__(
        self,
        transforms: Transform | SampleMixing | Sequence[Transform | SampleMixing],
        *,
        images: FieldName = 0,
        labels: FieldName = 1,
        inplace: bool = False,
    ) -> None:
        parts = [transforms] if isinstance(transforms, (Transform, SampleMixing)) else list(transforms)
        self._mixtures = [(place, part) for place, part in enumerate(parts) if isinstance(part, SampleMixing)]
        first = len(parts) - len(self._mixtures)
        if any(place < first for place, _ in self._mixtures):
            raise ArgumentError("OnBatch: transforms of images must come before MixUp and CutMix")
        self.transforms = tuple(parts)
        self.images, self.labels, self.inplace = images, labels, inplace
        # A single transform keeps its keys: it draws the same numbers as for samples.
        whole = transforms if isinstance(transforms, Transform) else Compose(self.transforms[:first])
        self._plan: ImagePlan = whole.plan
        check_steps(self._plan.steps)
        self._suits_kernels = has_step(
            self._plan.steps, (Window, ResizeShortest, ColorJitter, RandomGrayscale, GaussianBlur)
        )

    def __call__(self, batch: Any, keys: Keys | None = None) -> Any:
        """Transform the batch; the result has the containers of `batch`.

        Raises ArgumentError for `keys` of a wrong shape, and SampleError for a batch that the transforms cannot take.
        """
        is_bare = _are_images(batch)
        images = batch if is_bare else self._field(batch, self.images)
        count = _check_images(images)
        keys = batch_keys(count) if keys is None else np.asarray(keys, np.uint64)
        if keys.shape != (count,):
            raise ArgumentError(f"keys must be one uint64 per image: {count} images, but keys of shape {keys.shape}")
        if self._suits_kernels and uses_kernels(images):
            done = _by_kernels(images, self._plan, keys)
        elif not count:  # with the shape and dtype that an image would have
            done = self._by_operators(images.new_zeros((1, *images.shape[1:])), np.zeros(1, np.uint64))[:0]
        else:
            done = self._by_operators(images, keys)
        if is_bare:
            return self._mix(done, None, keys)[0]
        labels = self._field(batch, self.labels) if self._mixtures else None
        done, labels = self._mix(done, labels, keys)
        changes = {self.images: done, **({self.labels: labels} if self._mixtures else {})}
        return _replace(batch, changes)

    def _by_operators(self, images: Any, keys: Keys) -> torch.Tensor:
        rows = ImageRows(images, is_owned=self._owns(images))
        return stacked(apply_steps(self._plan.steps, rows, keys), "OnBatch")

    def _owns(self, images: Any) -> bool:
        """True if the operators may write to these images.

        False for rows that share memory, as those of expanded tensors do.
        """
        is_tensor = self.inplace and isinstance(images, torch.Tensor)
        return is_tensor and 0 not in images.stride() and not images.requires_grad

    def _mix(self, images: torch.Tensor, labels: Any, keys: Keys) -> tuple[torch.Tensor, Any]:
        for place, mixture in self._mixtures:
            if not isinstance(labels, torch.Tensor):
                raise SampleError(f"{type(mixture).__name__} mixes labels, too: pass a batch of images and labels")
            images, labels = mixture(images, labels, derive_each((), keys, place))
        return images, labels

    def _field(self, batch: Any, field: FieldName) -> Any:
        try:
            return batch[field]
        except (KeyError, IndexError, TypeError) as error:
            fields = list(batch) if isinstance(batch, Mapping) else f"{len(batch)} parts"
            raise SampleError(
                f"OnBatch looks for the field {field!r} in a {type(batch).__name__} of {fields}: pass images= and"
                " labels= with the keys or positions of the batch"
            ) from error

    def __repr__(self) -> str:
        return f"OnBatch({list(self.transforms)!r}{', inplace=True' if self.inplace else ''})"


def uses_kernels(images: Any) -> bool:
    """True for levels on the CPU, which native kernels change faster."""
    if isinstance(images, torch.Tensor):
        return images.is_cpu and images.dtype == torch.uint8 and len(images) > 0
    return all(image.is_cpu and image.dtype == torch.uint8 for image in images)


def _by_kernels(images: Any, plan: ImagePlan, keys: Keys) -> torch.Tensor:
    """Apply the plan to single images, which defines the result."""
    sources = [image.permute(1, 2, 0).numpy() for image in images]
    if plan.spec is not None and plan.batchable and all(source.shape[2] == 3 for source in sources):
        done = plan.batch(sources, keys, allocate_tensor, threads=torch.get_num_threads())
        return done if plan.spec.converted else done.permute(0, 3, 1, 2).contiguous()
    samples = [plan.run(source, key) for source, key in zip(sources, keys.tolist(), strict=True)]
    return stacked(ImageRows([_channels_first(sample) for sample in samples]), "OnBatch").contiguous()


def _channels_first(sample: Any) -> torch.Tensor:
    """Levels (height, width, channels) as a tensor; converted samples are unchanged."""
    return sample if isinstance(sample, torch.Tensor) else torch.as_tensor(sample, device="cpu").permute(2, 0, 1)


def _are_images(batch: Any) -> bool:
    """True for a tensor, and for a list of single images."""
    if isinstance(batch, (list, tuple)) and batch:
        return all(isinstance(part, torch.Tensor) and part.ndim == 3 for part in batch)
    return isinstance(batch, torch.Tensor)


def _check_images(images: Any) -> int:
    if isinstance(images, torch.Tensor):
        if images.ndim == 4 and images.shape[1] in (1, 3):
            return len(images)
        got = f"a tensor of shape {tuple(images.shape)}"
    elif isinstance(images, (list, tuple)) and images and all(isinstance(image, torch.Tensor) for image in images):
        shapes = [tuple(image.shape) for image in images]
        wrong = next((shape for shape in shapes if len(shape) != 3 or shape[0] not in (1, 3)), None)
        if wrong is None:
            return len(images)
        got = f"an image of shape {wrong}"
    else:
        got = f"a {type(images).__name__}"
    raise SampleError(
        f"OnBatch takes images (batch, channels, height, width) with 3 channels or 1, or a list of them, not {got}"
    )


def _replace(batch: Any, changes: Mapping[Any, Any]) -> Any:
    if isinstance(batch, Mapping):
        return {**batch, **changes}
    changes = {place % len(batch): part for place, part in changes.items()}  # -1 is the last one
    if hasattr(batch, "_fields"):
        return like_named_tuple(batch, (changes.get(place, part) for place, part in enumerate(batch)))
    return type(batch)(changes.get(place, part) for place, part in enumerate(batch))
