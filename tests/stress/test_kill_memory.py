"""The kernel's own out-of-memory killer, in a memory cgroup made for the purpose."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from preloaded import Preloaded

pytestmark = pytest.mark.stress

LIMIT_NBYTES = 200 << 20
"""What the script shares with the interpreter that it was forked from does not count."""

SCRIPT = Path(__file__).with_name("kill_by_memory.py")


def _groups() -> Iterator[tuple[Path, str]]:
    """The place for a group below our own, and the name of its limit."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            yield root / "memory" / path.strip("/") / "feedline-test", "memory.limit_in_bytes"
        elif controllers == "":
            yield root / path.strip("/") / "feedline-test", "memory.max"


@pytest.fixture
def limited() -> Iterator[Path]:
    """A memory cgroup with little memory; needs root, and a kernel that lets this container have one."""
    for group, limit in _groups():
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / limit).exists():
                (group / limit).write_text(str(LIMIT_NBYTES))
                yield group
                return
        finally:
            group.rmdir()
    pytest.skip("no memory cgroup can be made here")


def test_a_sample_that_takes_all_memory(limited: Path, preloaded: Preloaded, tmp_path: Path) -> None:
    log = tmp_path / "output.log"
    assert preloaded.run(SCRIPT, log, 250, str(limited)) == 1
    said = log.read_text()
    assert re.search(
        r"WorkerDiedError: DataLoader worker \(pid\(s\) \d+\) exited unexpectedly: "
        r"it was killed by the kernel's out-of-memory killer with signal SIGKILL",
        said,
    )
    assert "sample 5 (epoch 0, position 5) kills a worker by itself" in said
    assert "use fewer workers" in said
