"""Choice of a stage from the arguments `device` and `pin_memory`."""

from __future__ import annotations

import os
import warnings

import torch

from feedline.errors import ArgumentError
from feedline.loader.device import backend
from feedline.loader.device.backend import CudaBackend
from feedline.loader.device.copy import DeviceStage, PlainStage
from feedline.loader.device.pin import PinStage
from feedline.loader.device.stage import Stage

Device = str | int | torch.device


def target(device: Device) -> torch.device:
    """Check that a device is usable and return it; ArgumentError otherwise."""
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(
            f"device={device!r} is not a device that torch knows ({_first_line(error)}). Pass 'cuda', 'cuda:1', "
            "a torch.device, or None to leave batches in host memory."
        ) from error
    if wanted.type == "cuda":
        _check_cuda(wanted)
    else:
        _check_other(wanted)
    return wanted


def open_stage(
    device: Device | None = None, *, pin_memory: bool = False, depth_nbytes: int | None = None
) -> Stage | None:
    """The stage for these arguments, or None without one.

    `device` takes precedence over `pin_memory`: delivered batches are on the device then. As in torch, `pin_memory`
    without an accelerator only warns.
    """
    if device is not None:
        wanted = target(device)
        return DeviceStage(CudaBackend(wanted), depth_nbytes) if wanted.type == "cuda" else PlainStage(wanted)
    return PinStage(depth_nbytes) if pin_memory and _can_pin() else None


def _can_pin() -> bool:
    accelerator = backend.current()
    if accelerator is None:
        reason = "no accelerator is found, then device pinned memory won't be used."
    elif accelerator == "mps":
        reason = "not supported on MPS now, device pinned memory won't be used."
    else:
        return True
    # The same words as torch's, because users filter this warning.
    warnings.warn(f"'pin_memory' argument is set as true but {reason}", stacklevel=3)
    return False


def _check_cuda(wanted: torch.device) -> None:
    if torch.version.cuda is None and torch.version.hip is None:
        raise ArgumentError(
            f"device='{wanted}': torch {torch.__version__} is built without CUDA. Install a CUDA "
            "build of torch (https://pytorch.org/get-started/locally), or leave device=None."
        )
    devices = torch.cuda.device_count()
    if not torch.cuda.is_available() or devices <= (wanted.index or 0):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        seen = "is not set" if visible is None else f"is {visible!r}"
        raise ArgumentError(
            f"device='{wanted}': torch {torch.__version__} finds {devices} CUDA devices "
            f"(CUDA_VISIBLE_DEVICES {seen}). Pass a device number below that, check nvidia-smi, or leave device=None."
        )


def _check_other(wanted: torch.device) -> None:
    try:
        torch.empty(0, device=wanted)
    except (RuntimeError, NotImplementedError, AssertionError, ModuleNotFoundError) as error:
        raise ArgumentError(
            f"device='{wanted}': torch {torch.__version__} cannot use it here: "
            f"{_first_line(error)}. Leave device=None to get batches in host memory."
        ) from error


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
