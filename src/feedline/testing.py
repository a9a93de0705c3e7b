"""Conformance checks for datasets and samplers of your own: what feedline relies on, tried out and named if broken.

def test_my_dataset():
    fl.testing.check_dataset(MyDataset("data"))

`check_dataset`: the promises of a map-style dataset, one after the other.

`check_sampler`: the promises of a sampler with random access.

Whether two samples or batches are the same, and if not, where.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, pairwise
from typing import Any

import numpy as np
import torch

from feedline import collate
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead, has_traits, traits_of
from feedline.core.rng import addressed, derive_each
from feedline.core.tensors import allocate_tensor
from feedline.loader.builder import many_at_once
from feedline.loader.dataloader import DataLoader

__all__ = ["check_dataset", "check_sampler", "difference"]


def difference(one: Any, other: Any, place: str = "it") -> str | None:
    """The first difference between two nested values, in words; None where there is none.

    Containers must have equal types, tensors and arrays equal dtypes, shapes and bits (NaN equals NaN). Values that
    are neither, such as pictures, are compared with `==`.
    """
    if type(one) is not type(other):
        return f"{place} is {type(one).__name__} once and {type(other).__name__} once"
    if isinstance(one, torch.Tensor):
        return _between_tensors(one, other, place)
    if isinstance(one, np.ndarray):
        return _between_arrays(one, other, place)
    if isinstance(one, Mapping):
        return _between_mappings(one, other, place)
    if isinstance(one, Sequence) and not isinstance(one, (str, bytes, bytearray, range)):
        return _between_sequences(one, other, place)
    if one == other or (one != one and other != other):  # noqa: PLR0124 - NaN
        return None
    return f"{place} is {_short(one)} once and {_short(other)} once"


def _between_tensors(one: torch.Tensor, other: torch.Tensor, place: str) -> str | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{place} is {one.dtype} {tuple(one.shape)} once and {other.dtype} {tuple(other.shape)} once"
    if not torch.equal(one, other) and not torch.equal(one.nan_to_num(), other.nan_to_num()):
        return f"{place} has other values"
    return None


def _between_arrays(one: Any, other: Any, place: str) -> str | None:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"{place} is {one.dtype} {one.shape} once and {other.dtype} {other.shape} once"
    if not np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"):
        return f"{place} has other values"
    return None


def _between_mappings(one: Any, other: Any, place: str) -> str | None:
    if list(one) != list(other):
        return f"{place} has the keys {list(one)} once and {list(other)} once"
    found = (difference(one[key], other[key], f"{place}[{key!r}]") for key in one)
    return next((text for text in found if text), None)


def _between_sequences(one: Any, other: Any, place: str) -> str | None:
    if len(one) != len(other):
        return f"{place} has {len(one)} parts once and {len(other)} once"
    found = (difference(a, b, f"{place}[{i}]") for i, (a, b) in enumerate(zip(one, other, strict=True)))
    return next((text for text in found if text), None)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SEED = 7


_SAMPLES = 24


def check_dataset(
    dataset: Any, *, collate_fn: Callable[[Any], Any] | None = None, methods: Sequence[str] = ("process",)
) -> None:
    """AssertionError names the first promise that `dataset` breaks, and what to do about it.

    Checked on a couple of dozen samples: lengths and index errors; that samples are the same whenever they are asked
    for; that `__getitems__` and `read_batch` give what single samples give; that the dataset survives pickling and, if
    its traits say `thread_safe`, threads; and that a loader with workers of these `methods` gives the batches of one
    without, also when it is resumed in mid-epoch. `collate_fn` is what the loader needs for such samples, if anything.
    """
    length = len(dataset)
    assert length > 0, "the dataset is empty: nothing can be checked"
    indices = np.unique(np.linspace(0, length - 1, _SAMPLES).astype(np.int64))
    expected = _one_by_one(dataset, indices)
    _check_repeats(dataset, indices, expected)
    _check_range(dataset, length)
    _check_many(dataset, indices, expected)
    _check_traits(dataset)
    _check_read_batch(dataset, indices, expected)
    _check_pickle(dataset, indices, expected)
    if traits_of(dataset).thread_safe:
        _check_threads(dataset, indices, expected)
        methods = ("thread", *methods)
    _check_loaders(dataset, collate_fn, methods)


def _one_by_one(dataset: Any, indices: Any) -> list[Any]:
    """The samples as a loader with a seed draws them, one after the other."""
    samples = []
    with addressed(_keys(indices).tolist()) as address:
        for row, index in enumerate(indices.tolist()):
            address.row = row
            samples.append(dataset[index])
    return samples


def _keys(indices: Any) -> Any:
    return derive_each((_SEED, 0), np.arange(len(indices)))


def _check_same(expected: Any, got: Any, promise: str) -> None:
    found = difference(expected, got)
    assert found is None, f"{promise}: {found}"


def _check_repeats(dataset: Any, indices: Any, expected: Any) -> None:
    promise = "the same index and the same random address must give the same sample (draw from fl.sample_rng())"
    _check_same(expected, _one_by_one(dataset, indices), promise)


def _check_range(dataset: Any, length: int) -> None:
    for index in (length, length + 1000):
        try:
            dataset[index]
        except IndexError:
            continue
        raise AssertionError(f"index {index} of {length} samples must raise IndexError, and gave a sample")


def _check_many(dataset: Any, indices: Any, expected: Any) -> None:
    many = many_at_once(dataset)
    if many is None:
        return
    with addressed(_keys(indices).tolist()) as address:
        address.row = None
        got = many(indices.tolist())
    promise = "__getitems__ must give a list of the samples that __getitem__ gives (name the row: fl.sample_rng(row))"
    _check_same(expected, list(got), promise)


def _check_traits(dataset: Any) -> None:
    if not has_traits(dataset):
        unread = [name for name in ("traits", "read_batch", "ranges") if hasattr(dataset, name)]
        assert not unread, f"{unread[0]} is read only if traits is a fl.Traits: add traits = fl.Traits(), or rename it"


def _check_read_batch(dataset: Any, indices: Any, expected: Any) -> None:
    reader = reader_of(dataset)
    if reader is not None:
        promise = "read_batch must give what torch's default collate makes of the single samples"
        got = reader(BatchRead(indices, allocate_tensor, _keys(indices)))
        _check_same(collate.default(expected), got, promise)


def _check_pickle(dataset: Any, indices: Any, expected: Any) -> None:
    try:
        copy = pickle.loads(pickle.dumps(dataset))
    except Exception as error:
        raise AssertionError(f"the dataset must survive pickling, to reach worker processes: {error!r}") from error
    _check_same(expected, _one_by_one(copy, indices), "an unpickled dataset must give the same samples")
    _check_same(expected, _one_by_one(dataset, indices), "pickling must leave the dataset as it was")


def _check_threads(dataset: Any, indices: Any, expected: Any) -> None:
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: _one_by_one(dataset, indices), range(8)):
            _check_same(expected, got, "Traits(thread_safe=True) promises that several threads may read at once")


def _check_loaders(dataset: Any, collate_fn: Callable[[Any], Any] | None, methods: Sequence[str]) -> None:
    batch_size = max(1, min(5, len(dataset) // 4))

    def loader(method: str | None) -> Any:
        workers = {"num_workers": 0} if method is None else {"num_workers": 2, "worker_method": method}
        return DataLoader(dataset, batch_size, shuffle=True, seed=_SEED, collate_fn=collate_fn, **workers)

    expected = _first(iter(loader(None)), 6)
    for method in methods:
        with loader(method) as worked:
            _check_same(expected, _first(iter(worked), 6), f"batches from {method} workers must equal those without")
    with loader(None) as cut, loader(methods[0]) as resumed:
        begun = _first(iter(cut), 2)
        resumed.load_state_dict(cut.state_dict())
        rest = _first(iter(resumed), len(expected) - len(begun))
        _check_same(expected, begun + rest, "a resumed loader must go on with the very next batch")


def _first(batches: Any, count: int) -> list[Any]:
    return list(islice(batches, count))


_MOST = 5000


def check_sampler(sampler: Any) -> None:
    """AssertionError names the first promise that a sampler with `take(epoch, start, stop)` breaks.

    Checked on the first few thousand positions of two epochs: that spans may be cut anywhere, asked for in any order
    and again; that they end with the epoch; that iteration, `set_epoch` and pickling agree with them; and that
    `fingerprint()` says the same of an equal sampler.
    """
    length = _length(sampler)
    stop = min(length, _MOST)
    for epoch in (0, 1):
        whole = sampler.take(epoch, 0, stop)
        assert isinstance(whole, np.ndarray), f"take must give an array, and gave {type(whole).__name__}"
        assert whole.dtype == np.int64, f"take must give int64, and gave {whole.dtype}"
        assert len(whole) == stop, f"take({epoch}, 0, {stop}) gave {len(whole)} indices"
        _check_spans(sampler, epoch, whole)
        _check_iteration(sampler, epoch, whole)
    if length == stop:
        assert not len(sampler.take(0, stop, stop + 5)), f"take must give nothing past the end at {length}"
        assert len(sampler.take(0, 0, stop + 5)) == stop, f"take must stop at the end, {length}"
    copy = pickle.loads(pickle.dumps(sampler))
    _check_equal(sampler.take(1, 0, stop), copy.take(1, 0, stop), "an unpickled sampler gives another order")
    assert sampler.fingerprint() == copy.fingerprint(), "an unpickled sampler has another fingerprint"


def _length(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:  # endless
        return _MOST + 1


def _check_spans(sampler: Any, epoch: int, whole: Any) -> None:
    cuts = np.unique(np.geomspace(1, max(1, len(whole)), 9).astype(int)).tolist()
    spans = list(pairwise([0, *cuts]))
    parts = {span: sampler.take(epoch, *span) for span in reversed(spans)}
    _check_equal(whole, np.concatenate([parts[span] for span in spans]), "take depends on how an epoch is cut")
    _check_equal(whole, sampler.take(epoch, 0, len(whole)), "take gives something else the second time")


def _check_iteration(sampler: Any, epoch: int, whole: Any) -> None:
    sampler.set_epoch(epoch)
    iterated = np.fromiter(islice(iter(sampler), len(whole)), np.int64)
    _check_equal(whole, iterated, f"iteration after set_epoch({epoch}) and take({epoch}, ...) disagree")


def _check_equal(expected: Any, got: Any, complaint: str) -> None:
    if np.array_equal(expected, got):
        return
    count = min(len(expected), len(got))
    at = int(np.argmax(expected[:count] != got[:count])) if (expected[:count] != got[:count]).any() else count
    raise AssertionError(f"{complaint}, from position {at} on: {expected[at:][:5]} and {got[at:][:5]}")
