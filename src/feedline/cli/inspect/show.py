"""Results of `feedline inspect` as text for narrow terminals, and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from feedline.loader.report.stats import share, size

if TYPE_CHECKING:
    from feedline.cli.inspect.order import WindowComparison
    from feedline.cli.inspect.survey import Survey
    from feedline.datasets.formats import ShardSummary


_MOST_SHOWN = 10


_BAR = 20


_QUANTILES = {"smallest": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "largest": 1.0}


_SIDES = (0, 64, 128, 224, 256, 384, 512, 768, 1024, 2048, 4096)
"""Bounds of the histogram of shorter sides, at usual sizes of training images."""


def summary(label: str, result: Survey, order: WindowComparison | None) -> dict[str, Any]:
    """The survey as a JSON object; `headers` covers the examined samples only."""
    headers = result.headers
    return {
        "format": label,
        "samples": len(result.listing.samples),
        "shards": result.listing.shards,
        "nbytes": sum(result.nbytes),
        "fields": dict(result.fields),
        "image_nbytes": quantiles(result.image_nbytes),
        "with_grid": result.grids,
        "repeated_keys": result.listing.renamed,
        "unreadable": result.unreadable,
        "broken_samples": result.broken,
        "notes": result.listing.notes,
        "examined": result.examined,
        "classes": dict(result.classes),
        "headers": {
            "formats": dict(headers.formats),
            "progressive": headers.progressive,
            "turned_by_exif": headers.turned,
            "shorter_sides": shorter_sides(headers.sizes),
            "broken": headers.broken,
        },
        "order": order.summary() if order else None,
    }


def quantiles(values: Sequence[int]) -> dict[str, float]:
    """The quantiles of `_QUANTILES` by name; empty without values."""
    if not values:
        return {}
    return dict(zip(_QUANTILES, np.quantile(values, list(_QUANTILES.values())).tolist(), strict=True))


def shorter_sides(sizes: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Histogram of shorter sides, by range, without empty ranges at its ends."""
    numbers = np.histogram([min(size) for size in sizes], [*_SIDES, np.inf])[0].tolist()
    names = [f"{low}–{high - 1}" for low, high in pairwise(_SIDES)] + [f"{_SIDES[-1]}+"]
    occupied = [place for place, number in enumerate(numbers) if number]
    return dict(list(zip(names, numbers, strict=True))[occupied[0] : occupied[-1] + 1]) if occupied else {}


def count_noun(number: int, noun: str) -> str:
    """A number with its noun: `1 shard`, `1,024 shards`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shards_summary(label: str, shards: ShardSummary, order: WindowComparison | None) -> dict[str, Any]:
    """The shards of a format as a JSON object."""
    return {
        "format": label,
        "samples": sum(shards.sizes) or None,
        "shards": [*shards.sizes] if shards.unit else [],
        "nbytes": sum(shards.nbytes),
        "notes": [shards.note] if shards.note else [],
        "order": order.summary() if order else None,
    }


def render_shards(label: str, shards: ShardSummary, order: WindowComparison | None) -> RenderableType:
    """The shards of a format that does not list its samples."""
    facts = [("format", label)]
    if shards.sizes:
        facts.append(("samples", _format_samples(sum(shards.sizes), sum(shards.nbytes))))
    if shards.unit:
        facts.append((f"{shards.unit}s", _format_sizes(shards.sizes, "sample")))
    facts += [("note", shards.note)] if shards.note else []
    return Group(_render_facts(facts), *([] if order is None else [_render_order(order)]))


def render(result: Survey, order: WindowComparison | None) -> RenderableType:
    """The whole survey."""
    parts = [_render_facts(_facts(result))]
    if result.headers.sizes:
        parts.append(_render_histogram("Shorter side in pixels", shorter_sides(result.headers.sizes)))
    if result.classes:
        parts.append(_render_classes(result.classes))
    if order is not None:
        parts.append(_render_order(order))
    parts += _render_problems(result)
    return Group(*parts)


def _render_facts(facts: Sequence[tuple[str, str]]) -> RenderableType:
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in facts:
        table.add_row(name, Text(text))
    return table


def _format_samples(samples: int, nbytes: int) -> str:
    return f"{samples:,}, {size(nbytes)}"


def _format_sizes(sizes: Sequence[int], noun: str) -> str:
    """Number of shards, and range of their sizes."""
    low, high = min(sizes), max(sizes)
    return f"{len(sizes):,}, of {'' if low == high else f'{low:,} to '}{count_noun(high, noun)}"


def _facts(result: Survey) -> list[tuple[str, str]]:
    listing, headers = result.listing, result.headers
    facts = [("samples", _format_samples(len(listing.samples), sum(result.nbytes)))]
    if listing.shards:
        facts.append(("shards", _format_sizes(listing.shards, "sample")))
    facts.append(("fields", ", ".join(f"{name} {number:,}" for name, number in result.fields.most_common())))
    if result.image_nbytes:
        sizes = quantiles(result.image_nbytes).items()
        facts.append(("image files", ", ".join(f"{name} {size(nbytes)}" for name, nbytes in sizes)))
    if listing.shards and result.image_nbytes:
        facts.append(("with a grid", f"{result.grids:,} of {count_noun(len(result.image_nbytes), 'image')}"))
    if result.examined < len(listing.samples):
        facts.append(
            ("examined", f"{count_noun(result.examined, 'sample')}, evenly spaced; all figures below are about these")
        )
    if headers.formats:
        facts.append(("formats", ", ".join(f"{name} {number:,}" for name, number in headers.formats.most_common())))
        facts.append(("sizes", _common_sizes(headers.sizes)))
    if headers.progressive:
        facts.append(("progressive", f"{share(headers.progressive / headers.jpegs)} of the JPEGs: slow to decode"))
    if headers.turned:
        facts.append(("rotated", f"{headers.turned:,} by EXIF orientation, which torchvision ignores"))
    return facts + [("note", note) for note in listing.notes]


def _common_sizes(sizes: Sequence[tuple[int, int]]) -> str:
    common = Counter(sizes).most_common(3)
    text = ", ".join(f"{width}×{height} ({share(number / len(sizes))})" for (width, height), number in common)
    return text if len(set(sizes)) <= 3 else f"{text}, {len(set(sizes)) - 3:,} others"


def _render_histogram(title: str, counts: dict[str, int]) -> RenderableType:
    table = Table(box=None, show_header=False, title=title, title_justify="left", title_style="bold")
    table.add_column(justify="right", style="dim", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    most = max(counts.values())
    for name, number in counts.items():
        table.add_row(name, Text("█" * -(-_BAR * number // most), style="cyan"), f"{number:,}")
    return table


def _render_classes(classes: Counter[str]) -> RenderableType:
    common = classes.most_common()
    if len(common) > _MOST_SHOWN and (common[0][1] == common[-1][1] or 2 * len(common) > classes.total()):
        # Classes of one size, or nearly as many classes as samples: their names would say nothing.
        return Text(f"{_format_classes(classes)} each", style="bold")
    rows = dict(common if len(common) <= _MOST_SHOWN else common[: _MOST_SHOWN // 2] + common[-_MOST_SHOWN // 2 :])
    title = f"{len(common):,} class{'' if len(common) == 1 else 'es'}" + (
        "" if len(rows) == len(common) else ", the largest and the smallest"
    )
    return _render_histogram(
        title, {name if len(name) <= 24 else f"{name[:23]}…": number for name, number in rows.items()}
    )


def _format_classes(classes: Counter[str]) -> str:
    low, high = min(classes.values()), max(classes.values())
    return f"{len(classes):,} classes of {'' if low == high else f'{low:,} to '}{count_noun(high, 'sample')}"


def _render_order(order: WindowComparison) -> RenderableType:
    title = f"Shuffled in windows of {order.unit}s, batches of {order.batch_size}"
    # Without borders five columns fit 40 characters; with them, the headings would be abbreviated.
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), title=title, title_justify="left", title_style="bold")
    for heading in (
        "window",
        "pairs\nof one\nshard",
        "shards\nper\nbatch",
        "bytes\nper\nwindow",
        "read\nper\nsample",
    ):
        table.add_column(heading, justify="right")
    for mixed in order.windows:
        cells = (
            f"{mixed.window}",
            f"{share(mixed.same_shard_pairs)}",
            f"{mixed.shards_per_batch:.1f}",
            size(mixed.window_nbytes),
            size(mixed.nbytes_per_sample),
        )
        table.add_row(*cells, style="bold" if mixed.window == order.wanted else "")
    return Group(table, *map(Text, _explain_reads(order)), *map(Text, _explain_ranks(order)))


def _explain_ranks(order: WindowComparison) -> Iterator[str]:
    """Sentences on the reads of nodes and ranks that own partitions."""
    ranks = order.ranks
    if ranks is None:
        return
    yield (
        f"{ranks.world} ranks on {count_noun(ranks.nodes, 'node')}: with ShardShuffled(partitions={ranks.partitions}, "
        f"global_batch_size={ranks.global_batch_size}) a node reads {size(ranks.nbytes_per_node)} of "
        f"{size(ranks.nbytes)} ({share(ranks.nbytes_per_node / max(ranks.nbytes, 1))}), "
        f"{ranks.shards_per_node:,} {order.unit}s; without partitions all of it."
    )
    yield (
        f"A rank has at most {count_noun(ranks.open_shards, order.unit)} open; {share(ranks.same_shard_pairs)} of the "
        f"pairs of a rank's batch come from one {order.unit}."
    )


def _explain_reads(order: WindowComparison) -> Iterator[str]:
    if order.kept_nbytes is not None:
        yield (
            f"Reading a sample reads its whole {order.unit}, and only once if it is kept until its window ends: "
            f"{order.keeper} keeps {size(order.kept_nbytes)}, and reads the samples of a batch together."
        )
    elif order.page_nbytes is not None:
        yield f"Samples are read one by one; for a random one a disk reads about {size(order.page_nbytes)}."


def _render_problems(result: Survey) -> list[RenderableType]:
    parts: list[RenderableType] = []
    for noun, clause, places in (
        ("shard", "cannot be read", result.unreadable),
        ("sample", "cannot be read", result.broken),
        ("image", "cannot be read", result.headers.broken),
        ("key", "came more than once", result.listing.renamed),
    ):
        if places:
            lines = [f"· {place}" for place in places[:_MOST_SHOWN]]
            more = [f"… and {len(places) - _MOST_SHOWN:,} more"] if len(places) > _MOST_SHOWN else []
            parts.append(Text(f"{count_noun(len(places), noun)} that {clause}:", style="bold red"))
            parts.append(Text("\n".join(lines + more), overflow="fold"))
    return parts
