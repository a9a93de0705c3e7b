"""Notices the classic mistake of iterable datasets: workers that all read the same samples."""

from __future__ import annotations

import warnings

DIGEST_CHARS = 16


class Twins:
    """Compares the first batches of the lanes; warns once if two lanes begin alike."""

    def __init__(self, dataset_name: str) -> None:
        self._name = dataset_name
        self._seen: dict[int, str] = {}
        self._warned = False

    def add(self, lane: int, digest: str) -> None:
        """Add the digests of the samples of one delivered batch of `lane`."""
        if self._warned:
            return
        self._seen[lane] = mine = self._seen.get(lane, "") + digest
        samples = {mine[i : i + DIGEST_CHARS] for i in range(0, len(mine), DIGEST_CHARS)}
        if len(samples) > 1:  # a lane that repeats one constant tells nothing
            self._compare(lane, mine)

    def _compare(self, lane: int, mine: str) -> None:
        for other, theirs in self._seen.items():
            if other != lane and theirs == mine:
                self._warned = True
                warnings.warn(
                    f"workers {other} and {lane} read the same samples from {self._name}: every sample would be seen "
                    "once per worker. Give each worker its own part in __iter__ (torch.utils.data.get_worker_info() "
                    "tells id and num_workers), or use num_workers=0 or 1.",
                    stacklevel=4,
                )
                return
