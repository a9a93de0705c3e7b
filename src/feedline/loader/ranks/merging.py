"""Merging of the states that the ranks of a run saved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from feedline.core.packing import to_leaf
from feedline.errors import StateError
from feedline.loader.error_policy import REMEMBERED
from feedline.loader.ranks.contract import named_ranks
from feedline.loader.state import check_version, field_of, owner_of, part_of, short
from feedline.loader.worker_states import merge_workers

_State = Mapping[str, Any]


def merge_states(states: Sequence[_State]) -> dict[str, Any]:
    """Merge the states that all ranks saved at the same step.

    The result loads on any number of ranks, and may be merged again. States of map-style datasets are equal on all
    ranks, but for the generators of workers, which are kept for each rank. Those of partitioned datasets each hold the
    partitions of their rank: all of them are needed, each once. A rank whose partitions have all ended may be some
    steps behind. Raises `StateError` if the state of a rank is missing or given twice, if epochs, steps, positions or
    fingerprints differ, and for an empty list; it names the ranks.
    """
    if not states:
        raise StateError("merge_states() needs at least one state")
    states = [check_version(state) for state in states]
    first = states[0]
    is_stream = "partitions" in first
    for field in ("fingerprint",) if is_stream else ("fingerprint", "epoch", "position", "delivered_ahead"):
        _check_equal(field, [state.get(field) for state in states])
    merged = {**first, **_merge_partitions(states)} if is_stream else dict(first)
    merged["workers"] = to_leaf(merge_workers([part_of(state, "workers") for state in states]))
    merged["skipped"] = _merge_skips([field_of(state, "skipped", dict) for state in states])
    return merged


def _merge_partitions(states: Sequence[_State]) -> dict[str, Any]:
    """The fields of streams, for all ranks."""
    counts = [count for state in states if (count := field_of(state, "num_partitions", object)) is not None]
    _check_equal("num_partitions", counts)
    whole = [owner_of(state)[0] is None for state in states]
    if any(whole):
        if not all(whole):
            raise StateError(
                "some of these states have the partitions of one rank, others those of all ranks, as a merged state "
                "has: give a merged state alone, or the states that the ranks saved after they had loaded it"
            )
        for field in ("epoch", "step"):
            _check_equal(field, [field_of(state, field, int) for state in states])
        _check_equal("partitions", [[_progress(entry) for entry in state["partitions"]] for state in states])
        return {}
    _check_complete(states)
    _check_same_step(states)
    step = max(state["step"] for state in states)
    fields = {"rank": None, "step": step, "num_partitions": counts[0] if counts else None}
    if len(states) == 1:
        return fields
    # A rank that was itself resumed from a merged state still has the old marks of the partitions of others.
    marks = [entry for state in states for entry in state["partitions"] if _is_own(state, entry)]
    return {**fields, "partitions": sorted(marks, key=lambda entry: entry[0]), "next_partition": 0}


def _check_equal(field: str, values: Sequence[Any]) -> None:
    other = next((value for value in values if value != values[0]), None)
    if other is not None:
        one, another = short(values[0]), short(other)
        raise StateError(
            f"these states were not saved at the same step of one run: {field} is {one} in one and {another} in another"
        )


def _check_complete(states: Sequence[_State]) -> None:
    """Raise `StateError` unless there is one state of each rank."""
    _check_equal("world_size", [owner_of(state)[1] for state in states])
    world_size = owner_of(states[0])[1]
    given = Counter(owner_of(state)[0] for state in states)
    missing = [rank for rank in range(world_size) if rank not in given]
    twice = sorted(rank for rank, times in given.items() if rank is not None and times > 1)
    if missing:
        raise StateError(
            f"merge_states() needs the states of all {world_size} ranks, but has none of {named_ranks(missing)}, whose "
            "partitions would be read again from their start. Collect them from all ranks after the same step, for "
            "example with torch.distributed.all_gather_object"
        )
    if twice:
        raise StateError(
            f"merge_states() needs one state of each rank, but has several of {named_ranks(twice)} of {world_size}: "
            "give the latest one. Loaders without distributed= all read as rank 0 of 1: their states cannot be merged, "
            "but each loads in its own process"
        )


def _check_same_step(states: Sequence[_State]) -> None:
    """Raise `StateError` unless all ranks that go on are at one step."""
    ranks_at: dict[tuple[int, int], list[int]] = {}
    for state in sorted(states, key=_rank):
        ranks_at.setdefault((field_of(state, "epoch", int), field_of(state, "step", int)), []).append(_rank(state))
    latest = max(ranks_at)
    ended = {_rank(state) for state in states if state["epoch"] == latest[0] and _has_ended(state)}
    if all(place == latest or ended.issuperset(ranks) for place, ranks in ranks_at.items()):
        return
    each = ", ".join(
        f"{named_ranks(ranks)} after {step} batches of epoch {epoch}" for (epoch, step), ranks in ranks_at.items()
    )
    raise StateError(
        f"these states were not saved at the same step: {each}. Save the states of all ranks after the same step; if "
        "some ranks have fewer batches than others, distributed=feedline.RankPolicy(uneven='stop') ends their epochs "
        "together"
    )


def _has_ended(state: _State) -> bool:
    """True if the rank has no partition left in this epoch."""
    ended = {entry[0] for entry in state["partitions"] if entry[4]}
    mine = range(_rank(state), field_of(state, "num_partitions", int), owner_of(state)[1]) if ended else ()
    return bool(ended) and ended.issuperset(mine)


def _rank(state: _State) -> int:
    return owner_of(state)[0] or 0  # None is another case


def _is_own(state: _State, entry: Sequence[Any]) -> bool:
    return bool(entry[0] % owner_of(state)[1] == _rank(state))


def _progress(entry: Sequence[Any]) -> tuple[Any, ...]:
    partition, batches, samples, _, ended = entry
    return partition, batches, samples, ended


def _merge_skips(skips: Sequence[_State]) -> dict[str, Any]:
    """The failed samples of all ranks.

    Samples of an earlier merged state, from which the ranks were resumed, count once.
    """
    count, this_epoch = (
        max(skip["shared"][place] for skip in skips) + sum(skip[name] - skip["shared"][place] for skip in skips)
        for place, name in enumerate(("count", "this_epoch"))
    )
    latest = [entry for skip in skips for entry in skip["latest"]]
    once = [entry for number, entry in enumerate(latest) if entry not in latest[:number]]
    return {"count": count, "this_epoch": this_epoch, "latest": once[-REMEMBERED:], "shared": [count, this_epoch]}
