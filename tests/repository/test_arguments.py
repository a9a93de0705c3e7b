"""One name for one meaning, and one meaning for one name, in the arguments of public classes and functions."""

from __future__ import annotations

import inspect
from collections import abc, defaultdict
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, get_type_hints

import pytest
from torch.utils import data

import feedline as fl

SYNONYMS = {
    "paths": ("files", "urls", "addresses", "locations", "shards", "filenames", "data_files"),
    "columns": ("fields", "features", "leaves", "names", "keys_only"),
    "index_dir": ("index", "index_path", "listing", "sidecar", "index_file"),
    "transform": ("map_fn", "preprocess", "augment", "function"),
    "cache": ("cache_dir", "local", "cache_folder"),
    "cache_nbytes": ("cache_size", "chunk_cache", "cache_bytes", "held_nbytes"),
    "options": ("storage_options", "store_options", "credentials", "config"),
    "decode": ("decoder", "decoders", "decoding", "read_as"),
    "apply_exif_orientation": ("orient", "exif", "apply_orientation"),
    "encoding": ("charset", "codec"),
    "seed": ("random_state", "generator", "random_seed"),
    "num_samples": ("size_of_epoch", "epoch_size", "total"),
    "world_size": ("num_replicas", "ranks", "num_ranks"),
    "drop_last": ("drop_tail", "partial"),
    "batch_size": ("batch", "global_size"),
    "fn": ("callback", "func", "function"),
    "open_files": ("open_shards", "open_videos", "max_open", "num_open"),
    "clips_per_file": ("clips_per_video", "clips_per_audio"),
    "p": ("prob", "probability", "chance"),
    "threads": ("num_threads", "workers"),
    "num_workers": ("processes", "jobs", "workers"),
}
"""The word for each meaning, and other words for it."""

ROOMS = {
    "datasets": {
        # What a dataset reads and how differs between formats; the reference says so for each.
        *("paths", "path", "source", "root", "columns", "decode", "transform", "dtype", "fn", "dataset", "datasets"),
        "unit",
        "sizes",  # a summary keeps what it gets; offsets are counted from any iterable
    },
    "samplers": {"sampler", "batch_size", "num_samples", "weights"},  # of samples, of datasets, of datasets by epoch
    "transforms": {"size", "p", "transform", "transforms"},
    "stores": {"path", "store", "cache", "requests", "retry", "options", "root"},
}
"""Rooms, and the names whose type depends on the class there."""

CALLS = ("cache", "options", "index_dir", "cache_nbytes")
"""Arguments that are given by name."""


def public(room: ModuleType) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in sorted(room.__all__):
        thing = getattr(room, name)
        # Named tuples and errors are values: their fields are not arguments that users choose.
        if callable(thing) and not (isinstance(thing, type) and issubclass(thing, (tuple, Exception))):
            yield name, thing


def parameters(thing: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    try:
        return dict(inspect.signature(thing).parameters)
    except (TypeError, ValueError):
        return {}


def hints(thing: Callable[..., Any]) -> dict[str, Any]:
    # Some modules import these names for type checkers only.
    return get_type_hints(thing.__init__ if isinstance(thing, type) else thing, localns=vars(abc) | vars(data))  # type: ignore[misc]


@pytest.mark.parametrize("room", ROOMS)
def test_a_meaning_has_one_name(room: str) -> None:
    banned = {synonym: word for word, synonyms in SYNONYMS.items() for synonym in synonyms}
    found = {
        f"{name}({argument}=): say {banned[argument]}"
        for name, thing in public(getattr(fl, room))
        for argument in parameters(thing)
        if argument in banned
    }
    # These describe a format, a scheme or a listing, or expand patterns.
    assert found <= {
        "Format(names=): say columns",
        "Scheme(credentials=): say options",
        "expand(addresses=): say paths",
        "SampleList(shards=): say paths",
    }


@pytest.mark.parametrize("room", ROOMS)
def test_a_name_has_one_type(room: str) -> None:
    types: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, thing in public(getattr(fl, room)):
        known = hints(thing)
        for argument in parameters(thing).keys() & known.keys():
            types[argument][str(known[argument])].append(name)
    several = {argument: dict(kinds) for argument, kinds in types.items() if len(kinds) > 1}
    assert {argument: kinds for argument, kinds in several.items() if argument not in ROOMS[room]} == {}


def test_arguments_of_places_and_memory_are_given_by_name() -> None:
    for name, thing in public(fl.datasets):
        for argument in CALLS:
            parameter = parameters(thing).get(argument)
            assert parameter is None or parameter.kind is parameter.KEYWORD_ONLY, f"{name}({argument}=)"


ORDER = ("paths", "columns", "decode", "transform", "open_files", "index_dir", "cache", "options")
"""The order of the arguments that many datasets have; those of places come last."""

OF_TORCHVISION = {"ImageFolder"}
"""Classes whose first arguments are torchvision's."""


def test_arguments_that_many_datasets_have_come_in_one_order() -> None:
    for name, thing in public(fl.datasets):
        found = [argument for argument in parameters(thing) if argument in ORDER]
        if name not in OF_TORCHVISION:
            assert found == sorted(found, key=ORDER.index), name
        last = [argument for argument in ORDER[-3:] if argument in found]
        assert list(parameters(thing))[len(parameters(thing)) - len(last) :] == last, name


def test_arguments_that_many_datasets_have_mean_the_same_when_left_out() -> None:
    for argument in (*CALLS, "transform", "columns", "encoding", "max_record_nbytes", "nulls"):
        if argument == "cache_nbytes":  # row groups are larger than chunks of arrays
            continue
        found = {str(each.default) for _, thing in public(fl.datasets) if (each := parameters(thing).get(argument))}
        assert len(found - {str(inspect.Parameter.empty)}) == 1, argument
