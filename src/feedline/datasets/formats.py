"""The table of formats: datasets, file names, documentation, and counting of shards."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from feedline.datasets.sample_lists import FindTargets, ReportProgress, SampleList
from feedline.errors import ArgumentError
from feedline.stores.globs import braces

_log = logging.getLogger("feedline")


ENTRY_POINTS = "feedline.formats"
"""The entry point group in which an installed package names its formats, for `feedline inspect`."""


class KeptShards(NamedTuple):
    """A limit for shards that are read whole, and their bytes."""

    limit_nbytes: int
    nbytes: Sequence[int]
    keeper: str = "each process"


@dataclass(frozen=True, slots=True)
class ShardSummary:
    """Samples and bytes of each shard.

    `unit` is the format's word for a shard; without shards it is empty, and `note` gives the reason. `nbytes` has the
    stored bytes of each shard; the bytes of a file with several shards are divided in proportion to their samples.
    Without `kept`, each sample is read separately.
    """

    unit: str
    sizes: Sequence[int]
    nbytes: Sequence[int]
    kept: KeptShards | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Format:
    """A format of files, folders or stores.

    `label` is its name in messages. `datasets` are references to the classes that read it, the main one first: a
    reference is "module:attribute", and is loaded on first use. `description`, `usage`, `extra` (of `pip install
    'feedline[extra]'`) and `extra_for` are the row of the format in the documentation.

    `pattern`, which may have braces, selects the files of a folder. `feedline inspect` also recognizes a file by the
    last part of `pattern`, in lower case, and by the patterns of `names`; with `named_only`, it recognizes only a path
    that was given, not a file of a given folder. With `is_folder`, a folder may have such a name. With `top_only`,
    files of subfolders do not count. `markers` are file names that only this format has in its folder. If several
    formats share a marker, `accepts` refers to a function that decides by the marker's bytes. A folder with files of
    several formats is recognized as the format with the highest `precedence`.

    `unit` is the word for a shard. `summarize` is a function of the paths that returns a `ShardSummary`, or a reference
    to one; by default each file is a shard, and `dataset(paths, index_dir=...)` has the samples of each as
    `shard_sizes`. With `list_samples`, `feedline inspect` looks into each sample instead: it is a function, or a
    reference to one, that takes the paths and a function for the progress, and returns a `SampleList`.

    If `feedline index` can write the indexes of its files, `index_suffix` is appended to the names of the files, and
    `index_targets` is a function, or a reference to one, that takes the paths, the folder for the indexes and
    `allow_truncated`, and returns an `IndexTarget` for each shard.
    """

    label: str
    datasets: tuple[str, ...] = ()
    description: str = ""
    usage: tuple[str, ...] = ()
    extra: str | None = None
    extra_for: str = ""
    pattern: str = "*"
    names: tuple[str, ...] = ()
    named_only: bool = False
    is_folder: bool = False
    top_only: bool = False
    markers: tuple[str, ...] = ()
    accepts: str | None = None
    precedence: int = 0
    unit: str = "file"
    summarize: str | Callable[[Sequence[str]], ShardSummary] | None = None
    list_samples: str | Callable[[Sequence[str], ReportProgress], SampleList] | None = None
    index_suffix: str = ""
    index_targets: str | FindTargets | None = None

    @property
    def dataset(self) -> Any:
        """The class of its main dataset."""
        return load(self.datasets[0])

    @property
    def all_names(self) -> tuple[str, ...]:
        """Patterns of names by which a file is recognized, with braces."""
        last = self.pattern.rpartition("/")[2]
        return (*(() if last == "*" else (last,)), *self.names)

    def matches(self, path: str) -> bool:
        """True for a path with a name of this format."""
        last = PurePosixPath(path).name.lower()
        return any(fnmatchcase(last, form) for name in self.all_names for form in _forms(name))

    def has_marker(self, data: bytes) -> bool:
        """True if a marker with these bytes is of this format."""
        return self.accepts is None or bool(load(self.accepts)(data))


@cache
def _forms(pattern: str) -> tuple[str, ...]:
    return tuple(braces(pattern))


def load(reference: Any) -> Any:
    """The object that "module:attribute" names; other values are returned unchanged."""
    if not isinstance(reference, str):
        return reference
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)


IMAGE_EXTENSIONS = frozenset(
    "avif bmp gif heic heif jfif jp2 jpe jpeg jpg jxl pbm pgm png pnm ppm tif tiff webp".split()  # noqa: SIM905 - reads as a list
)
"""Extensions, in lower case, of files and members that hold an encoded image."""


_PACKED = "{,.gz,.zst,.zstd,.bz2,.xz}"
"""Endings of text files, in braces."""


FORMATS: dict[str, Format] = {
    "imagefolder": Format(
        "images",
        ("feedline.datasets.imagefolder.dataset:ImageFolder",),
        "images in one folder per class",
        ("ImageFolder(root)",),
        names=tuple(f"*.{extension}" for extension in sorted(IMAGE_EXTENSIONS)),
        precedence=1,  # lists of labels may be next to images
        list_samples="feedline.datasets.imagefolder.listing:list_samples",
    ),
    "tar": Format(
        "tar shards",
        ("feedline.datasets.webdataset.dataset:TarShards",),
        "tar shards of WebDataset",
        ("TarShards(paths, columns)",),
        pattern="*.{tar,tar.gz,tar.zst,tar.bz2,tar.xz,tgz,tzst,tbz2,txz}",
        top_only=True,
        precedence=2,
        unit="tar",
        list_samples="feedline.datasets.webdataset.listing:list_samples",
        index_suffix=".index",
        index_targets="feedline.datasets.webdataset.targets:find_tar_targets",
    ),
    "parquet": Format(
        "Parquet",
        ("feedline.datasets.tables.parquet:Parquet",),
        "Parquet files",
        ("Parquet(paths, columns)",),
        "arrow",
        pattern="**/*.parquet",
        summarize="feedline.datasets.tables.parquet:summarize_row_groups",
    ),
    "arrow": Format(
        "Arrow",
        ("feedline.datasets.tables.arrow:Arrow",),
        "Arrow files and streams, Feather 2",
        ("Arrow(paths, columns)",),
        "arrow",
        pattern="**/*.{arrow,arrows,feather}",
        summarize="feedline.datasets.tables.arrow:summarize_record_batches",
    ),
    "orc": Format(
        "ORC",
        ("feedline.datasets.tables.orc:ORC",),
        "ORC files",
        ("ORC(paths, columns)",),
        "arrow",
        pattern="**/*.orc",
        summarize="feedline.datasets.tables.orc:summarize_stripes",
    ),
    "avro": Format(
        "Avro",
        ("feedline.datasets.tables.avro:Avro",),
        "Avro files",
        ("Avro(paths, columns)",),
        "avro",
        pattern="**/*.avro",
        summarize="feedline.datasets.tables.avro:summarize_blocks",
    ),
    "huggingface": Format(
        "Hugging Face",
        (
            "feedline.datasets.tables.huggingface:HuggingFace",
            "feedline.datasets.tables.huggingface_stream:HuggingFaceStream",
        ),
        "a dataset of Hugging Face",
        ("HuggingFace(dataset)", "HuggingFaceStream(dataset)"),
        "huggingface",
    ),
    "tfrecord": Format(
        "TFRecord",
        ("feedline.datasets.shards.tfrecord:TFRecord",),
        "TFRecord files",
        ("TFRecord(paths, columns)",),
        "tfrecord",
        "only to check checksums",
        pattern="*.tfrecord*",
    ),
    "jsonl": Format(
        "JSONL",
        ("feedline.datasets.text.lines:JSONL",),
        "JSON values, one a line",
        ("JSONL(paths, columns)",),
        pattern=f"**/*.{{jsonl,ndjson}}{_PACKED}",
    ),
    "csv": Format(
        "CSV",
        ("feedline.datasets.text.csv:CSV",),
        "CSV files",
        ("CSV(paths, columns)",),
        pattern=f"**/*.csv{_PACKED}",
    ),
    "lines": Format(
        "lines of text",
        ("feedline.datasets.text.lines:Lines",),
        "lines of text files",
        ("Lines(paths)",),
        pattern=f"**/*.txt{_PACKED}",
        named_only=True,  # next to other files, such a file may be a caption
    ),
    "litdata": Format(
        "LitData",
        ("feedline.datasets.shards.litdata:LitData", "feedline.datasets.shards.litdata_tokens:LitDataTokens"),
        "chunks of LitData",
        ("LitData(path)", "LitDataTokens(path, window)"),
        "litdata",
        "only if compressed or nested",
        markers=("index.json",),
        accepts="feedline.datasets.shards.litdata:is_index",
        summarize="feedline.datasets.shards.litdata:summarize_chunks",
    ),
    "mds": Format(  # after LitData: it accepts any other index.json, and its reader explains the damage of one
        "MDS",
        ("feedline.datasets.shards.mds:MDS",),
        "shards of Mosaic Streaming",
        ("MDS(paths)",),
        "mds",
        "only if compressed",
        markers=("index.json",),
        summarize="feedline.datasets.shards.mds:summarize_shards",
    ),
    "hdf5": Format(
        "HDF5",
        ("feedline.datasets.arrays.hdf5:HDF5",),
        "an HDF5 file",
        ("HDF5(paths, columns)",),
        "hdf5",
        pattern="**/*.{h5,hdf5}",
        summarize="feedline.datasets.arrays.hdf5:summarize_chunks",
    ),
    "zarr": Format(
        "Zarr",
        ("feedline.datasets.arrays.zarr:Zarr",),
        "Zarr stores, version 2 or 3",
        ("Zarr(paths, columns)",),
        "zarr",
        names=("*.zarr", "*.zarr.zip"),
        is_folder=True,
        markers=("zarr.json", ".zgroup", ".zarray"),
        summarize="feedline.datasets.arrays.zarr:summarize_chunks",
    ),
    "npy": Format(
        "NumPy arrays",
        ("feedline.datasets.arrays.npy:ArrayFile",),
        "`.npy` files, a `.npz` archive",
        ("ArrayFile(paths)",),
        pattern="**/*.npy",
        names=("*.npz",),
        summarize="feedline.datasets.arrays.npy:summarize_rows",
    ),
    "tokens": Format(
        "bare numbers",
        ("feedline.datasets.tokens:TokenFile", "feedline.datasets.tokens:TokenDocuments"),
        "files of token ids",
        ("TokenFile(paths, window)", "TokenDocuments(paths, offsets)"),
        names=("*.bin",),
        named_only=True,  # next to other files, such a file may be anything
        summarize="feedline.datasets.shard_summaries:uncounted",
    ),
    "lmdb": Format(
        "LMDB",
        ("feedline.datasets.lmdb.dataset:LMDB",),
        "an LMDB environment",
        ("LMDB(path)",),
        "lmdb",
        names=("*.lmdb", "*.mdb"),
        is_folder=True,
        markers=("data.mdb",),
        summarize="feedline.datasets.shard_summaries:uncounted",
    ),
    "sql": Format(
        "SQL",
        ("feedline.datasets.sql.manifest:SQLManifest",),
        "files listed in a database",
        ("SQLManifest(source, query, root=, key=)",),
        "sql",
        "SQLite needs nothing",
    ),
    "video": Format(
        "videos",
        ("feedline.datasets.media.clips:Clips",),
        "clips of videos",
        ("Clips(paths)",),
        "video",
        pattern="**/*.{mp4,m4v,mkv,webm,mov,avi,mpg,mpeg,wmv,flv,ogv}",
        precedence=1,  # lists of labels may be next to videos
        summarize="feedline.datasets.shard_summaries:uncounted",
    ),
    "audio": Format(
        "audio files",
        ("feedline.datasets.media.waveforms:Waveforms",),
        "ranges of audio files",
        ("Waveforms(paths)",),
        "audio",
        pattern="**/*.{wav,flac,ogg,oga,opus,mp3,aiff,aif,au,caf,w64}",
        precedence=1,
        summarize="feedline.datasets.shard_summaries:uncounted",
    ),
    "files": Format("files", ("feedline.datasets.files:Files",), "any files", ("Files(paths)",)),
}
"""The formats by name, in the order in which markers are tried; `register_format` adds to them."""


_added: dict[str, Format] = {}


def register_format(name: str, format: Format) -> None:  # noqa: A002 - the plain word for it
    """Add a format from outside feedline.

    Its datasets get names in `feedline.datasets`, and `feedline inspect` recognizes its files.

    To be recognized by `feedline inspect` without a call, an installed package declares its formats as entry points of
    the group `feedline.formats`, each a `Format`. ArgumentError if the name is taken by another format.
    """
    _check_types(name, format)
    if FORMATS.get(name, format) != format:
        raise ArgumentError(
            f"there is already a format {name!r} ({FORMATS[name].label}): register yours under another name"
        )
    if name in FORMATS:
        return
    taken = {_class_name(each): other for other, row in FORMATS.items() for each in row.datasets if other != name}
    for each in format.datasets:
        module, _, attribute = each.partition(":")
        if not (module and attribute):
            raise ArgumentError(
                f"datasets={format.datasets!r} of the format {name!r}: give 'module:class' for {each!r}"
            )
        if attribute in taken:
            raise ArgumentError(f"the format {taken[attribute]!r} has a dataset {attribute} already: rename yours")
    FORMATS[name] = _added[name] = format


def unregister_format(name: str) -> None:
    """Remove a registered format; ArgumentError if it is not registered."""
    if name not in _added:
        raise ArgumentError(f"unregister_format({name!r}): no such format was registered; there are {sorted(_added)}")
    del FORMATS[name], _added[name]


def _check_types(name: Any, row: Any) -> None:
    call = f"register_format({name!r})"
    if not (isinstance(name, str) and name):
        raise ArgumentError(f"{call}: the name of a format must be a string that is not empty, not {name!r}")
    if not isinstance(row, Format):
        raise ArgumentError(f"{call} takes a datasets.Format(...), not {type(row).__name__}")
    for field in ("label", "pattern", "unit", "index_suffix"):
        if not isinstance(value := getattr(row, field), str):
            raise ArgumentError(f"{call}: Format({field}=...) must be a string, not {value!r}")
    # A string is a sequence of strings, too: its letters would count as names.
    for field in ("datasets", "usage", "names", "markers"):
        value = getattr(row, field)
        if not (isinstance(value, tuple) and all(isinstance(each, str) for each in value)):
            raise ArgumentError(f"{call}: Format({field}=...) must be a tuple of strings, not {value!r}")
    for field in ("summarize", "list_samples", "index_targets"):
        value = getattr(row, field)
        if not (value is None or isinstance(value, str) or callable(value)):
            raise ArgumentError(f"{call}: Format({field}=...) must be a function or 'module:function', not {value!r}")


@cache
def register_installed() -> None:
    """Register the formats of installed packages, once.

    A format that cannot be loaded is logged and left out.
    """
    for point in entry_points(group=ENTRY_POINTS):
        try:
            register_format(point.name, point.load())
        except Exception as error:  # noqa: BLE001 - one broken package must not disable the others
            _log.warning("feedline: the format %s (%s) is left out: %s", point.name, point.value, error)


def reference_of(dataset: str) -> str | None:
    """The reference to a format's dataset of this name, or None."""
    return next((each for row in FORMATS.values() for each in row.datasets if _class_name(each) == dataset), None)


def _class_name(reference: str) -> str:
    return reference.partition(":")[2]
