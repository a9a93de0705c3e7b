"""`pack`: samples to tar shards, resumable and with reproducible bytes.

`options` configures a run, `encode` builds the members of one sample, `writer` writes
them into a tar, `manifest` records finished shards, and `run` lists the samples and drives the work.
"""

from feedline.cli.pack.manifest import MANIFEST, Manifest
from feedline.cli.pack.options import PackOptions, ShardSize
from feedline.cli.pack.run import PackProgress, PackResult, pack

__all__ = [
    "MANIFEST",
    "Manifest",
    "PackOptions",
    "PackProgress",
    "PackResult",
    "ShardSize",
    "pack",
]
