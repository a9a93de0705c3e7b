"""Datasets in PyTorch's map-style protocol, which torch's DataLoader can read, too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from feedline.datasets.formats import (
    FORMATS,
    Format,
    ShardSummary,
    load,
    reference_of,
    register_format,
    unregister_format,
)

if TYPE_CHECKING:
    from feedline.core.shard_offsets import ShardOffsets
    from feedline.datasets.arrays.hdf5 import HDF5
    from feedline.datasets.arrays.npy import ArrayFile, Arrays
    from feedline.datasets.arrays.npy_layout import Raw
    from feedline.datasets.arrays.zarr import Zarr
    from feedline.datasets.base import Record
    from feedline.datasets.cached_map import CachedMap
    from feedline.datasets.file_objects import Stream
    from feedline.datasets.files import Files
    from feedline.datasets.imagefolder.dataset import ImageFolder
    from feedline.datasets.indexes import IndexRecipe
    from feedline.datasets.lmdb.dataset import LMDB
    from feedline.datasets.media.clips import Clips
    from feedline.datasets.media.waveforms import Waveforms
    from feedline.datasets.records import RecordDataset
    from feedline.datasets.resident.dataset import DeviceDataset
    from feedline.datasets.sample_lists import IndexTarget, Sample, SampleList, SamplePart
    from feedline.datasets.shards.litdata import LitData
    from feedline.datasets.shards.litdata_tokens import LitDataTokens
    from feedline.datasets.shards.mds import MDS
    from feedline.datasets.shards.tfrecord import TFRecord
    from feedline.datasets.sql.manifest import SQLManifest
    from feedline.datasets.strings import PackedStrings
    from feedline.datasets.tables.arrow import Arrow
    from feedline.datasets.tables.avro import Avro
    from feedline.datasets.tables.huggingface import HuggingFace
    from feedline.datasets.tables.huggingface_stream import HuggingFaceStream
    from feedline.datasets.tables.orc import ORC
    from feedline.datasets.tables.parquet import Parquet
    from feedline.datasets.text.csv import CSV
    from feedline.datasets.text.lines import JSONL, Lines
    from feedline.datasets.tokens import TokenDocuments, TokenFile
    from feedline.datasets.webdataset.dataset import TarShards
    from feedline.datasets.wrappers import Filter, Map, Zip
    from feedline.stores.files import File

__all__ = [
    "CSV",
    "FORMATS",
    "HDF5",
    "JSONL",
    "LMDB",
    "MDS",
    "ORC",
    "ArrayFile",
    "Arrays",
    "Arrow",
    "Avro",
    "CachedMap",
    "Clips",
    "DeviceDataset",
    "File",
    "Files",
    "Filter",
    "Format",
    "HuggingFace",
    "HuggingFaceStream",
    "ImageFolder",
    "IndexRecipe",
    "IndexTarget",
    "Lines",
    "LitData",
    "LitDataTokens",
    "Map",
    "PackedStrings",
    "Parquet",
    "Raw",
    "Record",
    "RecordDataset",
    "SQLManifest",
    "Sample",
    "SampleList",
    "SamplePart",
    "ShardOffsets",
    "ShardSummary",
    "Stream",
    "TFRecord",
    "TarShards",
    "TokenDocuments",
    "TokenFile",
    "Waveforms",
    "Zarr",
    "Zip",
    "register_format",
    "unregister_format",
]


_OF_NO_FORMAT = {
    "Arrays": "feedline.datasets.arrays.npy:Arrays",
    "File": "feedline.stores.files:File",
    "CachedMap": "feedline.datasets.cached_map:CachedMap",
    "DeviceDataset": "feedline.datasets.resident.dataset:DeviceDataset",
    "Filter": "feedline.datasets.wrappers:Filter",
    "IndexRecipe": "feedline.datasets.indexes:IndexRecipe",
    "IndexTarget": "feedline.datasets.sample_lists:IndexTarget",
    "Map": "feedline.datasets.wrappers:Map",
    "PackedStrings": "feedline.datasets.strings:PackedStrings",
    "Raw": "feedline.datasets.arrays.npy_layout:Raw",
    "Record": "feedline.datasets.base:Record",
    "RecordDataset": "feedline.datasets.records:RecordDataset",
    "Sample": "feedline.datasets.sample_lists:Sample",
    "SampleList": "feedline.datasets.sample_lists:SampleList",
    "SamplePart": "feedline.datasets.sample_lists:SamplePart",
    "ShardOffsets": "feedline.core.shard_offsets:ShardOffsets",
    "Stream": "feedline.datasets.file_objects:Stream",
    "Zip": "feedline.datasets.wrappers:Zip",
}


def __getattr__(name: str) -> Any:
    reference = _OF_NO_FORMAT.get(name) or reference_of(name)
    if reference is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = load(reference)
    if name in __all__:  # removed again when the format is unregistered
        globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
