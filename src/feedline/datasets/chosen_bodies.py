"""What of many record batches belongs to the columns that are chosen, and how it can be read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from feedline.datasets.ipc_bodies import Bodies, Body
from feedline.datasets.ipc_columns import Columns
from feedline.datasets.ipc_layout import Layout
from feedline.datasets.ipc_rows import have_rows
from feedline.datasets.spans import Int64s


class ChosenBodies(NamedTuple):
    """By the number of the record batch."""

    bodies: Bodies
    """None of those that are read as a whole."""
    nbytes: Int64s
    """What is read of each, not counting dictionaries."""
    by_rows: bool
    """Whether nothing but rows shall be read: of one of them more is read than the limit, and all have their rows."""


def chosen_bodies(layouts: Sequence[Layout], columns: Mapping[bytes, Columns], limit_nbytes: int) -> ChosenBodies:
    """Of all record batches of the layouts, of which these columns are chosen, by schema."""
    batches = np.concatenate([layout.batches for layout in layouts])
    nbytes, have_places = batches[:, 1] - batches[:, 0], np.zeros(len(batches), np.bool_)
    groups = _groups(layouts, columns)
    for which, body, each in groups:
        nbytes[which] = body.sizes.sum(axis=-1)
        have_places[which] = each.widths is not None and have_rows(body, each.widths, batches[which, 2])
    by_rows = bool((nbytes > limit_nbytes).any() and have_places.all())
    kept = [(which, body) for which, body, each in groups if by_rows or not each.are_all]
    return ChosenBodies(Bodies.of_alike(len(batches), kept), nbytes, by_rows)


def _groups(layouts: Sequence[Layout], columns: Mapping[bytes, Columns]) -> list[tuple[Int64s, Body, Columns]]:
    """What of record batches belongs to the columns, of those together that are alike."""
    bodies = Bodies.joined([layout.bodies for layout in layouts])
    places = {schema: place for place, schema in enumerate(columns)}
    schemas = np.repeat([places[layout.schema] for layout in layouts], [len(layout.batches) for layout in layouts])
    return [
        (which, chosen, each)
        for place, each in enumerate(columns.values())
        for which, body in bodies.alike(np.flatnonzero(schemas == place))
        if (chosen := each.of(body)) is not None
    ]
