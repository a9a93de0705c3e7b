"""Datasets: ordinary torch-style ones, which work in torch's own DataLoader too."""

from feedline.datasets.arrays.hdf5 import HDF5
from feedline.datasets.arrays.npy import ArrayFile, Arrays
from feedline.datasets.arrays.npy_layout import Raw
from feedline.datasets.arrays.zarr import Zarr
from feedline.datasets.cached_map import CachedMap
from feedline.datasets.files import Files
from feedline.datasets.imagefolder.dataset import ImageFolder
from feedline.datasets.lmdb.dataset import LMDB
from feedline.datasets.shards.litdata import LitData
from feedline.datasets.shards.litdata_tokens import LitDataTokens
from feedline.datasets.shards.mds import MDS
from feedline.datasets.shards.tfrecord import TFRecord
from feedline.datasets.sql.manifest import SQLManifest
from feedline.datasets.strings import PackedStrings
from feedline.datasets.tables.arrow import Arrow
from feedline.datasets.tables.huggingface import HuggingFace
from feedline.datasets.tables.huggingface_stream import HuggingFaceStream
from feedline.datasets.tables.parquet import Parquet
from feedline.datasets.text.csv import CSV
from feedline.datasets.text.lines import JSONL, Lines
from feedline.datasets.tokens import TokenDocuments, TokenFile
from feedline.datasets.webdataset.dataset import TarShards
from feedline.datasets.wrappers import Filter, Map, Zip

__all__ = [
    "CSV",
    "HDF5",
    "JSONL",
    "LMDB",
    "MDS",
    "ArrayFile",
    "Arrays",
    "Arrow",
    "CachedMap",
    "Files",
    "Filter",
    "HuggingFace",
    "HuggingFaceStream",
    "ImageFolder",
    "Lines",
    "LitData",
    "LitDataTokens",
    "Map",
    "PackedStrings",
    "Parquet",
    "Raw",
    "SQLManifest",
    "TFRecord",
    "TarShards",
    "TokenDocuments",
    "TokenFile",
    "Zarr",
    "Zip",
]
