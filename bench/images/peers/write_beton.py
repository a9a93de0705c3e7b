"""Convert the corpus to FFCV's file: "jpg" re-encodes every image at the same quality, "raw" stores pixels."""

from __future__ import annotations

import sys

import numpy as np
from ffcv.fields import IntField, RGBImageField
from ffcv.writer import DatasetWriter
from PIL import Image

from task import in_random_order


class CorpusDataset:
    def __init__(self, files: str) -> None:
        self.samples = in_random_order(files)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        path, label = self.samples[index]
        return np.asarray(Image.open(path).convert("RGB")), label


if __name__ == "__main__":
    files, target, mode = sys.argv[1:]
    fields = {"image": RGBImageField(write_mode=mode, jpeg_quality=90), "label": IntField()}
    DatasetWriter(target, fields, num_workers=2).from_indexed_dataset(CorpusDataset(files))
