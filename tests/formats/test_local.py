"""Every format, in files of this machine and in a store in memory."""

from __future__ import annotations

from formats.suite import FormatSuite


class TestLocal(FormatSuite):
    places = ("files", "memory", "cached")
