"""Finalizers in a forked child, and pauses of the garbage collection."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from pathlib import Path

import pytest
from preloaded import Preloaded

from feedline.core import finalizers
from feedline.core.finalizers import no_collections

SCRIPT = """
import gc, os, threading, time, weakref
from feedline.core import finalizers

class Owner:
    pass

finalized = []
owner = Owner()
owner.itself = owner
weakref.finalize(owner, finalizers.run, lambda: finalized.append(threading.current_thread().name))
gc.disable()
del owner
enumerate_threads = threading._enumerate

def collect_and_enumerate():
    gc.collect()
    return enumerate_threads()

threading._enumerate = collect_and_enumerate  # what Python's fork handler calls first
if (child := os.fork()) == 0:
    end = time.monotonic() + 60
    while not finalized and time.monotonic() < end:
        time.sleep(0.01)
    print(finalized, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""

INTERRUPT_SCRIPT = """
import gc, signal, time
from feedline.core import finalizers

signal.signal(signal.SIGALRM, signal.default_int_handler)
many = [[] for _ in range(300_000)]  # the collection takes ten times as long as the timer

def collect():
    signal.setitimer(signal.ITIMER_REAL, 0.001)
    gc.collect()
    time.sleep(60)

try:
    collect()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="forks")
def test_a_collection_within_fork_handlers_runs_finalizers_after_them(preloaded: Preloaded, tmp_path: Path) -> None:
    assert preloaded.run_code(SCRIPT, tmp_path) == (0, "['feedline-finalizer']\n")


class Owner:
    """An object in a cycle, with a finalizer."""

    def __init__(self, threads: list[threading.Thread], nested: bool = False) -> None:
        self.itself = self
        self._finalizer = weakref.finalize(self, self._run, threads, nested)

    @staticmethod
    def _run(threads: list[threading.Thread], nested: bool) -> None:
        if nested:  # it collects nothing, and does not end the collection
            gc.collect()
        finalizers.run(lambda: threads.append(threading.current_thread()))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("generation", [0, 1, 2])
def test_a_collection_runs_finalizers_in_a_thread_of_their_own(generation: int, nested: bool) -> None:
    threads: list[threading.Thread] = []
    with no_collections():
        Owner(threads, nested)
        before = set(threading.enumerate())
        gc.collect(generation)
        for thread in set(threading.enumerate()) - before:
            thread.join()
    assert [thread.name for thread in threads] == ["feedline-finalizer"]


def test_other_finalizers_run_at_once_and_collect_nothing() -> None:
    threads: list[threading.Thread] = []
    with no_collections():
        gc.collect()
        before = [generation["collections"] for generation in gc.get_stats()]
        finalizers.run(lambda: threads.append(threading.current_thread()))
        assert [generation["collections"] for generation in gc.get_stats()] == before
    assert threads == [threading.current_thread()]


def test_a_finalizer_of_another_thread_runs_in_its_own_thread_during_a_collection() -> None:
    threads: list[threading.Thread] = []

    def run_elsewhere() -> None:
        other = threading.Thread(target=finalizers.run, args=(lambda: threads.append(threading.current_thread()),))
        before = {*threading.enumerate(), other}
        other.start()
        other.join()
        for thread in set(threading.enumerate()) - before:
            thread.join()

    with no_collections():
        owner = Owner([])
        weakref.finalize(owner, run_elsewhere)
        del owner
        gc.collect()
    assert [thread.name for thread in threads] == ["feedline-finalizer"]


def test_collections_that_were_off_stay_off() -> None:
    gc.disable()
    try:
        with no_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
    with pytest.raises(KeyError), no_collections():
        raise KeyError
    assert gc.isenabled()


def test_an_interrupt_during_a_collection_is_not_lost(preloaded: Preloaded, tmp_path: Path) -> None:
    """Python raises it in the next line of Python, and drops errors of callbacks of the collection.

    In a process of its own, because Hypothesis has such a callback.
    """
    assert preloaded.run_code(INTERRUPT_SCRIPT, tmp_path) == (0, "interrupted\n")
