"""`RecordDataset`, the base of record formats, for a format from outside."""

from __future__ import annotations

import io
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import feedline as fl
from feedline.datasets import File, IndexRecipe, Record, RecordDataset, ShardOffsets, Stream
from feedline.datasets.file_objects import _PART_NBYTES
from feedline.errors import ArgumentError, SampleError
from feedline.stores.files import LocalFile, local_info


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


SCANNED: list[str] = []


def scan(file: File) -> dict[str, np.ndarray]:
    """Records of a fixed size, given by the first byte of a file; the index has their bounds once."""
    SCANNED.append(file.name)
    size = Stream(file).take(1)[0]
    return {"bounds": np.arange(1, file.nbytes + 1, size)}


def fits(file: File, arrays: Mapping[str, np.ndarray]) -> bool:
    (head,) = file.read([(0, 1)])
    return bool(np.diff(arrays["bounds"])[0] == head[0])


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    return shapes["bounds"][0] - 1


def span(arrays: Mapping[str, np.ndarray], row: int) -> tuple[int, int]:
    start, stop = arrays["bounds"][row : row + 2].tolist()
    return start, stop


RECIPE = IndexRecipe(lambda name: f"{name}.fixed-index", scan, fits, count, span)


def halved(sample: Any) -> Any:
    return {name: value // 2 for name, value in sample.items()}


def doubled(value: int) -> int:
    return 2 * value


class Fixed(RecordDataset):
    def __init__(self, paths: Any, **more: Any) -> None:
        super().__init__(paths, RECIPE, {"first": int, "sum": sum}, inside="*.fixed", **more)

    def fields(self, record: Record) -> dict[str, Any]:
        if record.data[0] == 250:
            raise SampleError("refused by the format")
        if record.data[0] == 251:
            raise ZeroDivisionError("bad data")
        return {"first": record.data[0], "sum": record.data} if record.data[0] != 252 else {"first": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/a.fixed").write_bytes(bytes([3, *range(12)]))
    (tmp_path / "data/b.fixed").write_bytes(bytes([2, *range(100, 104)]))
    (tmp_path / "data/other.txt").write_bytes(b"no record")
    return tmp_path / "data"


def test_a_recipe_counts_and_finds_records_in_its_own_way(folder: Path) -> None:
    dataset = Fixed(folder)
    assert dataset.shard_sizes.tolist() == [4, 2]
    assert [dataset[n] for n in (0, 3, -1)] == [
        {"first": 0, "sum": 3},
        {"first": 9, "sum": 30},
        {"first": 102, "sum": 205},
    ]
    assert [dataset.address(n) for n in (3, -2)] == [
        (str(folder / "a.fixed"), "record 3"),
        (str(folder / "b.fixed"), "record 0"),
    ]
    assert pickle.loads(pickle.dumps(dataset))[4] == dataset[4]


def test_transforms_of_samples_and_of_fields(folder: Path) -> None:
    assert Fixed(folder, transform=halved)[3] == {"first": 4, "sum": 15}
    assert Fixed(folder, transform={"first": doubled})[3] == {"first": 18, "sum": 30}
    with pytest.raises(ArgumentError, match=r"transform= names 'last'; known fields of a sample are first, sum"):
        Fixed(folder, transform={"last": doubled})


@pytest.mark.parametrize(
    ("first", "message"),
    [
        (250, "refused by the format"),
        (251, r"record 0 of .*c\.fixed cannot be read \(ZeroDivisionError: bad data\); copy the file again"),
        (252, r"record 0 of .*c\.fixed cannot be read \(KeyError: 'sum'\)"),
    ],
)
def test_errors_about_a_record_name_it(tmp_path: Path, first: int, message: str) -> None:
    (tmp_path / "c.fixed").write_bytes(bytes([1, first]))
    with pytest.raises(SampleError, match=message):
        Fixed(tmp_path / "c.fixed")[0]


def test_an_index_is_kept_and_one_next_to_an_object_is_used_if_it_fits(folder: Path, tmp_path: Path) -> None:
    SCANNED.clear()
    Fixed(folder, index_dir=tmp_path / "indexes")
    Fixed(folder, index_dir=tmp_path / "indexes")
    assert [Path(name).name for name in SCANNED] == ["a.fixed", "b.fixed"]
    Fixed(folder)
    shutil.copy(folder / "b.fixed.fixed-index", folder / "a.fixed.fixed-index")  # of another file
    memory: Any = MemoryFileSystem()
    try:
        for path in folder.iterdir():
            memory.pipe(f"/fixed/{path.name}", path.read_bytes())
        SCANNED.clear()
        far = Fixed("memory://fixed")
        assert SCANNED == ["memory://fixed/a.fixed"]
        assert [far[n] for n in range(6)] == [Fixed(folder / f"{name}.fixed")[n] for name, n in PLACES]
    finally:
        memory.rm("/fixed", recursive=True)


PLACES = [*(("a", n) for n in range(4)), ("b", 0), ("b", 1)]


def test_a_stream_takes_what_is_there_across_parts(tmp_path: Path) -> None:
    data = np.random.default_rng(0).integers(0, 256, _PART_NBYTES + 1000, np.uint8).tobytes()
    path = tmp_path / "x.bin"
    path.write_bytes(data)
    info = local_info(str(path))
    stream, taken = Stream(LocalFile(info.path, info.size, info.version)), io.BytesIO()
    for size in (0, 5, _PART_NBYTES - 10, 600, 0):
        taken.write(stream.take(size))
    assert stream.at == _PART_NBYTES + 595
    assert taken.getvalue() == data[: stream.at]
    for size in (406, -1):
        with pytest.raises(SampleError, match=rf"x\.bin claims {size} bytes at byte \d+, but 405 are left"):
            stream.take(size)
    assert stream.take(405) == data[-405:]


def test_the_framework_of_a_format_is_public() -> None:
    names = {"File", "IndexRecipe", "Record", "RecordDataset", "ShardOffsets", "Stream"}
    assert names <= set(fl.datasets.__all__)
    assert ShardOffsets([3, 0, 2]).one(3) == (2, 0)
