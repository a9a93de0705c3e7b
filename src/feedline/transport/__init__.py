"""How batches cross a process border: pickle protocol 5, with their memory in slots that are used again and again."""

from feedline.transport.arena import Arena, ArenaStatistics
from feedline.transport.explain import explain_unpicklable
from feedline.transport.inbox import Inbox, InboxStatistics
from feedline.transport.recycled import Recycled
from feedline.transport.shared import Frozen, freeze, thaw
from feedline.transport.sharing import share
from feedline.transport.shipment import MAX_FDS, Message
from feedline.transport.slots import SlotMemoryError

__all__ = [
    "MAX_FDS",
    "Arena",
    "ArenaStatistics",
    "Frozen",
    "Inbox",
    "InboxStatistics",
    "Message",
    "Recycled",
    "SlotMemoryError",
    "explain_unpicklable",
    "freeze",
    "share",
    "thaw",
]
