"""`run_blocks.py FOLDER`: run blocks of code, each as a script in a fresh process; torch is imported once for all.

Standard input: JSON `{name: code}`. Standard output: JSON `{name: what a failed block wrote, else ""}`. Each block
runs in its own folder below FOLDER, and leaves as a script does: exit handlers included.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch  # noqa: F401 - the slow part; imported before the forks


def become(script: Path, log: Path) -> None:
    """Run the script in this process, its output in `log`, and leave."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(file, stream)
    os.chdir(script.parent)
    sys.argv = [str(script)]
    runpy.run_path(str(script), run_name="__main__")
    sys.exit(0)


def outcome(folder: Path, code: str) -> str:
    """What the block wrote if it failed, else nothing."""
    folder.mkdir()
    script, log = folder / "block.py", folder / "output.log"
    script.write_text(code, encoding="utf-8")
    child = os.fork()
    if child == 0:
        become(script, log)
    _, status = os.waitpid(child, 0)
    return f"exit status {os.waitstatus_to_exitcode(status)}\n{log.read_text()}" if status else ""


if __name__ == "__main__":
    blocks = json.load(sys.stdin)
    print(json.dumps({name: outcome(Path(sys.argv[1]) / name, code) for name, code in blocks.items()}))
