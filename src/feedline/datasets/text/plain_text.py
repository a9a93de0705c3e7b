"""Text without random access: decompressed and converted once, into a folder."""

from __future__ import annotations

import codecs
import io
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from feedline.core.paths import Pathlike
from feedline.datasets.inflated import (
    COPY_NBYTES,
    Inflation,
    PlainFiles,
    copy_content,
    opener_of,
)
from feedline.datasets.text.line_index import encoding_name, has_plain_lines
from feedline.errors import SampleError
from feedline.stores.files import Blob, FileSet


def plain_text(blobs: FileSet, encoding: str, folder: Pathlike | None, delimiter: str = ",") -> tuple[FileSet, str]:
    """Files whose lines can be found from single bytes, and their encoding.

    Compressed files are decompressed into `folder`, or the user's cache, once for each of their versions. All files are
    converted to UTF-8 there if lines of the encoding do not end as in ASCII. ArgumentError for an unknown encoding.
    """
    name = encoding_name(encoding)
    converted = None if has_plain_lines(name, delimiter) else name
    ways = [_way(each, converted) for each in blobs.names]
    if any(ways):
        blobs = PlainFiles(blobs, ways, folder)
    return blobs, "utf-8" if converted else name


def _way(name: str, encoding: str | None) -> Inflation | None:
    opener = opener_of(name)
    if opener is None and encoding is None:
        return None
    plain_name = Path(name).name if opener is None else Path(name).stem
    if encoding is None:
        return Inflation(opener or _as_it_is, plain_name, copy_content)
    return Inflation(opener or _as_it_is, f"{encoding}-{plain_name}", partial(_convert, encoding))


def _as_it_is(file: io.BufferedReader) -> io.BufferedReader:
    return file


def _convert(encoding: str, blob: Blob, source: Any, file: BinaryIO) -> None:
    """Write text as UTF-8."""
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while data := source.read(COPY_NBYTES):
            file.write(decoder.decode(bytes(data)).encode())
        file.write(decoder.decode(b"", True).encode())
    except UnicodeDecodeError as error:
        raise SampleError(f"{blob.name} is not {encoding.upper()} ({error}); pass its encoding=") from error
