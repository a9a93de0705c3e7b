"""Random access to the samples of tar shards, by index files.

`tar` walks the headers of a tar and groups members into samples. `sources` reads the tar from front to back.
`build_index` computes the arrays of an index, `index` gives access to them, and `index_files` finds, builds and stores
the index. `shards` opens tars and keeps some open. `columns` decodes fields, and `dataset` is `TarShards`.
"""

from feedline.datasets.formats import IMAGE_EXTENSIONS
from feedline.datasets.webdataset.index import Head, TarIndex
from feedline.datasets.webdataset.index_files import build_index, open_index, read_head, write_index
from feedline.datasets.webdataset.shards import MemberSpan, Shard, ShardCache, Tars
from feedline.datasets.webdataset.tar import CLASSES, ShardError, TarMember, is_image, members, split

__all__ = [
    "CLASSES",
    "IMAGE_EXTENSIONS",
    "Head",
    "MemberSpan",
    "Shard",
    "ShardCache",
    "ShardError",
    "TarIndex",
    "TarMember",
    "Tars",
    "build_index",
    "is_image",
    "members",
    "open_index",
    "read_head",
    "split",
    "write_index",
]
