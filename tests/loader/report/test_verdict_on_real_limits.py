"""Verdicts on real limits: a quota of a control group, a slow store, a cold cache, workers that grow."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from time import sleep
from typing import Any

import pytest
import torch
from preloaded import Preloaded
from torch.utils.data import Dataset
from undisturbed import ATTEMPTS, Measurement, measured
from web_servers import Handler, serving

import feedline as fl
from feedline.core import stage_parts
from feedline.loader.monitoring import monitor as monitor_module
from feedline.loader.monitoring.resources import usable_cpus
from feedline.loader.report import Advice
from feedline.loader.report.context import THROTTLED_SHARE

QUOTA = """
    import os, sys, time
    from pathlib import Path
    import torch
    import feedline as fl

    class Computes(torch.utils.data.Dataset):
        def __len__(self):
            return 160

        def __getitem__(self, index):
            until = time.thread_time() + 0.003
            while time.thread_time() < until:
                pass
            return torch.zeros(2)

    if __name__ == "__main__":
        (Path(sys.argv[1]) / "cgroup.procs").write_text(str(os.getpid()))
        with fl.DataLoader(Computes(), batch_size=8) as loader:
            for batch in loader:
                time.sleep(0.002)
            verdict = loader.report()
            stats = loader.stats()
        print(verdict.limiting_stage, stats.throttled_share, stats.others_cpus, sep="\\n")
        print(verdict.text(10_000))
"""


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of version 1 with half a CPU."""
    group = Path("/sys/fs/cgroup/cpu") / f"feedline-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "cpu.cfs_period_us").write_text("20000")
        (group / "cpu.cfs_quota_us").write_text("10000")
    except OSError:
        pytest.skip("control groups cannot be made here")
    yield group
    group.rmdir()


def test_a_real_quota_is_named_with_the_periods_that_it_cut_short(
    group: Path, preloaded: Preloaded, tmp_path: Path
) -> None:
    code, said = preloaded.run_code(dedent(QUOTA), tmp_path, str(group))
    assert code == 0, said
    stage, throttled, others, text = said.split("\n", 3)
    if stage != "cpus" and float(others) > usable_cpus() - 1:
        return  # other programs leave hardly more than the quota: it is not used up in every period
    assert stage == "cpus", said
    assert float(throttled) > THROTTLED_SHARE, said
    assert "Why: the quota of 0.5 CPUs is used up in " in text
    assert "a CPU quota of 1, not 0.5" in text


class SlowObjects(Handler):
    """1 KiB after 80 ms: far longer than its handling, however slow the machine."""

    def do_GET(self) -> None:
        sleep(0.08)
        self.answer(200, bytes(1024), {"ETag": '"1"'})

    def do_HEAD(self) -> None:
        self.start(200, {"Content-Length": "1024", "ETag": '"1"'})


@pytest.fixture
def urls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(stage_parts, "_stores", {})  # after many hosts of other tests, this one would have no part
    with serving(SlowObjects, None) as server:
        yield [f"http://127.0.0.1:{server.server_port}/{number:02}.bin" for number in range(24)]


def of_cache(advice: tuple[Advice, ...]) -> list[Advice]:
    return [each for each in advice if "cache" in each.text]


def loaded(dataset: Any, epochs: int, **arguments: Any) -> tuple[Any, Any]:
    """Verdict and statistics after some epochs."""
    with fl.DataLoader(dataset, batch_size=2, **arguments) as loader:
        for _ in range(epochs):
            for _ in loader:
                pass
        return loader.report(), loader.stats()


def measurement(dataset: Any) -> Measurement[tuple[Any, Any]]:
    """Verdict and statistics of an epoch, for `measured`."""
    verdict, stats = loaded(dataset, 1)
    return Measurement((verdict, stats), verdict, was_slowed=False)


def test_a_slow_store_is_named_with_its_rate_and_a_cache(urls: list[str]) -> None:
    def is_right(found: tuple[Any, Any]) -> bool:
        stage, caches = found[0].limiting_stage, of_cache(found[0].advice)
        return stage.startswith("read http://127.0.0.1:") and len(caches) == 1

    verdict, stats = measured(lambda: measurement(fl.datasets.Files(urls)), is_right)
    assert stats.stores.requests >= 24
    for cache in of_cache(verdict.advice):
        assert "stores send " in cache.text
        assert "/s, " in cache.text
        assert (cache.basis, cache.low) == ("bound", 1.0)


def test_a_cold_cache_is_named_and_a_warm_one_is_not(urls: list[str], tmp_path: Path) -> None:
    folders = (tmp_path / f"{number}" for number in range(ATTEMPTS))

    def measure() -> Measurement[tuple[Any, Any]]:
        return measurement(fl.datasets.Files(urls, cache=next(folders)))

    verdict, stats = measured(measure, lambda found: len(of_cache(found[0].advice)) == 1)
    assert stats.stores.cache_misses >= 24
    for cache in of_cache(verdict.advice):
        text = r"the next epoch: \d+ pieces had to be fetched into the cache so far, at "
        assert re.match(text, cache.text)
    verdict, stats = loaded(fl.datasets.Files(urls, cache=tmp_path / "0"), 1)
    assert stats.stores.cache_hits >= 24
    assert not of_cache(verdict.advice), str(verdict)


class Keeps(Dataset[torch.Tensor]):
    """A cache without a limit, as users write it."""

    def __init__(self) -> None:
        self.kept: list[bytes] = []

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        self.kept.append(os.urandom(2 << 20))
        return torch.zeros(2)


def test_workers_that_keep_what_they_read_are_named_with_their_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each epoch's end reads the memory, however long the last publication of this process took.
    monkeypatch.setattr(monitor_module, "EARLY_PAUSE_FACTOR", 0)
    monkeypatch.setattr(monitor_module._early, "due_ns", 0)
    verdict, stats = loaded(Keeps(), 4, num_workers=1, persistent_workers=True)
    assert stats.worker_growth_nbytes == pytest.approx(32 << 20, rel=0.5)
    (note,) = (note for note in verdict.notes if "grow" in note)
    assert "an epoch" in note
    assert "feedline.share" in note
