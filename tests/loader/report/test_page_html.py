"""The report page: complete, self-contained HTML with every section, for one rank and for several."""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset
from typer.testing import CliRunner

import feedline as fl
from feedline.cli.app import app
from feedline.loader.report import diagnose
from feedline.loader.report.page_html import RankReport, page
from feedline.loader.report.run_log import read_log
from feedline.loader.report.runs import reports_of_logs

VOID = {"meta", "rect", "polyline", "br", "input"}


class Outline(HTMLParser):
    """Tags, texts of headings, and addresses; fails where a tag is closed that is not open."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags = Counter[str]()
        self.headings: list[str] = []
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "action")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["h2"]:
            self.headings.append(data)
        if self.open[-1:] == ["script"]:
            self.scripts.append(data)


class Nasty(TensorDataset):
    def address(self, index: int) -> str:
        return f"</script><b>{index}&"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """The log of a run of three epochs."""
    path = tmp_path / "run.jsonl"
    loader = fl.DataLoader(Nasty(torch.arange(40)), 4, log=path)
    for _ in range(3):
        list(loader)
    loader.report_html(tmp_path / "report.html")
    return path


def test_a_page_is_whole_and_needs_nothing_else(log: Path) -> None:
    html = log.with_name("report.html").read_text()
    outline = Outline(html)
    assert outline.addresses == []
    assert not re.search(r"https?://|@import|url\(", html)
    assert "prefers-color-scheme: dark" in html
    assert 'name="viewport"' in html
    sections = ["Where the time goes", "Over time", "The last 10 batches", "Stages, per batch", "Slowest batches"]
    assert [name for name in outline.headings if name in sections] == sections
    assert outline.headings[0].startswith("The loop waits for data")
    assert outline.tags["rect"] >= 40
    (figures,) = json.loads(outline.scripts[0])
    assert figures["batches"] == 30
    assert figures["slowest"][0]["address"].startswith("</script><b>")


def test_the_memory_of_workers_ends_with_them(log: Path) -> None:
    """At the end of the last epoch there are none."""
    lines = read_log(log)
    memory = [0, 64 << 20, 128 << 20, 0]
    history = [{**lines[-1], "time_s": float(step), "batches": step, "worker_nbytes": nbytes}
               for step, nbytes in enumerate(memory)]  # fmt: skip
    html = page([RankReport(lines[-1], history)])
    title, points = re.findall(r'aria-label="(workers[^"]*)"><polyline points="([^"]*)"', html)[0]
    assert title.startswith("workers&#x27; memory, MiB: 128 now, at most 128")
    assert points == "213.3,60.0 426.7,0.0"
    assert "<b>128 MiB</b>" in html


def test_settings_can_be_tried_on_the_page(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    with fl.DataLoader(Nasty(torch.arange(40)), 4, num_workers=2, worker_method="thread", prefetch_factor=5) as loader:
        list(loader)
        loader.report_html(path)
    outline = Outline(path.read_text())
    (figures,) = json.loads(outline.scripts[0])
    cells = {(cell["num_workers"], cell["prefetch_factor"], cell["in_order"]): cell for cell in figures["what_if"]}
    assert len(cells) == len(figures["what_if"])
    assert {number for number, _, _ in cells} >= {0, 1, 2, 3, 8, 32}
    assert [place for place, cell in cells.items() if cell["is_now"]] == [(2, 5, True)]
    assert cells[2, 5, True]["gain"] == 1
    assert all(cell["gain"] > 0 for cell in cells.values())
    assert outline.tags["form"] == 1
    assert outline.tags["input"] == 3
    assert "What if" in outline.headings


def test_a_verdict_writes_the_page_of_its_loader(tmp_path: Path) -> None:
    loader = fl.DataLoader(Nasty(torch.arange(40)), 4)
    list(loader)
    verdict = loader.report()
    verdict.to_html(tmp_path / "report.html")
    outline = Outline((tmp_path / "report.html").read_text())
    assert outline.headings[0] == verdict.headline
    (figures,) = json.loads(outline.scripts[0])
    assert figures["batches"] == 10
    with pytest.raises(fl.errors.ArgumentError, match="this verdict has no loader"):
        diagnose(loader.stats()).to_html(tmp_path / "other.html")


def test_remedies_are_a_table_also_of_logs_of_earlier_versions(log: Path) -> None:
    (report,), _ = reports_of_logs(read_log(log))
    new = {"text": "a=1: <why> (2 ×)", "change": "a=1", "gain": 2.0, "range": "2.0 × (1.9–2.1)", "why": "<why>"}
    code = {"text": "fix it (at most 3 ×)", "change": "fix it", "gain": 3.0, "range": "at most 3 ×", "why": ""}
    old = {"text": "do less (at most 3 ×)", "change": "do less", "gain": 3.0}
    verdict = {"headline": "It waits.", "explanation": "Why.", "advice": [new, code, old]}
    text = page([replace(report, figures={**report.figures, "verdict": verdict})])
    assert "<td><b>a=1</b><br>&lt;why&gt;</td>" in text
    assert "2.0 × (1.9–2.1)" in text
    assert "<td>fix it</td>" in text
    assert "<td>do less (at most 3 ×)</td>" in text


def test_a_page_before_the_first_iteration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fl.errors.ArgumentError, match="iterate over the loader first"):
        fl.DataLoader(Nasty(torch.arange(8))).report_html(tmp_path / "report.html")


def of_rank(lines: list[dict[str, Any]], rank: int, slower: float) -> RankReport:
    """The report of another rank, whose waits are longer."""
    last = json.loads(json.dumps(lines[-1]))
    last |= {"rank": rank, "world_size": 3, "host": f"node-{rank}"}
    last["loop"]["wait"]["total_s"] = slower * last["loop"]["wait"]["count"]
    return RankReport(last, lines)


def test_the_slow_rank_is_named(log: Path) -> None:
    lines = read_log(log)
    html = page([of_rank(lines, rank, 0.5 if rank == 1 else 0.001) for rank in range(3)])
    Outline(html)
    assert "Rank 1 on node-1 is the slow one: it waits 500 ms per batch for its data, others 1.0 ms." in html
    assert html.count("<details") == 3
    assert html.count("<details open>") == 1


def test_figures_of_stores_have_units(log: Path) -> None:
    stores = {"nbytes": 38 << 20, "requests": 1_234_567, "waited_s": 2.5, "cache_hits": 3}
    html = page([RankReport({**read_log(log)[-1], "stores": stores})])
    cells = dict(re.findall("<td>stores: ([^<]*)</td><td>([^<]*)</td>", html))
    assert cells == {
        "received": "38 MiB",
        "requests": "1,234,567",
        "waited before retries": "2.5 s",
        "cache hits": "3",
    }


def test_only_ranks_of_one_loader_are_compared(log: Path) -> None:
    lines = read_log(log)
    train = [of_rank(lines, rank, 0.001) for rank in range(2)]
    validation = [replace(each, figures={**copy.deepcopy(dict(each.figures)), "loader": "val<"}) for each in train]
    validation[0].figures["loop"]["wait"]["total_s"] = 9 * validation[0].figures["loop"]["wait"]["count"]
    html = page([train[0], validation[0]])
    assert "Ranks" not in html
    assert "2 ranks" not in html
    assert "<summary>val&lt; · waits " in html
    assert f"<summary>{train[0].figures['loader']} · waits " in html
    html = page([*train, *validation])
    assert Outline(html).headings.count("Ranks of val<") == 1
    assert html.count("is the slow one") == 1


def test_the_wait_for_a_first_batch_is_that_of_the_epochs_of_this_process(tmp_path: Path) -> None:
    loader: Any = fl.DataLoader(list(range(8)), 2, seed=0)
    loader.set_epoch(49)
    list(loader)
    list(loader)
    report = RankReport(loader._fl_monitor.figures())
    report.figures["startup_s"] = 3.0  # type: ignore[index]
    assert "<b>1.5 s</b><span>first batch</span>" in page([report])


def test_ranks_that_wait_alike_are_not_blamed(log: Path) -> None:
    lines = read_log(log)
    assert "All ranks wait about equally" in page([of_rank(lines, rank, 0.1) for rank in range(3)])


def test_the_command_merges_logs(log: Path, tmp_path: Path) -> None:
    other = [json.dumps({**line, "rank": 1, "world_size": 2}) for line in read_log(log)]
    (tmp_path / "run.rank1.jsonl").write_text("\n".join(other))
    out = tmp_path / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run*.jsonl"), "--out", str(out)])
    assert result.exit_code == 0
    assert "2 loaders" in " ".join(result.stdout.split())
    assert "Ranks" in Outline(out.read_text()).headings


@pytest.mark.parametrize("text", ["", '{"epoch": 1}\n', "no JSON\n", "[1]\n"])
def test_a_file_that_is_no_log_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    result = CliRunner().invoke(app, ["report", str(path), "--out", str(tmp_path / "page.html")])
    assert isinstance(result.exception, fl.errors.ArgumentError)
    assert "is not a run log of feedline" in str(result.exception)
    assert not (tmp_path / "page.html").exists()


def test_a_page_shows_the_parts_of_a_fetch(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((64, 100), np.float32))
    log = tmp_path / "run.jsonl"
    loader = fl.DataLoader(fl.datasets.ArrayFile(tmp_path / "rows.npy"), 8, log=log)
    list(loader)
    loader.report_html(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "<span>· read files</span>" in html
    assert "<b>400 bytes</b><span>read a sample</span>" in html
    assert "<b>400 bytes</b><span>delivered a sample</span>" in html
    last = read_log(log)[-1]
    assert last["stages"]["read files"]["total_s"] > 0
    assert last["read_nbytes_per_sample"] == last["delivered_nbytes_per_sample"] == 400


class Counted(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


def test_the_page_of_a_stream_of_one_batch(tmp_path: Path) -> None:
    loader = fl.DataLoader(Counted(), 8)
    list(loader)
    loader.report_html(tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text()
    assert "The last batch" in Outline(html).headings
    assert "<th>took</th></tr>" in html, "a stream has no indices and no addresses"
    # In the row of the loop, what fills a wait is drawn later, and thus on top.
    classes = re.findall(r'<rect class="c-(\w+)"', html)
    assert classes.index("wait") < classes.index("fetch")


def test_charts_of_rates_begin_with_the_run(log: Path) -> None:
    html = log.with_name("report.html").read_text()
    rates = re.findall(r'aria-label="(samples/s|waits)[^"]*"><polyline points="([^"]*)"', html)
    assert [name for name, _ in rates] == ["samples/s", "waits"]
    assert all(points.startswith("0.0,") for _, points in rates)
