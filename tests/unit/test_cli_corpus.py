"""The demo's pictures: deterministic, resumable, attributed."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from feedline.cli.demo import corpus, sources
from feedline.errors import MissingExtraError


def photo(label: str) -> sources.Photo:
    return sources.Photo(
        label, "photos_for_tests", f"{label}.png", f"A {label}", f"Photographer of {label}", "CC0", "here"
    )


@pytest.fixture(autouse=True)
def two_photos_and_two_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "photos_for_tests"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    noise = np.random.Generator(np.random.Philox(key=1))
    for label, size in (("hill", (90, 60)), ("lake", (40, 80))):
        Image.fromarray(noise.integers(0, 256, (*size, 3), np.uint8)).save(package / f"{label}.png")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(sources, "PHOTOS", (photo("hill"), photo("lake")))
    scans = noise.integers(0, 256, (5, 8, 8), np.uint8)
    monkeypatch.setattr(sources, "digits", lambda: (scans, np.array([0, 1, 0, 1, 0])))


def contents(made: corpus.Corpus) -> dict[str, bytes]:
    return {picture.file: (made.root / picture.file).read_bytes() for picture in made.pictures}


def make(directory: Path, count: int) -> corpus.Corpus:
    made = corpus.plan(directory, count)
    corpus.write(made, made.missing(), lambda: None)
    return made


def test_the_plan_shares_pictures_evenly_until_digits_run_out(tmp_path: Path) -> None:
    few = Counter(picture.label for picture in corpus.plan(tmp_path, 9).pictures)
    assert few == {"digit-0": 2, "digit-1": 2, "hill": 3, "lake": 2}
    many = Counter(picture.label for picture in corpus.plan(tmp_path, 40).pictures)
    assert many == {"digit-0": 3, "digit-1": 2, "hill": 18, "lake": 17}


@given(count=st.integers(4, 500))
def test_the_plan_has_as_many_pictures_as_asked_for(count: int) -> None:
    planned = corpus.plan(Path("unused"), count)
    assert len({picture.file for picture in planned.pictures}) == count
    assert set(planned.classes) == {picture.label for picture in planned.pictures}


def test_a_picture_is_the_same_file_in_every_corpus(tmp_path: Path) -> None:
    small, large = contents(make(tmp_path / "a", 10)), contents(make(tmp_path / "b", 20))
    assert small.items() <= large.items()


def test_pictures_are_jpeg_files_in_folders_named_after_their_class(tmp_path: Path) -> None:
    made = make(tmp_path, 12)
    for picture in made.pictures:
        path = made.root / picture.file
        assert path.parent.name == picture.label
        with Image.open(path) as image:
            assert image.format == "JPEG"
            image.load()


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    expected = contents(make(tmp_path / "whole", 20))
    planned = corpus.plan(tmp_path / "cut", 20)
    ticks = iter([None, None])

    with pytest.raises(StopIteration):
        corpus.write(planned, planned.missing(), lambda: next(ticks))
    (planned.root / planned.pictures[0].file).unlink()

    missing = planned.missing()
    assert planned.pictures[0] in missing
    corpus.write(planned, missing, lambda: None)
    assert contents(planned) == expected
    assert not list(planned.root.rglob("*.part"))


def test_attribution_names_every_photographer_and_says_what_the_pictures_are(tmp_path: Path) -> None:
    text = (make(tmp_path, 8).root / "ATTRIBUTION.md").read_text(encoding="utf-8")
    assert "Photographer of hill | CC0" in text
    assert "Photographer of lake | CC0" in text
    assert sources.DIGITS_CREDIT in text
    assert "crop" in text


def test_without_the_packages_the_error_names_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PHOTOS", (photo("hill"), photo("nowhere")))
    with pytest.raises(MissingExtraError, match=r"pip install 'feedline\[demo\]'"):
        sources.photos()
