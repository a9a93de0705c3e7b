"""`pack`: from sources to shards, on all cores, going on where an earlier run stopped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from feedline.errors import ArgumentError, note
from feedline.packing import destination, grids, writing
from feedline.packing.ahead import Ahead
from feedline.packing.contents import Contents, made
from feedline.packing.listing import listed
from feedline.packing.manifest import Manifest, Shard
from feedline.packing.options import Options
from feedline.packing.samples import Listing, Sample
from feedline.rng import derive, permuted
from feedline.shards import glance, write_index


class Progress(NamedTuple):
    """How far a phase ("checking" shards of an earlier run, "packing" samples) has come; bytes are those of sources."""

    phase: str
    done: int
    total: int
    nbytes: int = 0


Report = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class Outcome:
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


def pack(sources: Sequence[str], folder: Path, options: Options, workers: int, report: Report) -> Outcome:
    """Write the samples of folders or tars as tar shards with their indexes into `folder`, and say what is there.

    The bytes of the tars depend on sources and options alone. A folder that an earlier run did not finish is
    completed: its shards are checked against their checksums, and the work goes on behind the last one that is intact.
    Bad samples raise SampleError, or are left out and listed, as the options say.
    """
    if options.grid:
        grids.require()
    destination.refuse_inside(folder, sources)
    listing = _in_order(listed(sources), options)
    with destination.held(folder):
        wanted = Manifest(options.record(), listing.fingerprint(), len(listing.samples))
        manifest = _intact(destination.begun(folder), wanted, folder, workers, report)
        destination.clear(folder, len(manifest.shards))
        manifest.save(folder)
        if listing.classes is not None:
            destination.write_classes(folder, listing.classes)
        return _Run(folder, options, report, manifest, listing).run(workers)


def _in_order(listing: Listing, options: Options) -> Listing:
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
    with Ahead(lambda shard: shard.is_intact(folder), found.shards, workers) as checks:
        for number, good in enumerate(checks, 1):
            report(Progress("checking", number, len(found.shards)))
            intact += good and intact == number - 1
    for shard in found.shards[:intact]:
        tar = str(folder / shard.name)
        if glance(tar) is None:
            write_index(tar, measure=grids.measured, checksum=True)
    return found.cut(intact)


class _Made(NamedTuple):
    sample: Sample
    contents: Contents
    pieces: list[bytes]


@dataclass
class _Run:
    folder: Path
    options: Options
    report: Report
    manifest: Manifest
    listing: Listing
    nbytes_read: int = 0

    def run(self, workers: int) -> Outcome:
        kept = len(self.manifest.shards)
        self._tell()
        with Ahead(self._made, self._left(), workers) as made:
            while made:
                self._advance(made)
        if not self.manifest.finished:
            self.manifest = replace(self.manifest, finished=True)
            self.manifest.save(self.folder)
        return Outcome(self.folder, self.manifest, kept, self.nbytes_read, self._notes())

    def _advance(self, made: Ahead[Sample, _Made]) -> None:
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

    def _shard(self, made: Ahead[Sample, _Made]) -> Shard:
        """The next shard, up to the first sample that does not fit."""
        start = stop = self.manifest.done
        plain, skipped = Counter[str](), list[dict[str, str]]()
        path = self.folder / destination.shard_name(len(self.manifest.shards))
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
        return Shard(path.name, *told, start, stop, dict(sorted(plain.items())), skipped)

    def _skip(self, sample: Sample, contents: Contents) -> dict[str, str]:
        assert contents.error is not None
        if not self.options.skip:
            raise contents.error
        return {"key": sample.key, "file": sample.parts[0].name, "error": str(contents.error)}

    def _tell(self, done: int | None = None) -> None:
        done = self.manifest.done if done is None else done
        self.report(Progress("packing", done, self.manifest.positions, self.nbytes_read))
