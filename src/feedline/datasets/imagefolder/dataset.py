"""`ImageFolder`: images in one folder per class, compatible with torchvision."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.arguments import whole_numbers
from feedline.core.dataset import BatchRead, Traits, TransformFunction, check_reads_batches
from feedline.core.dataset_fingerprint import digest_of
from feedline.core.paths import Pathlike, folder_path, missing_error
from feedline.core.rng import sample_rng, torch_keys
from feedline.core.tensors import normalize_indices, numpy_view
from feedline.datasets.base import GroupedRecords
from feedline.datasets.content_digest import digest_of_files, digest_of_objects
from feedline.datasets.decoding import ImageDecoder, loaded
from feedline.datasets.imagefolder.samples import Samples
from feedline.datasets.imagefolder.scan import FileSelection, ImageTree
from feedline.datasets.strings import PackedBytes
from feedline.errors import ArgumentError, SampleError, note
from feedline.images import ImageError
from feedline.stores import Cache, CachedStore, ObjectNotFoundError, ObjectRange
from feedline.transforms.batched.encoded import decoded_on_device

IMG_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""torchvision's extensions of image files; the format is detected by content."""


_HASHED_NAMES = 4096
"""Number of images of a larger folder whose names are hashed, evenly spread."""


_GONE = (
    "it was moved or deleted since the folder was listed, or is a broken link: restore it, create the dataset again, "
    "or pass on_error='skip' to the loader"
)


class ImageFolder(GroupedRecords):
    """Images in `root/class/…/name.jpg`, as samples `(image, class index)`.

    Arguments up to `allow_empty`, attributes, order and class indices are torchvision's. Files with other `extensions`
    are ignored. With `apply_exif_orientation`, images are turned upright. Classes are the sorted names of the folders
    in `root`; the files of a class are sorted by folder, then by name; links to folders are followed. `transform` gets
    the result of `loader(path)`, by default a PIL image in RGB. A feedline transform is fused with decoding, and whole
    batches are then read in one native call; `decode="device"` wraps it in `transforms.DecodeOnDevice`. The format of
    a file is detected by its content, not its name.

    With `index_dir` the list of paths is stored in that folder, so that the tree is walked once; it is built again
    when a folder has changed. Paths are packed: 12 bytes for each plus its own. `samples` and `targets` are computed
    on access. `samples` may be assigned, but not changed in place.

    `root` may be an address in a store, opened with the `options` of `open_store`. It is listed once, a stored list is
    used without checks, and a `loader` gets a file in memory. Images are kept in the folder `cache`, if one is given.

    SampleError names an image that cannot be read.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        transform: TransformFunction | None = None,
        target_transform: TransformFunction | None = None,
        loader: Callable[[Any], Any] | None = None,
        is_valid_file: Callable[[str], bool] | None = None,
        allow_empty: bool = False,
        *,
        extensions: Sequence[str] = IMG_EXTENSIONS,
        apply_exif_orientation: bool = False,
        decode: Literal["device"] | None = None,
        index_dir: str | os.PathLike[str] | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        if index_dir is not None and is_valid_file is not None:
            raise ArgumentError(
                "index_dir= cannot be used with is_valid_file=, whose results may change: pass extensions= instead"
            )
        if decode not in (None, "device"):
            raise ArgumentError(f'decode={decode!r}: give "device", or None for workers that decode')
        self.extensions = (extensions,) if isinstance(extensions, str) else tuple(extensions)
        folder = None if index_dir is None else str(folder_path(index_dir, "index_dir"))
        selection = FileSelection(self.extensions, is_valid_file, folder)
        self._tree = ImageTree(os.fspath(root), selection, cache, options)
        self.root = self._tree.root
        self._ours = partial(loaded, apply_exif_orientation=apply_exif_orientation)
        self.loader: Callable[[Any], Any] = loader or self._ours
        self._oriented = apply_exif_orientation
        self.classes, self.class_to_idx = self.find_classes(self.root)
        names = sorted(self.class_to_idx)
        listing = self._tree.listing(names)
        if not allow_empty:
            self._check_not_empty(names, listing.counts, is_valid_file is not None)
        targets = np.repeat(np.array([self.class_to_idx[name] for name in names], np.int32), listing.counts)
        beginning = os.path.join(self.root, "")  # noqa: PTH118 - keeps its form
        self._samples = Samples(beginning, listing.paths, targets, listing.details)
        self._folder = self._tree.folder
        self.transform = decoded_on_device(transform) if decode else transform
        self.target_transform = target_transform

    def find_classes(self, directory: str | os.PathLike[str]) -> tuple[list[str], dict[str, int]]:
        """Class names and indices, from the sorted folder names; for overriding."""
        try:
            classes = self._tree.classes(directory)
        except FileNotFoundError:
            raise missing_error(directory, "no such folder") from None
        except NotADirectoryError:
            raise NotADirectoryError(
                f"{os.fspath(directory)} is a file: give a folder `root` with images in root/class/name.jpg"
            ) from None
        if not classes:
            raise FileNotFoundError(
                f"{os.fspath(directory)} has no class folders: images must be in root/class/name.jpg, one folder per "
                f"class"
            )
        return classes, {name: number for number, name in enumerate(classes)}

    def _check_not_empty(self, names: Sequence[str], counts: NDArray[np.int64], by_function: bool) -> None:
        empty = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
        if empty:
            wanted = "that is_valid_file accepts" if by_function else f"that ends with {', '.join(self.extensions)}"
            others = "" if by_function else "pass extensions= if the images have others (.heic, .jxl, .avif), "
            raise FileNotFoundError(
                f"no file {wanted} in the class folder{'s' * (len(empty) > 1)} {', '.join(empty)} of {self.root}: "
                f"{others}fill or remove {'them' if len(empty) > 1 else 'it'}, or pass allow_empty=True"
            )

    @property
    def transform(self) -> TransformFunction | None:
        """The transform of each image; assign it before creating a loader."""
        return self._transform

    @transform.setter
    def transform(self, transform: TransformFunction | None) -> None:
        self._transform = transform
        self._images = ImageDecoder(transform, self._ours, apply_exif_orientation=self._oriented)

    @property
    def samples(self) -> Sequence[tuple[str, int]]:
        """`(path, class index)` of each sample."""
        return self._samples

    @samples.setter
    def samples(self, samples: Sequence[tuple[str, int]]) -> None:
        paths = PackedBytes.of(os.fsencode(path) for path, _ in samples)
        targets = whole_numbers("class index of sample {}".format, [target for _, target in samples], np.int32)
        self._samples = Samples("", paths, targets)
        self._folder = b""
        self.__dict__.pop("targets", None)

    imgs = samples

    @cached_property
    def targets(self) -> list[int]:
        """The class index of each sample."""
        targets: list[int] = self._samples.targets(slice(None)).tolist()
        return targets

    def __len__(self) -> int:
        return len(self._samples)

    def ranges(self, indices: NDArray[np.int64]) -> list[tuple[CachedStore, ObjectRange]]:
        """Cache and byte range of every read for these samples."""
        return self._tree.ranges(self._samples, normalize_indices(indices, len(self), "ImageFolder"), self._folder)

    def _read_samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[tuple[Any, Any]]:
        paths = self._samples.files(places, self._folder)
        targets = self._samples.targets(places).tolist()
        labeled, samples = self.target_transform or int, []
        with self._tree.fetching(self._samples, places, paths) as fetched:
            for number, (each, row, target) in enumerate(zip(fetched, rows, targets, strict=True)):
                with self._naming(paths[number : number + 1], places[number:]):
                    image = self._image(self._tree.content(each), row)
                samples.append((image, labeled(target)))
        return samples

    def _image(self, source: Any, row: int | None) -> Any:
        if self.loader is self._ours:
            return self._images.value(source, sample_rng(row) if self._images.uses_keys else None)
        file = source if isinstance(source, str) else BytesIO(source)
        return self._images.step(self.loader(file), row)

    @property
    def listing_fingerprint(self) -> str:
        """Digest of image names and classes, checked by saved loader states."""
        some = np.arange(0, len(self), max(1, len(self) // _HASHED_NAMES))
        targets = self._samples.targets(some).tolist()
        return digest_of(self._samples.files(some, self._folder), [len(self), *targets])

    @property
    def content_fingerprint(self) -> str:
        """Digest of the current image versions, for cached results.

        Takes a `stat` of each file, or a listing of the store.
        """
        files = self._samples.files(np.arange(len(self)), self._folder)
        store = self._tree.store
        return digest_of_files(files) if store is None else digest_of_objects(store, self._tree.inside(files))

    @property
    def traits(self) -> Traits:
        """Traits: batches need a feedline transform that gives all images one shape."""
        fused = self.loader is self._ours and self._images.batchable and self.target_transform is None
        return Traits(
            thread_safe=True,
            reads_batches=fused and not self._is_overridden,
            uses_keys=self._images.uses_keys,
            supports_threads=self._images.supports_threads,
        )

    def read_batch(self, request: BatchRead) -> list[torch.Tensor]:
        """`[images, labels]`, tensors (B, ...) and int64 (B,).

        TypeError if images must be read one by one.
        """
        check_reads_batches(self)
        places, keys = normalize_indices(request.indices, len(self), "ImageFolder"), request.keys
        paths = self._samples.files(places, self._folder)
        if keys is None and self._images.uses_keys:
            keys = torch_keys(len(places))
        sources = self._contents(paths, places)
        with self._naming(paths, places):
            images = self._images.decode_batch(sources, keys, request.allocate, threads=request.threads)
        labels = request.allocate((len(places),), torch.int64)
        numpy_view(labels)[...] = self._samples.targets(places)
        return [images, labels]

    def _contents(self, paths: Sequence[str], places: NDArray[np.int64]) -> list[Any]:
        """Paths or fetched contents of these images."""
        contents = []
        with self._tree.fetching(self._samples, places, paths) as fetched:
            for number, each in enumerate(fetched):
                with self._naming(paths[number : number + 1], places[number:]):
                    contents.append(self._tree.content(each))
        return contents

    @contextmanager
    def _naming(self, paths: Sequence[str], places: NDArray[np.int64]) -> Iterator[None]:
        """Add file and sample to errors of the block."""
        try:
            yield
        except (SampleError, OSError) as error:
            row = _row_of(error, paths)
            name = f"{paths[row]} (sample {places[row]} of the ImageFolder {self.root})"
            if isinstance(error, ObjectNotFoundError):
                raise ObjectNotFoundError(f"{name} does not exist: {_GONE}") from error
            if isinstance(error, FileNotFoundError) and not os.path.exists(paths[row]):  # noqa: PTH110
                raise FileNotFoundError(f"{name} does not exist: {_GONE}") from error
            note(error, f"feedline: {name}")
            raise

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "targets"}

    def __repr__(self) -> str:
        return f"<ImageFolder {self.root}: {len(self)} images of {len(self.classes)} classes>"


def _row_of(error: Exception, paths: Sequence[str]) -> int:
    """Index of the file that an error is about."""
    if isinstance(error, ImageError):
        return error.row or 0
    name = getattr(error, "filename", None)
    return paths.index(name) if name in paths else 0
