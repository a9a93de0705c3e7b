"""check_format passes feedline's formats and names the faults of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from extensions import registered

import feedline as fl
from feedline.datasets import File, IndexRecipe, Record, RecordDataset
from feedline.stores import SCHEMES
from feedline.testing import check_dataset, check_format

FILES = {"a.bin": bytes(range(40)), "b/c.bin": bytes(range(100, 108))}


def scan(file: File) -> dict[str, np.ndarray]:
    """Records of four bytes."""
    if file.nbytes % 4:
        raise fl.errors.SampleError(f"{file.name} is truncated")
    starts = np.arange(0, file.nbytes, 4)
    return {"starts": starts, "stops": starts + 4}


def fits(file: File, arrays: Mapping[str, np.ndarray]) -> bool:
    return bool(arrays["stops"][-1] == file.nbytes)


class Words(RecordDataset):
    """A format that keeps every promise."""

    recipe = IndexRecipe(lambda name: f".{name}.index", scan, fits)

    def __init__(self, paths: Any, **more: Any) -> None:
        super().__init__(paths, self.recipe, {"word": "bytes"}, inside="**/*.bin", **more)

    def fields(self, record: Record) -> dict[str, Any]:
        return {"word": record.data}


class WrongSizes(Words):
    @property
    def shard_sizes(self) -> Any:
        return super().shard_sizes + 1


class NoRanges(Words):
    def ranges(self, indices: Any) -> list[Any]:
        return []


class FewRanges(Words):
    def ranges(self, indices: Any) -> list[Any]:
        return super().ranges(indices)[:1]


class OtherPlaces(Words):
    def address(self, index: int) -> tuple[str, str]:
        return "somewhere", "0"


class OtherSamples(Words):
    """Samples that depend on the folder of the files."""

    def fields(self, record: Record) -> dict[str, Any]:
        return {"word": bytes(record.data) + self.paths[0][:4].encode()}


def scan_whole(file: File) -> dict[str, np.ndarray]:
    """The complete records; a truncated one is ignored silently."""
    starts = np.arange(0, file.nbytes - 3, 4)
    return {"starts": starts, "stops": starts + 4}


class Careless(Words):
    recipe = IndexRecipe(lambda name: f".{name}.index", scan_whole, fits)


class HidesChanges(Words):
    """Samples that were all read when the dataset was opened."""

    def __init__(self, paths: Any, **more: Any) -> None:
        super().__init__(paths, **more)
        self._held = {} if "cache" in more else dict(enumerate(self.__getitems__(list(range(len(self))))))

    def __getitem__(self, index: int) -> Any:
        return self._held[index] if index in self._held else super().__getitem__(index)


def test_a_format_passes() -> None:
    check_format(Words, FILES, collate_fn=list)
    check_format(Careless, FILES, collate_fn=list, checks_length=False)
    check_format(fl.datasets.Lines, {"a.txt": b"one\ntwo\n", "b.txt": b"three\n"}, checks_length=False)
    assert "feedline-check" not in SCHEMES


def test_the_example_passes_without_images() -> None:
    with registered():
        words = {"a.rec": b"\x0a\x23\xd7\xce" + (28).to_bytes(4, "little") + bytes(28)}
        check_format(lambda root, **more: fl.datasets.RecordIO(root, decode="bytes", **more), words, collate_fn=list)


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks of the dataset itself, which formats that break other promises pass, start no worker processes."""
    monkeypatch.setattr("feedline.testing.formats.check_dataset", partial(check_dataset, methods=()))


@pytest.mark.usefixtures("without_processes")
@pytest.mark.parametrize(
    ("open_dataset", "message"),
    [
        (WrongSizes, "shard_sizes must add up to 12 samples, not 14"),
        (OtherPlaces, "address must name a file below .*near, not somewhere"),
        (NoRanges, "ranges must name the data read from a store with a cache"),
        (FewRanges, "ranges must name all data that are read, but more were fetched"),
        (OtherSamples, "files in a store must give the same samples as files of this machine: .*'word'"),
        (Careless, "a truncated file must raise SampleError, but the read succeeded"),
        (HidesChanges, "an object that changed must raise ObjectChangedError, but the read succeeded"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_broken_is_named(open_dataset: Callable[..., Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_format(open_dataset, FILES, collate_fn=list)
    assert "feedline-check" not in SCHEMES


@pytest.mark.usefixtures("without_processes")
def test_other_errors_are_quoted() -> None:
    def open_dataset(root: str, **more: Any) -> Any:
        if Path(root).name == "cut":
            raise KeyError("no such thing")
        return Words(root, **more)

    with pytest.raises(AssertionError, match=r"a truncated file must raise SampleError, but raised KeyError"):
        check_format(open_dataset, FILES, collate_fn=list)
