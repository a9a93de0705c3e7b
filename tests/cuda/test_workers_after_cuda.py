"""Workers of all kinds, started after this process has initialized CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

import feedline as fl

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    # A fork that a test asks for; CUDA has threads.
    pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning"),
]


class Squares(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((50_000,), index * index)


class Streamed(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter(Squares()[number] for number in range(40))


def on_device() -> None:
    """Initialize CUDA, and have work of all kinds behind and ahead."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.ones(100, device="cuda").sum().item()
    torch.ones(10).pin_memory()
    torch.cuda._sleep(50_000_000)


@pytest.mark.parametrize(
    "kind",
    [
        {"worker_method": "thread"},
        {"worker_method": "process"},
        *({"worker_method": "process", "multiprocessing_context": name} for name in ("fork", "forkserver", "spawn")),
    ],
    ids=lambda kind: "-".join(kind.values()),
)
def test_batches_arrive_whatever_starts_the_workers(kind: dict[str, str]) -> None:
    on_device()
    arguments: dict[str, Any] = {"batch_size": 4, "num_workers": 2, "device": "cuda", **kind}
    with fl.DataLoader(Squares(), **arguments) as loader:
        for _ in range(2):
            batches = list(loader)
            assert all(batch.is_cuda for batch in batches)
            assert [value for batch in batches for value in batch[:, -1].tolist()] == [n * n for n in range(40)]
        stats = loader.stats()
    if kind["worker_method"] == "process":
        assert stats.staged_nbytes == 0, f"{stats.staged_nbytes} of {stats.copied_nbytes} bytes were copied twice"


def test_a_stream_arrives_from_processes() -> None:
    on_device()
    with fl.DataLoader(Streamed(), batch_size=4, num_workers=1, worker_method="process", device="cuda") as loader:
        assert [int(batch[0, 0]) for batch in loader] == [n * n for n in range(0, 40, 4)]


class UsesCuda(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3,), index, device="cuda").cpu()


def test_a_forked_worker_that_uses_cuda_gets_torch_s_error() -> None:
    on_device()
    with (
        fl.DataLoader(UsesCuda(), 2, num_workers=1, multiprocessing_context="fork") as loader,
        pytest.raises(RuntimeError, match="re-initialize CUDA in forked subprocess"),
    ):
        list(loader)
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_pinned_batches_of_all_workers_are_copied_right() -> None:
    on_device()
    for method in ("thread", "process"):
        with fl.DataLoader(Squares(), 4, num_workers=2, worker_method=method, pin_memory=True) as loader:
            moved = list[torch.Tensor]()
            for batch in loader:
                assert batch.is_pinned(), f"batch {len(moved)} of {method} workers"
                moved.append(batch.to("cuda", non_blocking=True))
        assert [int(batch[-1, -1]) for batch in moved] == [n * n for n in range(3, 40, 4)]
