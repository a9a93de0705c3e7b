"""torch's `default_collate`, faster, and into memory that the caller allocates.

Each function has a fast path for samples of one kind, and passes all others to torch. Unusual input therefore gives
torch's results: the same promotion of dtypes, the same exceptions.
"""

from __future__ import annotations

import copy
from abc import ABCMeta, get_cache_token
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import numpy as np
import torch
import torch.utils.data._utils.worker as torch_worker
from numpy.typing import NDArray
from torch.utils.data._utils import collate as torchs

from feedline.core.tensors import Allocator, allocate_tensor, torch_dtype, uses_allocator

_dtype_of = attrgetter("dtype")


_shape_of = attrgetter("shape")


_strides_of = attrgetter("strides")


ARRAY_TYPES = {np.ndarray, np.memmap}
"""Types of arrays that are nothing but memory."""


# Without np.uint64: torch raises for a list of such scalars.
_SCALAR_TYPES = {
    *(np.bool_, np.uint8, np.uint16, np.uint32, np.int8, np.int16, np.int32, np.int64),
    *(np.float16, np.float32, np.float64, np.complex64, np.complex128),
}


def stack_tensors(batch: Sequence[torch.Tensor], allocate: Allocator | None) -> torch.Tensor:
    """`torch.stack`, into memory from `allocate` where possible.

    Possible for plain CPU data without a gradient.
    """
    elem = batch[0]
    if elem.is_nested or elem.layout is not torch.strided:
        return torchs.collate_tensor_fn(batch)  # type: ignore[no-any-return]  # raises
    if uses_allocator(allocate, elem.nbytes * len(batch)) and _is_plain(batch):
        assert allocate is not None
        out = allocate((len(batch), *elem.shape), elem.dtype)
        try:
            return torch.stack(batch, out=out)  # type: ignore[arg-type]
        except RuntimeError:  # unequal shapes, or a gradient: torch decides below
            pass
    stacked = torch.stack(batch)  # type: ignore[arg-type]
    if torch_worker._worker_info is not None and (stacked.dtype is not elem.dtype or stacked.requires_grad):
        # torch's workers stack into memory of the first sample's dtype, without promotion of dtypes and without a
        # gradient.
        return torch.stack(batch, out=torch.empty(stacked.shape, dtype=elem.dtype, device=stacked.device))  # type: ignore[arg-type]
    return stacked


def _is_plain(batch: Sequence[torch.Tensor]) -> bool:
    elem = batch[0]
    return (
        elem.is_cpu
        and not elem.is_quantized
        and set(map(type, batch)) == {torch.Tensor}
        and len(set(map(_dtype_of, batch))) == 1
    )


def stack_arrays(batch: Sequence[NDArray[Any]], allocate: Allocator | None) -> torch.Tensor:
    """One tensor of equal arrays, as torch stacks tensors made from them."""
    elem = batch[0]
    dtype = torch_dtype(elem.dtype)
    if dtype is None and elem.dtype.kind in "SUO":
        return torchs.collate_numpy_array_fn(batch)  # type: ignore[no-any-return]  # raises
    if dtype is None or not _are_alike(batch):
        return stack_tensors([torch.as_tensor(array) for array in batch], allocate)
    out = (allocate or allocate_tensor)((len(batch), *elem.shape), dtype)
    # Joining along the first dimension fills the same memory as stacking does, and saves one view per sample.
    np.concatenate(batch, out=out.numpy().reshape(len(batch) * elem.shape[0], *elem.shape[1:]))
    return out


def _are_alike(batch: Sequence[NDArray[Any]]) -> bool:
    return (
        batch[0].ndim > 0
        and set(map(type, batch)) <= ARRAY_TYPES
        and len(set(map(_dtype_of, batch))) == 1
        and len(set(map(_shape_of, batch))) == 1
        # torch refuses negative strides
        and all(min(strides) >= 0 for strides in set(map(_strides_of, batch)))
    )


def stack_ints(batch: Sequence[int], allocate: Allocator | None) -> torch.Tensor:
    """A tensor of int64, or of bool if all are bool.

    For subclasses of int and for mixtures, torch infers the dtype.
    """
    kinds = set(map(type, batch))
    if len(kinds) == 1 and (int in kinds or bool in kinds):
        numbers = np.array(batch)
        if numbers.dtype.kind in "bi":  # otherwise a number exceeds 64 bits, and torch raises below
            return _store(numbers, allocate)
    return torch.tensor(batch)


def stack_floats(batch: Sequence[float], allocate: Allocator | None) -> torch.Tensor:
    """A tensor of float64, for any types of the other samples."""
    if set(map(type, batch)) == {float}:
        return _store(np.array(batch), allocate)
    return torch.tensor(batch, dtype=torch.float64)


def stack_scalars(batch: Sequence[np.generic], allocate: Allocator | None) -> torch.Tensor:
    """A tensor of NumPy scalars, with their dtype."""
    kind = type(batch[0])
    if kind in _SCALAR_TYPES and set(map(type, batch)) == {kind}:
        return _store(np.array(batch), allocate)
    return torch.as_tensor(batch)


def _store(numbers: NDArray[Any], allocate: Allocator | None) -> torch.Tensor:
    if allocate is None or not uses_allocator(allocate, numbers.nbytes):
        return torch.from_numpy(numbers)
    dtype = torch_dtype(numbers.dtype)
    assert dtype is not None
    out = allocate(numbers.shape, dtype)
    out.numpy()[...] = numbers
    return out


def keep_strings(batch: Sequence[Any], _: Allocator | None) -> Sequence[Any]:
    """Strings and bytes, unchanged."""
    return batch


KeyPath = tuple[Any, ...]


Leaf = Callable[[Any, Allocator | None], Any]


Handler = Callable[["BatchWalk", Any, KeyPath], Any]


def default(samples: Sequence[Any], *, allocate: Allocator | None = None) -> Any:
    """Collate as `torch.utils.data.default_collate` does.

    The containers, values, dtypes and types of exceptions are the same. Tensors, arrays and numbers are written into
    memory from `allocate`, if given. Types registered in torch's `default_collate_fn_map` are collated by the functions
    registered for them. Errors have a note with the place in the sample, such as `batch[0]['image']`.
    """
    try:
        return BatchWalk(allocate)(samples)
    except RecursionError:  # samples nested 150 times and more: torch's function needs half of the frames
        return torchs.default_collate(samples)  # type: ignore[no-untyped-call]


def is_standard() -> bool:
    """True if torch's registry has its own functions for plain values.

    Functions that a library registers for types of its own change nothing for others.
    """
    return _registrations.are_standard(torchs.default_collate_fn_map)


class _Registrations:
    """The latest contents of torch's registry, and whether they are standard."""

    def __init__(self) -> None:
        self._latest: tuple[dict[Any, Any], object, bool] = ({}, None, False)

    def are_standard(self, registry: dict[Any, Any]) -> bool:
        seen, classes, standard = self._latest
        token = get_cache_token()  # another one after each `register` of an abstract class
        if registry != seen or token != classes:
            added = {kind for kind in registry if kind not in _SHIPPED}
            standard = _SHIPPED.items() <= registry.items() and not any(map(_may_be_plain, added))
            self._latest = dict(registry), token, standard  # in one step: threads read it
        return standard


_registrations = _Registrations()


def registered_for_plain_values() -> list[str]:
    """Registered types for which `is_standard` is not true, by name."""
    registry: dict[Any, Any] = torchs.default_collate_fn_map
    changed = [kind for kind, fn in _SHIPPED.items() if registry.get(kind) is not fn]
    added = [kind for kind in registry if kind not in _SHIPPED and _may_be_plain(kind)]
    return [getattr(kind, "__qualname__", str(kind)) for kind in (*changed, *added)]


def _may_be_plain(kind: Any) -> bool:
    """True unless no plain value is an instance of `kind`."""
    if isinstance(kind, tuple):
        return any(map(_may_be_plain, kind))
    if getattr(type(kind), "__instancecheck__", None) not in _USUAL_CHECKS:
        return True  # it may look at the value
    if kind.__module__.partition(".")[0] == "feedline":
        return True  # readers of whole batches make them
    return any(issubclass(plain, kind) for plain in (*_EXACT, *_SCALAR_TYPES, np.uint64, np.datetime64, bytearray))


_USUAL_CHECKS: tuple[Any, ...] = (type.__instancecheck__, ABCMeta.__instancecheck__)


def format_path(path: KeyPath) -> str:
    """A path as a Python expression: `batch['image'][0]`."""
    return "batch" + "".join(f"[{key!r}]" for key in path)


class BatchWalk:
    """A single walk down all samples of a batch at once."""

    __slots__ = ("_registry", "empty", "standard")

    def __init__(self, allocate: Allocator | None) -> None:
        self.empty = allocate
        self._registry = torchs.default_collate_fn_map
        self.standard = is_standard()

    def __call__(self, batch: Sequence[Any], path: KeyPath = ()) -> Any:
        """Collate the values at `path` of each sample."""
        elem = batch[0]
        handler = _EXACT.get(type(elem)) if self.standard else None
        return (handler or self._handler(elem))(self, batch, path)

    def _handler(self, elem: Any) -> Handler:
        registered = self._find_handler(elem)
        if registered is not None:
            return registered
        if isinstance(elem, Mapping):
            return _mapping
        if isinstance(elem, tuple) and hasattr(elem, "_fields"):
            return _named_tuple
        return _sequence if isinstance(elem, Sequence) else _unknown

    def _find_handler(self, elem: Any) -> Handler | None:
        kinds = [type(elem)] if type(elem) in self._registry else self._registry
        for kind in kinds:
            if isinstance(elem, kind):
                return _handler_of(self._registry[kind])
        return None

    def functions(self, path: KeyPath) -> dict[Any, Callable[..., Any]]:
        """The registry that a user's collate function gets as `collate_fn_map`.

        torch's functions are replaced by feedline's.
        """
        return {kind: partial(_call_registered, self, path, fn) for kind, fn in self._registry.items()}


def _call_registered(walk: BatchWalk, path: KeyPath, fn: Callable[..., Any], batch: Any, **_: Any) -> Any:
    # torch's `collate` passes the registry as `collate_fn_map`; the walk has its own
    return _handler_of(fn)(walk, batch, path)


def _handler_of(fn: Callable[..., Any]) -> Handler:
    for theirs, handler in _OWN:
        if fn is theirs:
            return handler
    return partial(_collate_by_user, fn)


def _collate_by_user(fn: Callable[..., Any], walk: BatchWalk, batch: Any, path: KeyPath) -> Any:
    return fn(batch, collate_fn_map=walk.functions(path))


def _mapping(walk: BatchWalk, batch: Sequence[Mapping[Any, Any]], path: KeyPath) -> Any:
    elem = batch[0]
    items = {key: walk(_column(batch, key, path), (*path, key)) for key in elem}
    if type(elem) is dict:
        return items
    try:
        if not isinstance(elem, MutableMapping):
            return type(elem)(items)  # type: ignore[call-arg]
        clone = copy.copy(elem)  # keeps other attributes of the mapping
        clone.update(items)
    except TypeError:
        return items
    return clone


def _column(batch: Sequence[Mapping[Any, Any]], key: Any, path: KeyPath) -> list[Any]:
    try:
        return [sample[key] for sample in batch]
    except KeyError as error:
        number = next((i for i, sample in enumerate(batch) if key not in sample), None)
        error.add_note(f"{format_path((*path, key))}: sample {number} of the batch lacks this key, sample 0 has it")
        raise


def _named_tuple(walk: BatchWalk, batch: Sequence[Any], path: KeyPath) -> Any:
    elem = batch[0]
    columns = zip(elem._fields, zip(*batch, strict=False), strict=False)
    return type(elem)(*(walk(column, (*path, name)) for name, column in columns))


def _tuple(walk: BatchWalk, batch: Sequence[Any], path: KeyPath) -> list[Any]:
    """A list, as in torch."""
    _check_lengths(batch, path)
    return [walk(column, (*path, i)) for i, column in enumerate(zip(*batch, strict=False))]


def _sequence(walk: BatchWalk, batch: Sequence[Any], path: KeyPath) -> Any:
    elem = batch[0]
    items = _tuple(walk, batch, path)
    if isinstance(elem, tuple) or type(elem) is list:
        return items
    try:
        if not isinstance(elem, MutableSequence):
            return type(elem)(items)
        clone = copy.copy(elem)
        for i, item in enumerate(items):
            clone[i] = item
    except TypeError:
        return items
    return clone


def _check_lengths(batch: Sequence[Any], path: KeyPath) -> None:
    sizes: list[int] = []
    try:
        sizes.extend(map(len, batch))
    except Exception:
        if len(set(sizes)) < 2:  # as in torch, an earlier difference is the error
            raise
    if len(set(sizes)) > 1:
        error = RuntimeError("each element in list of batch should be of equal size")
        error.add_note(_difference(path, "length", sizes))
        raise error


def _difference(path: KeyPath, what: str, values: Sequence[Any]) -> str:
    number, other = next((i, value) for i, value in enumerate(values) if value != values[0])
    return (
        f"{format_path(path)}: sample 0 of the batch has {what} {values[0]}, sample {number} has {other}. Make them "
        f"equal (for images a Resize or a crop), or pass collate_fn=feedline.collate.pad(), or ragged() to keep them "
        "apart."
    )


def _unknown(_: BatchWalk, batch: Sequence[Any], path: KeyPath) -> Any:
    error = TypeError(torchs.default_collate_err_msg_format.format(type(batch[0])))
    error.add_note(
        f"{format_path(path)} has a type that default collate does not support. Leave it out of the sample, or pass a "
        "collate_fn that supports it."
    )
    raise error


def _leaf(collate: Leaf, walk: BatchWalk, batch: Sequence[Any], path: KeyPath) -> Any:
    try:
        return collate(batch, walk.empty)
    except (RuntimeError, TypeError, ValueError) as error:
        shapes = [_shape(sample) for sample in batch]
        if len(set(shapes)) > 1:
            error.add_note(_difference(path, "shape", shapes))
        else:
            error.add_note(f"while collating {format_path(path)} of {len(batch)} samples")
        raise


def _shape(sample: Any) -> tuple[int, ...]:
    # the attribute `shape` of a nested tensor raises
    return () if getattr(sample, "is_nested", False) else tuple(getattr(sample, "shape", ()))


def _arrays(walk: BatchWalk, batch: Sequence[Any], path: KeyPath) -> Any:
    if walk.standard:
        return _leaf(stack_arrays, walk, batch, path)
    return walk(
        [torch.as_tensor(array) for array in batch], path
    )  # the user may have registered a function for tensors


_tensors: Handler = partial(_leaf, stack_tensors)


_scalars: Handler = partial(_leaf, stack_scalars)


_floats: Handler = partial(_leaf, stack_floats)


_ints: Handler = partial(_leaf, stack_ints)


_text: Handler = partial(_leaf, keep_strings)


_OWN: tuple[tuple[Callable[..., Any], Handler], ...] = (
    (torchs.collate_tensor_fn, _tensors),
    (torchs.collate_numpy_array_fn, _arrays),
    (torchs.collate_numpy_scalar_fn, _scalars),
    (torchs.collate_float_fn, _floats),
    (torchs.collate_int_fn, _ints),
    (torchs.collate_str_fn, _text),
)


_SHIPPED = {
    torch.Tensor: torchs.collate_tensor_fn,
    np.ndarray: torchs.collate_numpy_array_fn,
    (np.bool_, np.number, np.object_): torchs.collate_numpy_scalar_fn,
    float: torchs.collate_float_fn,
    int: torchs.collate_int_fn,
    str: torchs.collate_str_fn,
    bytes: torchs.collate_str_fn,
}


# Shortcuts for common types, valid as long as the registry is standard.
_EXACT: dict[type, Handler] = {
    torch.Tensor: _tensors,
    np.ndarray: _arrays,
    np.memmap: _arrays,
    float: _floats,
    int: _ints,
    bool: _ints,
    str: _text,
    bytes: _text,
    dict: _mapping,
    tuple: _tuple,
    list: _sequence,
}
