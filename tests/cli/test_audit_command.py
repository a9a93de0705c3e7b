"""`feedline audit` and `feedline replay`, with the script of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from feedline.cli.app import app, main
from feedline.cli.target import load
from feedline.loader.dataloader import DataLoader

SCRIPT = """
import torch
from feedline import DataLoader

data = torch.utils.data.TensorDataset(torch.arange(60))


def loader(rank=0, world=1, **more):
    return DataLoader(data, batch_size=5, shuffle=True, seed=4, distributed=(rank, world), **more)


def make():
    return loader()


if __name__ == "__main__":
    raise SystemExit("a run")
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def loader(rank: int = 0, world: int = 1, **more: Any) -> DataLoader[Any]:
    data = torch.utils.data.TensorDataset(torch.arange(60))
    return DataLoader(data, batch_size=5, shuffle=True, seed=4, distributed=(rank, world), **more)


def called(*arguments: Any) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_a_run_is_proven_and_a_lost_log_is_named(script: Path, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    for rank in range(2):
        list(loader(rank, 2, log=log))  # one after the other: each loader has the same label
    done = called("audit", f"{tmp_path}/*.jsonl", "--loader", f"{script}:make")
    assert done.exit_code == 0, done.output
    assert "TensorDataset, epoch 0: 60 delivered exactly once" in done.output
    (tmp_path / "run.rank1.jsonl.audit").write_text("")
    failed = called("audit", f"{tmp_path}/*.jsonl", "--json")
    assert failed.exit_code == 1
    (fault,) = json.loads(failed.output)["faults"]
    assert fault["kind"] == "lost"
    assert "positions 0 to 59: the rows of rank 1 of 2, which has no audit log" in fault["text"]


def test_only_records_of_the_named_loader_are_compared(script: Path, tmp_path: Path) -> None:
    log, validation = tmp_path / "run.jsonl", torch.utils.data.TensorDataset(torch.arange(20))
    list(loader(log=log))
    list(DataLoader(validation, batch_size=5, seed=4, log=log))
    done = called("audit", log, "--loader", f"{script}:make")
    assert done.exit_code == 0, done.output
    records = [json.loads(line) for line in Path(f"{log}.audit").read_text().splitlines()]
    Path(f"{log}.audit").write_text(json.dumps(records[1]))
    assert "no loader of the logs has the 60 samples of" in str(
        called("audit", log, "--loader", f"{script}:make").exception
    )


def test_a_missing_log_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", ["feedline", "audit", str(tmp_path / "run.jsonl")])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "run.jsonl.audit: DataLoader(log='run.jsonl')" in capsys.readouterr().err.replace("\n", "")


def test_a_batch_of_any_rank_is_built_again(script: Path, tmp_path: Path) -> None:
    delivered = [batch for (batch,) in loader(1, 3)]
    place = "--step", 2, "--rank", 1, "--world-size", 3
    done = called(
        "replay", f"{script}:make", "--step", 2, "--rank", 1, "--world-size", 3, "--out", tmp_path / "b.pt", "--json"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(done.output)
    assert found["indices"] == delivered[2].tolist()
    assert found["positions"] == list(range(35, 40))
    assert found["content"] == ["int64 (5,)"]
    (saved,) = torch.load(tmp_path / "b.pt", weights_only=True)
    assert torch.equal(saved, delivered[2])
    shown = called("replay", f"{script}:make", *place)
    assert f"digest: {found['digest']}" in shown.output
    assert "batch 2 of epoch 0, rank 1 of 3" in shown.output


@pytest.mark.parametrize("kind", ["json", "checkpoint"])
def test_steps_count_from_a_saved_state(kind: str, script: Path, tmp_path: Path) -> None:
    run = loader()
    batches = iter(run)
    next(batches)
    state = tmp_path / "state"
    if kind == "json":
        state.write_text(json.dumps(run.state_dict()))
    else:
        torch.save({"model": torch.zeros(3), "data": {"train": run.state_dict()}}, state)
    rest = [batch.tolist() for (batch,) in batches]
    done = called("replay", f"{script}:make", "--step", 3, "--state", state, "--json")
    assert json.loads(done.output)["indices"] == rest[3]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step", "99"], "epoch 0 has no step 99 on rank 0 of 1"),
        (["--step", "1", "--rank", "4"], "rank 4 needs more than 1 ranks: pass --world-size"),
    ],
)
def test_what_is_not_there_is_named(arguments: list[str], said: str, script: Path) -> None:
    done = called("replay", f"{script}:make", *arguments)
    assert said in str(done.exception)


def test_a_script_runs_without_its_main_block(script: Path) -> None:
    assert isinstance(load(f"{script}:make"), DataLoader)
