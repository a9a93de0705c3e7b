"""`Delivery`: device of batches, and steps on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import PackedSequence

from feedline.core.batch import BatchResult
from feedline.core.devices import Device, usable_device
from feedline.core.numa import Cpus, placement
from feedline.core.rng import derive_each
from feedline.core.tree import leaves, map_leaves, paths
from feedline.core.units import parse_nbytes
from feedline.errors import ArgumentError, note
from feedline.loader.device.stage import Depth, host_nbytes, moves_itself

_profiler_enabled = torch.autograd._profiler_enabled  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class Delivery:
    """A device for `DataLoader(device=)`, and the last steps of each batch there.

    - `device`: such as "cuda".
    - `prefetch`: limit of batches in transit, or an amount such as "512 MiB". More than two help if steps take unequal
      times.
    - `transform`: called on the device with each batch; its result is delivered. `transforms.OnBatch`, and any
      callable with an argument `keys`, gets one uint64 key per row, fixed by (seed, epoch, position).
    - `dtype`: floating-point tensors are converted on the device.
    - `memory_format`: tensors of four dimensions, or of five for `torch.channels_last_3d`, are converted there.
    - `numa`: "auto" starts workers on the CPUs of the device's NUMA node, so that their memory is there, too, and
      stages other batches there. Ranks of this machine whose devices share the node divide its CPUs. Nothing happens
      on a machine with one node.
    - `static`: each batch is copied into the tensors of the first one, as CUDA graphs need: every batch must have the
      same containers, shapes and dtypes, and the loop must not keep batches.

    Conversions follow the transform. All of them run on the loop's current stream.
    """

    device: Device
    prefetch: int | str = 2
    transform: Callable[..., Any] | None = None
    dtype: torch.dtype | None = None
    memory_format: torch.memory_format | None = None
    static: bool = False
    numa: Literal["auto"] | None = None

    def __post_init__(self) -> None:
        if self.transform is not None and not callable(self.transform):
            raise ArgumentError(f"Delivery(transform={self.transform!r}): give a callable")
        if self.dtype is not None and not getattr(self.dtype, "is_floating_point", False):
            raise ArgumentError(f"Delivery(dtype={self.dtype!r}): give a floating-point dtype, or a transform")
        if self.memory_format is not None and self.memory_format not in _DIMENSIONS:
            raise ArgumentError(
                f"Delivery(memory_format={self.memory_format!r}): give torch.channels_last or torch.channels_last_3d"
            )
        if not isinstance(self.static, bool):
            raise ArgumentError(f"Delivery(static={self.static!r}): give True or False")
        if self.numa not in (None, "auto"):
            raise ArgumentError(f"Delivery(numa={self.numa!r}): give 'auto' or None")
        usable_device(self.device)
        _ = self.depth

    @property
    def cpus(self) -> Cpus | None:
        """CPUs for workers; None for those of this process."""
        place = placement(torch.device(self.device)) if self.numa else None
        return None if place is None else place.cpus

    @property
    def depth(self) -> Depth:
        """Limit of batches in transit; `ArgumentError` if `prefetch` is invalid."""
        if isinstance(self.prefetch, str):
            nbytes = parse_nbytes(self.prefetch)
            if nbytes:
                return Depth(nbytes)
        elif hasattr(self.prefetch, "__index__") and self.prefetch is not True and self.prefetch >= 1:
            return Depth(batches=self.prefetch)
        raise ArgumentError(f'Delivery(prefetch={self.prefetch!r}): give at least 1 batch, or an amount ("512 MiB")')

    @classmethod
    def of(cls, device: Device | Delivery) -> Delivery:
        """`device` itself, or a delivery there without further steps."""
        return device if isinstance(device, Delivery) else cls(device)


class Delivered(NamedTuple):
    """Request and result of a batch."""

    request: Any
    result: BatchResult


class DeliverySteps:
    """The transform, conversions and static buffers of a `Delivery`.

    The buffers live as long as this object: over all epochs of a loader.
    """

    def __init__(self, delivery: Delivery) -> None:
        self._delivery = delivery
        self._buffers: dict[tuple[Any, ...], torch.Tensor] | None = None
        self._wants_keys = takes_keys(delivery.transform)

    def __call__(self, batch: Any, delivered: Delivered) -> Any:
        """The batch to deliver; errors name its request."""
        with span("feedline.transform"):
            try:
                batch = self._apply_transform(batch, delivered)
                batch = map_leaves(self._convert, batch, moves_itself)
                return self._copy_to_static(batch) if self._delivery.static else batch
            except Exception as error:
                note(error, f"feedline: on {self._delivery.device}, after the copy of {delivered.request}")
                if isinstance(error, torch.OutOfMemoryError):
                    note(error, self._explain_memory(batch))
                raise

    def _explain_memory(self, batch: Any) -> str:
        nbytes = sum(map(_nbytes, leaves(batch)))
        ahead = self._delivery.prefetch
        fewer = f"pass Delivery(..., prefetch={ahead - 1})" if isinstance(ahead, int) and ahead > 1 else None
        less = fewer or ("pass a smaller Delivery(..., prefetch=)" if isinstance(ahead, str) else "make it smaller")
        return f"feedline: the batch has {nbytes} bytes there, and prefetch={ahead!r}: {less}, or free memory there"

    def _apply_transform(self, batch: Any, delivered: Delivered) -> Any:
        transform = self._delivery.transform
        if transform is None:
            return batch
        return transform(batch, keys=_keys(delivered)) if self._wants_keys else transform(batch)

    def _convert(self, leaf: Any) -> Any:
        if isinstance(leaf, PackedSequence):
            return map_leaves(self._convert, leaf)
        if not isinstance(leaf, torch.Tensor):
            return leaf
        delivery = self._delivery
        if delivery.dtype is not None and leaf.is_floating_point():
            leaf = leaf.to(delivery.dtype)
        if leaf.ndim == _DIMENSIONS.get(delivery.memory_format):
            leaf = leaf.contiguous(memory_format=delivery.memory_format)
        return leaf

    def _copy_to_static(self, batch: Any) -> Any:
        """The batch in the tensors of the first one."""
        tensors = dict(_tensors(batch))
        if self._buffers is None:
            self._buffers = {path: tensor.clone() for path, tensor in tensors.items()}
        else:
            _check_same(self._buffers, tensors)
            for path, tensor in tensors.items():  # a dict may have its keys in another order
                self._buffers[path].copy_(tensor)
        rest = map(self._buffers.__getitem__, tensors)
        return map_leaves(lambda leaf: next(rest) if isinstance(leaf, torch.Tensor) else leaf, batch)


def _tensors(batch: Any) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Paths and tensors of a batch; ArgumentError if some cannot be replaced."""
    for path, leaf in paths(batch):
        if isinstance(leaf, torch.Tensor):
            yield path, leaf
        elif hasattr(leaf, "to"):
            raise ArgumentError(
                f"static=True cannot keep the addresses of tensors in a {type(leaf).__name__}: return a dict, a tuple"
                " or a dataclass from collate_fn or the transform, or leave out static="
            )


def _nbytes(leaf: Any) -> int:
    is_strided = isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided and not leaf.is_nested
    return leaf.nbytes if is_strided else host_nbytes([leaf])


_DIMENSIONS: dict[Any, int] = {torch.channels_last: 4, torch.channels_last_3d: 5}


def _check_same(
    buffers: Mapping[tuple[Any, ...], torch.Tensor], tensors: Mapping[tuple[Any, ...], torch.Tensor]
) -> None:
    wanted, got = ({path: (tuple(each.shape), each.dtype) for path, each in one.items()} for one in (buffers, tensors))
    if wanted != got:
        raise ArgumentError(
            f"static=True needs batches of equal shapes: the first had {_listed(wanted)}, this one has {_listed(got)}."
            " Pass drop_last=True for a shorter last batch, or pad samples to one length"
        )


def _listed(kinds: Mapping[tuple[Any, ...], Any]) -> Any:
    """Shapes and dtypes, with the keys of dicts."""
    are_named = any(isinstance(key, str) for path in kinds for key in path)
    return dict(kinds) if are_named else list(kinds.values())


def _keys(batch: Delivered) -> NDArray[np.uint64] | None:
    """One key per row, independent of the samples' keys.

    None without a seed. Rows that were left out have no key.
    """
    request, result = batch
    if request.seed is None:
        return None
    if result.rows is not None:
        places = np.asarray(result.rows, np.int64)
        return derive_each((request.seed, request.epoch, request.partition), places, "batch")
    gone = {skip.position for skip in result.skipped if skip.replaced_by is None}
    places = np.array([place for place in np.asarray(request.positions).tolist() if place not in gone], np.int64)
    return derive_each((request.seed, request.epoch), places, "batch")


def takes_keys(transform: Callable[..., Any] | None) -> bool:
    """True if a callable has an argument `keys`."""
    if transform is None:
        return False
    try:
        return "keys" in inspect.signature(transform).parameters
    except (TypeError, ValueError):  # built-ins without a signature
        return False


def span(name: str) -> AbstractContextManager[Any]:
    """A range in profiles; NVTX, too, within `torch.autograd.profiler.emit_nvtx`."""
    return torch.profiler.record_function(name) if _profiler_enabled() else nullcontext()
