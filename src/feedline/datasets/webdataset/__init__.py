"""Tar shards at random access: the members of a tar, and the side-car index that says where each sample lies.

`reading` gives the bytes of a file or an object from front to back, `tar` walks headers, `names` groups members into
samples, `looks` sees what is in them, `table` makes the arrays of an index, `arrays` is the file that holds them,
`index` reads it, `sidecar` finds or builds it, `far_indexes` does so for objects. `near` and `far` are a tar of this
machine and one in a store, `cells` says where in them samples lie, `tars` are many of both, `opened` keeps some open.
"""

from feedline.datasets.formats import IMAGE_EXTENSIONS
from feedline.datasets.webdataset.index import Head, TarIndex
from feedline.datasets.webdataset.index_files import build_index, glance, open_index, write_index
from feedline.datasets.webdataset.shards import (
    Held,
    LocalShard,
    MemberSpan,
    RemoteShard,
    Shard,
    ShardCache,
    Tars,
)
from feedline.datasets.webdataset.tar import ShardError, TarMember, is_image, members, split

__all__ = [
    "IMAGE_EXTENSIONS",
    "Head",
    "Held",
    "LocalShard",
    "MemberSpan",
    "RemoteShard",
    "Shard",
    "ShardCache",
    "ShardError",
    "TarIndex",
    "TarMember",
    "Tars",
    "build_index",
    "glance",
    "is_image",
    "members",
    "open_index",
    "split",
    "write_index",
]
