"""Advice for batches with much padding."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from undisturbed import Measurement, measured, was_slowed

import feedline as fl
from feedline.loader.report import Advice
from feedline.loader.report.padded_rows import growth_of_steps

LENGTHS = np.random.default_rng(0).lognormal(4, 0.7, 960).astype(int).clip(8, 400)

TEXTS = [torch.zeros(length) for length in LENGTHS.tolist()]

PLACE_S = 5e-6


def to_longest(rows: list[torch.Tensor]) -> Any:
    return fl.collate.pad()(rows)


def to_fixed_length(rows: list[torch.Tensor]) -> Any:
    padded = fl.collate.pad(multiple_of=400)(rows)
    assert padded.values.shape[1] == 400
    return padded


def run(
    dataset: Any, *, fixed_s: float = 0.002, place_s: float = PLACE_S, **arguments: Any
) -> Measurement[tuple[float, tuple[Advice, ...]]]:
    """Seconds of a loop whose steps take time in proportion to the places of a batch, and advice for it."""
    asked_s, began_s = 0.0, time.perf_counter()
    with fl.DataLoader(dataset, **arguments) as loader:
        for padded in loader:
            step_s = fixed_s + place_s * padded.values.numel()
            asked_s += step_s
            time.sleep(step_s)
        elapsed_s = time.perf_counter() - began_s
        verdict = loader.report()
    return Measurement((elapsed_s, verdict.advice), verdict, was_slowed(elapsed_s, asked_s))


BUCKETS = {"batch_sampler": fl.samplers.LengthBuckets(LENGTHS, 16, seed=0)}


@pytest.mark.alone
def test_buckets_gain_what_the_steps_lose_in_places() -> None:
    arguments = {"batch_size": 16, "shuffle": True, "collate_fn": to_longest}
    after_s = min(run(TEXTS, collate_fn=to_longest, **BUCKETS).found[0] for _ in range(2))

    def is_right(found: tuple[float, tuple[Advice, ...]]) -> bool:
        before_s, (first, *_) = found
        assert "LengthBuckets(lengths" in first.text
        assert first.basis == "replayed"
        assert "order" in first.text
        return first.gain == pytest.approx(before_s / after_s, rel=0.15)

    measured(lambda: run(TEXTS, **arguments), is_right)


def test_rows_of_a_fixed_length_are_padded_to_the_longest_first() -> None:
    _, advice = run(TEXTS, batch_size=16, shuffle=True, collate_fn=to_fixed_length).found
    texts = " ".join(each.text for each in advice)
    assert "pad to the longest sample of a batch" in texts
    assert "LengthBuckets" not in texts


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(TEXTS)


@pytest.mark.parametrize(
    ("dataset", "arguments"),
    [
        (TEXTS, BUCKETS),
        (Stream(), {"batch_size": 16}),
        (TEXTS, {"batch_size": 16, "sampler": list(range(len(TEXTS)))}),
        ([torch.zeros(50)] * 480, {"batch_size": 16}),
    ],
    ids=["set already", "no lengths", "an order of the user's", "equal lengths"],
)
def test_buckets_are_not_advised_where_they_are_set_or_impossible(dataset: Any, arguments: dict[str, Any]) -> None:
    _, advice = run(dataset, collate_fn=to_longest, **arguments).found
    assert not [each for each in advice if "LengthBuckets(lengths" in each.text]


@pytest.mark.alone
def test_steps_that_do_not_depend_on_the_places_gain_nothing() -> None:
    def is_right(found: tuple[float, tuple[Advice, ...]]) -> bool:
        return not [each for each in found[1] if "LengthBuckets(lengths" in each.text]

    arguments = {"batch_size": 16, "shuffle": True, "collate_fn": to_longest}
    measured(lambda: run(TEXTS * 2, fixed_s=0.015, place_s=0.0, **arguments), is_right)


@pytest.mark.parametrize(("fixed_s", "share"), [(0.0, 1.0), (0.01, 0.5), (0.03, 0.25)])
def test_the_growth_of_steps_is_found_among_noise(fixed_s: float, share: float) -> None:
    source = random.Random(0)
    places = [source.randrange(500, 1500) for _ in range(200)]
    steps = [(each, (fixed_s + each * 1e-5) * source.uniform(0.8, 1.2)) for each in places]
    steps[10] = places[10], 5.0  # a checkpoint was written
    growth = growth_of_steps(tuple(steps))
    assert growth is not None
    assert growth.share == pytest.approx(share, abs=0.1)
    assert abs(growth.share - share) <= 1.5 * growth.error


def test_the_growth_is_unknown_for_few_or_equal_batches() -> None:
    assert growth_of_steps(()) is None
    assert growth_of_steps(tuple((number, 0.01 * number) for number in range(1, 10))) is None
    assert growth_of_steps(((100, 0.01),) * 50) is None
    source = random.Random(0)
    assert growth_of_steps(tuple((source.randrange(100, 103), source.random()) for _ in range(50))) is None
