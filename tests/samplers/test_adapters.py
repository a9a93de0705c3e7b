# ruff: noqa: NPY002 - NumPy's legacy generator is one of those that samplers draw from
"""Foreign samplers: recognition, listing of the others, and the recorded states."""

from __future__ import annotations

import json
import random
from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import count
from typing import Any, Self

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

import feedline as fl
from feedline.core.packing import OpaqueState, pack, pack_or_keep, unpack
from feedline.core.tensors import as_yielded
from feedline.errors import ArgumentError, StateError
from feedline.samplers import (
    Distributed,
    LengthBuckets,
    MaterializedSampler,
    Sequential,
    Shuffled,
    StratifiedBatches,
    TorchDistributed,
    as_index_sampler,
)


def distributed(n: int = 10, world_size: int = 3, rank: int = 1, **arguments: Any) -> DistributedSampler[Any]:
    return DistributedSampler(range(n), world_size, rank, **arguments)  # type: ignore[arg-type]


class Reversed(DistributedSampler[Any]):
    def __iter__(self) -> Iterator[Any]:
        return reversed(list(super().__iter__()))


class Odd(Shuffled):
    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() if index % 2)


def test_samplers_of_feedline_are_taken_as_they_are() -> None:
    for sampler in (
        Shuffled(5),
        LengthBuckets([1, 2], 1),
        StratifiedBatches([1], 1),
        MaterializedSampler([1]),
        Distributed(Shuffled(5), 0, 1),
    ):
        assert as_index_sampler(sampler) is sampler


def test_torchs_sequential_and_distributed_samplers_get_random_access() -> None:
    found = as_index_sampler(SequentialSampler(range(7)))
    assert type(found) is Sequential
    assert len(found) == 7
    assert list(as_index_sampler(SequentialSampler([]))) == []
    assert type(as_index_sampler(distributed())) is TorchDistributed


@pytest.mark.parametrize("sampler", [Reversed(range(10), 3, 1), Odd(10), RandomSampler(range(4)), range(5)])  # type: ignore[arg-type]
def test_what_yields_something_else_is_listed(sampler: Any) -> None:
    found = as_index_sampler(sampler)
    assert isinstance(found, MaterializedSampler)
    if not isinstance(sampler, RandomSampler):
        assert found.take(0, 0, 99).tolist() == list(sampler)  # type: ignore[union-attr]


def test_batch_samplers_are_listed_as_batches() -> None:
    found = as_index_sampler(BatchSampler(SequentialSampler(range(5)), 2, False), batches=True)
    assert isinstance(found, MaterializedSampler)
    assert [batch.tolist() for batch in found.take_batches(0, 0, 9)] == [[0, 1], [2, 3], [4]]
    assert len(found) == 3


def test_the_distributed_order_has_the_facts_for_the_schedule() -> None:
    order = TorchDistributed(distributed(11, 4, 2, shuffle=False, drop_last=True))
    assert (order.num_replicas, order.rank, order.drop_last, len(order)) == (4, 2, True, 11)
    assert order.take(9, 0, 20).tolist() == list(range(11))
    assert order.fingerprint() == "TorchDistributed(n=11, shuffle=False, seed=0)"


def test_distributed_epochs_advance_unless_set_by_hand() -> None:
    theirs = distributed()
    order = TorchDistributed(theirs)
    for epoch in (0, 1):
        assert order.upcoming(epoch) == epoch
        order.begin(epoch)
    assert theirs.epoch == 1
    theirs.set_epoch(7)
    assert order.upcoming(2) == 7
    order.begin(7)
    assert order.upcoming(8) == 8
    order.begin(8)
    assert list(order) == order.take(8, 0, 10).tolist()


def test_an_epoch_set_before_the_order_was_made_counts() -> None:
    theirs = distributed()
    theirs.set_epoch(3)
    assert TorchDistributed(theirs).upcoming(0) == 3


INTEGERS = [[-1, 2**63 - 1], list(np.arange(3)), list(torch.arange(3))]


@pytest.mark.parametrize("items", INTEGERS, ids=["int", "np.int64", "tensor"])
def test_integers_become_int64_and_keep_their_type(items: list[Any]) -> None:
    sampler = MaterializedSampler(items)
    taken = np.concatenate([sampler.take(0, 0, 1), sampler.take(0, 1, 9)])
    assert taken.dtype == np.int64
    assert taken.tolist() == [int(item) for item in items]
    yielded = as_yielded(sampler.take(0, 0, 9))  # type: ignore[arg-type]
    assert [type(item) for item in yielded] == [type(item) for item in items]
    assert yielded == items


def test_integers_of_several_types_make_it_a_list() -> None:
    items = [1, True, np.int64(3), np.int32(3), np.bool_(True), torch.tensor(5), torch.tensor(False)]
    for later in items[1:]:
        sampler = MaterializedSampler([1, later, 2])
        assert isinstance(sampler.take(0, 0, 1), np.ndarray)
        assert sampler.take(0, 0, 9) == [1, later, 2]
    assert all(a is b for a, b in zip(MaterializedSampler(items).take(0, 0, 9), items, strict=True))


@pytest.mark.parametrize("item", ["key", (1, 2), [3], 2**63, 1.0, torch.tensor(1.0), torch.tensor([1]), None])
def test_anything_else_makes_it_a_list(item: Any) -> None:
    sampler = MaterializedSampler([7, 8, item, 9])
    assert isinstance(sampler.take(0, 0, 2), np.ndarray)
    taken = sampler.take(0, 1, 4)
    assert isinstance(taken, list)
    assert taken[1] is item
    assert (taken[0], taken[2]) == (8, 9)


def test_batches_of_keys_and_of_numbers() -> None:
    batches = MaterializedSampler([("a", "b"), (1, 2), range(3), torch.tensor([4, 5])], batches=True).take_batches(
        0, 0, 9
    )
    assert batches[0] == ["a", "b"]
    assert [batch.tolist() for batch in batches[1:]] == [[1, 2], [0, 1, 2], [4, 5]]


def test_what_is_no_batch_is_refused_as_torch_does() -> None:
    with pytest.raises(TypeError, match="not iterable"):
        MaterializedSampler([1, 2], batches=True).take_batches(0, 0, 1)


def test_a_batch_list_that_the_sampler_uses_again_is_copied() -> None:
    def one_list() -> Iterator[list[Any]]:
        batch: list[Any] = [0]
        for i in range(3):
            batch[0] = f"key {i}"
            yield batch

    assert MaterializedSampler(one_list(), batches=True).take_batches(0, 0, 9) == [["key 0"], ["key 1"], ["key 2"]]


def test_an_endless_sampler_is_read_no_further_than_requested() -> None:
    pulled: list[int] = []
    sampler = MaterializedSampler(pulled.append(i) or i for i in count())  # type: ignore[func-returns-value]
    assert sampler.take(0, 5, 8).tolist() == [5, 6, 7]  # type: ignore[union-attr]
    assert sampler.take(0, 2, 8).tolist() == [2, 3, 4, 5, 6, 7]  # type: ignore[union-attr]
    assert pulled == list(range(8))
    assert sampler.fingerprint() == "MaterializedSampler(generator)"
    with pytest.raises(TypeError):
        len(sampler)


def test_a_sampler_may_react_to_the_training() -> None:
    hard: deque[int] = deque([1])
    sampler = MaterializedSampler(iter(hard.popleft, None))
    assert sampler.take(0, 0, 1).tolist() == [1]  # type: ignore[union-attr]
    hard.extend([9, 4])
    assert sampler.take(0, 1, 3).tolist() == [9, 4]  # type: ignore[union-attr]


def test_a_sampler_that_has_ended_is_left_alone() -> None:
    class Ending:
        ends = 0

        def __iter__(self) -> Iterator[int]:
            yield 1
            self.ends += 1

    ending = Ending()
    sampler = MaterializedSampler(ending)
    for _ in range(3):
        assert len(sampler.take(0, 0, 5)) == 1
    assert ending.ends == 1


def test_when_iter_is_called() -> None:
    class Watched:
        calls = 0

        def __iter__(self) -> Iterator[int]:
            self.calls += 1
            return iter([1])

    watched = Watched()
    sampler = MaterializedSampler(watched)
    sampler.begin(0)
    assert watched.calls == 0
    sampler.begin(1, now=True)
    assert watched.calls == 1
    sampler.take(1, 0, 1)
    assert watched.calls == 1


def test_other_epochs_and_forgotten_positions_are_refused() -> None:
    sampler = MaterializedSampler(range(5000))
    with pytest.raises(ArgumentError, match=r"epoch 1 of range.*call begin\(1\) first"):
        sampler.take(1, 0, 1)
    sampler.take(0, 0, 4000)
    sampler.forget(3000)
    with pytest.raises(ArgumentError, match="position 2999 was freed: positions from 3000 on"):
        sampler.take(0, 2999, 3001)
    sampler.begin(1)
    assert len(sampler.take(1, 0, 10)) == 10


def test_set_epoch_is_passed_on_where_there_is_one() -> None:
    theirs = distributed()
    MaterializedSampler(theirs).set_epoch(4)
    MaterializedSampler([1]).set_epoch(4)
    assert theirs.epoch == 4


def recorded(sampler: Any, batches: bool = False) -> dict[str, Any]:
    listed = MaterializedSampler(sampler, batches)
    listed.take(0, 0, 3)
    state: dict[str, Any] = json.loads(json.dumps(listed.record()))
    return state


@pytest.mark.parametrize("sampler", [SequentialSampler(range(5)), [1, 2, 3], Reversed(range(9), 2, 1, shuffle=False)])  # type: ignore[arg-type]
def test_samplers_that_draw_nothing_record_no_draws(sampler: Any) -> None:
    assert "draws" not in recorded(sampler)


def test_nothing_is_recorded_before_the_first_item() -> None:
    listed = MaterializedSampler(RandomSampler(range(5)))
    listed.begin(0)
    assert listed.record() == {}


def test_torchs_random_sampler_records_its_seed_alone() -> None:
    for sampler in (RandomSampler(range(10**5)), RandomSampler(range(9), True, 100)):
        assert recorded(sampler).keys() == {"seed"}
    assert recorded(BatchSampler(RandomSampler(range(9)), 2, True), batches=True).keys() == {"seed"}


@pytest.mark.parametrize(
    ("sampler", "path"),
    [
        (WeightedRandomSampler([1.0] * 9, 9), "torch"),
        (SubsetRandomSampler(range(9)), "torch"),
        (RandomSampler(range(9), generator=torch.Generator()), ".generator"),
        (BatchSampler(SubsetRandomSampler(range(9), torch.Generator()), 2, False), ".sampler.generator"),
    ],
)
def test_one_generator_is_recorded_once_and_packed(sampler: Any, path: str) -> None:
    state = recorded(sampler, isinstance(sampler, BatchSampler))
    assert [(entry["at"], list(entry["states"])) for entry in state["draws"]] == [(0, [path])]
    assert len(json.dumps(state)) < 3500  # 2,560 bytes of a Mersenne twister in base64


def test_gauss_that_is_left_over_is_part_of_the_state() -> None:
    class Gauss(Sampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            for _ in range(4):
                yield random.gauss(0, 1), np.random.randn(), torch.randn(()).item()

    random.gauss(0, 1)
    np.random.randn()
    torch.randn(())
    listed = MaterializedSampler(Gauss())
    order = list(listed.take(0, 0, 4))
    state = json.loads(json.dumps(listed.record()))
    again = MaterializedSampler(Gauss())
    again.restore(state)
    again.begin(0)
    assert list(again.take(0, 0, 4)) == order


class Failing(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        yield random.randrange(100)
        random.random()
        raise KeyError("no more")


def test_an_exception_of_the_sampler_arrives_and_the_process_keeps_its_state() -> None:
    listed = MaterializedSampler(Failing())
    listed.take(0, 0, 1)
    again = MaterializedSampler(Failing())
    again.restore(listed.record())
    again.begin(0)
    own = random.getstate()
    with pytest.raises(KeyError, match="no more"):
        again.take(0, 0, 5)
    assert random.getstate() == own


class Own:
    """A sampler that inherits from nothing and keeps its generator to itself."""

    def __init__(self) -> None:
        self.rng = np.random.default_rng()

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(20).tolist())


def test_generators_are_found_in_samplers_inside_samplers() -> None:
    def batches() -> BatchSampler:
        return BatchSampler(BatchSampler(Own(), 3, False), 2, False)  # type: ignore[arg-type]

    first, second = MaterializedSampler(batches(), batches=True), MaterializedSampler(batches(), batches=True)
    order = first.take_batches(0, 0, 9)
    second.restore(json.loads(json.dumps(first.record())))
    second.begin(0)
    assert second.take_batches(0, 0, 9) == order
    assert list(first.record()["draws"][0]["states"]) == [".sampler.sampler.rng"]


def test_the_epoch_that_was_set_by_hand_is_set_again() -> None:
    first, second = MaterializedSampler(Reversed(range(99), 3, 1)), MaterializedSampler(Reversed(range(99), 3, 1))  # type: ignore[arg-type]
    first.set_epoch(8)
    order = first.take(0, 0, 99).tolist()  # type: ignore[union-attr]
    second.restore(json.loads(json.dumps(first.record())))
    second.begin(0)
    assert second.record() == first.record()
    assert second.take(0, 0, 99).tolist() == order  # type: ignore[union-attr]


class Opaque(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([1])

    def state_dict(self) -> dict[str, Any]:
        return {"file": object()}

    def load_state_dict(self, state: Any) -> None:
        raise AssertionError


def test_a_state_that_json_cannot_hold_is_kept_as_it_is() -> None:
    listed = MaterializedSampler(Opaque())
    assert len(listed.take(0, 0, 5)) == 1
    kept = listed.record()["states"][""]
    assert isinstance(kept, OpaqueState)
    assert list(kept.value) == ["file"]


@pytest.mark.parametrize(
    ("sampler", "state", "match"),
    [
        (RandomSampler(range(3)), {"draws": []}, "holds a seed"),
        (RandomSampler(range(3)), {"seed": "x"}, "holds a seed"),
        (SubsetRandomSampler(range(3)), {"seed": 3}, "no entry 'seed'"),
        (SubsetRandomSampler(range(3)), {"draws": [3]}, "3 is not a record of draws"),
        (SubsetRandomSampler(range(3)), {"draws": 3}, "'draws' of a sampler's order is 3"),
        (SubsetRandomSampler(range(3)), {"draws": [{"at": 0, "states": {".generator": "AAAA"}}]}, "'.generator', but"),
        (
            SubsetRandomSampler(range(3)),
            {"draws": [{"at": 0, "states": {"torch": "?"}}]},
            "'torch' is damaged.*not base64",
        ),
        (SubsetRandomSampler(range(3)), {"draws": [{"at": 0, "states": {"torch": "AAAA"}}]}, "generator 'torch'"),
        (RandomSampler(range(3)), [3], "not the record of an order"),
        ([1], {"draws": [{"at": "0", "states": {}}]}, "not a record of draws"),
        ([1], {"draws": [{"at": 0, "states": {"random": {"words": "AAAA"}}}]}, "generator 'random'"),
        ([1], {"draws": [{"at": 0, "states": {"numpy": {"state": 3}}}]}, "generator 'numpy'"),
    ],
)
def test_a_state_of_something_else_is_refused_when_it_is_restored(sampler: Any, state: Any, match: str) -> None:
    with pytest.raises(StateError, match=match):
        MaterializedSampler(sampler).restore(state)


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, 2**200, 0.1, float("inf"), "text", b"\x00\xff", [1, [2]], (1, (2, "x")), {"a": {"b": [3]}},
        {1: "one", (2, 3): "pair"}, {"$": "a key like ours"}, {"a": {1, 2}}, frozenset("ab"), OrderedDict(b=1, a=2),
    ],
)  # fmt: skip
def test_states_come_back_from_json(value: Any) -> None:
    assert unpack(json.loads(json.dumps(pack(value)))) == value


@pytest.mark.parametrize(
    "value",
    [
        *(np.dtype(each).type(1) for each in "?bBhHiIlLefdgFDG"), np.datetime64("2020-02-03T04:05", "ns"),
        np.timedelta64(5, "D"), np.str_("text"), np.bytes_(b"text"), np.float32("nan"),
    ],
)  # fmt: skip
def test_scalars_come_back_from_json_with_their_type(value: Any) -> None:
    back = unpack(json.loads(json.dumps(pack([value]))))[0]
    assert (type(back), back.dtype, str(back)) == (type(value), value.dtype, str(value))


@pytest.mark.parametrize("value", [np.str_(""), np.str_("zero\0"), np.longlong(1), np.void(b"1")])
def test_every_scalar_comes_back_from_a_state(value: Any) -> None:
    back = unpack(pack_or_keep(value))
    assert (type(back), back) == (type(value), value)


@pytest.mark.parametrize("dtype", ["uint32", "int64", "float32", "bool"])
def test_arrays_and_tensors_come_back_from_json(dtype: str) -> None:
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = unpack(json.loads(json.dumps(pack({"a": array, "t": torch.from_numpy(array.copy()), "s": array[0, 0]}))))
    assert np.array_equal(back["a"], array)
    assert back["a"].dtype == array.dtype
    assert torch.equal(back["t"], torch.from_numpy(array))
    assert back["s"] == array[0, 0]


@pytest.mark.parametrize("value", [object(), np.array([object()]), {"a": {object()}}, [lambda: 0]])
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(StateError, match=r"state.* is a"):
        pack(value)


@pytest.mark.parametrize(
    "damaged", [{"$": "set"}, {"$": "ndarray", "dtype": "<i8", "shape": [3], "data": "AAAA"}, {"$": "tuple"}]
)
def test_damaged_values_are_refused(damaged: Any) -> None:
    with pytest.raises(StateError, match="damaged state"):
        unpack(damaged)


class RestartingBatches:
    """A batch sampler that is its own iterator, and that `__iter__` restarts, as Lightning's for predict."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Self:
        self._next = 0
        return self

    def __next__(self) -> list[int]:
        if self._next == self._count:
            raise StopIteration
        self._next += 1
        return [2 * self._next - 2, 2 * self._next - 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sampler_that_restarts_itself_is_read_once(workers: int) -> None:
    loaders = [
        loader(range(10), batch_sampler=RestartingBatches(5), num_workers=workers)
        for loader in (fl.DataLoader, torch.utils.data.DataLoader)
    ]
    ours, theirs = ([[batch.tolist() for batch in loader] for _ in range(2)] for loader in loaders)
    assert ours == theirs == [[[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]] * 2
    assert [batch.tolist() for batch in fl.DataLoader(range(4), batch_size=2, sampler=Restarting([3, 1, 0, 2]))] == [
        [3, 1],
        [0, 2],
    ]


class Restarting:
    """The same for single indices."""

    def __init__(self, indices: list[int]) -> None:
        self._indices = indices

    def __iter__(self) -> Self:
        self._left = list(self._indices)
        return self

    def __next__(self) -> int:
        if not self._left:
            raise StopIteration
        return self._left.pop(0)


def test_a_sampler_without_a_length_may_say_so_in_any_way() -> None:
    class Unsized(torch.utils.data.Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(4))

        def __len__(self) -> int:
            raise ValueError("the length is not known in advance")

    assert [batch.tolist() for batch in fl.DataLoader(range(4), batch_size=2, sampler=Unsized())] == [[0, 1], [2, 3]]
    with pytest.raises(ValueError, match="not known in advance"):
        len(fl.DataLoader(range(4), batch_size=2, sampler=Unsized()))
