"""`Clips`: clips of videos as uint8 tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from numpy.typing import NDArray

from feedline.core.dataset import BatchRead, Keys, Traits, TransformFunction, check_reads_batches
from feedline.core.paths import Pathlike
from feedline.core.rng import Draws, SampleRng, derive, sample_rng, torch_keys
from feedline.core.stage_parts import DECODING
from feedline.core.tensors import Allocator, allocate_tensor, normalize_indices, numpy_view
from feedline.datasets.decoding import ImageDecoder, naming_images
from feedline.datasets.media.base import MediaClips, sampling_of
from feedline.datasets.media.files import MediaFiles, Piece
from feedline.datasets.media.frame_table import FrameTable, ffmpeg_build, pyav, scan_frames
from feedline.datasets.media.sampling import ClipRule, FrameTimes, Short, TooShortError
from feedline.datasets.media.video import Frames, VideoReader
from feedline.errors import SampleError
from feedline.stores import Cache
from feedline.transforms import plan

VIDEO_EXTENSIONS = (".mp4", ".m4v", ".mkv", ".webm", ".mov", ".avi", ".ts", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv")
"""Extensions of video files in folders, in lower case; the format is detected by content."""


class _ChosenClip(NamedTuple):
    """The frame numbers of one clip, and its key."""

    piece: Piece
    table: FrameTable
    frames: NDArray[np.int64]
    key: int


class Clips(MediaClips[VideoReader]):
    """Clips of videos, as dicts of "frames", "seconds" and "label".

    "frames" is uint8, (frames, channels, height, width), in RGB and upright; "seconds" float64, (frames,), the time of
    each frame in its video; "label" an int, absent without labels.

    `paths` is a folder, a path, an address, a pattern, or a list of these. The folders in a single folder are classes:
    labels are the indices of their sorted names, `classes`. With a `manifest`, an iterable of mappings such as a `CSV`,
    `paths` is the folder of its "path"s; "label" is an int, or a string that becomes an index of `classes`; "start" and
    "stop" are seconds that limit the clips of a row. In tar shards, the members that are videos are read; `classes` are
    the names in the `classes.json` that `feedline pack` writes; without that file, labels are the numbers in the
    members "cls".

    A clip has `frames` frames: every `stride`-th of the video (by default each), or with `fps` those shown `1 / fps`
    seconds apart, exact for variable frame rates. `sampling` places it, by default "random", or "whole" without
    `frames`:

    - "random": anywhere, `clips_per_file` clips, drawn again in each epoch;
    - "regular": in the middle, or `clips_per_file` clips from the beginning to the end at equal distances;
    - "sliding": at the beginning and every `step` frames after it (seconds with `fps`), by default one after the other;
    - "uniform": one frame from the middle of each of `frames` equal parts of the video;
    - "segments": a random frame from each of these parts;
    - "whole": all frames at that stride or rate, with `frames=None`; `fl.collate.pad` makes batches of them.

    `short` is the rule for a video shorter than a clip: an "error", or frames that are completed by "repeat_last" or
    "wrap". A transform of `fl.transforms` is applied to each frame, with the same random numbers for all frames of a
    clip; in any `layout` of it, "frames" is as above. Another one gets the clip, `transform(frames)` or
    `transform(frames, rng)`.

    Each video is scanned once for the times of its frames and keyframes, which are kept in one file in `index_dir`, or
    in the user's cache folder. A process keeps at most `open_files` decoders, of one thread each. Objects are read by
    ranges, and kept in the folder `cache`, if one is given; `options` are passed to `open_store`. SampleError names
    file, frame and time if a frame cannot be decoded, needs a damaged one, or is cut off in a truncated file. Decoding
    is FFmpeg's, by PyAV.
    """

    def __init__(
        self,
        paths: Pathlike | Sequence[Pathlike],
        *,
        frames: int | None = 16,
        stride: int | None = None,
        fps: float | None = None,
        sampling: str | None = None,
        clips_per_file: int = 1,
        step: float | None = None,
        short: Short = "error",
        manifest: Iterable[Mapping[str, Any]] | None = None,
        transform: TransformFunction | None = None,
        open_files: int = 4,
        index_dir: Pathlike | None = None,
        cache: Cache | Pathlike | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        pyav()  # raises before the files are searched
        sampling = sampling_of(sampling, frames)
        self._rule = ClipRule(frames, 1 if stride is None else stride, fps, sampling, clips_per_file, step, short)
        media = MediaFiles(paths, manifest, VIDEO_EXTENSIONS, cache, options, index_dir)
        super().__init__(
            media, "video-frame-tables", ffmpeg_build(), FrameTable.parse, index_dir, open_files, transform
        )
        image_plan = plan(transform)
        self._images = ImageDecoder(transform, np.asarray) if image_plan is not None else None
        self._layout = "HWC" if image_plan is None else image_plan.layout
        self._has_one_shape = self._images.batchable if self._images is not None else self._has_one_size()

    @property
    def traits(self) -> Traits:
        return Traits(
            thread_safe=True,
            is_random=self._draws or self._images is None,
            reads_batches=self._has_one_shape and self._rule.frames is not None and not self._is_overridden,
            uses_keys=self._draws,
        )

    def read_batch(self, request: BatchRead) -> dict[str, torch.Tensor]:
        """The collated batch; TypeError if clips may differ in shape."""
        check_reads_batches(self)
        places, keys = normalize_indices(request.indices, len(self), "Clips"), request.keys
        if keys is None and self._draws:
            keys = torch_keys(len(places))
        chosen = self._choose(places, [0] * len(places) if keys is None else keys.tolist())
        out: list[torch.Tensor] = []

        def allocate(row: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            name = self.paths[chosen[row].piece.file]
            return _row(name, out, row, len(chosen), request.allocate, shape, dtype)

        for row, clip in self._read_clips(chosen, allocate):
            assert clip.data_ptr() == out[0][row].data_ptr()
        seconds = np.stack([_seconds(each) for each in chosen])
        batch = {
            "frames": _channels_first(out[0], self._layout),
            "seconds": request.allocate(seconds.shape, torch.float64),
        }
        numpy_view(batch["seconds"])[...] = seconds
        if self._media.has_labels:
            batch["label"] = request.allocate((len(chosen),), torch.int64)
            numpy_view(batch["label"])[...] = [each.piece.label for each in chosen]
        return batch

    def _has_one_size(self) -> bool:
        """True for untransformed frames of videos that declare one size."""
        if self._step.transform is not None:
            return False
        sizes = set()
        for entry in self._known.collect():
            with suppress(SampleError):
                table: FrameTable = self._known.parsed(entry)
                sizes.add((table.height, table.width))
        return len(sizes) == 1

    @property
    def _draws(self) -> bool:
        return self._rule.is_random or (self._images is not None and self._images.uses_keys)

    def _read_samples(self, places: NDArray[np.int64], rows: Sequence[int | None]) -> list[dict[str, Any]]:
        needs_rng = self._draws or self._step.takes_rng
        rngs = [sample_rng(row) if needs_rng else None for row in rows]
        chosen = self._choose(places, [0 if rng is None else rng.key for rng in rngs])
        samples: list[dict[str, Any]] = [{} for _ in chosen]
        for row, pixels in self._read_clips(chosen, lambda _, shape, dtype: allocate_tensor(shape, dtype)):
            each, clip = chosen[row], _channels_first(pixels, self._layout)
            if self._images is None:
                clip = self._step.apply(clip, rngs[row])
            samples[row] = {"frames": clip, "seconds": torch.from_numpy(_seconds(each))}
            if each.piece.label is not None:
                samples[row]["label"] = each.piece.label
        return samples

    def _choose(self, places: NDArray[np.int64], keys: Sequence[int]) -> list[_ChosenClip]:
        """The frames of these clips."""
        chosen = []
        for place, key in zip(places.tolist(), keys, strict=True):
            row, clip = self._offsets.one(place)
            piece = self._media.pieces[row]
            table: FrameTable = self._known[piece.file]
            times = _times(table, piece)
            try:
                # A separate key: a crop drawn with the sample's key must not depend on the place of the clip.
                frames = self._rule.pick(times, clip, Draws(derive(key, "clip")))
            except TooShortError as error:
                raise TooShortError(f"{self.paths[piece.file]}: {error}") from None
            chosen.append(_ChosenClip(piece, table, frames, key))
        return chosen

    def _read_clips(
        self, chosen: Sequence[_ChosenClip], allocate: Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor]
    ) -> Iterator[tuple[int, torch.Tensor]]:
        """Row and pixels of each clip, video by video.

        `allocate(row, shape, dtype)` creates the tensors, whose frames have the layout `_layout`.
        """
        order = sorted(range(len(chosen)), key=lambda row: (chosen[row].piece.file, int(chosen[row].frames.min())))
        kept: Frames = {}
        for row, following in zip(order, [*order[1:], None], strict=True):
            one, then = chosen[row], None if following is None else chosen[following]
            if then is not None and then.piece.file != one.piece.file:
                then = None
            to = partial(allocate, row)
            with self._naming(self.paths[one.piece.file]), self._decoders.use(one.piece.file) as reader, DECODING:
                frames = self._frames(reader, one, then, kept)
                clip, kept = self._copy(one, frames, to) if self._images is None else self._transform(one, frames, to)
            kept = {} if then is None else {number: kept[number] for number in set(then.frames.tolist()) & kept.keys()}
            if self._images is None and self._step.transform is not None:
                # They are views of the clip, which the transform may change in place before they are used again.
                kept = {number: pixels.copy() for number, pixels in kept.items()}
            yield row, clip

    def _frames(
        self, reader: VideoReader, chosen: _ChosenClip, then: _ChosenClip | None, kept: Frames
    ) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Number and pixels of the distinct frames.

        Frames in `kept` are reused.
        """
        numbers = np.unique(chosen.frames)
        missing = numbers[~np.isin(numbers, list(kept))] if kept else numbers
        if then is not None:
            following = min(set(then.frames.tolist()).difference(numbers.tolist()), default=None)
        else:
            # In an unshuffled loader, the first clip of a later batch probably begins there.
            following = int(numbers[-1]) + 1 if self._rule.sampling == "sliding" else None
        yield from ((number, kept[number]) for number in numbers.tolist() if number in kept)
        yield from reader.read(missing, following)

    def _copy(
        self, chosen: _ChosenClip, frames: Iterator[tuple[int, NDArray[np.uint8]]], allocate: Allocator
    ) -> tuple[torch.Tensor, Frames]:
        """The clip, and its frames by number, as views of the clip.

        Each frame is copied directly after its decoding: new memory costs more time than the conversion to RGB.
        """
        rows: dict[int, list[int]] = {}
        for at, number in enumerate(chosen.frames.tolist()):
            rows.setdefault(number, []).append(at)
        first = next(frames)
        clip = allocate((len(chosen.frames), *first[1].shape), torch.uint8)
        out, kept = numpy_view(clip), dict[int, NDArray[np.uint8]]()
        for number, pixels in chain([first], frames):
            if pixels.shape != out.shape[1:]:
                raise SampleError(
                    f"{self.paths[chosen.piece.file]}: its frames change size ({out.shape[1:]}, {pixels.shape}): pass "
                    "a transform of fl.transforms that gives them one size"
                )
            for at in rows[number]:
                out[at] = pixels
            kept[number] = out[rows[number][0]]
        return clip, kept

    def _transform(
        self, chosen: _ChosenClip, frames: Iterator[tuple[int, NDArray[np.uint8]]], allocate: Allocator
    ) -> tuple[torch.Tensor, Frames]:
        """The transformed clip, and its decoded frames by number."""
        assert self._images is not None
        kept = dict(frames)
        pixels = [np.ascontiguousarray(kept[number]) for number in chosen.frames.tolist()]
        if not self._images.batchable:
            each = [self._images.value(one, SampleRng(chosen.key)) for one in pixels]
            return torch.stack([_tensor_of(one, self._layout) for one in each]), kept
        keys: Keys = np.full(len(pixels), chosen.key, np.uint64)
        with naming_images(lambda _: self.paths[chosen.piece.file]):
            return self._images.decode_batch(pixels, keys, allocate), kept

    @property
    def _fixed_count(self) -> int | None:
        return None if self._rule.sampling == "sliding" else self._rule.per_video

    def _count(self, piece: Piece, known: FrameTable) -> int:
        return self._rule.count(_times(known, piece))

    def _describe(self, number: int) -> bytes:
        return scan_frames(self._media.files.source(number), self._media.files.name(number)).pack()

    def _open(self, number: int) -> VideoReader:
        return VideoReader(self._media.files.source(number), self._known[number], self._media.files.name(number))

    def __repr__(self) -> str:
        return f"<Clips: {len(self)} clips of {len(self.paths)} videos>"


def _times(table: FrameTable, piece: Piece) -> FrameTimes:
    whole = FrameTimes(table.seconds, table.end_s, tolerance=table.rounding_s)
    return whole if piece.start is None and piece.stop is None else whole.between(piece.start, piece.stop)


def _seconds(chosen: _ChosenClip) -> NDArray[np.float64]:
    return chosen.table.seconds[chosen.frames]


def _row(
    name: str,
    out: list[torch.Tensor],
    row: int,
    count: int,
    allocate: Allocator,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Row `row` of a batch.

    The batch is allocated with its first clip. SampleError for a clip of another shape.
    """
    if not out:
        out.append(allocate((count, *shape), dtype))
    if out[0].shape[1:] != shape:
        height, width = out[0].shape[-3:-1]
        raise SampleError(
            f"{name}: its frames are {shape[-3]} × {shape[-2]} pixels, those of another clip of the batch "
            f"{height} × {width}: pass a transform of fl.transforms that gives them one size"
        )
    return out[0][row]


def _channels_first(frames: torch.Tensor, layout: str) -> torch.Tensor:
    """Frames as (..., channels, height, width)."""
    return frames if layout == "CHW" else frames.movedim(-1, -3)


def _tensor_of(frame: Any, layout: str) -> torch.Tensor:
    """A frame as a tensor; arrays and Pillow images are "HWC"."""
    if isinstance(frame, torch.Tensor):
        return frame
    levels = np.require(frame, requirements="W")
    if isinstance(frame, PIL.Image.Image) and levels.ndim == 2:  # gray
        levels = levels[..., None]
    return torch.from_numpy(levels if layout == "HWC" or levels.ndim < 3 else np.moveaxis(levels, -1, -3))
