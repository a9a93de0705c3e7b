"""Requests that have killed two actors, tested alone."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

from feedline.core.batch import EMPTY_BATCH, BatchResult, SkippedSample
from feedline.errors import WorkerDiedError
from feedline.workers.process.deaths import describe_finding, find_poisonous, index_at
from feedline.workers.process.futures import ProcessFuture
from feedline.workers.process.worker_main import WorkerSetup
from feedline.workers.ray.members import RayMember, RayMembers

STRIKES = 2
"""Number of killed actors from which a request is not resubmitted as a whole."""

_LONGEST_WAIT_S = 1.0


class SuspectRequests:
    """Finds the samples that kill, by trials with parts of a request.

    `check` raises once the pool is closed. True while there are suspects.
    """

    def __init__(
        self, builder: Any, members: RayMembers, setup: Callable[[], WorkerSetup], check: Callable[[], None]
    ) -> None:
        self._builder, self._members, self._setup, self._check = builder, members, setup, check
        self._found: list[tuple[ProcessFuture, str]] = []
        self.latest = ""
        """Description of the death that led to the latest trial."""

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, future: ProcessFuture, text: str) -> None:
        """Add a suspicious request; `text` describes its latest death."""
        self._found.append((future, text))

    def test_first(self) -> tuple[ProcessFuture, bool | None]:
        """Test the first suspicious request; fail it or leave out samples.

        Returns its future, and True, or None if the request does not kill or was canceled.
        """
        future, self.latest = self._found[0]
        verdict = None if future.settled else self._resolve(future)
        self._found.pop(0)
        return future, verdict

    def _resolve(self, future: ProcessFuture) -> bool | None:
        request, leaves_out = future.work, getattr(self._builder, "action", "raise") != "raise"
        if not self._kills(request):
            return None

        def kills(rows: Sequence[int]) -> bool:
            return self._kills(self._builder.part(request, rows))

        rows: list[int] = []
        if request.partition is None:
            rows = find_poisonous(range(len(request.positions)), kills, every=leaves_out)
        if rows and leaves_out:
            self._leave_out(future, rows)
        else:
            future.fail(WorkerDiedError(f"{self.latest}\n{describe_finding(request, rows)}"))
        return True

    def _leave_out(self, future: ProcessFuture, rows: Sequence[int]) -> None:
        request = future.work
        how = "WorkerDiedError: it kills a Ray actor"
        future.skipped += tuple(
            SkippedSample(request.epoch, int(request.positions[row]), index_at(request, row), how) for row in rows
        )
        if len(rows) == len(request.positions):
            future.succeed(BatchResult(EMPTY_BATCH, []))
        else:
            future.work = self._builder.without(request, rows)

    def _kills(self, request: Any) -> bool:
        """True if an actor that builds only this request dies."""
        errors = self._members.ray.exceptions
        while True:
            probe = self._members.start(self._setup())
            try:
                self._open(probe)
                self._take(probe.handle.build.remote(0, pickle.dumps(request, 5)))
                return False
            except (errors.RayActorError, errors.ObjectLostError):
                if not self._members.is_node_dead(probe.node_id):
                    return True
            finally:
                self._members.end([probe])

    def _open(self, probe: RayMember) -> None:
        while not probe.is_ready:
            error = self._members.advance(probe, self._take(probe.ref, probe))
            if error is not None:
                raise error

    def _take(self, ref: Any, starting: RayMember | None = None) -> Any:
        """Wait for an actor's answer and return it.

        Raises the actor's error, that of `check`, and WorkerError if Ray has no place for the actor `starting`.
        """
        while not self._members.ray.wait([ref], timeout=_LONGEST_WAIT_S)[0]:
            self._check()
            late = starting is not None and monotonic() > starting.began + self._members.start_timeout_s
            if late and starting is not None and starting.node_id is None:
                raise self._members.no_place_error(starting)
        return self._members.ray.get(ref)
