"""The demo in examples/demo: images, dataset, training, comparison, resume, and the script itself."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night
from hypothesis import given
from hypothesis import strategies as st
from peers import torchvision
from PIL import Image
from preloaded import Preloaded
from rich.console import Console

import compare
import demo
import feedline as fl
import image_files
import show
import training
from compare import Outcome, Settings, Side
from dataset import CroppedImages, EpochSampler, IndexRng, random_box
from feedline.loader.report import Advice, StageTimes, Stats, Verdict
from image_files import ImageFile, ImageSet, Photo
from resume import ResumeTest, run_resume_test
from training import Span, TrainingRun, leave_cpus_to, train

SCRIPT = Path(demo.__file__)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Train with one thread: next to other tests, two threads mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(training, "usable_cpus", lambda: 1)
    yield
    torch.set_num_threads(before)


# --- images


def photo(label: str) -> Photo:
    return Photo(label, "photos_for_tests", f"{label}.png", f"A {label}", f"Photographer of {label}", "CC0", "here")


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small photographs and five scans of two digits, in place of the installed ones."""
    package = tmp_path / "site" / "photos_for_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    noise = np.random.default_rng(1)
    for label, size in (("hill", (90, 60)), ("lake", (40, 80))):
        Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)).save(package / f"{label}.png")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(image_files, "PHOTOS", (photo("hill"), photo("lake")))
    scans = noise.integers(0, 256, (5, 8, 8), np.uint8)
    monkeypatch.setattr(image_files, "load_digits", lambda: (scans, np.array([0, 1, 0, 1, 0])))
    monkeypatch.setattr(compare, "PIXELS", 32)


def contents(images: ImageSet) -> dict[str, bytes]:
    return {file.path: (images.root / file.path).read_bytes() for file in images.files}


def make(directory: Path, count: int) -> ImageSet:
    images = image_files.plan_images(directory, count)
    image_files.write_images(images, images.missing(), lambda: None)
    return images


@pytest.mark.usefixtures("small_sources")
def test_images_are_spread_evenly_until_digits_run_out(tmp_path: Path) -> None:
    few = Counter(file.label for file in image_files.plan_images(tmp_path, 9).files)
    assert few == {"digit-0": 2, "digit-1": 2, "hill": 3, "lake": 2}
    many = Counter(file.label for file in image_files.plan_images(tmp_path, 40).files)
    assert many == {"digit-0": 3, "digit-1": 2, "hill": 18, "lake": 17}


@pytest.mark.usefixtures("small_sources")
def test_the_set_has_the_requested_number_of_images() -> None:
    @given(count=st.integers(4, 500))
    def check(count: int) -> None:
        images = image_files.plan_images(Path("unused"), count)
        assert len({file.path for file in images.files}) == count
        assert set(images.classes) == {file.label for file in images.files}

    check()


@pytest.mark.usefixtures("small_sources")
def test_an_image_is_the_same_file_in_every_set(tmp_path: Path) -> None:
    small, large = contents(make(tmp_path / "a", 10)), contents(make(tmp_path / "b", 20))
    assert small.items() <= large.items()


@pytest.mark.usefixtures("small_sources")
def test_images_are_jpeg_files_in_folders_named_after_their_class(tmp_path: Path) -> None:
    images = make(tmp_path, 12)
    for file in images.files:
        path = images.root / file.path
        assert path.parent.name == file.label
        with Image.open(path) as image:
            assert image.format == "JPEG"
            image.load()


@pytest.mark.usefixtures("small_sources")
def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    expected = contents(make(tmp_path / "whole", 20))
    images = image_files.plan_images(tmp_path / "cut", 20)
    ticks = iter([None, None])

    with pytest.raises(StopIteration):
        image_files.write_images(images, images.missing(), lambda: next(ticks))
    (images.root / images.files[0].path).unlink()

    missing = images.missing()
    assert images.files[0] in missing
    image_files.write_images(images, missing, lambda: None)
    assert contents(images) == expected
    assert not list(images.root.rglob("*.part"))


@pytest.mark.usefixtures("small_sources")
def test_attribution_names_every_photographer_and_the_origin(tmp_path: Path) -> None:
    text = (make(tmp_path, 8).root / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "Photographer of hill | CC0" in text
    assert "Photographer of lake | CC0" in text
    assert image_files.DIGITS_CREDIT in text
    assert "crop" in text


@pytest.mark.usefixtures("small_sources")
def test_without_the_packages_the_error_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_files, "PHOTOS", (photo("hill"), photo("nowhere")))
    with pytest.raises(fl.errors.MissingExtraError, match="pip install matplotlib scikit-image scikit-learn"):
        image_files.installed_photos()
    with pytest.raises(fl.errors.MissingExtraError, match=r"nowhere\.png .* pip install"):
        photo("nowhere").load()


@pytest.mark.parametrize("each", image_files.PHOTOS, ids=lambda each: each.label)
def test_the_photographs_are_in_the_installed_packages(each: Photo) -> None:
    pixels = each.load()
    assert pixels.mode == "RGB"
    assert min(pixels.size) >= 300


def test_the_digits_are_complete() -> None:
    scans, digits = image_files.load_digits()
    assert scans.shape == (1797, 8, 8)
    assert scans.max() == 255
    assert set(digits) == set(range(10))


# --- dataset and training


@pytest.fixture
def six_images(tmp_path: Path) -> ImageSet:
    noise = np.random.default_rng(2)
    files = tuple(ImageFile(label, number) for label in ("gray", "red") for number in range(3))
    for file in files:
        path = tmp_path / file.path
        path.parent.mkdir(exist_ok=True)
        shape = (50, 70) if file.label == "gray" else (50, 70, 3)
        Image.fromarray(noise.integers(0, 256, shape, np.uint8)).save(path)
    return ImageSet(tmp_path, ("gray", "red"), files)


def test_a_sample_is_a_square_image_and_its_class(six_images: ImageSet) -> None:
    dataset = CroppedImages(six_images, IndexRng(0), size=32)
    samples = [dataset[i] for i in range(len(dataset))]
    assert [label for _, label in samples] == [0, 0, 0, 1, 1, 1]
    assert {(image.shape, image.dtype) for image, _ in samples} == {((3, 32, 32), torch.float32)}


def test_a_sample_is_a_function_of_seed_and_index(six_images: ImageSet) -> None:
    dataset, same = (CroppedImages(six_images, IndexRng(0), 32, epochs=2) for _ in range(2))
    other = CroppedImages(six_images, IndexRng(1), 32, epochs=2)
    assert len(dataset) == 12
    assert torch.equal(dataset[4][0], same[4][0])
    assert not torch.equal(dataset[4][0], other[4][0])
    assert not torch.equal(dataset[4][0], dataset[4 + 6][0])  # the next epoch crops the same file elsewhere
    assert dataset[4][1] == dataset[4 + 6][1]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_random_box_is_within_the_image(width: int, height: int, seed: int) -> None:
    left, top, right, bottom = random_box(width, height, np.random.default_rng(seed))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@given(st.integers(1, 200), st.integers(0, 10))
def test_each_epoch_is_another_permutation_of_its_own_indices(count: int, seed: int) -> None:
    sampler = EpochSampler(count, seed)
    first, second = list(sampler), list(sampler)
    assert sorted(first) == list(range(count))
    assert sorted(second) == list(range(count, 2 * count))
    assert list(EpochSampler(count, seed)) == first
    assert len(sampler) == count


def test_training_is_a_function_of_seed_and_batches(six_images: ImageSet) -> None:
    loader = torch.utils.data.DataLoader(CroppedImages(six_images, IndexRng(0), 32), batch_size=4)
    ticks: list[float] = []
    run = train(loader, epochs=2, classes=2, seed=3, tick=ticks.append)
    assert run.images == 12
    assert list(run.losses) == ticks
    assert run.losses == train(loader, epochs=2, classes=2, seed=3, tick=ticks.append).losses
    assert run.losses != train(loader, epochs=2, classes=2, seed=4, tick=ticks.append).losses


def test_waits_and_steps_alternate_and_cover_the_whole_time(six_images: ImageSet) -> None:
    loader = torch.utils.data.DataLoader(CroppedImages(six_images, IndexRng(0), 32), batch_size=4)
    run = train(loader, epochs=1, classes=2, seed=0, tick=lambda _: None)
    assert [span.stage for span in run.spans] == ["wait", "step"] * 2
    assert all(a.stop_ns <= b.start_ns for a, b in zip(run.spans, run.spans[1:], strict=False))
    assert 0 < run.first_batch_s <= run.seconds("wait") < run.wall_s
    assert run.images_per_s == pytest.approx(6 / run.wall_s)


def test_the_number_of_threads_is_restored() -> None:
    torch.set_num_threads(2)
    with leave_cpus_to(workers=10_000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


# --- comparison


def compared(directory: Path, workers: int) -> tuple[dict[str, Any], str]:
    """Summary and screen of the demo over 40 images, 2 epochs, batches of 8."""
    output = StringIO()
    settings = Settings(epochs=2, workers=workers, seed=0, batch_size=8)
    outcome = demo.run(directory, 40, settings, Console(file=output))
    return json.loads(json.dumps(outcome.summary())), output.getvalue()


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("workers", [0, *at_night(2)])
def test_both_loaders_feed_the_same_batches_and_resuming_is_exact(tmp_path: Path, workers: int) -> None:
    summary, shown = compared(tmp_path, workers)
    assert summary["equal"]
    assert summary["largest_loss_difference"] == 0
    assert len(summary["feedline"]["losses"]) == 2 * 5
    assert len(set(summary["feedline"]["losses"])) == 2 * 5
    assert summary["resume"]["checksum"] == summary["resume"]["checksum_uninterrupted"]
    assert summary["resume"]["batches"] == 10
    assert summary["resume"]["cut_after"] == 3
    assert summary["resume"]["state_nbytes"] < 1024
    for loader in ("torch", "feedline"):
        assert {"fetch", "collate"} <= set(summary[loader]["stages_s"])
        assert summary[loader]["verdict"]["headline"].split()[0] in shown


@pytest.mark.usefixtures("small_sources")
@pytest.mark.parametrize("workers", [2, *at_night(0)])
def test_both_loaders_feed_the_same_batches_of_torchvision(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(torchvision())
    summary, shown = compared(tmp_path, workers)
    assert summary["equal"]
    assert len(set(summary["feedline"]["losses"])) == 2 * 5
    assert "ImageFolder: read by feedline" in shown
    assert "written by hand" not in shown


@pytest.mark.usefixtures("small_sources")
def test_without_torchvision_the_dataset_is_written_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    summary, shown = compared(tmp_path, 0)
    assert summary["equal"]
    assert "torchvision cannot be imported here, so the dataset is written by hand" in " ".join(shown.split())


@pytest.mark.usefixtures("small_sources")
def test_different_losses_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(fl.DataLoader[Any]):
        def __iter__(self) -> Any:
            return ((images + 1e-3, labels) for images, labels in super().__iter__())

    monkeypatch.setattr(compare.fl, "DataLoader", Wrong)
    summary, shown = compared(tmp_path, workers=0)
    assert not summary["equal"]
    assert summary["largest_loss_difference"] > 0
    assert "losses differ" in " ".join(shown.split())


def run(losses: tuple[float, ...]) -> TrainingRun:
    spans = (Span("wait", 0, 2_000_000_000), Span("step", 2_000_000_000, 3_000_000_000))
    return TrainingRun(losses, accuracy=0.5, images=300, spans=spans)


def side(losses: tuple[float, ...], words: str) -> Side:
    stages = {"fetch": StageTimes(2, 0.25, 0.1, 0.2, (0, 1)), "serialize": StageTimes(2, 0.004, 0.001, 0.002, (0, 1))}
    stats = Stats(batches=2, stages=stages)
    return Side(0.75, run(losses), stats, Verdict("fetch", 0.67, words, "", (Advice("More of that.", gain=2.0),)))


RESUMED = ResumeTest('{"feedline": 1}', (2, 1), ("a", "b", "c"), ("a",), ("b", "c"))
OUTCOME = Outcome(
    side((2.5, 0.5), "Loading limits this loop. " * 6 + "a.name.longer.than.any.column.is.wide.in.60.columns"),
    side((2.5, 0.5), "Training limits. " * 9),
    RESUMED,
)


def screen(renderable: Any, columns: int) -> str:
    output = StringIO()
    Console(width=columns, file=output).print(renderable)
    return output.getvalue()


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_results_fit_the_terminal_and_nothing_is_cut_off(columns: int) -> None:
    shown = screen(show.trainings(OUTCOME, Settings(1, 2, 0)), columns) + screen(show.resumed(RESUMED), columns)
    assert max(map(len, shown.splitlines())) <= columns
    assert "…" not in shown
    figures = (
        "100",
        "3.0 s",
        "750 ms",
        "2000 ms",
        "2.0 s (67%)",
        "1.0 s (33%)",
        "125.0 ms",
        "2.0 ms",
        "2.500 → 0.500",
        "50%",
    )
    for figure in figures:
        assert figure in shown
    assert shown.count("Loading") == 6
    assert "60.columns" in shown
    assert shown.count("Training") == 9


def test_runs_with_other_losses_or_other_lengths_are_not_equal() -> None:
    assert OUTCOME.equal
    assert OUTCOME.largest_difference == 0
    other = replace(OUTCOME, feedline=side((2.5, 0.25), ""))
    assert (other.equal, other.largest_difference) == (False, 0.25)
    shorter = replace(OUTCOME, feedline=side((2.5,), ""))
    assert (shorter.equal, shorter.largest_difference) == (False, float("inf"))
    assert not replace(OUTCOME, resumed=replace(RESUMED, after=("c", "b"))).equal


def test_a_loader_that_repeats_a_batch_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(60.0), torch.arange(60))
    arguments: dict[str, Any] = {"batch_size": 5, "seed": 0, "workers": (0, 0)}
    assert run_resume_test(data, **arguments).equal

    honest = fl.DataLoader.load_state_dict

    def forgetful(loader: fl.DataLoader[Any], state: dict[str, Any]) -> None:
        honest(loader, {**state, "position": state["position"] - 5})

    monkeypatch.setattr(fl.DataLoader, "load_state_dict", forgetful)
    assert not run_resume_test(data, **arguments).equal


@pytest.mark.parametrize(("first", "second"), [(0, 1), (1, 2), (2, 1), (8, 7)])
def test_resuming_takes_another_number_of_workers(first: int, second: int) -> None:
    assert Settings(1, first, 0).resumed_workers() == second


# --- the script

MAIN = """
import os, runpy, sys
from contextlib import redirect_stdout
os.environ["XDG_CACHE_HOME"] = {cache!r}
sys.argv[0] = {script!r}
sys.path[0] = os.path.dirname({script!r})
with open({out!r}, "w") as out, redirect_stdout(out):
    runpy.run_path({script!r}, run_name="__main__")
"""
"""Runs the script with another folder for caches, and its output without its messages."""


@pytest.mark.nightly
def test_the_script_trains_on_the_installed_photographs(preloaded: Preloaded, tmp_path: Path) -> None:
    out = tmp_path / "summary.json"
    main = MAIN.format(cache=str(tmp_path), out=str(out), script=str(SCRIPT))
    code, printed = preloaded.run_code(main, tmp_path, "--images", "200", "--workers", "1", "--json")
    assert code == 0, printed
    summary = json.loads(out.read_text())
    assert summary["equal"]
    assert len(summary["feedline"]["losses"]) == 4
    assert "200 JPEG files" in printed
    assert len(list((tmp_path / "feedline" / "demo").rglob("*.jpg"))) == 200


@pytest.mark.parametrize(("outcome", "code"), [(OUTCOME, 0), (replace(OUTCOME, feedline=side((2.5, 0.25), "")), 1)])
def test_the_exit_code_says_whether_the_results_are_equal(
    outcome: Outcome, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "run", lambda *_: outcome)
    assert demo.main(["--json"]) == code
    assert json.loads(capsys.readouterr().out)["equal"] is (code == 0)


def test_errors_are_explained_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    assert demo.main(["--dir", str(occupied)]) == 2
    message = capsys.readouterr().err
    assert str(occupied) in message.replace("\n", "")
    assert "--dir" in message
    assert "Traceback" not in message


@pytest.mark.parametrize("arguments", [["--images", "199"], ["--workers", "-1"], ["--epochs", "0"], ["--seed", "-1"]])
def test_options_out_of_range_are_rejected(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        demo.main(arguments)
    assert exit_.value.code == 2
    assert f"argument {arguments[0]}: {arguments[1]} is out of range" in capsys.readouterr().err
