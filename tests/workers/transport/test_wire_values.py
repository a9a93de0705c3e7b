"""Received values equal the sent ones, for all types."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transport_exchange import Line

from feedline.errors import NotPicklableError
from feedline.workers.transport import Arena, Inbox
from feedline.workers.transport.views import torch_dtypes

PLAIN_DTYPES = sorted((d for name, d in torch_dtypes().items() if "bits" not in name and "q" not in name), key=str)
SIZES = (0, 1, 7, 5000, 300_000)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Detection:
    boxes: torch.Tensor
    names: list[str]


class Reading(torch.Tensor):
    pass


@pytest.fixture
def line() -> Line:
    return Line()


def random_tensor(dtype: torch.dtype, size: int) -> torch.Tensor:
    raw = torch.randint(0, 2, (size * dtype.itemsize,), dtype=torch.uint8)
    return torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), 0, (size,))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    assert tensor.is_contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("dtype", PLAIN_DTYPES, ids=str)
def test_every_dtype_and_size(dtype: torch.dtype) -> None:
    for size in SIZES:
        sent = random_tensor(dtype, size)
        arrived = Line().carry([sent])[0]
        assert (arrived.dtype, arrived.shape) == (sent.dtype, sent.shape)
        assert raw_bytes(arrived) == raw_bytes(sent), size
        assert type(arrived) is torch.Tensor, size


@pytest.mark.parametrize("rows", [3, 400])
def test_sizes_and_strides_are_kept(line: Line, rows: int) -> None:
    x = torch.randn(rows, 4, 6, 8)
    sent = {
        "channels_last": x.to(memory_format=torch.channels_last),
        "permuted": x.permute(3, 1, 0, 2),
        "expanded": x[:1].expand(50, 4, 6, 8),
        "every_other": x[:, ::2],
        "scalar": x[0, 0, 0, 0],
        "empty": x[:0],
    }
    arrived = line.carry(sent)
    for name, tensor in sent.items():
        assert torch.equal(arrived[name], tensor), name
        assert arrived[name].stride() == tensor.stride(), name


def test_views_of_one_tensor_stay_views_of_one_tensor(line: Line) -> None:
    x = torch.arange(100_000.0)
    whole, part, column = line.carry((x, x[10:20], x.view(1000, 100)[:, 3]))
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    part.zero_()
    assert whole[10:20].eq(0).all()
    whole.fill_(7)
    assert column.eq(7).all()


def test_one_tensor_twice_is_one_tensor(line: Line) -> None:
    x = torch.randn(10_000)
    arrived = line.carry([x, {"again": x}])
    assert arrived[0] is arrived[1]["again"]


@pytest.mark.parametrize("size", [50_000, 10])
def test_only_tensors_of_one_storage_stay_over_the_same_memory(line: Line, size: int) -> None:
    """torch sends each storage once, and copies each array."""
    array = np.arange(size)
    tensor = torch.from_numpy(array)
    sent = (tensor, tensor[1:], torch.from_numpy(array), array, array[2:], array[2:].reshape(2, -1).T)
    arrived = line.carry((*sent, array))
    assert all(np.array_equal(one, other) for one, other in zip(arrived, sent, strict=False))
    assert arrived[6] is arrived[3]
    assert arrived[5].strides == sent[5].strides
    for number, each in enumerate(arrived[:6]):
        each[...] = -number
    assert [set(each.ravel().tolist()) for each in arrived[1:6]] == [{-1}, {-2}, {-3}, {-4}, {-5}]
    assert arrived[0].tolist() == [0] + [-1] * (size - 1)


def test_rows_of_a_huge_tensor_do_not_bring_it_along(line: Line) -> None:
    huge = torch.zeros(1 << 26)
    rows = line.carry([huge[i << 20 : (i << 20) + 8192] for i in range(40)])
    assert all(row.shape == (8192,) for row in rows)
    assert line.arena.statistics().copied_nbytes == 40 * 8192 * 4


def test_a_column_of_a_huge_tensor_is_made_contiguous(line: Line) -> None:
    huge = torch.arange(1 << 22).view(1 << 12, 1 << 10)
    column = line.carry(huge[:, 5].requires_grad_(False))
    assert torch.equal(column, huge[:, 5])
    assert line.arena.statistics().nbytes < 1 << 20


def test_rows_that_touch_do_not_share_a_storage(line: Line) -> None:
    rows = line.carry(list(torch.arange(60_000.0).view(4, 15_000).unbind()))
    assert {row.untyped_storage().nbytes() for row in rows} == {60_000}


def test_odd_offsets(line: Line) -> None:
    raw = np.arange(80_001, dtype=np.uint8)
    misaligned = torch.frombuffer(memoryview(raw)[1:], dtype=torch.float64)
    overlapping = torch.from_numpy(raw)[1:9]
    arrived = line.carry((misaligned, overlapping, torch.from_numpy(raw)[3:40_000]))
    assert raw_bytes(arrived[0]) == raw[1:].tobytes()
    assert arrived[1].tolist() == list(range(1, 9))
    assert arrived[2].tolist() == raw[3:40_000].tolist()


def test_large_and_small_are_writable(line: Line) -> None:
    frozen = np.arange(10)
    frozen.flags.writeable = False
    sent = [torch.zeros(4), torch.zeros(40_000), np.zeros(4), np.zeros(40_000), frozen]
    for arrived in line.carry(sent):
        arrived[0] = 5
        assert arrived[0] == 5


def test_gradients(line: Line) -> None:
    leaf = torch.ones(5, requires_grad=True)
    arrived = line.carry({"leaf": leaf, "parameter": torch.nn.Parameter(torch.ones(9000))})
    assert arrived["leaf"].requires_grad
    assert arrived["leaf"].is_leaf
    assert isinstance(arrived["parameter"], torch.nn.Parameter)
    arrived["parameter"].sum().backward()
    with pytest.raises(NotPicklableError, match=r"batch\['y'\] \(type torch\.Tensor\).*detach\(\)"):
        line.carry({"x": leaf, "y": leaf * 2})


def special_tensors() -> dict[str, torch.Tensor]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that nested tensors are a prototype, and quantized ones outdated
        labeled = torch.ones(6000)
        labeled.source = "a.png"
        return {
            "subclass": torch.randn(100, 100).as_subclass(Reading),
            "with attributes": labeled,
            "sparse": torch.eye(300).to_sparse(),
            "sparse rows": torch.eye(300).to_sparse_csr(),
            "quantized": torch.quantize_per_tensor(torch.randn(9000), 0.1, 3, torch.qint8),
            "conjugate": torch.randn(5000, dtype=torch.complex64).conj(),
            "negative": torch.randn(5000, dtype=torch.complex64).conj().imag,
            "meta": torch.empty(3, 4, device="meta"),
        }


@pytest.mark.parametrize("name", special_tensors())
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch warns of sparse rows (beta) and quantization (outdated)
def test_special_tensors_travel_as_torch_pickles_them(line: Line, name: str) -> None:
    sent = special_tensors()[name]
    arrived, expected = line.carry(sent), pickle.loads(pickle.dumps(sent))
    assert type(arrived) is type(expected)
    assert arrived.layout == expected.layout
    assert arrived.__dict__ == expected.__dict__
    assert name == "meta" or torch.equal(arrived.to_dense(), sent.to_dense())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors(line: Line) -> None:
    for layout in (torch.strided, torch.jagged):
        sent = torch.nested.nested_tensor([torch.randn(70, 80), torch.randn(60, 80)], layout=layout)
        assert all(map(torch.equal, line.carry(sent).unbind(), sent.unbind()))


def test_the_memory_of_subclasses_is_not_in_the_stream(line: Line) -> None:
    line.carry(torch.zeros(1 << 20).as_subclass(Reading))
    assert line.arena.statistics().copied_nbytes == 1 << 22


def test_storages_of_subclasses_that_overlap(line: Line) -> None:
    tensor = torch.arange(20_000.0)
    whole, part = line.carry([x.as_subclass(Reading) for x in (tensor, tensor[5:9000])])
    assert part.tolist() == tensor[5:9000].tolist()
    whole.fill_(1)
    assert part.eq(1).all()


def arrays() -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 70, 8))
    return {
        "fortran": np.asfortranarray(x),
        "backwards": x[::-1, :, ::2],
        "transposed": x.T,
        "broadcast": np.broadcast_to(x[0], (9, 70, 8)),
        "big endian": x.astype(">f4"),
        "half": x.astype(np.float16),
        "long double": x.astype(np.longdouble),
        "bool": x > 0,
        "time": np.arange(9000).astype("datetime64[ms]"),
        "duration": np.arange(9000).astype("timedelta64[s]"),
        "no elements": np.empty((0, 3), np.int16),
        "scalar": np.array(3.5),
        "strings": np.array(["a", "bc"] * 9000),
        "bytes": np.array([b"a", b"bc"] * 9000),
        "objects": np.array([1, "x", None], dtype=object),
        "records": np.zeros(5000, dtype=[("a", "i4"), ("b", "f8", (2,))]),
        "misaligned": np.frombuffer(memoryview(np.arange(80_001, dtype=np.uint8))[1:], np.float64)[:9000],
        "matrix": np.ones((100, 100)).view(np.matrix),
    }


@pytest.mark.parametrize("name", arrays())
def test_arrays_arrive_as_pickle_would_bring_them(line: Line, name: str) -> None:
    sent = arrays()[name]
    arrived, expected = line.carry([sent])[0], pickle.loads(pickle.dumps(sent, 4))  # as torch does
    assert type(arrived) is type(expected)
    assert arrived.dtype == expected.dtype
    assert arrived.flags.c_contiguous == expected.flags.c_contiguous
    assert arrived.flags.f_contiguous == expected.flags.f_contiguous
    np.testing.assert_array_equal(arrived, sent)


def test_masked_arrays(line: Line) -> None:
    sent = np.ma.masked_less(np.arange(20_000), 50)
    arrived = line.carry(sent)
    assert type(arrived) is np.ma.MaskedArray
    assert np.array_equal(arrived.mask, sent.mask)


def test_mapped_files_come_without_their_file(line: Line, tmp_path: Path) -> None:
    sent = np.memmap(tmp_path / "x", np.int32, "w+", shape=(100, 100))
    sent[:] = 3
    arrived = line.carry({"all": sent, "row": sent[4]})
    assert type(arrived["all"]) is type(arrived["row"]) is np.memmap
    assert arrived["all"].filename is None
    assert arrived["all"].sum() == 30_000


def test_containers(line: Line) -> None:
    x = torch.randn(20_000)
    sent = {
        "pair": Pair(x, "y"),
        "detection": Detection(x[:10], ["cat"]),
        "ordered": collections.OrderedDict(b=1, a=x),
        "default": collections.defaultdict(list, k=[x]),
        "set": {1, 2},
        7: (None, 1.5, 2j, b"bytes", np.float32(3)),
    }
    arrived = line.carry(sent)
    assert [type(v) for v in arrived.values()] == [type(v) for v in sent.values()]
    assert torch.equal(arrived["pair"].left, x)
    assert torch.equal(arrived["detection"].boxes, x[:10])
    assert arrived[7] == sent[7]


def test_foreign_buffers_are_next_to_the_stream(line: Line) -> None:
    sent = pickle.PickleBuffer(bytearray(b"x" * 100_000))
    assert bytes(line.carry(sent)) == b"x" * 100_000
    assert line.arena.statistics().copied_nbytes == 100_000
    assert line.carry(pickle.PickleBuffer(b"small")) == b"small"


def test_a_long_stream_travels_in_a_slot_and_frees_it(line: Line) -> None:
    sent = [f"caption {i}" for i in range(50_000)]
    assert line.carry(sent) == sent
    assert line.arena.statistics().nbytes > 500_000
    assert line.arena.statistics().lent_nbytes == 0


def test_many_small_arrays(line: Line) -> None:
    sent = [np.full(100 + i, i) for i in range(3000)]
    arrived = line.carry(sent)
    assert all(map(np.array_equal, arrived, sent))


def test_default_device_of_the_training_process_does_not_matter(line: Line) -> None:
    with torch.device("meta"):
        arrived = line.carry([torch.ones(5000, device="cpu"), line.arena.empty((5000,), torch.float32)])
    assert {tensor.device.type for tensor in arrived} == {"cpu"}


def test_a_class_that_only_cloudpickle_can_carry(line: Line) -> None:
    class Local:
        def __init__(self) -> None:
            self.x = torch.ones(9000)

    assert line.carry(Local()).x.sum() == 9000
    assert line.carry([Local()])[0].x.sum() == 9000
    assert type(line.carry([Local(), Detection(torch.ones(2), [])])[1]) is Detection


class Refuses:
    def __reduce__(self) -> Any:
        raise OSError("not today")


def test_what_cannot_be_pickled_is_named_and_nothing_stays_lent(line: Line) -> None:
    with pytest.raises(
        NotPicklableError, match=r"batch\['meta'\]\[1\] \(type .*Refuses\).*not today.*collate_fn"
    ) as info:
        line.carry({"x": line.arena.empty((9000,), torch.float32), "meta": [1, Refuses()]})
    assert isinstance(info.value.__cause__, OSError)
    del info
    assert line.arena.statistics().lent_nbytes == 0


def test_errors_of_unpickling_free_the_slots(line: Line) -> None:
    payload, fds = line.post([torch.ones(9000), Fragile()])
    with pytest.raises(KeyError, match="not here"):
        line.inbox.loads(payload, fds)
    assert line.arena.statistics().lent_nbytes == 0


class Fragile:
    def __reduce__(self) -> Any:
        return _fail, ()


def _fail() -> None:
    raise KeyError("not here")


@pytest.fixture
def repeated_warnings() -> Iterator[None]:
    """torch gives warnings at every call that it otherwise gives once in a process."""
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


SPARSE = {
    "empty": torch.zeros(3, 3).to_sparse,
    "coalesced": torch.eye(300).to_sparse,
    "uncoalesced": lambda: torch.sparse_coo_tensor([[2, 2, 0]], [1.0, 2.0, 3.0], (5,)),
    "with dense dimensions": lambda: torch.arange(60.0).view(3, 4, 5).to_sparse(1),
    "integers": lambda: torch.arange(12).view(3, 4).to_sparse(),
    "rows": lambda: torch.arange(12.0).view(3, 4).to_sparse_csr(),
    "columns": lambda: torch.arange(12.0).view(3, 4).to_sparse_csc(),
    "batches of rows": lambda: torch.ones(2, 3, 4).to_sparse_csr(),
    "blocks of rows": lambda: torch.arange(48.0).view(6, 8).to_sparse_bsr((2, 4)),
    "blocks of columns": lambda: torch.arange(48.0).view(6, 8).to_sparse_bsc((3, 2)),
}


@pytest.mark.parametrize("name", SPARSE)
@pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta")
@pytest.mark.usefixtures("repeated_warnings")
def test_sparse_tensors_arrive_without_a_warning_and_are_freed(line: Line, name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of unchecked parts, and that compressed layouts are in beta
        sent = SPARSE[name]()
    kept = len(torch._utils._sparse_tensors_to_validate)
    arrived = line.carry(sent)
    assert len(torch._utils._sparse_tensors_to_validate) == kept, "torch keeps the tensor until its next load"
    assert (arrived.layout, arrived.dtype, arrived.shape) == (sent.layout, sent.dtype, sent.shape)
    if sent.layout is torch.sparse_coo:
        assert (arrived.is_coalesced(), arrived.sparse_dim()) == (sent.is_coalesced(), sent.sparse_dim())
        assert torch.equal(arrived._indices(), sent._indices())
    assert torch.equal(arrived.to_dense(), sent.to_dense())


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta")
def test_sparse_tensors_keep_or_refuse_their_gradient(line: Line, layout: torch.layout) -> None:
    leaf = torch.eye(3).to_sparse(layout=layout).requires_grad_()
    assert line.carry(leaf).requires_grad
    with pytest.raises(NotPicklableError, match="call detach"):
        line.carry(leaf * 2)


def test_quantized_tensors_arrive_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of their removal
        whole = torch.quantize_per_tensor(torch.randn(6, 6), 0.1, 3, torch.qint8)
        channels = torch.quantize_per_channel(torch.randn(4, 5), torch.ones(5), torch.zeros(5).long(), 1, torch.quint8)
    arena, inbox = Arena(), Inbox()
    message = arena.dumps([whole, whole[::2].t(), channels])
    received = inbox.loads(message.payload, message.fds)
    for mine, other in zip([whole, whole[::2].t(), channels], received, strict=True):
        assert (other.dtype, other.qscheme(), other.stride()) == (mine.dtype, mine.qscheme(), mine.stride())
        assert torch.equal(mine.dequantize(), other.dequantize())
