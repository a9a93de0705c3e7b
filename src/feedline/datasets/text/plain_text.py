"""Text without random access: decompressed and converted once, into a cache."""

from __future__ import annotations

import codecs
import io
from functools import partial
from typing import Any

from feedline.core.paths import Pathlike
from feedline.datasets.inflated import (
    PART_NBYTES,
    ContentBlocks,
    Inflation,
    PlainFiles,
    converted,
    opener_of,
    plain_parts,
)
from feedline.datasets.text.line_index import encoding_name, has_plain_lines
from feedline.errors import SampleError
from feedline.stores import Cache
from feedline.stores.files import File, FileSet


def plain_text(
    files: FileSet, encoding: str, cache: Cache | Pathlike | None, special: str = ","
) -> tuple[FileSet, str]:
    """Files whose lines and `special` characters are single bytes, and encoding.

    Compressed files are decompressed into `cache`, or the user's cache, once for each of their versions. All files are
    also converted to UTF-8 there if the encoding does not write line ends and these characters as in ASCII.
    ArgumentError for an unknown encoding.
    """
    name = encoding_name(encoding)
    unlike = None if has_plain_lines(name, special) else name
    inflations = [_inflation(each, unlike) for each in files.names]
    if any(inflations):
        files = PlainFiles(files, inflations, cache)
    return files, "utf-8" if unlike else name


def _inflation(name: str, encoding: str | None) -> Inflation | None:
    opener = opener_of(name)
    if encoding is not None:
        return Inflation(f"from {encoding}", partial(converted, opener or _as_it_is, partial(_as_utf8, encoding)))
    return opener and Inflation("decompressed", partial(converted, opener, plain_parts))


def _as_it_is(file: io.BufferedReader) -> io.BufferedReader:
    return file


def _as_utf8(encoding: str, file: File, source: Any) -> ContentBlocks:
    decoder = codecs.getincrementaldecoder(encoding)()
    try:
        while data := source.read(PART_NBYTES):
            yield decoder.decode(bytes(data)).encode()
        yield decoder.decode(b"", True).encode()
    except UnicodeDecodeError as error:
        raise SampleError(f"{file.name} is not {encoding.upper()} ({error}); pass its encoding=") from error
