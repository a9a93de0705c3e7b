"""Memory that processes share because one has inherited it from the other: nothing that is pickled can stand for it."""

from __future__ import annotations

import mmap
import pickle
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from feedline.transport.files import file_of


def refuse_shared(obj: object) -> None:
    """Raises PicklingError for a tensor or array whose memory other processes are meant to see when it changes.

    A copy of it would quietly part them.
    """
    if isinstance(obj, np.ndarray):
        shared = obj.flags.writeable and _is_shared(obj)
    elif type(obj) is torch.Tensor:
        shared = obj.is_cpu and obj.layout is torch.strided and obj.untyped_storage().is_shared()
    else:
        return
    if shared:
        raise pickle.PicklingError("its memory is shared between processes, which a worker can only inherit (fork)")


def _is_shared(array: NDArray[Any]) -> bool:
    if (file := file_of(array)) is not None and file.mode == "c":
        return False
    owner: object = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    # What multiprocessing.Array and Value hand out is a ctypes object with the shared block as its `_wrapper`.
    return isinstance(owner, mmap.mmap) or hasattr(owner, "_wrapper")
