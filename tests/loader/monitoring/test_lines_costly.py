"""The user's lines that take the time of samples."""

from __future__ import annotations

import inspect
import json
import queue
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from undisturbed import blames_others

import feedline as fl
from feedline.errors import ArgumentError
from feedline.loader.monitoring.lines import costly_lines

TEXT = json.dumps({str(number): list(range(20)) for number in range(200)})


def stack_slowly(samples: list[torch.Tensor]) -> torch.Tensor:
    time.sleep(0.01)
    return torch.stack(samples)


class Slow(Dataset[torch.Tensor]):
    reads = 0

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        Slow.reads += 1
        time.sleep(0.004)  # the line
        return torch.zeros(2) + torch.rand(1)


class Busy(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        end = time.thread_time() + 0.002  # not of a clock, which goes on while other programs have the CPU
        while time.thread_time() < end: pass  # the line  # noqa: E701  # fmt: skip
        return torch.zeros(2)


class Locked(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        sum(range(1_500_000))  # the line: one call, in which nothing sees it
        time.sleep(0.005)
        return torch.zeros(2)


class Parsed(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        texts = [json.loads(TEXT) for _ in range(20)]  # the line
        return torch.zeros(len(texts))


class Broken(Slow):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("no such sample")


class SlowStream(IterableDataset[torch.Tensor]):
    """Samples, after some that the loop has read."""

    def __init__(self, path: Path) -> None:
        self.path, self.reads = path, 0

    def __iter__(self) -> Any:
        with self.path.open() as file:
            for text in file:
                self.reads += 1
                time.sleep(0.004)  # the line
                yield torch.full((2,), float(text))


class OfFile(SlowStream):
    """Samples of an open file, which a copy would share."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.file = path.open()

    def __iter__(self) -> Any:
        for text in self.file:
            yield float(text)


class OfQueue(SlowStream):
    def __iter__(self) -> Any:
        with suppress(queue.Empty):
            yield 1.0


class Waiting(SlowStream):
    """A stream that waits for its next sample, and for ever."""

    def __iter__(self) -> Any:
        threading.Event().wait()
        yield 1.0


class Failing(SlowStream):
    def __iter__(self) -> Any:
        yield 1.0
        raise ValueError("no such sample")


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers"
    path.write_text("\n".join(map(str, range(50))))
    return path


def the_line(cls: type[Any], method: str = "__getitem__") -> int:
    lines, first = inspect.getsourcelines(getattr(cls, method))
    return next(first + number for number, line in enumerate(lines) if "# the line" in line)


def test_the_line_that_sleeps_takes_the_time_and_nothing_is_drawn() -> None:
    state, threads = torch.get_rng_state(), threading.active_count()
    first, *_ = costly_lines(fl.DataLoader(Slow(), batch_size=4), 0.3)
    assert first.where == f"test_lines_costly.py:{the_line(Slow)}"
    assert first.text == "time.sleep(0.004)  # the line"
    assert 0.5 < first.share <= 1
    assert torch.equal(torch.get_rng_state(), state)
    assert threading.active_count() == threads


def test_a_line_that_computes_is_seen_though_it_keeps_pythons_lock() -> None:
    usual_s = sys.getswitchinterval()
    first, *_ = costly_lines(fl.DataLoader(Busy(), batch_size=4), 0.3)
    assert first.where == f"test_lines_costly.py:{the_line(Busy)}"
    assert 0.5 < first.share <= 1
    assert sys.getswitchinterval() == usual_s


def test_a_call_that_keeps_pythons_lock_has_its_whole_time() -> None:
    first, *_ = costly_lines(fl.DataLoader(Locked(), batch_size=4), 0.3)
    assert first.where == f"test_lines_costly.py:{the_line(Locked)}"


def test_lines_have_their_stage_and_the_library_that_they_call() -> None:
    first, *_ = costly_lines(fl.DataLoader(Parsed(), batch_size=4), 0.3)
    assert first.where == f"test_lines_costly.py:{the_line(Parsed)}"
    assert (first.stage, first.library, first.is_own) == ("fetch", "json", True)
    first, second, *_ = costly_lines(fl.DataLoader(Slow(), batch_size=2, collate_fn=stack_slowly), 0.3)
    assert {first.stage, second.stage} == {"fetch", "collate"}
    default, *_ = costly_lines(fl.DataLoader(TensorDataset(torch.zeros(64, 100_000)), batch_size=64), 0.3)
    assert not default.is_own


def test_the_costly_line_is_advised_on_request() -> None:
    loader = fl.DataLoader(Slow(), batch_size=8)
    for _ in loader:
        pass
    advised = [advice for advice in loader.report(lines=True).advice if "# the line" in advice.text]
    assert len(advised) == 1
    assert advised[0].gain > 1.5


def test_a_verdict_names_lines_only_on_request() -> None:
    loader = fl.DataLoader(Slow(), batch_size=8)
    for _ in loader:
        pass
    before = Slow.reads
    assert loader.report().lines == ()
    assert Slow.reads == before
    verdict = loader.report(lines=True)
    assert Slow.reads > before
    assert "time.sleep(0.004)" in verdict.text(80)
    assert all(len(line) <= 40 for line in verdict.text(40).splitlines())
    assert loader.delivered == 0  # the epoch is over, and nothing was delivered


def test_a_dataset_that_raises_leaves_the_verdict() -> None:
    loader = fl.DataLoader(Slow(), batch_size=8)
    for _ in loader:
        pass
    loader.dataset.__class__ = Broken
    verdict = loader.report(lines=True)
    assert verdict.limiting_stage == "fetch" or blames_others(verdict)
    assert "ValueError: no such sample" in verdict.notes[-1]


def test_a_batch_sampler_of_the_user_makes_batches() -> None:
    class Batches(torch.utils.data.BatchSampler):
        """No plain batch sampler: the loader has no batch size."""

    sampler = Batches(range(50), 4, drop_last=False)
    loader = fl.DataLoader(Slow(), batch_sampler=sampler, collate_fn=lambda samples: torch.stack(samples))
    assert costly_lines(loader, 0.3)[0].text.endswith("# the line")


def test_the_line_of_a_stream_takes_the_time_and_the_stream_stays_where_it_is(numbers: Path) -> None:
    dataset = SlowStream(numbers)
    with fl.DataLoader(dataset, batch_size=4) as loader:
        batches = iter(loader)
        before = [next(batches), next(batches)]
        reads = dataset.reads
        verdict = loader.report(lines=True)
        first = verdict.lines[0]
        assert first.where == f"test_lines_costly.py:{the_line(SlowStream, '__iter__')}"
        assert (first.stage, first.share > 0.5) == ("fetch", True)
        assert dataset.reads == reads
        assert torch.cat([*before, *batches])[:, 0].tolist() == list(range(50))


@pytest.mark.parametrize("kind", [OfFile, OfQueue])
def test_a_stream_that_a_copy_would_advance_is_not_read(kind: type[SlowStream], numbers: Path) -> None:
    dataset: Any = kind(numbers)
    assert costly_lines(fl.DataLoader(dataset), 0.05) == ()
    if kind is OfFile:
        with dataset.file:
            assert dataset.file.tell() == 0


def test_a_stream_that_waits_or_fails_leaves_the_verdict(numbers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feedline.loader.monitoring.lines._LATE_S", 0.1)
    assert costly_lines(fl.DataLoader(Waiting(numbers)), 0.05) == ()
    with pytest.raises(ValueError, match="no such sample"):
        costly_lines(fl.DataLoader(Failing(numbers)), 0.3)


def test_empty_datasets_have_no_lines() -> None:
    assert costly_lines(fl.DataLoader(TensorDataset(torch.zeros(0))), 0.05) == ()


def test_other_arguments_are_predicted() -> None:
    loader = fl.DataLoader(Slow(), batch_size=4)
    with pytest.raises(ArgumentError, match="fewer than two batches"):
        loader.report().predict(num_workers=4)
    for _ in loader:
        pass
    verdict = loader.report()
    gain = verdict.predict(num_workers=4, worker_method="thread")
    assert gain.low <= gain.gain <= gain.high
    assert gain.gain > 1 or blames_others(verdict)  # by how much, the tests of the model say
    with pytest.raises(ArgumentError, match="batch_size=8"):
        verdict.predict(batch_size=8)
    with pytest.raises(ArgumentError, match="no change"):
        verdict.predict()
