"""Copies to the device, and advice for the delivery of batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from feedline.loader.report.model import Model
from feedline.loader.report.remedy import Advice, upper_bound
from feedline.loader.report.replay import THREAD
from feedline.loader.report.stats import Stats, seconds, share, size


class DeviceCopies(NamedTuple):
    """Copies of the device per batch, in seconds."""

    nbytes: float = 0.0
    total_s: float = 0.0
    exposed_s: float = 0.0
    """Part of `total_s` in which the loop's stream waited for the copy."""
    period_s: float = 0.0

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.nbytes / self.total_s if self.total_s else 0.0

    def gain(self, factor: float) -> float:
        """Speed-up of the loop if copies took `factor` of their time.

        Copying that the loop's work hides now stays hidden.
        """
        hidden_s = self.total_s - self.exposed_s
        after_s = self.period_s - self.exposed_s + max(factor * self.total_s - hidden_s, 0.0)
        after_s = max(after_s, _LEAST_AFTER * self.period_s)
        return self.period_s / after_s if after_s > 0 else 1.0


_LEAST_AFTER = 0.01
"""Smallest share of a period that is left without copies: the events of the device have a clock of their own."""


def copies_of(stats: Stats, model: Model) -> DeviceCopies:
    """The copies of a loop; empty without a device that times them."""
    if model.context.device is None or not stats.copy_s or not stats.batches:
        return DeviceCopies()
    exposed_s = min(max(stats.copy_s - stats.hidden_copy_s, 0.0) / stats.batches, model.measured.period_s)
    return DeviceCopies(
        stats.copied_nbytes / stats.batches, stats.copy_s / stats.batches, exposed_s, model.measured.period_s
    )


def fewer_bytes(model: Model, stats: Stats) -> Iterator[Advice]:
    """Copies to the device that are a quarter as large."""
    copies = copies_of(stats, model)
    gain = copies.gain(0.25)
    text = (
        "uint8 instead of float32, converted on the device (Delivery(transform=...)): a quarter of "
        f"{size(copies.nbytes)} a batch at {size(copies.rate)}/s; the loop waits for {seconds(copies.exposed_s)} of "
        f"{seconds(copies.total_s)}"
    )
    yield Advice(text, {}, gain, 1.0, gain, "bound")


def one_copy(model: Model, stats: Stats) -> Iterator[Advice]:
    """Batches that come in page-locked memory already."""
    context, copy_s = model.context, model.measured.mean("copy").alone_s
    if context.device is None:
        text = (
            "device='cuda' in place of pin_memory=True: worker processes then send in page-locked memory, and no batch "
            f"is copied into it first, for which the loop waits {seconds(copy_s)} a batch"
        )
        yield from upper_bound(model, "copy", text)
    elif stats.staged_nbytes > 0.05 * stats.copied_nbytes and model.present.setting.method == THREAD:
        part = share(min(stats.staged_nbytes / max(stats.copied_nbytes, 1), 1.0))
        text = (
            f"worker processes send in page-locked memory: {part} of the bytes were copied twice, for which the loop "
            f"waits {seconds(copy_s)} a batch"
        )
        case = model.removal("copy")
        gain = max(model.gain(case), copies_of(stats, model).gain(0.5))
        yield Advice(text, {"worker_method": "process"}, gain, 1.0, gain, "bound")


def less_decoding(model: Model, _: Stats) -> Iterator[Advice]:
    """A decoder on the device for which the loop does not wait."""
    takes = seconds(model.measured.mean("device_decode").alone_s)
    text = (
        f"the loop waits {takes} a batch for the device's decoder: let workers decode a part of the images, "
        "DecodeOnDevice(..., cpu_share=), or all of them, without DecodeOnDevice"
    )
    yield from upper_bound(model, "device_decode", text)


def cheaper_transform(model: Model, _: Stats) -> Iterator[Advice]:
    """A transform on the device that takes no time."""
    takes = seconds(model.measured.mean("device_transform").alone_s)
    text = (
        f"a cheaper Delivery(transform=...): the training process spends {takes} a batch in it; "
        "torch.compile it, or let workers do what needs no device"
    )
    yield from upper_bound(model, "device_transform", text)
