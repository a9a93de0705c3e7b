"""Numbers that a key stands for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

_MASK64 = (1 << 64) - 1


_GOLDEN = 0x9E3779B97F4A7C15


class Draws:
    """A stream of numbers fixed by a 64-bit key: the stream by which `feedline.images` draws boxes and flips.

    Used in place of a `numpy.random.Generator`, which takes longer to make than a sample takes to draw all it needs.
    """

    __slots__ = ("_state",)

    def __init__(self, key: int) -> None:
        self._state = key & _MASK64

    def unit(self) -> float:
        """Uniform in [0, 1): the 53 upper bits of splitmix64's next output."""
        self._state = z = self._state + _GOLDEN & _MASK64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _MASK64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _MASK64
        return ((z ^ z >> 31) >> 11) * 2.0**-53

    def between(self, low: float, high: float) -> float:
        """Uniform in [low, high)."""
        return low + (high - low) * self.unit()

    def below(self, count: int) -> int:
        """Uniform in `range(count)`."""
        return int(count * self.unit())

    def order(self, count: int) -> list[int]:
        """A random order of `range(count)` (Fisher and Yates)."""
        order = list(range(count))
        for last in range(count - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def weighted(self, weights: Sequence[float]) -> int:
        """An index, each as likely as its share of the weights."""
        bounds = list(accumulate(weights))
        wanted = self.unit()  # below 1, which is the last bound's share, however small the weights are
        return next(index for index, bound in enumerate(bounds) if wanted < bound / bounds[-1])
