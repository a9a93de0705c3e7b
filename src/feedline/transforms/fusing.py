"""Which neighbouring steps become one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from feedline.images import CentreBox, RandomBox, Recipe
from feedline.transforms.steps import Placed
from feedline.transforms.windows import Centre, Conversion, Mirror, Shorter, Window


def fused(steps: Iterable[Placed]) -> tuple[Placed, ...]:
    """The same steps, each joined with the ones before it where one native call does both."""
    done: list[Placed] = []
    for step in steps:
        joined = _joined(done[-1], step) if done else None
        if joined is None:
            done.append(step)
        else:
            done[-1] = joined
    return tuple(done)


def _joined(before: Placed, after: Placed) -> Placed | None:
    first, then = before.step, after.step
    if isinstance(first, Shorter) and isinstance(then, Centre):
        recipe = Recipe(then.size, CentreBox(first.side), interpolation=first.interpolation)
        return replace(before, step=Window(recipe))
    if isinstance(first, Window) and isinstance(then, Mirror):
        return _mirroring(before, first, after, then)
    if isinstance(first, Window) and isinstance(then, Conversion):
        conversion = then if first.conversion is None else _both(first.conversion, then)
        return None if conversion is None else _converting(before, first, conversion)
    if isinstance(first, Conversion) and isinstance(then, Conversion):
        both = _both(first, then)
        return None if both is None else replace(after, step=both)
    return None


def _mirroring(before: Placed, window: Window, after: Placed, mirror: Mirror) -> Placed | None:
    """The window that also mirrors.

    It has one key: the crop's, of which the flip takes the number after the box; where the crop draws nothing, the
    flip's own.
    """
    if window.conversion is not None or window.recipe.flip:
        return None
    path = before.path if isinstance(window.recipe.law, RandomBox) else after.path
    return replace(before, path=path, step=Window(replace(window.recipe, flip=mirror.p)))


def _converting(before: Placed, window: Window, conversion: Conversion) -> Placed:
    return replace(before, step=Window(conversion.onto(window.recipe), conversion))


def _both(first: Conversion, then: Conversion) -> Conversion | None:
    """ToTensor and what follows it; levels that were normalised are not levels any more."""
    return None if first.mean is not None else replace(then, layout=first.layout)
