"""Values of samples and batches: comparison and digest see every part, and no address."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from feedline.cli.doctor.data import is_equal
from feedline.cli.replay import digest


@dataclass(slots=True)
class Pair:
    image: Any
    label: Any


class Boxes:
    """An object without a comparison of its own."""

    def __init__(self, value: Any) -> None:
        self.value, self.owner = value, self


class Slots:
    """An object without `__dict__`, `==` and `repr`."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Enumerated(Enum):
    ONE = 1
    TWO = 2


class Column:
    """Values that are compared one by one, like those of a table."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, *values: int) -> None:
        self.values = values

    def __repr__(self) -> str:
        return f"Column{self.values}"

    def __eq__(self, other: object) -> Any:
        return [one == two for one, two in zip(self.values, other.values, strict=True)]  # type: ignore[attr-defined]


AROUND_LABEL: tuple[Callable[[Any], Any], ...] = (
    lambda label: label, lambda label: (torch.zeros(2), label), lambda label: {"image": np.zeros(2), "label": label},
    lambda label: [[torch.zeros(2)], {"deep": (label,)}], lambda label: Pair(torch.zeros(2), label),
    lambda label: (torch.zeros(2), Boxes([label])),
)  # fmt: skip


@pytest.mark.parametrize(
    ("label", "other"),
    [
        (1, 2), ("a", "b"), (None, 0), (float("nan"), 0.0), (torch.tensor([float("nan")]), torch.tensor([0.0])),
        (np.array([["a"], 1], object), np.array([["b"], 1], object)),
        (Image.new("L", (2, 2), 0), Image.new("L", (2, 2), 9)),
        (Slots(1), Slots(2)), ({1}, {2}), ({0, 8}, {8}), (Column(1, 2), Column(1, 3)),
        ({"a": 1}, {"b": 1}), ([1], [1, 1]), ([1, 23], [12, 3]), (object(), 1), (Enumerated.ONE, Enumerated.TWO),
    ],
)  # fmt: skip
def test_values_are_equal_and_have_one_digest_only_if_all_their_parts_are_equal(label: Any, other: Any) -> None:
    for around in AROUND_LABEL:
        value, same, different = around(label), around(again(label)), around(other)
        assert is_equal(value, same)
        assert digest(value) == digest(same)
        assert not is_equal(value, different)
        assert not is_equal(different, value)
        assert digest(value) != digest(different)


def again(label: Any) -> Any:
    """An equal value at another address; a set in another order."""
    return {*sorted(label, reverse=True)} if isinstance(label, set) else copy.deepcopy(label)
