"""The parts of a process pool, one by one: messages, requests in flight, the table, reports of deaths, poison."""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from process_cases import request

from feedline.core.cursor import PartitionOffset
from feedline.core.schedule import PartitionRequest
from feedline.errors import ReprError
from feedline.workers.process import channels, deaths, exceptions
from feedline.workers.process.channels import (
    STOP,
    Channel,
    QueuedRequest,
    RequestQueue,
    RequestReader,
    StatusRow,
    StatusTable,
)
from feedline.workers.process.deaths import find_poisonous
from feedline.workers.process.environment import ProcessEnvironment
from feedline.workers.process.forked import ForkedProcess


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    mine, theirs = channels.pair()
    with mine, theirs:
        yield mine, theirs


def received(channel: Channel, buffer: channels.ReceiveBuffer | None = None) -> tuple[bytes, list[int]]:
    message, fds = (buffer or channels.ReceiveBuffer()).receive(channel)
    return message, list(fds)


def test_messages_arrive_whole_and_in_order(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    post = channels.ReceiveBuffer()
    sent = [b"a", b"b" * 60_000, b"c"]
    for message in sent:
        channels.send(mine, [message[:1], message[1:]])
    assert [received(theirs, post) for _ in sent] == [(message, []) for message in sent]
    mine.close()
    assert received(theirs, post) == (b"", [])


def test_descriptors_travel_along_and_are_not_inherited(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    memories = [channels.spill(b"%d" % n) for n in range(3)]
    channels.send(mine, [b"three"], [memory.fd for memory in memories])
    for memory in memories:
        memory.close()
    message, passed = channels.ReceiveBuffer().receive(theirs)
    assert message == b"three"
    assert not any(os.get_inheritable(fd) for fd in passed)
    assert [channels.read_all(fd) for fd in passed.disown()] == [b"0", b"1", b"2"]


def test_the_end_of_a_sender_who_left_messages_unread(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    channels.send(theirs, [b"never read"])
    mine.close()
    assert received(theirs) == (b"", [])


def test_hanging_up_is_seen_although_a_copy_is_open(ends: tuple[Channel, Channel]) -> None:
    mine, theirs = ends
    copy = channels.connect(os.dup(mine.fileno()))
    channels.disconnect(mine)
    assert received(theirs) == (b"", [])
    with pytest.raises(BrokenPipeError):
        channels.send(theirs, [b"x"])
    copy.close()


def take_all(queue: RequestQueue) -> list[QueuedRequest]:
    """All messages that a worker would get, up to the end."""
    with RequestReader(os.dup(queue.fd)) as reader:
        queue.finish()
        return list(iter(reader.take, None))


@given(st.lists(st.binary(max_size=100) | st.just(b"x" * (channels.SPILL_NBYTES + 1)), max_size=20))
def test_requests_arrive_whatever_their_size(payloads: list[bytes]) -> None:
    queue = RequestQueue()
    for task, payload in enumerate(payloads, 1):
        queue.put(task, payload)
    assert take_all(queue) == [QueuedRequest(task, payload) for task, payload in enumerate(payloads, 1)]


def test_putting_never_blocks() -> None:
    queue = RequestQueue()
    payload = b"x" * 30_000
    for task in range(1, 101):
        queue.put(task, payload)
    taken = []
    with RequestReader(os.dup(queue.fd)) as reader:
        for _ in range(100):
            taken.append(reader.take())
            queue.flush()
    assert [taken_request.task for taken_request in taken if taken_request is not None] == list(range(1, 101))
    queue.close()


@given(st.lists(st.sampled_from(["put", "leave", "withdraw"]), max_size=30), st.integers(1, 40_000))
def test_withdrawing_takes_back_requests_but_not_wishes_to_leave(acts: list[str], nbytes: int) -> None:
    queue, expected, task = RequestQueue(), [], 0
    for act in acts:
        if act == "put":
            task += 1
            queue.put(task, b"x" * nbytes)
            expected.append(task)
        elif act == "leave":
            queue.stop_one()
            expected.append(STOP)
        else:
            queue.withdraw()
            expected = [task for task in expected if task == STOP]
    seen = []
    with RequestReader(os.dup(queue.fd)) as reader:
        for _ in expected:
            taken_request = reader.take()
            assert taken_request is not None
            seen.append(taken_request.task)
            queue.flush()
    assert sorted(seen) == sorted(expected)
    queue.close()


def test_closing_a_queue_drops_what_is_unread() -> None:
    queue = RequestQueue()
    queue.put(1, b"x")
    with RequestReader(os.dup(queue.fd)) as reader:
        queue.close()
        assert reader.take() is None


def test_the_board_shows_what_a_worker_does() -> None:
    table = StatusTable()
    line, other = StatusRow(table, 3), StatusRow(table, 4)
    assert (table.task(3), table.is_ready(3)) == (None, False)
    line.set_ready()
    line.begin(17)
    assert (table.task(3), table.row(3), table.is_ready(3)) == (17, -1, True)
    assert abs(table.task_start_ns(3) - time.monotonic_ns()) < 10**10
    line.progress(5)
    assert table.row(3) == 5
    line.end()
    assert table.task(3) is None
    other.begin(18)
    table.clear(3)
    assert (table.row(3), table.is_ready(3), table.task(4)) == (0, False, 18)
    seen_by_another = StatusTable(os.dup(table.fd))
    assert seen_by_another.task(4) == 18
    seen_by_another.close()
    table.close()


@pytest.mark.parametrize(
    ("exitcode", "words"),
    [
        (0, "it exited with code 0"),
        (3, "it exited with code 3"),
        (-signal.SIGSEGV, "it was killed by signal SIGSEGV (Segmentation fault)"),
        (-signal.SIGKILL, "it was killed by signal SIGKILL (Killed)"),
        (-60, "it was killed by signal 60"),
        (None, "its exit code is not known"),
    ],
)
def test_causes(exitcode: int | None, words: str) -> None:
    assert deaths.describe_exit(exitcode) == words


def test_out_of_memory_is_said() -> None:
    assert "by the kernel's out-of-memory killer" in deaths.describe_exit(-signal.SIGKILL, out_of_memory=True)
    assert "fewer workers" in deaths.remedy(-signal.SIGKILL, out_of_memory=True)
    assert "Something outside" in deaths.remedy(-signal.SIGKILL, out_of_memory=False)


STACKS = """Fatal Python error: Segmentation fault

Thread 0x01 (most recent call first):
  File "/lib/feedline/workers/process/channels.py", line 3 in take
  File "/lib/feedline/workers/process/worker_main.py", line 4 in serve

Current thread 0x02 (most recent call first):
  File "/home/user/data.py", line 1 in __getitem__
  File "/lib/feedline/loader/building/builder.py", line 2 in _fetch
  File "/lib/feedline/workers/process/worker_main.py", line 3 in _answer
  File "/lib/python3.11/multiprocessing/process.py", line 108 in run

Extension modules: numpy._core (total: 1)
"""


def test_stacks_show_the_users_frames() -> None:
    assert deaths.strip_own_frames(STACKS).splitlines() == [
        "Fatal Python error: Segmentation fault",
        "Current thread 0x02 (most recent call first):",
        '  File "/home/user/data.py", line 1 in __getitem__',
        '  File "/lib/feedline/loader/building/builder.py", line 2 in _fetch',
    ]
    assert deaths.strip_own_frames("") == ""


def test_requests_are_named_by_their_samples() -> None:
    batch = request(2, 10)
    assert "at sample 23 (epoch 0, position 23)" in deaths.describe_work(batch, 3)
    assert "samples 20, 21, 22, 23, 24, 25, 26, 27, ... (10 in all)" in deaths.describe_work(batch, -1)
    assert "samples 8, 9" in deaths.describe_work(request(4, 2), -1)
    single = batch._replace(indices="key", positions=range(1))
    assert "at sample key (epoch 0, position 0)" in deaths.describe_work(single, 0)
    partition = PartitionRequest(0, 3, 1, 2, PartitionOffset(), None)
    assert (
        deaths.describe_work(partition, 5)
        == " while it worked on batch 3 of partition 1 of 2 (epoch 0), at its sample 5"
    )
    assert "cannot be divided further" in deaths.describe_finding(partition, [])


@given(st.integers(1, 200), st.data())
def test_poison_is_found(size: int, data: st.DataObject) -> None:
    bad = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=5))
    trials = []

    def kills(rows: Sequence[int]) -> bool:
        trials.append(rows)
        return not bad.isdisjoint(rows)

    assert find_poisonous(range(size), kills, every=True) == sorted(bad)
    trials.clear()
    assert find_poisonous(range(size), kills, every=False) == [min(bad)]
    assert len(trials) <= 2 * size.bit_length()
    assert all(0 < len(rows) < size for rows in trials)


@given(st.integers(2, 100))
def test_poison_of_the_whole_is_no_single_sample(size: int) -> None:
    assert find_poisonous(range(size), lambda rows: len(rows) == size, every=True) == []


class Picky(Exception):
    def __new__(cls, *arguments: object) -> Any:
        if len(arguments) != 2:
            raise TypeError("two, please")
        return super().__new__(cls, *arguments)

    def __init__(self, first: object, second: object) -> None:
        super().__init__(first, second)
        self.second = second

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


class Sealed(Exception):
    """Refuses every attribute, so that nothing can be put into an empty one."""

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)

    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def revived(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:  # noqa: BLE001 - it is what is tested
        packed = pickle.loads(pickle.dumps(exceptions.pack(raised)))
    return exceptions.rebuild(packed, "in DataLoader worker process 0")


def test_a_constructor_is_not_called_again() -> None:
    found = revived(Picky("a", threading.Lock()))
    assert type(found) is Picky
    assert found.args[0] == "a"
    assert "lock" in found.args[1]
    assert "lock" in found.second


def test_an_exception_that_cannot_be_made_again() -> None:
    found = revived(Sealed("why"))
    assert type(found) is ReprError
    assert str(found) == "Sealed: why"
    assert found.__notes__[0].startswith("Caught Sealed in DataLoader worker process 0.\nOriginal Traceback")


def test_causes_and_groups_are_in_the_traceback() -> None:
    error = ExceptionGroup("several", [ValueError("one")])
    error.__cause__ = KeyError("the cause")
    found = revived(error)
    assert isinstance(found, ExceptionGroup)
    assert "the cause" in found.__notes__[-1]
    assert "one" in found.__notes__[-1]


@given(st.lists(st.text(max_size=20), max_size=3))
def test_notes_are_kept_once(notes: list[str]) -> None:
    error = ValueError("x")
    for note in notes:
        error.add_note(note)
    found = revived(error)
    assert found.__notes__[:-1] == notes
    assert found.__notes__[-1].count("ValueError: x") == 1


def test_environments_come_as_they_are(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("FEEDLINE_TEST", "there")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    monkeypatch.syspath_prepend("/some/where")
    before = os.umask(0o027)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            taken = pickle.loads(pickle.dumps(ProcessEnvironment.capture()))
    finally:
        os.umask(before)
        torch.set_default_dtype(torch.float32)
    reported = _in_another_process(taken)
    assert reported["environment"] == "there"
    assert reported["stale"] is None
    assert (reported["directory"], reported["arguments"]) == (str(tmp_path), ["train.py", "--fast"])
    assert "/some/where" in reported["path"]
    assert (reported["umask"], reported["dtype"], reported["cpus"]) == (0o027, torch.float64, os.sched_getaffinity(0))
    assert reported["filter"][0] == "ignore"


def _in_another_process(taken: ProcessEnvironment) -> Any:
    """The environment of a process that adopts this one."""
    source, sink = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.environ["FEEDLINE_STALE"] = "1"
        taken.apply()
        umask = os.umask(0)
        reported = {
            "environment": os.environ.get("FEEDLINE_TEST"),
            "stale": os.environ.get("FEEDLINE_STALE"),
            "directory": str(Path.cwd()),
            "arguments": sys.argv,
            "path": sys.path,
            "umask": umask,
            "dtype": torch.get_default_dtype(),
            "cpus": os.sched_getaffinity(0),
            "filter": warnings.filters[0],
        }
        os.write(sink, pickle.dumps(reported))
        os._exit(0)
    os.close(sink)
    with open(source, "rb") as file:
        reported = pickle.load(file)
    os.waitpid(pid, 0)
    return reported


def test_environments_without_a_directory(tmp_path: Path, monkeypatch: Any) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    assert ProcessEnvironment.capture().directory == "/"


def test_indices_are_plain_numbers() -> None:
    assert type(deaths.index_at(request(1), 2)) is int
    assert deaths.index_at(request(0)._replace(indices=np.arange(4)), 3) == 3


def test_a_child_whose_end_was_interrupted_is_reaped_with_the_next_start(monkeypatch: Any) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    child, later = ForkedProcess(), ForkedProcess()
    child.start(lambda _: signal.pause())
    assert child.pid is not None
    with open(os.pidfd_open(child.pid)) as ended, monkeypatch.context() as patch:
        patch.setattr(os, "waitid", interrupt)
        with pytest.raises(KeyboardInterrupt):
            child.__del__()
        select.select([ended], [], [], 60)
    assert later.pid is None
    later.start(lambda _: None)
    later.end(60)
    with pytest.raises(ChildProcessError):
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG)
    child.end(0)
