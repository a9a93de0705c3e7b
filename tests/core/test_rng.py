"""Addresses give unrelated keys; keys give permutations and generators."""

from __future__ import annotations

import copy
import pickle
import random
import threading
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from feedline.core.rng import SampleRng, addressed, derive, derive_each, is_addressed, permuted, sample_rng
from feedline.core.rng_globals import GlobalStateChanges, global_states, restoring_globals

keys = st.integers(0, (1 << 64) - 1)


def chi_square_is_plausible(counts: np.ndarray, expected: float) -> bool:
    """True if the statistic is within six standard deviations of its mean: one false alarm in 10^8 runs."""
    freedom = counts.size - 1
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return abs(statistic - freedom) < 6 * (2 * freedom) ** 0.5


def test_keys_never_change() -> None:
    """Saved states rely on these numbers."""
    assert derive() == 0
    assert derive(0) == 0xE220A8397B1DCDAF  # the first number of splitmix64 seeded with 0
    assert derive(1, 2, "crop") == 1610013405195582896


def test_neighboring_addresses_never_collide() -> None:
    addresses = list(product(range(20), range(20), range(100), ("crop", "flip")))
    found = {derive(*address) for address in addresses}
    assert len(found) == len(addresses)


def test_the_place_of_a_part_counts() -> None:
    assert derive(1, 2) != derive(2, 1)
    assert derive(1) != derive(1, 0) != derive(0, 1)
    assert len({derive(0), derive(0, 0), derive(0, 0, 0), derive("0"), derive("")}) == 5


@given(st.integers(0, 1 << 40), st.integers(0, 63))
def test_one_bit_of_a_position_changes_about_half_of_the_key(position: int, bit: int) -> None:
    changed = derive(7, position) ^ derive(7, position ^ 1 << bit)
    assert 8 <= changed.bit_count() <= 56


def test_each_bit_of_neighboring_keys_is_fair() -> None:
    found = np.array([derive(0, position) for position in range(4000)], np.uint64)
    ones = np.array([int((found >> np.uint64(bit) & np.uint64(1)).sum()) for bit in range(64)])
    assert (abs(ones - 2000) < 6 * 1000**0.5).all()


def test_any_integer_is_a_part() -> None:
    assert derive(np.int64(5)) == derive(np.uint8(5)) == derive(5)
    assert derive(-1) == derive((1 << 64) - 1)
    assert 0 <= derive(-12345678901234567890) < 1 << 64


@given(keys, st.integers(1, 3000))
def test_a_permutation_has_every_element_once(key: int, length: int) -> None:
    assert np.sort(permuted(key, length, 0, length)).tolist() == list(range(length))


@given(keys, st.integers(1, 1 << 61), st.data())
def test_a_part_of_a_permutation_is_a_slice_of_the_whole(key: int, length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(max(0, length - 2000), length))
    stop = data.draw(st.integers(start, length))
    cut = data.draw(st.integers(start, stop))
    whole = permuted(key, length, start, stop)
    np.testing.assert_array_equal(
        np.concatenate([permuted(key, length, start, cut), permuted(key, length, cut, stop)]), whole
    )
    assert whole.dtype == np.int64
    assert len(set(whole.tolist())) == stop - start
    assert all(0 <= element < length for element in whole.tolist())


def test_a_permutation_of_a_trillion_is_as_cheap_as_a_small_one() -> None:
    found = permuted(derive(0, 3), 10**12, 10**11, 10**11 + 1000)
    assert len(np.unique(found)) == 1000
    assert found.min() < 10**10
    assert found.max() > 99 * 10**10


@pytest.mark.parametrize("length", [3, 5])
def test_every_order_of_few_elements_is_equally_likely(length: int) -> None:
    draws = 12_000
    orders = [tuple(permuted(derive(length, draw), length, 0, length).tolist()) for draw in range(draws)]
    found = sorted(set(orders))
    factorial = int(np.prod(range(1, length + 1)))
    assert len(found) == factorial
    assert chi_square_is_plausible(np.array([orders.count(order) for order in found]), draws / factorial)


@pytest.mark.parametrize("length", [17, 100, 300])
def test_every_element_is_equally_likely_at_every_place(length: int) -> None:
    draws = 200 * length
    counts = np.zeros((length, length))
    for draw in range(draws // 10):
        counts[np.arange(length), permuted(derive(length, draw), length, 0, length)] += 1
    # The counts of one place are one multinomial sample; places 0, half and last represent all.
    for place in (0, length // 2, length - 1):
        assert chi_square_is_plausible(counts[place], draws / 10 / length)


def test_neighbors_are_torn_apart() -> None:
    order = permuted(1, 10_000, 0, 10_000)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.06
    assert (np.diff(order) == 1).sum() < 12


@pytest.mark.parametrize(("start", "stop"), [(-1, 3), (0, 11), (5, 4), (11, 11)])
def test_places_outside_a_permutation_are_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=rf"\[{start}, {stop}\) is not within a permutation of 10"):
        permuted(0, 10, start, stop)


def test_an_empty_permutation() -> None:
    assert permuted(0, 0, 0, 0).tolist() == []


def test_a_sample_generator_is_created_on_first_use_and_fixed_by_its_key() -> None:
    rng = SampleRng(5)
    assert rng._generator is None
    assert rng.integers(1000) == np.random.Generator(np.random.Philox(key=5)).integers(1000)
    assert isinstance(rng.generator, np.random.Generator)
    assert SampleRng(6).random() != SampleRng(5).random()


def test_a_sample_generator_can_be_copied_and_pickled() -> None:
    fresh, used = SampleRng(5), SampleRng(5)
    used.random()
    for rng in (fresh, used):
        twins = pickle.loads(pickle.dumps(rng)), copy.deepcopy(rng)
        expected = rng.random()
        assert [twin.random() for twin in twins] == [expected, expected]


def test_a_sample_draws_from_its_own_key() -> None:
    with addressed([10, 11]) as address:
        assert sample_rng().random() == SampleRng(10).random()
        assert sample_rng(1).random() == SampleRng(11).random()
        address.row = 1
        assert sample_rng().random() == SampleRng(11).random()


def test_addresses_nest() -> None:
    with addressed([10, 11]) as address:
        address.row = 1
        with addressed([20]):
            assert sample_rng().random() == SampleRng(20).random()
        assert sample_rng().random() == SampleRng(11).random()


def test_an_address_ends_with_its_block_even_on_error() -> None:
    torch.manual_seed(0)
    expected = [sample_rng().random(), sample_rng().random()]
    with pytest.raises(KeyError), addressed([10]):
        raise KeyError
    torch.manual_seed(0)
    assert [sample_rng().random(), sample_rng().random()] == expected


def test_an_address_belongs_to_its_thread() -> None:
    found = []
    with addressed([10]):
        torch.manual_seed(0)
        thread = threading.Thread(target=lambda: found.append(sample_rng().random()))
        thread.start()
        thread.join()
    torch.manual_seed(0)
    assert found == [sample_rng().random()]


def test_without_an_address_torch_decides() -> None:
    torch.manual_seed(3)
    first = sample_rng().random()
    second = sample_rng().random()
    torch.manual_seed(3)
    assert sample_rng().random() == first != second
    torch.manual_seed(3)
    with addressed(None):
        assert sample_rng().random() == first


@given(
    parts=st.lists(st.integers(0, 2**64 - 1) | st.text(max_size=5), max_size=3),
    more=st.lists(st.text(max_size=5), max_size=2),
)
def test_keys_of_many_places_are_those_of_each(parts: list[int | str], more: list[str]) -> None:
    places = np.array([0, 1, 5, 2**40, 2**64 - 1], np.uint64)
    assert derive_each(parts, places, *more).tolist() == [derive(*parts, int(place), *more) for place in places]


DRAWS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy normal": np.random.standard_normal,
    "numpy seed": lambda: np.random.seed(3),  # noqa: NPY002
    "torch": lambda: torch.rand(1),
    "torch normal": lambda: torch.randn(1),
    "seed": lambda: random.seed(2),
}


@given(st.lists(st.lists(st.sampled_from(sorted(DRAWS)), max_size=4), max_size=12))
@example([["numpy seed", "numpy", "numpy"], ["numpy seed", "numpy normal"]])  # the same place, with a second value kept
def test_changes_of_the_global_generators_are_all_noticed(batches: list[list[str]]) -> None:
    """The recorded states are the current ones, after any draws."""
    with restoring_globals():
        changes = GlobalStateChanges()
        kept = changes.take()
        assert kept == global_states()
        for draws in batches:
            for draw in draws:
                DRAWS[draw]()
            kept = changes.take() or kept
            assert kept == global_states()


def test_generators_that_have_not_moved_are_not_packed(monkeypatch: Any) -> None:
    with restoring_globals():
        np.random.seed(1)  # noqa: NPY002
        changes = GlobalStateChanges()
        changes.take()
        monkeypatch.setattr("feedline.core.rng_globals.global_states", None)
        assert changes.take() == b""


def test_keys_that_are_set_within_a_block_end_with_it() -> None:
    with addressed(None) as address:
        address.keys = [1]
        assert is_addressed()
    assert not is_addressed()
