"""Numbered records in a folder, written by any number of processes at once, whole or not at all."""

from __future__ import annotations

import mmap
import os
import struct
import weakref
import zlib
from functools import partial
from itertools import count
from pathlib import Path
from threading import Lock

from feedline.per_process import PerProcess

_ENTRY = struct.Struct("<IIQ")
"""Of one record in the index: number of its segment (from 1; 0 says that there is none), bytes, place therein."""
_HEADER = struct.Struct("<QII")
"""In front of a record: its number, its bytes, and the CRC-32 of these and the record."""


class RecordStore:
    """`get(number)` gives the bytes that were `put`, or None; numbers are below `length`.

    Each process appends to a segment of its own and notes the place in an index that all share, once the record is
    written. A process that is killed in between leaves bytes that nothing points to; a record that is not whole, for
    whatever reason, counts as missing. Needs no locks between processes: of two that put one number, either is found.
    """

    def __init__(self, folder: str, length: int) -> None:
        self._folder, self._length = Path(folder), length
        self._folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._folder / "index", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            os.ftruncate(descriptor, length * _ENTRY.size)  # zeros, and the same for whoever comes first
        finally:
            os.close(descriptor)
        self._files = PerProcess(partial(_Files, self._folder))

    def get(self, number: int) -> bytes | None:
        """The record, or None where none was put, or none that is whole."""
        segment, nbytes, place = _ENTRY.unpack(self._files().index_entry(number))
        return self._files().record(number, segment, nbytes, place) if segment else None

    def has(self, number: int) -> bool:
        """Whether a record was put; that it is whole is found when it is read."""
        segment, _, _ = _ENTRY.unpack(self._files().index_entry(number))
        return bool(segment)

    def put(self, number: int, data: bytes) -> None:
        """Keep the record; OSError if the disk is full or may not be written."""
        self._files().append(number, data)

    def count(self) -> int:
        """How many records there are."""
        return sum(self.get(number) is not None for number in range(self._length))


class _Files:
    """The open files of one process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._index = self._closing(os.open(folder / "index", os.O_RDWR))
        self._segments: dict[int, mmap.mmap] = {}
        self._lock = Lock()
        self._own: tuple[int, int] | None = None

    def _closing(self, descriptor: int) -> int:
        """The descriptor, which is closed when these files are no longer used."""
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def index_entry(self, number: int) -> bytes:
        return os.pread(self._index, _ENTRY.size, number * _ENTRY.size)

    def record(self, number: int, segment: int, nbytes: int, place: int) -> bytes | None:
        stop = place + _HEADER.size + nbytes
        mapped = self._mapped(segment, stop)
        if mapped is None:
            return None
        whole = mapped[place:stop]
        data = whole[_HEADER.size :]
        return data if whole[: _HEADER.size] == _header(number, data) else None

    def _mapped(self, segment: int, stop: int) -> mmap.mmap | None:
        """The segment, mapped at least up to `stop`; None if it is not that long."""
        mapped = self._segments.get(segment)
        if mapped is None or len(mapped) < stop:
            try:
                with open(self._folder / _segment_name(segment), "rb") as file:
                    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            except (OSError, ValueError):  # it is gone, or empty
                return None
            self._segments[segment] = mapped
        return mapped if len(mapped) >= stop else None

    def append(self, number: int, data: bytes) -> None:
        with self._lock:
            if self._own is None:
                segment, descriptor = _new_segment(self._folder)
                self._own = segment, self._closing(descriptor)
            segment, descriptor = self._own
            place = os.lseek(descriptor, 0, os.SEEK_END)
            _write(descriptor, _header(number, data) + data)
            os.pwrite(self._index, _ENTRY.pack(segment, len(data), place), number * _ENTRY.size)


def _header(number: int, data: bytes) -> bytes:
    return _HEADER.pack(number, len(data), zlib.crc32(data, zlib.crc32(number.to_bytes(8, "little"))))


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _new_segment(folder: Path) -> tuple[int, int]:
    """The number and the descriptor of a segment that no other process has."""
    for segment in count(1 + sum(1 for _ in folder.glob("segment-*"))):
        try:
            return segment, os.open(folder / _segment_name(segment), os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            continue
    raise AssertionError


def _segment_name(segment: int) -> str:
    return f"segment-{segment:08d}"
