"""Pages: a reader sees the published values at any moment, without a lock."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from debris import DebrisGuard

from feedline.core.page import BATCHES, PHASE_START, Page, PageReader, find_pages

HERE = Path("/proc/self/fd")


def _reader(page: Page) -> PageReader:
    return PageReader(next(found.path for found in find_pages(os.getpid()) if found.inode == page.inode))


def test_another_process_finds_and_reads_the_page() -> None:
    with Page() as page:
        page.words[PHASE_START] = -17
        page.words[BATCHES] = 3
        page.publish({"loader": "Photos"})
        with _forked(lambda: _found_in(os.getppid(), page.inode)) as content:
            assert content == f"{os.getpid()} -17 3 {{'loader': 'Photos'}}"


def _found_in(pid: int, inode: int) -> str:
    (page,) = (found for found in find_pages(pid) if found.inode == inode)
    with PageReader(page.path) as reader:
        content = reader.read()
    return f"{page.pid} {content.phase_start_ns} {content.batches} {content.figures}"


def test_figures_that_are_text_already_are_published_with_the_others() -> None:
    with Page() as page, _reader(page) as reader:
        for others, read in (("{}", {}), ('{"batches":0,"verdict":{}}', {"batches": 0, "verdict": {}})):
            page.publish({"loader": "Photos"}, others)
            assert reader.read().figures == {"loader": "Photos", **read}


@contextmanager
def _forked(act: Callable[[], str]) -> Iterator[str]:
    """The result of `act` in a forked process, which stays until the block ends."""
    answer, end = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(end[1])
        try:
            os.write(answer[1], act().encode())
        finally:
            os.read(end[0], 1)
            os._exit(0)
    os.close(end[0])
    os.close(answer[1])
    try:
        yield os.read(answer[0], 1 << 12).decode()
    finally:
        os.close(end[1])
        os.close(answer[0])
        os.waitpid(child, 0)


def test_a_page_without_figures_can_be_read() -> None:
    with Page() as page, _reader(page) as reader:
        assert reader.read() == (0, 0, {})


def test_a_reader_never_sees_a_mixture_of_two_publications() -> None:
    with Page() as page, _reader(page) as reader:
        over = threading.Event()

        def write() -> None:
            for number in range(3000):
                page.publish({"first": number, "filler": "x" * (number % 7000), "last": number})
            over.set()

        writer = threading.Thread(target=write)
        writer.start()
        latest = -1
        while not over.is_set():
            figures = reader.read().figures
            if figures:
                assert figures["first"] == figures["last"] >= latest
                latest = figures["first"]
        writer.join()
        assert reader.read().figures["first"] == 2999


def test_figures_that_are_too_large_are_named() -> None:
    with Page() as page, _reader(page) as reader:
        page.publish({"text": "x" * (1 << 18)})
        assert "bytes, more than the page has" in reader.read().figures["problem"]


def test_a_closed_page_is_not_found_and_can_still_be_written(no_debris: DebrisGuard) -> None:
    page = Page()
    inode = page.inode
    assert inode in {found.inode for found in find_pages(os.getpid())}
    page.close()
    page.close()
    page.words[BATCHES] = 1
    assert page.words[BATCHES] in (0, 1)  # without native kernels, the words are memory of their own from then on
    assert inode not in {found.inode for found in find_pages(os.getpid())}


def test_a_forked_process_is_not_listed_a_second_time() -> None:
    with Page() as page, _forked(lambda: "ready"):
        inode = page.inode
        assert [found.pid for found in find_pages() if found.inode == inode] == [os.getpid()]


def test_memory_that_is_no_page_is_refused() -> None:
    fd = os.memfd_create("feedline-page")
    os.truncate(fd, 1 << 20)
    with pytest.raises(ValueError, match="not a page of this version"):
        PageReader(HERE / str(fd))
    os.close(fd)


def test_a_page_that_is_being_made_is_not_found() -> None:
    fd = os.memfd_create("feedline-page")
    inode = os.fstat(fd).st_ino
    assert inode not in {found.inode for found in find_pages(os.getpid())}
    os.truncate(fd, 1 << 20)
    assert inode in {found.inode for found in find_pages(os.getpid())}
    os.close(fd)
