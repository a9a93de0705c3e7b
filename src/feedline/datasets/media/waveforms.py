"""`Waveforms`: ranges of audio files as float32 tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core import optional
from feedline.core.dataset import Traits, Transform, digest_of
from feedline.core.paths import Pathlike
from feedline.core.rng import Draws, derive, sample_rng
from feedline.core.shard_offsets import ShardOffsets
from feedline.core.tensors import as_indices, one_within, within
from feedline.datasets.decoding import SampleTransform
from feedline.datasets.media.audio import WHAT, AudioInfo, AudioReader, resampled, soundfile, with_channels
from feedline.datasets.media.files import KnownFiles, MediaFiles, Piece
from feedline.datasets.media.opened import Decoders
from feedline.errors import ArgumentError, MissingExtraError, SampleError, note
from feedline.stores import Cache

AUDIO_EXTENSIONS = (".wav", ".flac", ".ogg", ".oga", ".opus", ".mp3", ".aiff", ".aif", ".au", ".caf", ".w64")
"""Extensions of audio files in folders, in lower case; the format is detected by content."""


_PLACES = ("random", "regular", "sliding", "whole")


class _Range(NamedTuple):
    """Samples of a file, at its own rate."""

    piece: Piece
    info: AudioInfo
    start: int
    stop: int


class Waveforms(torch.utils.data.Dataset[dict[str, Any]]):
    """Ranges of audio files, as dicts of "waveform", "seconds" and "label".

    "waveform" is float32, (channels, samples), in [-1, 1]; "seconds" a float, the time of its beginning in the file;
    "label" an int, absent without labels. `paths`, `manifest`, `index_dir`, `cache` and `options` are those of `Clips`.

    Only the range is read: `seconds` seconds, which `sampling` places. "random" is anywhere; "regular" in the middle,
    or `clips_per_file` ranges from the beginning to the end at equal distances; "sliding" at the beginning and every
    `step` seconds after it, by default one behind the other; "whole" is the file, with `seconds=None`. A shorter file
    is padded with zeros at its end; with `pad=False` it is a SampleError.

    `rate` resamples the range to that many samples a second, by soxr; `seconds * rate` samples are exact. Without it,
    files keep their rates, and ranges their own numbers of samples. `channels=1` mixes channels to one, another number
    repeats a single one, None keeps them. With `mel`, the arguments of torchaudio's `MelSpectrogram`, "waveform" is
    replaced by "mel", float32 (channels, mels, frames); it needs `rate`. `transform(waveform)` or `transform(waveform,
    rng)` is applied before it.

    The rate and length of each file are read once, and kept as `Clips` keeps its index. A process keeps at most
    `open_files` files open. SampleError names a file that cannot be read, and what to do. In Ogg Vorbis, all before a
    range is decoded: libsndfile's seek is not exact there.
    """

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
        transform: Transform | None = None,
        open_files: int = 16,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        soundfile()  # before the files are searched
        self._sampling = sampling or ("whole" if seconds is None else "random")
        self._seconds, self._count, self._step, self._pad = seconds, clips_per_file, step, pad
        self.rate, self._channels = rate, channels
        self._check()
        self._mel = None if mel is None else _mel_of(mel, rate)
        self._media = MediaFiles(paths, manifest, AUDIO_EXTENSIONS, cache, options)
        self._known = KnownFiles(self._media, "audio-files", index_dir, self._scan, AudioInfo.parse)
        self.paths = self._media.files.names
        """The path or address of each file."""
        self.classes = self._media.classes
        """Names of the labels; empty if labels are numbers, or absent."""
        self._ranges = ShardOffsets(self._counts())
        self._readers: Decoders[AudioReader] = Decoders(self._open, open_files)
        self._transform = SampleTransform(transform)

    def _check(self) -> None:
        if self._sampling not in _PLACES:
            raise ArgumentError(f"sampling={self._sampling!r} is none of {', '.join(map(repr, _PLACES))}")
        if (self._seconds is None) != (self._sampling == "whole"):
            raise ArgumentError("seconds=None goes with sampling='whole', which reads whole files")
        for name, value in [("seconds", self._seconds), ("step", self._step), ("rate", self.rate)]:
            if value is not None and not value > 0:
                raise ArgumentError(f"{name}={value!r} must be positive")
        if self._step is not None and self._sampling != "sliding":
            raise ArgumentError("step= goes with sampling='sliding'")
        if self._count < 1 or (self._channels is not None and self._channels < 1):
            raise ArgumentError("clips_per_file= and channels= must be at least 1")
        if self._count != 1 and self._sampling not in ("random", "regular"):
            raise ArgumentError(f"the length of a file decides about its ranges with sampling={self._sampling!r}")

    def __len__(self) -> int:
        return len(self._ranges)

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """Ranges per file, or per row of the manifest, for `samplers.ShardShuffled`."""
        return self._ranges.sizes

    @property
    def targets(self) -> list[int | None]:
        """The label of each range."""
        labels = [piece.label for piece in self._media.pieces]
        return [label for label, count in zip(labels, self._ranges.sizes.tolist(), strict=True) for _ in range(count)]

    @property
    def listing_fingerprint(self) -> str:
        """Digest of file names and range counts, checked by loader states."""
        return digest_of(self.paths, [*self._ranges.sizes.tolist(), *(piece.file for piece in self._media.pieces)])

    def address(self, index: int) -> tuple[str, str]:
        """The file of a range, and its number in that file."""
        row, clip = self._ranges.one(one_within(index, len(self), "Waveforms"))
        return self.paths[self._media.pieces[row].file], f"range {clip}"

    @property
    def traits(self) -> Traits:
        return Traits(
            thread_safe=True,
            is_random=self._sampling == "random" or self._transform.transform is not None,
            reads_batches=False,
        )

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Range `index`; negative indices count from the end."""
        return self._sample(one_within(index, len(self), "Waveforms"), None)

    def __getitems__(self, indices: Sequence[int]) -> list[dict[str, Any]]:
        """The ranges of these indices."""
        if type(self).__getitem__ is not Waveforms.__getitem__:  # a subclass overrides it
            return [self[index] for index in indices]
        places = within(as_indices(indices), len(self), "Waveforms")
        return [self._sample(at, row) for row, at in enumerate(places.tolist())]

    def _sample(self, at: int, row: int | None) -> dict[str, Any]:
        draws = self._sampling == "random" or self._transform.wants_rng
        rng = sample_rng(row) if draws else None
        number, clip = self._ranges.one(at)
        # A key of its own: what a transform draws must not depend on where the range is.
        chosen = self._choose(self._media.pieces[number], clip, Draws(derive(0 if rng is None else rng.key, "clip")))
        waveform: Any = self._transform.apply(self._waveform(chosen), rng)
        sample = {"waveform": waveform} if self._mel is None else {"mel": self._mel(waveform)}
        sample["seconds"] = chosen.start / chosen.info.rate
        if chosen.piece.label is not None:
            sample["label"] = chosen.piece.label
        return sample

    def _choose(self, piece: Piece, clip: int, draws: Draws) -> _Range:
        """The range of a file that sample `clip` of it has."""
        info: AudioInfo = self._known[piece.file]
        first, last = self._limits(piece, info)
        length = last - first if self._seconds is None else round(self._seconds * info.rate)
        start, spare = first, last - first - length
        if spare < 0 and not self._pad:
            raise SampleError(
                f"{self.paths[piece.file]} has {(last - first) / info.rate:.3f} s, and {self._seconds:g} s are asked "
                "for: pass pad=True, smaller seconds=, or on_error='skip' to the loader"
            )
        if spare > 0:
            start += self._offset(spare, clip, draws, info.rate)
        return _Range(piece, info, start, min(start + length, last))

    def _offset(self, spare: int, clip: int, draws: Draws, rate: int) -> int:
        if self._sampling == "random":
            return draws.below(spare + 1)
        if self._sampling == "sliding":
            return min(round(clip * self._distance * rate), spare)
        return int(spare * (0.5 if self._count == 1 else clip / (self._count - 1)))

    @property
    def _distance(self) -> float:
        assert self._seconds is not None
        return self._seconds if self._step is None else self._step

    def _limits(self, piece: Piece, info: AudioInfo) -> tuple[int, int]:
        """First and last sample that ranges of a piece may have."""
        first = 0 if piece.start is None else round(piece.start * info.rate)
        last = info.length if piece.stop is None else min(round(piece.stop * info.rate), info.length)
        if first >= last:
            raise SampleError(
                f"{self.paths[piece.file]} has no sample between {piece.start or 0:g} s and its end at "
                f"{info.length / info.rate:.3f} s: correct the manifest, or pass on_error='skip' to the loader"
            )
        return first, last

    def _waveform(self, chosen: _Range) -> torch.Tensor:
        piece, info, start, stop = chosen
        name = self.paths[piece.file]
        with self._naming(name), self._readers.use(piece.file) as reader:
            samples = reader.read(start, stop)
        samples = with_channels(samples, self._channels, name)
        rate = self.rate or info.rate
        samples = resampled(samples, info.rate, rate)
        wanted = samples.shape[1] if self._seconds is None else round(self._seconds * rate)
        whole = np.zeros((len(samples), wanted), np.float32)
        have = min(wanted, samples.shape[1])
        whole[:, :have] = samples[:, :have]
        return torch.from_numpy(whole)

    def _counts(self) -> list[int]:
        """Ranges of each piece; 1 for a damaged file."""
        entries = self._known.collect()
        if self._sampling != "sliding":
            return [self._count] * len(self._media.pieces)
        counts = []
        for piece in self._media.pieces:
            try:
                info: AudioInfo = self._known.parsed(entries[piece.file])
                first, last = self._limits(piece, info)
            except SampleError:
                counts.append(1)
                continue
            spare = (last - first) / info.rate - (self._seconds or 0)
            counts.append(1 + max(0, int(spare / self._distance + 1e-9)))
        return counts

    def _scan(self, number: int) -> bytes:
        reader = self._open(number)
        try:
            return reader.info.pack()
        finally:
            reader.close()

    def _open(self, number: int) -> AudioReader:
        return AudioReader(self._media.open(number), self._media.files.name(number))

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Add the file to errors that do not name it."""
        try:
            yield
        except FileNotFoundError as error:
            raise FileNotFoundError(
                f"{name} does not exist: it was moved or deleted; restore it, or pass on_error='skip' to the loader"
            ) from error
        except OSError as error:
            note(error, f"feedline: {name}")
            raise

    def __repr__(self) -> str:
        return f"<Waveforms: {len(self)} ranges of {len(self.paths)} files>"


def _mel_of(mel: Mapping[str, Any], rate: int | None) -> Any:
    if rate is None:
        raise ArgumentError("mel= needs rate=: all files must have the rate of the filters")
    try:
        transforms = optional.load("torchaudio.transforms", "audio", f"{WHAT} with mel=")
    except MissingExtraError as error:
        # No extra may pull it in: its wheels belong to builds of torch.
        raise MissingExtraError(
            f"{WHAT} with mel= needs torchaudio of the version of your torch: pip install torchaudio ({error})"
        ) from None
    return transforms.MelSpectrogram(sample_rate=rate, **mel)
