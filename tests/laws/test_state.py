"""The state: small JSON, quick to take, refused by other loaders, named where it is damaged."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import law_settings
from laws_reference import LARGEST, ORDERS, Hands, Work, saved, taken
from torch.utils.data import BatchSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import feedline as fl
from feedline.errors import StateError

CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]
WORKS = st.builds(
    Work, st.integers(2, LARGEST), st.sampled_from(ORDERS), st.sampled_from([0, 2**63]), st.booleans(), st.just(False)
)

STATE_LIMIT, GENERATOR_LIMIT = 1024, 4096


@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": True},
        {"shuffle": True, "seed": 2**63},
        {"sampler": RandomSampler(range(100_000), replacement=True)},
        {"batch_sampler": BatchSampler(RandomSampler(range(100_000)), 10, False)},
        {"sampler": fl.samplers.ClassBalanced([i % 7 for i in range(100_000)])},
        {"batch_sampler": fl.samplers.StratifiedBatches([i % 3 for i in range(100_000)], batch_size=9)},
        {"batch_sampler": fl.samplers.LengthBuckets([i % 50 + 1 for i in range(100_000)], batch_size=9)},
    ],
)
def test_the_state_is_small_json_whatever_the_sampler(arguments: dict[str, Any]) -> None:
    indices: Any = range(100_000)
    loader = fl.DataLoader(indices, **arguments)
    taken(loader, 1234)
    text = json.dumps(loader.state_dict())
    assert len(text) < STATE_LIMIT
    assert json.loads(text) == loader.state_dict()


@pytest.mark.parametrize(
    "arguments",
    [
        {"shuffle": True, "generator": torch.Generator().manual_seed(1)},
        {"sampler": WeightedRandomSampler([1.0] * 100_000, 100_000)},
        {"sampler": SubsetRandomSampler(range(0, 100_000, 2))},
    ],
)
def test_a_generator_that_the_order_is_drawn_from_makes_the_state_larger(arguments: dict[str, Any]) -> None:
    """It is a Mersenne twister of 624 words, which cannot be written shorter."""
    indices: Any = range(100_000)
    loader = fl.DataLoader(indices, **arguments)
    taken(loader, 1234)
    assert len(json.dumps(loader.state_dict())) < GENERATOR_LIMIT


@given(WORKS, st.integers(1, 4), st.integers(0, 9))
@law_settings(suppress_health_check=CHECKS)
def test_every_field_is_needed_and_named_when_it_is_missing_or_damaged(work: Work, batch_size: int, count: int) -> None:
    loader = work.loader(batch_size, Hands())
    if work.has_batches(batch_size):
        taken(loader, count)
    state = saved(loader)
    for name in ("epoch", "position", "delivered_ahead", "fingerprint"):
        missing = {key: value for key, value in state.items() if key != name}
        with pytest.raises(StateError, match=name):
            work.loader(batch_size, Hands()).load_state_dict(missing)
        with pytest.raises(StateError, match=name):
            work.loader(batch_size, Hands()).load_state_dict({**state, name: "damaged"})


@pytest.mark.parametrize("state", [None, 3, [], {}, {"epoch": 0}, {"feedline": 99}, "state"])
def test_an_object_that_is_no_state_is_refused(state: Any) -> None:
    with pytest.raises(StateError):
        fl.DataLoader([1, 2, 3]).load_state_dict(state)


@given(WORKS, st.integers(1, LARGEST))
@law_settings(suppress_health_check=CHECKS)
def test_another_dataset_length_is_refused_with_both_lengths(work: Work, other: int) -> None:
    state = saved(work.loader(2, Hands()))
    different = Work(other, work.order, work.seed, work.drop_last)
    if other == work.n:
        different.loader(2, Hands()).load_state_dict(state)
        return
    with pytest.raises(StateError, match=rf"\b{work.n}\b.*\b{other}\b"):
        different.loader(2, Hands()).load_state_dict(state)


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"shuffle": True, "seed": 1}, {"shuffle": True, "seed": 2}, "seed"),
        ({"shuffle": True, "seed": 1}, {"seed": 1}, "sampler"),
        ({"sampler": fl.samplers.Shuffled(9, seed=1)}, {"sampler": fl.samplers.Shuffled(9, seed=2)}, "sampler"),
        ({}, {"batch_sampler": [[0, 1], [2]]}, "kind|sampler"),
    ],
)
def test_another_order_is_refused(before: dict[str, Any], after: dict[str, Any], named: str) -> None:
    state = fl.DataLoader(list(range(9)), **before).state_dict()
    with pytest.raises(StateError, match=named):
        fl.DataLoader(list(range(9)), **after).load_state_dict(state)


def test_a_refused_state_changes_nothing() -> None:
    loader = fl.DataLoader(list(range(6)), batch_size=2)
    taken(loader, 1)
    before = loader.state_dict()
    with pytest.raises(StateError):
        loader.load_state_dict({**before, "position": -1})
    assert loader.state_dict() == before


def test_a_loaded_state_is_not_written_to() -> None:
    loader = fl.DataLoader(list(range(6)), batch_size=2)
    taken(loader, 1)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    resumed = fl.DataLoader(list(range(6)), batch_size=2)
    resumed.load_state_dict(state)
    assert [batch.tolist() for batch in resumed] == [[2, 3], [4, 5]]
    assert state == kept


def test_loading_again_rewinds() -> None:
    loader = fl.DataLoader(list(range(6)), batch_size=2, shuffle=True, seed=1)
    taken(loader, 1)
    state = loader.state_dict()
    runs = []
    for _ in range(2):
        loader.load_state_dict(state)
        runs.append([batch.tolist() for batch in taken(loader, 5)])
    assert runs[0] == runs[1]


def test_the_state_survives_a_trainer_that_rebuilds_the_loader() -> None:
    loader = fl.DataLoader(list(range(30)), batch_size=4, shuffle=True, seed=5)
    first = [batch.tolist() for batch in taken(loader, 3)]
    rebuilt = fl.DataLoader(loader.dataset, batch_size=4, sampler=loader.sampler, seed=loader.seed, num_workers=0)
    rebuilt.load_state_dict(loader.state_dict())
    whole = [batch.tolist() for batch in fl.DataLoader(list(range(30)), batch_size=4, shuffle=True, seed=5)]
    assert first + [batch.tolist() for batch in rebuilt] == whole
