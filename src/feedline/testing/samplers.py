"""Conformance checks of samplers with random access."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import chain, islice, pairwise
from typing import Any

import numpy as np

_MOST_POSITIONS = 5000


def check_sampler(sampler: Any) -> None:
    """Raise `AssertionError` for the first promise that a sampler breaks.

    `sampler` is an index sampler or a batch sampler. The function reads the first 5,000 indices or batches of two
    epochs, and checks that:

    - `take` or `take_batches` returns int64 arrays;
    - any division of an epoch into spans gives the same order, at any time and in any sequence;
    - the order ends with the epoch;
    - iteration after `set_epoch` gives the same order, and so does an unpickled sampler;
    - an unpickled sampler has the same fingerprint.
    """
    name = "take_batches" if hasattr(sampler, "take_batches") else "take"
    length = _length_of(sampler)
    stop = min(length, _MOST_POSITIONS)
    for epoch in (0, 1):
        whole = getattr(sampler, name)(epoch, 0, stop)
        _check_types(name, whole)
        assert len(whole) == stop, f"{name}({epoch}, 0, {stop}) must give {stop} items, but gave {len(whole)}"
        _check_spans(sampler, name, epoch, whole)
        _check_iteration(sampler, name, epoch, whole)
    if length == stop:
        take = getattr(sampler, name)
        assert not len(take(0, stop, stop + 5)), f"{name} must give nothing past the end at {length}"
        assert len(take(0, 0, stop + 5)) == stop, f"{name} must stop at the end, {length}"
    _check_pickle(sampler, name, stop)


def _length_of(sampler: Any) -> int:
    try:
        return len(sampler)
    except TypeError:  # endless
        return _MOST_POSITIONS + 1


def _check_types(name: str, whole: Any) -> None:
    if name == "take":
        assert isinstance(whole, np.ndarray), f"take must give an array, but gave {type(whole).__name__}"
        assert whole.dtype == np.int64, f"take must give int64, but gave {whole.dtype}"
        return
    assert isinstance(whole, list), f"take_batches must give a list, but gave {type(whole).__name__}"
    for batch in whole:
        kind = f"{batch.dtype} array" if isinstance(batch, np.ndarray) else type(batch).__name__
        assert kind == "int64 array", f"each batch of take_batches must be an int64 array, but one is {kind}"


def _check_spans(sampler: Any, name: str, epoch: int, whole: Any) -> None:
    take: Callable[..., Any] = getattr(sampler, name)
    cuts = np.unique(np.geomspace(1, max(1, len(whole)), 9).astype(int)).tolist()
    spans = list(pairwise([0, *cuts]))
    parts = {span: take(epoch, *span) for span in reversed(spans)}
    joined = list(chain.from_iterable(parts[span] for span in spans))
    _check_equal(whole, joined, f"{name} depends on the division of an epoch into spans")
    _check_equal(whole, take(epoch, 0, len(whole)), f"{name} gives another result at the second call")


def _check_iteration(sampler: Any, name: str, epoch: int, whole: Any) -> None:
    sampler.set_epoch(epoch)
    iterated = list(islice(iter(sampler), len(whole)))
    _check_equal(whole, iterated, f"iteration after set_epoch({epoch}) and {name}({epoch}, ...) disagree")


def _check_pickle(sampler: Any, name: str, stop: int) -> None:
    copy = pickle.loads(pickle.dumps(sampler))
    expected, got = getattr(sampler, name)(1, 0, stop), getattr(copy, name)(1, 0, stop)
    _check_equal(expected, got, "an unpickled sampler gives another order")
    assert sampler.fingerprint() == copy.fingerprint(), "an unpickled sampler has another fingerprint"


def _check_equal(expected: Any, got: Any, complaint: str) -> None:
    pairs = zip(map(np.atleast_1d, expected), map(np.atleast_1d, got), strict=False)
    at = next((at for at, pair in enumerate(pairs) if not np.array_equal(*pair)), min(len(expected), len(got)))
    if at < max(len(expected), len(got)):
        raise AssertionError(f"{complaint}, from position {at} on: {expected[at:][:5]} and {got[at:][:5]}")
