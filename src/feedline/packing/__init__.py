"""From files to tar shards: `pack` writes them, resumable and with the same bytes each time.

`options` says what is wanted, `listing` finds the samples (with `folders` and `tars`), `contents` makes the members of
one (with `pictures`), `writing` puts them into a tar, `manifest` remembers what is finished, `destination` guards the
folder, `run` drives it all. `grids` knows the lengths of restart intervals (native/image/grid.h).
"""

from feedline.packing.grids import measured
from feedline.packing.listing import listed, tars_of
from feedline.packing.manifest import MANIFEST, Manifest
from feedline.packing.options import Options, ShardSize
from feedline.packing.run import Outcome, Progress, pack

__all__ = [
    "MANIFEST",
    "Manifest",
    "Options",
    "Outcome",
    "Progress",
    "ShardSize",
    "listed",
    "measured",
    "pack",
    "tars_of",
]
