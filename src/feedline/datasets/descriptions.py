"""What was learned of many files and objects, kept on this machine by address and version."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from feedline.datasets.files import Pathlike
from feedline.datasets.sidecars import SideCarWarning
from feedline.errors import SampleError
from feedline.per_process import PerProcess
from feedline.shards import arrays as files
from feedline.stores import ObjectInfo
from feedline.user_cache import user_cache

_KEY_NBYTES = 16

Description = bytes | memoryview


def key_of(name: str, info: ObjectInfo) -> bytes | None:
    """The key of one state of a file or object; None where nothing but its size tells one state from another."""
    if not info.is_versioned:
        return None
    text = f"{name}\0{info.version}".encode("utf-8", "surrogateescape")
    return hashlib.blake2b(text, digest_size=_KEY_NBYTES).digest()


def place_of(kind: str, given: Iterable[str], folder: Pathlike | None) -> str:
    """Where descriptions are kept of what these paths and addresses mean: in the folder, or that for such things."""
    if folder is None:
        folder = user_cache("descriptions")
    named = hashlib.blake2b("\0".join([kind, *given]).encode("utf-8", "surrogateescape"), digest_size=_KEY_NBYTES)
    return str(Path(folder, f"{kind}-{named.hexdigest()}.index").absolute())


class Descriptions:
    """Bytes by key in one file, mapped by each process on first use; an empty mapping where there is no whole file.

    Others may replace the file at any time, so that what was here a moment ago may have to be learned again. Pickles as
    its path. Where nothing can be written a warning says so, and this process holds what it was told.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._held: Mapping[bytes, Description] = {}
        self._mapped = PerProcess(_Mapped)

    def get(self, key: bytes | None) -> Description | None:
        """What is kept under a key."""
        if key is None:
            return None
        held = self._held.get(key)
        return self._mapped().of(self.path).get(key) if held is None else held

    def replace(self, found: Mapping[bytes | None, Description]) -> None:
        """Keep these, and nothing else."""
        described = {key: each for key, each in found.items() if key is not None}
        if not described:
            return
        data = [np.frombuffer(each, np.uint8) for each in described.values()]
        bounds = np.cumsum([0, *map(len, data)]).astype("<u8")
        keys = np.frombuffer(b"".join(described), np.uint8)
        whole = np.concatenate(data) if data else np.empty(0, np.uint8)
        try:
            Path(self.path).parent.mkdir(parents=True, exist_ok=True)
            files.write(self.path, files.packed({}, {"keys": keys, "bounds": bounds, "data": whole}))
        except OSError as error:
            warnings.warn(
                f"the index {self.path} could not be written ({error.strerror}), so that it is worked out again each"
                " time; give index=, a folder that can be written to",
                SideCarWarning,
                stacklevel=2,
            )
            self._held = described
        self._mapped().forget()

    def __reduce__(self) -> tuple[type[Descriptions], tuple[str]]:
        return Descriptions, (self.path,)


class _Mapped:
    """The file as this process sees it."""

    def __init__(self) -> None:
        self._entries: dict[bytes, memoryview] | None = None

    def of(self, path: str) -> dict[bytes, memoryview]:
        entries = self._entries
        if entries is None:
            entries = self._entries = _entries(path)  # two threads may both have mapped it: either result serves
        return entries

    def forget(self) -> None:
        self._entries = None


def _entries(path: str) -> dict[bytes, memoryview]:
    with suppress(OSError, SampleError, KeyError):
        found = files.opened(path).arrays
        keys, bounds, data = found["keys"].tobytes(), found["bounds"].tolist(), found["data"].data
        if len(keys) == _KEY_NBYTES * (len(bounds) - 1) and bounds == sorted(bounds) and bounds[-1] <= len(data):
            starts = range(0, len(keys), _KEY_NBYTES)
            return {
                keys[at : at + _KEY_NBYTES]: data[bounds[number] : bounds[number + 1]]
                for number, at in enumerate(starts)
            }
    return {}
