"""Folders of chunks, written by LitData's own writer: `litdata_chunks.py FOLDER`; `values.py` has their contents."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from litdata.streaming.item_loader import TokensLoader
from litdata.streaming.writer import BinaryWriter
from litdata.types import Jpeg
from values import LITDATA_KINDS, jpeg, litdata_samples

SETTINGS: dict[str, dict[str, Any]] = {
    **{level: {"compression": "zstd", "compression_level": level} for level in ("batch", "chunk", "sample")},
    **{tokens: {"chunk_bytes": 300, "item_loader": TokensLoader()} for tokens in ("tokens", "words")},
}
SETTINGS["batch"]["compression_batch_size"] = 3


def write(folder: Path, samples: list[Any], **settings: Any) -> None:
    if "chunk_bytes" not in settings:
        settings["chunk_size"] = 8
    writer = BinaryWriter(str(folder), **settings)
    for number, sample in enumerate(samples):
        writer[number] = sample
    writer.done()
    writer.merge()


def main(folder: Path) -> None:
    for kind in LITDATA_KINDS:
        write(folder / kind, litdata_samples(kind), **SETTINGS.get(kind, {}))
    write(folder / "pickled", [{"id": 7, "any": {1}}])
    write(folder / "images", [{"image": Jpeg(bytes=jpeg(i, (24, 18))), "label": i} for i in range(8)])


main(Path(sys.argv[1]))
