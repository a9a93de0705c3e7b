"""Libraries that build, subclass or drive loaders: with feedline's class they give the same batches as with torch's."""

from __future__ import annotations

import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from preloaded import Preloaded
from torch.utils.data import Dataset

import feedline as fl

OF_OTHER_TESTS = "ignore:loaders of torch's class exist already"
"""Loaders of other tests may still be in use in their process."""

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]


def library(name: str) -> Any:
    """A library that is imported by its tests only: other test processes stay small, and fork the faster."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their imports of torch warn
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def accelerate() -> Any:
    return library("accelerate")


class Rows(Dataset[Any]):
    """Rows that draw by position."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(fl.sample_rng().integers(1 << 30))])


class Plain(Rows):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, index])


def lists(batches: Any) -> list[Any]:
    return [batch.tolist() for batch in batches]


@pytest.mark.filterwarnings(
    "ignore:loaders of torch's class exist already:UserWarning"
)  # Accelerate keeps the first one
@pytest.mark.parametrize("arguments", [{}, {"shuffle": True}, {"drop_last": True}])
def test_accelerate_prepares_a_loader_of_the_same_batches(accelerate: Any, arguments: dict[str, Any]) -> None:
    accelerator = accelerate.Accelerator(cpu=True)

    def epochs() -> Any:
        torch.manual_seed(3)
        prepared = accelerator.prepare(torch.utils.data.DataLoader(Plain(), 4, **arguments))
        assert type(prepared.base_dataloader) is torch.utils.data.DataLoader
        return [[(lists([batch]), prepared.end_of_dataloader) for batch in prepared] for _ in range(2)]

    theirs = epochs()
    with fl.patch_torch():
        assert epochs() == theirs


@pytest.mark.filterwarnings("error", OF_OTHER_TESTS)
def test_accelerate_keeps_what_a_loader_was_made_with_and_its_state_resumes(accelerate: Any) -> None:
    def make(accelerator: Any) -> Any:
        return accelerator.prepare(fl.DataLoader(Rows(), 4, shuffle=True, seed=5, num_workers=1))

    accelerator = accelerate.Accelerator(cpu=True)
    with fl.patch_torch():
        prepared, again = make(accelerator), make(accelerator)
    seen = []
    for number, batch in enumerate(prepared):
        seen += lists([batch])
        if number == 1:
            state = prepared.state_dict()
    again.load_state_dict(state)
    assert lists(again) == seen[2:]
    assert seen == lists(fl.DataLoader(Rows(), 4, shuffle=True, seed=5))
    with fl.patch_torch():
        skipped = lists(accelerate.skip_first_batches(make(accelerator), 2))
    assert [[index for index, _ in batch] for batch in skipped] == [[index for index, _ in batch] for batch in seen[2:]]


def test_accelerate_without_the_patch_is_named(accelerate: Any) -> None:
    with pytest.warns(UserWarning, match=r"accelerate\.data_loader reads.*seed=5.*patch_torch"):
        accelerate.Accelerator(cpu=True).prepare(fl.DataLoader(Rows(), 4, seed=5))


@pytest.mark.filterwarnings("ignore:.*set_vital", OF_OTHER_TESTS)
def test_accelerates_switch_for_another_stateful_loader_is_named(accelerate: Any) -> None:
    accelerator = accelerate.Accelerator(
        cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    said = r"builds torchdata's StatefulDataLoader.*seed=5, exact resume.*Leave use_stateful_dataloader out"
    with fl.patch_torch(), pytest.warns(UserWarning, match=said):
        accelerator.prepare(fl.DataLoader(Rows(), 4, seed=5))


@pytest.mark.parametrize("engine_class", ["Engine", "DeterministicEngine"])
def test_ignite_runs_over_the_same_batches(engine_class: str) -> None:
    engines, runs = library("ignite.engine"), []
    for loader_class in (torch.utils.data.DataLoader, fl.DataLoader):
        torch.manual_seed(3)
        seen: list[Any] = []
        engine = getattr(engines, engine_class)(lambda _, batch, seen=seen: seen.append(batch.tolist()))
        engine.add_event_handler(engines.Events.STARTED, lambda engine: engine.state.__setattr__("seed", 3))
        engine.run(loader_class(Plain(), 4, shuffle=True), max_epochs=2)
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len(runs[0]) == 8


@pytest.mark.parametrize("first", ["import torchdata.stateful_dataloader", "feedline.patch_torch()"])
def test_torchdatas_loader_is_left_alone_by_the_patch(first: str, preloaded: Preloaded, tmp_path: Path) -> None:
    second = "feedline.patch_torch()" if "torchdata" in first else "import torchdata.stateful_dataloader"
    script, log = tmp_path / "script.py", tmp_path / "output.log"
    script.write_text(f"""
import feedline
{first}
{second}
from torchdata.stateful_dataloader import StatefulDataLoader
loader = StatefulDataLoader(list(range(10)), 2, num_workers=0)
batches = iter(loader)
assert next(batches).tolist() == [0, 1] and len(loader) == 5
again = StatefulDataLoader(list(range(10)), 2, num_workers=0)
again.load_state_dict(loader.state_dict())
assert [batch.tolist() for batch in again] == [[2, 3], [4, 5], [6, 7], [8, 9]]
""")
    assert preloaded.run(script, log, 240) == 0, log.read_text()


class Stateful(Plain):
    """Draws from a generator that its state holds."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, int(torch.randint(1 << 30, (), generator=self.generator))])

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("persistent", [False, True])
def test_a_resumed_run_is_that_of_torchdatas_loader(workers: int, persistent: bool) -> None:
    def run(loader_class: Any) -> list[Any]:
        seen, state = [], None
        for count in (2, 1, 9):
            loader = loader_class(
                Stateful(), 2, num_workers=workers, persistent_workers=persistent and workers > 0,
                snapshot_every_n_steps=1,
            )  # fmt: skip
            if state is not None:
                loader.load_state_dict(state)
            batches = iter(loader)
            seen += [batch.tolist() for _, batch in zip(range(count), batches, strict=False)]
            state = loader.state_dict()
            del batches
            if loader_class is fl.DataLoader:
                loader.close()
        return seen

    assert run(fl.DataLoader) == run(library("torchdata.stateful_dataloader").StatefulDataLoader)
