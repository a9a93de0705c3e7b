"""Tar shards at random access: the members of a tar, and the side-car index that says where each sample lies.

`tar` walks headers, `names` groups members into samples, `table` makes the arrays of an index, `arrays` is the file
that holds them, `index` reads it, `sidecar` finds or builds it, `opened` keeps a set of tars mapped.
"""

from feedline.shards.index import Head, Index
from feedline.shards.names import IMAGE_EXTENSIONS, is_image, split
from feedline.shards.opened import Cell, OpenShard, OpenShards
from feedline.shards.sidecar import build_index, glance, open_index, write_index
from feedline.shards.tar import Member, ShardError, members

__all__ = [
    "IMAGE_EXTENSIONS",
    "Cell",
    "Head",
    "Index",
    "Member",
    "OpenShard",
    "OpenShards",
    "ShardError",
    "build_index",
    "glance",
    "is_image",
    "members",
    "open_index",
    "split",
    "write_index",
]
