"""Steps of streams resume anywhere, with any workers and ranks, and keep nothing of their buffers in the state."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import diagonal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounds import rounds
from torch.utils.data import DataLoader as TorchDataLoader

import feedline as fl
from feedline import streams
from feedline.core.rng import batch_keys
from feedline.loader.monitoring import padding as padding_counts
from feedline.streams.flow import FlowPlace

pytestmark = pytest.mark.filterwarnings("ignore:.*cannot share equally")
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


class Stateful:
    """A counter with a state, which counts its reads."""

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Stateful:
        return self

    def __next__(self) -> int:
        if self.at == self.n:
            raise StopIteration
        self.at += 1
        return self.at - 1

    def state_dict(self) -> Any:
        return {"at": self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state["at"]


class Plain(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(range(30))


def augmented(sample: Any, rng: Any) -> Any:
    return sample, round(float(rng.random()), 6)


def drawing(sample: Any) -> Any:
    return sample, round(float(fl.sample_rng().random()), 6)


def first(sample: Any) -> int:
    while isinstance(sample, tuple):
        sample = sample[0]
    return int(sample)


def items() -> Any:
    return streams.from_items([7, 0, 12, 3, 9], lambda n: range(100 * n, 100 * n + n), seed=1)


def stateful() -> Any:
    return streams.from_items([7, 5, 12, 3, 9], Stateful, seed=1)


def shuffled() -> Any:
    return streams.from_dataset(range(50), fl.samplers.Shuffled(50, 2), partitions=5, seed=3)


SOURCES = {"items": items, "stateful": stateful, "map-style": shuffled, "plain": lambda: streams.from_dataset(Plain())}
STEPS: dict[str, Callable[[Any], Any]] = {
    "as it is": lambda s: s,
    "map": lambda s: s.map(augmented),
    "draws": lambda s: s.map(drawing).shuffle(4).map(augmented),
    "filter": lambda s: s.filter(lambda sample: first(sample) % 3),
    "shuffle": lambda s: s.shuffle(5),
    "two shuffles": lambda s: s.shuffle(3).map(augmented).shuffle(7),
    "take": lambda s: s.shuffle(3).take(11),
    "repeat": lambda s: s.shuffle(4).repeat(3),
    "batch": lambda s: s.shuffle(4).batch(3, collate_fn=list).map(sum),
    "mixed": lambda s: streams.mix([s.shuffle(3), items().map(augmented).map(first)], [2, 1], seed=4),
    "all exhausted": lambda s: streams.mix([s, stateful().shuffle(4)], [5, 1], stop="all_exhausted", max_repeats=3),
    "number": lambda s: streams.mix([s, stateful().shuffle(4)], [5, 1], stop=61, max_repeats=9, seed=2),
    "phases": lambda s: streams.curriculum([s, stateful()], [(8, [0, 1]), (17, [1, 2]), (30, [3, 1])], temperature=3.0),
    "each once": lambda s: streams.mix([s, items()], [1, 1], stop="each_once").shuffle(4),
    "nested": lambda s: streams.mix([streams.mix([s, items()], [1, 2]), shuffled()], [1, 1], stop="each_once"),
}


@pytest.mark.parametrize(
    ("step", "source"),
    # A step keeps the state of the previous one unchanged: each step has one source, each source a mixture and no step.
    [
        *(case for case in diagonal([*STEPS], [*SOURCES]) if case[0] not in {"as it is", "mixed"}),
        *((step, source) for step in ("as it is", "mixed") for source in SOURCES),
    ],
)
def test_every_cut_of_a_partition_resumes_exactly(source: str, step: str) -> None:
    """For each number of samples: a state as JSON, loaded into another flow, gives the rest."""
    made = STEPS[step](SOURCES[source]())
    for partition in range(made.num_partitions):
        whole = list(made.partition(partition, 1))
        for cut in range(len(whole) + 1):
            flow = made.partition(partition, 1)
            assert list(islice(flow, cut)) == whole[:cut]
            state = json.loads(json.dumps(flow.state_dict()))
            assert len(json.dumps(state)) < 1200
            other = made.partition(partition, 1)
            other.load_state_dict(state)
            again = json.loads(json.dumps(other.state_dict()))
            assert list(other) == whole[cut:]
            third = made.partition(partition, 1)
            third.load_state_dict(again)
            assert list(third) == whole[cut:]


def received(loader: Any, count: int | None = None) -> list[Any]:
    return [torch.as_tensor(batch).tolist() for batch in islice(loader, count)]


def mixture() -> Any:
    made = streams.mix([stateful().shuffle(4), shuffled().map(first)], [1, 2], stop="all_exhausted", seed=5)
    return made.filter(lambda sample: sample % 5).shuffle(6)


@given(st.randoms(use_true_random=False), st.integers(1, 4))
@settings(max_examples=rounds(12, 100), deadline=None, suppress_health_check=CHECKS)
def test_random_cuts_and_worlds_give_each_sample_of_a_mixture_once(draw: random.Random, cuts: int) -> None:
    seen: Counter[int] = Counter()
    state = None
    for leg in range(cuts + 1):
        world = draw.randint(1, 5)
        ranks = [
            fl.DataLoader(mixture(), draw.choice([2, 3]), seed=1, distributed=(rank, world)) for rank in range(world)
        ]
        states = []
        steps = None if leg == cuts else draw.randint(0, 3)
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
            before = received(each, steps)
            seen.update(number for batch in before for number in batch)
            states.append(json.loads(json.dumps(each.state_dict())))
        if leg == cuts:
            break
        if any(each["epoch"] for each in states):
            return  # a rank had ended its epoch, so there is no common step of all states
        state = fl.merge_states(states)
    whole = received(fl.DataLoader(mixture(), None, seed=1))
    assert seen == Counter(whole)


@pytest.mark.parametrize(
    "hands", [{"num_workers": 2, "worker_method": "process"}, {"num_workers": 2, "worker_method": "thread"}]
)
def test_workers_change_nothing(hands: dict[str, Any]) -> None:
    def made() -> Any:
        return STEPS["draws"](items()).map(lambda sample: sample[1])

    alone = received(fl.DataLoader(made(), 4, seed=1))
    with fl.DataLoader(made(), 4, seed=1, **hands) as loader:
        assert received(loader) == alone
    with fl.DataLoader(made(), 4, seed=1, **hands) as loader:
        before = received(loader, 4)
        state = loader.state_dict()
    resumed = fl.DataLoader(made(), 4, seed=1)
    resumed.load_state_dict(state)
    assert before + received(resumed) == alone


def test_epochs_differ_and_repeat_in_every_process() -> None:
    loader = fl.DataLoader(shuffled().shuffle(20), None, seed=1)
    epochs = [received(loader) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(50))
    assert epochs[0] != epochs[1]
    torchs = list(TorchDataLoader(shuffled().shuffle(20), batch_size=None))
    assert sorted(torchs) == list(range(50))


def test_a_resume_of_a_source_with_a_state_reads_one_block_again() -> None:
    reads: list[int] = []

    class Reads(Stateful):
        def __next__(self) -> int:
            reads.append(self.at)
            return super().__next__()

    made = streams.from_items([1000], Reads).shuffle(10)
    flow = made.partition(0, 0)
    before = list(islice(flow, 505))
    reads.clear()
    other = made.partition(0, 0)
    other.load_state_dict(flow.state_dict())
    assert next(other) not in before
    assert reads == list(range(500, 510))


def test_shares_of_a_mixture_hold_over_any_stretch() -> None:
    parts = [streams.from_items([range(k * 10_000, k * 10_000 + 5_000)], iter) for k in range(3)]
    drawn = [number // 10_000 for number in islice(streams.mix(parts, [6, 3, 1], seed=2).partition(0, 0), 4000)]
    for start in range(0, 4000, 500):
        counts = Counter(drawn[start : start + 500])
        assert [abs(counts[k] - 500 * share) <= 2 for k, share in enumerate([0.6, 0.3, 0.1])] == [True] * 3
    assert len({tuple(drawn[start : start + 10]) for start in range(0, 4000, 10)}) > 100, "the order is random"


@pytest.mark.parametrize(
    "weights", [lambda epoch: (3 - epoch, epoch) if epoch < 3 else (0, 1), [[3, 0], [2, 1], (1, 2), np.array([0, 1])]]
)
def test_epochs_may_have_weights_of_their_own(weights: Any) -> None:
    easy, hard = (streams.from_items([range(first, first + 2000)], iter) for first in (0, 10_000))
    course = streams.mix([easy, hard], weights)
    assert next(course.partition(0, 9)) >= 10_000, "the last weights apply to later epochs"
    shares = [sum(number >= 10_000 for number in islice(course.partition(0, epoch), 600)) / 600 for epoch in range(4)]
    assert shares == pytest.approx([0, 1 / 3, 2 / 3, 1], abs=0.01)


def test_repeats_are_capped() -> None:
    small, large = streams.from_items([range(5)], iter), streams.from_items([range(100, 200)], iter)
    counts = Counter(streams.mix([small, large], [1, 1], stop="all_exhausted", max_repeats=4).partition(0, 0))
    assert {counts[number] for number in range(5)} == {4}
    assert {counts[number] for number in range(100, 200)} == {1}


def test_a_temperature_draws_more_from_small_streams() -> None:
    parts = [streams.from_items([range(1_000 * k, 1_000 * k + 300)], iter) for k in range(3)]

    def shares(weights: Any, temperature: float) -> list[float]:
        mixed = streams.mix(parts, weights, temperature=temperature).partition(0, 1)
        counts = Counter(number // 1_000 for number in islice(mixed, 300))
        return [counts[part] / 300 for part in range(3)]

    for temperature in (0.5, 1.0, 3.0, 1e6):
        expected = np.array([0.64, 0.32, 0.04]) ** (1 / temperature)
        for weights in ([64, 32, 4], lambda _: (16, 8, 1)):
            assert shares(weights, temperature) == pytest.approx(expected / expected.sum(), abs=0.01)
            sampler = fl.samplers.Mixture([300] * 3, [64, 32, 4], temperature=temperature)
            assert sampler.weights / sampler.weights.sum() == pytest.approx(expected / expected.sum())


def test_an_epoch_of_a_number_of_samples_repeats_streams_up_to_a_cap() -> None:
    small, large = streams.from_items([range(5), range(5, 10)], iter), streams.from_items([range(100, 300)] * 2, iter)
    drawn = list(fl.DataLoader(streams.mix([small, large], [1, 1], stop=131, max_repeats=4), None))
    assert len(drawn) == 131
    counts = Counter(drawn)
    assert {counts[number] for number in range(10)} == {4}
    assert sum(number >= 100 for number in drawn) == 131 - 40
    orders = [list(streams.mix([small.shuffle(5)], [1], stop=20).partition(0, epoch)) for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert orders[0][:5] != orders[0][5:]
    assert {Counter(orders[0])[number] for number in range(5)} == {2}


def test_phases_change_the_shares_and_go_on_with_the_streams() -> None:
    parts = [
        streams.from_items([range(first + 500 * k, first + 500 * k + 300) for k in range(2)], iter)
        for first in (0, 5_000)
    ]
    course = streams.curriculum(parts, [(201, [1, 0]), (200, [1, 3]), (100, [0, 1])], seed=3)
    drawn = [list(course.partition(partition, 0)) for partition in range(2)]
    assert list(map(len, drawn)) == [251, 250]
    for partition, numbers in enumerate(drawn):
        shares = [
            sum(number >= 5_000 for number in numbers[start : start + 100]) / 100 for start in (0, 101 - partition)
        ]
        assert shares == [0, 0.75]
        assert all(number >= 5_000 for number in numbers[201 - partition :])
        for first in (0, 5_000):  # no sample is repeated before all were read
            own = [number for number in numbers if first <= number < first + 5_000]
            assert own == [*range(first + 500 * partition, first + 500 * partition + len(own))]


def test_streams_that_end_before_the_number_are_named() -> None:
    parts = [streams.from_items([range(5), range(5)], iter), streams.from_items([range(7), range(7)], iter)]
    loader = fl.DataLoader(streams.mix(parts, [1, 1], stop=80, max_repeats=2), 4)
    with pytest.raises(
        fl.errors.ArgumentError,
        match=r"partition 0 of 2 \(epoch 0, phase 0\).* \[0, 1\] have ended after 24 of 40 samples.*max_repeats=2",
    ):
        list(loader)
    nothing = streams.mix([items().filter(lambda _: False)], [1], stop=10)
    with pytest.raises(fl.errors.ArgumentError, match=r"after 0 of 2 samples.*without any sample cannot be repeated"):
        list(nothing.partition(0, 0))


def test_a_source_that_ends_or_fails_early_names_the_rank() -> None:
    def failing(first: int) -> Iterator[int]:
        yield from range(first, first + 3)
        raise OSError("the disk is gone")

    parts = [streams.from_items([range(5), range(5)], iter), streams.from_items([range(7), range(7)], iter)]
    for other, stop, kind, said in (
        (parts[1], 80, fl.errors.ArgumentError, "partition 1 of 2 .* ask for fewer than 80 samples"),
        (streams.from_items([10, 20], failing), "each_once", OSError, "the disk is gone"),
    ):
        mixed = streams.mix([parts[0], other], [1, 1], stop=stop, max_repeats=None if stop == "each_once" else 2)
        loader = fl.DataLoader(mixed, 2, seed=0, distributed=(1, 2))
        with pytest.raises(kind, match=said) as raised:
            list(loader)
        notes = " ".join(raised.value.__notes__)
        assert "of partition 1 of 2 (epoch 0)" in notes
        assert "on rank 1 of 2" in notes


def test_a_mixture_of_fewer_partitions_than_ranks_is_refused() -> None:
    mixed = streams.mix([items(), streams.from_items([range(9), range(9)], iter)], [1, 1])
    with pytest.raises(
        fl.errors.ArgumentError, match=r"2 partitions, fewer than the 3 ranks: rank 2 .*fewer ranks"
    ) as raised:
        iter(fl.DataLoader(mixed, 2, distributed=(2, 3)))
    assert "on rank 2 of 3" in " ".join(raised.value.__notes__)


def test_a_dataset_shorter_than_its_mixture_says_is_named_with_the_rank() -> None:
    short = torch.utils.data.TensorDataset(torch.arange(10))
    loader = fl.DataLoader(short, 2, sampler=fl.samplers.Mixture([10, 5], [2, 1]), seed=0, distributed=(1, 2))
    with pytest.raises(IndexError) as raised:
        list(loader)
    notes = " ".join(raised.value.__notes__)
    assert "position" in notes
    assert "the index from the sampler is out of range: the dataset has 10 samples" in notes
    assert "on rank 1 of 2" in notes


def test_each_end_of_a_mixture() -> None:
    short, long = streams.from_items([range(10)], iter), streams.from_items([range(100, 140)], iter)

    def counted(stop: Any) -> tuple[int, int]:
        drawn = list(streams.mix([short, long], [1, 1], stop=stop, seed=1).partition(0, 0))
        return sum(number < 100 for number in drawn), sum(number >= 100 for number in drawn)

    assert counted("first_exhausted")[0] == 10
    assert counted("first_exhausted")[1] in (9, 10, 11)
    assert counted("each_once") == (10, 40)
    assert counted("all_exhausted")[0] in (39, 40, 41)
    assert counted("all_exhausted")[1] == 40


DOCUMENTS = [torch.arange(1, 2 + number * 7 % 23) for number in range(60)]


def packing(**more: Any) -> Any:
    return streams.from_dataset(DOCUMENTS, partitions=3).shuffle(8).pack(24, buffer=10, **more)  # type: ignore[arg-type]


def test_packed_rows_hold_each_document_once() -> None:
    found = []
    for partition in range(3):
        for row in packing().partition(partition, 0):
            assert row["tokens"].shape == row["segments"].shape == row["positions"].shape == (24,)
            for segment in range(1, int(row["segments"].max()) + 1):
                mine = row["segments"] == segment
                found.append(row["tokens"][mine].tolist())
                assert row["positions"][mine].tolist() == list(range(len(found[-1])))
            assert not row["tokens"][row["segments"] == 0].any()
    assert sorted(found) == sorted(document.tolist() for document in DOCUMENTS)


def test_packing_resumes_at_every_row() -> None:
    made = streams.mix([packing(), packing().shuffle(3)], [1, 1], stop="each_once")
    whole = [row["tokens"].tolist() for row in made.partition(1, 0)]
    for cut in range(len(whole)):
        flow = made.partition(1, 0)
        list(islice(flow, cut))
        other = made.partition(1, 0)
        other.load_state_dict(json.loads(json.dumps(flow.state_dict())))
        assert [row["tokens"].tolist() for row in other] == whole[cut:]


def test_packed_batches_report_their_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(padding_counts, "PAUSE_FACTOR", 0)
    loader = fl.DataLoader(packing(), 4, seed=0)
    segments = torch.cat([batch["segments"] for batch in loader])
    padding = int(np.count_nonzero(segments.numpy() == 0))
    assert loader.stats().padding_share == padding / segments.numel()
    assert segments.shape[1] == 24


def test_documents_longer_than_a_row() -> None:
    long = streams.from_items([0], lambda _: [{"ids": list(range(60)), "labels": list(range(60))}])
    with pytest.raises(fl.errors.CollateError, match="60 tokens, more than max_tokens=25") as raised:
        list(long.pack(25).partition(0, 2))
    assert "in block 0 of partition 0 (epoch 2)" in "".join(raised.value.__notes__)
    cut = list(long.pack(25, long="truncate").partition(0, 0))
    assert [row["ids"].tolist() for row in cut] == [list(range(25))]
    split = list(long.pack(25, long="split").partition(0, 0))
    assert sorted(n for row in split for n in row["ids"][row["segments"] > 0].tolist()) == list(range(60))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: streams.mix([items(), items()], [1, -1]), r"weights\[1\] is -1.0: weights must be finite"),
        (lambda: streams.mix([items(), items()], [0, 0]), "all zero"),
        (lambda: streams.mix([items(), items()], [1]), "1 weights for 2 streams: pass one for each"),
        (lambda: streams.mix([items(), items()], [1, float("nan")]), r"weights\[1\] is nan"),
        (lambda: next(streams.mix([items()], lambda epoch: [-1]).partition(0, 7)), r"weights\[0\] of epoch 7 is -1"),
        (lambda: streams.mix([items(), items()], [[1, 1], [1]]), "1 weights of epoch 1 for 2 streams: pass one"),
        (lambda: streams.mix([items(), items()], ["a", 1]), r"the weights are \['a', 1\]: pass one number for each of"),
        (lambda: next(streams.mix([items()], lambda _: None).partition(0, 3)), "weights of epoch 3 are None"),
        (lambda: streams.mix([], []), "at least one stream"),
        (lambda: streams.mix([items(), [1, 2]], [1, 1]), r"streams\[1\] is list: make a stream of it"),
        (lambda: streams.mix(items(), [1]), "takes a list of streams; got SampleStream"),
        (lambda: items().shuffle(2.5), "buffer must be an integer of at least 1, but is 2.5"),
        (lambda: streams.mix([items()], [1], stop="never"), "stop must be one of 'first_exhausted'"),
        (lambda: streams.mix([items()], [1], max_repeats=2), "max_repeats= is for stop='all_exhausted'"),
        (lambda: streams.mix([items()], [1], stop=0), "stop must be at least 1, but is 0"),
        (lambda: streams.mix([items()], [1], stop=2.5), "stop must be an integer"),
        (lambda: streams.mix([items()], [1], stop=5, max_repeats=0), "max_repeats must be at least 1"),
        (lambda: streams.mix([items()], [1], temperature=0), "temperature must be above 0, but is 0"),
        (lambda: streams.curriculum([items()], []), "phases is empty"),
        (lambda: streams.curriculum([items()], [5]), r"phases\[0\] is 5: pass \(samples, weights\)"),
        (lambda: streams.curriculum([items()], [(5, [1]), (0, [1])]), r"phases\[1\] must be at least 1"),
        (lambda: streams.curriculum([items()], [(5, [-1])]), r"phases\[0\]: weights\[0\] is -1.0"),
        (lambda: streams.curriculum(items(), [(5, [1])]), r"curriculum\(\) takes a list of streams"),
        (lambda: streams.from_dataset(range(3), partitions=4), "partitions=4 is more than the 3 samples"),
        (lambda: streams.from_dataset(Plain(), partitions=4), "are for map-style datasets"),
        (lambda: streams.from_dataset(range(3), [0, 1, 2]), "must be a sampler of fl.samplers"),
        (lambda: streams.from_items([], iter), "items is empty"),
        (lambda: items().shuffle(0), "buffer must be at least 1, but is 0"),
        (lambda: items().pack(8, long="drop"), "long must be one of 'raise', 'truncate', 'split'"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused(make: Any, said: str) -> None:
    with pytest.raises(fl.errors.ArgumentError, match=said):
        make()


def test_an_error_of_a_step_names_the_sample() -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        list(items().map(lambda sample: 1 // (sample - 1203)).partition(2, 4))
    assert "sample 3 of partition 2 (epoch 4), in the step" in raised.value.__notes__[0]


def test_a_state_of_another_stream_is_refused() -> None:
    loader = fl.DataLoader(items().shuffle(5), 2, seed=1)
    next(iter(loader))
    with pytest.raises(fl.errors.StateError, match="belongs to another loader"):
        fl.DataLoader(items().shuffle(6), 2, seed=1).load_state_dict(loader.state_dict())


def test_changed_weights_and_stops_are_named() -> None:
    def resumed(before: dict[str, Any], after: dict[str, Any]) -> None:
        loaders = [fl.DataLoader(streams.mix([items(), items()], **each), 2, seed=1) for each in (before, after)]
        next(iter(loaders[0]))
        loaders[1].load_state_dict(loaders[0].state_dict())
        list(loaders[1])

    resumed({"weights": [1, 1]}, {"weights": [3, 3]})
    with pytest.raises(fl.errors.StateError, match=r"weights=\[2: 0.5, 0.5\].*here it is .*weights=\[2: 0.75, 0.25\]"):
        resumed({"weights": [1, 1]}, {"weights": [3, 1]})
    with pytest.raises(fl.errors.StateError, match=r"here it is .*rows=\[2: \[2: 0.75, 0.25\], \[2: 0.5, 0.5\]\]"):
        resumed({"weights": [[3, 1], [1, 0]]}, {"weights": [[3, 1], [1, 1]]})
    with pytest.raises(fl.errors.StateError, match=r"here it is .*stop='each_once'"):
        resumed({"weights": [1, 1]}, {"weights": [1, 1], "stop": "each_once"})
    with pytest.raises(fl.errors.StateError, match=r"the weights \[0.5, 0.5\], but those of epoch 0 are now \[0.75"):
        resumed({"weights": lambda _: [1, 1]}, {"weights": lambda _: [3, 1]})


def test_a_mixture_continues_in_each_epoch_with_its_weights() -> None:
    """A state of an epoch fits a curriculum that changes later epochs only."""
    parts = [streams.from_items([range(first, first + 40)], iter) for first in (0, 100)]

    def course(later: float) -> Any:
        return streams.mix(parts, lambda epoch: [1, 1] if epoch == 0 else [1, later], stop="each_once")

    first, whole = (fl.DataLoader(course(later), 4, seed=1) for later in (2, 9))
    expected = [received(whole), received(whole)]
    before = received(first, 3)
    whole.load_state_dict(first.state_dict())
    assert [before + received(whole), received(whole)] == expected


def test_torchs_workers_share_the_partitions() -> None:
    seen = sorted(TorchDataLoader(shuffled(), batch_size=None, num_workers=2))
    assert seen == list(range(50))


def test_a_collate_function_may_draw_for_the_batches_of_a_stream() -> None:
    def collate(samples: list[int]) -> Any:
        return batch_keys(len(samples)).tolist()

    first, second = (list(fl.DataLoader(items(), 4, seed=0, collate_fn=collate)) for _ in range(2))
    assert first == second
    assert len({key for keys in first for key in keys}) == 31


def test_numbered_keys_are_those_of_their_addresses() -> None:
    place = FlowPlace(3, 1, 2, 4, 1)
    keys = place.keys("mix", 0)
    for number in (0, 1, 127, 128, 5, 1_000_000, 6):
        assert keys[number] == place.key("mix", 0, number)


class Failing:
    """A counter that raises at some numbers and goes on; its state is one dict that changes."""

    def __init__(self, n: int, *bad: int) -> None:
        self.n, self.bad, self.state = n, bad, {"at": 0}

    def __iter__(self) -> Failing:
        return self

    def __next__(self) -> int:
        at = self.state["at"]
        if at == self.n:
            raise StopIteration
        self.state["at"] = at + 1
        if at in self.bad:
            raise ValueError(f"bad {at}")
        return at


class FailingWithState(Failing):
    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = dict(state)


def went_on(flow: Iterator[Any]) -> list[Any]:
    """All samples, and the texts of errors that the loop survived."""
    seen: list[Any] = []
    for _ in range(1000):  # a flow that stays at an error would raise it forever
        try:
            seen.append(next(flow))
        except StopIteration:
            return seen
        except (ValueError, RuntimeError, fl.errors.CollateError) as error:
            seen.append(str(error)[:6])
    raise AssertionError("the flow does not end")


def after_errors(numbers: Any, *bad: int) -> Any:
    def check(sample: int) -> int:
        if sample in bad:
            raise ValueError(f"bad {sample}")
        return sample

    return streams.from_items([numbers], iter).map(check)


@pytest.mark.parametrize(
    "made",
    [
        streams.from_items([12], lambda n: Failing(n, 5, 6)),
        streams.from_items([12], lambda n: Failing(n, 5, 6)).shuffle(4),
        streams.from_items([12], lambda n: FailingWithState(n, 5, 6)).shuffle(4),
        after_errors(range(12), 5, 6).shuffle(4),
        after_errors(range(12), 5, 6).shuffle(4).map(str).shuffle(3).map(int),
    ],
    ids=["read again", "block, read again", "block, live state", "map", "two blocks"],
)
def test_a_flow_goes_on_after_errors_and_resumes(made: Any) -> None:
    whole = went_on(made.partition(0, 0))
    assert sorted(each for each in whole if isinstance(each, int)) == [0, 1, 2, 3, 4, 7, 8, 9, 10, 11]
    for cut in range(len(whole) + 1):
        flow, before = made.partition(0, 0), []
        for _ in range(cut):
            try:
                before.append(next(flow))
            except ValueError:
                before.append("error")
        state = flow.state_dict()
        went_on(flow)
        resumed = made.partition(0, 0)
        resumed.load_state_dict(state)
        samples = [each for each in [*before, *went_on(resumed)] if isinstance(each, int)]
        assert samples == [each for each in whole if isinstance(each, int)], f"resumed after {cut}"


def test_a_resume_passes_no_new_errors() -> None:
    def flow(*bad: int) -> Any:
        return streams.from_items([12], lambda n: Failing(n, *bad)).shuffle(4).partition(0, 0)

    first = flow()
    list(islice(first, 6))
    with pytest.raises(ValueError, match="bad 2"):
        flow(2).load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match="bad 5"):
        flow(5).load_state_dict(first.state_dict())


def test_a_block_that_cannot_be_made_is_left_out() -> None:
    tensors = [torch.tensor([number] * (1 + (number == 3))) for number in range(8)]
    batches = went_on(streams.from_items([tensors], iter).batch(2).partition(0, 0))
    assert [each if isinstance(each, str) else each.flatten().tolist() for each in batches] == [
        [0, 1], "stack ", [4, 5], [6, 7],
    ]  # fmt: skip
    texts = [[1, 1], [2, 2], [3, 3], [4] * 9, [5, 5]]
    rows = went_on(streams.from_items([texts], iter).pack(4, buffer=2).partition(0, 0))
    assert [each if isinstance(each, str) else each["tokens"].tolist() for each in rows][::2] == [
        [1, 1, 2, 2], [5, 5, 0, 0],
    ]  # fmt: skip
    assert isinstance(rows[1], str)


@pytest.mark.parametrize("many", [False, True])
def test_a_map_style_sample_that_raises_is_passed(many: bool) -> None:
    class Numbers(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> int:
            if index in (4, 33):
                raise ValueError(f"bad {index}")
            return index

        if many:

            def __getitems__(self, indices: list[int]) -> list[int]:
                return [self[index] for index in indices]

    expected: list[Any] = list(range(40))
    expected[4], expected[33] = "bad 4", "bad 33"
    assert went_on(streams.from_dataset(Numbers()).partition(0, 0)) == expected


def test_packing_refuses_fields_of_the_names_it_adds() -> None:
    with pytest.raises(fl.errors.CollateError, match=r"adds fields \['positions'\]"):
        list(streams.from_items([[{"tokens": [1, 2], "positions": [7, 8]}]], iter).pack(4).partition(0, 0))


def test_weights_are_those_of_the_loops_epoch_in_every_pass() -> None:
    parts = [streams.from_items([[name] * 1000], iter) for name in "ab"]
    course = streams.mix(parts, [[9, 1], [1, 9]], stop=100).repeat(3)
    for epoch, share in enumerate((90, 10)):
        drawn = list(course.partition(0, epoch))
        assert [drawn[at : at + 100].count("a") for at in (0, 100, 200)] == [share] * 3
    epochs: list[int] = []
    nested = streams.mix([streams.mix(parts, lambda epoch: epochs.append(epoch) or [1, 1], stop=10)], [1], stop=25)
    list(nested.repeat(2).partition(0, 7))
    assert set(epochs) == {7}
    with pytest.raises(ZeroDivisionError) as raised:
        list(items().repeat(2).map(lambda sample: 1 // (sample < 1211)).repeat(2).partition(2, 4))
    assert "(epoch 4)" in raised.value.__notes__[0]


def test_epochs_of_later_passes_fit_seeds_of_32_bits() -> None:
    class Permuted(torch.utils.data.IterableDataset[int]):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter(np.random.RandomState(5 + self.epoch).permutation(30).tolist())

    passes = list(streams.from_dataset(Permuted()).repeat(3).partition(0, 0))
    assert len({tuple(passes[at : at + 30]) for at in (0, 30, 60)}) == 3


def one(item: Any) -> Any:
    return streams.from_items([item], iter)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *((one(a), one(b)) for a, b in [
            (Path("a"), Path("b")), (Path("a"), "a"), (b"a", b"b"), (range(5), range(5, 10)), ({"p": 1}, {"p": 2}),
            ({1, 2}, {1, 3}), (np.arange(3), np.arange(1, 4)), (torch.arange(3), torch.arange(1, 4)),
            (np.int64(1), np.int64(2)),
        ]),
        (one([*range(100), 1]), one([*range(100), 2])),
        (one("a").map(partial(max, 1)), one("a").map(partial(max, 2))),
        (one("a").pack(4, value={"a": 1}), one("a").pack(4, value={"a": 2})),
    ],
)  # fmt: skip
def test_streams_of_other_samples_differ_in_their_fingerprints(first: Any, second: Any) -> None:
    assert first.fingerprint() != second.fingerprint()
    assert "0x" not in first.fingerprint(), "equal in every process"


def test_a_stream_of_other_files_differs_in_its_fingerprint(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text(name)

    def made(*names: str) -> str:
        return streams.from_dataset(fl.datasets.Files([tmp_path / name for name in names])).fingerprint()

    assert made("a", "b") != made("a", "c") != made("c", "a")
    assert made("a", "b") == made("a", "b")
