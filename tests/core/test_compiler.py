"""Functions that torch compiles, with a loop over a loader."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import feedline as fl


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_compiled_loop_gets_the_batches_of_torchs_loader(num_workers: int) -> None:
    """With a backend that only traces: the machine may have no compiler."""
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def epoch(loader: Any) -> torch.Tensor:
        total = torch.zeros(3)
        for rows, labels in loader:
            total = total * 2 + rows.sum(0) * labels.sum()
        return total

    def totals(loader_class: Any) -> list[list[float]]:
        torch.compiler.reset()
        torch.manual_seed(0)
        dataset = TensorDataset(torch.rand(12, 3), torch.arange(12))
        loader = loader_class(dataset, batch_size=5, shuffle=True, num_workers=num_workers)
        compiled = torch.compile(epoch, backend=backend)
        return [compiled(loader).tolist() for _ in range(2)]

    expected = totals(DataLoader)
    compiled_for_torch = len(graphs)
    assert totals(fl.DataLoader) == expected
    assert len(graphs) == 2 * compiled_for_torch
    torch.compiler.reset()
