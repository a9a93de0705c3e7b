"""`pack`: samples to tar shards, resumable and with reproducible bytes.

`options` configures a run, `sources` lists the samples, `encode` builds the members of one sample, `writer` writes
them into a tar, `manifest` records finished shards, and `run` drives the work.
"""

from feedline.cli.pack.encode import measure_intervals
from feedline.cli.pack.manifest import MANIFEST, Manifest
from feedline.cli.pack.options import PackOptions, ShardSize
from feedline.cli.pack.run import PackProgress, PackResult, pack
from feedline.cli.pack.sources import find_tars, list_samples

__all__ = [
    "MANIFEST",
    "Manifest",
    "PackOptions",
    "PackProgress",
    "PackResult",
    "ShardSize",
    "find_tars",
    "list_samples",
    "measure_intervals",
    "pack",
]
