"""`feedline index`: the side-car indexes of tar shards, made where they are missing, or checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.table import Table
from rich.text import Text

from feedline.cli.progress import bars
from feedline.cli.tars import Tar, is_far, tars_at
from feedline.cpus import usable_cpus
from feedline.errors import SampleError
from feedline.packing.ahead import Ahead

if TYPE_CHECKING:
    from rich.console import Console

    from feedline.shards import Index

_FAR_AT_ONCE = 8
"""Objects are waited for: there is no use in as few threads as there are CPUs."""

BAD = "bad"


@dataclass(frozen=True, slots=True)
class Settings:
    """`check` only looks; `rebuild` makes indexes anew that fit; `checksum` stores that of the tar in them.

    They lie in the folder `into`; by default beside files, and for objects where datasets look on this machine.
    """

    check: bool = False
    rebuild: bool = False
    checksum: bool = False
    allow_truncated: bool = False
    into: Path | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """One tar and where its index is: `state` is "made", "fits", "checked" or "bad"; then `problem` says why."""

    tar: str
    state: str
    samples: int = 0
    problem: str = ""
    index: str = ""

    def summary(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def run(sources: Sequence[str], settings: Settings, workers: int | None, console: Console) -> list[Judged]:
    """Index or check the tars, or those in folders; a tar that cannot be read is told, and the others are done."""
    tars = tars_at(sources, settings.into, allow_truncated=settings.allow_truncated)
    threads = workers or (_FAR_AT_ONCE if is_far(sources) else usable_cpus())
    judged = list[Judged]()
    with bars(console) as step, Ahead(lambda tar: judge(tar, settings), tars, threads) as results:
        for result in results:
            judged.append(result)
            step("checking" if settings.check else "indexing", len(judged), len(tars))
    console.print(shown(judged))
    return judged


def judge(tar: Tar, settings: Settings) -> Judged:
    """Make the index of one tar, or check it."""
    try:
        return _checked(tar) if settings.check else _made(tar, settings)
    except (SampleError, OSError) as error:
        return Judged(tar.name, BAD, problem=str(error))


def _made(tar: Tar, settings: Settings) -> Judged:
    head = None if settings.rebuild else tar.head()
    if head is not None and (head.blake2b or not settings.checksum):
        return Judged(tar.name, "fits", head.samples, index=tar.place)
    return Judged(tar.name, "made", len(tar.make(checksum=settings.checksum)), index=tar.place)


def _checked(tar: Tar) -> Judged:
    """By the checksum, if the index holds one; else by making the index again and comparing."""
    index = tar.index()
    if index is None:
        return Judged(tar.name, BAD, problem=f"{tar.name} has no index. Make it: feedline index {tar.name}")
    if index.head.blake2b is not None:
        tar.verify(index)
    elif not _same(index, tar.built()):
        problem = (
            f"the index of {tar.name} is not what the tar holds. Make it anew: feedline index --rebuild {tar.name}"
        )
        return Judged(tar.name, BAD, problem=problem)
    return Judged(tar.name, "checked", len(index), index=index.path or "")


def _same(index: Index, other: Index) -> bool:
    return (
        index.fields == other.fields
        and list(index.keys) == list(other.keys)
        and np.array_equal(index.blocks, other.blocks)
        and np.array_equal(index.sizes, other.sizes)
    )


def shown(judged: Sequence[Judged]) -> Table:
    """How many tars of each state, then each bad one with its remedy."""
    table = Table(box=box.ROUNDED)
    table.add_column("")
    table.add_column("shards", justify="right")
    table.add_column("samples", justify="right")
    for state in dict.fromkeys(one.state for one in judged if one.state != BAD):
        group = [one.samples for one in judged if one.state == state]
        table.add_row(state, f"{len(group):,}", f"{sum(group):,}")
    bad = [one for one in judged if one.state == BAD]
    if bad:
        table.add_row(Text(BAD, style="bold red"), f"{len(bad):,}", "")
        table.caption = Text("\n".join(one.problem for one in bad), style="red", overflow="fold")
        table.caption_justify = "left"
    return table
