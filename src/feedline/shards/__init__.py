"""Tar shards at random access: the members of a tar, and the side-car index that says where each sample lies.

`reading` gives the bytes of a file or an object from front to back, `tar` walks headers, `names` groups members into
samples, `looks` sees what is in them, `table` makes the arrays of an index, `arrays` is the file that holds them,
`index` reads it, `sidecar` finds or builds it, `far_indexes` does so for objects. `near` and `far` are a tar of this
machine and one in a store, `cells` says where in them samples lie, `tars` are many of both, `opened` keeps some open.
"""

from feedline.shards.cells import Cell
from feedline.shards.far import FarShard, Fetched, Held
from feedline.shards.index import Head, Index
from feedline.shards.names import IMAGE_EXTENSIONS, is_image, split
from feedline.shards.near import OpenShard
from feedline.shards.opened import OpenShards
from feedline.shards.sidecar import build_index, glance, open_index, write_index
from feedline.shards.tar import Member, ShardError, members
from feedline.shards.tars import Shard, Tars

__all__ = [
    "IMAGE_EXTENSIONS",
    "Cell",
    "FarShard",
    "Fetched",
    "Head",
    "Held",
    "Index",
    "Member",
    "OpenShard",
    "OpenShards",
    "Shard",
    "ShardError",
    "Tars",
    "build_index",
    "glance",
    "is_image",
    "members",
    "open_index",
    "split",
    "write_index",
]
