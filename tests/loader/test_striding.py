"""Streams without partitions on several ranks: each reads all of it, and keeps its share."""

from __future__ import annotations

import json
import os
import tarfile
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import IterableDataset, get_worker_info

import feedline as fl

pytestmark = pytest.mark.filterwarnings("ignore:.*has no partitions. each of")
CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large]


class Plain(IterableDataset[Any]):
    """The numbers below n with a draw each; workers share them."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(first, self.n, step):
            yield number, float(fl.sample_rng().random())


class Counting(IterableDataset[Any]):
    """The same with a state, and without draws."""

    def __init__(self, n: int) -> None:
        self.n, self.at = n, 0

    def __iter__(self) -> Iterator[Any]:
        while self.at < self.n:
            self.at += 1
            yield self.at - 1, 0.0
        self.at = 0

    def state_dict(self) -> Any:
        return self.at

    def load_state_dict(self, state: Any) -> None:
        self.at = state


def rows(batch: Any) -> list[Any]:
    return list(zip(*(torch.as_tensor(column).tolist() for column in batch), strict=True))


def loader(kind: Any, n: int, rank: int, world: int, batch_size: int, **more: Any) -> Any:
    return fl.DataLoader(kind(n), batch_size, seed=3, distributed=(rank, world), **more)


@given(
    st.sampled_from([Plain, Counting]), st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4),
)  # fmt: skip
@settings(max_examples=80, deadline=None, suppress_health_check=CHECKS)
def test_ranks_share_one_order_and_go_on_as_others(kind: Any, n: int, legs: list[tuple[int, int, int]]) -> None:
    """All ranks take equally many steps; together they read the stream's order, for all earlier world sizes."""
    seen: list[Any] = []
    state = None
    for number, (world, batch_size, steps) in enumerate([*legs, (3, 2, None)]):
        ranks = [loader(kind, n, rank, world, batch_size) for rank in range(world)]
        for each in ranks:
            if state is not None:
                each.load_state_dict(state)
        received = [[rows(batch) for batch in islice(each, steps)] for each in ranks]
        assert len({tuple(map(len, batches)) for batches in received}) == 1, "steps or sizes differ"
        columns = [[row for batch in batches for row in batch] for batches in received]
        seen += [row for round_ in zip(*columns, strict=True) for row in round_]
        states = [json.loads(json.dumps(each.state_dict())) for each in ranks]
        assert all(each == states[0] for each in states), number
        state = states[0]
        if state["epoch"]:
            break
    if state is not None and state["epoch"] == 0:
        return
    assert [row[0] for row in seen[:n]] == list(range(n))
    assert len(seen) - n < 4
    assert all(row in seen[:n] for row in seen[n:]), "the last round is filled with its own samples"


class Breaking(Plain):
    """An iterator that raises at one number and goes on."""

    def __init__(self, at: int) -> None:
        super().__init__(17)
        self.at = at

    def __iter__(self) -> Iterator[Any]:
        return map(self.read, range(self.n))

    def read(self, number: int) -> Any:
        if number == self.at:
            raise ValueError(number)
        return number, float(fl.sample_rng().random())


def survive(loader: Any, steps: int | None = None) -> list[Any]:
    """The batches of some steps; None for each that has raised."""
    received: list[Any] = []
    iterator = iter(loader)
    while steps is None or len(received) < steps:
        try:
            received.append(rows(next(iterator)))
        except ValueError:
            received.append(None)
        except StopIteration:
            break
    return received


@pytest.mark.parametrize("at", [4, 5])
def test_a_stream_that_raised_and_continues_resumes_exactly(at: int) -> None:
    everything: list[Any] = []
    for rank in range(2):
        whole = survive(loader(Breaking, at, rank, 2, 2))
        assert whole[1] is None
        everything += [row for batch in whole if batch is not None for row in batch]
        for steps in range(1, len(whole)):
            cut, resumed = loader(Breaking, at, rank, 2, 2), loader(Breaking, at, rank, 2, 2)
            begun = survive(cut, steps)
            resumed.load_state_dict(json.loads(json.dumps(cut.state_dict())))
            left = survive(resumed)
            assert left == whole[steps - (begun[-1] is None) :], (rank, steps)
    numbers = sorted(number for number, _ in everything)
    assert [*dict.fromkeys(numbers)] == [*range(4), *range(at + 1, 17)]
    assert len({draw for _, draw in everything}) == len(set(numbers))


def test_draws_do_not_depend_on_the_number_of_ranks() -> None:
    values = []
    for world in (2, 3):
        received = [
            [row for batch in loader(Plain, 24, rank, world, 2) for row in rows(batch)] for rank in range(world)
        ]
        values.append(sorted(row for of_rank in received for row in of_rank))
    assert values[0] == values[1]
    assert len({row[1] for row in values[0]}) == 24


def test_workers_and_ranks_share_a_stream() -> None:
    received = []
    for rank in range(2):
        with loader(Plain, 20, rank, 2, 2, num_workers=2, worker_method="process") as each:
            received += [row[0] for batch in each for row in rows(batch)]
    assert sorted(received) == list(range(20))


def test_a_warning_says_what_it_costs() -> None:
    with pytest.warns(UserWarning, match="each of 4 ranks reads all of it.*so reading costs 4 times"):
        loader(Plain, 20, 0, 4, 2)


class Sharing(Plain):
    """Shares the samples among the ranks, in a function of its own."""

    def __iter__(self) -> Iterator[Any]:
        def mine() -> Iterator[Any]:
            rank, world = (torch.distributed.get_rank(), 2) if torch.distributed.is_initialized() else (0, 2)
            yield from range(rank, self.n, world)

        return mine()


class Sliced(Plain):
    """Was divided when it was made, by a class method."""

    @classmethod
    def of(cls, n: int) -> Sliced:
        return cls(n // int(os.environ.get("WORLD_SIZE", "1")))


class Keeping(Plain):
    """Has its rank."""

    def __init__(self, n: int, rank: int, world: int) -> None:
        super().__init__(n)
        self._rank, self.num_replicas = rank, world


def test_a_stream_that_has_its_rank_is_refused() -> None:
    chained = torch.utils.data.ChainDataset([Plain(3), Sharing(20)])
    for stream, found in (
        (Sharing(20), r"Sharing looks up its rank \('get_rank' in mine of its code\).*lost. .*leave out distributed="),
        (chained, "Sharing looks up its rank"),
        (Sliced.of(20), r"Sliced looks up its rank \('WORLD_SIZE' in of of its code\)"),
        (Keeping(20, 1, 2), "Keeping has the attributes rank=1 and num_replicas=2"),
    ):
        with pytest.raises(fl.errors.ArgumentError, match=found):
            fl.DataLoader(stream, distributed=(1, 2))
        fl.DataLoader(stream, distributed=fl.RankPolicy((1, 2), reads_all=True))
    fl.DataLoader(Keeping(20, 0, 2), distributed=(1, 2))  # attributes of another meaning


def environment_share(n: int) -> Iterator[int]:
    """Numbers of this rank, found where no look at the dataset's class finds it."""
    yield from range(int(os.environ["RANK"]), n, int(os.getenv("WORLD_SIZE", "1")))


def kept_share(n: int) -> Iterator[int]:
    """The same by an attribute, which calls nothing."""
    return iter(range(STATE.process_index, n, 2))


STATE = SimpleNamespace(process_index=1)  # as Accelerate's PartialState


class Knowing(Plain):
    def __iter__(self) -> Iterator[Any]:
        return kept_share(self.n)


class Asking(Plain):
    def __iter__(self) -> Iterator[Any]:
        return environment_share(self.n)


def copies() -> list[dict[str, str]]:
    return [{**os.environ}, dict(os.environ), os.environ.copy(), dict(os.environ.items())]


class Copying(Plain):
    """Copies the environment, which asks for nothing."""

    def __iter__(self) -> Iterator[Any]:
        assert len(copies()) == 4
        yield from range(self.n)


@pytest.mark.parametrize("method", [None, "thread", "process"])
def test_a_stream_that_asks_for_its_rank_is_refused_at_its_first_sample(
    method: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    workers = {} if method is None else {"num_workers": 1, "worker_method": method}
    with loader(Asking, 1, 1, 2, 2, **workers) as asking:
        for _ in range(2):  # this rank's own share is empty, and a second attempt finds no open stream
            with pytest.raises(fl.errors.ArgumentError, match=r"Asking looks up 'RANK', in .*test_striding.py:\d+, so"):
                next(iter(asking))
        asking.load_state_dict({**asking.state_dict(), "partitions": [[0, 1, 4, None, False]], "num_partitions": 1})
        with pytest.raises(fl.errors.ArgumentError, match="Asking looks up 'RANK'"):
            list(asking)
    with (
        loader(Knowing, 8, 1, 2, 2, **workers) as knowing,
        pytest.raises(fl.errors.ArgumentError, match=r"Knowing looks up 'process_index', in .*test_striding.py"),
    ):
        list(knowing)
    with fl.DataLoader(Asking(8), 2, seed=3, distributed=fl.RankPolicy(reads_all=True), **workers) as trusted:
        assert [batch.tolist() for batch in trusted] == [[3, 7]]
    with loader(Copying, 8, 1, 2, 4, **workers) as copying:
        assert [batch.tolist() for batch in copying] == [[1, 3, 5, 7]]


def test_a_stream_of_datasets_is_shared_by_its_shards() -> None:
    datasets = pytest.importorskip("datasets")
    from datasets.distributed import split_dataset_by_node

    stream = datasets.Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    share = split_dataset_by_node(stream, rank=1, world_size=2)
    for divided in (share, fl.datasets.HuggingFaceStream(share), share.take(30)):
        with pytest.raises(fl.errors.ArgumentError, match="is a share made by split_dataset_by_node"):
            fl.DataLoader(divided, distributed=(1, 2))
    seen = []
    for rank in range(2):
        made = fl.DataLoader(stream, 5, distributed=(rank, 2))
        seen.append([number for batch in made for number in batch["x"].tolist()])
    assert sorted(seen[0] + seen[1]) == list(range(40))
    assert seen[0][:5] == [0, 1, 2, 3, 4], "a rank reads a run of each shard, not every second sample"


def test_files_and_shards_are_shared_by_partition_without_a_warning(tmp_path: Path) -> None:
    """Each rank opens its own files only; one tar is a partition, too."""
    opened: list[str] = []
    for number in range(5):
        (tmp_path / f"{number}.txt").write_text("".join(f"{100 * number + row}\n" for row in range(3 + number)))
        with tarfile.open(tmp_path / f"{number}.tar", "w") as tar:
            tar.add(tmp_path / f"{number}.txt", "numbers.txt")

    def lines(path: Path) -> Iterator[int]:
        opened.append(path.stem)
        if path.suffix == ".txt":
            yield from map(int, path.read_text().split())
            return
        with tarfile.open(path) as tar:
            for member in tar:
                yield from map(int, tar.extractfile(member).read().split())  # type: ignore[union-attr]

    everything = sorted(100 * number + row for number in range(5) for row in range(3 + number))
    for suffix in ("txt", "tar"):
        stream = fl.streams.from_items(sorted(tmp_path.glob(f"*.{suffix}")), lines)
        seen, of_ranks = list[int](), []
        for rank in range(2):
            opened.clear()
            policy = fl.RankPolicy((rank, 2), uneven="stop")
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                seen += [number for batch in fl.DataLoader(stream, 2, distributed=policy) for number in batch.tolist()]
            of_ranks.append(sorted(opened))
        assert sorted(seen) == everything
        assert of_ranks == [["0", "2", "4"], ["1", "3"]]


def test_fewer_partitions_than_ranks_are_refused() -> None:
    lanes = fl.streams.from_items([1, 2, 3], range)
    with pytest.raises(fl.errors.ArgumentError, match=r"3 partitions, fewer than the 4 ranks: rank 3 would"):
        list(fl.DataLoader(lanes, distributed=(0, 4)))


def test_a_data_pipe_is_left_to_torch() -> None:
    pipe = torch.utils.data.datapipes.iter.IterableWrapper(range(5))
    with pytest.raises(fl.errors.ArgumentError, match="sharding_filter: leave out distributed="):
        list(fl.DataLoader(pipe, distributed=(0, 2)))
