"""The S3 server of the remote contests, and proxies with a certain latency and bandwidth.

Needs the servers of the tests: scripts/system-packages --test.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SERVICES = Path(__file__).parents[1] / "tests" / "services"
sys.path.insert(0, str(SERVICES))

from ceph import S3, radosgw  # noqa: E402 - shared with the tests, in their folder

__all__ = ["EACH", "GIGABIT", "LATENCY_S", "S3", "proxied", "radosgw"]

LATENCY_S = 0.04
GIGABIT = 125e6
"""Bytes per second. The server of these contests, its proxy and the reader share two cores: without a limit, the
contests would show which reader leaves more of the cores to the server."""
EACH = 85e6
"""Bytes per second of one request: Amazon advises one concurrent request per 85 to 90 MB/s from S3."""


@contextmanager
def proxied(server: S3, **faults: Any) -> Iterator[S3]:
    """The server behind a proxy in its own process; `faults` as in tests/services/fault_proxy.py."""
    command = [sys.executable, SERVICES / "fault_proxy.py", server.endpoint, json.dumps(faults)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as proxy:
        assert proxy.stdout is not None
        yield S3(f"http://127.0.0.1:{int(proxy.stdout.readline())}")
        proxy.communicate()
