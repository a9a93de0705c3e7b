"""Convert the corpus to LitData's chunks: bytes of the files and class numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from litdata import optimize

from task import in_random_order


def sample(item: tuple[str, int]) -> dict[str, Any]:
    return {"image": Path(item[0]).read_bytes(), "label": item[1]}


if __name__ == "__main__":
    files, target = sys.argv[1:]
    optimize(fn=sample, inputs=in_random_order(files), output_dir=target, chunk_bytes=1 << 26, num_workers=1)
