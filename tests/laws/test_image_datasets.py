"""Folders of images and tar shards keep the laws, with augmentation: agreement, exact resume, each sample once."""

from __future__ import annotations

import tarfile
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from tar_cases import image_members, image_shards, write_tar

import feedline as fl
from feedline import transforms as T
from feedline.datasets import ImageFolder, TarShards
from feedline.datasets.webdataset import build_index, split

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
CROP = T.Compose([T.RandomResizedCrop(24), T.RandomHorizontalFlip()])
N = 17


def foreign(image: Any, rng: Any) -> torch.Tensor:
    """A random transform of the user's own."""
    return torch.from_numpy(np.asarray(image.resize((16, 16))) + rng.integers(0, 9, (16, 16, 1), np.uint8))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("laws")
    for name, data in image_members(N).items():
        if name.endswith(".jpg"):
            path = root / "folder" / f"class {int(name[:4]) % 3}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    (root / "tars").mkdir()
    image_shards(root / "tars", [5, 1, 8, 3])
    return root


def dataset(name: str, root: Path) -> Any:
    if name.startswith("folder"):
        return ImageFolder(root / "folder", foreign if name.endswith("foreign") else CROP)
    if name == "dicts":
        return TarShards(root / "tars", transform={"jpg": CROP}, open_files=1)
    return TarShards(
        root / "tars",
        ("png;jpg", "cls"),
        transform={"jpg": foreign if name.endswith("foreign") else CROP},
        open_files=2,
    )


KINDS = ["folder", "folder, foreign", "tars", "tars, foreign", "dicts"]
CREWS = [("thread", 0), ("thread", 2), ("process", 1), ("process", 2)]


def loader(name: str, root: Path, batch_size: int, seed: int, crew: tuple[str, int]) -> Any:
    return fl.DataLoader(
        dataset(name, root), batch_size, shuffle=True, seed=seed, worker_method=crew[0], num_workers=crew[1]
    )


def values(batches: Any) -> list[Any]:
    """Copies that outlive their loader."""
    flat = [list(batch.values()) if isinstance(batch, dict) else batch for batch in batches]
    return [[part.tolist() if isinstance(part, torch.Tensor) else list(part) for part in batch] for batch in flat]


@given(st.sampled_from(KINDS), st.integers(1, N), st.integers(0, 2**63), st.sampled_from(CREWS[1:]))
@law_settings(at_most=10, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_every_kind_of_worker_gives_the_same_batches(
    root: Path, name: str, batch_size: int, seed: int, crew: tuple[str, int]
) -> None:
    with loader(name, root, batch_size, seed, CREWS[0]) as alone, loader(name, root, batch_size, seed, crew) as crewed:
        for _ in range(2):
            assert values(alone) == values(crewed)


@given(
    st.sampled_from(KINDS),
    st.integers(1, 6),
    st.integers(0, 2**63),
    st.sampled_from(CREWS),
    st.sampled_from(CREWS),
    st.integers(0, 30),
)
@law_settings(at_most=10, because=Reason.PROCESSES, suppress_health_check=CHECKS)
def test_resume_in_mid_epoch_is_exact(
    root: Path, name: str, batch_size: int, seed: int, before: tuple[str, int], after: tuple[str, int], cut: int
) -> None:
    with loader(name, root, batch_size, seed, CREWS[0]) as whole:
        wanted = values(whole)
    cut %= len(wanted)
    with loader(name, root, batch_size, seed, before) as first:
        iterator = iter(first)
        head = values(next(iterator) for _ in range(cut))
        state = first.state_dict()
    with loader(name, root, batch_size, seed, after) as second:
        second.load_state_dict(state)
        assert head + values(second) == wanted


def fresh(folder: Path) -> Path:
    """A folder of its own for each example: a tar that is written again within one tick of the clock looks the same."""
    return Path(tempfile.mkdtemp(dir=folder))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any), st.integers(0, 99), st.integers(1, 4))
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_any_order_of_shards_gives_each_sample_once(tmp_path: Path, sizes: list[int], seed: int, most: int) -> None:
    first, paths, folder = 0, [], fresh(tmp_path)
    for number, size in enumerate(sizes):
        members = {f"{at}.{field}": str(at).encode() for at in range(first, first + size) for field in ("cls", "txt")}
        paths.append(write_tar(folder / f"{number}.tar", members))
        first += size
    data = TarShards(paths, ("__key__", "cls", "txt"), open_files=most)
    sampler = fl.samplers.ShardShuffled(data.shard_sizes, seed=seed, window=2)
    seen = [row for batch in fl.DataLoader(data, batch_size=3, sampler=sampler) for row in zip(*batch, strict=True)]
    assert all(key == text == str(int(number)) for key, number, text in seen)
    assert sorted(int(number) for _, number, _ in seen) == list(range(first))


FIELDS = st.sampled_from(["jpg", "cls", "JSON", "a.txt"])
NAMES = st.tuples(st.sampled_from(["", "d/", "d.e/"]), st.sampled_from("abc"), FIELDS)


@given(st.lists(NAMES, unique_by=lambda name: (name[0], name[1], name[2].lower()), min_size=1), st.randoms())
@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=CHECKS)
def test_samples_are_grouped_by_key_for_any_order_of_members(tmp_path: Path, found: list[Any], random: Any) -> None:
    members = {f"{folder}{stem}.{field}": random.randbytes(random.randrange(3)) for folder, stem, field in found}
    path = write_tar(fresh(tmp_path) / "x.tar", members, format=tarfile.USTAR_FORMAT)
    wanted: dict[str, dict[str, bytes]] = {}
    for name, data in members.items():
        key, field = split(name) or ("", "")
        wanted.setdefault(key, {})[field] = data
    samples = [TarShards(path, decode=False)[at] for at in range(len(wanted))]
    assert {sample.pop("__key__"): sample for sample in samples} == wanted
    assert list(build_index(path).keys) == list(wanted)
