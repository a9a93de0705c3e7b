"""Values cross process borders equal, writable and with shared storage; memory is reused."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from law_settings import Reason, law_settings
from transport_peer import Peer

from feedline.core.tree import leaves
from feedline.workers.transport import Arena, dump_builder, load_builder

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")

TORCH_DTYPES = [
    torch.uint8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64, torch.bool,
]  # fmt: skip
NUMPY_DTYPES = ["u1", "i2", "<i4", ">i8", "f2", "f4", "f8", "c16", "?", "M8[us]", "U3", "i4,f8"]

shapes = (
    st.lists(st.sampled_from([0, 1, 2, 5, 30, 120]), max_size=4).map(tuple).filter(lambda s: math.prod(s) < 200_000)
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype, shape = draw(st.sampled_from(TORCH_DTYPES)), draw(shapes)
    # Only 0 and 1 bytes: valid for every dtype, and never NaN, so that equality is meaningful.
    raw = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 2, math.prod(shape) * dtype.itemsize, np.uint8)
    tensor = torch.empty(0, dtype=dtype).set_(torch.from_numpy(raw).untyped_storage(), 0, shape, _strides(shape))
    return draw(st.sampled_from(VIEWS))(tensor)


VIEWS = [
    lambda x: x,
    lambda x: x.permute(tuple(reversed(range(x.ndim)))),
    lambda x: x[..., ::2] if x.ndim else x,
    lambda x: x[1:] if x.ndim else x,
    lambda x: x[:1].expand(7, *x.shape[1:]) if x.ndim and len(x) else x,
    lambda x: x.clone().requires_grad_() if x.dtype.is_floating_point and x.itemsize > 1 else x,
]


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray[Any, Any]:
    shape, dtype = draw(shapes), np.dtype(draw(st.sampled_from(NUMPY_DTYPES)))
    array = np.random.default_rng(draw(st.integers(0, 99))).integers(0, 9, shape).astype("u1").astype(dtype)
    view = draw(st.sampled_from([lambda x: x, np.asfortranarray, lambda x: x[::-1] if x.ndim else x, lambda x: x.T]))
    return view(array)


batches = st.recursive(
    tensors() | arrays() | st.integers() | st.text() | st.binary(max_size=40_000) | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def assert_same(sent: Any, arrived: Any) -> None:
    for a, b in zip(leaves(sent), leaves(arrived), strict=True):
        assert type(a) is type(b)
        if isinstance(a, torch.Tensor):
            assert (a.dtype, a.shape, a.stride(), a.requires_grad) == (b.dtype, b.shape, b.stride(), b.requires_grad)
            assert torch.equal(comparable(a), comparable(b))
        elif isinstance(a, np.ndarray):
            assert b.dtype == a.dtype.newbyteorder("=")  # as with torch
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def comparable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # float8 has no comparison


def assert_writable(arrived: Any) -> None:
    for leaf in leaves(arrived):
        if isinstance(leaf, torch.Tensor):
            leaf.detach().untyped_storage().fill_(0)
        elif isinstance(leaf, np.ndarray):
            assert leaf.flags.writeable
            leaf[...] = leaf.copy()


# Most examples come from a thread: messages are the same, and a fork of this process takes 30 ms.
@given(batches)
def test_a_batch_arrives_as_it_was_sent(batch: Any) -> None:
    assert_arrives(batch, forked=False)


@given(batches)
@law_settings(at_most=25, because=Reason.PROCESSES)
def test_a_batch_of_another_process_arrives_as_it_was_sent(batch: Any) -> None:
    assert_arrives(batch, forked=True)


def assert_arrives(batch: Any, *, forked: bool) -> None:
    with Peer(lambda _, arena: batch, forked=forked) as peer:
        for _ in range(2):  # the second time in memory that was used before
            arrived = peer.ask()
            assert_same(batch, arrived)
            assert_writable(arrived)


STEPS = st.lists(st.tuples(st.integers(1, 300_000), st.integers(0, 9), st.booleans()), max_size=15)


@given(STEPS)
def test_a_kept_batch_is_never_overwritten(steps: list[tuple[int, int, bool]]) -> None:
    assert_kept(steps, forked=False)


@given(STEPS)
@law_settings(at_most=25, because=Reason.PROCESSES)
def test_a_kept_batch_of_another_process_is_never_overwritten(steps: list[tuple[int, int, bool]]) -> None:
    assert_kept(steps, forked=True)


def assert_kept(steps: list[tuple[int, int, bool]], *, forked: bool) -> None:
    def make(number: int, arena: Arena) -> list[Any]:
        nbytes, collated = steps[number][0], steps[number][2]
        memory = arena.empty((nbytes,), torch.uint8) if collated else torch.empty(nbytes, dtype=torch.uint8)
        return [memory.fill_(number), np.full(nbytes // 9, number, np.uint8)]

    kept: dict[int, list[Any]] = {}
    with Peer(make, forked=forked) as peer:
        for number, (_, drop, _) in enumerate(steps):
            kept[number] = peer.ask(number)
            kept.pop(number - drop, None)
            assert all((np.asarray(part) == value).all() for value, batch in kept.items() for part in batch)
        alive = peer.inbox.statistics().lent_nbytes
        assert peer.statistics().lent_nbytes == alive
        kept.clear()
        assert peer.statistics().lent_nbytes == 0


@given(st.sampled_from([10, 300_000]), st.integers(0, 4))
def test_views_of_one_tensor_stay_views_of_one_tensor(size: int, offset: int) -> None:
    x = torch.arange(size, dtype=torch.int32)
    with Peer(lambda _, arena: {"whole": x, "part": x[offset : offset + 5], "bytes": x.view(torch.uint8)}) as peer:
        arrived = peer.ask()
    arrived["part"].fill_(-1)
    assert arrived["whole"][offset : offset + 5].tolist() == [-1] * 5
    assert arrived["bytes"][4 * offset] == 255
    assert len({part.untyped_storage().data_ptr() for part in arrived.values()}) == 1


@given(batches)
def test_a_builder_thaws_as_it_was_frozen(builder: Any) -> None:
    with dump_builder(builder) as frozen:
        one, other = (load_builder(frozen.fds, frozen.skeleton) for _ in range(2))
        assert frozen.matches(builder)
        assert_writable(one)  # and no other process sees it
        assert_same(builder, other)
        assert frozen.matches(builder)
