"""Descriptors that have an owner as soon as the system call returns."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rounds import rounds

from feedline.core.descriptors import Descriptors, opened, pipe
from feedline.core.finalizers import no_collections
from feedline.workers.process import channels
from feedline.workers.transport.memory import attach, fixed_file


def open_files() -> set[tuple[str, str]]:
    """Descriptors and mappings of this process."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    found = {(line.split()[0], "mapped") for line in lines if "memfd:" in line}
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # the descriptor of this very folder
            found.add((entry.name, str(entry.readlink())))
    return found


class OpenFiles:
    """The open files of this process, of which none is to be lost, and none of others closed.

    A loader of an earlier test may end meanwhile, in a thread of its own, and close its files. So only the ends of a
    pipe of this object show whether files of others are closed by mistake.
    """

    def __init__(self) -> None:
        self._kept = pipe()
        self.found = open_files()
        self._own = {entry for entry in self.found if entry[0] in {str(end.fd) for end in self._kept}}
        assert len(self._own) == 2

    def check(self, when: str = "") -> None:
        now = open_files()
        assert now <= self.found, when
        assert self._own <= now, when
        self.found = now  # so that a number that others have freed is not theirs any more


@pytest.fixture(autouse=True)
def _no_collections() -> Iterator[None]:
    gc.collect()
    with no_collections():
        yield


def test_they_are_closed_with_their_owner() -> None:
    files = OpenFiles()
    reading, writing = pipe()
    copy = opened(os.dup, reading.fd)
    assert len(open_files() - files.found) == 3
    copy.close()
    copy.close()
    assert (copy.fd, len(copy), list(copy)) == (-1, 0, [])
    del reading, writing
    files.check()


def test_they_move_to_another_owner_or_to_none() -> None:
    with Descriptors(map(os.dup, [0, 0, 0])) as three:
        two = three.take(2)
        assert (len(two), len(three)) == (2, 1)
        (fd,) = three.disown()
        assert len(three) == 0
    os.close(fd)
    two.close()


def test_a_call_that_fails_half_way_closes_the_others() -> None:
    files = OpenFiles()
    with pytest.raises(OSError, match="Bad file descriptor"):
        Descriptors(map(os.dup, [0, 0, -1]))
    files.check()


def receive_a_descriptor() -> None:
    mine, theirs = channels.pair()
    with mine, theirs, channels.spill(b"x") as memory:
        channels.send(mine, [b"message"], [memory.fd])
        _, fds = channels.ReceiveBuffer().receive(theirs)
        fds.close()


def copy_and_close() -> None:
    with opened(os.dup, 0) as copy:
        copy.take(1).close()
    for end in pipe():
        end.close()


def map_and_unmap() -> None:
    with fixed_file(4096) as file:
        attach(file.fd, 4096)


class Interrupt:
    """Raises KeyboardInterrupt before the instruction of a number, in code of feedline."""

    def __init__(self, number: int) -> None:
        self.left = number

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if "feedline" not in frame.f_globals.get("__name__", ""):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.parametrize("use", [copy_and_close, receive_a_descriptor, map_and_unmap])
def test_an_interrupt_before_any_instruction_loses_none(
    use: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python drops an exception of a finalizer, but pytest would keep it, with everything that it refers to.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)
    use()
    sys._getframe().f_trace_opcodes = True  # Python 3.12 reads it only in `settrace`
    files, tracer = OpenFiles(), sys.gettrace()
    for number in range(1, 10_000, rounds(3, 1)):
        interrupt = Interrupt(number)
        try:
            sys.settrace(interrupt)
            use()
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(tracer)
        files.check(f"interrupted before instruction {number}")
        if interrupt.left > 0:
            break
    assert number > 100
