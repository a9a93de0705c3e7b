"""Folders of images to pack, and the command from the outside."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from image_cases import jpeg
from typer.testing import CliRunner, Result

from feedline.cli.app import app


def class_folders(root: Path, classes: Iterable[str] = ("cat", "dog"), each: int = 6, size: int = 200) -> Path:
    """`each` JPEGs in a folder per class."""
    for label, name in enumerate(classes):
        (root / name).mkdir(parents=True)
        for number in range(each):
            (root / name / f"{number:03}.jpg").write_bytes(jpeg(size, size * 3 // 4, 100 * label + number, quality=92))
    return root


def feedline(*arguments: object) -> Result:
    """Run the command; errors that it explains are raised here."""
    return CliRunner(env={"COLUMNS": "60"}).invoke(app, list(map(str, arguments)), catch_exceptions=False)


def packed(*arguments: object) -> dict[str, Any]:
    """Run `feedline pack … --json` and return its JSON."""
    return _json_of("pack", *arguments, code=0)


def inspected(*arguments: object, code: int = 0) -> dict[str, Any]:
    """Run `feedline inspect … --json`, which ends with this exit code, and return its JSON."""
    return _json_of("inspect", *arguments, code=code)


def _json_of(*arguments: object, code: int) -> dict[str, Any]:
    result = feedline(*arguments, "--json")
    assert result.exit_code == code, result.output
    reported: dict[str, Any] = json.loads(result.stdout)
    return reported


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder of shards but the indexes, which hold the times of their tars."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".index"}


def members(folder: Path) -> dict[str, bytes]:
    """The members of all shards, as Python's own tarfile reads them."""
    found = {}
    for shard in sorted(folder.glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                assert member.name not in found
                found[member.name] = file.read()
    return found
