"""Side-cars that say where the records of files and objects lie: where they are kept, and many made at once."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from uuid import uuid4

from feedline.cancelling import DaemonPool
from feedline.datasets.descriptions import key_of
from feedline.datasets.files import Pathlike
from feedline.datasets.sidecars import Columns, SideCar
from feedline.errors import SampleError
from feedline.shards import arrays as files
from feedline.stores import AccessDeniedError, CachedStore, ObjectInfo, ObjectNotFoundError
from feedline.stores.addresses import scheme_of
from feedline.stores.blobs import Blob, Blobs, LocalBlob, RemoteBlob
from feedline.user_cache import user_cache

_log = logging.getLogger("feedline")

_INDEXED_AT_ONCE = 8
"""Each holds a few parts of its object in memory."""


class Kind(NamedTuple):
    """How the files of one format are indexed."""

    name: Callable[[str], str]
    """What the side-car of a file of this name is called."""
    scan: Callable[[Blob], Columns]
    """Works the arrays out from the content."""
    fits: Callable[[Blob, Columns], bool]
    """Whether arrays that somebody else worked out are, as far as a few looks can tell, those of this content."""


def indexes_of(blobs: Blobs, kind: Kind, folder: Pathlike | None) -> list[SideCar]:
    """The side-car of each blob, worked out where there is none that fits.

    Those of files lie beside them, or in the folder, which also keeps those of objects; by default theirs are in the
    user's cache folder. One that lies beside an object is taken over if it fits.
    """
    index = partial(_index, blobs, kind, folder)
    if blobs.is_local:
        return [index(number) for number in range(len(blobs))]
    with DaemonPool(_INDEXED_AT_ONCE, "feedline-index") as pool:
        return list(pool.map(index, range(len(blobs))))


def _index(blobs: Blobs, kind: Kind, folder: Pathlike | None, number: int) -> SideCar:
    info, address = blobs.info(number), blobs.name(number)
    name = kind.name(address.rpartition("/")[2])
    is_file = scheme_of(address) == "file"
    if is_file and folder is None:
        place = Path(address).with_name(name)
    else:  # names are told apart by where they come from
        key = hashlib.blake2b(address.encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
        place = Path(folder or user_cache("indexes"), f"{key}-{name.lstrip('.')}")
    work = partial(_of_file, info, kind) if is_file else partial(_of_object, blobs, kind, number)
    if key_of(address, info) is None:  # it may have changed without a sign: what was kept of it is not used
        return SideCar(place, (info.size, uuid4().hex), work)
    return SideCar(place, (info.size, info.version), work)


def _of_file(info: ObjectInfo, kind: Kind) -> Columns:
    return kind.scan(LocalBlob(info.path, info.size, info.version))  # opened for this only: there may be too many


def _of_object(blobs: Blobs, kind: Kind, number: int) -> Columns:
    blob = blobs[number]
    assert isinstance(blob, RemoteBlob)
    folder, _, name = blob.path.rpartition("/")
    beside = kind.name(name)
    found = _found(blob, f"{folder}/{beside}".lstrip("/"))
    if found is not None and kind.fits(blob, found):
        return found
    _log.info(
        "indexing %s: all its %d bytes are read once; with its index, %s, beside it they need not be",
        *(blob.name, blob.nbytes, beside),
    )
    return kind.scan(blob)


def _found(blob: RemoteBlob, path: str) -> Columns | None:
    """The arrays in the side-car beside an object, if there is one."""
    store = blob.store.store if isinstance(blob.store, CachedStore) else blob.store  # it is kept as a side-car anyway
    try:
        data = store.read(path)
    except (ObjectNotFoundError, AccessDeniedError):  # who may not list a bucket is told so of what is not there
        return None
    with TemporaryDirectory(prefix="feedline-") as scratch:
        place = Path(scratch, "index")
        place.write_bytes(data)
        try:
            found = files.opened(str(place))  # stays mapped when the file is gone
        except SampleError:
            return None
    told = found.told.get("stamp")
    return found.arrays if isinstance(told, list) and told[:1] == [blob.nbytes] else None
