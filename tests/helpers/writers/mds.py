"""Folders of MDS shards, written by Mosaic's own writer: `mds.py FOLDER`; `values.py` has their contents."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from slim import without_init
from values import MDS_COLUMNS, TEXT_COLUMNS, mds_samples, text_samples

without_init("streaming", "streaming.base")

from streaming.base.format.json.writer import JSONWriter  # noqa: E402 - the packages must be made importable first
from streaming.base.format.mds.writer import MDSWriter  # noqa: E402
from streaming.base.format.xsv.writer import CSVWriter, TSVWriter, XSVWriter  # noqa: E402

SETTINGS = {
    "plain": {},
    "hashed": {"hashes": ["sha1", "xxh3_64"]},
    "zstd": {"compression": "zstd:7", "hashes": ["sha1", "xxh64"]},
    "gz": {"compression": "gz"},
    "br": {"compression": "br:1"},
    "bz2": {"compression": "bz2"},
    "snappy": {"compression": "snappy"},
}


TEXT_SETTINGS = {
    "": {"size_limit": 200},
    "-zstd": {"size_limit": 200, "compression": "zstd:3", "hashes": ["sha1"]},
}


def main(folder: Path) -> None:
    for name, settings in SETTINGS.items():
        with MDSWriter(out=str(folder / name), columns=MDS_COLUMNS, size_limit=9000, **settings) as writer:
            for sample in mds_samples():
                writer.write(sample)
    with MDSWriter(out=str(folder / "pickled"), columns={"id": "int", "any": "pkl"}) as writer:
        writer.write({"id": 7, "any": {1}})
    writers = {"json": JSONWriter, "csv": CSVWriter, "tsv": TSVWriter, "xsv": partial(XSVWriter, separator="::")}
    for name, writer_of in writers.items():
        for ending, settings in TEXT_SETTINGS.items():
            with writer_of(out=str(folder / f"{name}{ending}"), columns=TEXT_COLUMNS, **settings) as writer:
                for sample in text_samples():
                    writer.write(sample)


main(Path(sys.argv[1]))
