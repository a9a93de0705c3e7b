"""Columns of remote Arrow files, read buffer by buffer: as pyarrow reads them, and local files."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from law_settings import Reason, law_settings

from feedline.core.tree import leaves
from feedline.datasets import Arrow
from feedline.datasets.tables.arrow_batches import validate_batch
from feedline.errors import ArgumentError, SampleError
from feedline.stores import Cache, statistics

FRESH = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
Typed = tuple[Any, st.SearchStrategy[Any]]
"""An Arrow type with its values."""


def whole_numbers(kind: Any, **more: Any) -> Typed:
    info = np.iinfo(kind.to_pandas_dtype())
    return kind, st.integers(int(info.min), int(info.max), **more)


FLAT: list[Typed] = [
    (pa.bool_(), st.booleans()),
    whole_numbers(pa.int8()),
    whole_numbers(pa.uint16()),
    whole_numbers(pa.int64()),
    (pa.float32(), st.floats(width=32, allow_nan=False)),
    (pa.timestamp("us"), st.integers(0, 1 << 40)),
    (pa.decimal128(9, 2), st.integers(-999, 999).map(lambda value: Decimal(value) / 100)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
]
TENSORS: Typed = (pa.fixed_shape_tensor(pa.int16(), [2, 1]), st.lists(st.integers(0, 9), min_size=2, max_size=2))
RAGGED: list[Typed] = [
    (pa.string(), st.text(max_size=20)),
    (pa.large_binary(), st.binary(max_size=20)),
    (pa.string_view(), st.text(max_size=20)),
    (pa.binary_view(), st.binary(max_size=20)),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["", "a", "bc", "a longer text than a view"])),
    (pa.dictionary(pa.int32(), pa.int16(), ordered=True), st.integers(0, 5)),
]


def nested(inner: Typed, *, ragged: bool) -> st.SearchStrategy[Typed]:
    kind, values = inner
    fixed = st.integers(1, 3).map(lambda n: (pa.list_(kind, n), st.lists(values, min_size=n, max_size=n)))
    struct = st.just((pa.struct({"p": kind, "q": pa.int8()}), st.fixed_dictionaries({"p": values, "q": st.just(1)})))
    lists = st.sampled_from([pa.list_(kind), pa.large_list(kind)]).map(lambda of: (of, st.lists(values, max_size=3)))
    return fixed | struct | lists if ragged else fixed | struct


def typed(*, ragged: bool) -> st.SearchStrategy[Typed]:
    def more(inner: Typed) -> st.SearchStrategy[Typed]:
        return nested(inner, ragged=ragged)

    plain = st.sampled_from(FLAT + RAGGED if ragged else FLAT)
    return plain | plain.flatmap(more) | plain.flatmap(more).flatmap(more) | st.just(TENSORS)


def plain_columns(rows: int) -> dict[str, Any]:
    """Columns of types that are never chosen, because no sample can hold them."""
    numbers, texts = pa.array(range(rows), pa.int8()), pa.array([f"text {row}" for row in range(rows)])
    which = pa.array([row % 2 for row in range(rows)], pa.int8())
    return {
        "null": pa.nulls(rows),
        "map": pa.array([[("k", row)] * (row % 3) for row in range(rows)], pa.map_(pa.string(), pa.int32())),
        "lists": pa.array([[row] * (row % 3) for row in range(rows)], pa.list_view(pa.int64())),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([rows][: bool(rows)], pa.int32()), ["a"][: bool(rows)]),
        "sparse": pa.UnionArray.from_sparse(which, [numbers, texts]),
        "dense": pa.UnionArray.from_dense(which, pa.array(range(rows), pa.int32()), [numbers, texts]),
        "interval": pa.array([(1, 2, 3)] * rows, pa.month_day_nano_interval()),
    }


class Written(NamedTuple):
    """A file or a stream, the columns that are chosen, and the rows of each record batch."""

    data: bytes
    columns: list[str]
    sizes: list[int]
    is_stream: bool


@st.composite
def written(draw: Any, *, ragged: bool = True) -> Written:
    """Slices of arrays that begin anywhere, so that their bits and offsets begin within those of the arrays."""
    skipped, sizes = draw(st.integers(0, 9)), draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))
    rows, has_nulls = skipped + sum(sizes), draw(st.booleans())
    chosen: dict[str, Any] = {}
    for number in range(draw(st.integers(1, 3))):
        kind, values = draw(typed(ragged=ragged))
        some = st.lists(st.none() | values if has_nulls else values, min_size=rows, max_size=rows)
        chosen[f"c{number}"] = array_of(draw(some), kind)
    others = plain_columns(rows)
    columns = chosen | {name: others[name] for name in draw(st.sets(st.sampled_from(list(others)), max_size=3))}
    order = draw(st.permutations(list(columns)))
    whole = pa.record_batch([columns[name] for name in order], names=order)
    stream, codec = draw(st.booleans()), draw(st.sampled_from([None, "lz4", "zstd"])) if ragged else None
    file = io.BytesIO()
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(file, whole.schema, options=options) as writer:
        for start, size in zip(np.cumsum([skipped, *sizes[:-1]]).tolist(), sizes, strict=True):
            writer.write_batch(whole.slice(start, size))
    return Written(file.getvalue(), draw(st.permutations(list(chosen))), sizes, stream)


def array_of(values: list[Any], kind: Any) -> Any:
    if isinstance(kind, pa.BaseExtensionType):
        return pa.ExtensionArray.from_storage(kind, pa.array(values, kind.storage_type))
    return pa.array(values, kind)


def batches_of(data: bytes, *, is_stream: bool) -> list[Any]:
    if is_stream:
        return list(pa.ipc.open_stream(data))
    reader = pa.ipc.open_file(data)
    return [reader.get_batch(number) for number in range(reader.num_record_batches)]


def same(ours: Any, theirs: Any) -> bool:
    return all(
        one.type == other.type and one.to_pylist() == other.to_pylist() for one, other in zip(ours, theirs, strict=True)
    )


class Places(NamedTuple):
    """The same file here and in a store."""

    here: Path
    there: str


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Places]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    yield Places(tmp_path / "a.arrow", "memory://laws/a.arrow")
    fsspec.filesystem("memory").rm("/laws", recursive=True)


def opened(source: Any, file: Written, **options: Any) -> Arrow:
    """Replace null by 0, if the column can have it."""
    try:
        return Arrow(source, file.columns, nulls=0, **options)
    except ArgumentError:
        return Arrow(source, file.columns, **options)


def reported(fetch: Callable[[], Any], places: Places) -> Any:
    """The result, or the error without its place."""
    try:
        found = fetch()
    except SampleError as error:
        return str(error).replace(str(places.here), "").replace(places.there, "")
    return [each.tolist() if hasattr(each, "tolist") else each for each in leaves(found)]


@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(file=written())
def test_chosen_columns_are_those_of_the_whole(places: Places, file: Written) -> None:
    fsspec.filesystem("memory").pipe("/laws/a.arrow", file.data)
    chosen = opened(places.there, file)
    objects = chosen._rows._chunks  # type: ignore[attr-defined]
    wholes = [batch for batch in batches_of(file.data, is_stream=file.is_stream) if batch.num_rows]
    for number, whole in enumerate(wholes):
        made = objects.batch(number)
        validate_batch(made)
        assert same([made[name] for name in file.columns], [whole[name] for name in file.columns])
    assert len(objects.sizes) == len(wholes)


@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(file=written(), data=st.data())
def test_damage_is_an_error_or_gives_columns(places: Places, file: Written, data: st.DataObject) -> None:
    bad = bytearray(file.data)
    for _ in range(data.draw(st.integers(1, 3))):
        bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    fsspec.filesystem("memory").pipe("/laws/a.arrow", bytes(bad))
    places.here.write_bytes(bad)
    for source, cache_nbytes in ((places.here, 0), (places.there, 1 << 20), (places.there, 0)):
        with suppress(SampleError, ArgumentError):
            dataset = opened(source, file, cache_nbytes=cache_nbytes)
            for index in range(len(dataset)):
                with suppress(SampleError):
                    dataset[index]


@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(file=written() | written(ragged=False), keeps=st.booleans(), data=st.data())
def test_samples_are_those_of_this_machine(places: Places, file: Written, keeps: bool, data: st.DataObject) -> None:
    places.here.write_bytes(file.data)
    fsspec.filesystem("memory").pipe("/laws/a.arrow", file.data)
    near = opened(places.here, file)
    far = opened(places.there, file, cache_nbytes=1 << 20 if keeps else 0)
    assert far.kind == near.kind
    assert far.shard_sizes.tolist() == near.shard_sizes.tolist() == [size for size in file.sizes if size]
    if not len(near):
        return
    indices = data.draw(st.lists(st.integers(-len(near), len(near) - 1), min_size=1, max_size=8))
    for index in indices:
        assert reported(lambda at=index: far[at], places) == reported(lambda at=index: near[at], places)
    found, wanted = (reported(lambda data=data: data.__getitems__(indices), places) for data in (far, near))
    assert found == wanted or (isinstance(found, str) and isinstance(wanted, str))  # another null may be found first


@law_settings(at_most=25, because=Reason.COSTLY, suppress_health_check=FRESH)
@given(file=written() | written(ragged=False), keeps=st.booleans(), data=st.data())
def test_prefetched_ranges_are_those_that_are_read(
    places: Places, tmp_path_factory: Any, file: Written, keeps: bool, data: st.DataObject
) -> None:
    fsspec.filesystem("memory").pipe("/laws/a.arrow", file.data)
    if file.is_stream:
        opened(places.there, file)  # keeps the layout, which is found by reading all: the cache would have each piece
    cache = Cache(tmp_path_factory.mktemp("cache"), limit="10 MB", piece_nbytes=8)
    far = opened(places.there, file, cache_nbytes=1 << 20 if keeps else 0, cache=cache)
    if not len(far):
        return
    indices = np.array(data.draw(st.lists(st.integers(0, len(far) - 1), min_size=1, max_size=4)))
    for store, want in far.ranges(indices):
        store.fetch_range(*want)
    before = statistics()
    with suppress(SampleError):  # for a null, which is found once everything was read
        far.__getitems__(indices.tolist())
    after = statistics()
    assert (after.nbytes, after.cache_misses) == (before.nbytes, before.cache_misses)
