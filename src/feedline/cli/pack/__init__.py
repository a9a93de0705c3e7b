"""`pack`: samples to tar shards, resumable and with reproducible bytes.

`options` configures a run, `encode` builds the members of one sample, and `manifest` records finished shards. `run`
lists the samples, drives the work, and writes the tars.
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
