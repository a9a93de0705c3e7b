"""Assumptions about facts that no measurement shows.

They widen the range of a predicted gain.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf

from feedline.loader.report.calibration import ASSUMED_GIL_SHARE
from feedline.loader.report.model import Case, Model
from feedline.loader.report.replay import PROCESS, THREAD, BatchTimes, Task

_ACCELERATION = 3.0
"""Speed of datasets that open JPEGs with Pillow in worker processes, as a multiple of that elsewhere; see
bench/existing_code.py."""


def doubtful_cases(model: Model, case: Case) -> Iterator[Case]:
    """The same change under other assumptions about unmeasurable facts."""
    yield _other_machine(model, case)
    yield from _other_objects(model, case)
    yield from _other_programs(model, case)
    yield from _other_caches(model, case)
    yield from _slower_cpus(model, case)


def _other_objects(model: Model, case: Case) -> Iterator[Case]:
    """The same change, if objects cost the same wherever they are made.

    To unpack objects may take long because of the garbage collections that they cause. Building them does so, too.
    """
    if model.present.setting.method == PROCESS != case.setting.method:
        change = case.change or (lambda batch: batch)

        def paid(batch: BatchTimes) -> BatchTimes:
            built = change(batch)
            return replace(built, work={**built.work, "fetch": built.work.get("fetch", Task()) + batch.receive})

        yield case._replace(change=paid)


def _other_programs(model: Model, case: Case) -> Iterator[Case]:
    """The same change, if other programs keep wanting CPUs.

    What they use now may be CPUs that are idle, at a low priority. Else each of them has the share of a worker.
    """
    tasks, cpus = max(case.setting.num_workers, 1), model.context.cpus
    if others := model.measured.others_cpus:
        left = min(case.machine.cpus, cpus * tasks / (tasks + others))
        yield case._replace(machine=replace(case.machine, cpus=left))


def _other_caches(model: Model, case: Case) -> Iterator[Case]:
    """The same change under other assumptions about caches.

    Workers copy within caches, or evict each other's bytes from caches. Nothing where copies cannot be the limit in
    either case.
    """
    copying, copiers = model.measured.most_copying, case.machine.copiers
    faster = model.measured.cached_copying
    if case.setting.num_workers * copying * faster > copiers:
        for other in (inf, max(copiers / faster, 1.0)):
            yield case._replace(machine=replace(case.machine, copiers=other))


def _slower_cpus(model: Model, case: Case) -> Iterator[Case]:
    """The same change, if CPUs together are slower, or not.

    They may be two threads of one core, which virtual machines do not show, and share caches and power.
    """
    slower = model.cpus_together(WORTH_TOGETHER)
    if slower < case.machine.cpus:
        yield case._replace(machine=replace(case.machine, cpus=slower))
    if case.machine.cpus < model.machine.cpus:
        yield case._replace(machine=replace(case.machine, cpus=model.machine.cpus))


WORTH_TOGETHER = 0.7
"""Speed of a CPU while all others compute, too, as a share of its speed alone.

Two threads of a core that read and write much memory have two thirds of it each.
"""


def _other_machine(model: Model, case: Case) -> Case:
    """The same change under the other assumption about unmeasurable facts.

    The CPUs that other programs leave are either a fixed share, as under autogroup, or grow with the number of workers.
    A lock is held for all of the computing time, or for a part of it. Pillow's images are JPEGs, or others.
    """
    machine = case.machine
    if begins_to_accelerate(model, case):
        change = case.change or (lambda batch: batch)
        case = case._replace(change=lambda batch: change(batch).scale("fetch", 1 / _ACCELERATION))
    if case.setting.method == THREAD:
        machine = replace(machine, gil_share=1.0 if machine.gil_share <= ASSUMED_GIL_SHARE else ASSUMED_GIL_SHARE)
    cpus = model.context.cpus
    if machine.cpus < cpus:
        before, after = (each.setting.num_workers + 1 for each in (model.present, case))
        others = before * (cpus - machine.cpus) / machine.cpus
        machine = replace(machine, cpus=cpus * after / (after + others))
    return case._replace(machine=machine)


def begins_to_accelerate(model: Model, case: Case) -> bool:
    """True if the change would let feedline's kernels decode for Pillow."""
    return model.context.accelerates and case.setting.method == PROCESS != model.present.setting.method
