"""Subclasses of torch's loader have attributes of their own: feedline neither reads nor changes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from diagonals import at_night

import feedline as fl
from feedline.loader.own_arguments import OWN_NAMES

TORCH = torch.utils.data.DataLoader
NUMBERS: Any = list(range(10))

ARGUMENTS = sorted(set(inspect.signature(fl.DataLoader).parameters) - set(inspect.signature(TORCH).parameters))

PLAUSIBLE = ("rank", "world_size", "epoch", "step", "plan", "policy", "state", "stats", "pool", "progress")


def subclass(base: Any, names: tuple[str, ...], *, first: bool) -> Any:
    """A loader with attributes of these names, set before or after the constructor of its base."""

    class Own(base):  # type: ignore[misc]
        def __init__(self, *args: Any, **arguments: Any) -> None:
            if not first:
                super().__init__(*args, **arguments)
            for name in names:
                setattr(self, name, f"mine: {name}")
            if first:
                super().__init__(*args, **arguments)

    return Own


def epochs(loader: Any) -> list[Any]:
    torch.manual_seed(1)
    return [[batch.tolist() for batch in loader] for _ in range(3)]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("names", [tuple(ARGUMENTS), PLAUSIBLE, tuple(f"_{name}" for name in PLAUSIBLE)])
def test_attributes_of_a_subclass_stay_its_own(names: tuple[str, ...], first: bool) -> None:
    arguments = {"batch_size": 3, "shuffle": True}
    loader = subclass(fl.DataLoader, names, first=first)(NUMBERS, **arguments)
    assert epochs(loader) == epochs(TORCH(NUMBERS, **arguments))
    assert {name: getattr(loader, name) for name in names} == {name: f"mine: {name}" for name in names}
    again = fl.DataLoader(NUMBERS, **arguments)
    again.load_state_dict(loader.state_dict())
    assert sorted(row for batch in again for row in batch.tolist()) == NUMBERS


class Device(fl.DataLoader[Any]):
    """As the loader of DGL 2.1.0: a device of its own, which it puts batches on."""

    def __init__(self, *args: Any, device: torch.device, shuffle: bool, **arguments: Any) -> None:
        self.device, self.shuffle = device, shuffle
        super().__init__(*args, **arguments)

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch.to(self.device)


def test_a_subclass_may_have_a_device_of_its_own() -> None:
    loader = Device(NUMBERS, device=torch.device("meta"), shuffle=True, batch_size=5, num_workers=1)
    assert [batch.device.type for batch in loader] == ["meta"] * 2


class Fixed(fl.DataLoader[Any]):
    @property
    def seed(self) -> str:  # type: ignore[override]
        return "a property"


def test_a_subclass_may_have_a_property_of_the_name_of_an_argument() -> None:
    loader = Fixed(NUMBERS, 5, shuffle=True, seed=3)
    assert loader.seed == "a property"
    assert epochs(loader) == epochs(fl.DataLoader(NUMBERS, 5, shuffle=True, seed=3))


class Broken(torch.utils.data.Dataset[int]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise ValueError("sample 3 is broken")
        return index


CHANGES: dict[str, Any] = {
    "seed": 3,
    "worker_method": "thread",
    "distributed": (1, 2),
    "on_error": "skip",
    "device": "meta",
    "recovery": fl.Recovery(deaths_per_epoch=1),
    "accelerate": False,
    "log": "log.txt",
}


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        *((name, 0) for name in CHANGES),
        *((name, 1) for name in ("seed", "worker_method", "on_error", "accelerate")),
        *at_night(*((name, 1) for name in ("distributed", "device", "recovery", "log"))),
    ],
)
def test_an_argument_may_be_changed_between_epochs(
    name: str, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert list(CHANGES) == list(OWN_NAMES)
    indices = [2, 3, 4, 5] if name == "on_error" else [0, 1, 4, 5]
    dataset = torch.utils.data.Subset(Broken(), indices)
    more = {"num_workers": workers, "persistent_workers": bool(workers)}
    with fl.DataLoader(dataset, 2, on_error="replace", **more) as loader:
        list(loader)
        setattr(loader, name, CHANGES[name])
        arguments = {"on_error": "replace", **more, name: CHANGES[name]}
        with fl.DataLoader(dataset, 2, **arguments) as other:
            assert [str(batch) for batch in loader] == [str(batch) for batch in other]
        assert getattr(loader, name) == CHANGES[name] == getattr(loader._fl, name)
    assert name != "log" or (tmp_path / "log.txt").exists()


@pytest.mark.parametrize(
    ("arguments", "name", "value", "message"),
    [
        ({"shuffle": True}, "seed", 3, "cannot be changed"),
        ({"shuffle": True, "seed": 2}, "seed", None, "cannot be changed"),
        ({"shuffle": True}, "distributed", (0, 2), "needs seed"),
        ({}, "seed", "x", "whole number"),
        ({}, "on_error", "ignore", "on_error"),
        ({}, "distributed", (2, 2), "rank < world_size"),
        ({}, "worker_method", "none", "worker_method"),
    ],
)
def test_an_argument_that_cannot_be_changed_is_refused(
    arguments: dict[str, Any], name: str, value: Any, message: str
) -> None:
    loader = fl.DataLoader(NUMBERS, 5, **arguments)
    former = getattr(loader, name)
    with pytest.raises(fl.errors.ArgumentError, match=message):
        setattr(loader, name, value)
    assert getattr(loader, name) == former == getattr(loader._fl, name)
    assert len(list(loader)) == 2
