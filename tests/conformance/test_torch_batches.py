"""torch's contract for batches: containers, types and values, with and without automatic batching."""

from __future__ import annotations

import random
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    default_convert,
    get_worker_info,
)
from torch_datasets import (
    Counting,
    CustomBatch,
    CustomDict,
    CustomList,
    Dicts,
    NamedTuples,
    Pair,
    Returning,
    Sample,
    Strings,
    collate_clone,
    collate_packed,
    collate_sum,
)

Make = Callable[..., DataLoader[Any]]
workers = pytest.mark.parametrize("num_workers", [0, 2])

SAMPLES: dict[str, list[Any]] = {
    "int": [1, 2, -1],
    "float": [1.5, 2.25, -0.75],
    "bool": [True, False, True],
    "str": ["a", "b", "c"],
    "bytes": [b"a", b"", b"cc"],
    "tensor": [torch.full((2, 3), float(i)) for i in range(3)],
    "tensor-bfloat16": [torch.full((2,), float(i), dtype=torch.bfloat16) for i in range(3)],
    "tensor-complex": [torch.tensor([i + 1j]) for i in range(3)],
    "tensor-bool": [torch.tensor([bool(i)]) for i in range(3)],
    "tensor-scalar": [torch.tensor(i) for i in range(3)],
    "tensor-empty": [torch.empty(0, 4) for _ in range(3)],
    "tensor-strided": [torch.arange(12).reshape(3, 4).t() + i for i in range(3)],
    "tensor-channels-last": [
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)[0] + i for i in range(3)
    ],
    "tensor-expanded": [torch.tensor([float(i)]).expand(4) for i in range(3)],
    "array": [np.full((2, 3), i, dtype=np.float32) for i in range(3)],
    "array-0d": [np.array(i, dtype=np.int16) for i in range(3)],
    "array-strided": [np.arange(12).reshape(3, 4).T + i for i in range(3)],
    "np-float64": [np.float64(i) for i in range(3)],
    "np-float16": [np.float16(i) for i in range(3)],
    "np-uint8": [np.uint8(i) for i in range(3)],
    "np-int32": [np.int32(i) for i in range(3)],
    "np-bool": [np.bool_(i) for i in range(3)],
    "list": [[i, float(i)] for i in range(3)],
    "tuple": [(i, "x") for i in range(3)],
    "tuple-nested": [(i, [torch.tensor(i), {"k": i}]) for i in range(3)],
    "dict": [{"a": i, "b": [i, i]} for i in range(3)],
    "dict-order": [{"b": i, "a": i} for i in range(3)],
    "ordered-dict": [OrderedDict(b=i, a=i) for i in range(3)],
    "default-dict": [defaultdict(list, a=i) for i in range(3)],
    "user-dict": [UserDict(a=i) for i in range(3)],
    "custom-dict": [CustomDict(a=i) for i in range(3)],
    "custom-list": [CustomList([i, i + 1]) for i in range(3)],
    "range": [range(2) for _ in range(3)],
    "named": [Sample(Pair(i, -i), str(i), torch.tensor([float(i)])) for i in range(3)],
    "empty-tuple": [() for _ in range(3)],
    "empty-dict": [{} for _ in range(3)],
}

REFUSED: dict[str, list[Any]] = {
    "none": [None, None],
    "object": [object(), object()],
    "array-str": [np.array(["a"]), np.array(["b"])],
    "array-object": [np.array([object()]), np.array([object()])],
    "lengths-of-lists": [["x"], ["x", "x"]],
    "shapes": [torch.zeros(2), torch.zeros(3)],
    "array-shapes": [np.zeros(2), np.zeros(3)],
    "keys": [{"a": 1}, {"b": 1}],
    "int-and-str": [1, "a"],
    "sets": [{1}, {2}],
}


def assert_same(ours: Any, theirs: Any) -> None:
    """Equal in value, in type at every level, in dtype, shape and stride."""
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.layout) == (theirs.dtype, theirs.shape, theirs.layout)
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours, theirs)
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    elif isinstance(theirs, (dict, UserDict)):
        assert list(ours) == list(theirs)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (list, tuple)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


@pytest.mark.parametrize("name", SAMPLES)
def test_batches_equal_torchs(loader_class: type[DataLoader[Any]], name: str) -> None:
    """Every container and element type, batched and not: torch's own inline loader is the reference."""
    dataset = Returning(SAMPLES[name])
    assert_same(list(loader_class(dataset, batch_size=None)), list(DataLoader(dataset, batch_size=None)))
    assert_same(list(loader_class(dataset, batch_size=2)), list(DataLoader(dataset, batch_size=2)))


@pytest.mark.parametrize(
    ("name", "batch_size"),
    [("str", 2), ("tensor", 2), ("tensor", None), ("array", None), ("tuple-nested", 2), ("dict", None), ("named", 2)],
)
def test_batches_of_workers_equal_torchs(make_loader: Make, name: str, batch_size: int | None) -> None:
    """A dataset of one kind of sample."""
    dataset = Returning(SAMPLES[name])
    loader = make_loader(dataset, batch_size=batch_size, num_workers=2)
    assert_same(list(loader), list(DataLoader(dataset, batch_size=batch_size)))


@pytest.mark.parametrize("batched", [False, True])
def test_workers_carry_every_kind_of_batch(make_loader: Make, batched: bool) -> None:
    """Every container and element type, one after the other through the same workers."""
    dataset = Returning([sample for samples in SAMPLES.values() for sample in samples])
    starts = range(0, len(dataset), 3)
    how: dict[str, Any] = {"batch_size": None}
    if batched:
        how = {"batch_sampler": [keys for start in starts for keys in ([start, start + 1], [start + 2])]}
    ours, theirs = list(make_loader(dataset, num_workers=2, **how)), list(DataLoader(dataset, **how))
    each = len(theirs) // len(SAMPLES)
    assert len(ours) == len(theirs) == each * len(SAMPLES)
    for number, name in enumerate(SAMPLES):
        part = slice(each * number, each * (number + 1))
        try:
            assert_same(ours[part], theirs[part])
        except AssertionError as error:
            error.add_note(f"of the samples {name!r}")
            raise


@pytest.mark.parametrize(
    ("name", "num_workers"),
    # The samples are collated by one function in every kind of worker.
    [*((name, 0) for name in REFUSED), *((name, 2) for name in [*REFUSED][::3])],
)
def test_what_torch_cannot_collate_is_refused_with_the_same_type(
    make_loader: Make, name: str, num_workers: int
) -> None:
    dataset = Returning(REFUSED[name])
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - torch's own error is expected
        list(DataLoader(dataset, batch_size=2))
    with pytest.raises(theirs.type):
        list(make_loader(dataset, batch_size=2, num_workers=num_workers))


@workers
def test_the_refusal_names_the_type(make_loader: Make, num_workers: int) -> None:
    with pytest.raises(TypeError, match="NoneType"):
        list(make_loader(Returning([None, None]), batch_size=2, num_workers=num_workers))


@workers
def test_strings_come_as_lists_of_strings(make_loader: Make, num_workers: int) -> None:
    for text, index in make_loader(Strings(), batch_size=2, shuffle=True, num_workers=num_workers):
        assert [Strings.text[i] for i in index] == list(text)


@workers
def test_dictionaries_nest(make_loader: Make, num_workers: int) -> None:
    for number, batch in enumerate(make_loader(Dicts(), batch_size=2, num_workers=num_workers)):
        assert batch["tensor"].shape == (2, 4, 2)
        assert batch["tensor"][:, 0, 0].tolist() == batch["inner"]["number"].tolist() == [2 * number, 2 * number + 1]


@workers
def test_named_tuples_keep_their_type(make_loader: Make, num_workers: int) -> None:
    (batch, _) = make_loader(NamedTuples(), batch_size=2, num_workers=num_workers)
    assert isinstance(batch, Sample)
    assert isinstance(batch.pair, Pair)
    assert batch.pair.negative.tolist() == [0, -1]
    single = next(iter(make_loader(NamedTuples(), batch_size=None, num_workers=num_workers)))
    assert isinstance(single, Sample)
    assert type(single.pair.positive) is int


@workers
def test_a_custom_collate_gets_the_list_of_samples(make_loader: Make, num_workers: int) -> None:
    assert list(make_loader(Counting(5), batch_size=2, collate_fn=collate_sum, num_workers=num_workers)) == [1, 5, 4]


@workers
def test_a_custom_collate_also_serves_single_samples(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(Counting(3), batch_size=None, collate_fn=str, num_workers=num_workers)
    assert list(loader) == ["0", "1", "2"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(SAMPLES["list"])


@pytest.mark.parametrize("collate_fn", [default_collate, default_convert])
@pytest.mark.parametrize("batch_size", [2, None])
@pytest.mark.parametrize("dataset", [Returning(SAMPLES["list"]), Stream()], ids=["map", "stream"])
def test_each_default_collate_function_may_be_passed(
    loader_class: type[DataLoader[Any]], dataset: Any, batch_size: int | None, collate_fn: Any
) -> None:
    how: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn}
    assert_same(list(loader_class(dataset, **how)), list(DataLoader(dataset, **how)))


def pairs() -> TensorDataset:
    return TensorDataset(torch.arange(50.0).reshape(10, 5), torch.arange(50.0).reshape(10, 5))


@workers
def test_batches_of_the_users_own_type(make_loader: Make, num_workers: int) -> None:
    for batch in make_loader(pairs(), batch_size=2, collate_fn=CustomBatch, num_workers=num_workers):
        assert isinstance(batch, CustomBatch)
        assert torch.equal(batch.inputs, batch.targets)


@workers
def test_packed_sequences_travel(make_loader: Make, num_workers: int) -> None:
    batches = list(make_loader(pairs(), batch_size=2, collate_fn=collate_packed, num_workers=num_workers))
    assert all(isinstance(batch, PackedSequence) for batch in batches)
    assert len(batches) == 5


@workers
def test_lambdas_and_closures_collate(make_loader: Make, num_workers: int) -> None:
    offset = 100
    loader = make_loader(
        Counting(4), batch_size=2, collate_fn=lambda b: [x + offset for x in b], num_workers=num_workers
    )
    assert list(loader) == [[100, 101], [102, 103]]


class Handle:
    """A value that pickles only as it is registered with multiprocessing."""

    def __init__(self, number: int, tensor: torch.Tensor) -> None:
        self.number, self.tensor = number, tensor

    def __reduce__(self) -> Any:
        raise TypeError("a handle is valid in its own process")


def handles_of(samples: list[int]) -> list[Any]:
    return [Handle(number, torch.full((10_000,), number)) for number in samples]


@workers
def test_types_registered_with_multiprocessing_travel(
    make_loader: Make, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducers: Any = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    monkeypatch.setitem(reducers, Handle, lambda handle: (Handle, (handle.number, handle.tensor)))
    batches = list(make_loader(Counting(4), batch_size=2, collate_fn=handles_of, num_workers=num_workers))
    assert [[handle.number for handle in batch] for batch in batches] == [[0, 1], [2, 3]]
    assert all(handle.tensor.eq(handle.number).all() for batch in batches for handle in batch)
    parameter = torch.nn.Parameter(torch.ones(3))  # torch registers a reducer of its own for it
    (sent,) = make_loader([parameter], batch_size=None, num_workers=num_workers)
    assert type(sent) is type(parameter)
    assert torch.equal(sent, parameter)


@workers
def test_tensor_datasets_and_stacks(make_loader: Make, num_workers: int) -> None:
    data, labels = torch.randn(10, 2, 3), torch.arange(10)
    dataset = StackDataset(image=TensorDataset(data), label=labels.tolist())
    (batch, _, _) = make_loader(dataset, batch_size=4, num_workers=num_workers)
    assert torch.equal(batch["image"][0], data[:4])
    assert torch.equal(batch["label"], labels[:4])


class Drawing(Dataset[Any]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, random.random() + float(torch.rand(1))


class DrawingMany(Drawing):
    """Draws once for all samples of a batch."""

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        drawn = float(torch.rand(1))
        return [(index, drawn) for index in indices]


STACKS: dict[str, Callable[[], Any]] = {
    "tuple": lambda: StackDataset(Drawing(), Drawing()),
    "dict": lambda: StackDataset(a=Drawing(), b=DrawingMany()),
    "Subset": lambda: Subset(StackDataset(DrawingMany(), Drawing()), [6, 5, 0, 2]),
    "nested": lambda: StackDataset(StackDataset(Drawing(), Drawing()), DrawingMany()),
}


@pytest.mark.parametrize("stack", STACKS)
def test_stacks_ask_one_part_after_the_other(loader_class: type[DataLoader[Any]], stack: str) -> None:
    """The order of random draws is torch's."""

    def batches(loader_class: Any) -> list[Any]:
        random.seed(3)
        torch.manual_seed(3)
        return list(loader_class(STACKS[stack](), batch_size=3, shuffle=True, collate_fn=list))

    assert batches(loader_class) == batches(DataLoader)


def rows_from(first: int) -> TensorDataset:
    return TensorDataset(torch.arange(first, first + 6))


def exchange(dataset: Any) -> None:
    """Exchange the inner dataset of a Subset, or the first of a ConcatDataset or StackDataset."""
    if isinstance(dataset, Subset):
        dataset.dataset = rows_from(100)
    else:
        parts = list(dataset.datasets)
        dataset.datasets = type(dataset.datasets)([rows_from(100), *parts[1:]])


WINDOWS: dict[str, Any] = {
    "slices": [slice(0, 2), slice(4, 6), slice(1, 3)],
    "lists of integers": [[0, 2], [1, 5], [3, 3]],
    "rows of an array": np.array([[0, 2], [1, 5], [3, 3]]),
    "windows of different lengths": [slice(0, 2), slice(1, 4)],
    "ragged lists": [[0, 2], [1]],
    "fractions": [0.0, 1.0],
    "a set": {0, 1},
}


@workers
@pytest.mark.parametrize("windows", WINDOWS)
@pytest.mark.parametrize("wrap", [lambda rows: rows, lambda rows: Subset(rows, range(6)), lambda rows: rows.tensors[0]])
def test_a_subset_selects_windows(
    loader_class: type[DataLoader[Any]], windows: str, wrap: Callable[[Any], Any], num_workers: int
) -> None:
    """Its indices may be whatever the inner dataset takes; what it does not take is the same error."""

    def batches(loader_class: Any, num_workers: int) -> Any:
        try:
            return str(list(loader_class(Subset(wrap(rows_from(0)), WINDOWS[windows]), 2, num_workers=num_workers)))
        except (IndexError, RuntimeError, TypeError) as error:
            return type(error)

    assert batches(loader_class, num_workers) == batches(DataLoader, 0)


def exchange_in_worker(_: int) -> None:
    exchange(get_worker_info().dataset)


@pytest.mark.parametrize("in_worker", [False, True])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda: Subset(rows_from(0), range(6)),
        lambda: ConcatDataset([rows_from(0), rows_from(10)]),
        lambda: StackDataset(rows_from(0), rows_from(10)),
    ],
)
def test_an_exchanged_inner_dataset_is_read(
    loader_class: type[DataLoader[Any]], wrap: Callable[[], Any], in_worker: bool
) -> None:
    def batches(loader_class: Any) -> list[Any]:
        dataset, seen = wrap(), []
        how = {"num_workers": 1, "worker_init_fn": exchange_in_worker} if in_worker else {}
        for batch in loader_class(dataset, 2, **how):
            seen.append(str(batch))
            if not in_worker:
                exchange(dataset)
        return seen

    assert batches(loader_class) == batches(DataLoader)


@workers
def test_memory_mapped_rows(make_loader: Make, num_workers: int, tmp_path: Any) -> None:
    rows = np.arange(8).reshape(4, 2)
    np.save(tmp_path / "rows.npy", rows)
    dataset: Any = np.load(tmp_path / "rows.npy", mmap_mode="c")
    (batch,) = make_loader(dataset, batch_size=4, num_workers=num_workers)
    assert torch.equal(batch, torch.from_numpy(rows))


@workers
def test_two_views_of_one_tensor_stay_two_views(make_loader: Make, num_workers: int) -> None:
    def views(samples: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.zeros(4)
        return whole[:2], whole[1:]

    first, second = next(iter(make_loader(Counting(2), batch_size=2, collate_fn=views, num_workers=num_workers)))
    first[1] = 7
    assert second[0] == 7


@workers
def test_batches_are_the_users_to_write_and_to_keep(make_loader: Make, num_workers: int) -> None:
    kept = []
    for batch in make_loader(Counting(40), batch_size=2, num_workers=num_workers):
        batch += 1000
        kept.append(batch)
    assert torch.cat(kept).tolist() == list(range(1000, 1040))


@workers
def test_a_list_or_tuple_of_a_loader_is_its_epoch(make_loader: Make, num_workers: int) -> None:
    for container in (list, tuple):
        batches = container(make_loader(Counting(6), batch_size=2, num_workers=num_workers))
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@workers
def test_nested_tensors(make_loader: Make, num_workers: int) -> None:
    samples = [torch.nested.nested_tensor([torch.full((5,), float(i))], layout=torch.strided) for i in range(4)]
    dataset = Returning(samples)
    for i, batch in enumerate(make_loader(dataset, collate_fn=collate_clone, num_workers=num_workers)):
        assert torch.equal(batch[0][0], samples[i][0])
    with pytest.raises(RuntimeError, match="not currently supported by the default collate_fn"):
        list(make_loader(dataset, num_workers=num_workers))


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@workers
def test_sparse_tensors(make_loader: Make, num_workers: int, layout: torch.layout) -> None:
    samples = [(i * torch.eye(3)).to_sparse(layout=layout) for i in range(4)]
    batches = list(make_loader(Returning(samples), batch_size=2, collate_fn=list, num_workers=num_workers))
    assert [sample.layout for batch in batches for sample in batch] == [layout] * 4
    assert [sample.sum().item() for batch in batches for sample in batch] == [0, 3, 6, 9]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="states what happens without an accelerator")
@workers
def test_pinning_without_an_accelerator_warns_and_works(make_loader: Make, num_workers: int) -> None:
    loader = make_loader(pairs(), batch_size=5, pin_memory=True, num_workers=num_workers)
    with pytest.warns(UserWarning, match="'pin_memory' argument is set as true but no accelerator is found"):
        batches = list(loader)
    assert [batch[0].shape for batch in batches] == [(5, 5), (5, 5)]
    assert not batches[0][0].is_pinned()


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="pinned memory needs an accelerator")
@workers
def test_pinning_reaches_every_tensor(make_loader: Make, num_workers: int) -> None:
    for batch in make_loader(Dicts(), batch_size=2, pin_memory=True, num_workers=num_workers):
        assert batch["tensor"].is_pinned()
        assert batch["inner"]["number"].is_pinned()
    for batch in make_loader(pairs(), batch_size=2, pin_memory=True, collate_fn=CustomBatch, num_workers=num_workers):
        assert batch.inputs.is_pinned()
        assert batch.targets.is_pinned()


@workers
def test_the_default_dtype_of_the_training_process_holds_in_workers(make_loader: Make, num_workers: int) -> None:
    class MakesFloats(Counting):
        def __getitem__(self, index: int) -> Any:
            return torch.tensor(float(index))

    torch.set_default_dtype(torch.float64)
    try:
        (batch,) = make_loader(MakesFloats(3), batch_size=3, num_workers=num_workers)
    finally:
        torch.set_default_dtype(torch.float32)
    assert batch.dtype == torch.float64


class MixedRows(Dataset[Any]):
    """Rows of `dtypes`, in turn; with a gradient where `dtypes` is empty."""

    def __init__(self, *dtypes: torch.dtype, size: int = 1) -> None:
        self.dtypes, self.size = dtypes, size

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.dtypes:
            return torch.ones(self.size, requires_grad=True)
        return torch.full((self.size,), 300 + index).to(self.dtypes[index % len(self.dtypes)])


MIXTURES = {
    "narrow": (torch.int8, torch.int64), "wide": (torch.int64, torch.int8), "half": (torch.float16, torch.float64),
    "refused": (torch.int64, torch.float32), "gradient": (),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXTURES)
def test_in_workers_the_first_sample_decides_the_dtype(loader_class: type[DataLoader[Any]], name: str) -> None:
    dtypes = MIXTURES[name]
    for size in (1, 20_000):  # small batches travel another way than large ones
        batches = iter(loader_class(MixedRows(*dtypes, size=size), batch_size=2, num_workers=1))
        if name in ("refused", "gradient"):  # torch can store neither in memory of the first sample's kind
            with pytest.raises((TypeError, RuntimeError), match=r"desired output type|automatic differentiation"):
                next(batches)
        else:
            expected = torch.stack([row.to(dtypes[0]) for row in (MixedRows(*dtypes)[0], MixedRows(*dtypes)[1])])
            batch = next(batches)
            assert batch.dtype == dtypes[0]
            assert torch.equal(batch[:, :1], expected)


class Stubborn:
    """Its attributes, and comparisons with it, raise."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise KeyError(name)

    def __eq__(self, other: object) -> bool:
        raise TypeError("cannot be compared")

    __hash__ = None  # type: ignore[assignment]


class Willing:
    """Has an attribute of any name, as mocks and remote proxies."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: None


def map_style(odd: type) -> dict[str, Any]:
    members = {"__len__": lambda _: 4, "__getitem__": lambda _, index: index}
    return {"dataset": type("Map", (odd,), members)()}


def stream(odd: type) -> dict[str, Any]:
    return {"dataset": type("Stream", (odd, IterableDataset), {"__iter__": lambda _: iter(range(4))})()}


def indices(odd: type, items: Any) -> Any:
    return type("Indices", (odd,), {"__len__": lambda _: len(items), "__iter__": lambda _: iter(items)})()


def own_batch_sampler(_: type) -> dict[str, Any]:
    sampler = indices(object, [[0, 1], [2]])
    sampler.batch_sampler = sampler
    return {"batch_sampler": sampler}


ODD: dict[str, Callable[[type], dict[str, Any]]] = {
    "dataset": map_style,
    "stream": stream,
    "sampler": lambda odd: {"sampler": indices(odd, [2, 0])},
    "batch sampler": lambda odd: {"batch_sampler": indices(odd, [[2, 0], [1]])},
    "its own batch sampler": own_batch_sampler,
    "collate function": lambda odd: {"collate_fn": type("Collate", (odd,), {"__call__": lambda _, rows: rows})()},
    "init function": lambda odd: {
        "worker_init_fn": type("Init", (odd,), {"__call__": lambda _, __: None})(), "num_workers": 1,
    },
}  # fmt: skip


@pytest.mark.parametrize("odd", [Stubborn, Willing])
@pytest.mark.parametrize("what", ODD)
def test_objects_with_odd_attributes(loader_class: type[DataLoader[Any]], what: str, odd: type) -> None:
    def batches(loader_class: Any) -> list[Any]:
        return [str(batch) for batch in loader_class(**{"dataset": [0, 1, 2, 3], **ODD[what](odd)})]

    assert batches(loader_class) == batches(DataLoader)


class Made(Dataset[Any]):
    """Samples that a function makes in the worker."""

    def __init__(self, make: Callable[[int], Any], size: int) -> None:
        self.make, self.size = make, size

    def __getitem__(self, index: int) -> Any:
        return self.make(index)

    def __len__(self) -> int:
        return self.size


def views(_: int) -> list[Any]:
    """Arrays and tensors over the same memory, as windows of a series and crops of an image are."""
    array = np.arange(6.0)
    tensor = torch.from_numpy(array)
    return [array, array[2:4], array[::2], tensor, tensor[1:3], torch.from_numpy(array), array]


@pytest.mark.parametrize("how", [{"batch_size": None}, {"collate_fn": list}], ids=["samples", "lists"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_shares_memory_in_a_batch(
    loader_class: type[DataLoader[Any]], num_workers: int, how: dict[str, Any]
) -> None:
    """What the loop writes to one of them shows in the others only where it does with torch."""

    def written(loader_class: Any) -> list[Any]:
        found = []
        for number in range(7):
            for batch in loader_class(Made(views, 1), num_workers=num_workers, **how):
                sample = batch if how.get("batch_size", 1) is None else batch[0]
                sample[number][...] = -1.0
                found.append([[float(value) for value in each] for each in sample])
        return found

    assert written(loader_class) == written(DataLoader)


def mapped(path: Any) -> np.memmap[Any, Any]:
    return np.memmap(path, np.float32, "w+", shape=(3, 2))


@workers
def test_mapped_rows_keep_their_type(loader_class: type[DataLoader[Any]], num_workers: int, tmp_path: Any) -> None:
    (batch,) = loader_class(mapped(tmp_path / "rows"), batch_size=3, num_workers=num_workers, collate_fn=list)
    assert [type(row) for row in batch] == [np.memmap] * 3


def family(number: int) -> dict[str, Any]:
    parent: dict[str, Any] = {"number": number, "children": []}
    parent["children"] += [{"number": number + 1, "parent": parent}]
    return parent


def nested(depth: int) -> Any:
    value: Any = depth
    for _ in range(depth):
        value = [value]
    return value


@workers
def test_samples_that_refer_to_themselves_or_are_nested_deeply(make_loader: Make, num_workers: int) -> None:
    found = [batch[0] for batch in make_loader(Made(family, 3), 1, collate_fn=list, num_workers=num_workers)]
    assert [sample["children"][0]["parent"] is sample for sample in found] == [True] * 3
    (batch,) = make_loader([nested(200)] * 2, 2, num_workers=num_workers)
    for _ in range(200):
        (batch,) = batch
    assert batch.tolist() == [200, 200]
