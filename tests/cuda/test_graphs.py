"""Steps in CUDA graphs and compiled steps, on batches of a loader."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import feedline as fl

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


def data() -> TensorDataset:
    draws = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(256, 16, generator=draws), torch.randint(4, (256,), generator=draws))


class Training:
    """A small network from fixed weights."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).cuda()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)

    def step(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = nn.functional.cross_entropy(self.model(inputs), labels)
        loss.backward()
        self.optimizer.step()
        return loss

    def capture(self, inputs: torch.Tensor, labels: torch.Tensor) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """A graph of one step on these tensors, as torch's manual shows; the weights stay as they are."""
        weights = copy.deepcopy(self.model.state_dict())
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step(inputs, labels)
        torch.cuda.current_stream().wait_stream(side)
        self.model.load_state_dict(weights)
        graph = torch.cuda.CUDAGraph()
        self.optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = self.step(inputs, labels)
        return graph, loss


def loader_of(num_workers: int, *, static: bool) -> fl.DataLoader[Any]:
    delivery = fl.Delivery("cuda", static=static, prefetch=3)
    return fl.DataLoader(
        data(), 32, shuffle=True, seed=0, num_workers=num_workers, worker_method="process", device=delivery
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_captured_step_learns_what_an_eager_one_learns(num_workers: int) -> None:
    eager, graphed = Training(), Training()
    with loader_of(0, static=False) as loader:
        expected = [eager.step(*batch).item() for _ in range(3) for batch in loader]
    losses, graph, loss = list[float](), None, torch.zeros(())
    with loader_of(num_workers, static=True) as loader:
        for _ in range(3):
            for inputs, labels in loader:
                if graph is None:
                    graph, loss = graphed.capture(inputs, labels)
                graph.replay()
                losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4), f"{losses}\n{expected}"
    assert losses[-1] < losses[0]


def test_every_static_batch_has_the_addresses_of_the_first() -> None:
    with loader_of(2, static=True) as loader:
        places = {tuple(tensor.data_ptr() for tensor in batch) for _ in range(3) for batch in loader}
    assert len(places) == 1, f"{len(places)} places in 24 batches"


@pytest.mark.parametrize("static", [False, True])
def test_a_step_is_compiled_once(static: bool) -> None:
    compiled = list[int]()

    def backend(module: torch.fx.GraphModule, _: list[torch.Tensor]) -> Any:
        compiled.append(len(compiled))
        return module.forward

    model = nn.Linear(16, 4).cuda()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's compiler warns of itself
        torch.compiler.reset()
        step = torch.compile(lambda inputs, labels: nn.functional.cross_entropy(model(inputs), labels), backend=backend)
        with loader_of(2, static=static) as loader:
            losses = [(step(*batch).item(), nn.functional.cross_entropy(model(batch[0]), batch[1]).item())
                      for _ in range(2) for batch in loader]  # fmt: skip
    assert len(compiled) == 1, f"compiled {len(compiled)} times for {len(losses)} batches"
    assert all(ours == pytest.approx(eager, rel=1e-5) for ours, eager in losses), losses
