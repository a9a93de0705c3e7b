"""`Waveforms`: ranges of audio files as float32 tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.arguments import check_one_of
from feedline.core.dataset import Traits, TransformFunction
from feedline.core.paths import Pathlike
from feedline.core.rng import Draws, derive, sample_rng
from feedline.core.stage_parts import DECODING
from feedline.datasets.media.audio import (
    WHAT,
    AudioInfo,
    AudioReader,
    libsndfile_version,
    resampled,
    soundfile,
    with_channels,
)
from feedline.datasets.media.base import MediaClips, sampling_of
from feedline.datasets.media.files import MediaFiles, Piece
from feedline.errors import ArgumentError, MissingExtraError, SampleError
from feedline.stores import Cache

AUDIO_EXTENSIONS = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".au", ".caf", ".w64")
"""Extensions of audio files in folders, in lower case; the format is detected by content."""


_PLACES = ("random", "regular", "sliding", "whole")


class _AudioRange(NamedTuple):
    """Samples of a file, at its own rate."""

    piece: Piece
    info: AudioInfo
    start: int
    stop: int


class Waveforms(MediaClips[AudioReader]):
    """Ranges of audio files, as dicts of "waveform", "seconds" and "label".

    "waveform" is float32, (channels, samples), in [-1, 1]; "seconds" a float, the time of its beginning in the file;
    "label" an int, absent without labels. `paths`, `manifest`, `index_dir`, `cache` and `options` are those of `Clips`.

    Only the range is read: `seconds` seconds, which `sampling` places. "random" is anywhere; "regular" in the middle,
    or `clips_per_file` ranges from the beginning to the end at equal distances; "sliding" at the beginning and every
    `step` seconds after it, by default one after the other; "whole" is the file, with `seconds=None`. A shorter file
    is padded with zeros at its end; with `pad=False` it is a SampleError.

    `rate` resamples the range to that many samples a second, by soxr; `seconds * rate` samples are exact. Without it,
    files keep their rates, and ranges their own numbers of samples. `channels=1` mixes channels to one, another number
    repeats a single one, None keeps them. With `mel`, the arguments of torchaudio's `MelSpectrogram`, "waveform" is
    replaced by "mel", float32 (channels, mels, frames); it needs `rate`. `transform(waveform)` or `transform(waveform,
    rng)` is applied before it.

    The rate and length of each file are read once, and kept as `Clips` keeps its index. A process keeps at most
    `open_files` files open. SampleError names a file that cannot be read, that is truncated, or that
    consists of several files, and the remedy. In Ogg Vorbis, all samples
    before a range are decoded, because libsndfile's seek is not exact there.
    """

    _clip = "range"

    def __init__(
        self,
        paths: Pathlike | Sequence[Pathlike],
        *,
        seconds: float | None = None,
        sampling: str | None = None,
        clips_per_file: int = 1,
        step: float | None = None,
        pad: bool = True,
        rate: int | None = None,
        channels: int | None = 1,
        mel: Mapping[str, Any] | None = None,
        manifest: Iterable[Mapping[str, Any]] | None = None,
        transform: TransformFunction | None = None,
        open_files: int = 16,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        soundfile()  # raises before the files are searched
        self._sampling = sampling_of(sampling, seconds)
        self._seconds, self._clips_per_file, self._spacing, self._pad = seconds, clips_per_file, step, pad
        self.rate, self._channels = rate, channels
        self._check()
        self._mel = None if mel is None else _mel_of(mel, rate)
        media = MediaFiles(paths, manifest, AUDIO_EXTENSIONS, cache, options, index_dir)
        super().__init__(media, "audio-files", libsndfile_version(), AudioInfo.parse, index_dir, open_files, transform)

    def _check(self) -> None:
        check_one_of("sampling", self._sampling, _PLACES)
        if (self._seconds is None) != (self._sampling == "whole"):
            raise ArgumentError("seconds=None and sampling='whole' belong together: pass both or neither")
        for name, value in [("seconds", self._seconds), ("step", self._spacing), ("rate", self.rate)]:
            if value is not None and not 0 < value < np.inf:
                raise ArgumentError(f"{name}={value!r} must be positive and finite")
        if self._spacing is not None and self._sampling != "sliding":
            raise ArgumentError("step= is only for sampling='sliding'")
        for name, count in (("clips_per_file", self._clips_per_file), ("channels", self._channels)):
            if count is not None and count < 1:
                raise ArgumentError(f"{name}={count!r} must be at least 1")
        if self._clips_per_file != 1 and self._sampling not in ("random", "regular"):
            raise ArgumentError(
                f"with sampling={self._sampling!r}, the length of a file determines its ranges: omit clips_per_file="
            )

    @property
    def traits(self) -> Traits:
        return Traits(
            thread_safe=True,
            is_random=self._sampling == "random" or self._step.transform is not None,
            reads_batches=False,
        )

    def _read_samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[dict[str, Any]]:
        return [self._sample(at, row) for at, row in zip(places.tolist(), rows, strict=True)]

    def _sample(self, at: int, row: int | None) -> dict[str, Any]:
        draws = self._sampling == "random" or self._step.takes_rng
        rng = sample_rng(row) if draws else None
        number, clip = self._offsets.one(at)
        # A separate key: the draws of a transform must not depend on the place of the range.
        chosen = self._choose(self._media.pieces[number], clip, Draws(derive(0 if rng is None else rng.key, "clip")))
        waveform: Any = self._step.apply(self._waveform(chosen), rng)
        sample = {"waveform": waveform} if self._mel is None else {"mel": self._mel(waveform)}
        sample["seconds"] = chosen.start / chosen.info.rate
        if chosen.piece.label is not None:
            sample["label"] = chosen.piece.label
        return sample

    def _choose(self, piece: Piece, clip: int, draws: Draws) -> _AudioRange:
        """The range of a file for sample `clip` of the file."""
        info: AudioInfo = self._known[piece.file]
        first, last = self._limits(piece, info)
        length = last - first if self._seconds is None else round(self._seconds * info.rate)
        start, spare = first, last - first - length
        if spare < 0 and not self._pad:
            raise SampleError(
                f"{self.paths[piece.file]} has {(last - first) / info.rate:.3f} s, but {self._seconds:g} s are "
                "requested: pass pad=True, smaller seconds=, or on_error='skip' to the loader"
            )
        if spare > 0:
            start += self._offset(spare, clip, draws, info.rate)
        return _AudioRange(piece, info, start, min(start + length, last))

    def _offset(self, spare: int, clip: int, draws: Draws, rate: int) -> int:
        if self._sampling == "random":
            return draws.below(spare + 1)
        if self._sampling == "sliding":
            return min(round(clip * self._distance * rate), spare)
        return int(spare * (0.5 if self._clips_per_file == 1 else clip / (self._clips_per_file - 1)))

    @property
    def _distance(self) -> float:
        assert self._seconds is not None
        return self._seconds if self._spacing is None else self._spacing

    def _limits(self, piece: Piece, info: AudioInfo) -> tuple[int, int]:
        """First and last sample that ranges of a piece may have."""
        if not info.length:
            raise SampleError(
                f"{self.paths[piece.file]} has no samples: its header declares none; write it again, or pass"
                " on_error='skip' to the loader"
            )
        first = 0 if piece.start is None else round(piece.start * info.rate)
        last = info.length if piece.stop is None else min(round(piece.stop * info.rate), info.length)
        if first >= last:
            raise SampleError(
                f"{self.paths[piece.file]} has no sample between {piece.start or 0:g} s and its end at "
                f"{info.length / info.rate:.3f} s: correct the manifest, or pass on_error='skip' to the loader"
            )
        return first, last

    def _waveform(self, chosen: _AudioRange) -> torch.Tensor:
        piece, info, start, stop = chosen
        name = self.paths[piece.file]
        with self._naming(name), self._decoders.use(piece.file) as reader, DECODING:
            samples = reader.read(start, stop)
        samples = with_channels(samples, self._channels, name)
        rate = self.rate or info.rate
        samples = resampled(samples, info.rate, rate)
        wanted = samples.shape[1] if self._seconds is None else round(self._seconds * rate)
        whole = np.zeros((len(samples), wanted), np.float32)
        have = min(wanted, samples.shape[1])
        whole[:, :have] = samples[:, :have]
        return torch.from_numpy(whole)

    @property
    def _fixed_count(self) -> int | None:
        return None if self._sampling == "sliding" else self._clips_per_file

    def _count(self, piece: Piece, known: AudioInfo) -> int:
        first, last = self._limits(piece, known)
        spare = (last - first) / known.rate - (self._seconds or 0)
        return 1 + max(0, int(spare / self._distance + 1e-9))

    def _describe(self, number: int) -> bytes:
        reader = AudioReader(self._media.files.source(number), self._media.files.name(number))
        try:
            return reader.info.pack()
        finally:
            reader.close()

    def _open(self, number: int) -> AudioReader:
        return AudioReader(self._media.files.source(number), self._media.files.name(number), self._known[number])

    def __repr__(self) -> str:
        return f"<Waveforms: {len(self)} ranges of {len(self.paths)} files>"


def _mel_of(mel: Mapping[str, Any], rate: int | None) -> Any:
    if rate is None:
        raise ArgumentError("mel= needs rate=: all files must have the rate of the filters")
    try:
        transforms = optional.load("torchaudio.transforms", "audio", f"{WHAT} with mel=")
    except MissingExtraError as error:
        # Not part of an extra, because its wheels belong to builds of torch.
        raise MissingExtraError(
            f"{WHAT} with mel= needs the torchaudio that matches your torch: pip install torchaudio ({error})"
        ) from None
    return transforms.MelSpectrogram(sample_rate=rate, **mel)
