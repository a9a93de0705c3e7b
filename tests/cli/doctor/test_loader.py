"""`feedline doctor script.py:loader`: hazards of a loader, found in scripts with one defect each."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from time import monotonic

import pytest
from preloaded import Preloaded
from typer.testing import CliRunner

from feedline.cli import target
from feedline.cli.app import app
from feedline.cli.doctor import budget
from feedline.cli.doctor import loader as loader_checks
from feedline.cli.target import TargetError
from feedline.loader.dataloader import DataLoader

HEAD = """
import threading, time
import numpy as np, torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

class Plain(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.full((4,), float(index))
"""


DEFECTS = {
    "samples": """
class Data(Plain):
    def __getitem__(self, index):
        if index == 32:
            raise ValueError("broken")
        return super().__getitem__(index)
loader = DataLoader(Data(), batch_size=4)
""",
    "handles": """
class Data(Plain):
    def __init__(self):
        self.file = open(__file__)
loader = DataLoader(Data(), batch_size=4, num_workers=2)
""",
    "random": """
class Data(Plain):
    def __init__(self):
        self.rng = np.random.default_rng(0)
    def __getitem__(self, index):
        return self.rng.random(3)
loader = DataLoader(Data(), batch_size=4, num_workers=2)
""",
    "pickling": """
class Data(Plain):
    def __init__(self):
        self.lock = threading.Lock()
loader = DataLoader(Data(), batch_size=4, num_workers=2, multiprocessing_context="spawn")
""",
    "shards": """
class Data(IterableDataset):
    num_partitions = 3
    def __iter__(self):
        return iter(range(8))
loader = DataLoader(Data(), batch_size=4, num_workers=2)
""",
    "storage": """
class Data(Plain):
    def __getitem__(self, index):
        time.sleep(0.003)
        return super().__getitem__(index)
loader = DataLoader(Data(), batch_size=4)
""",
    "slow": """
class Data(Plain):
    def __getitem__(self, index):
        time.sleep(0.1 if index == 32 else 0.0)
        return super().__getitem__(index)
loader = DataLoader(Data(), batch_size=4)
""",
    "shapes": """
class Data(Plain):
    def __getitem__(self, index):
        return torch.zeros(1 + index % 3)
loader = DataLoader(Data(), batch_size=4)
""",
    "length": """
class Data(Plain):
    def __len__(self):
        return 0
loader = DataLoader(Data(), batch_size=4)
""",
}


WITHIN_S = 240
COMMAND = """
import contextlib, math, sys
from feedline.cli.app import app
from feedline.cli.doctor import loader
loader.SLOW_S = math.inf  # a busy machine makes samples slow
with open(sys.argv.pop(1), "w") as out, contextlib.redirect_stdout(out):
    app()
"""


def written(folder: Path, script: str) -> str:
    path = folder / "train.py"
    path.write_text(HEAD + script)
    return f"{path}:loader"


def by_name(output: str) -> dict[str, dict[str, str]]:
    return {finding["name"]: finding for finding in json.loads(output)["loader"]}


@pytest.mark.parametrize("name", DEFECTS)
def test_each_defect_is_found_with_a_remedy(tmp_path: Path, name: str) -> None:
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, DEFECTS[name]), "--json", "--world-size", "2"])
    assert result.exit_code in (0, 1), result.output
    found = by_name(result.stdout)
    assert found[name]["severity"] != "good", found
    assert found[name]["remedy"]


def test_a_library_that_crashes_on_a_sample_is_found_by_the_line_that_called_it(
    tmp_path: Path, preloaded: Preloaded
) -> None:
    crashing = "import ctypes\nclass Data(Plain):\n    def __getitem__(self, index):\n        ctypes.string_at(0)\n"
    target = written(tmp_path, f"{crashing}loader = DataLoader(Data(), batch_size=4)\n")
    code, printed = preloaded.run_code("from feedline.cli.app import app\napp()\n", tmp_path, "doctor", target)
    assert code == -signal.SIGSEGV, printed
    assert 'train.py", line' in printed
    assert "in __getitem__" in printed


def test_the_machine_is_printed_before_the_script_of_the_loader_runs(tmp_path: Path, preloaded: Preloaded) -> None:
    target = written(tmp_path, "import os; os._exit(3)")
    code, printed = preloaded.run_code("from feedline.cli.app import app\napp()\n", tmp_path, "doctor", target)
    assert code == 3, printed
    assert "open files" in printed


LARGE = """
import pathlib
class Data(Plain):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, index):
        with open(pathlib.Path(__file__).with_name("reads"), "a") as log:
            log.write("read\\n")
        return torch.zeros(1).expand(1 << 26)  # 256 MiB by its shape
loader = DataLoader(Data(), batch_size=1_000_000, num_workers=4)
"""


def test_batches_that_exceed_the_memory_are_found_before_one_is_built(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, LARGE), "--json"])
    found = by_name(result.stdout)
    assert found["batches"]["severity"] == "bad"
    assert found["batches"]["evidence"].startswith("a batch takes 244 TiB, and 8 are in flight: 1,953 TiB, more than")
    assert "smaller samples" in found["batches"]["remedy"]
    assert "2 workers" not in found
    assert "2 workers (" in found["left out"]["evidence"]
    assert (tmp_path / "reads").read_text().count("read") < 1_000


@pytest.mark.parametrize("index", [0, 9])
def test_a_sample_that_takes_forever_is_stopped_and_named(
    tmp_path: Path, index: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_checks, "STOPPING_S", 0.5)
    monkeypatch.setattr(budget, "CHECKS_S", 4.0)
    stuck = f"""
class Data(Plain):
    def __getitem__(self, index):
        if index == {index}:
            threading.Event().wait()
        return super().__getitem__(index)
loader = DataLoader(Data(), batch_size=4, num_workers=2)
"""
    began = monotonic()
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, stuck), "--json"])
    assert result.exit_code == 1, result.output
    found = by_name(result.stdout)
    assert f"index {index} was not read within" in found["slow"]["evidence"]
    assert found["slow"]["severity"] == "bad"
    assert "left out" in found
    assert monotonic() - began < WITHIN_S


def test_checks_that_need_more_time_than_is_left_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "CHECKS_S", 4.0)
    slow = """
class Data(Plain):
    def __getitem__(self, index):
        time.sleep(0.2)
        return super().__getitem__(index)
loader = DataLoader(Data(), batch_size=32, num_workers=2)
"""
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, slow), "--json"])
    found = by_name(result.stdout)
    assert "2 workers (" in found["left out"]["evidence"]
    assert "of reading)" in found["left out"]["evidence"]


SEEKS = """
import feedline as fl
class Data(Plain):
    def __init__(self):
        self.file = open(__file__, "rb")
    def __getitem__(self, index):
        self.file.seek(index)
        time.sleep(0.001)
        return torch.tensor(self.file.tell())
loader = fl.DataLoader(Data(), batch_size=4, num_workers=2, worker_method=METHOD)
"""


def test_worker_threads_that_share_the_position_of_a_file_are_named_as_threads(tmp_path: Path) -> None:
    arguments = ["doctor", "--json"]
    result = CliRunner().invoke(app, [*arguments, written(tmp_path, SEEKS.replace("METHOD", "'thread'"))])
    found = by_name(result.stdout)
    assert "worker threads share its position" in found["handles"]["evidence"]
    assert "in each thread" in found["handles"]["remedy"]
    assert found["threads"]["severity"] == "bad"
    assert found["threads"]["remedy"].startswith("pass worker_method='process'")
    result = CliRunner().invoke(app, [*arguments, written(tmp_path, SEEKS.replace("METHOD", "'process'"))])
    assert "forked workers share its position" in by_name(result.stdout)["handles"]["evidence"]


RAISES = """
class Data(Plain):
    def __len__(self):
        return 1000
    def __getitem__(self, index):
        if CONDITION:
            raise ERROR(f"broken {index}")
        return super().__getitem__(index)
loader = DataLoader(Data(), batch_size=4, num_workers=2)
"""


@pytest.mark.parametrize(
    ("condition", "error", "name", "evidence", "remedy"),
    [
        ("index == 3", "ValueError", "samples", "index 3 raises ValueError: broken 3", 'on_error="skip"'),
        ("index > 900", "IndexError", "length", "index 903 raises IndexError: broken 903", "let __len__"),
        ("index in (0, 999)", "ValueError", "samples", "index 0: ValueError: broken 0", 'on_error="skip"'),
    ],
    ids=["not sampled", "length", "sampled"],
)
def test_samples_that_raise_are_one_finding_with_an_index(
    tmp_path: Path, condition: str, error: str, name: str, evidence: str, remedy: str
) -> None:
    script = RAISES.replace("CONDITION", condition).replace("ERROR", error)
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, script), "--json"])
    (found,) = (each for each in json.loads(result.stdout)["loader"] if each["severity"] == "bad")
    assert found["name"] == name
    assert evidence in found["evidence"]
    assert remedy in found["remedy"]


STREAM = """
import feedline as fl
class Data(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id, 100, info.num_workers) if DIVIDES else range(100)
class Sized(Data):
    def __len__(self):
        return LENGTH
loader = fl.DataLoader(CLASS(), batch_size=BATCH, num_workers=2)
"""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {"workers": "two workers read the same samples: the 4 × 2 workers"}),
        ({"BATCH": "None"}, {"workers": "two workers read the same samples: the 4 × 2 workers"}),
        ({"DIVIDES": "True"}, {}),
        ({"DIVIDES": "True", "CLASS": "Sized", "LENGTH": "100"}, {}),
        (
            {"DIVIDES": "True", "CLASS": "Sized", "LENGTH": "1000"},
            {"length": "says 1,000 samples, but the stream e"},
        ),
        ({"DIVIDES": "True", "CLASS": "Sized", "LENGTH": "50"}, {"length": "says 50 samples, but the stream goes on"}),
    ],
    ids=["not divided", "not divided, without batches", "divided", "true length", "too long", "too short"],
)
def test_streams_that_workers_do_not_divide_and_wrong_lengths_are_found(
    tmp_path: Path, values: dict[str, str], expected: dict[str, str]
) -> None:
    script = STREAM
    for name, value in {"CLASS": "Data", "BATCH": "4", "DIVIDES": "False", "LENGTH": "0", **values}.items():
        script = script.replace(name, value)
    result = CliRunner().invoke(app, ["doctor", written(tmp_path, script), "--json", "--world-size", "4"])
    bad = {name: found for name, found in by_name(result.stdout).items() if found["severity"] == "bad"}
    assert bad.keys() == expected.keys(), result.stdout
    for name, text in expected.items():
        assert text in bad[name]["evidence"]
        assert bad[name]["remedy"]


def test_a_sound_loader_has_only_good_findings(tmp_path: Path, preloaded: Preloaded) -> None:
    sound = 'loader = DataLoader(Plain(), batch_size=4, num_workers=2)\nif __name__ == "__main__": 1 / 0'
    command, log, out = tmp_path / "doctor.py", tmp_path / "output.log", tmp_path / "findings.json"
    command.write_text(COMMAND)
    code = preloaded.run(command, log, WITHIN_S, str(out), "doctor", written(tmp_path, sound), "--json")
    assert code == 0, log.read_text()
    found = by_name(out.read_text())
    assert {finding["severity"] for finding in found.values()} == {"good"}
    assert found["2 workers"]["evidence"] == "as in one process"


@pytest.mark.parametrize(
    ("script", "name", "message"),
    [
        ("raise RuntimeError('no data')", "loader", "raised RuntimeError: no data before"),
        ("import sys; sys.exit(3)", "loader", "ended with SystemExit: 3 before"),
        ("", "loader", "defines no loader"),
        ("loader = 3", "loader", "is of class int, not a DataLoader"),
        ("x = DataLoader(Plain()); y = DataLoader(Plain())", "", "has several loaders: name one (loaders there: x, y)"),
        ("", "", "has no DataLoader among its globals"),
        ("def loader(): raise ValueError('nothing')", "loader", "loader() raised ValueError: nothing"),
    ],
)
def test_a_target_that_is_no_loader_says_why(tmp_path: Path, script: str, name: str, message: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + script)
    with pytest.raises(TargetError) as caught:
        target.load(f"{path}:{name}" if name else str(path))
    assert message in str(caught.value)


def test_missing_files_and_modules_are_named() -> None:
    with pytest.raises(TargetError, match=r"there is no file nothing\.py"):
        target.load("nothing.py:loader")
    with pytest.raises(TargetError, match="module no_such_module cannot be imported"):
        target.load("no_such_module:loader")


@pytest.mark.parametrize("arguments", ["batch_size=4, shuffle=True", "batch_sampler=[[1, 2], [3]]", "batch_size=None"])
def test_functions_and_attributes_give_loaders_that_feedline_can_copy(tmp_path: Path, arguments: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        f"{HEAD}\nclass Setup:\n    train = DataLoader(Plain(), {arguments})\ndef make(): return Setup.train"
    )
    made = target.load(f"{path}:make")
    assert type(made) is type(target.load(f"{path}:Setup.train"))
    copy = target.as_feedline(made, seed=0)
    assert isinstance(copy, DataLoader)
    assert len(list(copy)) == len(list(made))


def test_a_missing_target_is_a_finding_and_the_machine_is_still_examined(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["doctor", str(tmp_path / "none.py"), "--json"])
    assert result.exit_code == 1
    examined = json.loads(result.stdout)
    assert "there is no file" in examined["loader"][0]["evidence"]
    assert len(examined["machine"]) > 5
