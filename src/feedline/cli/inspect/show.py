"""The survey as text, in 60 columns as in 200, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feedline.cli.progress import told_bytes

if TYPE_CHECKING:
    from feedline.cli.inspect.order import Ordered
    from feedline.cli.inspect.survey import Survey
    from feedline.datasets.formats import ShardSummary


_MOST_SHOWN = 10


_BAR = 20


_QUANTILES = {"smallest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "largest": 1.0}


_SIDES = (0, 64, 128, 224, 256, 384, 512, 768, 1024, 2048, 4096)
"""Bounds of the histogram of shorter sides: what people resize to."""


def summary(label: str, found: Survey, order: Ordered | None) -> dict[str, Any]:
    """As JSON holds it; `headers` is about the samples that were looked into."""
    pictures = found.pictures
    return {
        "format": label,
        "samples": len(found.listing.samples),
        "shards": found.listing.shards,
        "nbytes": sum(found.nbytes),
        "fields": dict(found.fields),
        "picture_nbytes": quantiles(found.picture_nbytes),
        "with_grid": found.grids,
        "repeated_keys": found.listing.renamed,
        "unreadable": found.unreadable,
        "broken_samples": found.broken,
        "notes": found.listing.notes,
        "looked_at": found.looked_at,
        "classes": dict(found.classes),
        "headers": {
            "formats": dict(pictures.formats),
            "progressive": pictures.progressive,
            "turned_by_exif": pictures.turned,
            "shorter_sides": shorter_sides(pictures.sizes),
            "broken": pictures.broken,
        },
        "order": order.summary() if order else None,
    }


def quantiles(values: Sequence[int]) -> dict[str, float]:
    """Some quantiles by name; none of nothing."""
    if not values:
        return {}
    return dict(zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values())).tolist(), strict=True))


def shorter_sides(sizes: Sequence[tuple[int, int]]) -> dict[str, int]:
    """How many pictures have their shorter side in each of a few ranges, from the first that any is in to the last."""
    numbers = np.histogram([min(size) for size in sizes], [*_SIDES, np.inf])[0].tolist()
    names = [f"{low}–{high - 1}" for low, high in pairwise(_SIDES)] + [f"{_SIDES[-1]}+"]
    taken = [place for place, number in enumerate(numbers) if number]
    return dict(list(zip(names, numbers, strict=True))[taken[0] : taken[-1] + 1]) if taken else {}


def counted(number: int, noun: str) -> str:
    """`1 shard`, `1,024 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shards_summary(label: str, shards: ShardSummary, order: Ordered | None) -> dict[str, Any]:
    """The shards of a format of this label as JSON holds them."""
    return {
        "format": label,
        "samples": sum(shards.sizes) or None,
        "shards": [*shards.sizes] if shards.unit else [],
        "nbytes": sum(shards.nbytes),
        "notes": [shards.note] if shards.note else [],
        "order": order.summary() if order else None,
    }


def shards_shown(label: str, shards: ShardSummary, order: Ordered | None) -> RenderableType:
    """What is known of the shards of a format whose samples are not looked into."""
    facts = [("format", label)]
    if shards.sizes:
        facts.append(("samples", _of_bytes(sum(shards.sizes), sum(shards.nbytes))))
    if shards.unit:
        facts.append((f"{shards.unit}s", _spread(shards.sizes, "sample")))
    facts += [("note", shards.note)] if shards.note else []
    return Group(_table(facts), *([] if order is None else [_order(order)]))


def shown(found: Survey, order: Ordered | None) -> RenderableType:
    """Everything that was found."""
    parts = [_table(_facts(found))]
    if found.pictures.sizes:
        parts.append(_histogram("Shorter side in pixels", shorter_sides(found.pictures.sizes)))
    if found.classes:
        parts.append(_classes(found.classes))
    if order is not None:
        parts.append(_order(order))
    parts += _problems(found)
    return Group(*parts)


def _table(facts: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, told in facts:
        table.add_row(name, Text(told))
    return table


def _of_bytes(samples: int, nbytes: int) -> str:
    return f"{samples:,}, {told_bytes(nbytes)}"


def _spread(sizes: Sequence[int], noun: str) -> str:
    """How many there are, and of what sizes."""
    low, high = min(sizes), max(sizes)
    return f"{len(sizes):,}, of {'' if low == high else f'{low:,} to '}{counted(high, noun)}"


def _facts(found: Survey) -> list[tuple[str, str]]:
    listing, pictures = found.listing, found.pictures
    facts = [("samples", _of_bytes(len(listing.samples), sum(found.nbytes)))]
    if listing.shards:
        facts.append(("shards", _spread(listing.shards, "sample")))
    facts.append(("fields", ", ".join(f"{name} {number:,}" for name, number in found.fields.most_common())))
    if found.picture_nbytes:
        sizes = quantiles(found.picture_nbytes).items()
        facts.append(("picture files", ", ".join(f"{name} {told_bytes(nbytes)}" for name, nbytes in sizes)))
    if listing.shards and found.picture_nbytes:
        facts.append(("with a grid", f"{found.grids:,} of {counted(len(found.picture_nbytes), 'picture')}"))
    if found.looked_at < len(listing.samples):
        facts.append(
            ("looked into", f"{counted(found.looked_at, 'sample')}, spread evenly; what follows is about them")
        )
    if pictures.formats:
        facts.append(("formats", ", ".join(f"{name} {number:,}" for name, number in pictures.formats.most_common())))
        facts.append(("sizes", _common_sizes(pictures.sizes)))
    if pictures.progressive:
        facts.append(("progressive", f"{pictures.progressive / pictures.jpegs:.1%} of the JPEGs: slow to decode"))
    if pictures.turned:
        facts.append(("turned", f"{pictures.turned:,} by EXIF orientation, which torchvision ignores"))
    return facts + [("note", note) for note in listing.notes]


def _common_sizes(sizes: Sequence[tuple[int, int]]) -> str:
    common = Counter(sizes).most_common(3)
    told = ", ".join(f"{width}×{height} ({number / len(sizes):.0%})" for (width, height), number in common)
    return told if len(set(sizes)) <= 3 else f"{told}, {len(set(sizes)) - 3:,} others"


def _histogram(title: str, counts: dict[str, int]) -> RenderableType:
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold")
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    most = max(counts.values())
    for name, number in counts.items():
        table.add_row(name, Text("█" * -(-_BAR * number // most), style="cyan"), f"{number:,}")
    return table


def _classes(classes: Counter[str]) -> RenderableType:
    common = classes.most_common()
    if len(common) > _MOST_SHOWN and (common[0][1] == common[-1][1] or 2 * len(common) > classes.total()):
        return Text(f"{_classes_of(classes)} each", style="bold")  # what they are called tells nobody anything
    rows = dict(common if len(common) <= _MOST_SHOWN else common[: _MOST_SHOWN // 2] + common[-_MOST_SHOWN // 2 :])
    title = f"{len(common):,} class{'' if len(common) == 1 else 'es'}" + (
        "" if len(rows) == len(common) else ", the largest and the smallest"
    )
    return _histogram(title, {name if len(name) <= 24 else f"{name[:23]}…": number for name, number in rows.items()})


def _classes_of(classes: Counter[str]) -> str:
    low, high = min(classes.values()), max(classes.values())
    return f"{len(classes):,} classes of {'' if low == high else f'{low:,} to '}{counted(high, 'sample')}"


def _order(order: Ordered) -> RenderableType:
    table = Table(box=box.ROUNDED, title=f"Shuffled by windows of {order.unit}s, batches of {order.batch_size}")
    for heading in (
        "window",
        "pairs\nof one\nshard",
        "shards\nin a\nbatch",
        "bytes\nof the\nwindow",
        "read\nfor a\nsample",
    ):
        table.add_column(heading, justify="right")
    for mixed in order.windows:
        cells = (
            f"{mixed.window}",
            f"{mixed.same_shard_pairs:.1%}",
            f"{mixed.shards_per_batch:.1f}",
            told_bytes(mixed.window_nbytes),
            told_bytes(mixed.nbytes_per_sample),
        )
        table.add_row(*cells, style="bold" if mixed.window == order.wanted else "")
    return Group(table, *map(Text, _reading(order)))


def _reading(order: Ordered) -> Iterator[str]:
    if order.kept_nbytes is not None:
        yield (
            f"For any sample a whole {order.unit} is read, once if it is kept until its window ends: {order.keeper}"
            f" keeps {told_bytes(order.kept_nbytes)}, those of a batch being taken first."
        )
    elif order.page_nbytes is not None:
        yield f"Samples are read one by one; one at random makes a disk read {told_bytes(order.page_nbytes)}."


def _problems(found: Survey) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for noun, which, told in (
        ("shard", "cannot be read", found.unreadable),
        ("sample", "cannot be read", found.broken),
        ("picture", "cannot be read", found.pictures.broken),
        ("key", "came more than once", found.listing.renamed),
    ):
        if told:
            lines = [f"· {line}" for line in told[:_MOST_SHOWN]]
            more = [f"… and {len(told) - _MOST_SHOWN:,} more"] if len(told) > _MOST_SHOWN else []
            parts.append(Text(f"{counted(len(told), noun)} that {which}:", style="bold red"))
            parts.append(Text("\n".join(lines + more), overflow="fold"))
    return parts
