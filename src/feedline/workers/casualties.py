"""The count of dead workers against the budget, and what is said about each."""

from __future__ import annotations

import logging
import signal
from collections.abc import Sequence
from typing import Any

from feedline.workers import deaths
from feedline.workers.recovery import Recovery
from feedline.workers.roster import Death

_log = logging.getLogger("feedline")


class Casualties:
    """Deaths of one pool; the budget is for one epoch."""

    def __init__(self, recovery: Recovery) -> None:
        self._budget = recovery.deaths_per_epoch
        self._epoch: int | None = None
        self._count = 0
        self._oom_kills = deaths.oom_kills()
        self._starved: set[int | None] = set()
        self.restarts = 0

    def enter(self, epoch: int) -> None:
        """Requests of this epoch are being worked on."""
        if epoch != self._epoch:
            self._epoch, self._count = epoch, 0

    @property
    def bearable(self) -> bool:
        """Whether the budget allows for what has happened."""
        return self._count <= self._budget

    def add(self, dead: Sequence[Death]) -> None:
        """Count deaths that came together."""
        self.restarts += len(dead)
        self._note_out_of_memory(dead)
        # Those who died because what they were forked from was killed are one accident.
        self._count += sum(not death.ended.orphaned for death in dead) or 1

    def count(self, deaths: int) -> None:
        """Add deaths to what has happened, or take them back."""
        self._count = max(0, self._count + deaths)

    def log(self, text: str, *, found: bool) -> None:
        """Say that a worker died without harm; `found`: by a request that is known to kill now."""
        if found:
            _log.warning("%s\nIt is the second that died of this request, which is now tried by itself.", text)
        else:
            told = "%s\nAnother takes its place. Deaths in this epoch: %d of %d."
            _log.warning(told, text, self._count, self._budget)

    def obituary(self, death: Death, request: Any | None, finding: str = "") -> str:
        """All that is known about a death, the request that the worker had in hand, and what to do."""
        exitcode, pid = death.ended.exitcode, death.member.process.pid
        out_of_memory = pid in self._starved
        how = deaths.cause(exitcode, out_of_memory)
        if death.ended.orphaned:
            how = "the process that had forked it was killed"
        doing = "" if request is None else deaths.at_work_on(request, death.row)
        advice = "\n".join(filter(None, [finding, deaths.remedy(exitcode, out_of_memory)]))
        return deaths.obituary(pid, how, doing, death.stacks, death.ended.stderr, advice)

    def _note_out_of_memory(self, dead: Sequence[Death]) -> None:
        before, self._oom_kills = self._oom_kills, deaths.oom_kills()
        if self._oom_kills > before:
            self._starved.update(death.member.process.pid for death in dead if death.ended.exitcode == -signal.SIGKILL)
