"""Convert the corpus to Mosaic's shards: bytes of the files and class numbers."""

from __future__ import annotations

import sys
from pathlib import Path

from streaming import MDSWriter

from task import in_random_order

if __name__ == "__main__":
    files, target = sys.argv[1:]
    with MDSWriter(out=target, columns={"image": "bytes", "label": "int"}, size_limit=1 << 26) as writer:
        for path, label in in_random_order(files):
            writer.write({"image": Path(path).read_bytes(), "label": label})
