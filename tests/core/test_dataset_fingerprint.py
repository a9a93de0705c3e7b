"""A state is refused for the same number of samples in another order."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pyarrow import feather
from torch.utils.data import ConcatDataset, Subset

import feedline as fl
from feedline.core.dataset_fingerprint import digest_of, listing_fingerprint_of
from feedline.datasets import Arrow, Files, Filter, Map, Parquet, TarShards, TokenFile, Zip
from feedline.errors import StateError

Make = Callable[[list[Path]], Any]

SHARDS = 4


@pytest.fixture
def tars(tmp_path: Path) -> list[Path]:
    return [_tar(tmp_path / "first" / f"{number}.tar", number) for number in range(SHARDS)]


def _tar(path: Path, number: int) -> Path:
    path.parent.mkdir(exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for sample in range(3):
            member = tarfile.TarInfo(f"{number}-{sample}.txt")
            member.size = 1
            tar.addfile(member, io.BytesIO(b"x"))
    return path


def _subset(data: TarShards, keys: tuple[str, ...]) -> Subset[Any]:
    return Subset(data, torch.tensor([at for at in range(len(data)) if data.address(at)[1] in keys]))  # type: ignore[arg-type]


def _identity(sample: Any) -> Any:
    return sample


@pytest.mark.parametrize(
    "make",
    [
        TarShards,
        Files,
        lambda paths: Map(TarShards(paths), _identity),
        lambda paths: Subset(TarShards(paths), range(4)),
        lambda paths: ConcatDataset([TarShards(path) for path in paths]),
        lambda paths: Zip(a=TarShards(paths), b=list(range(3 * SHARDS))),
    ],
)
def test_files_in_another_order_are_refused_and_the_same_elsewhere_are_not(
    make: Make, tars: list[Path], tmp_path: Path
) -> None:
    def loader(paths: list[Path]) -> fl.DataLoader[Any]:
        return fl.DataLoader(make(paths), 2, shuffle=True, seed=1, collate_fn=list)

    first = loader(tars)
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 1024
    copies = [path.rename(tmp_path / path.name) for path in tars]
    loader(copies).load_state_dict(state)
    with pytest.raises(StateError, match="in another order"):
        loader(copies[::-1]).load_state_dict(state)
    del state["fingerprint"]["listing"]  # as the message says; and as older versions wrote it
    loader(copies[::-1]).load_state_dict(state)


@pytest.mark.parametrize("choose", [lambda data, keys: Filter(data, lambda x: x["__key__"] in keys), _subset])
def test_other_samples_of_the_same_files_are_refused(choose: Any, tars: list[Path]) -> None:
    data = TarShards(tars)

    def loader(*keys: str) -> fl.DataLoader[Any]:
        return fl.DataLoader(choose(data, keys), 1, seed=1)

    first = loader("0-0", "1-1", "3-2")
    next(iter(first))
    state = json.loads(json.dumps(first.state_dict()))
    loader("0-0", "1-1", "3-2").load_state_dict(state)
    with pytest.raises(StateError, match="or a Filter, filters= or a Subset chose"):
        loader("0-0", "1-1", "3-1").load_state_dict(state)


def _parquets(folder: Path) -> list[Path]:
    for number in range(SHARDS):
        pq.write_table(pa.table({"x": [number] * (number + 1)}), folder / f"{number}.parquet")
    return sorted(folder.glob("*.parquet"))


def _tokens(folder: Path) -> list[Path]:
    for number in range(SHARDS):
        np.save(folder / f"{number}.npy", np.full(20 + number, number, np.uint16))
    return sorted(folder.glob("*.npy"))


def _arrows(folder: Path) -> list[Path]:
    for number in range(SHARDS):
        feather.write_feather(pa.table({"x": [number] * (number + 1)}), folder / f"{number}.arrow")
    return sorted(folder.glob("*.arrow"))


@pytest.mark.parametrize(
    ("write", "read"), [(_parquets, Parquet), (_arrows, Arrow), (_tokens, lambda paths: TokenFile(paths, 4))]
)
def test_shards_of_other_sizes_are_refused(write: Any, read: Any, tmp_path: Path) -> None:
    paths = write(tmp_path)
    first, other = read(paths), read([*paths[2:], *paths[:2]])
    assert len(first) == len(other)
    assert listing_fingerprint_of(first) != listing_fingerprint_of(other)
    assert listing_fingerprint_of(first) == listing_fingerprint_of(read(paths))


def test_other_rows_of_the_same_files_are_refused(tmp_path: Path) -> None:
    paths = _parquets(tmp_path)
    pq.write_table(pa.table({"x": [0, 1]}), paths[0])
    zeros, ones = (listing_fingerprint_of(Parquet(paths[0], filters=[("x", "==", value)])) for value in (0, 1))
    assert None not in (zeros, ones)
    assert zeros != ones


def test_any_order_of_many_is_distinguished() -> None:
    names = [f"a/{number}" for number in range(100_000)]
    digests = {digest_of(names), digest_of(names[::-1]), digest_of(names[1:] + names[:1]), digest_of(names[:-1])}
    assert len(digests) == 4
    assert digest_of(names) == digest_of([f"s3://b/{number}" for number in range(100_000)])


def test_samples_that_wander_from_file_to_file_are_distinguished() -> None:
    assert digest_of(["a", "b"], [3, 4]) != digest_of(["a", "b"], [4, 3])


def test_datasets_without_a_listing_have_no_digest() -> None:
    assert listing_fingerprint_of([1, 2]) is None
    assert listing_fingerprint_of(ConcatDataset([[1], [2]])) is None
