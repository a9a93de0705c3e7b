"""States inside `torch.distributed.checkpoint`, and states of several ranks merged."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from process_cases import Faulty
from torch import multiprocessing
from torch.utils.data import DistributedSampler, IterableDataset, RandomSampler, WeightedRandomSampler, get_worker_info

import feedline as fl

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


class Stream(IterableDataset[Any]):
    """Numbers divided among the workers, with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        while first + self.at * step < 20:
            self.at += 1
            yield first + (self.at - 1) * step
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at), **{f"seen {number}": {} for number in range(self.at)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = int(state["at"])


def weighted() -> Any:
    return WeightedRandomSampler([1.0] * 12, 12, generator=torch.Generator().manual_seed(1))


MAKE: dict[str, Any] = {
    "shuffled without seed": lambda: fl.DataLoader(range(12), 2, shuffle=True),  # type: ignore[arg-type]
    "with a generator": lambda: fl.DataLoader(range(12), 2, sampler=weighted()),  # type: ignore[arg-type]
    "stream": lambda: fl.DataLoader(Stream(), 2),
    "stream with workers": lambda: fl.DataLoader(Stream(), 2, num_workers=2),
    "skipping": lambda: fl.DataLoader(Faulty(), 2, on_error="skip"),  # type: ignore[arg-type]
    "unseeded workers": lambda: fl.DataLoader(Drawing(), 2, num_workers=2),  # type: ignore[arg-type]
}


class Drawing(Faulty):
    """Draws its samples."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.rand(())


@pytest.mark.parametrize("name", MAKE)
def test_a_distributed_checkpoint_holds_all_of_the_state(name: str, tmp_path: Path) -> None:
    """It loads the keys that the state of a new loader has, and no others."""
    with MAKE[name]() as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state = {"loader": loader}
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
        expected = loader.state_dict()
        rest = [batch.tolist() for batch in batches]
    torch.manual_seed(99)
    with MAKE[name]() as again:
        dcp.load({"loader": again}, checkpoint_id=tmp_path, no_dist=True)
        assert again.state_dict() == expected
        assert [batch.tolist() for batch in again] == rest


RANKS: dict[str, Any] = {
    "seed": lambda: fl.DataLoader(range(16), 2, shuffle=True, seed=3, distributed="auto"),  # type: ignore[arg-type]
    "DistributedSampler": lambda: fl.DataLoader(range(16), 2, sampler=DistributedSampler(range(16))),  # type: ignore[arg-type]
    "stream": lambda: fl.DataLoader(Stream(), 2),
}


def resume_in_rank(rank: int, folder: Path) -> None:
    """Program of one of two ranks: save in mid-epoch, load, and compare the rest."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    for name, make in RANKS.items():
        key = f"loader of rank {rank}" if name == "stream" else "loader"
        loader = make()
        batches = iter(loader)
        first = [next(batches).tolist() for _ in range(2)]
        dcp.save({key: loader}, checkpoint_id=folder / name)
        again = make()
        dcp.load({key: again}, checkpoint_id=folder / name)
        rest = [batch.tolist() for batch in batches]
        assert [batch.tolist() for batch in again] == rest, name
        assert len(first + rest) == (10 if name == "stream" else 4)
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore")
def test_two_ranks_save_and_load(tmp_path: Path) -> None:
    multiprocessing.start_processes(resume_in_rank, (tmp_path,), 2, start_method="fork")


@pytest.mark.parametrize("name", MAKE)
def test_a_state_has_the_same_keys_at_every_step(name: str) -> None:
    with MAKE[name]() as loader:
        shapes = [nested_keys(loader.state_dict())]
        for _ in loader:
            shapes.append(nested_keys(loader.state_dict(random=len(shapes) % 2 == 0)))
        shapes.append(nested_keys(loader.state_dict()))
    assert all(shape == shapes[0] for shape in shapes)


def nested_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: nested_keys(item) for key, item in value.items()}
    assert not isinstance(value, list) or not any(isinstance(item, (dict, torch.Tensor)) for item in value)
    return None


class Lanes(IterableDataset[int]):
    """Two partitions of four numbers."""

    num_partitions = 2

    def partition(self, partition: int, epoch: int) -> Iterator[int]:
        return iter(range(partition, 8, 2))

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_states_merged_again_and_again_forget_no_partition() -> None:
    merged, seen = None, []
    for _ in range(4):
        loaders: list[Any] = [fl.DataLoader(Lanes(), 1, distributed=(rank, 2)) for rank in (0, 1)]
        for loader in loaders:
            if merged is not None:
                loader.load_state_dict(merged)
        seen.append([int(batch) for loader in loaders for batch in islice(loader, 1)])
        merged = fl.merge_states([loader.state_dict() for loader in loaders])
    assert seen == [[0, 1], [2, 3], [4, 5], [6, 7]]


def test_states_merged_again_count_a_failed_sample_once() -> None:
    merged = None
    for steps in (2, 1):
        loaders: list[Any] = [fl.DataLoader(Faulty(), 2, on_error="skip", distributed=(rank, 2)) for rank in (0, 1)]  # type: ignore[arg-type]
        for loader in loaders:
            if merged is not None:
                loader.load_state_dict(merged)
            for _ in zip(range(steps), loader, strict=False):
                pass
        merged = fl.merge_states([loader.state_dict() for loader in loaders])
        assert merged["skipped"]["count"] == merged["skipped"]["this_epoch"] == 2
        assert sorted(index for _, _, index in merged["skipped"]["latest"]) == [3, 4]


def test_the_order_of_later_epochs_continues_from_a_generator_of_the_user() -> None:
    def make() -> Any:
        sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(3))
        return fl.DataLoader(range(12), 2, sampler=sampler)  # type: ignore[arg-type]

    loader, again = make(), make()
    list(loader)
    again.load_state_dict(loader.state_dict())
    assert [batch.tolist() for batch in again] == [batch.tolist() for batch in loader]


def test_the_order_of_later_epochs_continues_with_the_generators_of_the_process() -> None:
    torch.manual_seed(1)
    loader = MAKE["shuffled without seed"]()
    next(iter(loader))
    state = loader.state_dict(random=True)
    again = MAKE["shuffled without seed"]()
    orders = []
    for each in (again, again):
        torch.manual_seed(2)
        each.load_state_dict(state)
        orders.append([[batch.tolist() for batch in each] for _ in range(2)])
    assert orders[0] == orders[1]
    assert sorted(index for batch in orders[0][1] for index in batch) == list(range(12))
