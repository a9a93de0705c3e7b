"""`python -m feedline` is the command, and does not run it again in processes that import the main module."""

from __future__ import annotations

import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from feedline.core.interrupts import quiet_imports


def test_the_module_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A block of `docs/how-to/pack.md` runs `python -m feedline.cli`."""
    monkeypatch.setattr(sys, "argv", ["-m", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("feedline", run_name="__main__", alter_sys=True)  # as `python -m feedline` does
    assert not ended.value.code
    assert capsys.readouterr().out.startswith("feedline ")


@pytest.mark.parametrize("module", ["feedline", "feedline.cli"])
def test_a_worker_that_imports_the_main_module_runs_no_command(module: str) -> None:
    runpy.run_module(f"{module}.__main__", run_name="__mp_main__")


@pytest.mark.parametrize("command", [["-m", "feedline"], [str(Path(sys.executable).with_name("feedline"))]])
def test_an_interrupt_while_libraries_are_imported_has_no_traceback(command: list[str]) -> None:
    # Each import is a line in the output, as soon as it has ended.
    started = [sys.executable, "-X", "importtime", *command, "doctor"]
    with subprocess.Popen(started, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert any(" torch." in line for line in process.stderr)
        process.send_signal(signal.SIGINT)
        printed, rest = process.communicate(timeout=120)
    assert process.returncode == 130
    assert printed == ""
    assert [line for line in rest.splitlines() if not line.startswith("import time:")] == []


def test_other_programs_are_interrupted_as_usual() -> None:
    before = signal.getsignal(signal.SIGINT)
    with quiet_imports():
        assert signal.getsignal(signal.SIGINT) is before
