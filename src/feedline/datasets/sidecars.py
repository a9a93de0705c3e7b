"""Side-cars: arrays worked out once from a file and kept beside it, mapped by whoever opens the file next."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feedline.datasets.files import Pathlike
from feedline.errors import SampleError, StateError
from feedline.shards import arrays as files

_log = logging.getLogger("feedline")

Columns = Mapping[str, NDArray[np.integer[Any]]]
State = list[int | str] | tuple[int | str, ...]


class SideCarWarning(RuntimeWarning):
    """A side-car could not be kept, so that its arrays must be worked out again each time."""


class SideCar:
    """Arrays that `build()` works out from a file or an object, kept at `path` for as long as that stays as it is.

    `source` is the file, or what tells one state of the object from another. A side-car that is missing, damaged or of
    another state is written anew, whole or not at all. Where it cannot be written a warning says so, and the arrays are
    held. Pickles as its path, without what could make it anew; as arrays where there is no file.
    """

    def __init__(self, path: Pathlike, source: Pathlike | State, build: Callable[[], Columns]) -> None:
        self._path = str(Path(path).absolute())
        self._stamp = stamp(source) if isinstance(source, (str, os.PathLike)) else [*source]
        self._build: Callable[[], Columns] | None = build
        self._held: Columns | None = None
        self._arrays: Columns | None = None
        shapes = _kept(self._path, self._stamp)
        self.shapes = self._made(build) if shapes is None else shapes

    @property
    def arrays(self) -> Columns:
        """The arrays, mapped on first use; StateError if the side-car is not the one that it was."""
        arrays = self._arrays
        if arrays is None:
            arrays = self._arrays = self.opened()  # two threads may both have mapped them: either result serves
        return arrays

    def opened(self) -> Columns:
        """As `arrays`, but mapped anew with each call: of many side-cars, few can be open at once."""
        if self._held is not None:
            return self._held
        try:
            found = files.opened(self._path)
        except OSError as error:
            raise self._lost() from error
        except SampleError as error:
            return self._mended(error)
        if found.told.get("stamp") != self._stamp:
            raise self._lost()
        return found.arrays

    def renew(self) -> None:
        """Work the arrays out again, in the process that made this."""
        assert self._build is not None
        self.shapes, self._arrays = self._made(self._build), None

    def _mended(self, damage: SampleError) -> Columns:
        """The arrays, worked out again because those in the file are damaged."""
        if self._build is None:
            raise StateError(f"the index {damage}; remove it, and make the dataset anew") from damage
        _tell(self._path, damage)
        before = self.shapes
        self.renew()
        if self.shapes != before:
            raise self._lost()
        return files.opened(self._path).arrays if self._held is None else self._held

    def _lost(self) -> StateError:
        return StateError(f"the index {self._path} was removed or replaced while a dataset used it; make it anew")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_arrays": None, "_build": None}

    def _made(self, build: Callable[[], Columns]) -> dict[str, tuple[int, ...]]:
        """The shapes of the arrays, which are worked out and kept."""
        arrays = build()
        self._keep(arrays)
        return {name: array.shape for name, array in arrays.items()}

    def _keep(self, arrays: Columns) -> None:
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            files.write(self._path, files.packed({"stamp": self._stamp}, arrays))
        except OSError as error:
            warnings.warn(
                f"the index {self._path} could not be written ({error.strerror}), so that it is worked out again each"
                " time; give index=, a place that can be written to",
                SideCarWarning,
                stacklevel=2,
            )
            self._held = arrays


def stamp(source: Pathlike) -> list[int | str]:
    """The size of a file and the time of its last change."""
    found = os.stat(source)  # noqa: PTH116 - asked for every shard
    return [found.st_size, found.st_mtime_ns]


def _kept(path: str, wanted: list[int | str]) -> dict[str, tuple[int, ...]] | None:
    """The shapes of the arrays in the side-car, or None where there is none that fits."""
    try:
        table = files.table_of(path)
    except OSError:
        return None
    except SampleError as error:
        _tell(path, error)
        return None
    if table.told.get("stamp") != wanted:
        return None
    return {name: place.shape for name, place in table.arrays.items()}


def _tell(path: str, damage: SampleError) -> None:
    _log.warning("feedline: the index %s is made anew (%s)", path, damage)
