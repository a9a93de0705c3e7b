"""Settings of a sweep, its interleaved rounds, and its recommendation."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import DataLoader as TorchDataLoader

from feedline.cli.bench.trial import FIGURES, Setting, Trial
from feedline.core.units import DECIMAL
from feedline.errors import ArgumentError
from feedline.loader.monitoring.resources import usable_cpus
from feedline.loader.report.advice import WORKER_COUNTS

ENOUGH_SHARE = 0.97
"""Share of the best rate that is enough to recommend a smaller setting."""


GOOD_WAIT_SHARE = 0.05
"""Wait share up to which a loop keeps its device busy."""


GROWTH = 1.1
"""Gain of the most workers over fewer ones from which twice as many are measured, too."""


MOST_WORKERS = WORKER_COUNTS[-1]
"""Workers beyond which no sweep goes by itself."""


class Sweep(NamedTuple):
    """Settings to measure, and how long."""

    settings: tuple[Setting, ...]
    rounds: int = 3
    seconds: float = 2.0
    """Seconds per round and setting, without start-up."""
    step_s: float = 0.0
    """Duration of a simulated training step."""
    extends: bool = False
    """True to double the largest number of workers while that helps."""

    def run(self, loader: TorchDataLoader[Any], step: Callable[[str, int, int], None]) -> list[Trial]:
        """Measure all settings in turn, round by round.

        A busy moment of the machine thus affects all of them. A setting equal to the user's own is measured once.
        """
        own = loader.num_workers
        trials = [Trial(setting) for setting in self.settings if setting != Setting(own)]  # that is "as is"
        self._measure(trials, loader, partial(step, "measuring"))
        while self.extends and (found := further(trials)) is not None:
            most, setting = found
            trials.append(Trial(setting))
            # The former best again, in turn: only rounds of the same minutes can be compared.
            self._measure([most, trials[-1]], loader, partial(step, f"{setting.num_workers} workers"))
        return trials

    def _measure(self, trials: Sequence[Trial], loader: TorchDataLoader[Any], step: Callable[[int, int], None]) -> None:
        total = self.rounds * len(trials)
        step(0, total)
        for number in range(total):
            trials[number % len(trials)].run(loader, self.seconds, self.step_s)
            step(number + 1, total)


def settings_of(
    workers: Sequence[int], methods: Sequence[str], prefetch: Sequence[int], batch_sizes: Sequence[int]
) -> tuple[Setting, ...]:
    """The user's own setting, torch's loader, and all combinations.

    An empty list keeps the value of the user's loader. Without workers, methods and prefetching are left out.
    """
    found = dict.fromkeys([Setting(), Setting(is_torch=True)])
    for count in workers or (None,):
        for method in methods or (None,):
            for each in prefetch or (None,):
                for size in batch_sizes or (None,):
                    method_of = method if count != 0 else None
                    found[Setting(count, method_of, each if count != 0 else None, size)] = None
    return tuple(found)


def default_workers(cpus: int | None = None) -> list[int]:
    """Worker counts to measure: 0, powers of two, and twice the CPUs.

    More workers than CPUs help samples that wait; `Sweep.extends` finds how many.
    """
    most = 2 * (cpus or usable_cpus())
    return [0, *sorted({1, *(1 << power for power in range(1, 8) if 1 << power <= most), most})]


def further(trials: Sequence[Trial]) -> tuple[Trial, Setting] | None:
    """The fastest trial and its setting with twice the workers.

    None if fewer workers are nearly as fast, or if more were tried.
    """
    counts = [trial.num_workers or trial.setting.num_workers or 0 for trial in trials if not trial.setting.is_torch]
    ran = [trial for trial in trials if trial.rounds and not trial.setting.is_torch]
    if not ran:
        return None
    best = max(ran, key=lambda trial: trial.samples_per_s)
    number = best.num_workers or 0
    fewer = [trial.samples_per_s for trial in ran if (trial.num_workers or 0) < number]
    if not fewer or best.samples_per_s < GROWTH * max(fewer) or max(counts) > number or 2 * number > MOST_WORKERS:
        return None
    return best, best.setting._replace(num_workers=2 * number)


def recommend(trials: Iterable[Trial], step_s: float) -> Trial | None:
    """The nearly fastest trial with the fewest workers; None if none ran.

    With a simulated step, it is the trial with the fewest workers and a wait share of at most `GOOD_WAIT_SHARE`, if
    there is one.
    """
    ran = [trial for trial in trials if trial.rounds and not trial.setting.is_torch]
    if not ran:
        return None
    fast = [trial for trial in ran if step_s and trial.figures()["wait_share"] <= GOOD_WAIT_SHARE]
    best = max(trial.samples_per_s for trial in ran)
    fast = fast or [trial for trial in ran if trial.samples_per_s >= ENOUGH_SHARE * best]
    return min(fast, key=lambda trial: (_processes(trial), -trial.samples_per_s))


def _processes(trial: Trial) -> int:
    workers = trial.setting.num_workers if trial.num_workers is None else trial.num_workers
    return 1 << 20 if workers is None else workers


_COMPARISONS: dict[str, Callable[[float, float], bool]] = {">": operator.gt, "<": operator.lt}


_THRESHOLD = re.compile(rf"\s*(\w+)\s*([<>])\s*({DECIMAL})\s*(%|ms|s|MB|GB|MiB|GiB)?\s*")


_UNITS = {"%": 0.01, "ms": 1e-3, "s": 1.0, "MB": 1e6, "GB": 1e9, "MiB": 1 << 20, "GiB": 1 << 30, None: 1.0}


class Threshold(NamedTuple):
    """A condition under which a run of `feedline bench` fails."""

    text: str
    name: str
    comparison: str
    limit: float

    @classmethod
    def parse(cls, text: str) -> Threshold:
        """Read a condition such as `wait_share > 5%` or `first_batch_s > 2s`.

        Raises `ArgumentError` for another form, and for an unknown name.
        """
        found = _THRESHOLD.fullmatch(text)
        if found is None:
            raise ArgumentError(f"--fail-if takes a condition such as 'wait_share > 5%'; got {text!r}")
        name, comparison, number, unit = found.groups()
        if name not in FIGURES:
            raise ArgumentError(f"--fail-if knows {', '.join(FIGURES)}; got {name!r}")
        return cls(text.strip(), name, comparison, float(number) * _UNITS[unit])

    def is_met(self, trial: Trial) -> bool:
        """True if the condition holds, or if the trial did not run."""
        figures = trial.figures()
        return not figures or _COMPARISONS[self.comparison](figures[self.name], self.limit)
