"""Loaders that frameworks rebuild from the attributes of a feedline loader."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from types import FrameType
from typing import Any

from torch.utils.data import BatchSampler

from feedline.core.cursor import Cursor
from feedline.core.dataset import declared
from feedline.core.rng import derive
from feedline.workers.base import Recovery

OWN = {"seed": None, "worker_method": "auto", "on_error": "raise", "recovery": Recovery()}
"""feedline's own arguments that a loader built from another one takes over, with their defaults.

`distributed` and `device` are left out: a framework that builds loaders shards and moves batches itself.
"""

_ARGUMENTS = "feedline_arguments"  # attribute of the batch sampler that a loader has made


_RAY = "ray.train.torch.train_loop_utils", "ray.train.v2.torch.train_loop_utils"


_REBUILDERS = {
    "accelerate.data_loader": ("DataLoader",),
    "opacus.data_loader": ("DataLoader", "DPDataLoader"),
    **dict.fromkeys(_RAY, ()),  # it passes neither batch sampler nor seed on, whatever class it builds
}
"""Modules that build a loader of torch's class from the attributes of another, and their names for that class."""


_REMEDY = "Call feedline.patch_torch() before, so that it builds feedline's; see docs/how-to/frameworks.md"


_REMEDY_FOR_STATEFUL = (
    "Leave use_stateful_dataloader out, and call feedline.patch_torch() before: the prepared loader then has"
    " state_dict() of its own; see docs/how-to/trainers/accelerate.md"
)


_REMEDY_FOR_RAY = (
    "Leave prepare_data_loader out: distributed='auto' shares the batches, and device=ray.train.torch.get_device()"
    " moves them; see docs/how-to/trainers/ray-train.md"
)


def note_arguments(loader: Any) -> None:
    """Note the loader's own arguments on its batch sampler.

    A framework that rebuilds the loader from its attributes passes this object on.
    """
    own = {name: getattr(loader._fl, name) for name in OWN}
    if _changed_arguments(own) and type(loader.batch_sampler) is BatchSampler:
        setattr(loader.batch_sampler, _ARGUMENTS, own)


def inherit_arguments(batch_sampler: Any, own: dict[str, Any]) -> dict[str, Any]:
    """`own`, or the arguments noted on the batch sampler.

    Where a batch sampler shares the batches of another among processes, each process gets a seed of its own. Positions
    count within the share of a process, so with one seed, equal positions of two processes would draw equal numbers.
    """
    if _changed_arguments(own):
        return own
    rank: int = 0
    wrapper, seen = batch_sampler, set[int]()
    while wrapper is not None and declared(wrapper, _ARGUMENTS) is None:
        seen.add(id(wrapper))
        process_index = declared(wrapper, "process_index")
        rank = process_index if isinstance(process_index, int) else rank
        wrapper = declared(wrapper, "batch_sampler")
        if id(wrapper) in seen:  # some samplers are their own batch sampler
            return own
    if wrapper is None:
        return own
    found: dict[str, Any] = dict(getattr(wrapper, _ARGUMENTS))
    if found["seed"] is not None and rank:
        found["seed"] = derive(found["seed"], "rank", rank) >> 1
    return found


def _changed_arguments(own: dict[str, Any]) -> list[str]:
    return [f"{name}={value!r}" for name, value in own.items() if value not in (None, OWN[name])]


def counts_epochs(caller: FrameType) -> bool:
    """True if `caller` is Lightning, which skips complete epochs.

    After a checkpoint at the last step of an epoch, Lightning requests the next epoch. A user's own loop begins with
    the rest of the epoch, even if it is empty.
    """
    return str(caller.f_globals.get("__name__")).endswith(".utilities.combined_loader")


def batches_together(caller: FrameType) -> int:
    """Batches that the caller fetches before it delivers any of them.

    On rank 0, Accelerate's dispatcher reads the state before each of these batches, and returns the latest state.
    """
    asker = caller.f_locals.get("self")
    if caller.f_globals.get("__name__") != _DISPATCHER[0] or type(asker).__name__ != _DISPATCHER[1]:
        return 1
    found = vars(asker)  # it also reads the state during its construction, and has none of these yet
    single = found.get("split_batches", True) or found.get("submesh_tp") or asker.end_of_dataloader  # type: ignore[union-attr]
    return 1 if single else int(found["state"].num_processes)


_DISPATCHER = "accelerate.data_loader", "DataLoaderDispatcher"


_BATCHES_TO_SKIP = "_speechbrain_recovery_skip_to"


def skip_delivered(loader: Any, progress: Any, requests: Iterator[Any]) -> None:
    """Skip the batches before a checkpoint of SpeechBrain.

    The checkpoint holds the number of batches; with torch's loader, SpeechBrain lets the iterator skip them. A stream
    saves its own position.
    """
    count = vars(loader).get(_BATCHES_TO_SKIP)
    if count is None:
        return
    setattr(loader, _BATCHES_TO_SKIP, None)
    if count and isinstance(progress.cursor, Cursor):
        progress.samples = None
        for request in islice(requests, count):
            progress.cursor, _ = request.advance(progress.cursor, None)


class StepState:
    """The state before the batches that are fetched together for one step."""

    def __init__(self) -> None:
        self._run: Any = None
        self._first, self._state = 0, dict[str, Any]()

    def at(self, run: Any, delivered: int, together: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The state of the step that fetches batch `delivered` of `run`.

        `make()` returns the current state. It is called for the first batch of the step only.
        """
        if run is not self._run or not self._first <= delivered < self._first + together:
            self._run, self._first, self._state = run, delivered, make()
        return dict(self._state)


def warn_of_rebuild(loader: Any, reader: FrameType, *, by_ray: bool = False) -> None:
    """Warn if `reader` is about to build another loader from this one.

    `by_ray` is true for an attribute that, of these frameworks, only Ray reads when it builds a loader.
    """
    module = str(reader.f_globals.get("__name__"))
    names = _REBUILDERS.get(module)
    if names is None or (module in _RAY) != by_ray:
        return
    builds, remedy = "torch's DataLoader", _REMEDY_FOR_RAY if by_ray else _REMEDY
    # Before Python 3.12 a comprehension, which may be the reader, has a frame of its own.
    if any(each is not None and each.f_locals.get("use_stateful_dataloader") for each in (reader, reader.f_back)):
        builds, remedy = "torchdata's StatefulDataLoader", _REMEDY_FOR_STATEFUL
    elif any(issubclass(reader.f_globals.get(name, object), type(loader)) for name in names):
        return
    given = _changed_arguments({name: getattr(loader._fl, name) for name in OWN})
    moved = {name: getattr(loader._fl, name) for name in ("distributed", "device")}
    given += [f"{name}={value!r}" for name, value in moved.items() if value]
    lost = f"{', '.join(given)}, exact resume" if given else "exact resume"
    warnings.warn(
        f"{module} reads the arguments of this feedline.DataLoader and builds {builds} from them: {lost} and"
        f" worker recovery are lost. {remedy}",
        stacklevel=4,
    )


def warn_of_fetching_ahead(caller: FrameType) -> None:
    """Warn if `caller` fetches a batch before the loop needs it."""
    module = caller.f_globals.get("__name__")
    if module in _RAY:
        warnings.warn(
            f"{module} fetches one batch before the loop asks for it, so loader.state_dict() is one batch ahead of the"
            f" loop: a resume would lose it. {_REMEDY_FOR_RAY}",
            stacklevel=3,
        )
