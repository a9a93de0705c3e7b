"""Loader state as JSON values: packing, checks and merging."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

from feedline.core.cursor import Cursor, PartitionCursor, PartitionOffset
from feedline.core.packing import from_leaf, pack_or_keep, to_leaf, unpack
from feedline.errors import StateError
from feedline.loader.error_policy import REMEMBERED, ErrorPolicy, Quarantine

VERSION = 1


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """Identity of dataset and order; a state must have an equal one.

    With another dataset or order, a resumed run would repeat or lose samples silently.
    """

    kind: str
    length: int | None
    order: str
    seed: int | None
    listing: str | None = None
    """`listing_fingerprint` of the dataset, if it has one."""
    cpu_share: str | None = None
    """See `decode_share_of`; None without a device. With another one, some images get another decoder."""

    def check(self, saved: Mapping[str, Any]) -> None:
        """Raise `StateError` if the state comes from another dataset, order or seed."""
        for field, mine in self.to_json().items():
            if field in ("listing", "cpu_share"):
                continue
            theirs = _field(saved, field, object, "fingerprint.")
            if theirs != mine:
                was, is_now = _differing(theirs, mine)
                raise StateError(
                    f"this state belongs to another loader: its {_MEANING[field]} was {was}, here it is {is_now}. "
                    "Load it into a loader over the same data, order and seed, or start without it."
                )
        theirs = saved.get("listing")
        if None not in (self.listing, theirs) and self.listing != theirs:
            raise StateError(
                "this state belongs to another loader: its dataset had as many samples, but listed other files or the "
                "same files in another order. os.listdir has no fixed order: sort its result. If only the names of the "
                "files have changed, remove 'listing' from the 'fingerprint' of the state."
            )
        theirs = saved.get("cpu_share")
        if None not in (self.cpu_share, theirs) and self.cpu_share != theirs:
            raise StateError(
                f"this state was saved with DecodeOnDevice(cpu_share={theirs}), but it is {self.cpu_share} here: some "
                "images would get another decoder, and other pixels within its tolerance. Pass the former cpu_share, "
                "or remove 'cpu_share' from the 'fingerprint' of the state."
            )

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values; `cpu_share` only if there is one."""
        fields = {
            "kind": self.kind, "length": self.length, "order": self.order, "seed": self.seed, "listing": self.listing
        }  # fmt: skip
        return fields if self.cpu_share is None else {**fields, "cpu_share": self.cpu_share}


def _differing(one: Any, other: Any) -> tuple[str, str]:
    """Two values as text.

    For long texts, the parts that differ, with their context.
    """
    if not (isinstance(one, str) and isinstance(other, str)) or max(len(one), len(other)) <= _LONG:
        return repr(one), repr(other)
    start = max(0, _common(one, other) - _LONG // 2)
    same = _common(one[start:][::-1], other[start:][::-1])  # characters of both ends
    return _cut(one, start, same), _cut(other, start, same)


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    unequal = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(unequal, min(len(one), len(other)))


def _cut(text: str, start: int, same: int) -> str:
    rest = max(0, same - _LONG // 2)
    return repr(f"{'...' if start else ''}{text[start : len(text) - rest]}{'...' if rest else ''}")


_LONG = 120
"""Characters of a text that is shown whole."""


_MEANING = {"kind": "kind of dataset", "length": "dataset length", "order": "sampler", "seed": "seed"}


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a state with variable contents.

    Each is one text or None in the state. The state therefore has the same keys at every step, as
    `torch.distributed.checkpoint` needs: it loads only the keys that a new loader has.
    """

    order: dict[str, Any] | None = None
    """Record from which a foreign sampler repeats its order of this epoch."""
    workers: dict[str, Any] | None = None
    """Random generators, and dataset states, of the workers."""
    random: dict[str, Any] | None = None
    """Random generators of the training process."""
    num_partitions: int | None = None


def pack(
    cursor: Cursor | PartitionCursor, fingerprint: Fingerprint, quarantine: Quarantine, parts: Parts
) -> dict[str, Any]:
    """The state as JSON values, with the same keys at every step.

    Values of the user that JSON cannot hold are an `OpaqueState` in it.
    """
    state: dict[str, Any] = {"feedline": VERSION, "epoch": cursor.epoch, "fingerprint": fingerprint.to_json()}
    if isinstance(cursor, Cursor):
        state["position"] = cursor.position
        state["delivered_ahead"] = [list(range_ahead) for range_ahead in cursor.delivered_ahead]
        state["order"] = to_leaf(parts.order or None)
    else:
        state["next_partition"] = cursor.next_partition
        state["num_partitions"] = parts.num_partitions
        state["partitions"] = [
            [partition, m.batches, m.samples, None if m.state is None else to_leaf(pack_or_keep(m.state)), m.ended]
            for partition, m in cursor.marks
        ]
    state["workers"] = to_leaf(parts.workers or None)
    state["random"] = to_leaf(parts.random or None)
    latest = [list(entry) for entry in quarantine.latest]
    state["skipped"] = {
        "count": quarantine.count, "this_epoch": quarantine.this_epoch, "latest": latest,
        "shared": list(quarantine.shared),
    }  # fmt: skip
    return state


def part_of(state: Mapping[str, Any] | None, field: str) -> dict[str, Any] | None:
    """A part of a state, or None; `StateError` if damaged."""
    part = from_leaf(None if state is None else state.get(field), field)
    if part is not None and not isinstance(part, dict):
        raise StateError(f"the field '{field}' of this state is damaged: {_short(part)} is not a mapping")
    return part


def unpack_cursor(state: Mapping[str, Any], kind: str) -> Cursor | PartitionCursor:
    """The cursor of a state; `StateError` names a missing or damaged field."""
    epoch = _natural(state, "epoch")
    if kind != "iterable":
        delivered_ahead = [_pair(entry) for entry in _field(state, "delivered_ahead", list)]
        position = _natural(state, "position")
        bounds = [position, *(edge for range_ahead in delivered_ahead for edge in range_ahead)]
        if bounds != sorted(bounds):
            raise StateError(
                f"the field 'delivered_ahead' of this state is damaged: {delivered_ahead} above position {position}"
            )
        return Cursor(epoch, position, tuple(delivered_ahead))
    marks = tuple(_partition(entry) for entry in _field(state, "partitions", list))
    return PartitionCursor(epoch, marks, _natural(state, "next_partition"))


def resume_quarantine(policy: ErrorPolicy, former: Quarantine | None, state: Mapping[str, Any] | None) -> Quarantine:
    """The quarantine of an iteration, with the failed samples so far.

    They are those of `state`, or else of `former`, the quarantine of the previous iteration. `StateError` if the state
    is damaged.
    """
    quarantine = Quarantine(policy)
    if former is not None:
        quarantine.count, quarantine.latest, quarantine.shared = former.count, former.latest, former.shared
    if state is None:
        return quarantine
    skipped = _field(state, "skipped", dict)
    quarantine.count = _natural(skipped, "count", "skipped.")
    quarantine.this_epoch = _natural(skipped, "this_epoch", "skipped.")
    latest = _field(skipped, "latest", list, "skipped.")
    quarantine.latest = tuple(_triple(entry) for entry in latest)
    quarantine.shared = _read_entry(skipped.get("shared"), lambda: _pair(skipped["shared"]), "skipped.shared")
    return quarantine


def check_position(cursor: Cursor | PartitionCursor, sampler: Sized) -> None:
    """Raise `StateError` if the cursor is past the end of the sampler."""
    try:
        length = len(sampler)
    except TypeError:  # endless
        return
    if isinstance(cursor, Cursor) and cursor.position > length:
        raise StateError(
            f"the field 'position' of this state is {cursor.position}, but an epoch has {length} positions"
        )


def check_version(state: Any) -> Mapping[str, Any]:
    """The state itself; `StateError` if this version cannot read it."""
    if isinstance(state, Mapping) and "feedline" not in state and {"_iterator_finished", "_snapshot"} & state.keys():
        raise StateError(
            "this state was saved by torchdata's StatefulDataLoader, whose position feedline cannot read: finish the "
            "epoch with StatefulDataLoader, or begin it again without the state"
        )
    if not isinstance(state, Mapping) or "feedline" not in state:
        raise StateError(f"not a feedline state: expected the dict returned by state_dict(), got {_short(state)}")
    if state["feedline"] != VERSION:
        raise StateError(f"the field 'feedline' of this state is {state['feedline']!r}; this version reads {VERSION}")
    return state


def fingerprint_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fingerprint in a state."""
    fingerprint: Mapping[str, Any] = _field(state, "fingerprint", dict)
    return fingerprint


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states that all ranks saved at the same step.

    The result loads on any number of ranks. States of map-style datasets are equal on all ranks; those of partitioned
    datasets each hold the partitions of their rank. A missing state is not detected: the partitions of its rank would
    be read from their start. Raises `StateError` if epochs, positions or fingerprints differ, and for an empty list.
    """
    if not states:
        raise StateError("merge_states() needs at least one state")
    first = check_version(states[0])
    merged = dict(first)
    partitions: dict[int, list[Any]] = {}
    for state in map(check_version, states):
        for field in ("epoch", "fingerprint", "position", "delivered_ahead"):
            if state.get(field) != first.get(field):
                raise StateError(
                    f"these states were not saved at the same step: {field} is {first.get(field)!r} in one and "
                    f"{state.get(field)!r} in another"
                )
        for entry in state.get("partitions", []):
            # A rank that was itself resumed from a merged state still holds the old marks of the others' partitions.
            if entry[0] not in partitions or _progress(partitions[entry[0]]) < _progress(entry):
                partitions[entry[0]] = entry
    merged["skipped"] = _merge_skips([_field(state, "skipped", dict) for state in states])
    if "partitions" in first:
        merged["partitions"] = [partitions[partition] for partition in sorted(partitions)]
        merged["next_partition"] = 0
    return merged


def _progress(entry: list[Any]) -> tuple[int, int, bool]:
    _, batches, samples, _, ended = entry
    return batches, samples, ended


def _merge_skips(skips: list[dict[str, Any]]) -> dict[str, Any]:
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


def _field(state: Mapping[str, Any], name: str, kind: type, prefix: str = "") -> Any:
    if name not in state:
        raise StateError(f"the field '{prefix}{name}' is missing from this state")
    value = state[name]
    if not isinstance(value, kind):
        raise StateError(f"the field '{prefix}{name}' of this state should be a {kind.__name__}, got {_short(value)}")
    return value


def _natural(state: Mapping[str, Any], name: str, prefix: str = "") -> int:
    value = _field(state, name, int, prefix)
    if isinstance(value, bool) or value < 0:
        raise StateError(f"the field '{prefix}{name}' of this state should be a number >= 0, got {value!r}")
    return int(value)


def _triple(entry: Any) -> tuple[int, int, Any]:
    return _read_entry(entry, lambda: (int(entry[0]), int(entry[1]), entry[2]), "skipped.latest")


def _pair(entry: Any) -> tuple[int, int]:
    return _read_entry(entry, lambda: (int(entry[0]), int(entry[1])), "delivered_ahead")


def _partition(entry: Any) -> tuple[int, PartitionOffset]:
    def read() -> tuple[int, PartitionOffset]:
        partition, batches, samples, state, ended = entry
        state = unpack(from_leaf(state, "partitions"))
        return int(partition), PartitionOffset(int(batches), int(samples), state, bool(ended))

    return _read_entry(entry, read, "partitions")


def _read_entry(entry: Any, read: Callable[[], T], field: str) -> T:
    try:
        return read()
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise StateError(f"the field '{field}' of this state is damaged: {_short(entry)}") from error


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
