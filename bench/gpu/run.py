"""All figures of a GPU, by one command: `python bench/gpu/run.py`.

The scripts run one after the other, each in a process of its own, print date and versions, and write their figures to
bench/results/. Peers that are not installed are left out by name. An error of one script does not stop the others; the
exit status counts those that failed. With "cpu" as its argument, the scripts check themselves without a GPU.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).parent


def commands(device: str) -> list[list[str]]:
    """The scripts with their arguments."""
    alone = [
        [str(HERE / name), device] for name in ("prefetch.py", "training.py", "decode.py", "resident.py", "bus.py")
    ]
    check = ["flip", "check"] if device == "cpu" else []
    return [*alone, [str(HERE.parent / "batched_transforms.py"), device, *check]]


def environment() -> dict[str, str] | None:
    """The folder of the peers of the transforms script; None if they are not installed."""
    if "PEERS" in os.environ:
        return dict(os.environ)
    missing = [name for name in ("torchvision", "kornia") if find_spec(name) is None]
    if missing:
        print(f"batched_transforms.py is left out: {' and '.join(missing)} not installed, and PEERS is not set")
        return None
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    return {**os.environ, "PEERS": str(Path(spec.origin).parents[1])}


def main(device: str) -> int:
    failed = []
    for script, *arguments in commands(device):
        variables = environment() if script.endswith("batched_transforms.py") else dict(os.environ)
        if variables is None:
            continue
        print(f"== {Path(script).name} {' '.join(arguments)}", flush=True)
        started = perf_counter()
        code = subprocess.run([sys.executable, script, *arguments], env=variables, check=False).returncode
        print(f"== {Path(script).name}: exit status {code}, {perf_counter() - started:.0f} s", flush=True)
        failed += [Path(script).name] if code else []
    print("all scripts ended" if not failed else f"failed: {', '.join(failed)}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else "cuda"))
