"""feedline's own arguments of a DataLoader."""

from __future__ import annotations

import operator
import os
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch.utils.data import RandomSampler

from feedline.core.devices import usable_device
from feedline.errors import ArgumentError
from feedline.loader.device import Delivery
from feedline.loader.error_policy import Action, ErrorPolicy
from feedline.loader.loop import is_iterated
from feedline.loader.monitoring.resources import rank_and_world_size
from feedline.loader.plan import check_ranks
from feedline.loader.pools import check_method
from feedline.loader.ranks.contract import RankPolicy, Ranks
from feedline.samplers import Shuffled
from feedline.workers.base import Recovery


@dataclass(frozen=True, slots=True)
class OwnArguments:
    """feedline's own arguments of a loader.

    feedline reads them here: an attribute of the loader with such a name may belong to the user's subclass.
    """

    seed: int | None = None
    worker_method: str = "auto"
    distributed: Ranks | RankPolicy = None
    on_error: Action | ErrorPolicy = "raise"
    device: str | torch.device | Delivery | None = None
    recovery: Recovery = field(default_factory=Recovery)
    accelerate: bool = True
    log: str | os.PathLike[str] | None = None


T = TypeVar("T")


class OwnArgument(Generic[T]):
    """Attribute of a loader for one of its own arguments.

    Setting it changes the argument for the next iteration. An attribute of a user's subclass is only set.
    """

    # Not `__setattr__` of the loader: each of torch's assignments to a new loader would pass it.
    def __set_name__(self, _: type, name: str) -> None:
        self._name = name

    def __get__(self, loader: Any, kind: type) -> T:
        if loader is None:
            return self  # type: ignore[return-value]
        try:
            value: T = vars(loader)[self._name]
        except KeyError:
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self._name!r}") from None
        return value

    def __set__(self, loader: Any, value: T) -> None:
        is_own = vars(type(loader)).get(self._name) is self
        vars(loader)[self._name] = change_argument(loader, self._name, value) if is_own else value


def change_argument(loader: Any, name: str, value: Any) -> Any:
    """Change one argument for the next iteration; return the new value.

    Raises `ArgumentError`, and changes nothing, if the loader could not have been created with it.
    """
    former = {name: getattr(loader, name) for name in ("_fl", *_DERIVED)}
    if name == "seed":
        value = check_seed(value)
    if name == "recovery":
        value = value or Recovery()
    if name == "device" and value is not None:
        usable_device(Delivery.of(value).device)
    try:
        loader._fl = replace(loader._fl, **{name: value})
        _derive(loader)
        _check_order(loader, former["_fl"].seed)
        check_method(loader)
        if name == "distributed":
            policy = loader._fl_ranks
            check_ranks(
                loader.dataset, loader._fl_rank, loader._fl_world_size,
                allows_uneven=policy.uneven == "allow", reads_all=policy.reads_all,
            )  # fmt: skip
    except Exception:
        for each, earlier in former.items():
            setattr(loader, each, earlier)
        raise
    if loader._fl_pools.has_idle_pool:  # persistent workers were started with the former value
        loader._fl_pools.renew(running=is_iterated(loader))
    return value


_DERIVED = "_fl_policy", "_fl_ranks", "_fl_rank", "_fl_world_size"


def _derive(loader: Any) -> None:
    """Set the attributes that follow from `on_error` and `distributed`."""
    loader._fl_policy = ErrorPolicy.of(loader._fl.on_error)
    loader._fl_ranks = RankPolicy.of(loader._fl.distributed)
    loader._fl_rank, loader._fl_world_size = rank_and_world_size(loader._fl_ranks.ranks)


def _check_order(loader: Any, former_seed: int | None) -> None:
    """Raise `ArgumentError` if a shuffled order would have to be another one."""
    sampler = loader.sampler
    is_shuffled = type(sampler) is RandomSampler or (type(sampler) is Shuffled and sampler.seed == former_seed)
    if not (loader._fl_has_own_order and is_shuffled):
        return
    if loader._fl.seed != former_seed:
        raise ArgumentError(
            "the seed of a loader with shuffle=True cannot be changed: its order was chosen with it. Create a new"
            " DataLoader(..., shuffle=True, seed=...)"
        )
    if loader._fl.seed is None and loader._fl_world_size > 1:
        raise ArgumentError(
            "distributed= with shuffle=True needs seed=...: without it every rank draws its own order. Create a new"
            " DataLoader with both"
        )


def check_seed(seed: Any) -> int | None:
    """The seed as int or None; `ArgumentError` for other values."""
    if seed is None:
        return None
    try:
        return operator.index(seed)
    except TypeError:
        raise ArgumentError(f"seed must be a whole number or None; got {seed!r}") from None


OWN_NAMES = tuple(each.name for each in fields(OwnArguments))
