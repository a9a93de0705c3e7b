"""Notices transforms that draw from generators which all threads share: with threads, no seed makes them repeatable."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import numpy as np
import torch

from feedline.builder import Built
from feedline.rows import Empty
from feedline.workers.pool import Builder


class WatchedBuilder:
    """The builder, whose first batch is watched for draws from `random`, `numpy.random` and torch; warns once."""

    def __init__(self, builder: Builder, dataset: object) -> None:
        self._builder, self._dataset = builder, dataset
        self._first = threading.Lock()

    def __call__(self, request: Any, empty: Empty) -> Built:
        """As the builder. Only the very first call is watched: others run beside it."""
        if not self._first.acquire(blocking=False):
            return self._builder(request, empty)
        before = _states()
        built = self._builder(request, empty)
        drawn = [name for name, state in _states().items() if state != before[name]]
        if drawn:
            warnings.warn(
                f"{type(self._dataset).__name__} draws from {' and '.join(drawn)}, which all worker threads share: "
                "its random numbers are not fixed by seed=. Draw from feedline.sample_rng(), or use "
                "worker_method='process'.",
                stacklevel=2,
            )
        return built


def _states() -> dict[str, object]:
    numpy_state: Any = np.random.get_state()  # noqa: NPY002 - it is the legacy generator that such transforms use
    return {
        "random": random.getstate(),
        "numpy.random": (numpy_state[1].tobytes(), *numpy_state[2:]),
        "torch": torch.get_rng_state().numpy().tobytes(),
    }
