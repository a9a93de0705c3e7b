"""The members of one sample, made from its parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from PIL.Image import DecompressionBombError

from feedline.errors import ArgumentError, SampleError
from feedline.images import ImageError
from feedline.images.problems import REMEDY
from feedline.packing.grids import Lengths
from feedline.packing.options import Options
from feedline.packing.pictures import Picture, changed
from feedline.packing.samples import Part, Sample
from feedline.shards import is_image

_REMEDY = "Replace or remove it, or pass --on-error skip to leave it out."


class Member(NamedTuple):
    """A file of the tar to be."""

    name: str
    data: bytes
    lengths: Lengths | None = None


class Contents(NamedTuple):
    """The members of a sample, or why there are none; `plain` are the reasons of pictures that got no grid."""

    members: tuple[Member, ...]
    plain: tuple[str, ...] = ()
    error: SampleError | None = None
    nbytes_read: int = 0


def made(sample: Sample, options: Options) -> Contents:
    """The members of a sample; a part that cannot be read or decoded is told as an error, not raised."""
    try:
        return _made(sample, options)
    except SampleError as error:
        return Contents((), error=error)


def _made(sample: Sample, options: Options) -> Contents:
    chosen = _chosen(sample, options)
    members, plain = list[Member](), list[str]()
    for part in sample.parts:
        data = _read(part)
        picture = Picture(part.field, data)
        if is_image(part.field):
            picture = _changed(part, data, options if part.field in chosen else Options())
        members.append(Member(f"{sample.key}.{picture.field}", picture.data, picture.lengths))
        plain += [picture.reason] if picture.reason else []
    if sample.label is not None:
        members.append(Member(f"{sample.key}.cls", b"%d" % sample.label))
    _refuse_doubles(sample, members)
    return Contents(tuple(members), tuple(plain), nbytes_read=sum(part.size for part in sample.parts))


def _chosen(sample: Sample, options: Options) -> Sequence[str]:
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


def _read(part: Part) -> bytes:
    try:
        return part.read()
    except OSError as error:
        raise _bad(part, error.strerror or str(error)) from error


def _changed(part: Part, data: bytes, options: Options) -> Picture:
    try:
        return changed(data, part.field, options)
    except ImageError as error:
        raise _bad(part, str(error).partition("could not be read: ")[2].removesuffix(f". {REMEDY}")) from error
    except (OSError, ValueError, SyntaxError, DecompressionBombError) as error:  # what Pillow raises for bad files
        raise _bad(part, str(error)) from error


def _bad(part: Part, reason: str) -> SampleError:
    return SampleError(f"{part.name} could not be packed: {reason}. {_REMEDY}")


def _refuse_doubles(sample: Sample, members: Sequence[Member]) -> None:
    names = [member.name for member in members]
    for name in names:
        if names.count(name) > 1:
            raise SampleError(
                f"{sample.parts[0].name}: two parts of sample {sample.key!r} would both be {name!r}. Name fewer "
                f"pictures with --field, or pass --on-error skip"
            )
