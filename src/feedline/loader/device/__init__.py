"""Stages between workers and loop: page-locking, and copies to the device."""

from feedline.loader.device.backend import Backend, CudaBackend, Event
from feedline.loader.device.copy import DeviceStage, PlainStage
from feedline.loader.device.delivery import Delivered, Delivery, DeliverySteps
from feedline.loader.device.pin import PinStage
from feedline.loader.device.resolve import open_stage
from feedline.loader.device.stage import Depth, InFlight, Stage, StageStatistics

__all__ = [
    "Backend",
    "CudaBackend",
    "Delivered",
    "Delivery",
    "DeliverySteps",
    "Depth",
    "DeviceStage",
    "Event",
    "InFlight",
    "PinStage",
    "PlainStage",
    "Stage",
    "StageStatistics",
    "open_stage",
]
