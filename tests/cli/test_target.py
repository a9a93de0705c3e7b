"""Scripts named on the command line that do more than define a loader."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

from feedline.cli import target

TRAINS = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset
    import feedline

    loader = {module}(TensorDataset(torch.zeros(8, 2)), batch_size=4)
    first = next(iter(loader))
    done = 0
    while True:
        try:
            for (batch,) in loader:
                done += 1
        except Exception:
            pass
"""


@pytest.mark.parametrize("module", ["DataLoader", "feedline.DataLoader"])
def test_a_script_that_trains_at_import_is_stopped_and_examined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str
) -> None:
    monkeypatch.setattr(target, "MOST_TRAINING_S", 0.2)
    script = tmp_path / "train.py"
    script.write_text(dedent(TRAINS).format(module=module))
    loader = target.load(f"{script}:loader")
    assert loader.batch_size == 4
    assert len(list(loader)) == 2, "loaders work again"
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{script}:11 reads a loader when it is imported")
    assert "__main__" in line


def test_a_script_that_trains_before_its_loader_is_known_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "MOST_TRAINING_S", 0.2)
    script = tmp_path / "train.py"
    script.write_text(dedent(TRAINS).format(module="DataLoader"))
    with pytest.raises(target.TargetError, match=r"train\.py defines no late \(loaders there: loader\)"):
        target.load(f"{script}:late")
    assert "reads a loader when it is imported" in capsys.readouterr().err
