"""Datasets of torchvision whose samples are files or arrays."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from PIL import Image

from feedline.collate.rows import RowBuffer
from feedline.core.kernels import SlowKernelsWarning
from feedline.core.recognition import StepFinding
from feedline.core.stage_parts import DECODING, READ_FILES, TRANSFORMING
from feedline.images import native
from feedline.images.pillow import pixel_limit
from feedline.images.placed import can_place
from feedline.transforms.recognized.chain import PACKAGE, Chain
from feedline.transforms.recognized.frame import Frame, RefusedError, frame_of, open_encoded
from feedline.transforms.recognized.origin import is_from, why_modified
from feedline.transforms.recognized.proof import agree, versions

ImageAndTarget = tuple[Any, Any]
"""The path or the levels of a sample's image, and its target."""


Open = Callable[[str], Any]


@dataclass(frozen=True, slots=True)
class ImageFiles:
    """A class whose samples are paths of images."""

    item: Callable[[Any, Any], ImageAndTarget]

    def begin(self, dataset: Any, index: Any, chain: Chain) -> ImageAndTarget:
        """Start of the chain, and the target."""
        path, target = self.item(dataset, index)
        if chain.opens_itself:
            with DECODING:
                return _loader_of(dataset)(path), target
        try:
            with READ_FILES as part:
                encoded = _content(path)
                part.count(len(encoded))
        except OSError as error:
            raise RefusedError("the file cannot be read") from error
        limit = pixel_limit(1)  # above this limit, Pillow warns
        header, unwritten = native.native.image_header(encoded, limit)
        if unwritten is not None or header[3] not in _COMPONENTS:
            return _loader_of(dataset)(path), target
        frame = Frame(encoded, header[0], header[1], limit)
        frame.opened = open_encoded(encoded)
        return frame, target

    def original(self, dataset: Any, index: Any) -> Any:
        """The image as the dataset opens it."""
        return _loader_of(dataset)(self.item(dataset, index)[0])


def _content(path: Any) -> bytes:
    """Content of a file.

    A file object would take twice the time.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0))
    try:
        nbytes = os.fstat(descriptor).st_size
        content = os.read(descriptor, nbytes + 1)
    finally:
        os.close(descriptor)
    if len(content) == nbytes:  # false for pipes, growing files, and reads that the system ends early
        return content
    with open(path, "rb") as file:
        return file.read()


_COMPONENTS = (1, 3)


@dataclass(frozen=True, slots=True)
class LevelArrays:
    """A class whose samples are levels in memory.

    Their shape is (height, width, 3) or (height, width).
    """

    item: Callable[[Any, Any], ImageAndTarget]

    def begin(self, dataset: Any, index: Any, chain: Chain) -> ImageAndTarget:
        """Start of the chain, and the target."""
        levels, target = self.item(dataset, index)
        is_image = isinstance(levels, np.ndarray) and levels.dtype == np.uint8 and levels.size
        if not is_image or not (levels.ndim == 2 or (levels.ndim == 3 and levels.shape[2] == 3)):
            raise RefusedError("not an image in RGB or gray")
        if chain.opens_itself:
            return Image.fromarray(np.ascontiguousarray(levels)), target
        return frame_of(levels), target

    def original(self, dataset: Any, index: Any) -> Any:
        """The image as the dataset opens it."""
        return Image.fromarray(np.ascontiguousarray(self.item(dataset, index)[0]))


KnownDataset = ImageFiles | LevelArrays


class VisionReader:
    """Samples of a recognized dataset, equal to `dataset[index]`.

    They take the same random numbers from torch's generator. A sample that the kernels refuse is read by the dataset
    itself, with the earlier state of the generator. The first sample is read both ways; if the results differ,
    `disabled` has the reason, and the dataset reads all others.
    """

    def __init__(self, dataset: Any, known: KnownDataset) -> None:
        self._dataset, self._known = dataset, known
        self.disabled: str | None = None
        self._opener, self._opens_itself = getattr(dataset, "loader", None), False
        self._compile()

    @property
    def findings(self) -> list[StepFinding]:
        return self._chain.findings

    @property
    def uses_kernels(self) -> bool:
        return self._chain.uses_kernels and self.disabled is None and not self._opens_itself

    @property
    def is_repeatable(self) -> bool:
        return self._repeatable and self._dataset.target_transform is None and not self._opens_itself

    def refresh(self) -> None:
        """Update for changes of the dataset; called before each batch."""
        if not self._chain.is_current(self._dataset.transform):
            self._compile()
        opener = getattr(self._dataset, "loader", None)
        if opener is not self._opener:  # only the library's own opens images as the kernels do
            self._opener = opener
            self._opens_itself = isinstance(self._known, ImageFiles) and _why_own_loader(self._dataset) is not None
            self._proven = False

    def _compile(self) -> None:
        self._chain = chain = Chain(self._dataset.transform)
        self._checked = self._proven = False
        self._repeatable = chain.is_repeatable
        # A sample that may be refused after random numbers were drawn needs the state before them.
        self._may_refuse = isinstance(self._known, ImageFiles) or chain.resizes

    def read(self, index: Any, rows: RowBuffer | None) -> Any:
        """Sample `index`; its image may be the next of `rows`."""
        dataset, chain = self._dataset, self._chain
        if not (self._proven or self._is_proven(index)):
            return self._original(index, rows)
        drawn = torch.get_rng_state() if self._may_refuse else None
        taken = 0 if rows is None else rows.taken
        try:
            value, target = self._known.begin(dataset, index, chain)
            if drawn is not None and rows is not None and rows.may_refuse and isinstance(value, Frame):
                value.undo = partial(torch.set_rng_state, drawn)
            with TRANSFORMING:  # the decoder inside counts as decoding
                image = chain(value, rows)
        except RefusedError:
            if drawn is not None:
                torch.set_rng_state(drawn)
            if rows is not None:
                rows.give_back(taken)
            return self._original(index, rows)
        if dataset.target_transform is not None:
            target = dataset.target_transform(target)
        return image, target

    def _original(self, index: Any, rows: RowBuffer | None) -> Any:
        sample = self._dataset[index]
        if rows is None or type(sample) is not tuple or not sample:
            return sample
        return rows.copy_row(sample[0]), *sample[1:]

    def _is_proven(self, index: Any) -> bool:
        """True if the first readable sample equaled the library's own."""
        if not self._checked and self.uses_kernels:
            self._check(index)
        self._proven = self._checked and self.uses_kernels
        return self._proven

    def _check(self, index: Any) -> None:
        """Compare a sample with the library's own.

        The random generators do not change.
        """
        chain = self._chain
        if not chain.is_repeatable:
            self._checked = True
            return
        try:
            same = agree(
                lambda: chain(self._known.begin(self._dataset, index, chain)[0], None),
                lambda: chain.transform(self._known.original(self._dataset, index)),
            )
        except Exception:  # noqa: BLE001 - a bad sample: the dataset raises the error itself
            return
        self._checked = True
        if not same:
            self._disable()

    def _disable(self) -> None:
        self.disabled = f"its samples differ from the library's own with {versions()}"
        warnings.warn(
            f"{type(self._dataset).__name__} is read by its own code, several times slower: {self.disabled}. Pass"
            " accelerate=False to the loader to silence this, and report it to feedline.",
            SlowKernelsWarning,
            stacklevel=2,
        )


def why_not(dataset: Any, known: KnownDataset) -> str | None:
    """Reason why a dataset of a known class runs its own code.

    None if it can be read.
    """
    if not can_place():
        return "feedline was installed without its native kernels"
    reason = why_modified(dataset, PACKAGE)
    return reason or (_why_own_loader(dataset) if isinstance(known, ImageFiles) else None)


def _why_own_loader(dataset: Any) -> str | None:
    loader = getattr(dataset, "loader", None)
    if loader is None:  # such a class opens images itself, like `_open_rgb`
        return None
    module = sys.modules[f"{PACKAGE}.datasets.folder"]
    if loader is module.default_loader and sys.modules[PACKAGE].get_image_backend() != "PIL":
        return f"{PACKAGE}'s image backend is not PIL"
    ours = loader is module.default_loader or loader is module.pil_loader
    if not ours or not is_from(loader, PACKAGE) or not is_from(module.pil_loader, PACKAGE):
        return "its loader is not torchvision's default_loader"
    return None


def _open_rgb(path: str) -> Any:
    return Image.open(path).convert("RGB")


def _loader_of(dataset: Any) -> Open:
    return getattr(dataset, "loader", _open_rgb)


def _list_row(dataset: Any, index: Any) -> ImageAndTarget:
    path, target = dataset.samples[index]
    return path, target


def _pairs(dataset: Any, index: Any) -> ImageAndTarget:
    path, target = dataset._samples[index]
    return path, target


def _columns(dataset: Any, index: Any) -> ImageAndTarget:
    return dataset._image_files[index], dataset._labels[index]


def _cifar(dataset: Any, index: Any) -> ImageAndTarget:
    return dataset.data[index], dataset.targets[index]


def _mnist(dataset: Any, index: Any) -> ImageAndTarget:
    return dataset.data[index].numpy(), int(dataset.targets[index])


def _usps(dataset: Any, index: Any) -> ImageAndTarget:
    return dataset.data[index], int(dataset.targets[index])


def _svhn(dataset: Any, index: Any) -> ImageAndTarget:
    return np.transpose(dataset.data[index], (1, 2, 0)), int(dataset.labels[index])


def _stl10(dataset: Any, index: Any) -> ImageAndTarget:
    target = int(dataset.labels[index]) if dataset.labels is not None else None
    return np.transpose(dataset.data[index], (1, 2, 0)), target


_FOLDER, _PAIRS, _COLUMNS, _CIFAR = ImageFiles(_list_row), ImageFiles(_pairs), ImageFiles(_columns), LevelArrays(_cifar)

_DATASETS = f"{PACKAGE}.datasets."


VISION: dict[str, KnownDataset] = {
    _DATASETS + "folder.DatasetFolder": _FOLDER,
    _DATASETS + "folder.ImageFolder": _FOLDER,
    _DATASETS + "imagenet.ImageNet": _FOLDER,
    _DATASETS + "eurosat.EuroSAT": _FOLDER,
    _DATASETS + "country211.Country211": _FOLDER,
    _DATASETS + "cifar.CIFAR10": _CIFAR,
    _DATASETS + "cifar.CIFAR100": _CIFAR,
    **{_DATASETS + f"mnist.{name}": LevelArrays(_mnist) for name in ("MNIST", "FashionMNIST", "KMNIST", "EMNIST")},
    _DATASETS + "usps.USPS": LevelArrays(_usps),
    _DATASETS + "svhn.SVHN": LevelArrays(_svhn),
    _DATASETS + "stl10.STL10": LevelArrays(_stl10),
    _DATASETS + "food101.Food101": _COLUMNS,
    _DATASETS + "dtd.DTD": _COLUMNS,
    _DATASETS + "fgvc_aircraft.FGVCAircraft": _COLUMNS,
    _DATASETS + "flowers102.Flowers102": _COLUMNS,
    _DATASETS + "sun397.SUN397": _COLUMNS,
    _DATASETS + "gtsrb.GTSRB": _PAIRS,
    _DATASETS + "rendered_sst2.RenderedSST2": _PAIRS,
    _DATASETS + "stanford_cars.StanfordCars": _PAIRS,
    _DATASETS + "imagenette.Imagenette": _PAIRS,
}
"""Classes whose samples are `(transform(image), target_transform(target))`, by name."""
