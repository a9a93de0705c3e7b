"""`pack`: from sources to shards, on all cores, going on where an earlier run stopped.

The folder that shards are written into: held by one run at a time, cleared of what an interrupted run left.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from feedline.cli.pack import encode
from feedline.cli.pack import writer as writing
from feedline.cli.pack.encode import EncodedSample, made
from feedline.cli.pack.manifest import MANIFEST, FinishedShard, Manifest
from feedline.cli.pack.options import PackOptions
from feedline.cli.pack.sources import CLASSES, Sample, SampleList, listed
from feedline.cli.pack.writer import partial
from feedline.core.rng import derive, permuted
from feedline.core.threads import WorkAhead
from feedline.datasets.webdataset import glance, write_index
from feedline.errors import ArgumentError, note

_LEFTOVER = re.compile(r"\..*\.part|shard-\d{6,}\.tar\.index\.partial-\d+")


_SHARD = re.compile(r"shard-(\d{6,})\.tar(\.index)?")


def shard_name(number: int) -> str:
    return f"shard-{number:06}.tar"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """The folder, made if need be, for this run alone; ArgumentError while another one packs into it."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        _lock(descriptor, folder)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, folder: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # let go by the kernel however the process ends
    except OSError as error:
        if error.errno == errno.EWOULDBLOCK:
            raise ArgumentError(f"another feedline pack writes into {folder}; wait for it, or stop it") from None

        # A file system without locks: nothing is guarded there.


def refuse_inside(folder: Path, sources: Sequence[str]) -> None:
    """ArgumentError if the folder lies in a source: the next run would find its own shards among the samples."""
    for source in map(Path, sources):
        place = (source if source.is_dir() else source.parent).resolve()
        if folder.resolve().is_relative_to(place) and (source.is_dir() or folder.resolve() == place):
            raise ArgumentError(f"{folder} lies in {place}, which is packed; choose a folder elsewhere")


def begun(folder: Path) -> Manifest | None:
    """The manifest in the folder; ArgumentError if there is none, but other files."""
    found = Manifest.load(folder)
    others = [] if found else sorted(e.name for e in folder.iterdir() if not _LEFTOVER.fullmatch(e.name))
    if others:
        raise ArgumentError(f"{folder} is not empty (it holds {others[0]}), and has no {MANIFEST}; choose a new folder")
    return found


def clear(folder: Path, shards: int) -> None:
    """Remove what an interrupted run left behind its first `shards` shards."""
    for entry in folder.iterdir():
        match = _SHARD.fullmatch(entry.name)
        if _LEFTOVER.fullmatch(entry.name) or (match and int(match[1]) >= shards):
            entry.unlink()


def write_classes(folder: Path, classes: Sequence[str]) -> None:
    """`classes.json`: a list, in which a label is an index."""
    place, text = folder / CLASSES, json.dumps(list(classes), indent=1, ensure_ascii=False) + "\n"
    if not place.is_file() or place.read_text(encoding="utf-8") != text:
        partial(place).write_text(text, encoding="utf-8")
        partial(place).replace(place)


class PackProgress(NamedTuple):
    """How far a phase ("checking" shards of an earlier run, "packing" samples) has come; bytes are those of sources."""

    phase: str
    done: int
    total: int
    nbytes: int = 0


Report = Callable[[PackProgress], None]


@dataclass(frozen=True, slots=True)
class PackResult:
    """What lies in the folder now; `kept` of its shards are from an earlier run."""

    folder: Path
    manifest: Manifest
    kept: int
    nbytes_read: int
    notes: list[str] = field(default_factory=list)

    @property
    def skipped(self) -> list[dict[str, str]]:
        """The samples that were left out: their files, and why."""
        return [skip for shard in self.manifest.shards for skip in shard.skipped]

    @property
    def plain(self) -> Counter[str]:
        """How many pictures got no grid, by reason."""
        return sum((Counter(shard.plain) for shard in self.manifest.shards), Counter())


def pack(sources: Sequence[str], folder: Path, options: PackOptions, workers: int, report: Report) -> PackResult:
    """Write the samples of folders or tars as tar shards with their indexes into `folder`, and say what is there.

    The bytes of the tars depend on sources and options alone. A folder that an earlier run did not finish is
    completed: its shards are checked against their checksums, and the work goes on behind the last one that is intact.
    Bad samples raise SampleError, or are left out and listed, as the options say.
    """
    if options.grid:
        encode.require()
    refuse_inside(folder, sources)
    listing = _in_order(listed(sources), options)
    with held(folder):
        wanted = Manifest(options.record(), listing.fingerprint(), len(listing.samples))
        manifest = _intact(begun(folder), wanted, folder, workers, report)
        clear(folder, len(manifest.shards))
        manifest.save(folder)
        if listing.classes is not None:
            write_classes(folder, listing.classes)
        return _Run(folder, options, report, manifest, listing).run(workers)


def _in_order(listing: SampleList, options: PackOptions) -> SampleList:
    if not (listing.in_classes if options.shuffle is None else options.shuffle):
        return listing
    number = len(listing.samples)
    order = permuted(derive(options.seed, "pack"), number, 0, number).tolist()
    return replace(listing, samples=[listing.samples[i] for i in order])


def _intact(found: Manifest | None, wanted: Manifest, folder: Path, workers: int, report: Report) -> Manifest:
    """What an earlier run has finished and nothing has damaged since, indexes included."""
    if found is None:
        return wanted
    found.refuse_others(wanted, folder)
    intact = 0
    with WorkAhead(lambda shard: shard.is_intact(folder), found.shards, workers) as checks:
        for number, good in enumerate(checks, 1):
            report(PackProgress("checking", number, len(found.shards)))
            intact += good and intact == number - 1
    for shard in found.shards[:intact]:
        tar = str(folder / shard.name)
        if glance(tar) is None:
            write_index(tar, measure=encode.measured, checksum=True)
    return found.cut(intact)


class _Made(NamedTuple):
    sample: Sample
    contents: EncodedSample
    pieces: list[bytes]


@dataclass
class _Run:
    folder: Path
    options: PackOptions
    report: Report
    manifest: Manifest
    listing: SampleList
    nbytes_read: int = 0

    def run(self, workers: int) -> PackResult:
        kept = len(self.manifest.shards)
        self._tell()
        with WorkAhead(self._made, self._left(), workers) as made:
            while made:
                self._advance(made)
        if not self.manifest.finished:
            self.manifest = replace(self.manifest, finished=True)
            self.manifest.save(self.folder)
        return PackResult(self.folder, self.manifest, kept, self.nbytes_read, self._notes())

    def _advance(self, made: WorkAhead[Sample, _Made]) -> None:
        try:
            self.manifest = self.manifest.with_shard(self._shard(made))
            self.manifest.save(self.folder)
        except OSError as error:
            note(error, f"Finished shards stay in {self.folder}: when this is mended, the same command goes on there.")
            raise

    def _notes(self) -> list[str]:
        renamed = len(self.listing.renamed)
        told = f"renamed: {renamed:,} samples, whose keys came before; a number is behind them now"
        return self.listing.notes + [told] * bool(renamed)

    def _left(self) -> Iterable[Sample]:
        return self.listing.samples[self.manifest.done :]

    def _made(self, sample: Sample) -> _Made:
        contents = made(sample, self.options)
        return _Made(sample, contents, writing.encoded(contents))

    def _shard(self, made: WorkAhead[Sample, _Made]) -> FinishedShard:
        """The next shard, up to the first sample that does not fit."""
        start = stop = self.manifest.done
        plain, skipped = Counter[str](), list[dict[str, str]]()
        path = self.folder / shard_name(len(self.manifest.shards))
        with writing.ShardWriter(path) as writer:
            for sample, contents, pieces in made:
                if contents.error is not None:
                    skipped.append(self._skip(sample, contents))
                elif writer.samples and self.options.shard_size.exceeded(*writer.size_with(pieces)):
                    break
                else:
                    writer.add(contents, pieces)
                    plain.update(contents.plain)
                stop += 1
                self.nbytes_read += contents.nbytes_read
                self._tell(stop)
            if not writer.samples:
                raise ArgumentError(f"none of {stop:,} samples could be packed; the first: {skipped[0]['error']}")
            written = writer.finish()
        write_index(path, grids=written.grids, checksum=True)
        told = (written.samples, written.nbytes, written.sha256)
        return FinishedShard(path.name, *told, start, stop, dict(sorted(plain.items())), skipped)

    def _skip(self, sample: Sample, contents: EncodedSample) -> dict[str, str]:
        assert contents.error is not None
        if not self.options.skip:
            raise contents.error
        return {"key": sample.key, "file": sample.parts[0].name, "error": str(contents.error)}

    def _tell(self, done: int | None = None) -> None:
        done = self.manifest.done if done is None else done
        self.report(PackProgress("packing", done, self.manifest.positions, self.nbytes_read))
