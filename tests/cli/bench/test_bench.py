"""`feedline bench`: interleaved rounds over a user's loader, a recommendation, and thresholds."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from io import StringIO
from math import inf
from pathlib import Path
from time import sleep
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import torch
from preloaded import Preloaded
from rich.console import Console
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from feedline.cli.bench import command, show
from feedline.cli.bench.sweep import MOST_WORKERS, Sweep, Threshold, default_workers, further, recommend, settings_of
from feedline.cli.bench.trial import FIGURES, Round, Setting, Trial, measure
from feedline.cli.doctor.findings import Marks
from feedline.cli.target import as_feedline
from feedline.core import proc
from feedline.errors import ArgumentError
from feedline.loader.dataloader import DataLoader
from feedline.loader.report.stats import size


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


class Waiting(Numbers):
    """Samples that wait, as for a server."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> torch.Tensor:
        sleep(0.01)
        return super().__getitem__(index)


class Broken(Numbers):
    def __getitem__(self, index: int) -> torch.Tensor:
        raise ValueError("no data")


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.zeros(6, 2))


def trial(rate: float, *, waits: float = 0.0, **changes: object) -> Trial:
    """A trial of one second, as measured."""
    part = Round(int(rate), 1.0, waits, int(rate) * 16, 0.1, 0.5, int(rate), 1 << 28, (0.01, 0.02))
    return Trial(Setting(**changes), [part])  # type: ignore[arg-type]


def silent(*_: object) -> None:
    """A progress bar that shows nothing."""


def test_settings_are_all_combinations_and_the_own_one_comes_first() -> None:
    found = settings_of([0, 2], ["thread", "process"], [4], [])
    assert found[:2] == (Setting(), Setting(is_torch=True))
    assert set(found[2:]) == {Setting(0), Setting(2, "thread", 4), Setting(2, "process", 4)}
    assert default_workers(2) == [0, 1, 2, 4]
    assert default_workers(6) == [0, 1, 2, 4, 8, 12]


def test_rounds_are_interleaved_and_skip_what_the_loader_already_is() -> None:
    seen = list[int]()
    sweep = Sweep((Setting(), Setting(0), Setting(batch_size=2)), rounds=2, seconds=0.01)
    loader = TorchDataLoader(Numbers(), batch_size=4)
    trials = sweep.run(loader, lambda _, done, total: seen.append(total - done))
    assert seen == [4, 3, 2, 1, 0]
    assert [len(part.rounds) for part in trials] == [2, 2]


def test_more_workers_are_measured_while_they_help() -> None:
    counts = [0, 2, 4]
    trials = [trial(rate, num_workers=count) for count, rate in zip(counts, [10, 20, 40], strict=True)]
    for each, count in zip(trials, counts, strict=True):
        each.num_workers = count
    found = further([*trials, trial(90, is_torch=True)])
    assert found is not None
    assert (found[0], found[1].num_workers) == (trials[2], 8)
    assert further([*trials, Trial(Setting(8), error="no memory")]) is None
    assert further([*trials, trial(21, num_workers=3)]) is not None
    slower = trial(39, num_workers=8)
    slower.num_workers = 8
    assert further([*trials, slower]) is None
    assert further(trials[:1]) is None
    assert further([Trial(Setting(2), error="no data")]) is None
    trials[2].num_workers = MOST_WORKERS
    assert further(trials) is None


def test_a_loader_that_waits_gets_more_workers_than_listed() -> None:
    settings = (Setting(), Setting(0), Setting(1, "thread"))
    loader = TorchDataLoader(Waiting(), batch_size=4)
    sweep = Sweep(settings, rounds=1, seconds=0.2)
    assert [each.num_workers for each in sweep.run(loader, silent)] == [0, 1]
    # One worker is no faster than none, which waits as long for each sample.
    trials = sweep._replace(settings=(*settings, Setting(2, "thread")), extends=True).run(loader, silent)
    assert max(each.num_workers or 0 for each in trials) >= 4
    assert [len(each.rounds) for each in trials if each.num_workers == 2] == [2]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_round_counts_whole_clusters_over_several_epochs(workers: int) -> None:
    loader = TorchDataLoader(Numbers(), batch_size=3, num_workers=workers)
    part = measure(loader, 0.2, 0.001)
    assert part.samples == 3 * len(part.waits_s)
    assert len(part.waits_s) % max(1, workers) == 0
    assert part.nbytes == 16 * part.samples
    assert part.seconds >= 0.2
    assert 0 < part.first_s < part.first_s + part.seconds
    assert part.wait_s < part.seconds
    assert part.cpu_s > 0
    assert part.memory_nbytes > 1 << 20


def test_a_round_ends_by_the_clock_and_only_whole_clusters_count() -> None:
    loader = DataLoader(Numbers(), batch_size=1, num_workers=3, worker_method="thread")
    assert len(measure(loader, inf, 0.0, due_s=0.0).waits_s) == 3
    part = measure(loader, inf, 0.0, over_s=0.0)
    assert (part.delivered, part.samples, part.waits_s) == (1, 0, ())
    assert part.first_s > 0


class Logging(TorchDataLoader[torch.Tensor]):
    events: list[str]

    def __iter__(self) -> Any:
        try:
            for batch in super().__iter__():
                self.events.append("batch")
                yield batch
        finally:
            self.events.append("end")


def test_memory_is_read_when_the_round_is_over_and_before_workers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers go on while it is read: within the round, what they build would arrive at once, and count as fast."""
    loader = Logging(Numbers(), 3)
    loader.events = []
    monkeypatch.setattr(proc, "tree_nbytes", lambda _: loader.events.append("memory"))
    measure(loader, 0.0, 0.0)
    assert loader.events == ["batch", "batch", "memory", "end"]


def test_an_error_ends_its_trial_only() -> None:
    trials = Sweep((Setting(), Setting(num_workers=2)), 2, 0.01).run(TorchDataLoader(Broken()), silent)
    assert [part.error for part in trials] == ["ValueError: no data"] * 2
    assert recommend(trials, 0.0) is None
    empty = Trial(Setting())
    empty.run(TorchDataLoader(Numbers(), batch_sampler=[]), 0.01, 0.0)
    assert empty.error is not None
    assert "the loader has no batches" in empty.error


class Fatal(Numbers):
    """Dataset whose samples end the worker that reads them."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if get_worker_info() is not None:
            os._exit(3)
        return super().__getitem__(index)


@pytest.mark.parametrize("is_torch", [False, True])
def test_a_worker_that_dies_ends_its_trial_only(is_torch: bool) -> None:
    settings = (
        Setting(),
        Setting(num_workers=1, worker_method="process", is_torch=is_torch),
        Setting(batch_size=2),
    )
    trials = Sweep(settings, 1, 0.01).run(TorchDataLoader(Fatal(), batch_size=4), silent)
    assert [bool(part.error) for part in trials] == [False, True, False], [part.error for part in trials]
    assert "worker" in trials[1].error
    assert recommend(trials, 0.0) in (trials[0], trials[2])


@pytest.mark.parametrize("setting", [Setting(), Setting(is_torch=True), Setting(batch_size=3)])
def test_streams_can_be_measured(setting: Setting) -> None:
    stream = Trial(setting)
    stream.run(TorchDataLoader(Stream(), batch_size=2), 0.01, 0.0)
    assert stream.samples_per_s > 0, stream.error


def test_the_fewest_workers_that_are_nearly_as_fast_are_recommended() -> None:
    trials = [
        trial(100, num_workers=1),
        trial(295, num_workers=4),
        trial(300, num_workers=8),
        trial(900, is_torch=True),
    ]
    assert recommend(trials, 0.0) is trials[1]
    waiting = [trial(100, waits=0.5, num_workers=1), trial(200, waits=0.04, num_workers=2), trial(300, num_workers=8)]
    assert recommend(waiting, 0.01) is waiting[1]


@pytest.mark.parametrize(
    ("text", "met"),
    [
        ("wait_share > 5%", True),
        ("wait_share>0.5", False),
        ("samples_per_s < 1000", True),
        ("first_batch_s > 200ms", False),
    ],
)
def test_thresholds_judge_a_trial(text: str, met: bool) -> None:
    assert Threshold.parse(text).is_met(trial(100, waits=0.4)) is met


def test_the_own_setting_counts_with_its_workers() -> None:
    trials = [trial(1000), trial(1010, num_workers=8)]
    trials[0].num_workers = 4
    assert recommend(trials, 0.0) is trials[0]


def test_a_trial_without_samples_has_figures() -> None:
    assert trial(0.0).figures()["samples_per_s"] == 0.0


def detections(samples: list[Any]) -> Any:
    return tuple(zip(*((torch.zeros(3, 8, 8), {"boxes": torch.zeros(2, 4)}) for _ in samples), strict=True))


def weighted(samples: list[Any]) -> Any:
    return {"weight": torch.tensor(1.0), "x": torch.stack(samples)}


@pytest.mark.parametrize("collate", [None, detections, weighted, list, len])
@pytest.mark.parametrize("kind", [DataLoader, TorchDataLoader])
def test_a_batch_of_any_form_has_as_many_samples(kind: Any, collate: Any) -> None:
    loader = kind(Numbers(), 6, collate_fn=collate)
    if collate is not len or kind is DataLoader:
        assert measure(loader, 0.0, 0.0).delivered == 12


def test_workers_that_persist_do_so_in_a_trial() -> None:
    loader = DataLoader(Numbers(), 4, num_workers=1, worker_method="thread", persistent_workers=True)
    assert Setting().make(loader).persistent_workers
    assert not Setting(num_workers=0).make(loader).persistent_workers
    assert Setting(is_torch=True).make(loader).persistent_workers
    assert not as_feedline(DataLoader(Numbers(), accelerate=False))._fl.accelerate
    adapts = DataLoader(Numbers(), num_workers="auto")
    assert as_feedline(adapts)._fl_adapts
    assert not as_feedline(adapts, num_workers=2)._fl_adapts


def test_a_threshold_is_met_by_a_loader_that_does_not_run() -> None:
    assert Threshold.parse("wait_share > 5%").is_met(Trial(Setting(), error="ValueError"))


@pytest.mark.parametrize("text", ["wait_share", "wait_share = 3", "> 3", "wait_share > 1.2.3%", "wait_share > ."])
def test_other_thresholds_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--fail-if takes a condition such as"):
        Threshold.parse(text)
    with pytest.raises(ArgumentError, match=r"--fail-if knows samples_per_s, .*; got 'waiting'"):
        Threshold.parse("waiting > 3")


@pytest.mark.parametrize(
    ("threshold", "words"),
    [("wait_share > 5%", "40 %"), ("samples_per_s < 200", "100"), ("first_batch_s > 0", "100 ms"),
     ("memory_nbytes > 0", "256 MiB")],
)  # fmt: skip
def test_the_figure_of_a_threshold_is_printed(threshold: str, words: str) -> None:
    assert show.measured(trial(100, waits=0.4), threshold) == f": it is {words}"
    assert show.measured(Trial(Setting(), error="ValueError"), threshold) == ""
    assert set(trial(100).figures()) == set(FIGURES)


@pytest.mark.parametrize("wrong", ["fast", "20 m", "1.2.3", ".", "", "2h", "3601s", "9" * 400])
def test_a_wrong_step_is_refused(wrong: str) -> None:
    assert list(map(command.parse_step, ["20ms", "0.5", "5.", ".5 s"])) == [0.02, 0.5, 5.0, 0.5]
    with pytest.raises(ArgumentError, match="--step takes a duration such as 20ms"):
        command.parse_step(wrong)


TRIALS = [
    trial(123_456),
    trial(110_000, is_torch=True),
    trial(250_000, num_workers=16, worker_method="process", prefetch_factor=4),
    Trial(Setting(4, "thread"), error="ValueError: not thread-safe"),
]


@pytest.mark.parametrize(
    ("width", "step_s", "marks"),
    [
        *((40, 0.02, Marks.ASCII), (80, 0.0, Marks.ASCII), (120, 0.02, Marks.ASCII)),
        *((40, 0.0, Marks.UNICODE), (80, 0.02, Marks.UNICODE), (120, 0.0, Marks.UNICODE)),
    ],
)
def test_every_line_fits_the_terminal(width: int, step_s: float, marks: Marks) -> None:
    lines = show.table(TRIALS, TRIALS[2], step_s, width, marks)
    assert max(map(len, lines)) <= width
    assert [line for line in lines if line != line.rstrip()] == []
    assert sum("enough" in line for line in lines) == 1
    assert ("waits" in lines[0]) is (step_s > 0 and width > 80)
    if marks is Marks.ASCII:
        "".join(lines).encode("ascii")


def test_the_conclusion_names_the_gain_or_says_that_there_is_none() -> None:
    assert "num_workers=16" in show.conclusion(TRIALS, TRIALS[2], 0.0)
    assert "2.0 × today's rate" in show.conclusion(TRIALS, TRIALS[2], 0.0)
    same = [trial(100), trial(101, num_workers=2)]
    assert "No other setting is worth a change" in show.conclusion(same, same[1], 0.0)
    assert show.conclusion([Trial(Setting(), error="ValueError: no data")], None, 0.0) == (
        "No setting ran: ValueError: no data."
    )


def test_sizes_have_binary_units() -> None:
    figures = trial(100).figures()
    rate = size(figures["mb_per_s"] * 1e6)
    assert f"{rate}/s" in "".join(show.details(trial(100)))
    assert [size(value) for value in (1 << 20, 1.5 * (1 << 30), 3 << 40)] == ["1.0 MiB", "1.5 GiB", "3.0 TiB"]
    assert Threshold.parse("memory_nbytes > 2 GiB").limit == 1 << 31
    assert Threshold.parse("memory_nbytes > 2 GB").limit == 2e9


def test_the_chart_is_well_formed_and_names_every_setting_that_ran() -> None:
    chart = show.svg(TRIALS, TRIALS[2])
    ET.fromstring(chart)
    for part in TRIALS[:3]:
        assert part.label in chart.replace("&#x27;", "'")


def test_a_script_is_measured_from_the_command_line(preloaded: Preloaded, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
        "loader = DataLoader(TensorDataset(torch.zeros(64, 4)), batch_size=8)\n"
    )
    options = ["--workers", "0,1", "--rounds", "1", "--seconds", "0.05", "--svg", str(tmp_path / "a.svg")]
    failing = ["--out", str(tmp_path / "a.json"), "--fail-if", "samples_per_s > 1"]
    main = "from feedline.cli.app import app\napp()\n"
    code, printed = preloaded.run_code(main, tmp_path, "bench", f"{script}:loader", *options, *failing)
    assert code == 1, printed
    assert "failed: samples_per_s > 1: it is " in printed
    assert "torch, as is" in printed
    results = json.loads((tmp_path / "a.json").read_text())
    assert results["failed_thresholds"] == ["samples_per_s > 1"]
    assert {part["library"] for part in results["trials"]} == {"torch", "feedline"}
    assert (tmp_path / "a.svg").read_text().startswith("<svg")


def test_the_outcome_is_printed_for_a_narrow_terminal() -> None:
    screen = StringIO()
    outcome = command.Outcome(TRIALS, TRIALS[2], ["wait_share > 5%"])
    command.print_outcome(outcome, Sweep(()), Console(width=40, file=screen))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= 40
    assert [line for line in lines if line != line.rstrip()] == []


def test_stages_have_percentiles_and_sending_its_share() -> None:
    loader = DataLoader(Many(), 16, num_workers=1, worker_method="process")
    measured = Trial(Setting())
    measured.run(loader, 0.2, 0.0)
    assert not measured.error
    text = "\n".join(show.details(measured))
    for stage in ("fetch", "collate", "serialize", "receive"):
        low, middle, high = show.stage_percentiles(measured)[stage]
        assert 0 < low <= middle <= high
        assert f"{stage}: p50 " in text
    assert 0 < measured.figures()["serialization_share"] < 1
    assert "of the work" in text
    (figures,) = show.summary([measured], measured, 0.0, [])["trials"]
    assert set(figures["stages"]["fetch"]) == {"p50_s", "p95_s", "p99_s"}


def test_a_loader_of_torch_has_no_stages() -> None:
    measured = Trial(Setting(is_torch=True))
    measured.run(DataLoader(Many(), 16), 0.05, 0.0)
    assert not measured.error
    assert not measured.histograms()
    assert "of the work" not in "\n".join(show.details(measured))


class Many(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 640

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index)
