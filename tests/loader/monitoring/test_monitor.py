"""Statistics over all epochs, and the page of a loader while its loop runs, hangs and ends."""

from __future__ import annotations

import gc
import io
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from debris import DebrisGuard
from gated import Gated, hanging_loop
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset
from tqdm import tqdm

import feedline as fl
from feedline.core.batch import Padding
from feedline.core.page import BATCHES, FoundPage, Page, PageContent, PageReader, find_pages
from feedline.core.proc import TICK_S, CpuTicks, ProcessStat
from feedline.loader.monitoring import machine, padding
from feedline.loader.monitoring import monitor as monitor_module
from feedline.loader.monitoring.diagnosis import verdict_pause_ns
from feedline.loader.monitoring.monitor import Monitor
from feedline.loader.report import Verdict
from feedline.workers.process.channels import StatusTable

WORKERS = [(0, "auto"), (2, "thread"), (2, "process")]
DATA = TensorDataset(torch.arange(40))


def stats_pids(loader: fl.DataLoader[Any]) -> tuple[int, ...]:
    return loader._fl_pools.pool_statistics().pids


KNOWN: set[int] = set()


@pytest.fixture(autouse=True)
def known() -> None:
    """Leave out the pages of loaders from earlier tests."""
    gc.collect()
    KNOWN.clear()
    KNOWN.update(found.inode for found in find_pages(os.getpid()))


def own_pages() -> list[FoundPage]:
    """The pages of the loaders of a test."""
    return [found for found in find_pages(os.getpid()) if found.inode not in KNOWN]


def page() -> PageContent:
    """The page of the test's only loader."""
    (found,) = own_pages()
    with PageReader(found.path) as reader:
        return reader.read()


@pytest.mark.parametrize(("workers", "method"), WORKERS)
@pytest.mark.parametrize("persistent", [True, False])
def test_sums_never_restart(workers: int, method: str, persistent: bool) -> None:
    keeps = persistent and workers > 0
    with fl.DataLoader(DATA, 4, num_workers=workers, worker_method=method, persistent_workers=keeps) as loader:
        for epoch in range(3):
            before = loader.stats()
            for number, _ in enumerate(loader):
                stats = loader.stats()
                assert stats.since_epoch is not None
                assert (stats.batches, stats.since_epoch.batches) == (10 * epoch + number + 1, number + 1)
                assert (stats.epoch, stats.position, stats.length) == (epoch, number + 1, 10)
            stats = loader.stats()
            assert (stats.samples, stats.epoch, stats.position) == (40 * (epoch + 1), epoch, 10)
            assert stats.wait_s > before.wait_s
            assert stats.stages["fetch"].count == 10 * (epoch + 1)
            assert sum(stats.loop["wait"].histogram) == stats.batches
            assert stats.since_epoch is not None
            assert stats.since_epoch.stages["fetch"].count == 10


def test_interleaved_iterators_count_together() -> None:
    loader = fl.DataLoader(DATA, 4)
    first, second = iter(loader), iter(loader)
    for batches in (first, second, first, second):
        next(batches)
    assert loader.stats().batches == 4


class Broken(Dataset[int]):
    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> int:
        if index in (7, 41):
            raise ValueError("no such file")
        return index


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_samples_stay_in_the_figures_after_their_epoch(workers: int, tmp_path: Path) -> None:
    with fl.DataLoader(Broken(), 5, num_workers=workers, on_error="skip") as loader:
        for epoch in range(1, 3):
            assert len(list(loader)) == 12
            stats = loader.stats()
            assert stats.skipped == 2 * epoch
            assert stats.since_epoch is not None
            assert stats.since_epoch.skipped == 2
            assert [(each[0], each[2]) for each in stats.latest_skipped[-2:]] == [(epoch - 1, 7), (epoch - 1, 41)]
        next(iter(loader))
        note = "4 samples could not be read and were skipped or replaced, the latest at index 41, 7;"
        assert note in str(loader.report()).replace("\n", " ")
        loader.report_html(tmp_path / "page.html")
    assert "Skipped samples" in (tmp_path / "page.html").read_text()


def test_restarts_are_counted_over_epochs() -> None:
    class Deadly(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            if index == 5 and torch.utils.data.get_worker_info() and not Path(marker).exists():
                Path(marker).touch()
                os.kill(os.getpid(), 9)
            return super().__getitem__(index)

    marker = f"/proc/{os.getpid()}/cwd/feedline-died-{os.getpid()}"
    try:
        with fl.DataLoader(Deadly(torch.arange(8)), 2, num_workers=1, worker_method="process") as loader:
            for _ in range(2):
                assert len(list(loader)) == 4
                assert loader.stats().restarts == 1
            assert loader.stats().since_epoch.restarts == 0  # type: ignore[union-attr]
    finally:
        Path(marker).unlink(missing_ok=True)


@pytest.mark.parametrize(("workers", "method"), WORKERS)
def test_a_hanging_loop_can_be_seen_from_outside(workers: int, method: str, tmp_path: Path) -> None:
    def hangs(_: Any) -> bool:
        return bool(own_pages()) and page().batches == 5 and page().phase_start_ns < 0

    with hanging_loop(tmp_path / "gate", hangs, num_workers=workers, worker_method=method) as loader:
        content, stats = page(), loader.stats()
        assert content.phase_start_ns <= -1
        assert content.figures["loader"].startswith("Gated")
        assert content.figures["length"] == 10
        assert stats.batches == 5
        if method == "process":
            status = StatusTable(os.dup(content.figures["status_fd"]))
            assert (5, 20) in [(status.batch_number(worker), status.sample_index(worker)) for worker in range(2)]
            assert {status.pid(worker) for worker in range(2)} == set(stats_pids(loader))
            status.close()
            assert stats.worker_nbytes > 1 << 20
    assert own_pages() == []


def test_slow_batches_have_indices_and_address() -> None:
    class Sleeping(Gated):
        def __getitem__(self, index: int) -> int:
            sleep(0.1 if index == 20 else 0)
            return index

    loader = fl.DataLoader(Sleeping(Path("unused")), 4)
    list(loader)
    slowest = loader.stats().slowest
    assert len(slowest) == 8
    assert slowest == tuple(sorted(slowest, key=lambda batch: -batch.seconds))
    (found,) = (batch for batch in slowest if batch.number == 5)  # on a stalled machine, another batch is slower
    assert (list(found.indices), found.address) == ([20, 21, 22, 23], "line 20")
    assert found.seconds >= 0.1


def test_an_address_that_raises_stops_nothing() -> None:
    class Broken(TensorDataset):
        def address(self, index: int) -> str:
            raise KeyError(index)

    loader = fl.DataLoader(Broken(torch.arange(8)), 4)
    list(loader)
    assert loader.stats().slowest[0].address.startswith("unknown: address(")


def test_an_address_is_a_place_of_a_file() -> None:
    class Lines(TensorDataset):
        def address(self, index: int) -> tuple[str, str]:
            return "rows.txt", f"line {index}"

    loader = fl.DataLoader(Lines(torch.arange(4)), 4)
    list(loader)
    assert loader.stats().slowest[0].address == "line 0 of rows.txt"


def test_streams_have_a_position_and_no_length() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            yield from range(10)

    loader = fl.DataLoader(Stream(), 4)
    batches = iter(loader)
    next(batches)
    assert (loader.stats().position, loader.stats().length, loader.delivered) == (1, None, 1)


@pytest.mark.parametrize("arguments", [{"batch_size": 4}, {"batch_size": None}, {"batch_size": 4, "in_order": False}])
def test_the_position_continues_after_a_resume(arguments: dict[str, Any]) -> None:
    loader = fl.DataLoader(DATA, seed=0, **arguments)
    for _ in zip(range(3), loader, strict=False):
        pass
    assert loader.delivered == 3
    resumed = fl.DataLoader(DATA, seed=0, **arguments)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.delivered == 3
    left = iter(resumed)
    assert len(left) == len(resumed) - 3  # type: ignore[arg-type]
    assert len(list(left)) == len(resumed) - 3
    assert (resumed.stats().position, resumed.stats().batches) == (len(resumed), len(resumed) - 3)


LENGTHS = np.random.default_rng(0).integers(1, 40, 500).tolist()


def as_inputs(rows: list[torch.Tensor]) -> dict[str, Any]:
    padded = fl.collate.pad()(rows)
    return {"nested": {"input_ids": padded.values, "attention_mask": padded.mask.long()}, "labels": padded.lengths > 3}


def as_lengths(rows: list[torch.Tensor]) -> dict[str, Any]:
    return {"length": torch.tensor([len(row) for row in rows])}


def as_padding_mask(rows: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, Any]]:
    padded = fl.collate.pad()(rows)
    return padded.values, {"padding_mask": ~padded.mask.numpy()}


@pytest.mark.parametrize(
    ("collate_fn", "hands"),
    [
        *((collate_fn, {}) for collate_fn in (fl.collate.pad(), as_inputs, as_lengths, as_padding_mask)),
        # Workers send the two numbers of each batch, whatever counted them.
        *((as_inputs, {"num_workers": 2, "worker_method": "thread"}), (as_lengths, {"num_workers": 1})),
    ],
)
def test_the_share_of_padding_is_that_of_all_batches(
    collate_fn: Any, hands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(padding, "PAUSE_FACTOR", 0)
    loader = fl.DataLoader([torch.ones(length) for length in LENGTHS], 3, collate_fn=collate_fn, **hands)  # type: ignore[arg-type]
    rows = [LENGTHS[start : start + 3] for start in range(0, len(LENGTHS), 3)]
    expected = 1 - sum(LENGTHS) / sum(max(row) * len(row) for row in rows)
    for _ in range(2):
        list(loader)
        assert loader.stats().padding_share == pytest.approx(expected, abs=1e-12)
        assert loader.stats().since_epoch.padding_share == pytest.approx(expected, abs=1e-12)
        assert loader.stats().uneven_share == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("iterable", [False, True])
def test_padding_is_counted_in_a_hundredth_of_the_time(iterable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = list[int]()

    def slow_counts(batch: Any) -> Padding:
        counted.append(len(batch["length"]))
        sleep(0.02)
        return Padding(1, 4, 1)

    monkeypatch.setattr(padding, "padding_counts", slow_counts)
    rows = [torch.ones(length) for length in LENGTHS]
    data: Any = fl.streams.from_dataset(rows) if iterable else rows  # type: ignore[arg-type]
    loader = fl.DataLoader(data, 2, collate_fn=as_lengths)
    began_s = monotonic()
    assert len(list(loader)) == len(LENGTHS) / 2
    assert 0 < len(counted) <= 1 + (monotonic() - began_s) / (100 * 0.02)
    assert loader.stats().padding_share == 0.25


def test_padding_beyond_the_longest_sample_is_not_uneven() -> None:
    mask = torch.arange(10)[None] < torch.tensor([[2], [6], [4]])
    assert padding.padding_counts({"attention_mask": mask}) == Padding(18, 30, 6)
    assert padding.padding_counts({"padding_mask": ~mask}) == Padding(18, 30, 6)
    assert padding.padding_counts({"segments": mask.int()}) == Padding(18, 30, 0), "a row has several samples"


def test_only_masks_of_padding_count() -> None:
    segmentation = [{"image": torch.zeros(3, 4, 4), "mask": torch.zeros(4, 4, dtype=torch.int64)}] * 4
    loader = fl.DataLoader(segmentation, 2)  # type: ignore[arg-type]
    list(loader)
    assert loader.stats().padding_share is None


def test_nothing_is_left_behind(no_debris: DebrisGuard) -> None:
    for _ in fl.DataLoader(DATA, 4):  # the loader is gone at once, its page stays
        assert len(own_pages()) == 1
    gc.collect()
    abandoned = fl.DataLoader(DATA, 4)
    next(iter(abandoned))
    del abandoned
    gc.collect()
    assert own_pages() == []


def test_a_progress_bar_is_right_after_a_resume() -> None:
    loader = fl.DataLoader(DATA, 4, seed=0)
    for _ in zip(range(3), loader, strict=False):
        pass
    resumed = fl.DataLoader(DATA, 4, seed=0)
    resumed.load_state_dict(loader.state_dict())
    bar = tqdm(resumed, initial=resumed.delivered, file=io.StringIO())
    assert (bar.n, bar.total) == (3, 10)
    for _ in bar:
        pass
    assert (bar.n, bar.total) == (10, 10)
    rest = tqdm(iter(resumed), file=io.StringIO())
    list(rest)
    assert (rest.n, rest.total) == (10, 10)


def test_figures_for_loggers_are_plain_numbers() -> None:
    loader = fl.DataLoader(DATA, 4)
    list(loader)
    flat = loader.stats().flat("data/")
    assert flat["data/batches"] == 10
    assert flat["data/fetch_p99_s"] > 0
    assert {type(number) for number in flat.values()} == {float}
    assert "data/padding_share" not in flat


def test_a_forked_process_writes_a_page_of_its_own() -> None:
    loader = fl.DataLoader(DATA, 4)
    batches = iter(loader)
    next(batches)
    child = os.fork()
    if not child:
        os._exit(0 if len(list(loader)) == 10 and loader.stats().batches == 11 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert page().batches == 1


def test_cpus_of_other_programs_are_those_that_this_process_and_its_workers_do_not_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def used(cpu_s: float) -> ProcessStat:
        return ProcessStat("R", int(cpu_s / TICK_S), 0, 0, 0)

    busy, own_s, now_s = 100.0, 10.0, 50.0
    monkeypatch.setattr(machine, "cpu_ticks", lambda _: CpuTicks(int(busy / TICK_S)))
    monkeypatch.setattr(machine, "stat_of", lambda _: used(own_s))
    monkeypatch.setattr(machine, "monotonic", lambda: now_s)
    others = machine.OtherPrograms([used(0.0)])
    now_s += 0.1
    assert others.cpus([used(0.0)]) is None  # too early: ticks are coarse
    now_s, busy, own_s = 52.0, 103.0, 11.0
    assert others.cpus([used(0.5)]) == pytest.approx(0.75)
    monkeypatch.setattr(machine, "cpu_ticks", lambda _: None)
    assert others.cpus([used(0.5)]) is None


def test_a_verdict_is_about_the_epoch_before_until_the_new_one_has_some_batches() -> None:
    loader = fl.DataLoader(TensorDataset(torch.arange(60)), 3)
    for _ in loader:
        pass
    assert "20 batches" in loader.report().notes[-1]
    batches = iter(loader)
    assert "20 batches" in loader.report().notes[-1]
    next(batches)
    verdict = loader.report()
    assert "20 batches" in verdict.notes[-1]
    assert verdict.predict(num_workers=2).gain > 0
    for _ in range(11):
        next(batches)
    assert "12 batches" in loader.report().notes[-1]


@given(st.integers(0, 10**11), st.integers(1, 10**11))
def test_verdicts_take_less_than_a_hundredth_of_the_loop(last_ns: int, expected_ns: int) -> None:
    pause_ns = verdict_pause_ns(last_ns, expected_ns)
    assert pause_ns >= 2_000_000_000
    assert expected_ns <= pause_ns / 100
    assert last_ns <= pause_ns / 100


def test_the_first_verdict_waits_until_the_loop_is_long_enough_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, clock = list[float](), [0]

    def quick_verdict(*_: Any, quick: bool) -> Verdict:
        asked.append(clock[0])
        clock[0] += 50_000_000
        return Verdict("nothing", 0.0, "", "")

    monkeypatch.setattr(monitor_module, "monotonic_ns", lambda: clock[0])
    monkeypatch.setattr(monitor_module, "verdict_of", quick_verdict)
    monitor = Monitor()
    monitor._sources = Mock()
    monitor._heartbeat.page.words[BATCHES] = 1
    while clock[0] < 60_000_000_000:
        monitor._update_verdict(clock[0])
        assert len(asked) * 50_000_000 <= clock[0] / 100
        clock[0] += 100_000_000
    assert asked


def test_short_epochs_are_published_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """A publication takes longer than an epoch of a few batches; figures requested here are always complete."""
    now_ns, published = [10**9], []

    def publish(_: Page, figures: dict[str, Any]) -> None:
        now_ns[0] += 1_000_000
        published.append(figures["epoch"])

    monkeypatch.setattr(Page, "publish", publish)
    monkeypatch.setattr(monitor_module, "_early", monitor_module._EarlyPublications())
    monkeypatch.setattr(monitor_module, "monotonic_ns", lambda: now_ns[0])
    loader = fl.DataLoader(DATA, 4)
    for _ in range(30):
        list(loader)
    assert published == [0]
    assert loader.stats().batches == 300
    now_ns[0] += monitor_module.EARLY_PAUSE_FACTOR * 1_000_000
    list(loader)
    assert published == [0, 30]
