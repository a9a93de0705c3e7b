"""Audit of a job that is killed 100 times at random, and continues with other numbers of ranks each time.

The faults planted into logs and loaders are those of tests/loader/report/test_audit.py.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from harness import Contest

TESTS = Path(__file__).parents[1] / "tests"
KILLS = 100


def main() -> None:
    sys.path += [str(TESTS / "helpers"), str(TESTS / "stress")]
    from preloaded import Preloaded
    from test_audit_kills import killed

    with Preloaded() as preloaded, tempfile.TemporaryDirectory() as folder:
        found = killed(KILLS, Path(folder), preloaded)
    contest = Contest("audit of a job that is killed", unit="count", baseline="kills")
    lost, twice = (sum(fault.kind == kind for fault in found.faults) for kind in ("lost", "twice"))
    for name, count in (("kills", KILLS), ("lost", lost), ("twice", twice), ("faults in all", len(found.faults))):
        contest.measure(name, lambda count=count: float(count))
    contest.run(rounds=1, warm_up=0).publish()
    print(f"delivered exactly once: {found.proven}")


if __name__ == "__main__":
    main()
