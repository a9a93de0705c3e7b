"""Streams of samples in partitions, with steps that resume; live streams."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from feedline.streams.sources import from_dataset, from_items
from feedline.streams.stream import SampleStream, curriculum, mix

if TYPE_CHECKING:
    from feedline.streams.live.kafka import Kafka
    from feedline.streams.live.lines import SocketLines
    from feedline.streams.live.nats import NATS
    from feedline.streams.live.redis import Redis
    from feedline.streams.live.sql import SQLRows
    from feedline.streams.live.terms import LiveLimits

__all__ = [
    "NATS",
    "Kafka",
    "LiveLimits",
    "Redis",
    "SQLRows",
    "SampleStream",
    "SocketLines",
    "curriculum",
    "from_dataset",
    "from_items",
    "mix",
]

_LIVE = {
    "Kafka": "kafka",
    "LiveLimits": "terms",
    "NATS": "nats",
    "Redis": "redis",
    "SQLRows": "sql",
    "SocketLines": "lines",
}
"""Live streams, and their modules in `live`."""


def __getattr__(name: str) -> Any:
    if name not in _LIVE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"feedline.streams.live.{_LIVE[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
