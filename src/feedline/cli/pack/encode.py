"""Encoding of one sample as members of a tar.

A JPEG with a *grid* has restart markers at regular places. The lengths of the intervals between them go into the index
of the shard, and let a reader decode a part of the image (see native/image/grid.h).
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from feedline import images
from feedline.cli.pack.options import PackOptions
from feedline.core import kernels
from feedline.datasets.sample_lists import Sample, SamplePart
from feedline.datasets.webdataset import is_image
from feedline.errors import ArgumentError, MissingExtraError, SampleError
from feedline.images.errors import REMEDY

Lengths = NDArray[np.uint16]
"""Bytes of each restart interval including its marker, in scan order."""


class GridJPEG(NamedTuple):
    """A JPEG with a grid, or the unchanged JPEG with a reason."""

    jpeg: bytes
    lengths: Lengths | None
    reason: str


def rewrite_with_grid(jpeg: bytes) -> GridJPEG:
    """Rewrite a JPEG with a grid and exactly the same pixels.

    Releases the GIL. Raises `MissingExtraError` without the native kernels.
    """
    answer = _native().grid_rewrite(jpeg)
    if isinstance(answer, str):
        return GridJPEG(jpeg, None, answer)
    return GridJPEG(answer[0], np.frombuffer(answer[1], np.uint16), "")


def check_native() -> None:
    """Raise MissingExtraError if the native kernels, which `--grid` needs, were not built."""
    _native()


def _native() -> Any:
    if not hasattr(kernels.native, "grid_rewrite"):
        raise MissingExtraError(
            "--grid needs feedline's native image kernels, which were not built: install a C++ compiler and the headers"
            " of libjpeg-turbo (Debian: libjpeg62-turbo-dev), then run: pip install --force-reinstall feedline"
        )
    return kernels.native


_DEFAULT_QUALITY = 90


_DEEP_MODES = ("I", "F")
"""First letters of Pillow's modes with more than 8 bits; its conversion to 8 bits clips them."""


_SAVED_MODES = {"JPEG": ("L", "RGB"), "PNG": ("L", "LA", "RGB", "RGBA")}


class EncodedImage(NamedTuple):
    """An image as a member: field, contents, lengths of its grid.

    `reason` says why there is no grid although the options ask for one.
    """

    field: str
    data: bytes
    lengths: Lengths | None = None
    reason: str = ""


def encode_image(data: bytes, field: str, options: PackOptions) -> EncodedImage:
    """Encode an image as the options say.

    Of an unchanged image, only the header is checked. A resized JPEG or PNG keeps its format; other formats become PNG.
    The quality of a JPEG is 90, unless the options name one. Orientation and color profile are kept. With `decoded`,
    the result is a `.npy` file of upright pixels. Raises `ImageError` or `OSError` if the image cannot be read, and
    `ValueError` if its values have more than 8 bits and the options change pixels.
    """
    header = images.probe(data)
    smaller = _smaller_size(header.width, header.height, options.shorter_side)
    if header.format != "JPEG" and (options.decoded or options.quality is not None or smaller is not None):
        _check_depth(data)
    if options.decoded:
        smaller = smaller and (smaller if header.orientation < 5 else smaller[::-1])
        return EncodedImage(_with_extension(field, "npy"), _npy(_upright_pixels(data, smaller)))
    if options.quality is not None or smaller is not None:
        format_ = "JPEG" if options.quality is not None or header.format == "JPEG" else "PNG"
        data = _reencode(data, format_, smaller, options.quality or _DEFAULT_QUALITY, header.orientation)
        field = _with_extension(field, "jpg" if format_ == "JPEG" else "png")
    elif header.format != "JPEG":
        return EncodedImage(field, data, None, f"{header.format}, not JPEG" if options.grid else "")
    return EncodedImage(field, *rewrite_with_grid(data)) if options.grid else EncodedImage(field, data)


def _smaller_size(width: int, height: int, shorter_side: int | None) -> tuple[int, int] | None:
    """Width and height after shrinking; None for a small image.

    They are rounded as in torchvision.
    """
    if shorter_side is None or min(width, height) <= shorter_side:
        return None
    if width <= height:
        return shorter_side, int(shorter_side * height / width)
    return int(shorter_side * width / height), shorter_side


def _with_extension(field: str, extension: str) -> str:
    name, dot, _ = field.rpartition(".")
    return f"{name}{dot}{extension}"


def _check_depth(data: bytes) -> None:
    with Image.open(io.BytesIO(data)) as image:
        if image.mode.startswith(_DEEP_MODES):
            raise ValueError(
                f"its values have more than 8 bits (mode {image.mode}), and --shorter-side, --quality and --decoded"
                " would clip them; --field names other images to change"
            )


def _upright_pixels(data: bytes, size: tuple[int, int] | None) -> NDArray[np.uint8]:
    pixels = images.decode(data, apply_exif_orientation=True)
    if size is None:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))


def _npy(pixels: NDArray[np.uint8]) -> bytes:
    """Contents of a `.npy` file."""
    # The header is padded so that the array begins at a multiple of 64 bytes. Tar blocks have 512 bytes, so the array
    # stays aligned in the shard, and readers use it where it is mapped.
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(pixels), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _reencode(data: bytes, format_: str, size: tuple[int, int] | None, quality: int, orientation: int) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        metadata = _image_metadata(image, orientation)
        plain = image if image.mode in _SAVED_MODES[format_] else image.convert(_saved_mode(image, format_))
        plain = plain if size is None else plain.resize(size, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        plain.save(file, format_, **({"quality": quality} if format_ == "JPEG" else {}), **metadata)
    return file.getvalue()


def _saved_mode(image: Image.Image, format_: str) -> str:
    transparent = image.mode in {"PA", "La", "RGBa"} or "transparency" in image.info
    return "RGBA" if format_ == "PNG" and transparent else "RGB"


def _image_metadata(image: Image.Image, orientation: int) -> dict[str, Any]:
    """Orientation and color profile, as arguments of `Image.save`."""
    # All other metadata is dropped: a thumbnail of the original, for one, would only cost space.
    metadata: dict[str, Any] = {}
    if orientation != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        metadata["exif"] = exif
    profile = image.info.get("icc_profile")
    # A CMYK image is stored as RGB, to which its profile does not apply.
    return metadata if not profile or image.mode == "CMYK" else {**metadata, "icc_profile": profile}


_REMEDY = "Replace or remove it, or pass --on-error skip to leave it out."


class TarEntry(NamedTuple):
    """A member of the tar, with the lengths of its grid."""

    name: str
    data: bytes
    lengths: Lengths | None = None


class EncodedSample(NamedTuple):
    """The members of a sample, or the error that prevents them.

    `without_grid` holds a reason for each image without a grid. `nbytes_read` are bytes of the sources.
    """

    members: tuple[TarEntry, ...]
    without_grid: tuple[str, ...] = ()
    error: SampleError | None = None
    nbytes_read: int = 0


def encode_sample(sample: Sample, options: PackOptions) -> EncodedSample:
    """Encode a sample; an unreadable part gives a result with `error`.

    Raises `ArgumentError` if the options do not name which of several images to change.
    """
    try:
        return _encode_sample(sample, options)
    except SampleError as error:
        return EncodedSample((), error=error)


def _encode_sample(sample: Sample, options: PackOptions) -> EncodedSample:
    fields = _fields_to_change(sample, options)
    members, without_grid = list[TarEntry](), list[str]()
    for part in sample.parts:
        data = _read(part)
        member = EncodedImage(part.field, data)
        if is_image(part.field):
            member = _encode_part(part, data, options if part.field in fields else PackOptions())
        members.append(TarEntry(f"{sample.key}.{member.field}", member.data, member.lengths))
        without_grid += [member.reason] if member.reason else []
    if sample.label is not None:
        members.append(TarEntry(f"{sample.key}.cls", b"%d" % sample.label))
    _check_unique_names(sample, members)
    return EncodedSample(tuple(members), tuple(without_grid), nbytes_read=sum(part.size for part in sample.parts))


def _fields_to_change(sample: Sample, options: PackOptions) -> Sequence[str]:
    """The image fields to change: those of the options, or all images."""
    # A grid leaves the pixels as they are, so all images get one unless fields are named.
    fields = [part.field for part in sample.parts if is_image(part.field)]
    if options.fields or not options.changes_pixels:
        return options.fields or fields
    if len(fields) > 1:
        raise ArgumentError(
            f"{sample.parts[0].name}: sample {sample.key!r} has {len(fields)} images ({', '.join(fields)}), and "
            f"changing a mask or a label map would spoil it. Name the images to change, such as --field {fields[0]}"
        )
    return fields


def _read(part: SamplePart) -> bytes:
    try:
        return part.read()
    except OSError as error:
        raise _pack_error(part, error.strerror or str(error)) from error


def _encode_part(part: SamplePart, data: bytes, options: PackOptions) -> EncodedImage:
    try:
        return encode_image(data, part.field, options)
    except images.ImageError as error:
        raise _pack_error(part, str(error).partition("could not be read: ")[2].removesuffix(f". {REMEDY}")) from error
    # Pillow raises all of these for damaged files.
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise _pack_error(part, str(error)) from error


def _pack_error(part: SamplePart, reason: str) -> SampleError:
    return SampleError(f"{part.name} could not be packed: {reason}. {_REMEDY}")


def _check_unique_names(sample: Sample, members: Sequence[TarEntry]) -> None:
    names = [member.name for member in members]
    for name in names:
        if names.count(name) > 1:
            raise SampleError(
                f"{sample.parts[0].name}: two parts of sample {sample.key!r} would both be {name!r}. Name fewer "
                f"images with --field, or pass --on-error skip"
            )
