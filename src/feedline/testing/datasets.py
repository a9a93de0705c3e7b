"""Conformance checks of map-style datasets."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np

from feedline import collate
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead, has_traits, traits_of
from feedline.core.rng import addressed, derive_each
from feedline.core.tensors import allocate_tensor
from feedline.core.torch_wrappers import batch_getter
from feedline.loader.dataloader import DataLoader
from feedline.testing.difference import check_same

_SEED = 7


_SAMPLES = 24


def check_dataset(
    dataset: Any, *, collate_fn: Callable[[Any], Any] | None = None, methods: Sequence[str] = ("process",)
) -> None:
    """Raise `AssertionError` for the first promise that a dataset breaks.

    It reads about two dozen samples, and checks that:

    - samples are the same at every read, and an index out of range raises `IndexError`;
    - `__getitems__` and `read_batch` return the same samples as `__getitem__`;
    - `read_batch` and `ranges` come with `traits`, without which they are ignored;
    - the dataset can be pickled, and read by several threads at once if its traits have `thread_safe`;
    - a loader without workers gives these samples;
    - loaders with the worker methods `methods` give the same batches as a loader without workers, also after a resume
      in mid-epoch.

    `collate_fn` is passed to the loaders.
    """
    length = len(dataset)
    assert length > 0, "the dataset is empty: nothing can be checked"
    indices = np.unique(np.linspace(0, length - 1, _SAMPLES).astype(np.int64))
    expected = samples_of(dataset, indices)
    _check_repeats(dataset, indices, expected)
    _check_range(dataset, length)
    _check_many(dataset, indices, expected)
    _check_traits(dataset)
    _check_read_batch(dataset, indices, expected)
    _check_pickle(dataset, indices, expected)
    if traits_of(dataset).thread_safe:
        _check_threads(dataset, indices, expected)
        methods = ("thread", *methods)
    _check_inline(dataset, indices, expected)
    _check_loaders(dataset, collate_fn, methods)


def samples_of(dataset: Any, indices: Any) -> list[Any]:
    """The samples of `indices`, each read with a fixed random address."""
    samples = []
    with addressed(_keys(indices).tolist()) as address:
        for row, index in enumerate(indices.tolist()):
            address.row = row
            samples.append(dataset[index])
    return samples


def _keys(indices: Any) -> Any:
    return derive_each((_SEED, 0), np.arange(len(indices)))


def _check_repeats(dataset: Any, indices: Any, expected: Any) -> None:
    promise = "the same index and the same random address must give the same sample (draw from fl.sample_rng())"
    check_same(expected, samples_of(dataset, indices), promise)


def _check_range(dataset: Any, length: int) -> None:
    for index in (length, length + 1000):
        try:
            dataset[index]
        except IndexError:
            continue
        raise AssertionError(f"index {index} of {length} samples must raise IndexError, but gave a sample")


def _check_many(dataset: Any, indices: Any, expected: Any) -> None:
    if batch_getter(dataset) is None:
        return
    got = samples_at_once(dataset, indices)
    promise = "__getitems__ must give a list of the samples that __getitem__ gives (name the row: fl.sample_rng(row))"
    check_same(expected, got, promise)


def samples_at_once(dataset: Any, indices: Any) -> list[Any]:
    """The same samples as `samples_of`, read by `__getitems__`."""
    many = batch_getter(dataset)
    assert many is not None
    with addressed(_keys(indices).tolist()) as address:
        address.row = None
        return list(many(indices.tolist()))


def _check_traits(dataset: Any) -> None:
    if not has_traits(dataset):
        unread = [name for name in ("traits", "read_batch", "ranges") if hasattr(dataset, name)]
        assert not unread, f"{unread[0]} is read only if traits is a fl.Traits: add traits = fl.Traits(), or rename it"


def _check_read_batch(dataset: Any, indices: Any, expected: Any) -> None:
    reader = reader_of(dataset)
    if reader is not None:
        promise = "read_batch must give the batch that torch's default collate makes of the samples"
        batch = reader(BatchRead(indices, allocate_tensor, _keys(indices)))
        check_same(collate.default(expected), batch, promise)


def _check_pickle(dataset: Any, indices: Any, expected: Any) -> None:
    try:
        copy = pickle.loads(pickle.dumps(dataset))
    except Exception as error:
        raise AssertionError(f"the dataset must survive pickling, to reach worker processes: {error!r}") from error
    check_same(expected, samples_of(copy, indices), "an unpickled dataset must give the same samples")
    check_same(expected, samples_of(dataset, indices), "pickling must not change the dataset")


def _check_threads(dataset: Any, indices: Any, expected: Any) -> None:
    with ThreadPoolExecutor(4) as threads:
        for got in threads.map(lambda _: samples_of(dataset, indices), range(8)):
            check_same(expected, got, "Traits(thread_safe=True) requires that several threads may read at once")


def _check_inline(dataset: Any, indices: Any, expected: list[Any]) -> None:
    # In epoch 0, samples have the same random addresses as in `samples_of`.
    loader = DataLoader(dataset, 5, sampler=indices.tolist(), seed=_SEED, collate_fn=list)
    got = [sample for batch in loader for sample in batch]
    check_same(expected, got, "a loader without workers must give the samples that __getitem__ gives")


def _check_loaders(dataset: Any, collate_fn: Callable[[Any], Any] | None, methods: Sequence[str]) -> None:
    batch_size = max(1, min(5, len(dataset) // 4))

    def loader(method: str | None) -> Any:
        workers = {"num_workers": 0} if method is None else {"num_workers": 2, "worker_method": method}
        return DataLoader(dataset, batch_size, shuffle=True, seed=_SEED, collate_fn=collate_fn, **workers)

    expected = _first(iter(loader(None)), 6)
    for method in methods:
        with loader(method) as worked:
            check_same(expected, _first(iter(worked), 6), f"batches from {method} workers must equal those without")
    for kind in (None, *methods[:1]):
        with loader(None) as cut, loader(kind) as resumed:
            begun = _first(iter(cut), 2)
            resumed.load_state_dict(cut.state_dict())
            rest = _first(iter(resumed), len(expected) - len(begun))
            check_same(expected, begun + rest, "a resumed loader must continue with the next batch")


def _first(batches: Any, count: int) -> list[Any]:
    return list(islice(batches, count))
