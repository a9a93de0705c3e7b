"""Scripts named on the command line that do more than define a loader."""

from __future__ import annotations

import json
import pickle
import sys
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


@pytest.mark.parametrize(
    ("script", "name", "message", "remedy"),
    [
        ("def make(config, *, size): ...", "make", "make needs arguments: config, size", "give them defaults"),
        ("class Data:\n    def loader(self): ...", "Data.loader", "needs arguments: self", "a method of an object"),
        (
            "import argparse\ndef main(): argparse.ArgumentParser().parse_args(['--no'])",
            "main",
            "main() ended with SystemExit: 2",
            "the command line of a script is empty here",
        ),
        ("raise SystemExit(2)", "main", "ended with SystemExit: 2", "the command line of a script is empty here"),
        ("from . import data", "loader", "attempted relative import", "name it as a module"),
        ("", "", "no DataLoader among its globals", "train.py:make_loader"),
    ],
)
def test_a_remedy_suits_what_the_script_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, name: str, message: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(script)
    with pytest.raises(target.TargetError) as caught:
        target.load(f"train.py:{name}" if name else "train.py")
    assert message in str(caught.value)
    assert remedy in caught.value.remedy
    assert caught.value.__notes__ == [caught.value.remedy]


def test_a_function_that_trains_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "MOST_TRAINING_S", 0.2)
    script = tmp_path / "train.py"
    body = dedent(TRAINS).format(module="DataLoader").replace("\n", "\n    ")
    script.write_text(f"def main():{body}")
    with pytest.raises(target.TargetError, match=r"main\(\) reads a loader in line 11: stopped there"):
        target.load(f"{script}:main")


def test_a_module_that_trains_at_import_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "MOST_TRAINING_S", 0.2)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    package = tmp_path / "package_that_trains"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "train.py").write_text(dedent(TRAINS).format(module="DataLoader"))
    assert target.load("package_that_trains.train:loader").batch_size == 4
    assert "package_that_trains.train:11 reads a loader when it is imported" in capsys.readouterr().err
    sys.modules.pop("package_that_trains")


LIGHTNING = """
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    class Data:
        def setup(self, stage):
            self.stage = stage

        def make(self):
            return DataLoader(TensorDataset(torch.zeros(8)), batch_size={"fit": 2, "test": 4}[self.stage])

        def train_dataloader(self):
            return self.make()

        def test_dataloader(self):
            return self.make()

    data = Data()
"""


def test_a_module_of_lightning_is_set_up_first(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(dedent(LIGHTNING))
    assert target.load(f"{script}:data.train_dataloader").batch_size == 2
    assert target.load(f"{script}:data.test_dataloader").batch_size == 4


SCRIPT = """
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        start = {start}

        def __len__(self):
            return 8

        def __getitem__(self, index):
            return self.start + index

    loader = DataLoader(Numbers(), batch_size=4, num_workers=1, multiprocessing_context="spawn")
"""


def test_workers_that_are_not_forked_import_the_classes_of_a_script(tmp_path: Path) -> None:
    for start in (10, 20):  # in two folders
        script = tmp_path / f"{start}" / "script_with_classes.py"
        script.parent.mkdir()
        script.write_text(dedent(SCRIPT).format(start=start))
        loader = target.load(f"{script}:loader")
        assert pickle.loads(pickle.dumps(loader.dataset))[1] == start + 1
        assert list(script.parent.iterdir()) == [script]
    first, _ = loader
    assert first.tolist() == [20, 21, 22, 23]


def test_a_script_with_the_name_of_a_module_does_not_replace_it(tmp_path: Path) -> None:
    script = tmp_path / "json.py"
    script.write_text(dedent(SCRIPT).format(start=0))
    assert target.load(f"{script}:loader").batch_size == 4
    assert sys.modules["json"] is json


def test_an_error_of_a_worker_has_a_short_text() -> None:
    error = ValueError("broken")
    error.add_note("sample 3 of Files")
    error.add_note("Caught ValueError in a worker.\nTraceback (most recent call last):\n  ...")
    raised = target.loader_error("train.py:loader", error)
    assert str(raised) == "train.py:loader raised ValueError: broken"
    assert raised.__notes__ == ["feedline doctor train.py:loader reads samples one by one", "sample 3 of Files"]
