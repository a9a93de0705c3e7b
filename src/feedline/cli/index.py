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
from feedline.errors import ArgumentError, SampleError
from feedline.packing import grids_in, tars_of
from feedline.packing.ahead import Ahead
from feedline.shards import build_index, glance, open_index, write_index
from feedline.shards.sidecar import beside

if TYPE_CHECKING:
    from rich.console import Console

    from feedline.shards import Index

BAD = "bad"


@dataclass(frozen=True, slots=True)
class Settings:
    """`check` only looks; `rebuild` makes indexes anew that fit; `checksum` stores that of the tar in them."""

    check: bool = False
    rebuild: bool = False
    checksum: bool = False
    allow_truncated: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """One tar: `state` is "made", "fits", "checked" or "bad"; then `problem` says why."""

    tar: str
    state: str
    samples: int = 0
    problem: str = ""

    def summary(self) -> dict[str, Any]:
        """As JSON holds it."""
        return asdict(self)


def run(sources: Sequence[str], settings: Settings, workers: int, console: Console) -> list[Judged]:
    """Index or check the tars, or those in folders; a tar that cannot be read is told, and the others are done."""
    tars = tars_of(sources)
    if not tars:
        raise ArgumentError(f"{', '.join(sources)} hold no .tar files")
    judged = list[Judged]()
    with bars(console) as step, Ahead(lambda tar: judge(tar, settings), tars, workers) as results:
        for result in results:
            judged.append(result)
            step("checking" if settings.check else "indexing", len(judged), len(tars))
    console.print(shown(judged))
    return judged


def judge(tar: str, settings: Settings) -> Judged:
    """Make the index of one tar, or check it."""
    try:
        return _checked(tar, settings) if settings.check else _made(tar, settings)
    except (SampleError, OSError) as error:
        return Judged(tar, BAD, problem=str(error))


def _made(tar: str, settings: Settings) -> Judged:
    head = glance(tar, allow_truncated=settings.allow_truncated)
    if head is not None and not settings.rebuild and (head.blake2b or not settings.checksum):
        return Judged(tar, "fits", head.samples)
    write_index(tar, allow_truncated=settings.allow_truncated, grids=grids_in(tar), checksum=settings.checksum)
    return Judged(tar, "made", open_index(tar, allow_truncated=settings.allow_truncated).head.samples)


def _checked(tar: str, settings: Settings) -> Judged:
    """By the checksum, if the index holds one; else by making the index again and comparing."""
    if not Path(beside(tar)).is_file():
        return Judged(tar, BAD, problem=f"{tar} has no index. Make it: feedline index {tar}")
    index = open_index(tar, beside(tar), allow_truncated=settings.allow_truncated)
    if index.head.blake2b is not None:
        index.verify()
    elif not _same(index, build_index(tar, allow_truncated=settings.allow_truncated)):
        problem = f"the index of {tar} is not what the tar holds. Make it anew: feedline index --rebuild {tar}"
        return Judged(tar, BAD, problem=problem)
    return Judged(tar, "checked", len(index))


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
