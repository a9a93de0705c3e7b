from __future__ import annotations

import importlib
import json
import re
import tarfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image

from images import corpus, forms, page
from images.contestant import fault_of
from images.contestants import ENTRANTS, EVENTS
from images.corpus import CORPORA, CorpusImage, Manifest
from images.environments import ENVIRONMENTS
from images.peers.task import Task
from images.weigh import Weight


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> corpus.Corpus:
    monkeypatch.setattr(corpus, "CACHE", tmp_path)
    return replace(CORPORA["500x375"], name="tiny", image_count=9, size=(160, 120), nbytes=9_000)


def files(made: corpus.Corpus) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(made.files.rglob("*.jpg"))}


def test_a_corpus_is_the_same_whenever_it_is_made(tiny: corpus.Corpus) -> None:
    assert corpus.manifest(tiny) is None
    reported = corpus.write(tiny)
    first = files(tiny)
    assert corpus.manifest(tiny) == reported
    assert corpus.write(replace(tiny, image_count=4)).image_count == 4
    assert len(first) == 9
    assert files(tiny) == first
    assert reported.nbytes == sum(map(len, first.values()))


def test_images_have_the_requested_size_and_bytes(tiny: corpus.Corpus) -> None:
    corpus.write(tiny)
    for path in tiny.files.rglob("*.jpg"):
        with Image.open(path) as image:
            assert image.size == (160, 120)
        assert 0.85 * 9_000 < path.stat().st_size < 1.15 * 9_000


def test_images_of_one_photograph_differ(tiny: corpus.Corpus) -> None:
    label = corpus.corpus_images(tiny)[0].label
    one, other = (corpus.draw_pixels(tiny, CorpusImage(label, number)) for number in range(2))
    assert one.shape == other.shape == (120, 160, 3)
    assert not np.array_equal(one, other)


def test_a_manifest_of_another_recipe_does_not_count(tiny: corpus.Corpus) -> None:
    corpus.write(tiny)
    path = tiny.root / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "recipe": -1}))
    assert corpus.manifest(tiny) is None


def test_tars_hold_every_image_with_its_label(tiny: corpus.Corpus) -> None:
    reported = corpus.write(tiny)
    assert forms.FORMS["tar"].nbytes(tiny) > reported.nbytes
    found, labels = {}, {}
    for path in sorted((tiny.root / "tar").iterdir()):
        with tarfile.open(path) as tar:
            for member in tar:
                data = tar.extractfile(member)
                assert data is not None
                (found if member.name.endswith(".jpg") else labels)[member.name] = data.read()
    assert found == files(tiny)
    assert labels == {
        f"{Path(name).stem}.cls": str(reported.classes.index(name.rpartition("-")[0])).encode() for name in found
    }


def test_entrants_differ_and_name_known_forms_and_environments() -> None:
    assert len({entrant.name for entrant in ENTRANTS}) == len(ENTRANTS)
    for entrant in ENTRANTS:
        assert entrant.form in forms.FORMS
        assert entrant.ours or entrant.version.startswith(f"{entrant.package} ")
    assert {entrant.environment for entrant in ENTRANTS if not entrant.ours} == set(ENVIRONMENTS)


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: event.name)
def test_a_turn_is_the_same_number_of_whole_batches_for_each_worker(event: Any) -> None:
    for task in (event.task(), event.task(2 * event.workers)):
        assert task.images % (task.batch * task.workers) == 0
        assert Task.loads(task.dumps()) == task


TASK = Task("corpus", 100, "random", 224, (0.08, 1.0), "uint8", 64, 128, 2)
MANIFEST = Manifest("tiny", 1, "13", 100, 1, ("cat", "dog"), (120.0, 100.0, 80.0))
TOLD = {"images": 128, "mean": [121.0, 99.0, 81.0], "batches": 2, "different": 2, "labels": [0, 1]}


def test_honest_work_passes() -> None:
    assert fault_of(TOLD, TASK, MANIFEST) is None


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"images": 64}, "delivered 64 images; expected 128"),
        ({"different": 1}, "2 batches, of which only 1 differ"),
        ({"labels": [0, 2]}, r"the labels \[0, 2\]"),
        ({"mean": [80.0, 100.0, 120.0]}, "pixels of mean"),
    ],
)
def test_a_contestant_that_does_no_work_is_detected(wrong: dict[str, Any], said: str) -> None:
    fault = fault_of({**TOLD, **wrong}, TASK, MANIFEST)
    assert fault is not None
    assert re.search(said, fault)


def test_the_peak_is_of_each_part() -> None:
    assert Weight(1, 9) | Weight(5, 2) == Weight(5, 9)


def entrant(name: str, rate: float, kind: str, reads: str = "files") -> dict[str, Any]:
    quartiles = {"median": rate, "low": rate * 0.95, "high": rate * 1.02, "ratio": rate / 950, "runs": [rate] * 5}
    reported = {"kind": kind, "version": f"{kind} 1.0", "note": "", "reads": reads, "reads_mib": 419.1}
    return {"name": name, **quartiles, **reported, "cpu_s_per_1000": 2.0841, "pss_mib": 335.2, "mapped_mib": 0.0}


RESULT = {
    "title": "500 × 375: random resized crop",
    "name": "images 500x375, uint8",
    "unit": "images/s",
    "baseline": "torch + PIL",
    "corpus": {"corpus": "500x375"},
    "task": {"workers": 2},
    "date": "2026-11-01T00:00:00+00:00",
    "machine": {"cores": 2, "cpu": "a CPU", "memory_gib": 24, "python": "3.11.7"},
    "versions": {"torch": "2.13.0"},
    "entrants": [
        entrant("torch + PIL", 950, "peer"),
        entrant("feedline, threads", 2100, "ours"),
        entrant("libjpeg-turbo alone", 1850, "limit"),
        entrant("FFCV, raw pixels", 3700, "peer", "raw.beton"),
    ],
    "absent": [{"name": "SPDL", "reason": "no | FFmpeg"}],
}


def test_the_page_holds_the_figures_of_the_results() -> None:
    before = f"# Title\n\n{page.START}old\n{page.STOP}\nafter\n"
    written = page.rewritten(before, [RESULT])
    assert written.startswith("# Title\n")
    assert written.endswith("after\n")
    assert "old" not in written
    rows = [line for line in written.splitlines() if line.startswith("|")][2:]
    assert rows == [
        "| FFCV, raw pixels | raw.beton, 419 MiB | 3,700 | 3.89 | 2.08 | 335 MiB |",
        "| **feedline, threads** | files, 419 MiB | 2,100 | 2.21 | 2.08 | 335 MiB |",
        "| *libjpeg-turbo alone* (a limit) | files, 419 MiB | 1,850 | 1.95 | 2.08 | 335 MiB |",
        "| torch + PIL | files, 419 MiB | 950 | 1.00 | 2.08 | 335 MiB |",
        "| SPDL | not measured: no / FFmpeg | | | | |",
    ]
    assert "](images/bench-images-500x375-uint8.svg)" in written


def test_the_page_says_so_when_there_are_no_results() -> None:
    assert "No figures yet" in page.rewritten(page.START + page.STOP, [])


def test_the_committed_page_matches_the_results() -> None:
    """After new measurements: `make bench-images`."""
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.rewritten(text, page.results()) == text


def test_the_chart_names_everyone_and_is_the_same_each_time(tmp_path: Path) -> None:
    one, other = tmp_path / "one.svg", tmp_path / "other.svg"
    chart = importlib.import_module("images.chart")  # imports matplotlib, for a second
    chart.draw(RESULT, one)
    chart.draw(RESULT, other)
    assert one.read_bytes() == other.read_bytes()
    reported = " ".join(ET.parse(one).getroot().itertext())
    for text in ("500 × 375: random resized crop", "torch + PIL", "feedline, threads", "2,100  ·  2.2×", "pale"):
        assert text in reported
    assert "libjpeg-turbo alone: 1,850" in reported
    assert one.stat().st_size < 40_000
