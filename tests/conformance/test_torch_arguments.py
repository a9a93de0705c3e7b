"""torch's contract for arguments: which are refused, how and when, and the attributes that they become."""

from __future__ import annotations

import copy
import inspect
import itertools
import multiprocessing
import pickle
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from diagonals import at_night
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch_datasets import Counting, CountingStream, collate_sum, init_seed

Loader = type[DataLoader[Any]]

CHOICES: dict[str, list[Any]] = {
    "stream": [False, True],
    "batch_size": ["unset", None, 2, 0, -1, 1.5, True, "2"],
    "shuffle": ["unset", None, False, True, 3],
    "sampler": ["unset", "given", 3],
    "batch_sampler": ["unset", "given", 3],
    "drop_last": ["unset", True, 3],
    "num_workers": ["unset", 1, -1],
}
"""Every combination is tried; values that torch accepts are combined with those that it refuses."""

WORKERS: dict[str, list[Any]] = {
    "num_workers": ["unset", 0, 1, 2, -1],
    "prefetch_factor": ["unset", None, 1, 3, 0, -1],
    "persistent_workers": ["unset", False, True],
    "timeout": ["unset", 0, 5, -1, -0.5],
    "multiprocessing_context": ["unset", "fork", "spawn", "bad", 3, "context"],
    "in_order": ["unset", False],
}


def arguments_of(choice: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The dataset and the keyword arguments that a choice of `CHOICES` or `WORKERS` stands for."""
    given = {name: value for name, value in choice.items() if name != "stream" and value != "unset"}
    dataset = CountingStream(6) if choice.get("stream") else Counting(6)
    if given.get("sampler") == "given":
        given["sampler"] = SequentialSampler(range(6))
    if given.get("batch_sampler") == "given":
        given["batch_sampler"] = BatchSampler(SequentialSampler(range(6)), 3, False)
    if given.get("multiprocessing_context") == "context":
        given["multiprocessing_context"] = multiprocessing.get_context("fork")
    return dataset, given


def outcome(loader_class: Loader, choice: dict[str, Any]) -> str:
    """The type of the error at construction, or the attributes of the loader that was made."""
    dataset, given = arguments_of(choice)
    try:
        loader = loader_class(dataset, **given)
    except Exception as error:  # noqa: BLE001 - its type is the result
        return next(base.__name__ for base in type(error).__mro__ if base.__module__ == "builtins")
    names = ("batch_size", "drop_last", "num_workers", "prefetch_factor", "persistent_workers", "timeout", "in_order")
    seen = [f"{name}={getattr(loader, name)!r}" for name in names]
    kinds = [type(getattr(loader, name)).__name__ for name in ("sampler", "batch_sampler", "multiprocessing_context")]
    return " ".join([*seen, *kinds, f"auto={loader._auto_collation}", f"kind={loader._dataset_kind}"])


def grid(choices: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


@pytest.mark.parametrize("choices", [CHOICES, WORKERS], ids=["sampling", "workers"])
def test_every_combination_is_taken_or_refused_as_by_torch(feedline_class: Loader, choices: dict[str, Any]) -> None:
    """Over the whole grid: equal verdict at construction, built-in error type and attributes."""
    different = [
        f"{choice}: torch {theirs}; feedline {ours}"
        for choice in grid(choices)
        if (theirs := outcome(DataLoader, choice)) != (ours := outcome(feedline_class, choice))
    ]
    assert not different, f"{len(different)} of {len(grid(choices))}, such as\n" + "\n".join(different[:5])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_workers": -1}, ValueError, "num_workers option should be non-negative"),
        ({"timeout": -1}, ValueError, "timeout option should be non-negative"),
        ({"prefetch_factor": 2}, ValueError, "prefetch_factor option could only be specified in multiprocessing"),
        ({"num_workers": 1, "prefetch_factor": -1}, ValueError, "prefetch_factor option should be non-negative"),
        ({"persistent_workers": True}, ValueError, "persistent_workers option needs num_workers > 0"),
        ({"batch_size": None, "drop_last": True}, ValueError, "batch_size=None option disables auto-batching"),
        ({"shuffle": True, "sampler": [0]}, ValueError, "sampler option is mutually exclusive with shuffle"),
        ({"batch_size": 2, "batch_sampler": [[0]]}, ValueError, "batch_sampler option is mutually exclusive"),
        ({"multiprocessing_context": "fork"}, ValueError, r"multi-process loading \(num_workers > 0\), but got"),
        ({"num_workers": 1, "multiprocessing_context": "bad"}, ValueError, "should specify a valid start method in"),
        ({"num_workers": 1, "multiprocessing_context": object()}, TypeError, "should be a valid context"),
        ({"batch_size": 0}, ValueError, "batch_size should be a positive integer"),
    ],
)
def test_the_messages_that_people_search_for(
    loader_class: Loader, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        loader_class(Counting(6), **arguments)


@pytest.mark.parametrize("name", ["shuffle", "sampler", "batch_sampler"])
def test_a_stream_takes_no_sampler(loader_class: Loader, name: str) -> None:
    with pytest.raises(ValueError, match=f"DataLoader with IterableDataset: expected unspecified {name}"):
        loader_class(CountingStream(6), **{name: 3})


def test_an_empty_dataset_gives_nothing_and_cannot_be_shuffled(loader_class: Loader) -> None:
    assert list(loader_class(Counting(0))) == []
    with pytest.raises(ValueError, match="num_samples should be a positive integer value, but got num_samples=0"):
        loader_class(Counting(0), shuffle=True)


def test_a_dataset_without_length_fails_when_torch_fails(loader_class: Loader) -> None:
    class NoLength:
        def __getitem__(self, index: int) -> int:
            return index

    dataset: Any = NoLength()
    loader = loader_class(dataset, batch_size=2)
    with pytest.raises(TypeError):
        len(loader)
    with pytest.raises(TypeError):
        next(iter(loader))
    with pytest.raises(TypeError):
        loader_class(dataset, shuffle=True)
    assert [b.tolist() for b in loader_class(dataset, batch_size=2, sampler=[3, 4])] == [[3, 4]]


@pytest.mark.parametrize(
    "name", ["batch_size", "batch_sampler", "sampler", "drop_last", "dataset", "persistent_workers"]
)
def test_what_torch_freezes_stays_frozen(loader_class: Loader, name: str) -> None:
    loader = loader_class(Counting(4))
    with pytest.raises(ValueError, match=f"{name} attribute should not be set after {loader_class.__name__}"):
        setattr(loader, name, getattr(loader, name))


def test_what_torch_lets_people_change_is_obeyed(loader_class: Loader) -> None:
    loader = loader_class(Counting(4), batch_size=2)
    loader.collate_fn = collate_sum
    assert list(loader) == [1, 5]
    loader.num_workers, loader.prefetch_factor = 1, 2
    assert list(loader) == [1, 5]
    loader.num_workers = 0
    assert list(loader) == [1, 5]


def test_every_argument_is_an_attribute_of_the_same_name(loader_class: Loader) -> None:
    arguments: dict[str, Any] = {
        "batch_size": 3,
        "num_workers": 1,
        "collate_fn": collate_sum,
        "pin_memory": False,
        "drop_last": True,
        "timeout": 20,
        "worker_init_fn": init_seed,
        "generator": torch.Generator(),
        "prefetch_factor": 4,
        "persistent_workers": True,
        "pin_memory_device": "",
        "in_order": False,
    }
    loader = loader_class(Counting(8), **arguments)
    assert {name: getattr(loader, name) for name in arguments} == arguments


@pytest.mark.parametrize("in_order", [0, 1, None, np.False_])
def test_any_value_may_stand_for_in_order(loader_class: Loader, in_order: Any) -> None:
    loader = loader_class(Counting(4), batch_size=2, in_order=in_order)
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3]]
    assert loader.in_order is in_order


def test_defaults_are_torchs(feedline_class: Loader) -> None:
    """torch's parameters come first, in torch's order, with torch's kinds and defaults; ours are keyword-only."""
    theirs = inspect.signature(DataLoader.__init__).parameters
    ours = inspect.signature(feedline_class.__init__).parameters
    for name, parameter in theirs.items():
        assert (ours[name].kind, ours[name].default) == (parameter.kind, parameter.default), name
    positional = [name for name, p in theirs.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert list(ours)[: len(positional)] == positional
    assert all(ours[name].kind is inspect.Parameter.KEYWORD_ONLY for name in ours if name not in theirs)


def test_positional_arguments_mean_what_they_mean_to_torch(loader_class: Loader) -> None:
    loader = loader_class(Counting(7), 2, False, None, None, 0, collate_sum, False, True)
    assert list(loader) == [1, 5, 9]


@pytest.mark.parametrize("method", ["fork", "forkserver", *at_night("spawn")])
def test_a_start_method_may_be_named_or_given(loader_class: Loader, method: str) -> None:
    context: Any = multiprocessing.get_context(method)
    given = loader_class(Counting(11), num_workers=1, multiprocessing_context=context)
    assert given.multiprocessing_context is context
    named = loader_class(Counting(11), batch_size=3, num_workers=1, multiprocessing_context=method)
    assert named.multiprocessing_context.get_start_method() == method
    assert [batch.tolist() for batch in named] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10]]


def test_the_start_method_can_be_set_later(loader_class: Loader) -> None:
    loader = loader_class(Counting(4), num_workers=1)
    assert loader.multiprocessing_context is None
    loader.multiprocessing_context = "spawn"
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    with pytest.raises(ValueError, match="should specify a valid start method in"):
        loader.multiprocessing_context = "bad"
    with pytest.raises(TypeError, match="should be a valid context"):
        loader.multiprocessing_context = 3


def test_more_workers_than_processors_warn_at_construction(loader_class: Loader) -> None:
    with pytest.warns(UserWarning, match="excessive worker creation might get DataLoader running slow"):
        loader_class(Counting(4), num_workers=1000)


def test_a_sensible_number_of_workers_does_not_warn(loader_class: Loader) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader_class(Counting(4), num_workers=1)


def test_private_attributes_that_tools_read(loader_class: Loader) -> None:
    batched, single = loader_class(Counting(4), batch_size=2), loader_class(Counting(4), batch_size=None)
    assert (batched._auto_collation, single._auto_collation) == (True, False)
    assert batched._index_sampler is batched.batch_sampler
    assert single._index_sampler is single.sampler
    assert isinstance(batched.sampler, SequentialSampler)
    assert isinstance(batched.batch_sampler, BatchSampler)
    assert isinstance(loader_class(Counting(4), shuffle=True).sampler, RandomSampler)
    assert batched._dataset_kind == 0
    assert loader_class(CountingStream(4))._dataset_kind == 1
    assert batched._iterator is None
    assert batched._IterableDataset_len_called is None


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_loader_can_be_copied_and_pickled(loader_class: Loader, copied: Any) -> None:
    loader = copied(loader_class(Counting(5), batch_size=2))
    assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_made_within_an_epoch_begins_one(loader_class: Loader, copied: Any) -> None:
    loader = loader_class(Counting(5), batch_size=2)
    batches = iter(loader)
    next(batches)
    assert [batch.tolist() for batch in copied(loader)] == [[0, 1], [2, 3], [4]]
    assert [batch.tolist() for batch in batches] == [[2, 3], [4]]


def test_an_iterator_is_torchs_and_cannot_be_pickled(loader_class: Loader) -> None:
    """Lightning leaves iterators of this class out of what it pickles."""
    iterator = iter(loader_class(Counting(5)))
    assert isinstance(iterator, _BaseDataLoaderIter)
    with pytest.raises(NotImplementedError):
        pickle.dumps(iterator)


def test_an_iterator_has_the_length_of_its_loader(loader_class: Loader) -> None:
    iterator = iter(loader_class(Counting(5), batch_size=2))
    next(iterator)
    assert len(iterator) == 3
    assert iter(iterator) is iterator


def test_a_loader_can_be_subscripted_as_a_type(loader_class: Loader) -> None:
    assert loader_class[list[torch.Tensor]].__origin__ is loader_class  # type: ignore[attr-defined]
