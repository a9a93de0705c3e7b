"""Ranges of audio files at any rate, with soundfile."""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

from feedline.core import optional
from feedline.datasets.media.audio_checks import check_whole, with_size
from feedline.datasets.media.files import MediaSource
from feedline.datasets.media.mpeg import LEAD, with_length
from feedline.errors import SampleError

WHAT = "datasets.Waveforms"


AudioArray = NDArray[np.float32]
"""Samples (channels, samples), in [-1, 1]."""


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """Rate, samples per channel, and channels of a file.

    `is_open`: its header leaves the size of the sound open.
    """

    rate: int
    length: int
    channels: int
    is_open: bool = False

    def pack(self) -> bytes:
        """The values as bytes."""
        return np.array([self.rate, self.length, self.channels, self.is_open], "<i8").tobytes()

    @classmethod
    def parse(cls, packed: bytes) -> AudioInfo:
        """The values that `pack` wrote."""
        rate, length, channels, is_open = np.frombuffer(packed, "<i8").tolist()
        return cls(rate, length, channels, bool(is_open))


def soundfile() -> Any:
    """The module `soundfile`; MissingExtraError without it."""
    return optional.load("soundfile", "audio", WHAT)


def libsndfile_version() -> str:
    """Versions of soundfile and libsndfile."""
    return f"{soundfile().__version__} {soundfile().__libsndfile_version__}"


class _QuietFile:
    """A file object for libsndfile, whose callbacks cannot raise.

    It stores an error, and appears to end at this point.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.seek, self.tell = file.seek, file.tell
        self._failure: Exception | None = None

    def read(self, size: int) -> bytes:
        try:
            return bytes(self._file.read(size))
        except Exception as error:  # noqa: BLE001 - `check` raises it
            self._failure = error
            return b""

    def check(self) -> None:
        """Raise the error of a read, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


@contextmanager
def _damage(name: str, file: _QuietFile | None) -> Iterator[None]:
    """Turn errors of libsndfile into SampleErrors; raise errors of the file."""
    try:
        yield
        if file is not None:
            file.check()
    except soundfile().LibsndfileError as error:
        if file is not None:
            file.check()
        raise SampleError(
            f"{name} cannot be decoded ({error.error_string.rstrip('.')}): the file is damaged, or has a format that "
            f"libsndfile does not read; write it again (ffmpeg -i {name} out.flac), or pass on_error='skip' to the "
            "loader"
        ) from error


class AudioReader:
    """Reads ranges of one audio file; for one thread at a time.

    `known` is the description of the file, if there is one.
    """

    def __init__(self, source: MediaSource, name: str, known: AudioInfo | None = None) -> None:
        self._name = name
        if isinstance(source, str):
            _check_has_header(source, name)
        # libsndfile gives no reason why a file cannot be opened.
        with open(source, "rb") if isinstance(source, str) else nullcontext(source) as file:
            is_open = check_whole(cast("BinaryIO", file), name) if known is None else known.is_open
        self._given: MediaSource | BinaryIO = source
        self._source = None if isinstance(source, str) else _QuietFile(source)
        self._completed: BinaryIO | None = None
        """The file with its length in the header."""
        if is_open:
            self._complete(with_size(self._bytes()))
        self._file = self._open()
        counted = self._with_length(known)
        if counted is not None:
            self._file.close()
            self._complete(counted)
            self._file = self._open()
        self._lead = 0 if counted is None else LEAD
        length = self._file.frames - self._lead
        self.info = AudioInfo(self._file.samplerate, length, self._file.channels, is_open)
        if self.info.length > _MOST_SAMPLES:  # libsndfile cannot seek to the end of such a file
            self.close()
            raise SampleError(
                f"{name} does not state its length, as FLAC written into a pipe: write it again (ffmpeg -i {name}"
                " out.flac), or pass on_error='skip' to the loader"
            )
        # In Vorbis, libsndfile's seek may end at another sample.
        self._seeks = self._file.subtype != "VORBIS"
        self._is_mpeg = self._file.subtype.startswith("MPEG_LAYER")

    def _open(self) -> Any:
        if isinstance(self._given, str):
            opened: Any = _name_of(self._given)
        else:
            self._given.seek(0)
            opened = self._source
        with _damage(self._name, self._source):
            return soundfile().SoundFile(opened)

    def _with_length(self, known: AudioInfo | None) -> BinaryIO | None:
        """The file with its length, if libsndfile only estimates it."""
        if self._file.format != "MP3" or self._file.subtype != "MPEG_LAYER_III":
            return None
        return with_length(self._bytes(), None if known is None else known.length)

    def _bytes(self) -> BinaryIO:
        """The file, for functions that read any part of it."""
        return cast("BinaryIO", _mapped(self._given) if isinstance(self._given, str) else self._given)

    def _complete(self, file: BinaryIO) -> None:
        self._completed = self._given = file
        self._source = _QuietFile(file)

    def close(self) -> None:
        self._file.close()
        if self._completed is not None:
            self._completed.close()

    def read(self, start: int, stop: int) -> AudioArray:
        """The samples `[start, stop)`; SampleError if the file ends earlier."""
        with _damage(self._name, self._source):
            lead = self._seek_before(start)
            samples: AudioArray = self._file.read(stop - start + lead, dtype="float32", always_2d=True).T[:, lead:]
        if samples.shape[1] != stop - start:
            end = start + samples.shape[1]
            raise SampleError(
                f"{self._name} ends at sample {end} ({end / self.info.rate:.3f} s), but its header declares "
                f"{self.info.length}: replace it, or pass on_error='skip' to the loader"
            )
        return samples

    def _seek_before(self, start: int) -> int:
        """Seek to a sample, or the returned number of samples before it."""
        if self._is_mpeg:
            return self._reopen_before(start)
        at = self._file.tell()
        if at == start:
            return 0
        if self._seeks:
            self._file.seek(start)
            return 0
        if start < at:
            self._file.seek(0)
            at = 0
        while at < start:
            passed = len(self._file.read(min(start - at, _PASSED_AT_ONCE), dtype="float32", always_2d=True))
            if not passed:
                break
            at += passed
        return 0

    def _reopen_before(self, start: int) -> int:
        """Reopen an MPEG file some samples before `start`; returns their number.

        After a seek, frames lack their bits in earlier frames, and the filters still have the values of an earlier
        read, on which the samples would depend. `SoundFile.read` ends with a seek, so the samples before `start` are
        read with the range.
        """
        self._file.close()
        self._file = self._open()
        place = max(0, start - _MPEG_LEAD) // _MPEG_PERIOD * _MPEG_PERIOD
        self._file.seek(place + self._lead if place else 0)
        return start - place if place else start + self._lead


def _check_has_header(path: str, name: str) -> None:
    """Raise SampleError for bare samples, which soundfile recognizes by their ending."""
    if path.lower().endswith(".raw"):
        raise SampleError(
            f"{name} has samples without a header: write it with one (ffmpeg -f s16le -ar RATE -ac CHANNELS -i {name}"
            " out.flac), or pass on_error='skip' to the loader"
        )


def _mapped(path: str) -> mmap.mmap:
    with open(path, "rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def _name_of(path: str) -> str | bytes:
    """A path for soundfile: bytes where names may be any bytes."""
    return path if sys.platform == "win32" else os.fsencode(path)


_PASSED_AT_ONCE = 1 << 18


_MOST_SAMPLES = 1 << 48
"""libsndfile's length of a file that states none is larger."""


_MPEG_PERIOD = 4608
"""Number of samples after which the filter bank of an MPEG decoder adds in the same order again."""


_MPEG_LEAD = 3 * _MPEG_PERIOD
"""More samples than the bits and filters of a frame depend on."""


def with_channels(samples: AudioArray, channels: int | None, name: str) -> AudioArray:
    """Samples with that number of channels, mixed to one or repeated."""
    have = len(samples)
    if channels is None or have == channels:
        return samples
    if channels == 1:
        mixed: AudioArray = samples.mean(axis=0, dtype=np.float32, keepdims=True)
        return mixed
    if have == 1:
        return np.repeat(samples, channels, axis=0)
    raise SampleError(
        f"{name} has {have} channels, which cannot be converted to {channels}: pass channels=1 to mix them, or "
        "channels=None to keep them"
    )


def resampled(samples: AudioArray, rate: int, wanted: int) -> AudioArray:
    """Samples at another rate, converted by soxr."""
    if rate == wanted:
        return samples
    soxr = optional.load("soxr", "audio", f"{WHAT} with rate=")
    out: AudioArray = soxr.resample(np.ascontiguousarray(samples.T), rate, wanted).T
    return out
