"""Streams that divide their samples among the ranks themselves.

`distributed=` keeps one of every n samples of a stream without partitions: of one that each rank has divided already,
it would lose the others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import ItemsView, Iterator, Mapping
from inspect import iscode, isfunction
from types import FrameType
from typing import Any

from torch.utils.data import IterableDataset, IterDataPipe

from feedline.core.huggingface import is_stream
from feedline.errors import ArgumentError
from feedline.loader.partitions import is_partitioned

_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}
)
"""Environment variables of launchers."""

_FUNCTIONS = frozenset(
    {"get_rank", "get_world_size", "get_node_local_rank", "split_dataset_by_node", "process_index", "global_rank"}
)
"""Functions and properties of torch, `datasets`, Accelerate, Lightning, and their like."""

_ATTRIBUTES = frozenset({"process_index", "global_rank"})
"""Names that some objects have as attributes: reading one calls nothing."""

_C_FUNCTIONS = frozenset({"Get_rank", "Get_size"})
"""Functions of MPI."""

_CODE_NAMES = (_VARIABLES - {"LOCAL_RANK"}) | _FUNCTIONS | _C_FUNCTIONS | {"PartialState"}
"""Names in the code of a class. LOCAL_RANK mostly chooses a device there."""

_RANK_ATTRIBUTES = ("rank", "global_rank", "process_index", "node_id")
_WORLD_ATTRIBUTES = ("world_size", "num_replicas", "num_processes", "num_ranks", "num_nodes", "world")

_READ_VARIABLE = type(os.environ).__getitem__.__code__
_LIST_VARIABLES = Mapping.keys.__code__
_LIST_VALUES = ItemsView.__iter__.__code__


def check_shares(dataset: Any, rank: int, world_size: int) -> None:
    """Raise `ArgumentError` if a stream may divide its samples among ranks."""
    for stream in _streams_within(dataset):
        found = _held_rank(stream, rank, world_size) or _asked_in_code(stream)
        if found is not None:
            raise _refusal_error(type(stream).__name__, found)


class RankWatch:
    """Context in which asking for the rank is an error.

    It sees every call of Python, so only the first sample of a stream is read in it. Where a profiler of the user runs,
    it sees nothing.
    """

    def __init__(self, dataset_name: str) -> None:
        self._name = dataset_name
        self._asked: str | None = None
        self._is_active = False
        self._copied_at: tuple[int, int] | None = None

    def __enter__(self) -> None:
        self._is_active = sys.getprofile() is None
        if self._is_active:
            sys.setprofile(self._see)

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if self._is_active:
            sys.setprofile(None)
        if self._asked is not None and (error_type is None or error_type is StopIteration):
            raise _refusal_error(self._name, self._asked) from None

    def _see(self, frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            self._see_call(frame)
        elif event == "c_call" and getattr(called, "__name__", "") in _C_FUNCTIONS:
            self._note(called.__name__, frame)

    def _see_call(self, frame: FrameType) -> None:
        code, caller = frame.f_code, frame.f_back
        place = None if caller is None else (id(caller), caller.f_lasti)
        if code is _LIST_VARIABLES:
            self._copied_at = place
        elif code is _READ_VARIABLE:
            is_copying = place == self._copied_at or (caller is not None and caller.f_code is _LIST_VALUES)
            if frame.f_locals["key"] in _VARIABLES and not is_copying:  # a copy of the environment asks for nothing
                self._note(frame.f_locals["key"], frame)
        elif frame.f_globals.get("__name__") == "accelerate.state":
            self._note("PartialState", caller or frame)
        elif code.co_name in _FUNCTIONS:
            self._note(code.co_name, caller or frame)
        elif (named := _ATTRIBUTES.intersection(code.co_names)) and "site-packages" not in code.co_filename:
            self._note(min(named), frame)  # libraries name them for logging

    def _note(self, name: str, frame: FrameType) -> None:
        if self._asked is not None:
            return
        place: FrameType | None = frame
        while place is not None and place.f_globals.get("__name__") in ("os", "collections.abc", "_collections_abc"):
            place = place.f_back
        place = place or frame
        self._asked = f"looks up {name!r}, in {place.f_code.co_filename}:{place.f_lineno}"


def _streams_within(dataset: Any) -> Iterator[Any]:
    """The stream, and those in its attributes."""
    pending, seen = [dataset], set[int]()
    while pending:
        stream = pending.pop()
        if isinstance(stream, IterDataPipe) or id(stream) in seen:
            continue
        seen.add(id(stream))
        if not is_partitioned(stream):  # whose __iter__ is for torch's loader
            yield stream
        if not is_stream(stream):
            for value in _attributes(stream).values():
                values = value if isinstance(value, (list, tuple)) else [value]
                pending += (each for each in values if isinstance(each, IterableDataset))


def _attributes(stream: Any) -> dict[str, Any]:
    return getattr(stream, "__dict__", {})


def _held_rank(stream: Any, rank: int, world_size: int) -> str | None:
    """Text on the rank that a stream keeps, or None."""
    if is_stream(stream):
        divided = getattr(stream, "_distributed", None) is not None
        return "is a share made by split_dataset_by_node" if divided else None
    held = {name.lstrip("_"): value for name, value in _attributes(stream).items() if type(value) is int}
    ranks = [name for name in _RANK_ATTRIBUTES if held.get(name) == rank]
    worlds = [name for name in _WORLD_ATTRIBUTES if held.get(name) == world_size]
    return f"has the attributes {ranks[0]}={rank} and {worlds[0]}={world_size}" if ranks and worlds else None


def _asked_in_code(stream: Any) -> str | None:
    """Text on the code that asks for the rank, or None."""
    if is_stream(stream):
        return None
    classes = [cls for cls in type(stream).__mro__ if cls not in IterableDataset.__mro__]
    members = [_function_of(member) for cls in classes for member in vars(cls).values()]
    codes = [member.__code__ for member in members if isfunction(member)]
    for code in codes:  # functions and generators within functions are constants of theirs
        codes += [each for each in code.co_consts if iscode(each)]
        found = _CODE_NAMES.intersection([*code.co_names, *(each for each in code.co_consts if isinstance(each, str))])
        if found:
            return f"looks up its rank ({min(found)!r} in {code.co_name} of its code)"
    return None


def _function_of(member: Any) -> Any:
    if isinstance(member, (classmethod, staticmethod)):
        return member.__func__
    return member.fget if isinstance(member, property) else member


def _refusal_error(name: str, found: str) -> ArgumentError:
    return ArgumentError(
        f"{name} {found}, so it may divide its samples among the ranks itself. distributed= would divide them again,"
        " and samples would be lost. If it does, leave out distributed=; for rules such as uneven=, pass"
        " distributed=fl.RankPolicy((0, 1), ...). If each rank reads all samples, pass"
        " distributed=fl.RankPolicy(reads_all=True)"
    )
