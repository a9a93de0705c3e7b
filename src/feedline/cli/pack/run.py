"""A run of `pack`, on all cores, which continues an interrupted one.

Shards are written reproducibly and atomically.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from feedline.cli.pack.encode import EncodedSample, Lengths, check_native, encode_sample
from feedline.cli.pack.manifest import MANIFEST, FinishedShard, Manifest
from feedline.cli.pack.options import PackOptions
from feedline.core.paths import PARTIAL, Replacement, replacing
from feedline.core.rng import derive, permuted
from feedline.core.threads import WorkAhead
from feedline.datasets.imagefolder.listing import list_folders
from feedline.datasets.sample_lists import Sample, SampleList
from feedline.datasets.webdataset import CLASSES, read_head, write_index
from feedline.datasets.webdataset.build_index import measure_intervals
from feedline.datasets.webdataset.listing import list_tars
from feedline.datasets.webdataset.targets import find_tars
from feedline.errors import ArgumentError, SampleError, note

_BLOCK = tarfile.BLOCKSIZE


_END = bytes(2 * _BLOCK)


_MODIFIED_S = 946_684_800
"""Modification time of all members: 2000-01-01. tar warns of "implausibly old" times."""

_OUTPUT_NAME = re.compile(rf"shard-\d{{6,}}\.tar(\.index)?|{re.escape(CLASSES)}|{re.escape(MANIFEST)}")


_SHARD = re.compile(r"shard-(\d{6,})\.tar(\.index)?")


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06}.tar"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder, and lock it for the block.

    Raises `ArgumentError` if another run holds the lock. On a file system without locks, other runs are not detected.
    """
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        # The kernel releases this lock however the process ends, so that a killed run leaves none behind.
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise ArgumentError(f"another feedline pack is writing into {folder}; wait for it, or stop it") from None
        # Other errors: a file system without locks, where two runs are not detected.


def check_outside(folder: Path, sources: Sequence[str]) -> None:
    """Raise `ArgumentError` if the folder is inside a source."""
    # The next run would find its own shards among the samples.
    for source in map(Path, sources):
        place = (source if source.is_dir() else source.parent).resolve()
        if folder.resolve().is_relative_to(place) and (source.is_dir() or folder.resolve() == place):
            raise ArgumentError(f"{folder} is inside the source {place}; choose a folder elsewhere")


def load_manifest(folder: Path) -> Manifest | None:
    """The manifest of an earlier run, or None in an empty folder.

    Raises `ArgumentError` if the folder has other files and no manifest, `StateError` if the manifest is damaged.
    """
    manifest = Manifest.load(folder)
    others = [] if manifest else sorted(e.name for e in folder.iterdir() if not _is_leftover(e.name))
    if others:
        raise ArgumentError(f"{folder} is not empty (it contains {others[0]}) without {MANIFEST}; choose a new folder")
    return manifest


def remove_leftovers(folder: Path, shards: int) -> None:
    """Remove temporary files, and all shards after the first `shards`."""
    for entry in folder.iterdir():
        match = _SHARD.fullmatch(entry.name)
        if _is_leftover(entry.name) or (match and int(match[1]) >= shards):
            entry.unlink()


def _is_leftover(name: str) -> bool:
    """True for a file that an interrupted run has not finished."""
    match = PARTIAL.fullmatch(name)
    return match is not None and _OUTPUT_NAME.fullmatch(match[1]) is not None


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """Write `classes.json`: the name of each class, by label."""
    # A folder's name may hold bytes that are not UTF-8, which JSON can only escape.
    is_text = all(name.isprintable() for name in classes)
    place, text = folder / CLASSES, json.dumps(list(classes), indent=1, ensure_ascii=not is_text) + "\n"
    if not place.is_file() or place.read_text(encoding="utf-8") != text:
        with replacing(place) as file:
            file.write(text.encode())


class PackProgress(NamedTuple):
    """Progress of a phase.

    The phases are "checking", of the shards of an earlier run, and "packing", of samples. `nbytes` are bytes read
    from the sources.
    """

    phase: str
    done: int
    total: int
    nbytes: int = 0


Report = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class PackResult:
    """The finished folder. The first `kept` shards are from an earlier run."""

    folder: Path
    manifest: Manifest
    kept: int
    nbytes_read: int
    notes: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> list[dict[str, str]]:
        """Skipped samples, as objects with key, file and error."""
        return [skip for shard in self.manifest.shards for skip in shard.skipped]

    @property
    def without_grid(self) -> Counter[str]:
        """Number of images without a grid, by reason."""
        return sum((Counter(shard.without_grid) for shard in self.manifest.shards), Counter())


def pack(sources: Sequence[str], folder: Path, options: PackOptions, workers: int, report: Report) -> PackResult:
    """Write samples as tar shards with indexes into `folder`.

    The bytes of the tars depend on sources and options alone. The folder of an interrupted run is completed: its
    shards are compared with their checksums, and the work continues at the first shard that is not intact. A sample
    that cannot be read raises `SampleError`, or is skipped and listed, according to the options. `workers` is a number
    of threads. `report` is called in this thread. Raises `ArgumentError` for an unusable folder, and `StateError` if
    the earlier run had other sources or options.
    """
    if options.grid:
        check_native()
    check_outside(folder, sources)
    listing = _shuffle(list_samples(sources), options)
    with lock_folder(folder):
        new = Manifest(options.record(), listing.fingerprint(), len(listing.samples))
        manifest = _keep_intact(load_manifest(folder), new, folder, workers, report)
        remove_leftovers(folder, len(manifest.shards))
        manifest.save(folder)
        if listing.classes is not None:
            write_classes(folder, listing.classes)
        return _PackRun(folder, options, report, manifest, listing).run(workers)


def list_samples(sources: Sequence[str]) -> SampleList:
    """List the samples of tars, or of folders of files."""
    tars = find_tars(sources)
    return list_tars(tars) if tars else list_folders(sources)


def _shuffle(listing: SampleList, options: PackOptions) -> SampleList:
    if not (listing.in_classes if options.shuffle is None else options.shuffle):
        return listing
    number = len(listing.samples)
    order = permuted(derive(options.seed, "pack"), number, 0, number).tolist()
    return replace(listing, samples=[listing.samples[i] for i in order])


def _keep_intact(old: Manifest | None, new: Manifest, folder: Path, workers: int, report: Report) -> Manifest:
    """The manifest of an earlier run up to its first damaged shard.

    Without an earlier run, it is `new`. Missing indexes are rebuilt.
    """
    if old is None:
        return new
    old.check_same_run(new, folder)
    intact = 0
    with WorkAhead(lambda shard: shard.is_intact(folder), old.shards, workers) as checks:
        for number, good in enumerate(checks, 1):
            report(PackProgress("checking", number, len(old.shards)))
            intact += good and intact == number - 1
    for shard in old.shards[:intact]:
        tar = str(folder / shard.name)
        if read_head(tar) is None:
            write_index(tar, measure=measure_intervals, checksum=True)
    return old.truncate(intact)


class WrittenShard(NamedTuple):
    """A finished shard, with the grids of JPEGs by member name."""

    nbytes: int
    sha256: str
    samples: int
    grids: dict[str, Lengths]


def tar_blocks(sample: EncodedSample) -> list[bytes]:
    """Headers, contents and padding of all members of a sample.

    The format is ustar, with pax headers for long names.
    """
    blocks = list[bytes]()
    for member in sample.members:
        blocks += [_header(member.name, len(member.data)), member.data, bytes(-len(member.data) % _BLOCK)]
    return blocks


def _header(name: str, nbytes: int) -> bytes:
    # The defaults of TarInfo have no owner and no group; the bytes must not depend on the user and the time.
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = nbytes, _MODIFIED_S, 0o644
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


class ShardWriter:
    """Writes a shard under a temporary name, until `finish` renames it.

    Leaving the block without `finish` removes the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.samples = self.nbytes = 0
        self._grids = dict[str, Lengths]()
        self._digest = hashlib.sha256()
        self._replacement = Replacement(path, durable=True, buffer_nbytes=1 << 20)

    def add(self, sample: EncodedSample, blocks: list[bytes]) -> None:
        """Append a sample; `blocks` are `tar_blocks(sample)`."""
        self._write(blocks)
        self.samples += 1
        self._grids.update((member.name, member.lengths) for member in sample.members if member.lengths is not None)

    def size_with(self, blocks: list[bytes]) -> tuple[int, int]:
        """Samples and bytes of the tar if it ends after these blocks."""
        return self.samples + 1, self.nbytes + sum(map(len, blocks)) + len(_END)

    def finish(self) -> WrittenShard:
        """End the tar, and rename it after its data is durable."""
        self._write([_END])
        self._replacement.finish()
        return WrittenShard(self.nbytes, self._digest.hexdigest(), self.samples, self._grids)

    def _write(self, blocks: list[bytes]) -> None:
        for block in blocks:
            self._replacement.file.write(block)
            self._digest.update(block)
            self.nbytes += len(block)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._replacement.discard()


class _PackedSample(NamedTuple):
    sample: Sample
    encoded: EncodedSample
    blocks: list[bytes]


@dataclass
class _PackRun:
    """Work on the samples that the manifest does not list yet."""

    folder: Path
    options: PackOptions
    report: Report
    manifest: Manifest
    listing: SampleList
    nbytes_read: int = 0

    def run(self, workers: int) -> PackResult:
        kept = len(self.manifest.shards)
        self._report_progress(self.manifest.done)
        with WorkAhead(self._encode, self.listing.samples[self.manifest.done :], workers) as items:
            while items:
                self._add_shard(items)
        if not self.manifest.finished:
            self.manifest = replace(self.manifest, finished=True)
            self.manifest.save(self.folder)
        return PackResult(self.folder, self.manifest, kept, self.nbytes_read, self._notes())

    def _add_shard(self, items: WorkAhead[Sample, _PackedSample]) -> None:
        # The shard has its final name before the manifest lists it; the next run removes a shard that is not listed.
        try:
            self.manifest = self.manifest.with_shard(self._write_shard(items))
            self.manifest.save(self.folder)
        except OSError as error:
            note(error, f"Finished shards stay in {self.folder}. Fix this error, and the same command continues there.")
            raise

    def _notes(self) -> list[str]:
        renamed = len(self.listing.renamed)
        note_ = f"renamed: {renamed:,} samples with a repeated key; the new key ends in a number"
        return self.listing.notes + [note_] * bool(renamed)

    def _encode(self, sample: Sample) -> _PackedSample:
        encoded = encode_sample(sample, self.options)
        return _PackedSample(sample, encoded, tar_blocks(encoded))

    def _write_shard(self, items: WorkAhead[Sample, _PackedSample]) -> FinishedShard:
        """Write the next shard, up to the first sample beyond its size."""
        start = stop = self.manifest.done
        without_grid, skipped = Counter[str](), list[dict[str, str]]()
        path = self.folder / shard_name(len(self.manifest.shards))
        with ShardWriter(path) as writer:
            for sample, encoded, blocks in items:
                if encoded.error is not None:
                    skipped.append(self._skip(sample, encoded.error))
                elif writer.samples and self.options.shard_size.is_exceeded(*writer.size_with(blocks)):
                    break  # the sample stays at the head of `items`, and begins the next shard
                else:
                    writer.add(encoded, blocks)
                    without_grid.update(encoded.without_grid)
                stop += 1
                self.nbytes_read += encoded.nbytes_read
                self._report_progress(stop)
            if not writer.samples:
                raise ArgumentError(f"none of {stop:,} samples could be packed; the first: {skipped[0]['error']}")
            shard = writer.finish()
        write_index(path, grids=shard.grids, checksum=True)
        return FinishedShard(
            path.name,
            shard.samples,
            shard.nbytes,
            shard.sha256,
            start,
            stop,
            dict(sorted(without_grid.items())),
            skipped,
        )

    def _skip(self, sample: Sample, error: SampleError) -> dict[str, str]:
        if not self.options.skip:
            raise error
        return {"key": sample.key, "file": sample.parts[0].name, "error": str(error)}

    def _report_progress(self, done: int) -> None:
        self.report(PackProgress("packing", done, self.manifest.positions, self.nbytes_read))
