"""The command line as a whole: its commands, its version, its errors."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from feedline.cli import app
from feedline.core.wrapping import wrap


def test_only_commands_that_work_are_listed() -> None:
    listed = CliRunner().invoke(app.app, ["--help"])
    commands = {command.name or command.callback.__name__ for command in app.app.registered_commands}
    assert commands == {
        "audit",
        "bench",
        "doctor",
        "index",
        "inspect",
        "lint",
        "pack",
        "replay",
        "report",
        "top",
        "try",
    }
    assert all(command in listed.stdout for command in commands)


@pytest.mark.parametrize(
    "command", [None, "audit", "bench", "doctor", "index", "inspect", "lint", "pack", "replay", "report", "top", "try"]
)
def test_help_is_complete_in_a_narrow_terminal(command: str | None) -> None:
    runner = CliRunner(env={"COLUMNS": "40"})
    text = runner.invoke(app.app, [*([command] if command else []), "--help"]).stdout
    assert max(map(len, text.splitlines())) <= 40
    assert "…" not in text
    group = get_command(app.app)
    assert isinstance(group, TyperGroup)
    parameters = group.commands[command].params if command else group.params
    for name in [name for parameter in parameters for name in (*parameter.opts, *parameter.secondary_opts)]:
        assert not name.startswith("--") or name in text


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(app.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("feedline ")


def test_errors_are_explained_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = tmp_path / "missing"
    monkeypatch.setattr("sys.argv", ["feedline", "inspect", str(missing)])
    with pytest.raises(SystemExit) as exit_:
        app.main()
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert str(missing) in message.replace("\n", "")
    assert "Traceback" not in message


@pytest.mark.parametrize("is_terminal", [True, False])
def test_errors_fit_a_terminal_and_keep_their_lines_in_files(is_terminal: bool) -> None:
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(file=output, width=40, force_terminal=is_terminal, color_system=None)
    path = "/a/path/that/is/longer/than/the/terminal/is/wide/run.jsonl"
    app._print_error(f"there is no run log {path}: a remedy → of several words\n\nand a note", console)
    output.seek(0)
    text = output.read()
    if is_terminal:
        assert all(len(line) <= 40 or line == f"{path}:" for line in text.splitlines())
    else:
        assert text.splitlines()[0] == f"feedline: there is no run log {path}: a remedy -> of several words"
    assert f"{path}:" in text.split()
    assert text.endswith("\n\nand a note\n")


def test_warnings_of_commands_are_without_lines_of_feedline(tmp_path: Path) -> None:
    ours, theirs = (app._format_warning("few samples", UserWarning, path, 3) for path in (app.__file__, str(tmp_path)))
    assert ours == "feedline: few samples\n"
    assert theirs == f"{tmp_path}:3: UserWarning: few samples\n"


def test_a_number_and_its_unit_stay_together() -> None:
    for unit in ("us", "µs", "ms", "s", "%", "KiB"):
        assert wrap(f"receive: p50 140 {unit}, p95", 17)[1].startswith(f"140 {unit}")


SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.zeros(8, 2)), batch_size=2)
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("bench train.py --step 1.2.3", "--step takes a duration such as 20ms"),
        ("bench train.py --fail-if wait_share>1.2.3", "--fail-if takes a condition such as"),
        ("bench train.py --workers 2,-1", "--workers takes numbers from 0 on, such as 2,4; got '2,-1'"),
        ("bench train.py --prefetch 0", "--prefetch takes numbers from 1 on"),
        ("bench train.py --batch-size x", "--batch-size takes numbers from 1 on"),
        ("bench train.py --method magic", "worker_method must be one of 'auto', 'thread', 'process'"),
        ("bench train.py --seconds inf", "less than or equal to 86400"),
        ("try train.py --step .", "--step takes a duration such as 20ms"),
        ("pack images out --shard-size 1.2.3MB", "--shard-size '1.2.3MB' is not a size: pass bytes"),
        (f"pack images out --shard-size {'9' * 5000}", "is not a size: pass bytes"),
        (f"pack images out --shard-size {'9' * 5000}MB", "is not a size: pass bytes"),
        ("replay train.py --step 0 --state junk", "junk is neither JSON nor a checkpoint"),
        ("replay train.py --step 0 --state empty", "empty is neither JSON nor a checkpoint"),
        ("replay train.py --step 0 --out missing/x.pt", "there is no folder missing; make it"),
        ("inspect images --contact-sheet sheet.abc", "sheet.abc has no ending of an image format; use .png"),
        ("inspect images --contact-sheet missing/sheet.png", "there is no folder missing; make it"),
        ("report junk", "junk is not a run log of feedline"),
        ("audit junk.audit", "junk.audit, line 1: no record of an audit log"),
        ("audit other.audit", "other.audit, line 2: no record of an audit log"),
        ("top --interval inf", "less than or equal to 3600"),
    ],
)
def test_bad_values_are_refused_with_a_remedy_and_exit_code_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, said: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "empty").touch()
    for name in ("junk", "junk.audit"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00junk")
    (tmp_path / "other.audit").write_text('\n{"rank": 0}')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("sys.argv", ["feedline", *arguments.split(" ")])
    with pytest.raises(SystemExit) as exit_:
        app.main()
    assert exit_.value.code == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_help_shows_square_brackets_and_joins_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert "# feedline: ignore[code]" in CliRunner().invoke(app.app, ["lint", "--help"]).stdout
    text = " ".join(CliRunner().invoke(app.app, ["bench", "--help"]).stdout.split())
    assert "Settings are measured in turn, round by round" in text
