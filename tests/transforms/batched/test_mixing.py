"""MixUp and CutMix: shares of Beta's distribution, of images and labels alike, by the key of the row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from feedline.core.rng import Draws
from feedline.transforms import CutMix, MixUp
from feedline.transforms.batched import levels
from feedline.transforms.batched.mixing import beta

KEYS = np.random.default_rng(3).integers(0, 2**64, 6, np.uint64)
IMAGES = torch.arange(6.0).view(6, 1, 1, 1).expand(6, 3, 20, 30).contiguous()
LABELS = torch.tensor([0, 1, 2, 3, 0, 1])


@pytest.mark.parametrize("alpha", [0.2, 1.0, 1.7, 30.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    from scipy import stats  # large: other test processes fork faster without it

    drawn = [beta(Draws(key), alpha) for key in range(2_000)]
    assert stats.kstest(drawn, stats.beta(alpha, alpha).cdf).pvalue > 1e-4


def test_mixup_mixes_images_and_labels_by_one_share() -> None:
    images, labels = MixUp(4, alpha=0.8)(IMAGES, LABELS, KEYS)
    for row in range(6):
        share = beta(Draws(int(KEYS[row])), 0.8)
        assert torch.allclose(images[row], torch.tensor(share * row + (1 - share) * ((row - 1) % 6)), atol=1e-5)
        wanted = torch.zeros(4)
        wanted[LABELS[row]] += share
        wanted[LABELS[row - 1]] += 1 - share
        assert torch.allclose(labels[row], wanted, atol=1e-6)


@pytest.mark.parametrize("way", ["rows", "whole"])
def test_cutmix_pastes_a_rectangle_and_counts_its_pixels(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "whole":
        monkeypatch.setattr(levels, "is_faster_by_rows", lambda _: False)
    images, labels = CutMix(4)(IMAGES.to(torch.uint8), LABELS, KEYS)
    assert images.dtype == torch.uint8
    for row in range(6):
        pasted = images[row] == (row - 1) % 6
        assert bool((pasted | (images[row] == row)).all())
        down, across = pasted[0].any(1).nonzero(), pasted[0].any(0).nonzero()
        assert pasted[0].sum() == len(down) * len(across)
        share = 1 - pasted[0].float().mean()
        assert torch.allclose(labels[row, LABELS[row]], share, atol=1e-6)


def test_a_row_depends_on_its_key_and_its_neighbor_only() -> None:
    images, labels = MixUp(4)(IMAGES, LABELS, KEYS)
    less, fewer = MixUp(4)(IMAGES[:3], LABELS[:3], KEYS[:3])
    assert torch.equal(images[1:3], less[1:])
    assert torch.equal(labels[1:3], fewer[1:])


def test_shares_of_earlier_mixtures_are_mixed() -> None:
    images, labels = MixUp(4)(IMAGES, LABELS, KEYS)
    _, twice = CutMix()(images, labels, KEYS + np.uint64(1))
    assert twice.shape == (6, 4)
    assert torch.allclose(twice.sum(1), torch.ones(6))
