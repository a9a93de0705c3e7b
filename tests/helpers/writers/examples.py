"""A TFRecord file, written by the package `tfrecord`: `examples.py FOLDER`; `values.py` has its contents."""

from __future__ import annotations

import sys
from pathlib import Path

from tfrecord.writer import TFRecordWriter
from values import examples, sequences

writer = TFRecordWriter(str(Path(sys.argv[1], "two.tfrecord")))
for example in examples()[8:]:
    writer.write(example)
writer.close()
writer = TFRecordWriter(str(Path(sys.argv[1], "one.tfrecord")))
for example in examples()[:8]:
    writer.write(example)
writer.close()
writer = TFRecordWriter(str(Path(sys.argv[1], "sequences.bin")))
for context, lists in sequences():
    writer.write(context, lists)
writer.close()
