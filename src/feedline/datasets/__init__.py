"""Datasets: ordinary torch-style ones, which work in torch's own DataLoader too."""

from feedline.datasets.arrays import ArrayFile, Arrays
from feedline.datasets.arrow import Arrow
from feedline.datasets.cached_map import CachedMap
from feedline.datasets.combining import Map, Zip
from feedline.datasets.csv_rows import CSV
from feedline.datasets.file_list import Files
from feedline.datasets.files import Raw
from feedline.datasets.filtering import Filter
from feedline.datasets.hdf5 import HDF5
from feedline.datasets.huggingface import HuggingFace
from feedline.datasets.huggingface_stream import HuggingFaceStream
from feedline.datasets.image_folder import ImageFolder
from feedline.datasets.lines import JSONL, Lines
from feedline.datasets.litdata import LitData
from feedline.datasets.litdata_tokens import LitDataTokens
from feedline.datasets.lmdb import LMDB
from feedline.datasets.mds import MDS
from feedline.datasets.parquet import Parquet
from feedline.datasets.sql_manifest import SQLManifest
from feedline.datasets.strings import PackedStrings
from feedline.datasets.tar_shards import TarShards
from feedline.datasets.tfrecord import TFRecord
from feedline.datasets.tokens import TokenDocuments, TokenFile
from feedline.datasets.zarr import Zarr

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
