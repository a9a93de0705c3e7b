"""Decoders of batches of images on a device, from installed packages."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch.utils.dlpack import from_dlpack

from feedline import images

EncodedFiles = Sequence[torch.Tensor]
"""Encoded images: uint8, one-dimensional, in host memory."""


DeviceDecoder = Callable[[EncodedFiles, torch.device], list[torch.Tensor | None]]
"""`decoder(files, device)` returns RGB levels on the device, uint8 (3, height, width); None for files that it cannot
decode.
"""


class DecodeCounts(NamedTuple):
    """Images decoded for devices by this process, and fallbacks among them."""

    decoded: int = 0
    fallbacks: int = 0
    by_workers: int = 0
    """Images in the share of the workers; `decoded` does not include them."""


class _Counter:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.counts = DecodeCounts()

    def add(self, decoded: int, fallbacks: int, by_workers: int = 0) -> None:
        with self._lock:
            before = self.counts
            self.counts = DecodeCounts(
                before.decoded + decoded, before.fallbacks + fallbacks, before.by_workers + by_workers
            )


_counter = _Counter()


def counts() -> DecodeCounts:
    """Current counts of this process."""
    return _counter.counts


def count_in_workers(count: int, fallbacks: int) -> None:
    """Count images that workers have decoded.

    `fallbacks` of them were decoded there because a device might refuse them, the others as the workers' share.
    """
    if count:
        _counter.add(fallbacks, fallbacks, count - fallbacks)


def decode_on_device(
    files: EncodedFiles, device: torch.device, *, apply_exif_orientation: bool = False
) -> list[torch.Tensor]:
    """RGB levels (3, height, width) of each file, on the device.

    A file that the device's decoder refuses is decoded on the CPU, and counted. ImageError has the row of the first
    file that cannot be read at all. With `apply_exif_orientation`, images are turned upright on the device.
    """
    decoded = decoder_of(device.type)(files, device)
    if apply_exif_orientation:
        decoded = [_turned_by_tag(each, file, {}) for each, file in zip(decoded, files, strict=True)]
    missing = [row for row, levels in enumerate(decoded) if levels is None]
    natively = _decode_natively([files[row] for row in missing], apply_exif_orientation)
    for row, levels in zip(missing, natively, strict=True):
        if isinstance(levels, images.ImageError):
            levels.row = row
            raise levels
        decoded[row] = levels.to(device)
    _counter.add(len(files), len(missing))
    return [levels for levels in decoded if levels is not None]


def turned(levels: torch.Tensor, orientation: int) -> torch.Tensor:
    """Levels (channels, height, width), turned by an EXIF orientation."""
    dims = [1] * (orientation in {3, 4, 6, 7}) + [2] * (orientation in {2, 3, 7, 8})
    flipped = levels.flip(dims) if dims else levels
    return flipped.transpose(1, 2).contiguous() if orientation >= 5 else flipped


def _turned_by_tag(levels: torch.Tensor | None, file: torch.Tensor, of: Mapping[int, int]) -> torch.Tensor | None:
    """Levels turned by the orientation of their file.

    `of` replaces some orientations by others. None for a file whose tags cannot be read: the CPU then decodes it, or
    reports the error.
    """
    try:
        orientation = 1 if levels is None else images.probe(file.numpy()).orientation
    except images.ImageError:
        return None
    return None if levels is None else turned(levels, of.get(orientation, orientation))


@cache
def decoder_of(kind: str) -> DeviceDecoder:
    """The first installed decoder for a type of device.

    Without one, a warning is given, and every file falls back to the CPU.
    """
    for _, decoder in installed_decoders(kind):
        return decoder
    warnings.warn(
        f"no decoder of images for {kind!r} is installed: DecodeOnDevice decodes on the CPU, in the training process."
        " Install nvidia-nvimgcodec, torchcodec, torchvision or nvidia-dali, or leave out DecodeOnDevice, so that"
        " workers decode",
        RuntimeWarning,
        stacklevel=3,
    )
    return lambda files, _: [None] * len(files)


def installed_decoders(kind: str) -> Iterator[tuple[str, DeviceDecoder]]:
    """Installed decoders with their packages, the fastest first."""
    for module, make in _DECODERS if kind == "cuda" else ():
        try:
            # Imports the package of the module, of which another distribution may be a part.
            decoder = None if find_spec(module) is None else make()
        except (AttributeError, ImportError, OSError, RuntimeError):  # an older version, or one for another torch
            continue
        if decoder is not None:
            yield module, decoder


def _decode_natively(files: EncodedFiles, upright: bool) -> list[torch.Tensor | images.ImageError]:
    """The levels of each file, or its error."""
    decode = partial(_decode_native, upright)
    if len(files) < 2:
        return [decode(file) for file in files]
    with ThreadPoolExecutor(min(len(files), torch.get_num_threads()), "feedline-decode") as threads:
        return list(threads.map(decode, files))


def _decode_native(upright: bool, file: torch.Tensor) -> torch.Tensor | images.ImageError:
    try:
        return torch.from_numpy(images.decode(file.numpy(), apply_exif_orientation=upright)).permute(2, 0, 1)
    except images.ImageError as error:
        return error


def _index_of(device: torch.device) -> int:
    index: Any = device.index  # None for "cuda", although torch declares an int
    return torch.cuda.current_device() if index is None else int(index)


@contextmanager
def _between_waits(device: torch.device) -> Iterator[Any]:
    """Block with the current stream; the host waits before and behind it.

    Before, because decoding hardware writes without regard to the order of a stream, and the memory that it gets may be
    memory that earlier work on the stream still reads. Behind, because the files may change then.
    """
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    try:
        yield stream
    finally:
        stream.synchronize()


def _nvimgcodec(**arguments: Any) -> DeviceDecoder:
    """Decoder of nvImageCodec, with other `arguments` of its `Decoder`."""
    package: Any = import_module("nvidia.nvimgcodec")
    as_stored, is_planar = _stored_planes(package)  # upright images are its default
    decoders: dict[int, Any] = {}

    def decode(files: EncodedFiles, device: torch.device) -> list[torch.Tensor | None]:
        with torch.cuda.device(device), _between_waits(device) as stream:
            index = _index_of(device)
            if index not in decoders:
                decoders[index] = package.Decoder(device_id=index, **{"options": NVIMGCODEC_OPTIONS, **arguments})
            decode_some = partial(decoders[index].decode, params=as_stored, cuda_stream=stream.cuda_stream)
            arrays = [file.numpy() for file in files]
            found = decode_some(arrays)
            if len(found) != len(files):  # older versions leave out the files that they refuse
                found = [(decode_some([array]) or [None])[0] for array in arrays]
            levels = [None if each is None else torch.as_tensor(each, device=device) for each in found]
        if not is_planar:
            levels = [None if each is None or each.ndim != 3 else each.permute(2, 0, 1) for each in levels]
        return [None if each is None or each.ndim != 3 or each.shape[0] != 3 else each for each in levels]

    return decode


NVIMGCODEC_OPTIONS = ":fancy_upsampling=1"
"""Options of nvImageCodec: colors of half resolution are interpolated, as on the CPU."""


def _stored_planes(package: Any) -> tuple[Any, bool]:
    """Parameters for images as stored; True if channels come first."""
    try:
        return package.DecodeParams(apply_exif_orientation=False, sample_format=package.P_RGB), True
    except (AttributeError, TypeError):  # older than 0.9
        return package.DecodeParams(apply_exif_orientation=False), False


def _torchvision() -> DeviceDecoder:
    io: Any = import_module("torchvision.io")
    return _of_jpegs(partial(io.decode_jpeg, mode=io.ImageReadMode.RGB))


def _torchcodec() -> DeviceDecoder:
    """Decoder of torchcodec, which turns images upright: the turn is undone."""
    decode = _of_jpegs(partial(import_module("torchcodec.decoders").decode_jpeg, mode="RGB"))

    def stored(files: EncodedFiles, device: torch.device) -> list[torch.Tensor | None]:
        return [_turned_by_tag(each, file, _UNDONE) for file, each in zip(files, decode(files, device), strict=True)]

    return stored


_UNDONE = {6: 8, 8: 6}
"""Orientations that undo others; every other orientation undoes itself."""


def _of_jpegs(decode_jpeg: Callable[..., Any]) -> DeviceDecoder:
    """Decoder that receives all JPEGs in one call."""

    def decode(files: EncodedFiles, device: torch.device) -> list[torch.Tensor | None]:
        jpegs = [row for row, file in enumerate(files) if file[:3].tolist() == [0xFF, 0xD8, 0xFF]]
        levels: list[torch.Tensor | None] = [None] * len(files)
        with torch.cuda.device(device), _between_waits(device):
            found = _all_or_each(decode_jpeg, [files[row] for row in jpegs], device)
        for row, each in zip(jpegs, found, strict=True):
            levels[row] = each
        return levels

    return decode


def _all_or_each(decode: Callable[..., Any], files: EncodedFiles, device: torch.device) -> list[torch.Tensor | None]:
    """One call for all files; after an error, one for each."""
    try:
        return list(decode(list(files), device=device)) if files else []
    except RuntimeError:
        levels: list[torch.Tensor | None] = []
        for file in files:
            try:
                levels.append(decode(file, device=device))
            except RuntimeError:
                levels.append(None)
        return levels


def _dali() -> DeviceDecoder:
    """Decoder of DALI: a pipeline of one operator.

    A pipeline cannot be used after a damaged file, so the next call makes another.
    """
    dali, fn, types = (import_module(f"nvidia.dali{part}") for part in ("", ".fn", ".types"))
    pipelines: dict[tuple[int, int], Any] = {}

    def pipeline(count: int, index: int) -> Any:
        size = 1 << (count - 1).bit_length()  # a pipeline takes batches of up to its size
        made = pipelines.get((size, index))
        if made is None:
            made = dali.Pipeline(
                size, torch.get_num_threads(), index, prefetch_queue_depth=1, exec_async=False, exec_pipelined=False
            )
            with made:
                files = fn.external_source(name="files", device="cpu", dtype=types.UINT8, ndim=1)
                levels = fn.decoders.image(files, device="mixed", output_type=types.RGB, adjust_orientation=False)
                made.set_outputs(levels)
            made.build()
            pipelines[size, index] = made
        return made

    def decode_all(files: Any, *, device: torch.device) -> Any:
        some = files if isinstance(files, list) else [files]
        index = _index_of(device)
        made = pipeline(len(some), index)
        try:
            made.feed_input("files", [file.numpy() for file in some])
            (found,) = made.run()
        except RuntimeError:
            pipelines.clear()
            raise
        # Copies: the next run writes to the memory of this run.
        levels = [from_dlpack(found[row]).permute(2, 0, 1).clone() for row in range(len(some))]
        return levels if isinstance(files, list) else levels[0]

    def decode(files: EncodedFiles, device: torch.device) -> list[torch.Tensor | None]:
        with torch.cuda.device(device), _between_waits(device):
            return _all_or_each(decode_all, files, device)

    return decode


_DECODERS: tuple[tuple[str, Callable[[], DeviceDecoder]], ...] = (
    ("nvidia.nvimgcodec", _nvimgcodec),
    ("torchcodec.decoders", _torchcodec),
    ("torchvision.io", _torchvision),
    ("nvidia.dali", _dali),
)
"""Packages, the fastest first; each returns images as they are stored."""
