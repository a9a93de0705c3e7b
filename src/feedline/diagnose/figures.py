"""The few numbers that decide what limits a loop."""

from __future__ import annotations

import math
from dataclasses import dataclass

from feedline.diagnose.totals import StageTimes, Stats


@dataclass(frozen=True, slots=True)
class Context:
    """How the loader was set up: what a remedy has to be phrased in."""

    dataset: str = "the dataset"
    """Its class."""
    method: str = "inline"
    """Where batches are built: "inline", "thread" or "process"."""
    num_workers: int = 0
    prefetch_factor: int = 2
    cpus: int = 1
    """CPUs that this process may use."""
    many_at_once: bool = False
    """Whether the dataset gives many samples per call (`__getitems__`, `gather`)."""
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Figures:
    """What follows from the sums; every share lies between 0 and 1 and nothing divides by zero."""

    stats: Stats
    context: Context

    @property
    def later(self) -> int:
        """Batches after the first, whose wait is the start-up."""
        return max(self.stats.batches - 1, 0)

    @property
    def step_s(self) -> float:
        """Seconds of the loop's own work per batch."""
        return _each(self.stats.step_s, self.later)

    @property
    def period_s(self) -> float:
        """Seconds from batch to batch once the loader runs."""
        return _each(self.stats.wall_s - self.stats.startup_s, self.later)

    @property
    def later_wait_share(self) -> float:
        """The share of the time after the first batch in which the loop waited."""
        return _share(self.stats.wait_s - self.stats.startup_s, self.stats.wall_s - self.stats.startup_s)

    @property
    def work_s(self) -> float:
        """Seconds that building one batch takes, wherever it is built."""
        return _each(sum(times.total_s for times in self._building()), self.stats.batches)

    @property
    def main_s(self) -> float:
        """Seconds per batch that the training process itself spends on the way, when it has workers."""
        ours = (times.total_s for times in self.stats.stages.values() if not times.in_workers)
        return 0.0 if self.inline else _each(sum(ours), self.stats.batches)

    @property
    def inline(self) -> bool:
        """Whether the training process builds the batches itself."""
        return not any(times.in_workers for times in self.stats.stages.values())

    @property
    def workers(self) -> int:
        """Workers that share the building: what was asked for, or what was seen at work."""
        seen = {worker for times in self.stats.stages.values() for worker in times.workers if worker >= 0}
        return 0 if self.inline else max(self.context.num_workers, len(seen), 1)

    @property
    def busy_share(self) -> float:
        """The share of their time that the workers spent on batches that were delivered."""
        return min(1.0, _share(self.work_s, self.workers * self.period_s))

    @property
    def copying_share(self) -> float:
        """The share of the time in which the device copied."""
        return _share(self.stats.copy_s, self.stats.wall_s)

    @property
    def needed(self) -> int:
        """Workers that could keep up with the loop, at the present cost of a batch; 0: no number could."""
        return math.ceil(min(self.work_s / self.step_s, 1e9)) if self.step_s > 0 else 0

    @property
    def samples_each(self) -> float:
        """Samples per batch; 0 where their number is not known."""
        return _each(self.stats.samples, self.stats.batches)

    @property
    def main_stage(self) -> str:
        """The stage that takes most of the training process's time on the way."""
        return max(
            (name for name, times in self.stats.stages.items() if not times.in_workers),
            key=lambda name: self.stats.stages[name].total_s,
            default="decode",
        )

    @property
    def building_stage(self) -> str:
        """The stage that takes most of the time of building a batch."""
        stages = self.stats.stages
        names = [name for name, times in stages.items() if self.inline or times.in_workers]
        return max(names, key=lambda name: stages[name].total_s, default="fetch")

    def share_of_work(self, stage: str) -> float:
        """The share of one stage in the building of a batch."""
        return _share(self.each_s(stage), self.work_s)

    def each_s(self, stage: str) -> float:
        """Seconds per batch of one stage."""
        times = self.stats.stages.get(stage)
        return _each(times.total_s, self.stats.batches) if times is not None else 0.0

    def _building(self) -> list[StageTimes]:
        return [times for times in self.stats.stages.values() if self.inline or times.in_workers]


def _each(total: float, number: int) -> float:
    return max(total, 0.0) / number if number else 0.0


def _share(part: float, whole: float) -> float:
    return min(max(part / whole, 0.0), 1.0) if whole > 0 else 0.0
