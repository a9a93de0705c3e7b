"""The members of one sample, made from its parts.

One picture, changed as the options say.

JPEGs with restart markers on a grid: rewriting without loss, and finding the lengths again.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.Image import DecompressionBombError

from feedline import images
from feedline.cli.pack.options import PackOptions
from feedline.cli.pack.sources import MemberSource, Sample
from feedline.core import kernels
from feedline.datasets.webdataset import is_image
from feedline.errors import ArgumentError, MissingExtraError, SampleError
from feedline.images import ImageError
from feedline.images.errors import REMEDY

Lengths = NDArray[np.uint16]
"""Bytes of each restart interval, its marker included, in scan order."""


class Rewritten(NamedTuple):
    """A JPEG with a grid and the lengths of its intervals; or as it was, without lengths, and the reason."""

    jpeg: bytes
    lengths: Lengths | None
    reason: str


def rewritten(jpeg: bytes) -> Rewritten:
    """The JPEG with a grid, the same pixels bit for bit. Holds no lock of the interpreter."""
    answer = _native().grid_rewrite(jpeg)
    if isinstance(answer, str):
        return Rewritten(jpeg, None, answer)
    return Rewritten(answer[0], np.frombuffer(answer[1], np.uint16), "")


def measured(jpeg: memoryview) -> Lengths | None:
    """The lengths of a JPEG's intervals, found by reading all of it; None for one without a grid."""
    if not hasattr(kernels.native, "grid_measure"):
        return None
    lengths = _native().grid_measure(jpeg)
    return None if lengths is None else np.frombuffer(lengths, np.uint16)


def require() -> None:
    """MissingExtraError where the native kernels, which alone can rewrite, are not there."""
    _native()


def _native() -> Any:
    if not hasattr(kernels.native, "grid_rewrite"):
        raise MissingExtraError(
            "--grid needs feedline's native image kernels, which were not built: install a C++ compiler and the headers"
            " of libjpeg-turbo (Debian: libjpeg62-turbo-dev), then: pip install --force-reinstall feedline"
        )
    return kernels.native


_DEFAULT_QUALITY = 90


_PILLOWS_MODES = {"JPEG": ("L", "RGB"), "PNG": ("L", "LA", "RGB", "RGBA")}


class EncodedImage(NamedTuple):
    """The contents of a member that is a picture: field, bytes, grid, and why it has none where one was wanted."""

    field: str
    data: bytes
    lengths: Lengths | None = None
    reason: str = ""


def changed(data: bytes, field: str, options: PackOptions) -> EncodedImage:
    """The picture as the shard will hold it. ImageError or OSError where it cannot be read.

    What stays as it is has its header checked only. Resized pictures keep their format if it is JPEG (at quality 90
    unless the options name one) or PNG, and become PNG otherwise; orientation and color profile stay.
    """
    header = images.probe(data)
    shrunk = _shrunk(header.width, header.height, options.shorter_side)
    if options.decoded:
        return EncodedImage(_renamed(field, "npy"), _npy(_pixels(data, shrunk)))
    if options.quality is not None or shrunk is not None:
        wanted = "JPEG" if options.quality is not None or header.format == "JPEG" else "PNG"
        data = _encoded(data, wanted, shrunk, options.quality or _DEFAULT_QUALITY, header.orientation)
        field = _renamed(field, "jpg" if wanted == "JPEG" else "png")
    elif header.format != "JPEG":
        return EncodedImage(field, data, None, f"{header.format}, not JPEG" if options.grid else "")
    return EncodedImage(field, *rewritten(data)) if options.grid else EncodedImage(field, data)


def _shrunk(width: int, height: int, shorter_side: int | None) -> tuple[int, int] | None:
    """Width and height with the shorter side bounded, None where it is short enough; rounded as torchvision does."""
    if shorter_side is None or min(width, height) <= shorter_side:
        return None
    if width <= height:
        return shorter_side, int(shorter_side * height / width)
    return int(shorter_side * width / height), shorter_side


def _renamed(field: str, extension: str) -> str:
    name, dot, _ = field.rpartition(".")
    return f"{name}{dot}{extension}"


def _pixels(data: bytes, shrunk: tuple[int, int] | None) -> NDArray[np.uint8]:
    pixels = images.decode(data)
    if shrunk is None:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(shrunk, Image.Resampling.BICUBIC))


def _npy(pixels: NDArray[np.uint8]) -> bytes:
    """A `.npy` file; in a tar its numbers begin at a multiple of 64 bytes: they are used where they are mapped."""
    file = io.BytesIO()
    np.lib.format.write_array(file, np.ascontiguousarray(pixels), version=(1, 0), allow_pickle=False)
    return file.getvalue()


def _encoded(data: bytes, wanted: str, shrunk: tuple[int, int] | None, quality: int, orientation: int) -> bytes:
    with Image.open(io.BytesIO(data)) as image:
        kept = _kept(image, orientation)
        plain = image if image.mode in _PILLOWS_MODES[wanted] else image.convert(_mode(image, wanted))
        plain = plain if shrunk is None else plain.resize(shrunk, Image.Resampling.BICUBIC)
        file = io.BytesIO()
        plain.save(file, wanted, **({"quality": quality} if wanted == "JPEG" else {}), **kept)
    return file.getvalue()


def _mode(image: Image.Image, wanted: str) -> str:
    return "RGBA" if wanted == "PNG" and (image.mode in {"PA", "La", "RGBa"} or "transparency" in image.info) else "RGB"


def _kept(image: Image.Image, orientation: int) -> dict[str, Any]:
    """What a reader needs to show the pixels rightly; a thumbnail of the old picture would be dead weight."""
    kept: dict[str, Any] = {}
    if orientation != 1:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = orientation
        kept["exif"] = exif
    profile = image.info.get("icc_profile")
    return kept if not profile or image.mode == "CMYK" else {**kept, "icc_profile": profile}


_REMEDY = "Replace or remove it, or pass --on-error skip to leave it out."


class TarEntry(NamedTuple):
    """A file of the tar to be."""

    name: str
    data: bytes
    lengths: Lengths | None = None


class EncodedSample(NamedTuple):
    """The members of a sample, or why there are none; `plain` are the reasons of pictures that got no grid."""

    members: tuple[TarEntry, ...]
    plain: tuple[str, ...] = ()
    error: SampleError | None = None
    nbytes_read: int = 0


def made(sample: Sample, options: PackOptions) -> EncodedSample:
    """The members of a sample; a part that cannot be read or decoded is told as an error, not raised."""
    try:
        return _made(sample, options)
    except SampleError as error:
        return EncodedSample((), error=error)


def _made(sample: Sample, options: PackOptions) -> EncodedSample:
    chosen = _chosen(sample, options)
    members, plain = list[TarEntry](), list[str]()
    for part in sample.parts:
        data = _read(part)
        picture = EncodedImage(part.field, data)
        if is_image(part.field):
            picture = _changed(part, data, options if part.field in chosen else PackOptions())
        members.append(TarEntry(f"{sample.key}.{picture.field}", picture.data, picture.lengths))
        plain += [picture.reason] if picture.reason else []
    if sample.label is not None:
        members.append(TarEntry(f"{sample.key}.cls", b"%d" % sample.label))
    _refuse_doubles(sample, members)
    return EncodedSample(tuple(members), tuple(plain), nbytes_read=sum(part.size for part in sample.parts))


def _chosen(sample: Sample, options: PackOptions) -> Sequence[str]:
    """The fields to change: those named, or the only picture; a grid changes nothing, so all get one."""
    pictures = [part.field for part in sample.parts if is_image(part.field)]
    if options.fields or not options.changes_pixels:
        return options.fields or pictures
    if len(pictures) > 1:
        raise ArgumentError(
            f"{sample.parts[0].name}: sample {sample.key!r} has {len(pictures)} pictures ({', '.join(pictures)}), and "
            f"changing a mask or a label map would spoil it. Name those to change with --field, such as --field "
            f"{pictures[0]}"
        )
    return pictures


def _read(part: MemberSource) -> bytes:
    try:
        return part.read()
    except OSError as error:
        raise _bad(part, error.strerror or str(error)) from error


def _changed(part: MemberSource, data: bytes, options: PackOptions) -> EncodedImage:
    try:
        return changed(data, part.field, options)
    except ImageError as error:
        raise _bad(part, str(error).partition("could not be read: ")[2].removesuffix(f". {REMEDY}")) from error
    except (OSError, ValueError, SyntaxError, DecompressionBombError) as error:  # what Pillow raises for bad files
        raise _bad(part, str(error)) from error


def _bad(part: MemberSource, reason: str) -> SampleError:
    return SampleError(f"{part.name} could not be packed: {reason}. {_REMEDY}")


def _refuse_doubles(sample: Sample, members: Sequence[TarEntry]) -> None:
    names = [member.name for member in members]
    for name in names:
        if names.count(name) > 1:
            raise SampleError(
                f"{sample.parts[0].name}: two parts of sample {sample.key!r} would both be {name!r}. Name fewer "
                f"pictures with --field, or pass --on-error skip"
            )
