"""Elastic `torchrun`: a node is lost, and the job continues with fewer nodes; the script is that of the how-to."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest
from preloaded import Preloaded

from feedline.loader.report.audit import audit
from feedline.loader.report.audit_log import read_audit_log

pytestmark = [pytest.mark.stress, pytest.mark.nightly, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs/how-to/trainers/torchrun.md"
WITHIN_S = 800.0
SAMPLES = 6_000
"""Enough steps for a kill in the middle."""


AGENT = """
import os

from torch.distributed.run import main

os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
main()
"""
"""`torchrun`, as the page starts it."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_job_that_loses_a_node_continues_with_fewer_ranks(preloaded: Preloaded, tmp_path: Path) -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(block.replace("240.0", f"{SAMPLES}.0"))
    (tmp_path / "agent.py").write_text(AGENT)
    port, shared = free_port(), tmp_path / "shared"
    shared.mkdir()
    agents = []
    try:
        for node in range(3):
            conf = f"is_host={node == 0},keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=5"
            agents.append(
                preloaded.start_quietly(
                    tmp_path / "agent.py", tmp_path / f"{node}.log", "--nnodes=1:3", "--nproc-per-node=1",
                    "--max-restarts=5", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job",
                    f"--rdzv-conf={conf}", "--local-addr=127.0.0.1", "train.py", str(shared),
                )
            )  # fmt: skip
        give_up_s = time.monotonic() + WITHIN_S
        while not (shared / "checkpoint.pt").exists():
            assert time.monotonic() < give_up_s, (tmp_path / "0.log").read_text()
            time.sleep(0.005)
        lost = psutil.Process(agents[2].pid)
        for process in [lost, *lost.children(recursive=True)]:
            os.kill(process.pid, signal.SIGKILL)
        assert agents[0].wait(WITHIN_S) == 0, (tmp_path / "0.log").read_text()
    finally:
        workers = [child for agent in agents for child in _children(agent.pid)]
        for agent in agents:
            agent.kill()
        for worker in workers:
            worker.kill()
    records = [record for log in sorted(shared.glob("*.audit")) for record in read_audit_log(log)]
    found = audit(records)
    assert not found.faults, found.faults
    assert list(found.proven.values()) == [SAMPLES] * 2
    worlds = {record["world_size"] for record in records}
    assert len(worlds) > 1, worlds


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
