"""`feedline audit`: proof that samples were delivered exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from glob import glob
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from feedline.cli.arguments import AsJson, print_json
from feedline.cli.target import as_feedline, load
from feedline.errors import ArgumentError
from feedline.loader.plan import plan_of
from feedline.loader.report.attempts import Audit, AuditLine
from feedline.loader.report.audit import IndicesAt, audit
from feedline.loader.report.audit_log import SUFFIX, audit_path, epoch_length, order_digest, read_audit_log
from feedline.samplers import IndexSampler


def run(paths: Sequence[str], target: str | None = None) -> Audit:
    """Audit the logs of all ranks.

    `paths` are run logs, the audit logs next to them, or patterns of either. The logs are compared with the order of
    the loader that `target` names. Raises `ArgumentError` if a log is missing, if no batch was delivered, or if this
    order has no random access.
    """
    logs = sorted({_audit_log(name) for path in paths for name in (glob(path) or [path])})  # noqa: PTH207 - whole paths
    records = [record for log in logs for record in read_audit_log(log)]
    if not records:
        raise ArgumentError(f"{', '.join(map(str, logs))}: no batch was delivered, so there is nothing to audit")
    return audit(records) if target is None else _compared(records, target)


def _audit_log(path: str) -> Path:
    log = Path(path) if path.endswith(SUFFIX) else audit_path(path)
    if not log.is_file():
        raise ArgumentError(f"there is no {log}: DataLoader(log='run.jsonl'), or FEEDLINE_LOG=run.jsonl, writes it")
    return log


def _compared(records: Sequence[AuditLine], target: str) -> Audit:
    """The audit, compared with the order of one loader of the logs."""
    plan = plan_of(as_feedline(load(target), distributed=None), 0, 1)
    indices_at = _indices_at(target, plan.sampler)
    digest, length = order_digest(plan), epoch_length(plan)
    if any(record["order"] == digest for record in records):
        return audit(records, indices_at, lambda record: record["order"] == digest)
    if not any(record["length"] == length for record in records):
        raise ArgumentError(
            f"no loader of the logs has the {length} samples of {target}: name the loader of this run's script"
        )
    return audit(records, indices_at, lambda record: record["length"] == length)


def _indices_at(target: str, sampler: Any) -> IndicesAt:
    """Function that returns a sampler's indices at positions of an epoch."""
    if not isinstance(sampler, IndexSampler):
        raise ArgumentError(
            f"the order of {target} has no random access, so indices cannot be compared with it: give the loader a "
            "seed and shuffle=True, or a sampler of fl.samplers"
        )

    def indices_at(epoch: int, positions: Any) -> Any:
        if not len(positions):
            return positions
        first, last = int(positions.min()), int(positions.max())
        return sampler.take(epoch, first, last + 1)[positions - first]

    return indices_at


def summary(result: Audit) -> dict[str, Any]:
    """The result as a JSON object."""
    proven = [{"loader": loader, "epoch": epoch, "delivered": n} for (loader, epoch), n in result.proven.items()]
    return {
        "exactly_once": not result.faults,
        "attempts": result.attempts,
        "proven": proven,
        "faults": [fault._asdict() for fault in result.faults],
        "notes": result.notes,
    }


_TITLES = {"lost": "lost", "twice": "delivered twice", "other": "not as scheduled"}


def show(result: Audit, console: Console) -> None:
    """Print counts, faults, notes and the verdict."""
    for (loader, epoch), count in sorted(result.proven.items()):
        console.print(f"{loader}, epoch {epoch}: {count:,} delivered exactly once", markup=False)
    for fault in result.faults:
        text = f"{fault.loader}, epoch {fault.epoch}: {_TITLES[fault.kind]}: {fault.text}"
        console.print(text, style="red", markup=False)
    for note in result.notes:
        console.print(note, style="dim", markup=False)
    verdict = "nothing was lost, nothing was delivered twice" if not result.faults else f"{len(result.faults)} faults"
    console.print(f"{verdict} ({result.attempts} attempts)", style="bold")


def command(
    logs: Annotated[list[str], typer.Argument(metavar="LOG", help="Run logs of all ranks: run/*.jsonl.")],
    loader: Annotated[
        str | None, typer.Option(help="train.py:loader: compare the samples with the order of this loader, too.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Prove that each sample of a run was delivered exactly once.

    The logs may span kills, restarts and changes of the world size. Samples that were lost or delivered twice are
    named, with their rank.

    Exit code 1 if there is a fault.
    """
    result = run(logs, loader)
    if as_json:
        print_json(summary(result))
    else:
        show(result, Console(highlight=False))
    raise typer.Exit(1 if result.faults else 0)
