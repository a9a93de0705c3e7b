"""Sequence of a user's transforms, with the known ones executed by kernels."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image

from feedline.core.recognition import StepFinding
from feedline.transforms.recognized import steps as known
from feedline.transforms.recognized.frame import Frame, frame_of
from feedline.transforms.recognized.numbers import Numbers, numbers_of
from feedline.transforms.recognized.origin import is_from, qualified_name, replaced_function, why_modified

PACKAGE = "torchvision"


ByMode = tuple[Numbers | None, Numbers | None]
"""Conversions of images in RGB and in L."""


class RowMemory(Protocol):
    """Memory of the batch; each sample takes its next row."""

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None: ...

    def defer(
        self, write: Callable[[list[Any]], Sequence[int]], item: Any, undo: Callable[[], object] | None, nbytes: int
    ) -> None: ...


class Node(Protocol):
    """Executable step.

    `run(value, rows)` takes and returns a frame, a Pillow image, a tensor or anything else.
    """

    def run(self, value: Any, rows: RowMemory | None) -> Any: ...


class Chain:
    """A transform as a list of nodes.

    `chain(value, rows)` returns the result of the transform for `value`, which is a frame, or any object that the
    user's own code opens. With `rows`, a tensor may be in the batch. Random numbers come from torch's global generator,
    as many as the transform draws, in its order. RefusedError if the kernels cannot read the source; then random
    numbers may have been drawn.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform
        self.findings: list[StepFinding] = []
        flat = list(_flatten(transform)) if transform is not None else []
        self._dtype = torch.get_default_dtype()
        self.nodes = _compile(flat, self.findings)
        # Lists of steps and hooks are compared item by item, steps and arrays by identity, and arrays also by content.
        watched = list(_watched(transform)) if transform is not None else []
        self._seen = [(step, _attributes(step)) for step in watched]
        self._arrays = [(array, _copy_of(array)) for step, _ in self._seen for array in _arrays_of(step)]

    @property
    def uses_kernels(self) -> bool:
        """True if a step runs on a frame."""
        return any(isinstance(node, (_OnFrame, _ConvertedNumbers)) for node in self.nodes)

    @property
    def resizes(self) -> bool:
        """True if a step resizes a frame."""
        nodes = (node for node in _all_nodes(self.nodes) if isinstance(node, _OnFrame))
        return any(node.apply in (known.resize, known.random_resized_crop) for node in nodes)

    @property
    def opens_itself(self) -> bool:
        """True if the first step needs the user's own image."""
        return bool(self.nodes) and isinstance(self.nodes[0], _StepCall) and not self.nodes[0].is_known

    @property
    def is_repeatable(self) -> bool:
        """True if all steps run the library's own code only."""
        return not any(isinstance(node, _StepCall) and not node.is_known for node in _all_nodes(self.nodes))

    @property
    def gives_tensors(self) -> bool:
        """True if frames in RGB become tensors."""
        return any(isinstance(node, _ConvertedNumbers) and node.numbers[0] is not None for node in self.nodes)

    def __call__(self, value: Any, rows: RowMemory | None) -> Any:
        for node in self.nodes:
            value = node.run(value, rows)
        return value.to_value(with_info=True) if isinstance(value, Frame) else value

    def is_current(self, transform: Any) -> bool:
        """False if the transform or its steps have changed since construction."""
        if transform is not self.transform or torch.get_default_dtype() is not self._dtype:
            return False
        try:
            same = all(getattr(step, "__dict__", {}) == seen for step, seen in self._seen)
        except (RuntimeError, ValueError):  # tensors or arrays were exchanged, and have no single truth value
            return False
        return same and all(_is_equal(array, former) for array, former in self._arrays)


def _all_nodes(nodes: Sequence[Node]) -> Iterator[Node]:
    for node in nodes:
        yield node
        if isinstance(node, _RandomSteps):
            yield from _all_nodes(node.nodes)


def _attributes(step: Any) -> dict[str, Any]:
    values = getattr(step, "__dict__", {})
    return {name: copy(value) if isinstance(value, (list, dict)) else value for name, value in values.items()}


_Numeric = torch.Tensor | np.ndarray

_MOST_NUMBERS = 4096
"""Larger arrays, as those of `LinearTransformation`, belong to no step of the kernels."""


def _arrays_of(step: Any) -> Iterator[_Numeric]:
    """Small arrays and tensors of a step, also in lists."""
    if _name(step).partition(".")[0] != PACKAGE:
        return
    for value in getattr(step, "__dict__", {}).values():
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, _Numeric) and math.prod(each.shape) <= _MOST_NUMBERS:
                yield each


def _copy_of(array: _Numeric) -> _Numeric:
    return array.detach().clone() if isinstance(array, torch.Tensor) else array.copy()


def _is_equal(array: _Numeric, former: _Numeric) -> bool:
    if isinstance(array, torch.Tensor) and isinstance(former, torch.Tensor):
        return torch.equal(array, former)
    return np.array_equal(array, former)


def _watched(step: Any) -> Iterator[Any]:
    """A transform, and all steps and lists of steps in it."""
    yield step
    name = qualified_name(type(step))
    if name not in known.SEQUENCES and name not in known.RANDOM_APPLIES:
        return
    parts = _parts_of(step)
    if parts is not step and isinstance(parts, torch.nn.Module):  # a ModuleList
        yield parts
    for part in parts:
        yield from _watched(part)


def _parts_of(sequence: Any) -> Any:
    """Steps of a `Compose`, or of a `torch.nn.Sequential`."""
    return sequence.transforms if hasattr(sequence, "transforms") else sequence


def _flatten(step: Any) -> Iterator[tuple[Any, str | None]]:
    """Steps in order, without the sequences that hold them.

    Each step comes with the reason why it is not known, or None.
    """
    name = qualified_name(type(step))
    if name in known.SEQUENCES:
        reason = why_modified(step, name.partition(".")[0])
        if reason is None:
            for part in _parts_of(step):
                yield from _flatten(part)
            return
        yield step, reason
        return
    yield step, _why_unknown(step, name)


def _why_unknown(step: Any, name: str) -> str | None:
    if name.partition(".")[0] != PACKAGE:
        return f"not a class of {PACKAGE}"
    reason = why_modified(step, PACKAGE)
    if reason is not None:
        return reason
    entry = known.FRAME_STEPS.get(name)
    if entry is not None and (replaced := _replaced(entry.functions)):
        return f"{PACKAGE}'s function {replaced} was replaced"
    is_known = entry is not None or name in known.CONVERSIONS or name in known.RANDOM_APPLIES or name in known.ERASERS
    return None if is_known else _NO_KERNEL


_NO_KERNEL = "there is no kernel for it"


def _replaced(functions: tuple[str, ...]) -> str | None:
    module = sys.modules.get(f"{PACKAGE}.transforms.functional")
    return replaced_function(module, PACKAGE, functions) if module is not None and functions else None


def _compile(flat: Sequence[tuple[Any, str | None]], findings: list[StepFinding]) -> list[Node]:
    nodes: list[Node] = []
    at = 0
    while at < len(flat):
        numbers, count = _conversion(flat[at:])
        if any(numbers):
            made, count = _on_tensor(flat[at:], count) or ([_converted(flat[at:], numbers, count)], count)
            nodes += made
            findings += [StepFinding(describe(step)) for step, _ in flat[at : at + count]]
            at += count
            continue
        nodes.append(_node(*flat[at], findings))
        at += 1
    return nodes


def _converted(flat: Sequence[tuple[Any, str | None]], numbers: ByMode, count: int) -> _ConvertedNumbers:
    """Conversion that executes the first `count` steps."""
    steps = [step for step, _ in flat[:count]]
    is_last = all(_name(step) in known.ERASERS and reason is None for step, reason in flat[count:])
    return _ConvertedNumbers(numbers, steps, is_last, is_last and count == len(flat))


def _on_tensor(flat: Sequence[tuple[Any, str | None]], count: int) -> tuple[list[Node], int] | None:
    """Nodes for steps that begin with a tensor, and the steps' number.

    The first `count` steps make a tensor of levels, and the next ones move and convert it. None if the kernels cannot
    execute all of these steps into a row of the batch.
    """
    end = count
    while end < len(flat) and flat[end][1] is None and _name(flat[end][0]) in known.TENSOR_STEPS:
        end += 1
    if end == count or not known.resizes_tensors_of_levels():
        return None
    begin = _conversion(flat[:count])[0]
    # Steps on tensors are those of the kernels on levels, and on nothing else.
    if any(each is not None and each.dtype != torch.uint8 for each in begin):
        return None
    rest = [*flat[:count], *flat[end:]]
    numbers, length = _conversion(rest)
    last = _converted(rest, numbers, length)
    if length < count or not last.goes_to_batch:
        return None
    last.steps = last.steps[count:]
    last.copies = _copies(last.steps, next(each.kind for each in begin if each is not None))
    moves = [_OnFrame(step, known.FRAME_STEPS[_name(step)].apply) for step, _ in flat[count:end]]
    return [_TensorBegins(_converted(flat, begin, count)), *moves, last], end + length - count


def _copies(steps: Sequence[Any], kind: type) -> bool:
    """False if these conversions return the memory of a tensor of levels."""
    given: torch.Tensor = torch.zeros((3, 2, 2), dtype=torch.uint8, device="cpu").as_subclass(kind)
    found = given
    for step in steps:
        found = step(found)
    return bool(found.data_ptr() != given.data_ptr())


def _name(step: Any) -> str:
    return qualified_name(type(step))


def _conversion(flat: Sequence[tuple[Any, str | None]]) -> tuple[ByMode, int]:
    """Conversion of as many leading steps as possible, and their number."""
    count = 0
    while count < len(flat) and flat[count][1] is None and _name(flat[count][0]) in known.CONVERSIONS:
        count += 1
    for length in range(count, 0, -1):
        steps = [step for step, _ in flat[:length]]
        numbers = numbers_of(steps, "RGB"), numbers_of(steps, "L")
        if any(numbers):
            return numbers, length
    return (None, None), 0


def _node(step: Any, reason: str | None, findings: list[StepFinding]) -> Node:
    name = _name(step)
    if reason is None and name in known.FRAME_STEPS:
        findings.append(StepFinding(describe(step)))
        return _OnFrame(step, known.FRAME_STEPS[name].apply)
    if reason is None and name in known.RANDOM_APPLIES:
        inner = [each for part in step.transforms for each in _flatten(part)]
        findings.append(StepFinding(f"{type(step).__name__}(p={step.p})", "draws; then its steps, which follow"))
        return _RandomSteps(step, known.RANDOM_APPLIES[name], [_node(*each, findings) for each in inner])
    if reason is None and name in known.ERASERS:
        findings.append(StepFinding(describe(step), "runs its own code, on the tensor"))
        return _Erase(step)
    findings.append(StepFinding(describe(step), f"runs its own code ({reason or _NO_KERNEL})"))
    return _StepCall(step, reason == _NO_KERNEL and name in known.LIBRARY_STEPS)


def describe(step: Any) -> str:
    """Short description of a transform, in one line."""
    if is_from(step, PACKAGE) or not hasattr(step, "__dict__") or hasattr(step, "__code__"):
        return getattr(step, "__qualname__", type(step).__name__)
    text = " ".join(repr(step).split())
    return text if len(text) <= _WIDTH else type(step).__name__


_WIDTH = 76


def as_frame(value: Any) -> Frame | None:
    """Frame of a Pillow image, or the frame itself.

    None for other values, and for images in other modes than RGB and L.
    """
    if isinstance(value, Frame):
        return value
    if type(value) is not Image.Image or value.mode not in ("RGB", "L") or not (value.width and value.height):
        return None
    frame = frame_of(np.asarray(value))
    frame.opened = lambda: value
    return frame


@dataclass(slots=True)
class _OnFrame:
    step: Any
    apply: known.Apply

    def run(self, value: Any, rows: RowMemory | None) -> Any:  # noqa: ARG002 - makes no tensor
        frame = as_frame(value)
        if frame is None:
            return self.step(value)
        return frame if self.apply(self.step, frame) else self.step(frame.to_value())


@dataclass(slots=True)
class _ConvertedNumbers:
    """Steps such as ToTensor and Normalize, executed as one conversion to numbers."""

    numbers: ByMode
    steps: list[Any]
    goes_to_batch: bool
    is_last: bool
    copies: bool = False

    def run(self, value: Any, rows: RowMemory | None) -> Any:
        frame = as_frame(value)
        numbers = None if frame is None else self.numbers[frame.gray]
        if frame is None or numbers is None:
            value = value.to_value() if isinstance(value, Frame) else value
            for step in self.steps:
                value = step(value)
            return value
        if rows is None or not self.goes_to_batch:
            return numbers.new_tensor(frame, self.copies)
        row = rows.take(numbers.shape(frame), numbers.dtype)
        if row is None:
            return numbers.new_tensor(frame, self.copies)
        # Many rows are written by one call, which keeps the caches: levels in memory, as they cannot be refused any
        # more, and encoded images whose samples can be read again.
        source = frame.source
        if self.is_last and isinstance(source, (np.ndarray, bytes)) and (frame.undo or isinstance(source, np.ndarray)):
            nbytes = source.nbytes if isinstance(source, np.ndarray) else len(source)
            rows.defer(numbers.deferred(frame.resampling), (source, frame.placement(), row), frame.undo, nbytes)
        else:
            numbers.write(frame, row)
        return row


@dataclass(slots=True)
class _TensorBegins:
    """Conversion to a tensor of levels, which the next steps move."""

    conversion: _ConvertedNumbers

    def run(self, value: Any, rows: RowMemory | None) -> Any:
        frame = as_frame(value)
        numbers = None if frame is None else self.conversion.numbers[frame.gray]
        if frame is None or numbers is None:
            return self.conversion.run(value, None)
        frame.tensor_of = self._tensor_of
        if rows is None:  # rows have strides of their own
            frame.layout = numbers.layout(frame)
        return frame

    def _tensor_of(self, frame: Frame) -> Any:
        return self.conversion.run(frame, None)


@dataclass(slots=True)
class _RandomSteps:
    step: Any
    at_equality: bool
    nodes: list[Node]

    def run(self, value: Any, rows: RowMemory | None) -> Any:  # noqa: ARG002 - what may not happen has no row
        drawn, p = torch.rand(1), self.step.p
        if not (drawn <= p if self.at_equality else drawn < p):
            return value
        for node in self.nodes:
            value = node.run(value, None)
        return value


@dataclass(slots=True)
class _Erase:
    step: Any

    def run(self, value: Any, rows: RowMemory | None) -> Any:
        frame = as_frame(value)
        given = value if frame is None else frame.to_value()
        changed = self.step(given)
        if rows is None or changed is given or not isinstance(given, torch.Tensor):
            return changed
        return changed if changed.shape != given.shape or changed.dtype != given.dtype else given.copy_(changed)


@dataclass(slots=True)
class _StepCall:
    step: Any
    is_known: bool

    def run(self, value: Any, rows: RowMemory | None) -> Any:  # noqa: ARG002 - the step knows nothing of rows
        return self.step(value.to_value(with_info=not self.is_known) if isinstance(value, Frame) else value)
