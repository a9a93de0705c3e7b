"""Subclasses of torch's loader have attributes of their own: feedline neither reads nor changes them."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.data

import feedline as fl

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


def test_an_argument_may_be_changed_between_epochs() -> None:
    loader = fl.DataLoader(NUMBERS, 5)
    list(loader)
    loader.device = "meta"
    assert [batch.device.type for batch in loader] == ["meta"] * 2
