"""The native kernels and their NumPy twins have equal results, and refuse bad input before they write."""

from __future__ import annotations

import sys
import threading
import zlib
from collections.abc import Callable
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from preloaded import IMPORTS_FEEDLINE, Preloaded

from feedline.core import kernels as _kernels

MEGABYTE = 1 << 20

lengths = st.one_of(st.integers(1, 2000), st.integers(1, 1 << 61), st.sampled_from([1, 2, 128, 129, 256, 257]))
keys = st.integers(0, (1 << 64) - 1)


@pytest.fixture(params=["native", "numpy"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module, once with its native half and once without."""
    if request.param == "numpy":
        monkeypatch.setattr(_kernels, "native", None)
        monkeypatch.setattr(_kernels, "_warn_slow", lambda: None)
    return _kernels


def test_the_native_kernels_were_built() -> None:
    assert _kernels.native is not None


@given(keys, lengths, st.data())
def test_permuted_equals_its_numpy_form(key: int, length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, min(length, start + 1500)))
    wanted = _kernels._permuted_numpy(key, length, start, stop)
    np.testing.assert_array_equal(_kernels.permuted(key, length, start, stop), wanted)


@given(keys, lengths, st.data())
def test_scattered_places_equal_the_range(key: int, length: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + 700)
    places = np.array(data.draw(st.lists(st.integers(start, stop - 1))), np.int64)
    wanted = _kernels.permuted(key, length, start, stop)[places - start]
    np.testing.assert_array_equal(_kernels.permuted_at(key, length, places), wanted)
    np.testing.assert_array_equal(_kernels._permuted_at_numpy(key, length, places), wanted)


@given(st.binary(max_size=700), st.integers(0, 17))
def test_crc32_is_zlibs(data: bytes, start: int) -> None:
    part = memoryview(data)[start:]
    assert _kernels.crc32(part) == zlib.crc32(part)


def test_crc32_refuses_what_has_gaps() -> None:
    if _kernels.crc32 is zlib.crc32:
        pytest.skip("this processor does not multiply polynomials")
    with pytest.raises(TypeError, match="bytes without gaps"):
        _kernels.crc32(memoryview(bytes(10))[::2])


def test_permutations_never_change() -> None:
    """Saved states rely on these numbers."""
    assert _kernels.permuted(0, 10, 0, 10).tolist() == [6, 0, 1, 9, 3, 7, 4, 8, 5, 2]
    assert _kernels.permuted(42, 10**12, 10**11, 10**11 + 3).tolist() == [154309020062, 290696311185, 611464753041]


@given(
    hnp.arrays(
        st.sampled_from([np.uint8, np.int16, np.float32, np.float64, np.complex128, "S3", "U5", ">i4", "M8[s]"]),
        hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=7),
    ),
    st.data(),
)
def test_gathered_rows_are_indexed_rows(array: np.ndarray, data: st.DataObject) -> None:
    steps = data.draw(st.sampled_from([slice(None), slice(None, None, 2), slice(None, None, -1)]))
    array = array[steps]
    if not len(array):
        return
    indices = np.array(data.draw(st.lists(st.integers(-len(array), len(array) - 1), max_size=90)), np.int64)
    wanted = array[indices]
    native, plain = np.empty_like(wanted), np.empty_like(wanted)
    _kernels.gather_rows(array, indices, native)
    _kernels._gather_rows_numpy(array, indices, plain)
    np.testing.assert_array_equal(native, wanted)
    np.testing.assert_array_equal(plain, wanted)


@pytest.mark.parametrize("nbytes", [1, 2, 3, 4, 8, 12, 16, 24, 32, 33, 64, 100, 4096, 5000, 70_000])
def test_rows_of_every_length(nbytes: int) -> None:
    rng = np.random.default_rng(nbytes)
    array = rng.integers(0, 256, (50, nbytes), np.uint8)
    indices = rng.integers(-50, 50, max(70, 3 * MEGABYTE // nbytes if nbytes > 1000 else 0))
    for threads in (1, 3):
        np.testing.assert_array_equal(_kernels.gather_rows(array, indices, threads=threads), array[indices])


def test_rows_of_columns(kernels: Any) -> None:
    array = np.arange(60).reshape(6, 10)
    indices = np.array([4, 0, -1])
    for view in (array[:, 2:5], array[:, ::3], array.T, array[1:, :1]):
        np.testing.assert_array_equal(kernels.gather_rows(view, indices[: len(view)]), view[indices])
    out = np.zeros((3, 20), np.int64)
    kernels.gather_rows(array, indices, out[:, ::2])
    np.testing.assert_array_equal(out[:, ::2], array[indices])
    assert not out[:, 1::2].any()


def test_rows_of_objects_are_counted_references(kernels: Any) -> None:
    thing = object()
    before = sys.getrefcount(thing)
    array = np.array([thing, None])
    gathered = kernels.gather_rows(array, np.array([0, 0, 0]))
    assert sys.getrefcount(thing) == before + 4
    del gathered, array
    assert sys.getrefcount(thing) == before


def test_rows_of_a_read_only_memmap(kernels: Any, tmp_path: Path) -> None:
    wanted = np.arange(4000, dtype=np.float32).reshape(40, 100)
    np.save(tmp_path / "rows.npy", wanted)
    rows = np.load(tmp_path / "rows.npy", mmap_mode="r")
    np.testing.assert_array_equal(kernels.gather_rows(rows, np.array([39, 1])), wanted[[39, 1]])


def test_other_integers_serve_as_indices(kernels: Any) -> None:
    array = np.arange(10)
    assert kernels.gather_rows(array, np.array([9, 3], np.uint8)).tolist() == [9, 3]
    assert kernels.gather_rows(array, np.arange(10)[::-3]).tolist() == [9, 6, 3, 0]
    with pytest.raises(TypeError, match="Cannot cast"):
        kernels.gather_rows(array, np.array([0.5]))
    with pytest.raises(IndexError, match="index 18446744073709551615 is out of range"):  # -1 as int64
        kernels.gather_rows(array, np.array([2**64 - 1], np.uint64))


@pytest.mark.parametrize("wrong", [5, -6, 1 << 40])
def test_an_index_out_of_range_is_named_before_anything_is_written(kernels: Any, wrong: int) -> None:
    out = np.full((4, 3), 7.0)
    with pytest.raises(IndexError, match=f"index {wrong} is out of range for 5 rows"):
        kernels.gather_rows(np.zeros((5, 3)), np.array([0, 1, wrong, 99]), out)
    assert (out == 7).all()


def test_no_rows_of_nothing(kernels: Any) -> None:
    assert kernels.gather_rows(np.zeros((0, 3)), np.array([], np.int64)).shape == (0, 3)
    assert kernels.gather_rows(np.zeros((3, 0)), np.array([2, 0])).shape == (2, 0)
    with pytest.raises(IndexError, match="index 0 is out of range for 0 rows"):
        kernels.gather_rows(np.zeros((0, 3)), np.array([0]))


def test_an_unfit_out_is_refused(kernels: Any) -> None:
    array, indices = np.zeros((5, 3)), np.array([0, 1])
    with pytest.raises(TypeError, match="out has dtype float32, the array float64"):
        kernels.gather_rows(array, indices, np.zeros((2, 3), np.float32))
    for shape in [(3, 3), (2, 4), (2,), (2, 3, 1), ()]:
        with pytest.raises(ValueError, match=r"out has shape .*, the result \(2, 3\)"):
            kernels.gather_rows(array, indices, np.zeros(shape))
    locked = np.zeros((2, 3))
    locked.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kernels.gather_rows(array, indices, locked)


WIDE = ["uint8", "uint16", "int32", "uint32"]


@pytest.mark.parametrize("source", [*WIDE, "int16", ">u2", "int64", "float32"])
def test_windows_are_slices(kernels: Any, source: str) -> None:
    rng = np.random.default_rng(0)
    items = rng.integers(0, 100, 1000).astype(source)
    items[:4] = np.iinfo(source).max if items.dtype.kind in "iu" else 1.5
    targets = [source, "float64"] if source == "float32" else [source, "int64", "float64"]
    for window, target in product((1, 7, 64, 1000), targets):
        offsets = np.array([0, 1000 - window, *rng.integers(0, 1001 - window, 20)])
        out = np.empty((len(offsets), window), target)
        assert kernels.gather_windows(items, offsets, out) is out
        np.testing.assert_array_equal(out, np.stack([items[at : at + window] for at in offsets]))


def test_windows_of_unaligned_items(kernels: Any) -> None:
    raw = np.arange(2 * 100 + 1, dtype=np.uint8)
    items = raw[1:].view("<u2")
    out = np.empty((2, 10), np.int64)
    kernels.gather_windows(items, np.array([3, 90]), out)
    np.testing.assert_array_equal(out, [items[3:13], items[90:100]])


@pytest.mark.parametrize("threads", [1, 2])
def test_many_windows(threads: int) -> None:
    items = np.arange(50_000, dtype=np.uint16)
    offsets = np.arange(0, 40_000, 37)
    out = np.empty((len(offsets), 1000), np.int64)
    _kernels.gather_windows(items, offsets, out, threads)
    np.testing.assert_array_equal(out, offsets[:, None] + np.arange(1000))


@pytest.mark.parametrize("wrong", [-1, 91, 1 << 62])
def test_a_window_out_of_range_is_named_before_anything_is_written(kernels: Any, wrong: int) -> None:
    out = np.full((2, 10), 7, np.uint16)
    with pytest.raises(IndexError, match=f"window {wrong} is out of range for 100 items"):
        kernels.gather_windows(np.zeros(100, np.uint16), np.array([0, wrong]), out)
    assert (out == 7).all()


def test_a_window_longer_than_the_items_is_out_of_range(kernels: Any) -> None:
    with pytest.raises(IndexError, match="window 0 is out of range for 3 items"):
        kernels.gather_windows(np.zeros(3, np.uint16), np.array([0]), np.empty((1, 4), np.uint16))


def test_windows_are_never_narrowed(kernels: Any) -> None:
    with pytest.raises(TypeError, match="out has dtype uint16, which does not hold every uint32"):
        kernels.gather_windows(np.zeros(9, np.uint32), np.array([0]), np.empty((1, 4), np.uint16))


def test_unfit_windows_are_refused(kernels: Any) -> None:
    items = np.zeros(100, np.uint16)
    with pytest.raises(ValueError, match="one axis"):
        kernels.gather_windows(np.zeros((10, 10), np.uint16), np.array([0]), np.empty((1, 4), np.uint16))
    for shape in [(3, 4), (4,), (1, 2, 2)]:
        with pytest.raises(ValueError, match="one axis"):
            kernels.gather_windows(items, np.array([0, 1]), np.empty(shape, np.uint16))


def test_many_threads_may_gather_at_once(no_debris: object) -> None:
    rng = np.random.default_rng(0)
    array = rng.integers(0, 256, (64, 100_000), np.uint8)
    start = threading.Barrier(4)
    wrong: list[int] = []

    def work(seed: int) -> None:
        indices = np.random.default_rng(seed).integers(0, 64, 100)
        start.wait()
        wrong.extend(
            seed
            for _ in range(5)
            if not np.array_equal(_kernels.gather_rows(array, indices, threads=3), array[indices])
        )

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


IN_A_CHILD = """
import os, sys, warnings
import numpy as np
from feedline.core import kernels as _kernels

def native_threads():
    return len(os.listdir("/proc/self/task"))

array = np.arange(4 << 20, dtype=np.uint8).reshape(64, -1)
indices = np.arange(64)[::-1].copy()
out = np.empty_like(array)
alone = native_threads()
_kernels.gather_rows(array, indices, out, threads=1)
assert native_threads() == alone, "a single thread was asked for"
_kernels.gather_rows(array, indices, out, threads=2)
assert native_threads() == alone + 1
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks with threads
pid = os.fork()
if pid == 0:
    assert native_threads() == 1
    out[:] = 0
    _kernels.gather_rows(array, indices, out, threads=2)
    os._exit(0 if (out == array[::-1]).all() and native_threads() == 2 else 1)
_, status = os.waitpid(pid, 0)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_helper_threads_start_on_need_and_again_in_a_forked_child(preloaded: Preloaded, tmp_path: Path) -> None:
    assert preloaded.run_code(IN_A_CHILD, tmp_path) == (0, "")


WITHOUT_NATIVE = f"""
{IMPORTS_FEEDLINE}
import warnings
sys.modules["feedline._native"] = None
from feedline.core import kernels as _kernels
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    print(_kernels.permuted(0, 10, 0, 10).tolist())
    print(_kernels.permuted_at(0, 10, np.array([2, 0])).tolist())
    print(_kernels.gather_rows(np.arange(5), np.array([3, -1])).tolist())
    print(_kernels.gather_windows(np.arange(5, dtype=np.uint8), np.array([3]), np.empty((1, 2), np.int64)).tolist())
print([(w.category.__name__, w.filename) for w in caught])
"""


def test_without_native_kernels_the_results_are_the_same_and_it_is_said_once(
    preloaded: Preloaded, tmp_path: Path
) -> None:
    code, printed = preloaded.run_code(WITHOUT_NATIVE, tmp_path)
    assert code == 0, printed
    assert printed.splitlines() == [
        "[6, 0, 1, 9, 3, 7, 4, 8, 5, 2]",
        "[1, 6]",
        "[3, 4]",
        "[[3, 4]]",
        f"[('SlowKernelsWarning', '{tmp_path / 'script.py'}')]",
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda native: native.permuted(0, 10, 0, np.empty(3, np.int32)),
        lambda native: native.permuted(0, 10, 0, np.empty((3, 1), np.int64)),
        lambda native: native.permuted_at(0, 10, np.zeros(4, np.int64)[::2], np.empty(2, np.int64)),
        lambda native: native.gather_rows(np.zeros((3, 3)), np.zeros((1, 1), np.int64), np.empty((1, 3)), 1, None),
        lambda native: native.gather_rows(np.zeros((3, 3)), np.zeros(4, np.int64)[::2], np.empty((2, 3)), 1, None),
        lambda native: native.mixture_blocks(np.ones(2, np.int32), 1, 0, 1, 2, np.empty(2, np.int32)),
        lambda native: native.mixture_blocks(np.ones(2, np.int64), 1, 0, 1, 2, np.empty(2, np.int64)),
        lambda native: native.mixture_blocks(np.ones(2, np.int64), 1, 0, 1, 2, np.empty(4, np.int32)[::2]),
    ],
)
def test_the_extension_checks_what_it_is_given(call: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"one axis of int(64|32) without gaps"):
        call(_kernels.native)


@pytest.mark.parametrize("places", [[3, 10], [-1, 2], [1 << 62]])
def test_a_place_outside_the_permutation_is_named(kernels: Any, places: list[int]) -> None:
    wrong = next(place for place in places if not 0 <= place < 10)
    with pytest.raises(IndexError, match=f"place {wrong} is out of range for 10 permuted elements"):
        kernels.permuted_at(0, 10, np.array(places))


def test_a_range_outside_the_permutation_is_refused(kernels: Any) -> None:
    for start, stop in [(-1, 2), (8, 11)]:
        with pytest.raises(IndexError, match="out of range for 10 permuted elements"):
            kernels.permuted(0, 10, start, stop)


@given(
    st.integers(1, 4).flatmap(
        lambda datasets: st.lists(st.lists(st.integers(0, 60), min_size=datasets, max_size=datasets), min_size=1)
    ),
    st.tuples(keys, keys),
    st.integers(0, 1 << 40),
)
def test_blocks_of_a_mixture_equal_their_numpy_form(counts: list[list[int]], pair: tuple[int, int], first: int) -> None:
    counted = np.array(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        expected = [_kernels._mixture_block_numpy(row, first + n, pair) for n, row in enumerate(counted)]
    owners = _kernels.mixture_blocks(counted, first, pair)
    assert owners.dtype == np.int32
    assert owners.tolist() == np.concatenate(expected).tolist()
    assert np.bincount(owners, minlength=len(counts[0])).tolist() == counted.sum(axis=0).tolist()


def test_a_large_block_of_a_mixture_equals_its_numpy_form(kernels: Any) -> None:
    counts = np.array([[70_000, 1, 0, 30_000]])
    expected = _kernels._mixture_block_numpy(counts[0], 9, (3, 4))
    assert np.array_equal(kernels.mixture_blocks(counts, 9, (3, 4)), expected)


@pytest.mark.parametrize(
    ("counts", "datasets", "message"),
    [
        ([3, 2, 1], 2, "a row for each block"),
        ([3, 2], 0, "a row for each block"),
        ([3, 2], 2, "add up to the length of owners"),
        ([3, 4], 2, "add up to the length of owners"),
        ([7, -1], 2, "add up to the length of owners"),
        ([1 << 62, 1 << 62], 1, "add up to the length of owners"),
    ],
)
def test_counts_that_do_not_fit_their_owners_are_refused(counts: list[int], datasets: int, message: str) -> None:
    owners = np.full(6, -1, np.int32)
    with pytest.raises(ValueError, match=message):
        _kernels.native.mixture_blocks(np.array(counts), datasets, 0, 1, 2, owners)
    assert owners.tolist() == [-1] * 6


@given(st.lists(st.integers(0, 4), max_size=200), st.integers(-5, 5))
def test_interleaved_parts_equal_their_numpy_form(owners: list[int], shift: int) -> None:
    owner = np.array(owners, np.int32)
    counts = np.bincount(owner, minlength=5)
    parts, shifts = np.arange(len(owners)) * 7, np.arange(5) * 1000 + shift
    starts = np.concatenate([[0], np.cumsum(counts)])
    assert np.array_equal(
        _kernels.interleave(owner, parts, counts, shifts), _kernels._interleave_numpy(owner, parts, starts, shifts)
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ([0, 5], [1, 2], [2, 0], [0, 0]),
        ([0, 0, 0], [1, 2], [2, 0], [0, 0]),
        ([0, 1], [1, 2], [2, 1], [0, 0]),
    ],
)
def test_parts_that_do_not_fit_their_owners_are_refused(arguments: Any) -> None:
    with pytest.raises(ValueError, match="starts must divide the parts among the owners"):
        _kernels.interleave(np.array(arguments[0], np.int32), *(np.array(each) for each in arguments[1:]))


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "float32", "float64", "bool"])
@given(
    st.integers(0, 3), st.integers(1, 3), st.tuples(*[st.integers(1, 40)] * 2), st.tuples(*[st.integers(0, 50)] * 2),
    st.randoms(use_true_random=True),  # from one drawn seed
)  # fmt: skip
def test_taken_planes_are_those_of_numpy(
    dtype: str, batch: int, channels: int, sides: tuple[int, int], size: tuple[int, int], random: Random
) -> None:
    images = np.random.default_rng(random.getrandbits(32)).integers(0, 2, (batch, channels, *sides)).astype(dtype)
    numbers = [
        np.array([_places(length, side, random) for _ in range(batch)], np.int64)
        for length, side in zip(sides, size, strict=True)
    ]
    lines, columns = (each.reshape(batch, side) for each, side in zip(numbers, size, strict=True))
    fill = np.arange(1, channels + 1).astype(dtype)
    expected, got = (np.empty((batch, channels, *size), dtype) for _ in range(2))
    _kernels._take_planes_numpy(images, lines, columns, fill, expected)
    assert _kernels.take_planes(images, lines, columns, fill, got, random.choice([1, 2])) is got
    np.testing.assert_array_equal(got, expected)
    if got.size:
        b, c, y, x = (random.randrange(length) for length in got.shape)
        line, column = lines[b, y], columns[b, x]
        assert got[b, c, y, x] == (fill[c] if line < 0 or column < 0 else images[b, c, line, column])


def _places(length: int, side: int, random: Random) -> list[int]:
    """Numbers of an image that is cropped, flipped, padded or shuffled."""
    start, step = random.randint(-5, length), random.choice([1, -1])
    places = [start + step * number for number in range(side)]
    if random.random() < 0.3:
        random.shuffle(places)
    return [place if 0 <= place < length else -1 for place in places]


def test_planes_out_of_range_are_named_before_anything_is_written(kernels: Any) -> None:
    images, out = np.zeros((1, 3, 4, 5), np.uint8), np.full((1, 3, 1, 1), 7, np.uint8)
    for line, column, message in ((4, 0, "line 4 is out of range for 4 lines"), (0, -2, "column -2 is out of range")):
        with pytest.raises(IndexError, match=message):
            kernels.take_planes(images, np.array([[line]]), np.array([[column]]), np.zeros(3), out)
    assert (out == 7).all()


def test_planes_with_gaps_between_items(kernels: Any) -> None:
    images = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3).transpose(0, 3, 1, 2)
    out = np.empty((2, 3, 4, 5), np.uint8)
    lines, columns = np.tile(np.arange(4), (2, 1)), np.tile(np.arange(5)[::-1], (2, 1))
    kernels.take_planes(images, lines, columns, np.zeros(3), out)
    np.testing.assert_array_equal(out, images[..., ::-1])
