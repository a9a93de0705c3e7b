from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from diagonals import diagonal
from torch.utils.data import DataLoader as TorchDataLoader

import datasets
import feedline as fl
from feedline.core.huggingface import loses_shuffle_buffer
from feedline.datasets import HuggingFaceStream
from feedline.errors import ArgumentError

N = 48


@pytest.fixture(autouse=True)
def _no_progress_bars() -> Iterator[None]:
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def plain() -> Any:
    return datasets.Dataset.from_dict({"a": list(range(N))}).to_iterable_dataset(num_shards=3)


def incremented(example: Any) -> Any:
    return {"a": example["a"] + 100}


def repeated(batch: Any) -> Any:
    return {"a": [value for value in batch["a"] for _ in range(2)]}


def not_third(example: Any) -> bool:
    return bool(example["a"] % 3)


def numbered(example: Any, at: int) -> Any:
    return {"a": example["a"] + 1000 * at}


def interleaved(**arguments: Any) -> Any:
    short = datasets.Dataset.from_dict({"a": list(range(1000, 1011))}).to_iterable_dataset(num_shards=2)
    return datasets.interleave_datasets([plain(), short], **arguments)


def same(batch: Any) -> Any:
    return {"a": batch["a"]}


PIPELINES: dict[str, Callable[[], Any]] = {
    "plain": plain,
    "map": lambda: plain().map(incremented),
    "batched map": lambda: plain().map(repeated, batched=True, batch_size=5),
    "filter": lambda: plain().filter(not_third),
    "torch": lambda: plain().with_format("torch"),
    "shuffled": lambda: plain().shuffle(seed=1, buffer_size=7),
    "shuffled and mapped": lambda: plain().shuffle(seed=1, buffer_size=7).map(incremented),
    "take": lambda: plain().take(20),
    "skip": lambda: plain().skip(20),
    "with indices": lambda: plain().map(numbered, with_indices=True),
    "short batches dropped": lambda: plain().map(same, batched=True, batch_size=5, drop_last_batch=True),
    "interleaved": interleaved,
    "interleaved by chance": lambda: interleaved(probabilities=[0.5, 0.5], seed=1),
    "interleaved until all end": lambda: interleaved(stopping_strategy="all_exhausted"),
    "interleaved once each": lambda: interleaved(stopping_strategy="all_exhausted_without_replacement"),
}


def values(batches: Any) -> list[list[int]]:
    return [batch["a"].tolist() for batch in batches]


def flat(batches: list[list[int]]) -> list[int]:
    return [value for batch in batches for value in batch]


@pytest.mark.parametrize(("name", "buffer"), diagonal([*PIPELINES], [None, 5]))
def test_a_stream_resumes_exactly_wherever_it_is_cut(name: str, buffer: int | None) -> None:
    stream = HuggingFaceStream(PIPELINES[name](), buffer)
    whole = values(fl.DataLoader(stream, 4))
    assert sorted(flat(whole)) == sorted(example["a"] for example in PIPELINES[name]())
    for cut in range(1, len(whole), 3):
        loader = fl.DataLoader(stream, 4)
        batches = iter(loader)
        seen = [next(batches)["a"].tolist() for _ in range(cut)]
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = fl.DataLoader(HuggingFaceStream(PIPELINES[name](), buffer), 4)
        resumed.load_state_dict(state)
        assert seen + values(resumed) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_change_nothing(workers: int) -> None:
    stream = HuggingFaceStream(plain(), 5)
    with fl.DataLoader(stream, 4, num_workers=workers, worker_method="process") as loader:
        assert values(loader) == values(fl.DataLoader(stream, 4))


def test_each_epoch_mixes_again_and_the_seed_decides() -> None:
    loader = fl.DataLoader(HuggingFaceStream(plain(), 8), 4)
    first, second = flat(values(loader)), flat(values(loader))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(N))
    assert flat(values(fl.DataLoader(HuggingFaceStream(plain(), 8, seed=1), 4))) != first
    assert flat(values(fl.DataLoader(HuggingFaceStream(plain()), 4))) != first


def test_shards_are_partitions_unless_examples_are_counted() -> None:
    assert HuggingFaceStream(plain()).num_partitions == 3
    assert HuggingFaceStream(plain().take(5)).num_partitions == 1
    assert HuggingFaceStream(interleaved()).num_partitions == 1
    assert HuggingFaceStream(PIPELINES["interleaved once each"]()).num_partitions == 2
    assert [example["a"] for example in HuggingFaceStream(plain())] == list(range(N))


def test_ranks_divide_the_shards() -> None:
    seen = [flat(values(fl.DataLoader(HuggingFaceStream(plain()), 4, distributed=(rank, 3)))) for rank in range(3)]
    assert sorted(flat(seen)) == list(range(N))
    assert [min(part) for part in seen] == [0, 16, 32]


class TestInTorchsLoader:
    @pytest.mark.parametrize("workers", [0, 1, 2])
    def test_each_example_comes_once(self, workers: int) -> None:
        loader = TorchDataLoader(HuggingFaceStream(plain(), 8), 4, num_workers=workers)
        assert sorted(flat(values(loader))) == list(range(N))
        one_partition = TorchDataLoader(HuggingFaceStream(plain().take(5)), 4, num_workers=workers)
        assert flat(values(one_partition)) == list(range(5))

    @pytest.mark.parametrize("workers", [0, 2])
    def test_each_pass_of_a_process_is_the_next_epoch(self, workers: int) -> None:
        loader = TorchDataLoader(HuggingFaceStream(plain(), 8), 4, num_workers=workers, persistent_workers=workers > 0)
        first, second = flat(values(loader)), flat(values(loader))
        assert first != second
        assert sorted(second) == list(range(N))
        assert flat(values(TorchDataLoader(HuggingFaceStream(plain(), 8), 4, num_workers=workers))) == first

    @pytest.mark.parametrize(
        ("persistent", "start"),
        [(False, "fork"), (True, "fork"), pytest.param(True, "spawn", marks=pytest.mark.nightly)],
    )
    def test_workers_get_the_epoch(self, persistent: bool, start: str) -> None:
        """One worker reads what this process reads: importing `datasets` in several takes seconds."""

        def epochs(**workers: Any) -> list[list[int]]:
            stream, seen = HuggingFaceStream(plain(), 8), []
            loader = TorchDataLoader(stream, 4, **workers)
            for epoch in (2, 0, 1):
                stream.set_epoch(epoch)
                seen.append(flat(values(loader)))
            return seen

        two, zero, one = here = epochs()
        assert zero != one != two != zero
        assert epochs(num_workers=1, persistent_workers=persistent, multiprocessing_context=start) == here

    def test_epochs_are_those_of_feedlines_partitions(self) -> None:
        stream = HuggingFaceStream(plain(), 8)
        for epoch in (0, 1, 0):
            stream.set_epoch(epoch)
            assert [x["a"] for x in stream] == [x["a"] for part in range(3) for x in stream.partition(part, epoch)]


def test_a_shuffle_buffer_of_datasets_is_noticed() -> None:
    assert loses_shuffle_buffer(PIPELINES["shuffled and mapped"]())
    assert not loses_shuffle_buffer(PIPELINES["batched map"]())
    assert not loses_shuffle_buffer([1, 2])


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"reads datasets\.IterableDataset, not list"):
        HuggingFaceStream([1])
    with pytest.raises(ArgumentError, match="shuffle_buffer=0 must be at least 1"):
        HuggingFaceStream(plain(), 0)
