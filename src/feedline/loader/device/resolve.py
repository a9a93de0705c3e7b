"""Choice of a stage from the arguments `device` and `pin_memory`."""

from __future__ import annotations

import warnings

import torch

from feedline.core.devices import Device, usable_device
from feedline.loader.device import backend
from feedline.loader.device.copy import DeviceStage, PlainStage
from feedline.loader.device.delivery import Delivery
from feedline.loader.device.pin import PinStage
from feedline.loader.device.stage import Stage


def open_stage(device: Device | Delivery | None = None, *, pin_memory: bool = False) -> Stage | None:
    """The stage for these arguments, or None without one.

    `device` takes precedence over `pin_memory`: delivered batches are on the device then. As in torch, `pin_memory`
    without an accelerator only warns.
    """
    if device is not None:
        delivery = Delivery.of(device)
        wanted = usable_device(delivery.device)
        streams = backend_of(wanted)
        if streams is None:
            return PlainStage(wanted, delivery.depth)
        return DeviceStage(streams, delivery.depth, delivery.cpus)
    return PinStage() if pin_memory and _can_pin() else None


def backend_of(device: torch.device) -> backend.Backend | None:
    """The backend of a device; None without a side stream for copies."""
    if device.type == "cuda":
        return backend.CudaBackend(device)
    # MPS is left out: torch gives it one stream only.
    return backend.AcceleratorBackend(device) if device.type == "xpu" and backend.has_accelerator_streams() else None


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
