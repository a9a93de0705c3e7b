"""The demo's dataset, order and training loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from feedline.cli.demo.corpus import Corpus, Picture
from feedline.cli.demo.pictures import IndexRng, Passes, Pictures, random_box
from feedline.cli.demo.training import spared_threads, train
from feedline.rng import SampleRng


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    noise = np.random.Generator(np.random.Philox(key=2))
    pictures = tuple(Picture(label, number) for label in ("grey", "red") for number in range(3))
    for picture in pictures:
        path = tmp_path / picture.file
        path.parent.mkdir(exist_ok=True)
        shape = (50, 70) if picture.label == "grey" else (50, 70, 3)
        Image.fromarray(noise.integers(0, 256, shape, np.uint8)).save(path)
    return Corpus(tmp_path, ("grey", "red"), pictures)


def test_a_sample_is_a_square_picture_and_its_class(corpus: Corpus) -> None:
    pictures = Pictures(corpus, IndexRng(0), size=32)
    samples = [pictures[i] for i in range(len(pictures))]
    assert [label for _, label in samples] == [0, 0, 0, 1, 1, 1]
    assert {(image.shape, image.dtype) for image, _ in samples} == {((3, 32, 32), torch.float32)}


def test_a_sample_is_a_function_of_seed_and_index(corpus: Corpus) -> None:
    pictures, same = (Pictures(corpus, IndexRng(0), 32, passes=2) for _ in range(2))
    other = Pictures(corpus, IndexRng(1), 32, passes=2)
    assert len(pictures) == 12
    assert torch.equal(pictures[4][0], same[4][0])
    assert not torch.equal(pictures[4][0], other[4][0])
    assert not torch.equal(pictures[4][0], pictures[4 + 6][0])  # the next pass crops the same file elsewhere
    assert pictures[4][1] == pictures[4 + 6][1]


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_a_random_box_lies_within_the_picture(width: int, height: int, key: int) -> None:
    left, top, right, bottom = random_box(width, height, SampleRng(key))
    assert 0 <= left < right <= width
    assert 0 <= top < bottom <= height


@given(st.integers(1, 200), st.integers(0, 10))
def test_each_pass_is_another_permutation_of_its_own_indices(count: int, seed: int) -> None:
    passes = Passes(count, seed)
    first, second = list(passes), list(passes)
    assert sorted(first) == list(range(count))
    assert sorted(second) == list(range(count, 2 * count))
    assert list(Passes(count, seed)) == first
    assert len(passes) == count


def test_training_is_a_function_of_seed_and_batches(corpus: Corpus) -> None:
    loader = torch.utils.data.DataLoader(Pictures(corpus, IndexRng(0), 32), batch_size=4)
    ticks: list[float] = []
    run = train(loader, epochs=2, classes=2, seed=3, tick=ticks.append)
    assert run.images == 12
    assert list(run.losses) == ticks
    assert run.losses == train(loader, epochs=2, classes=2, seed=3, tick=ticks.append).losses
    assert run.losses != train(loader, epochs=2, classes=2, seed=4, tick=ticks.append).losses


def test_waiting_and_training_alternate_and_are_all_of_the_time(corpus: Corpus) -> None:
    loader = torch.utils.data.DataLoader(Pictures(corpus, IndexRng(0), 32), batch_size=4)
    run = train(loader, epochs=1, classes=2, seed=0, tick=lambda _: None)
    assert [span.stage for span in run.spans] == ["wait", "step"] * 2
    assert all(a.stop_ns <= b.start_ns for a, b in zip(run.spans, run.spans[1:], strict=False))
    assert 0 < run.first_batch_s <= run.seconds("wait") < run.wall_s
    assert run.images_per_s == pytest.approx(6 / run.wall_s)


def test_threads_are_spared_and_given_back() -> None:
    before = torch.get_num_threads()
    with spared_threads(workers=10_000):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before
