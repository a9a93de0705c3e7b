"""Datasets read by threads while others open, copy and drop them, and loaders with threads close."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from format_cases import equal

import feedline as fl
from formats.suite import Corpus

HELD_OPEN = ["lmdb", "hdf5", "zarr 3", "npz", "tar, one open", "mds, zstd", "litdata, rows", "parquet", "avro"]
"""Formats whose files stay open, or whose content stays decoded."""

READS = 30


def read_often(dataset: Any, expected: list[Any], first: int, problems: list[str]) -> None:
    for turn in range(READS):
        index = (first + 7 * turn) % len(expected)
        try:
            one, two = dataset[index], dataset.__getitems__([index, 0])
        except Exception as error:  # noqa: BLE001 - reported by the test
            problems.append(repr(error))
            return
        if not (equal(one, expected[index]) and equal(two, [expected[index], expected[0]])):
            problems.append(f"sample {index} differs")


@pytest.mark.parametrize("corpus", HELD_OPEN, indirect=True)
def test_readers_do_not_notice_that_others_close(corpus: Corpus, tmp_path: Path) -> None:
    for name, data in corpus.files.items():
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    open_one: Callable[[], Any] = lambda: corpus.format.open(str(tmp_path / "data"))  # noqa: E731 - one line
    dataset, problems = open_one(), list[str]()
    expected = [dataset[i] for i in range(len(dataset))]
    readers = [threading.Thread(target=read_often, args=(dataset, expected, i, problems)) for i in range(3)]
    for reader in readers:
        reader.start()
    while any(reader.is_alive() for reader in readers):
        assert equal(open_one()[0], expected[0])
        assert equal(pickle.loads(pickle.dumps(dataset))[1], expected[1])
        with fl.DataLoader(dataset, 4, num_workers=2, worker_method="thread", collate_fn=list) as loader:
            next(iter(loader))
    for reader in readers:
        reader.join()
    assert not problems
