"""From files to tar shards: `pack` writes them, resumable and with the same bytes each time.

`options` says what is wanted, `listing` finds the samples (with `folders` and `tars`), `contents` makes the members of
one (with `pictures`), `writing` puts them into a tar, `manifest` remembers what is finished, `destination` guards the
folder, `run` drives it all. `grids` knows the lengths of restart intervals (native/image/grid.h).
"""

from feedline.cli.pack.encode import measured
from feedline.cli.pack.manifest import MANIFEST, Manifest
from feedline.cli.pack.options import PackOptions, ShardSize
from feedline.cli.pack.run import PackProgress, PackResult, pack
from feedline.cli.pack.sources import listed, tars_of

__all__ = [
    "MANIFEST",
    "Manifest",
    "PackOptions",
    "PackProgress",
    "PackResult",
    "ShardSize",
    "listed",
    "measured",
    "pack",
    "tars_of",
]
