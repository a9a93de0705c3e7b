"""`check_sampler`: the promises of a sampler with random access."""

from __future__ import annotations

import pickle
from itertools import islice, pairwise
from typing import Any

import numpy as np

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
