"""The command line as a whole: its commands, its version, its errors."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.core import TyperGroup
from typer.main import get_command
from typer.testing import CliRunner

from feedline.cli import app


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


def test_help_shows_square_brackets_and_joins_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    assert "# feedline: ignore[code]" in CliRunner().invoke(app.app, ["lint", "--help"]).stdout
    text = " ".join(CliRunner().invoke(app.app, ["bench", "--help"]).stdout.split())
    assert "Settings are measured in turn, round by round" in text
