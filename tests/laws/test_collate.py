"""`collate.default` equals torch's `default_collate` for every structure of samples."""

from __future__ import annotations

import warnings
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from law_settings import law_settings
from torch.utils.data import default_collate

from feedline import collate

Make = Callable[[Any], Any]


class Point(NamedTuple):
    x: Any
    y: Any


class FrozenMapping(Mapping[str, Any]):
    """Cannot be changed, and can be made from items."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class FrozenSequence(Sequence[Any]):
    """Cannot be changed, and can be made from items."""

    def __init__(self, items: Sequence[Any]) -> None:
        self._items = list(items)

    def __getitem__(self, index: Any) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)


class NamedDict(dict[str, Any]):
    """Has an attribute in addition to its items."""

    def __init__(self, name: str, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.name = name


def as_defaultdict(items: Mapping[str, Any]) -> defaultdict[str, Any]:
    return defaultdict(list, items)


MAPPINGS: list[Make] = [
    dict,
    OrderedDict,
    UserDict,
    MappingProxyType,
    FrozenMapping,
    as_defaultdict,
    lambda items: NamedDict("a name", items),
]
SEQUENCES: list[Make] = [list, tuple, UserList, deque, FrozenSequence]

TORCH_DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.uint16, torch.bool]
NUMPY_DTYPES = ["f4", "f8", "f2", "i8", "i4", "u1", "u2", "u8", "?", "c8", ">f4", "U2", "S2", "O", "M8[s]"]
SCALARS = [
    *(np.float16, np.float32, np.float64, np.longdouble, np.int8, np.int32, np.int64, np.complex64),
    *(np.uint8, np.uint16, np.uint32, np.uint64, np.bool_, np.str_),
]
SHAPES = [(), (1,), (3,), (0,), (2, 3), (3, 0), (1, 2, 2)]


def tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    values = torch.arange(int(np.prod(shape))).reshape(shape) + seed
    return values.to(dtype)


def array(dtype: str, shape: tuple[int, ...], seed: int, layout: str) -> Any:
    values = np.arange(seed, seed + int(np.prod(shape))).reshape(shape).astype(dtype)
    if layout == "reversed":
        return values[::-1] if shape else values
    if layout == "strided":
        return np.repeat(values, 2, axis=-1)[..., ::2] if shape else values
    values.flags.writeable = layout != "read-only"
    return values


@st.composite
def leaf_columns(draw: st.DrawFn, size: int) -> list[Any]:
    """One leaf of each sample, mostly of one kind, sometimes mixed."""
    seeds = st.integers(0, 50)
    kind = draw(st.sampled_from(["tensor", "array", "scalar", "number", "text", "strange"]))
    if kind in ("tensor", "array"):
        dtypes: Any = TORCH_DTYPES if kind == "tensor" else NUMPY_DTYPES
        some = draw(st.lists(st.sampled_from(dtypes), min_size=1, max_size=2))
        shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=2))
        layouts = draw(st.lists(st.sampled_from(["plain", "plain", "reversed", "strided", "read-only"]), min_size=1))
        made = [(some[i % len(some)], shapes[i % len(shapes)], draw(seeds)) for i in range(size)]
        if kind == "tensor":
            return [tensor(*each) for each in made]
        return [array(*each, layouts[i % len(layouts)]) for i, each in enumerate(made)]
    if kind == "scalar":
        kinds = draw(st.lists(st.sampled_from(SCALARS), min_size=1, max_size=2))
        return [kinds[i % len(kinds)](draw(seeds)) for i in range(size)]
    numbers = {
        "number": st.sampled_from(
            [st.integers(-9, 9), st.booleans(), st.floats(), st.integers(), st.integers() | st.floats() | st.booleans()]
        ),
        "text": st.sampled_from([st.text(max_size=3), st.binary(max_size=3), st.text(max_size=1) | st.integers()]),
        "strange": st.sampled_from(
            [st.none(), st.complex_numbers(), st.sets(seeds), st.none() | seeds, st.just(object())]
        ),
    }
    each = draw(numbers[kind])
    return [draw(each) for _ in range(size)]


@st.composite
def columns(draw: st.DrawFn, size: int, depth: int = 2) -> list[Any]:
    """The values of `size` samples at one place."""
    if depth == 0 or draw(st.booleans()):
        return draw(leaf_columns(size))
    shape = draw(st.sampled_from(["mapping", "sequence", "named"]))
    parts = [draw(columns(size, depth - 1)) for _ in range(2 if shape == "named" else draw(st.integers(0, 3)))]
    rows: list[list[Any]] = [[part[i] for part in parts] for i in range(size)]
    if shape == "named":
        return [Point(*row) for row in rows]
    odd = draw(st.integers(0, 20 * size))  # sometimes a sample lacks its last part
    rows = [row[:-1] if i == odd else row for i, row in enumerate(rows)]
    if shape == "mapping":
        make = draw(st.sampled_from(MAPPINGS))
        return [make({f"k{j}": value for j, value in enumerate(row)}) for row in rows]
    make = draw(st.sampled_from(SEQUENCES))
    return [make(row) for row in rows]


batches = st.integers(1, 4).flatmap(columns)


class Ran:
    """The result of a collate function, or the type of its exception."""

    def __init__(self, collated: Callable[[Any], Any], batch: Any) -> None:
        self.error: type[BaseException] | None = None
        self.batch: Any = None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only arrays, which we only read
            try:
                self.batch = collated(batch)
            except Exception as error:  # noqa: BLE001 - its type is compared
                self.error = type(error)


def assert_same(ours: Any, theirs: Any) -> None:
    assert type(ours) is type(theirs)
    if isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert ours.stride() == theirs.stride()
        assert torch.equal(ours.nan_to_num(7), theirs.nan_to_num(7))
    elif isinstance(theirs, Mapping):
        assert list(ours) == list(theirs)
        assert getattr(ours, "name", None) == getattr(theirs, "name", None)
        assert getattr(ours, "default_factory", None) == getattr(theirs, "default_factory", None)
        for key in theirs:
            assert_same(ours[key], theirs[key])
    elif isinstance(theirs, (Sequence, deque)) and not isinstance(theirs, (str, bytes)):
        assert len(ours) == len(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            assert_same(mine, other)
    else:
        assert ours == theirs


@law_settings(at_least=600)
@given(batches)
def test_equals_torchs_default_collate(batch: list[Any]) -> None:
    ours, theirs = Ran(collate.default, batch), Ran(default_collate, batch)
    assert ours.error is theirs.error
    assert_same(ours.batch, theirs.batch)


@law_settings(at_least=400)
@given(batches)
def test_the_allocator_changes_nothing(batch: list[Any]) -> None:
    ours, theirs = (
        Ran(lambda samples: collate.default(samples, allocate=uninitialized), batch),
        Ran(default_collate, batch),
    )
    assert ours.error is theirs.error
    assert_same(ours.batch, theirs.batch)


def uninitialized(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Memory with arbitrary content, so that unwritten parts show."""
    return (
        torch.full(shape, 1, dtype=torch.uint8).to(dtype) if dtype == torch.bool else torch.full(shape, 113).to(dtype)
    )


@st.composite
def sequences(draw: st.DrawFn) -> list[torch.Tensor]:
    lengths = draw(st.lists(st.integers(0, 9), min_size=1, max_size=8))
    trailing = draw(st.sampled_from([(), (2,)]))
    return [torch.full((length, *trailing), i + 1) for i, length in enumerate(lengths)]


@given(
    sequences(),
    st.sampled_from(["right", "left"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([None, 4, 8]),
    st.integers(-3, 0),
)
def test_padding_keeps_every_token_it_may_and_adds_only_the_value(
    rows: list[torch.Tensor], side: Any, multiple_of: int, max_length: int | None, value: int
) -> None:
    padded = collate.pad(value, side=side, multiple_of=multiple_of, max_length=max_length)(rows)
    kept = [row[:max_length] for row in rows]
    assert padded.lengths.tolist() == [len(row) for row in kept]
    assert padded.values.shape[1] % multiple_of == 0
    assert 0 <= padded.values.shape[1] - max(map(len, kept)) < multiple_of
    for values, mask, row in zip(padded.values, padded.mask, kept, strict=True):
        assert torch.equal(values[mask], row)
        assert (values[~mask] == value).all()
        place = slice(0, len(row)) if side == "right" else slice(len(mask) - len(row), None)
        assert mask[place].all()
        assert mask.sum() == len(row)


@given(st.lists(st.integers(0, 16), min_size=1, max_size=30))
def test_packing_keeps_every_sequence_whole_and_once(lengths: list[int]) -> None:
    samples = [torch.arange(length) + 100 * i for i, length in enumerate(lengths)]
    packed = collate.token_budget(16, value=-1)(samples)
    assert sorted(packed.order.tolist()) == list(range(len(lengths)))
    flat, bounds = packed.values.flatten(), packed.cu_seqlens.tolist()
    assert bounds[0] == 0
    assert bounds[-1] == flat.numel()
    pieces = [flat[start:stop] for start, stop in pairwise(bounds)]
    found = [piece.tolist() for piece in pieces if piece[0] >= 0]
    assert found == [samples[i].tolist() for i in packed.order.tolist() if lengths[i]]
    assert ((packed.values == -1) == (packed.segments == 0)).all()
    assert torch.equal(packed.positions, torch.where(packed.segments > 0, packed.values % 100, 0))


@given(st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_packing_wastes_no_row(lengths: list[int]) -> None:
    packed = collate.token_budget(16)([torch.ones(length) for length in lengths])
    used = sorted((packed.segments > 0).sum(1).tolist())
    assert len(used) == 1 or used[0] + used[1] > 16  # two rows that fit into one would have been one
