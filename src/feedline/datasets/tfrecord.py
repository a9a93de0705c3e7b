"""`TFRecord`: the records of TFRecord files, in any order, without TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.arrays import Transform
from feedline.datasets.decoding import Decode, Decoding, Step, split_transform
from feedline.datasets.files import Pathlike
from feedline.datasets.lazily import Lazily
from feedline.datasets.paths import Paths, matching
from feedline.datasets.records import Records
from feedline.datasets.sidecars import SideCar
from feedline.datasets.tfrecord_features import ChosenFeatures, EveryFeature, Feature
from feedline.datasets.tfrecord_index import HEAD_NBYTES, TAIL_NBYTES, indexed, mapped
from feedline.errors import ArgumentError


class TFRecord(Records):
    """The records of TFRecord files: `tf.train.Example` messages as dicts.

    `features` says what to take and as what, by name: a dtype for one number; `(dtype, shape)` for a tensor, of which
    one side may be -1; "bytes", "text", "npy", "image" or a function of the bytes for what one `bytes` value holds.
    None takes every feature: numbers as 1-D tensors, `bytes` as lists. `transform` is a function of the sample, or
    functions by feature. With `decode`, records are not examples: it is "bytes" or another of these words.

    A side-car beside each file (in the folder `index` where given) says where records lie; `check` compares the
    checksums of all of them when it is made.
    """

    def __init__(
        self,
        paths: Paths,
        features: Mapping[str, Feature] | None = None,
        *,
        decode: Decode | None = None,
        transform: Transform | Mapping[str, Transform] | None = None,
        check: bool = True,
        index: Pathlike | None = None,
    ) -> None:
        by_feature, whole = split_transform(transform, features)
        if decode is not None and features is not None:
            raise ArgumentError("features= describes examples, and with decode= the records are none")
        self.paths = matching(paths, "*.tfrecord*")
        indexes = [indexed(path, check, index) for path in self.paths]
        self._firsts = np.cumsum([0, *(each.shapes["starts"][0] - 1 for each in indexes)])
        self._decoding = _decoding(features, by_feature, decode)
        self._step = Step(whole)
        self._files = Lazily(partial(_opened, tuple(zip(self.paths, indexes, strict=True))), len(indexes))

    @property
    def shard_sizes(self) -> NDArray[np.int64]:
        """The records of each file, for `ShardShuffled`."""
        return np.diff(self._firsts)

    def __len__(self) -> int:
        return int(self._firsts[-1])

    def _sample(self, at: int, row: int | None) -> Any:
        file = int(np.searchsorted(self._firsts, at, side="right")) - 1
        number = at - int(self._firsts[file])
        record = self._files[file].record(number)
        return self._step(self._decoding(record, row, lambda: f"record {number} of {self.paths[file]}"), row)


class _Opened:
    """A file, and where its records begin; both mapped."""

    def __init__(self, path: str, index: SideCar) -> None:
        index.refuse_changed()
        self._data, self._starts = mapped(path).data, index.opened()["starts"]

    def record(self, number: int) -> bytes:
        start, stop = self._starts[number : number + 2].tolist()
        return bytes(self._data[start + HEAD_NBYTES : stop - TAIL_NBYTES])


def _opened(files: tuple[tuple[str, SideCar], ...], number: int) -> _Opened:
    return _Opened(*files[number])


def _decoding(
    features: Mapping[str, Feature] | None, by_feature: Mapping[str, Transform], decode: Decode | None
) -> Decoding | EveryFeature | ChosenFeatures:
    if decode is not None:
        return Decoding(decode)
    return EveryFeature() if features is None else ChosenFeatures(features, by_feature)
