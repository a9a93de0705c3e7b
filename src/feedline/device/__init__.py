"""The stage between the workers and the loop: page-locked memory, or a copy to the device ahead of delivery."""

from feedline.device.backend import Backend, CudaBackend, Event
from feedline.device.copying import DeviceStage, PlainStage
from feedline.device.pinning import PinStage
from feedline.device.stage import Depth, InFlight, Stage, StageStatistics
from feedline.device.target import open_stage, target

__all__ = [
    "Backend",
    "CudaBackend",
    "Depth",
    "DeviceStage",
    "Event",
    "InFlight",
    "PinStage",
    "PlainStage",
    "Stage",
    "StageStatistics",
    "open_stage",
    "target",
]
