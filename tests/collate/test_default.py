from __future__ import annotations

import re
from abc import ABCMeta
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from recorder import Recorder
from torch.utils.data import default_collate
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import collate as torchs_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from feedline import collate
from feedline.collate.default import is_standard


@dataclass
class Pair:
    left: Any
    right: Any


class LooksAtValues(type):
    def __instancecheck__(cls, value: object) -> bool:
        return value == 3


class AnyValue(metaclass=LooksAtValues):
    pass


class Word(str):
    __slots__ = ()


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[Any, Any]]:
    """torch's registry, put back afterwards."""
    before = dict(default_collate_fn_map)
    yield default_collate_fn_map
    default_collate_fn_map.clear()
    default_collate_fn_map.update(before)


def notes(error: BaseException) -> str:
    return "\n".join(error.__notes__)


@pytest.mark.parametrize(
    "sample",
    [
        torch.rand(3, 4),
        torch.rand(()),
        torch.rand(3, 4).bfloat16(),
        torch.rand(4, 5, 3).permute(2, 0, 1),
        np.ones((2, 3), np.float32),
        np.ones(3, np.uint16),
        np.float32(3),
        np.bool_(True),
        7,
        True,
        1.5,
        {"image": torch.rand(2), "label": 3},
        (np.zeros(2), [1, 2]),
    ],
    ids=lambda sample: type(sample).__name__,
)
def test_every_tensor_of_the_batch_is_in_the_given_memory(sample: Any) -> None:
    empty = Recorder()
    batch = collate.default([sample] * 3, allocate=empty)
    assert empty.holds(batch)
    assert str(batch) == str(default_collate([sample] * 3))


@pytest.mark.parametrize("number", [2**63, 2**70])
def test_numbers_beyond_64_bits_raise_as_in_torch(number: int) -> None:
    with pytest.raises((RuntimeError, ValueError), match="verflow") as torchs:
        default_collate([number, 1])
    with pytest.raises(torchs.type, match="verflow"):
        collate.default([number, 1])


def test_mixed_dtypes_are_promoted_with_and_without_an_allocator() -> None:
    batch = [torch.ones(2), torch.ones(2, dtype=torch.float64)]
    assert collate.default(batch).dtype == torch.float64
    assert collate.default(batch, allocate=Recorder()).dtype == torch.float64


def test_gradients_flow_through_the_batch() -> None:
    samples = [torch.ones(2, requires_grad=True) for _ in range(3)]
    collate.default(samples, allocate=Recorder()).sum().backward()
    assert samples[1].grad is not None
    assert samples[1].grad.tolist() == [1, 1]


def test_tensor_subclasses_stack_as_they_define_it() -> None:
    class Tagged(torch.Tensor):
        pass

    samples = [torch.ones(2).as_subclass(Tagged) for _ in range(2)]
    assert type(collate.default(samples, allocate=Recorder())) is type(default_collate(samples)) is Tagged
    assert type(collate.default([torch.ones(2), samples[0]], allocate=Recorder())) is Tagged


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_tensors_are_refused_in_torchs_words(layout: torch.layout) -> None:
    odd = torch.eye(2).to_sparse(layout=layout)
    with pytest.raises(RuntimeError, match="sparse tensors are not currently supported"):
        collate.default([odd, odd], allocate=Recorder())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_refused_in_torchs_words() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(RuntimeError, match="nested tensors are not currently supported"):
        collate.default([nested, nested])


def test_no_shared_memory_is_made_inside_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    info = worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
    monkeypatch.setattr(worker, "_worker_info", info)
    odd = [torch.ones(2, dtype=torch.float64), torch.ones(2)]
    for batch in ([torch.ones(2)] * 2, odd, [np.ones(2)] * 2, [np.array(1.0)] * 2):
        assert default_collate(batch).is_shared()
        assert not collate.default(batch).is_shared()


def test_strings_stay_the_list_they_came_in() -> None:
    names = ["a", "b"]
    assert collate.default(names) is names
    assert collate.default([("a", b"x"), ("b", b"y")]) == [("a", "b"), (b"x", b"y")]


class Unmakeable(Mapping[str, int]):
    """Sequence that cannot be built from items."""

    def __init__(self) -> None:
        self._items = {"a": 1}

    def __getitem__(self, key: str) -> int:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(("sample", "kind"), [(Unmakeable(), dict), (range(2), list), (bytearray(b"ab"), list)])
def test_containers_that_cannot_be_rebuilt_become_plain_ones(sample: Any, kind: type) -> None:
    assert type(collate.default([sample, sample])) is type(default_collate([sample, sample])) is kind


@pytest.mark.parametrize("samples", [[[], [1], None], [[], None, [1]], [[1], [2], 3], [[1], None, []]])
def test_the_first_list_that_differs_is_the_error_as_in_torch(samples: list[Any]) -> None:
    with pytest.raises(Exception, match=r"equal size|has no len") as theirs:
        default_collate(samples)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        collate.default(samples)


def test_an_empty_batch_raises_as_in_torch() -> None:
    with pytest.raises(IndexError):
        collate.default([])


class TestErrorsNameThePlace:
    def test_ragged_tensors(self) -> None:
        samples = [{"image": (torch.ones(3, 4), 1)}] * 2 + [{"image": (torch.ones(3, 5), 1)}]
        with pytest.raises(RuntimeError, match="stack expects each tensor to be equal size") as caught:
            collate.default(samples, allocate=Recorder())
        assert "batch['image'][0]: sample 0 of the batch has shape (3, 4), sample 2 has (3, 5)" in notes(caught.value)
        assert "feedline.collate.pad()" in notes(caught.value)

    def test_ragged_arrays(self) -> None:
        with pytest.raises(RuntimeError) as caught:
            collate.default([np.ones(3), np.ones(4)])
        assert "batch: sample 0 of the batch has shape (3,), sample 1 has (4,)" in notes(caught.value)

    def test_lists_of_different_lengths(self) -> None:
        with pytest.raises(RuntimeError, match="equal size") as caught:
            collate.default([{"ids": [1, 2]}, {"ids": [1]}])
        assert "batch['ids']: sample 0 of the batch has length 2, sample 1 has 1" in notes(caught.value)

    def test_a_missing_key(self) -> None:
        with pytest.raises(KeyError, match="label") as caught:
            collate.default([{"label": 1}, {"label": 1}, {}])
        assert "batch['label']: sample 2 of the batch lacks this key" in notes(caught.value)

    def test_a_type_that_cannot_be_collated(self) -> None:
        with pytest.raises(TypeError, match="NoneType") as caught:
            collate.default([{"mask": None}])
        assert "batch['mask'] has a type that default collate does not support" in notes(caught.value)

    def test_strings_in_arrays(self) -> None:
        with pytest.raises(TypeError, match="found <U1") as caught:
            collate.default([(np.array(["a"]),)])
        assert "batch[0]" in notes(caught.value)


class TestRegisteredTypes:
    def test_a_new_type(self, registry: dict[Any, Any]) -> None:
        registry[Pair] = lambda batch, *, collate_fn_map: [pair.left for pair in batch]
        assert collate.default([(Pair(1, 2), 5)] * 2)[0] == [1, 1]

    def test_a_base_of_a_builtin_kind_wins_over_the_container(self, registry: dict[Any, Any]) -> None:
        registry[dict] = lambda batch, *, collate_fn_map: len(batch)
        assert collate.default([{"a": 1}] * 3) == 3

    def test_the_users_function_for_tensors_replaces_ours(self, registry: dict[Any, Any]) -> None:
        registry[torch.Tensor] = lambda batch, *, collate_fn_map: torch.cat(batch)
        assert collate.default([torch.ones(2), torch.ones(3)]).shape == (5,)
        assert collate.default([np.ones(2), np.ones(2)]).shape == (4,)

    def test_parts_that_the_function_collates_come_from_our_memory(self, registry: dict[Any, Any]) -> None:
        def collate_pairs(batch: list[Pair], *, collate_fn_map: Any) -> Pair:
            left = torchs_collate([pair.left for pair in batch], collate_fn_map=collate_fn_map)
            return Pair(left, torchs_collate([pair.right for pair in batch], collate_fn_map=collate_fn_map))

        registry[Pair] = collate_pairs
        empty = Recorder()
        pair = collate.default([{"pair": Pair(torch.ones(2), i)} for i in range(3)], allocate=empty)["pair"]
        assert pair.left.shape == (3, 2)
        assert pair.right.tolist() == [0, 1, 2]
        assert empty.holds([pair.left, pair.right])

    def test_the_standard_registry_is_recognized(self, registry: dict[Any, Any]) -> None:
        assert is_standard()
        registry[Pair] = lambda batch, *, collate_fn_map: batch
        assert is_standard()  # no plain value is a Pair
        registry[Mapping] = registry[Pair]
        assert not is_standard()
        del registry[Mapping]
        assert is_standard()
        registry[AnyValue] = registry[Pair]
        assert not is_standard()
        del registry[AnyValue]
        registry[((Pair, Word), int)] = registry[Pair]
        assert not is_standard()
        del registry[((Pair, Word), int)], registry[str]
        assert not is_standard()

    def test_a_later_registration_with_an_abstract_class_counts(self, registry: dict[Any, Any]) -> None:
        abstract = ABCMeta("Abstract", (), {})
        registry[abstract] = lambda batch, *, collate_fn_map: list(batch)
        assert is_standard()
        abstract.register(list)
        assert collate.default([[1], [2]]) == [[1], [2]]

    def test_subclasses_take_the_way_of_their_base(self) -> None:
        words = [Word("a"), Word("b")]
        assert collate.default(words) is words


def test_convert_is_torchs() -> None:
    assert collate.convert({"x": np.ones(2)})["x"].dtype == torch.float64
