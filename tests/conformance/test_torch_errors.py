"""torch's contract when user code fails: type and text of the error, and a loop that can continue."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch_datasets as cases
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torch_datasets import Counting, Failing, FailingStream, Gate, Gated, Returning

Make = Callable[..., DataLoader[Any]]
Loader = type[DataLoader[Any]]
workers = pytest.mark.parametrize("num_workers", [0, 2])


def whole_text(error: BaseException) -> str:
    """The traceback that a user reads, with every cause and note."""
    return "".join(traceback.format_exception(error))


@workers
def test_an_error_of_the_dataset_keeps_type_message_and_traceback(make_loader: Make, num_workers: int) -> None:
    with pytest.raises(ValueError, match="odd sample") as caught:
        list(make_loader(Failing(6, {3}, cases.value_error), batch_size=2, num_workers=num_workers))
    assert "in __getitem__" in whole_text(caught.value)
    assert "torch_datasets.py" in whole_text(caught.value)


@workers
def test_feedline_says_which_sample_it_was(feedline_class: Loader, num_workers: int) -> None:
    loader = feedline_class(
        Failing(6, {3}, cases.value_error), batch_size=2, sampler=[5, 4, 3], num_workers=num_workers
    )
    with pytest.raises(ValueError, match="odd sample") as caught:
        list(loader)
    assert "sample 3 of Failing (epoch 0, position 2, stage fetch" in whole_text(caught.value)


@workers
def test_a_key_error_stays_one_and_its_message_is_readable(make_loader: Make, num_workers: int) -> None:
    with pytest.raises(KeyError) as caught:
        list(make_loader(Failing(6, {3}, cases.key_error), batch_size=2, num_workers=num_workers))
    assert "missing" in str(caught.value)


@workers
@pytest.mark.parametrize("make_error", [cases.two_arguments, cases.keyword_only, cases.with_message])
def test_exceptions_with_odd_constructors_arrive(
    make_loader: Make, num_workers: int, make_error: Callable[[], Exception]
) -> None:
    """torch gives up the type and raises RuntimeError where it cannot call the constructor; keeping it is allowed."""
    with pytest.raises((RuntimeError, type(make_error()))) as caught:
        list(make_loader(Failing(6, {3}, make_error), batch_size=2, num_workers=num_workers))
    assert "odd constructor" in whole_text(caught.value)


@workers
def test_the_loop_may_go_on_after_an_error(make_loader: Make, num_workers: int) -> None:
    iterator = iter(make_loader(Failing(12, {2, 7}, cases.not_implemented), batch_size=2, num_workers=num_workers))
    seen: list[Any] = []
    while True:
        try:
            seen.append(next(iterator).tolist())
        except NotImplementedError:
            seen.append("error")
        except StopIteration:
            break
    assert seen == [[0, 1], "error", [4, 5], "error", [8, 9], [10, 11]]


class FailsTogether(Dataset[Any]):
    """Draws in `__getitem__` and `__getitems__`, from the global generator or one of its own; 4 fails there."""

    def __init__(self, *, own: bool) -> None:
        self.generator = torch.Generator().manual_seed(3) if own else None

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        return torch.rand((), generator=self.generator).item()

    def __getitems__(self, indices: list[int]) -> list[float]:
        if 4 in indices:
            raise cases.value_error()
        return [self[index] for index in indices]


@workers
@pytest.mark.parametrize("own", [False, True])
def test_the_random_numbers_after_a_failed_batch_stay_the_same(
    torch_class: Loader, loader_class: Loader, num_workers: int, own: bool
) -> None:
    def seen(loader_class: Loader) -> list[Any]:
        torch.manual_seed(5)
        iterator = iter(loader_class(FailsTogether(own=own), 3, num_workers=num_workers))
        return [outcome(lambda: next(iterator).tolist()) for _ in range(4)]

    assert seen(loader_class) == seen(torch_class)


def outcome(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ValueError as error:
        return type(error)


@workers
def test_every_batch_may_fail(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(
        Failing(41, set(range(41)), cases.not_implemented), batch_size=2, shuffle=True, num_workers=num_workers
    )
    iterator, errors = iter(loader), 0
    while True:
        try:
            next(iterator)
        except NotImplementedError:
            errors += 1
        except StopIteration:
            break
    assert errors == len(loader) == 21


@workers
def test_an_exhausted_iterator_stays_exhausted(make_loader: Make, num_workers: int) -> None:
    iterator = iter(make_loader(Counting(2), num_workers=num_workers))
    assert [int(batch) for batch in iterator] == [0, 1]
    assert list(iterator) == []
    with pytest.raises(StopIteration):
        next(iterator)


@workers
def test_an_error_of_the_collate_function(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Counting(4), batch_size=2, collate_fn=cases.collate_failing, num_workers=num_workers)
    with pytest.raises(ValueError, match="cannot collate 2 samples") as caught:
        next(iter(loader))
    assert "in collate_failing" in whole_text(caught.value)


@workers
def test_an_error_at_the_start_of_a_stream(make_loader: Make, num_workers: int) -> None:
    with pytest.raises(RuntimeError, match="stream cannot start"):
        list(make_loader(FailingStream(), num_workers=num_workers))


def test_an_error_of_the_init_function(loader_class: Loader) -> None:
    loader = loader_class(Counting(4), num_workers=2, worker_init_fn=cases.init_failing)
    with pytest.raises(RuntimeError, match="the init function cannot start"):
        next(iter(loader))


def test_the_init_function_is_not_called_inline(loader_class: Loader) -> None:
    assert len(list(loader_class(Counting(4), num_workers=0, worker_init_fn=cases.init_failing))) == 4


class FailingSampler:
    """Yields two keys and fails."""

    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[Any]:
        yield from self.keys
        raise LookupError("the sampler lost its list")

    def __len__(self) -> int:
        return 3


@workers
@pytest.mark.parametrize(("argument", "keys"), [("sampler", [1, 0]), ("batch_sampler", [[1], [0, 1]])])
def test_an_error_of_the_sampler(make_loader: Make, num_workers: int, argument: str, keys: list[Any]) -> None:
    with pytest.raises(LookupError, match="the sampler lost its list"):
        for _ in make_loader(Counting(2), num_workers=num_workers, **{argument: FailingSampler(keys)}):
            pass


@workers
def test_an_index_out_of_range_is_an_index_error(make_loader: Make, num_workers: int) -> None:
    with pytest.raises(IndexError):
        list(make_loader(Counting(4), sampler=[0, 4], num_workers=num_workers))


@workers
def test_the_dataset_decides_what_is_out_of_range(make_loader: Make, num_workers: int) -> None:
    """Negative indices, and a length that is too small, are left to the dataset."""
    samples: Any = [10, 11, 12]
    assert [int(b) for b in make_loader(samples, sampler=[-1, 0], num_workers=num_workers)] == [12, 10]

    class Modest(Returning):
        def __len__(self) -> int:
            return 1

    assert [int(b) for b in make_loader(Modest(samples), sampler=[2, 1], num_workers=num_workers)] == [12, 11]


def test_a_timeout_needs_workers(loader_class: Loader) -> None:
    with pytest.raises(AssertionError):
        iter(loader_class(Counting(4), timeout=1))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_timeout_is_a_runtime_error_that_says_how_long(loader_class: Loader, gate: Gate, persistent: bool) -> None:
    loader = loader_class(Gated(4, 0, gate), num_workers=2, timeout=1, persistent_workers=persistent)
    batches = iter(loader)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after \d+ seconds"):
        next(batches)
    gate.open()  # its end waits for a busy worker


def test_no_timeout_while_batches_come(make_loader: Make) -> None:
    loader = make_loader(Counting(6), num_workers=2, timeout=60)
    assert torch.cat(list(loader)).tolist() == list(range(6))


@workers
def test_keyboard_interrupt_of_the_loop_passes_through(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Counting(8), num_workers=num_workers)

    def loop() -> None:
        for _ in loader:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loop()
    assert len(list(loader)) == 8


def test_an_empty_batch_cannot_be_collated(loader_class: Loader) -> None:
    iterator = iter(loader_class(TensorDataset(torch.arange(4)), batch_sampler=[[0], []]))
    next(iterator)
    with pytest.raises(IndexError):
        next(iterator)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the end of torch's unfinished iterator
def test_workers_must_be_asked_for_something(loader_class: Loader) -> None:
    loader = loader_class(Counting(4), num_workers=1, prefetch_factor=0)
    with pytest.raises(AssertionError):
        iter(loader)


@pytest.mark.parametrize("arguments", [{}, {"batch_size": None}, {"batch_size": 4, "drop_last": True}])
def test_a_dataset_without_a_length_fails_at_the_first_batch(loader_class: Any, arguments: dict[str, Any]) -> None:
    """With batches, after the draw of the seed: what the loop draws later is the same."""

    def found(loader_class: Any) -> tuple[Any, ...]:
        torch.manual_seed(0)
        iterators: list[Any] = []

        def begin() -> None:
            iterators.append(iter(loader_class(Dataset(), **arguments)))
            next(iterators[0])

        with pytest.raises(TypeError) as raised:
            begin()
        return str(raised.value), len(iterators), torch.randint(1 << 40, (1,)).item()

    assert found(loader_class) == found(torch.utils.data.DataLoader)
