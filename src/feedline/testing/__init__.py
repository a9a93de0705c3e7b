"""Conformance checks for datasets and samplers of your own: what feedline relies on, tried out and named if broken.

def test_my_dataset():
    fl.testing.check_dataset(MyDataset("data"))
"""

from feedline.testing.datasets import check_dataset
from feedline.testing.equality import difference
from feedline.testing.samplers import check_sampler

__all__ = ["check_dataset", "check_sampler", "difference"]
