"""The base class of samplers: its hooks, and the default fingerprint."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from preloaded import Preloaded

import feedline as fl
from feedline.errors import ArgumentError, StateError
from feedline.samplers import BatchIndexSampler, IndexSampler, Sequential, Shuffled, Subset


class Strided(IndexSampler):
    def __init__(self, n: int, stride: int, order: Any = ()) -> None:
        self.n = self.length = n
        self._stride = stride
        self.order = order

    def indices(self, epoch: int, start: int, stop: int) -> Any:
        return np.arange(start, stop, dtype=np.int64) * self._stride % self.n


class Pairs(BatchIndexSampler):
    def __init__(self, n: int) -> None:
        self.n = n
        self.length = n // 2

    def batches(self, epoch: int, start: int, stop: int) -> Any:
        return [np.array([2 * number, 2 * number + 1]) for number in range(start, stop)]


class Forgotten(Shuffled):
    def __init__(self, n: int, seed: int, reverse: bool) -> None:
        super().__init__(n, seed)


class Labeled(Shuffled):
    def __init__(self, *args: Any, label: str, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.label = label


class Fixed(Shuffled):
    def __init__(self) -> None:
        super().__init__(5, seed=3)


class Variadic(Strided):
    length = 3

    def __init__(self, *sizes: int) -> None:
        self._sizes = sizes


class Mixin:
    def __init__(self, scale: int) -> None:
        self.scale = scale


class Mixed(Shuffled, Mixin):
    def __init__(self, n: int, scale: int) -> None:
        Shuffled.__init__(self, n)
        Mixin.__init__(self, scale)


@dataclass
class Declared(IndexSampler):
    n: int
    gap: float = 0.5


@pytest.mark.parametrize(
    ("sampler", "text"),
    [
        (Strided(7, 2, "up"), "Strided(n=7, stride=2, order='up')"),
        (Pairs(6), "Pairs(n=6)"),
        (Labeled(5, seed=1, label="a"), "Labeled(label='a', n=5, seed=1)"),
        (Fixed(), "Fixed(n=5, seed=3)"),
        (Mixed(5, 9), "Mixed(n=5, scale=9, seed=0)"),
        (Declared(4), "Declared(n=4, gap=0.5)"),
        (Sequential(np.int64(4)), "Sequential(n=4)"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_default_fingerprint_holds_every_constructor_argument(sampler: Any, text: str) -> None:
    assert sampler.fingerprint() == text
    assert pickle.loads(pickle.dumps(sampler)).fingerprint() == text


def test_variadic_arguments_that_are_kept_are_in_the_fingerprint() -> None:
    assert Variadic(1, 2).fingerprint() != Variadic(1, 3).fingerprint()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], np.array([1, 2, 3], np.int32)),
        ([1, 2, 3], torch.tensor([1, 2, 3])),
        ([1, 2, 3], np.array([1, 2, 3], np.uint8)),
        ((0.5, 1), np.array([0.5, 1.0])),
        ({"b", "a"}, {"a", "b"}),
        (np.array(["x", "y"], object), ["x", "y"]),
        (np.array(["x", "y"], "U5"), ["x", "y"]),
    ],
)
def test_equal_values_of_other_types_have_equal_fingerprints(one: Any, other: Any) -> None:
    assert Strided(7, 2, one).fingerprint() == Strided(7, 2, other).fingerprint()


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([1, 2, 3], [3, 2, 1]),
        (np.zeros((2, 3)), np.zeros((3, 2))),
        ({"a": 1}, {"a": 2}),
        ([Sequential(3)], [Shuffled(3)]),
        ("1", 1),
        (None, 0),
        ([[1, 2], [3]], [[1], [2, 3]]),
        (np.array([2**64 - 1], np.uint64), [-1]),
    ],
)
def test_other_values_have_other_fingerprints(one: Any, other: Any) -> None:
    assert Strided(7, 2, one).fingerprint() != Strided(7, 2, other).fingerprint()


def test_a_fingerprint_is_the_same_in_every_process(
    preloaded: Preloaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An interpreter of its own has its own seed of hashes, and thereby another order of the set."""
    program = (
        "import feedline as fl\n"
        "class S(fl.samplers.Sequential):\n"
        "    def __init__(self, names):\n"
        "        super().__init__(3)\n"
        "        self.names = names\n"
        "names = {*'abcdefghijklmnop'}\n"
        "print(S(names).fingerprint(), *names, sep='\\n')"
    )
    exec(program, {"__name__": "__main__"})
    ours, *order = capsys.readouterr().out.splitlines()
    code, output = preloaded.run_code(program, tmp_path)
    theirs, *other_order = output.splitlines()
    assert (code, theirs) == (0, ours)
    assert other_order != order or "PYTHONHASHSEED" in os.environ


def test_an_argument_that_is_not_kept_is_an_error_before_the_first_batch() -> None:
    loader = fl.DataLoader(range(5), batch_size=2, sampler=Forgotten(5, 0, True))
    with pytest.raises(ArgumentError, match=r"Forgotten.*'reverse'.*self\.reverse or self\._reverse, or override"):
        next(iter(loader))


@pytest.mark.parametrize("value", [object(), [object()], {"a": lambda: 0}, np.array([object()])])
def test_a_value_that_differs_in_every_process_is_an_error(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"Strided.fingerprint\(\) cannot describe order: .* Override fingerprint"):
        Strided(7, 2, value).fingerprint()


def test_a_state_of_other_arguments_is_refused() -> None:
    def loader(stride: int) -> Any:
        return fl.DataLoader(range(7), batch_size=2, sampler=Strided(7, stride))

    before = loader(2)
    next(iter(before))
    resumed = loader(2)
    resumed.load_state_dict(before.state_dict())
    assert next(iter(resumed)).tolist() == [4, 6]
    with pytest.raises(StateError, match="stride=3"):
        loader(3).load_state_dict(before.state_dict())


def test_hooks_that_are_missing_are_named() -> None:
    class NoIndices(IndexSampler):
        length = 3

    class NoBatches(BatchIndexSampler):
        length = 3

    with pytest.raises(NotImplementedError, match=r"NoIndices must define indices\(epoch, start, stop\)"):
        NoIndices().take(0, 0, 1)
    with pytest.raises(NotImplementedError, match=r"NoBatches must define batches\(epoch, start, stop\)"):
        NoBatches().take_batches(0, 0, 1)


def test_the_fingerprint_of_a_subset_holds_its_indices() -> None:
    assert Subset([1, 2]).fingerprint() != Subset([2, 1]).fingerprint()
    assert Subset([1, 2]).fingerprint() == Subset(np.array([1, 2])).fingerprint()


def test_batches_of_a_sampler_of_ones_own() -> None:
    loader = fl.DataLoader(range(6), batch_sampler=Pairs(6))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.parametrize("base", [IndexSampler, BatchIndexSampler])
def test_a_sampler_without_a_length_names_what_it_lacks(base: type[Any]) -> None:
    class Lengthless(base):  # type: ignore[misc]
        pass

    with pytest.raises(AttributeError, match=r"^Lengthless must set self\.length"):
        len(Lengthless())
