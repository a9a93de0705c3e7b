"""`python -m feedline` is the command, and does not run it again in processes that import the main module."""

from __future__ import annotations

import runpy
import sys

import pytest


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
