"""Devices: checks of their names, free memory, and gathers of rows."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.core.cgroups import Cgroup
from feedline.core.proc import meminfo
from feedline.core.units import parse_nbytes
from feedline.errors import ArgumentError

Device = str | int | torch.device


NO_DEVICE_REMEDY = "leave device=None to get batches in host memory"
"""Remedy for an unusable device of a loader."""


def usable_device(device: Device, alternative: str = NO_DEVICE_REMEDY) -> torch.device:
    """Check that a device is usable and return it; ArgumentError otherwise.

    `alternative` ends the message with an alternative to the device.
    """
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device={device!r} is not a device that torch knows ({first_line(error)}). Pass 'cuda', 'cuda:1' or "
            f"a torch.device, or {alternative}."
        ) from error
    if wanted.type == "cuda":
        _check_cuda(wanted, alternative)
    else:
        _check_other(wanted, alternative)
    return wanted


def _check_cuda(wanted: torch.device, alternative: str) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise ArgumentError(
            f"device='{wanted}': torch {torch.__version__} is built without CUDA. Install a CUDA "
            f"build of torch (https://pytorch.org/get-started/locally), or {alternative}."
        )
    devices = torch.cuda.device_count()
    if not torch.cuda.is_available() or devices <= (wanted.index or 0):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "is not set" if visible is None else f"is {visible!r}"
        raise ArgumentError(
            f"device='{wanted}': torch {torch.__version__} finds {devices} CUDA devices "
            f"(CUDA_VISIBLE_DEVICES {seen}). Pass a device number below that, check nvidia-smi, or {alternative}."
        )


def _check_other(wanted: torch.device, alternative: str) -> None:
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, NotImplementedError, AssertionError, ModuleNotFoundError) as error:
        raise ArgumentError(
            f"device='{wanted}': torch {torch.__version__} cannot use it here: "
            f"{first_line(error)}. Pass another device, or {alternative}."
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of the text of an error, without its period."""
    return str(error).strip().partition("\n")[0].rstrip(".")


def has_streams(device: torch.device) -> bool:
    """True for accelerators, whose work runs after the call that enqueues it."""
    return device.type not in ("cpu", "meta")


def take_rows(tables: Sequence[torch.Tensor], places: NDArray[np.int64]) -> list[torch.Tensor]:
    """`rows[places]` of each table, in new memory of their one device.

    `places` are within the rows, and cross to the device once. In the main thread, the results belong to its current
    stream. In any other thread they are complete, so that the loop may use them on any stream.
    """
    device = tables[0].device
    there = uploaded(places, device)
    taken = [rows.index_select(0, there) for rows in tables]
    synchronize_in_thread(device)
    return taken


def uploaded(values: torch.Tensor | NDArray[Any], device: torch.device) -> torch.Tensor:
    """Put values on a device; to CUDA, without a wait.

    They may be changed at once, unless both are on the same device: the result may then share their memory.
    """
    host = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if device.type != "cuda" or not host.is_cpu:
        return host.to(device)
    # From other memory, torch would wait for the whole stream: for the steps that the loop has enqueued. torch does not
    # reuse its page-locked memory before the copy has ended.
    pinned = torch.empty(host.shape, dtype=host.dtype, device="cpu", pin_memory=True).copy_(host)
    return pinned.to(device, non_blocking=True)


def synchronize_in_thread(device: torch.device) -> None:
    """Wait for enqueued work, except in the main thread."""
    if has_streams(device) and threading.current_thread() is not threading.main_thread():
        _current_stream(device).synchronize()


def synchronize(device: torch.device) -> None:
    """Wait for the work enqueued on the current stream of a device."""
    if has_streams(device):
        _current_stream(device).synchronize()


def _current_stream(device: torch.device) -> Any:
    accelerator: Any = getattr(torch, "accelerator", None)  # torch before 2.6 lacks it
    return torch.cuda.current_stream(device) if accelerator is None else accelerator.current_stream(device)


def free_nbytes(device: torch.device) -> int:
    """Bytes that new tensors on a device may take now.

    ArgumentError for a device whose backend cannot report it.
    """
    if device.type == "cpu":
        return _free_host_nbytes()
    module: Any = getattr(torch, device.type, None)
    if device.type == "mps":
        return int(module.recommended_max_memory() - module.driver_allocated_memory())
    try:
        free, _ = module.mem_get_info(device)
        # torch's allocator keeps the memory of freed tensors: the driver counts it as used, but it can be reused.
        unused = module.memory_reserved(device) - module.memory_allocated(device)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        raise ArgumentError(
            f"the free memory of '{device}' is unknown: give a number of bytes as the budget"
        ) from error
    return int(free + unused)


def gpu_of(device: torch.device | None) -> torch.device | None:
    """The CUDA device of the calling thread's loop, with its number.

    That is `device`, or by default the thread's current one. None for others, and before this process uses CUDA.
    """
    if device is not None and device.type != "cuda":
        return None
    if device is not None and device.index is not None:
        return device
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # asking would create a context
        return None
    return torch.device("cuda", torch.cuda.current_device())


def gpu_utilization(device: torch.device | None = None) -> float | None:
    """Recent utilization of a CUDA device by NVML, 0 to 1.

    By default of the thread's current one. None without NVML or its package `nvidia-ml-py`, and before this process
    uses CUDA.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # asking would create a context
        return None
    return nvml_utilization(device)[0]


def nvml_utilization(device: torch.device | int | None) -> tuple[float | None, str]:
    """Share of the latest second in which a CUDA device computed.

    It is None, with the reason, if NVML does not know it; some devices report on a part of a second. A device with a
    number needs no context of CUDA.
    """
    try:
        return torch.cuda.utilization(device) / 100, ""
    except Exception as error:  # noqa: BLE001 - no package, no driver, no permission: each has an error of its own
        return None, first_line(error)


def _free_host_nbytes() -> int:
    free, left = meminfo()["MemAvailable"], Cgroup.of_process().memory_available()
    return free if left is None else min(free, left)


def budget_nbytes(budget: int | str, device: torch.device) -> int:
    """Bytes of a budget.

    A budget is a number of bytes, an amount such as "20 GB", or a share of the free memory such as "80%".
    """
    if isinstance(budget, int) and not isinstance(budget, bool) and budget >= 0:
        return budget
    if isinstance(budget, str):
        share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", budget.strip())
        if share is not None and float(share[1]) <= 100:
            return int(free_nbytes(device) * float(share[1]) / 100)
        amount = parse_nbytes(budget)
        if amount is not None:
            return amount
    raise ArgumentError(f'budget={budget!r}: give bytes, an amount such as "20 GB", or a share such as "80%"')


class _Delivering(threading.local):
    """True while this thread builds a batch for a device."""

    active: bool = False


_delivering = _Delivering()


def is_for_device() -> bool:
    """True if the batch that this thread builds is for a device."""
    return _delivering.active


@contextmanager
def for_device(active: bool) -> Iterator[None]:
    """Within the block, `is_for_device()` of this thread is `active`."""
    outer, _delivering.active = _delivering.active, active
    try:
        yield
    finally:
        _delivering.active = outer
