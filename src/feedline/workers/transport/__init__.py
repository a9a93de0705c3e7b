"""Transport of batches between processes: pickle protocol 5 with reusable shared memory."""

from feedline.workers.transport.explain import explain_unpicklable
from feedline.workers.transport.forks import forks
from feedline.workers.transport.receiver import Inbox, InboxStatistics
from feedline.workers.transport.sender import MAX_FDS, Arena, ArenaStatistics, Message
from feedline.workers.transport.shared_builder import SharedBuilder, dump_builder, load_builder
from feedline.workers.transport.sharing import share
from feedline.workers.transport.slots import BufferPool, SlotMemoryError

__all__ = [
    "MAX_FDS",
    "Arena",
    "ArenaStatistics",
    "BufferPool",
    "Inbox",
    "InboxStatistics",
    "Message",
    "SharedBuilder",
    "SlotMemoryError",
    "dump_builder",
    "explain_unpicklable",
    "forks",
    "load_builder",
    "share",
]
