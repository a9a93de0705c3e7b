"""Conformance checks of extensions, for the rules that feedline relies on.

Each raises `AssertionError` for the first broken rule.

    def test_my_dataset():
        fl.testing.check_dataset(MyDataset("data"))
"""

from feedline.testing.datasets import check_dataset
from feedline.testing.difference import difference
from feedline.testing.formats import check_format
from feedline.testing.pools import check_pool
from feedline.testing.samplers import check_sampler
from feedline.testing.stores import check_store
from feedline.testing.transforms import check_transform

__all__ = [
    "check_dataset",
    "check_format",
    "check_pool",
    "check_sampler",
    "check_store",
    "check_transform",
    "difference",
]
