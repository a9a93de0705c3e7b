"""Slots: owners of memory over time."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from debris import left_names, shared_names
from hypothesis import given
from hypothesis import strategies as st
from transport_exchange import Line

from feedline.errors import WorkerError
from feedline.workers.transport import Arena, Inbox, SlotMemoryError
from feedline.workers.transport.memory import AnonymousFiles, Handle, Mapping, NamedSegments
from feedline.workers.transport.slots import FREE, IDLE_MESSAGES, LENT, RETIRED, size_class

BIG = (600, 1000)  # of uint8: a slot of its own


@pytest.fixture
def line() -> Line:
    return Line()


def filled(arena: Arena, value: int, shape: tuple[int, ...] = BIG) -> torch.Tensor:
    return arena.empty(shape, torch.uint8).fill_(value)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_arrays_in_a_slot_are_not_copied(line: Line) -> None:
    x = filled(line.arena, 3)
    whole, part, columns = line.carry((x, x[7:300], x[:, ::2]))
    assert line.arena.statistics().copied_nbytes == 0
    x[8, 4] = 9  # the same memory, seen from the other side
    assert whole[8, 4] == part[1, 4] == columns[8, 2] == 9


def test_an_array_over_a_slot_is_not_copied(line: Line) -> None:
    x = filled(line.arena, 3)
    arrived = line.carry(x.numpy()[100:])
    assert line.arena.statistics().copied_nbytes == 0
    x[100, 0] = 9
    assert arrived[0, 0] == 9


def test_a_slot_is_used_again_when_the_batch_is_dropped(line: Line) -> None:
    for number in range(50):
        batch = line.carry({"x": filled(line.arena, number), "y": np.full(100_000, number)})
        assert batch["x"].eq(number).all()
        assert (batch["y"] == number).all()
        del batch
    assert line.arena.statistics().created == 2
    assert line.arena.statistics().lent_nbytes == 0


def test_kept_batches_are_never_overwritten(line: Line) -> None:
    kept = [line.carry(filled(line.arena, number)) for number in range(20)]
    assert [int(batch.unique()) for batch in kept] == list(range(20))
    assert line.arena.statistics().lent_nbytes == line.inbox.statistics().lent_nbytes == line.arena.statistics().nbytes


@pytest.mark.parametrize(
    "keep",
    [
        lambda x: x[5:7],
        lambda x: x.numpy(),
        lambda x: x.numpy()[::2][3:].T,
        lambda x: memoryview(x.numpy()),
        lambda x: torch.from_numpy(x.numpy()[2:]),
        lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)),
        lambda x: x.untyped_storage(),
        lambda x: x.view(torch.int16).detach(),
        lambda x: np.lib.stride_tricks.as_strided(x.numpy(), (3,), (1,)),
    ],
)
def test_any_view_keeps_the_slot(line: Line, keep: Callable[[torch.Tensor], Any]) -> None:
    view = keep(line.carry(filled(line.arena, 7)))
    gc.collect()
    assert line.inbox.statistics().lent_nbytes > 0
    for _ in range(3):
        line.carry(filled(line.arena, 1))
    seen = np.asarray(view[:9].tolist() if isinstance(view, torch.UntypedStorage) else view)
    assert set(seen.astype(np.uint8).ravel().tolist()) == {7}
    del view, seen
    assert line.arena.statistics().lent_nbytes == 0


def test_what_the_worker_keeps_is_not_overwritten(line: Line) -> None:
    kept = filled(line.arena, 5)
    sent_and_kept = filled(line.arena, 6)
    line.carry(sent_and_kept)
    for _ in range(3):
        line.carry(filled(line.arena, 1))
    assert kept.eq(5).all()
    assert sent_and_kept.eq(6).all()


def test_what_is_not_sent_and_not_kept_is_room_again(line: Line) -> None:
    for _ in range(10):
        filled(line.arena, 1)
        line.carry("nothing")
    assert line.arena.statistics().created == 1


def test_a_batch_that_is_sent_twice_is_copied_while_the_first_is_out(line: Line) -> None:
    x = filled(line.arena, 5)
    first, second = line.carry(x), line.carry(x)
    assert line.arena.statistics().copied_nbytes == x.nbytes
    first.zero_()
    assert second.eq(5).all()
    del first
    line.carry(x)
    assert line.arena.statistics().copied_nbytes == x.nbytes


def test_small_tensors_share_a_slot(line: Line) -> None:
    created = []
    for _ in range(6):
        made = [line.arena.empty((40_000,), torch.uint8).fill_(i) for i in range(20)]
        batch = line.carry([*made, *(np.full(30_000, i, np.uint8) for i in range(20))])
        assert [int(x[-1]) for x in batch] == [*range(20), *range(20)]
        del batch, made
        created.append(line.arena.statistics().created)
    assert created[0] <= 10
    assert created[1] == created[-1] == created[0] + 1


def test_the_slot_that_small_tensors_share_frees_with_the_last(line: Line) -> None:
    batch = line.carry([torch.zeros(5000) for _ in range(30)])
    assert line.arena.statistics().slots == 1
    last = batch[17]
    del batch
    assert line.arena.statistics().lent_nbytes > 0
    del last
    assert line.arena.statistics().lent_nbytes == 0


def test_hundreds_of_large_tensors_need_few_slots_and_descriptors(line: Line) -> None:
    batch = line.carry([torch.full((300_000,), i % 100, dtype=torch.uint8) for i in range(300)])
    assert [int(x[0]) for x in batch] == [i % 100 for i in range(300)]
    assert line.arena.statistics().slots == 1
    made = [line.arena.empty((300_000,), torch.uint8).fill_(i % 100) for i in range(300)]
    assert [int(x[0]) for x in line.carry(made)] == [i % 100 for i in range(300)]


def test_tiny_tensors_are_ordinary_memory(line: Line) -> None:
    line.carry(line.arena.empty((256,), torch.int64).zero_())
    assert line.arena.statistics().slots == 0


def test_a_larger_free_slot_will_do(line: Line) -> None:
    line.carry(filled(line.arena, 1, (1_000_000,)))
    line.carry(filled(line.arena, 1, (600_000,)))
    assert line.arena.statistics().created == 1
    line.carry(filled(line.arena, 1, (300_000,)))
    assert line.arena.statistics().created == 2


@given(st.integers(0, 1 << 45))
def test_sizes_fit_with_little_waste(nbytes: int) -> None:
    size = size_class(nbytes)
    assert nbytes <= size
    assert size_class(size) == size
    assert size <= max(nbytes * 1.25, 64 * 1024)


def test_idle_slots_go_back_to_the_system_on_both_sides(line: Line) -> None:
    kept = [line.carry(filled(line.arena, i)) for i in range(10)]
    del kept
    for _ in range(IDLE_MESSAGES + 100):
        line.carry(filled(line.arena, 1))
    assert line.arena.statistics().slots == line.inbox.statistics().slots == 1
    assert line.arena.statistics().peak_nbytes == 10 * line.arena.statistics().nbytes
    assert line.inbox.statistics().peak_nbytes == line.arena.statistics().peak_nbytes


def test_freeing_in_another_thread(line: Line) -> None:
    holder = [line.carry(filled(line.arena, 1))]
    thread = threading.Thread(target=holder.clear)
    thread.start()
    thread.join()
    assert line.arena.statistics().lent_nbytes == 0


def test_freeing_by_the_garbage_collector(line: Line) -> None:
    gc.disable()
    try:
        cycle: list[Any] = [line.carry(filled(line.arena, 1))]
        cycle.append(cycle)
        del cycle
        assert line.arena.statistics().lent_nbytes > 0
    finally:
        gc.enable()
    gc.collect()
    assert line.arena.statistics().lent_nbytes == 0


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_fork_of_the_training_process_frees_nothing_and_sees_no_change(line: Line) -> None:
    batch = line.carry(filled(line.arena, 7))
    done_in, done_out = os.pipe()
    child = os.fork()
    if child == 0:
        inherited = batch
        del batch
        os.read(done_in, 1)
        unchanged = bool((inherited.numpy() == 7).all())  # a torch thread pool does not survive a fork
        del inherited
        os._exit(0 if unchanged else 1)
    assert batch.eq(7).all()
    del batch
    assert [slot.state for slot in line.arena._pool] == [RETIRED]
    for number in range(100):
        line.carry(filled(line.arena, number))
    os.write(done_out, b".")
    assert os.waitpid(child, 0)[1] == 0
    os.close(done_in)
    os.close(done_out)
    assert line.arena.statistics().created == 2
    assert line.arena.statistics().slots == line.inbox.statistics().slots == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_dropping_in_a_forked_child_does_not_free(line: Line) -> None:
    batch = line.carry(filled(line.arena, 7))
    child = os.fork()
    if child == 0:
        del batch
        os._exit(0)
    os.waitpid(child, 0)
    assert [slot.state for slot in line.arena._pool] == [LENT]
    assert batch.eq(7).all()


def test_closing_leaves_what_is_still_held(line: Line) -> None:
    kept, batch = filled(line.arena, 4), line.carry(filled(line.arena, 5))
    line.inbox.close()
    line.arena.close()
    gc.collect()
    assert kept.eq(4).all()
    assert batch.fill_(6).eq(6).all()
    assert line.arena.statistics().slots == line.inbox.statistics().slots == 0


def test_both_sides_are_context_managers() -> None:
    with Arena() as arena, Inbox() as inbox:
        message = arena.dumps(filled(arena, 1))
        batch = inbox.loads(message.payload, message.fds)
    assert batch.eq(1).all()
    assert inbox.statistics().slots == arena.statistics().slots == 0


def test_no_descriptor_stays_open_and_no_name_is_left(line: Line) -> None:
    before, names = open_descriptors(), shared_names()
    kept = [line.carry(filled(line.arena, i)) for i in range(50)]
    assert open_descriptors() == before
    assert not left_names(names)
    unsent = filled(line.arena, 1)
    line.arena.close()
    assert open_descriptors() == before
    assert len(kept) == 50
    assert unsent.eq(1).all()


def test_discarding_frees_the_slots_and_takes_the_descriptors(line: Line) -> None:
    before = open_descriptors()
    line.inbox.discard(*line.post([filled(line.arena, 1), ["x" * 100] * 2, "y" * 100_000]))
    assert open_descriptors() == before
    assert line.arena.statistics().lent_nbytes == 0
    assert line.carry(filled(line.arena, 2)).eq(2).all()
    assert line.arena.statistics().created == 2


def test_missing_descriptors_are_named_and_the_others_closed(line: Line) -> None:
    before = open_descriptors()
    payload, fds = line.post([filled(line.arena, 1), filled(line.arena, 2)])
    os.close(fds.pop())
    with pytest.raises(WorkerError, match=r"1 file descriptors instead of 2.*ulimit -n"):
        line.inbox.loads(payload, fds)
    assert open_descriptors() == before


def test_slots_are_registered_once_and_unregistered_when_the_last_view_dies() -> None:
    registered: dict[int, int] = {}
    unregistered: list[int] = []
    line = Line(register=registered.__setitem__, unregister=unregistered.append)
    batch = line.carry(filled(line.arena, 1))
    kept = line.carry(filled(line.arena, 2))
    del batch
    line.carry(filled(line.arena, 3))
    assert len(registered) == 2
    for address, nbytes in registered.items():
        assert nbytes == line.inbox.statistics().nbytes // 2
        assert address % 4096 == 0
    line.inbox.close()
    gc.collect()
    assert len(unregistered) == 1
    del kept
    assert sorted(unregistered) == sorted(registered)


class Full:
    """A machine that has room for two slots."""

    def __init__(self, code: int) -> None:
        self.left = 2
        self.code = code

    def create(self, nbytes: int) -> tuple[Mapping, Handle]:
        if not self.left:
            raise OSError(self.code, os.strerror(self.code))
        self.left -= 1
        return AnonymousFiles().create(nbytes)


def test_exhaustion_says_what_is_wanted_and_what_is_in_use() -> None:
    arena, inbox = Arena(Full(errno.ENOSPC)), Inbox()
    message = arena.dumps([filled(arena, 1), filled(arena, 2)])
    batch = inbox.loads(message.payload, message.fds)
    with pytest.raises(
        SlotMemoryError, match=r"^659456 bytes .*No space left.*2 slots of 1318912 bytes.*prefetch_factor"
    ) as info:
        arena.dumps(torch.zeros(600_000, dtype=torch.uint8))
    assert isinstance(info.value, MemoryError)
    assert isinstance(info.value, WorkerError)
    del batch
    assert inbox.loads(arena.dumps(torch.ones(600_000, dtype=torch.uint8)).payload).eq(1).all()


def test_exhausted_descriptors_have_their_own_remedy() -> None:
    arena = Arena(Full(errno.EMFILE))
    with pytest.raises(SlotMemoryError, match=r"Too many open files.*ulimit -n"):
        [filled(arena, i) for i in range(3)]
    arena.close()


def test_named_segments_stand_in_where_there_are_no_anonymous_files() -> None:
    names = shared_names()
    with Arena(NamedSegments()) as arena, Inbox() as inbox:
        kept = []
        for number in range(5):
            message = arena.dumps({"x": filled(arena, number), "n": number})
            assert not message.fds
            kept.append(inbox.loads(message.payload))
            assert kept[-1]["x"].eq(number).all()
            kept = kept[-2:]
        assert arena.statistics().created == 3
        assert not left_names(names)
    assert kept[0]["x"].eq(3).all()


def test_states_are_the_first_byte_of_the_slot(line: Line) -> None:
    batch = line.carry(filled(line.arena, 1))
    (slot,) = line.arena._pool
    assert np.asarray(slot.mapping)[0] == LENT
    del batch
    assert np.asarray(slot.mapping)[0] == FREE
    assert filled(line.arena, 1).data_ptr() == slot.mapping.address + 64
