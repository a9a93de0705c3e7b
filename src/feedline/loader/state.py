"""Loader state as JSON values: packing and checks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeVar

from feedline.core.cursor import Cursor, PartitionCursor, PartitionOffset
from feedline.core.packing import from_leaf, pack_or_keep, to_leaf, unpack
from feedline.errors import StateError
from feedline.loader.error_policy import ErrorPolicy, Quarantine

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
            theirs = field_of(saved, field, object, "fingerprint.")
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
                "same files in another order, or a Filter, filters= or a Subset chose other samples. os.listdir has no "
                "fixed order: sort its result. If only the names of the files have changed, remove 'listing' from the "
                "'fingerprint' of the state."
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
    owner: tuple[int | None, int] = (0, 1)
    """See `PartitionSchedule.owner`."""
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
        state["rank"], state["world_size"] = parts.owner
        state["step"] = cursor.step
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
        "shared": list(quarantine.merged_counts),
    }  # fmt: skip
    return state


def part_of(state: Mapping[str, Any] | None, field: str) -> dict[str, Any] | None:
    """A part of a state, or None; `StateError` if damaged."""
    part = from_leaf(None if state is None else state.get(field), field)
    if part is not None and not isinstance(part, dict):
        raise StateError(f"the field '{field}' of this state is damaged: {short(part)} is not a mapping")
    return part


def unpack_cursor(state: Mapping[str, Any], kind: str) -> Cursor | PartitionCursor:
    """The cursor of a state; `StateError` names a missing or damaged field."""
    epoch = _natural(state, "epoch")
    if kind != "iterable":
        delivered_ahead = [_pair(entry) for entry in field_of(state, "delivered_ahead", list)]
        position = _natural(state, "position")
        bounds = [position, *(edge for range_ahead in delivered_ahead for edge in range_ahead)]
        if bounds != sorted(bounds):
            raise StateError(
                f"the field 'delivered_ahead' of this state is damaged: {delivered_ahead} above position {position}"
            )
        return Cursor(epoch, position, tuple(delivered_ahead))
    marks = sorted((_partition(entry) for entry in field_of(state, "partitions", list)), key=itemgetter(0))
    return PartitionCursor(epoch, tuple(marks), _natural(state, "next_partition"), _natural(state, "step"))


def resume_quarantine(policy: ErrorPolicy, former: Quarantine | None, state: Mapping[str, Any] | None) -> Quarantine:
    """The quarantine of an iteration, with the failed samples so far.

    They are those of `state`, or else of `former`, the quarantine of the previous iteration. `StateError` if the state
    is damaged.
    """
    quarantine = Quarantine(policy)
    if former is not None:
        quarantine.count, quarantine.latest, quarantine.merged_counts = (
            former.count,
            former.latest,
            former.merged_counts,
        )
    if state is None:
        return quarantine
    skipped = field_of(state, "skipped", dict)
    quarantine.count = _natural(skipped, "count", "skipped.")
    quarantine.this_epoch = _natural(skipped, "this_epoch", "skipped.")
    latest = field_of(skipped, "latest", list, "skipped.")
    quarantine.latest = tuple(_triple(entry) for entry in latest)
    quarantine.merged_counts = _read_entry(skipped.get("shared"), lambda: _pair(skipped["shared"]), "skipped.shared")
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
        raise StateError(f"not a feedline state: expected the dict returned by state_dict(), got {short(state)}")
    if state["feedline"] != VERSION:
        raise StateError(f"the field 'feedline' of this state is {state['feedline']!r}; this version reads {VERSION}")
    return state


def fingerprint_of(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fingerprint in a state."""
    fingerprint: Mapping[str, Any] = field_of(state, "fingerprint", dict)
    return fingerprint


def owner_of(state: Mapping[str, Any]) -> tuple[int | None, int]:
    """Rank and world size in a stream's state; see `PartitionSchedule.owner`."""
    rank, world_size = field_of(state, "rank", object), _natural(state, "world_size")
    if rank is not None and _natural(state, "rank") >= world_size:
        raise StateError(f"the field 'rank' of this state is {rank}, but its 'world_size' is {world_size}")
    return rank, world_size


def check_owner(state: Mapping[str, Any], owner: tuple[int | None, int]) -> None:
    """Raise `StateError` if a state may lack partitions of `owner`.

    A state without partitions fits all ranks: it is the start of an epoch.
    """
    rank, world_size = saved = owner_of(state)
    if rank is None or world_size == 1 or saved == owner or not state["partitions"]:
        return
    raise StateError(
        f"this state has the partitions of rank {rank} of {world_size}, but this loader is rank {owner[0]} of "
        f"{owner[1]}: the partitions of other ranks would be read again from their start. Load the state that the same "
        "rank saved, or feedline.merge_states() of the states of all ranks"
    )


def field_of(state: Mapping[str, Any], name: str, kind: type, prefix: str = "") -> Any:
    """A field of a state; `StateError` if it is missing or damaged."""
    if name not in state:
        raise StateError(f"the field '{prefix}{name}' is missing from this state")
    value = state[name]
    if not isinstance(value, kind):
        raise StateError(f"the field '{prefix}{name}' of this state should be a {kind.__name__}, got {short(value)}")
    return value


def _natural(state: Mapping[str, Any], name: str, prefix: str = "") -> int:
    value = field_of(state, name, int, prefix)
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
        raise StateError(f"the field '{field}' of this state is damaged: {short(entry)}") from error


def short(value: Any) -> str:
    """A value as text of at most 160 characters, for errors."""
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
