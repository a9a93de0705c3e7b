"""`feedline lint`: each rule finds its mistake, and passes code that only looks like it."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from feedline.cli.app import app
from feedline.cli.doctor.findings import Finding, Severity, render
from feedline.cli.lint import command
from feedline.cli.lint.command import Hit, LintSurvey
from feedline.cli.lint.rules import RULES
from feedline.cli.lint.source import SourcePlace
from feedline.errors import ArgumentError

TRY = "class A(Dataset):\n def __getitem__(self, i):\n  try:\n   return f(i)\n  except Exception as e:\n   "


HEAD = """import random, h5py, numpy as np, torch
from torch import cuda
from torch.utils import data as D
from torch.utils.data import Dataset, DistributedSampler, IterableDataset
from feedline import DataLoader
"""


CASES = {
    "missing-set-epoch": (
        "sampler = DistributedSampler(data)",
        "sampler = DistributedSampler(data)\nfor epoch in epochs: sampler.set_epoch(epoch)",
    ),
    "handle-in-init": (
        "class A(Dataset):\n def __init__(self, p):\n  self.file = h5py.File(p)",
        "class A(Dataset):\n def __init__(self, p):\n  self.size = len(h5py.File(p)['x'])",
    ),
    "generator-in-init": (
        "class A(Dataset[int]):\n def __init__(self):\n  self.rng = np.random.default_rng(0)",
        (
            "class A:\n def __init__(self):\n  self.rng = np.random.default_rng(0)\n"
            "class B(Dataset):\n def __init__(self):\n  self.r = random.Random(0)\n  self.x = self.r.sample(X, 9)"
        ),
    ),
    "constant-seed": (
        "class A(Dataset):\n def __getitem__(self, i):\n  random.seed(1)",
        "class A(Dataset):\n def __getitem__(self, i):\n  random.seed(i)",
    ),
    "duplicate-stream": (
        "class A(IterableDataset):\n def __iter__(self):\n  yield 1",
        (
            "class A(IterableDataset):\n def __iter__(self):\n  info = D.get_worker_info()\n  yield 1\n"
            "class B(IterableDataset):\n def __iter__(self):\n  for x in self.dataset: yield x"
        ),
    ),
    "device-in-getitem": (
        "class A(D.Dataset):\n def __getitem__(self, i):\n  return self.x[i].to('cuda')",
        "class A(D.Dataset):\n def __getitem__(self, i):\n  return self.x[i].to(torch.float32)",
    ),
    "device-in-init": (
        "class A(Dataset):\n def __init__(self, x):\n  self.x = torch.tensor(x).cuda()",
        "class A(Dataset):\n def __init__(self, x):\n  self.x = torch.tensor(x).cuda()\nDataLoader(data)",
    ),
    "swallowed-error": (f"{TRY}return self[i + 1]", f"{TRY}raise ValueError(i) from e"),
    "loader-per-epoch": (
        "for epoch in range(3):\n loader = DataLoader(data, num_workers=n)",
        "for fold in range(3):\n loader = DataLoader(data, num_workers=n)",
    ),
    "first-batch-in-loop": (
        "for step in range(9):\n x = next(iter(train_loader))",
        "x = next(iter(train_loader))",
    ),
    "list-of-objects": (
        "class A(Dataset):\n def __init__(self, p):\n  self.rows = [r.split() for r in open(p)]",
        (
            "class A(Dataset):\n def __init__(self, p):\n  self.rows = np.load(p)\n"
            "  self.two = [f(x) for x in (1, 2)]\n  self.names = {v: k for k, v in p.items()}\n"
            "  self.sizes = sorted(list(set(p)))\n  self.x = list(tuple())\n"
            "  self.none = [None for _ in p]\n"
            "class PaddedBatch:\n def __init__(self, p):\n  self.keys = list(p)\n"
            " def __len__(self): return 1\n def __getitem__(self, i): return i"
        ),
    ),
    "no-workers": (
        "DataLoader(data, 32, True)",
        "DataLoader(data, 32, True, **options)\nDataLoader(data, 32)\nDataLoader(data, shuffle=True, num_workers=n)",
    ),
    "conflicting-arguments": (
        "DataLoader(data, shuffle=True, sampler=D.RandomSampler(data))",
        (
            "DataLoader(data, shuffle=False, sampler=f(data))\nDataLoader(data, shuffle=True, sampler=None)\n"
            "DataLoader(data, num_workers=4, prefetch_factor=4)\nDataLoader(data, num_workers=n, prefetch_factor=4)\n"
            "DataLoader(data, num_workers=0, prefetch_factor=None, persistent_workers=False)"
        ),
    ),
    "undivided-ranks": (
        "model = torch.nn.parallel.DistributedDataParallel(model)\nDataLoader(data, shuffle=True)",
        (
            "model = torch.nn.parallel.DistributedDataParallel(model)\nDataLoader(val)\n"
            "DataLoader(Photos(rank=rank), shuffle=True)\nDataLoader(data, sampler=Sampler(data))"
        ),
    ),
    "unguarded-spawn": (
        "loader = DataLoader(data, num_workers=2, multiprocessing_context='spawn')\nfor x in loader: pass",
        (
            "loader = DataLoader(data, num_workers=2, multiprocessing_context='spawn')\n"
            "if __name__ == '__main__':\n for x in loader: pass"
        ),
    ),
    "workers-restart": (
        "DataLoader(data, num_workers=4)",
        "DataLoader(data, num_workers=4, persistent_workers=False)\nDataLoader(data, num_workers=0)",
    ),
    "pinned-tiny-batches": (
        "DataLoader(data, batch_size=1, pin_memory=True)",
        "DataLoader(data, batch_size=64, pin_memory=True)",
    ),
    "small-buffer": (
        "import webdataset\nx = y.shuffle(100)",
        "x = y.shuffle(100)",
    ),
    "sync-per-step": (
        "for x in loader:\n total += loss(model(x)).item()",
        (
            "for n, x in enumerate(loader):\n if n % 100 == 0:\n  print(loss(model(x)).item())\n"
            "for x in loader:\n for label in x[1]: counts[label.item()] += 1"
        ),
    ),
    "torch-import": ("from torch.utils.data import DataLoader", "from torch.utils.data import Dataset"),
    "torch-name": ("x = D.DataLoader(data)", "x = D.Subset(data)"),
    "seeding-init-fn": (
        "def init(w):\n np.random.seed(torch.initial_seed() % 2**32)\nDataLoader(data, worker_init_fn=init)",
        "def init(w):\n open_files(w)\nDataLoader(data, worker_init_fn=init)",
    ),
    "sharing-strategy": ("torch.multiprocessing.set_sharing_strategy('file_system')", "torch.set_num_threads(1)"),
}


def hits(folder: Path, text: str) -> list[Hit]:
    """Hits in a file of this text."""
    file = folder / "train.py"
    file.write_text(text)
    return command.run([str(file)]).hits


SAMPLE = "class A(Dataset):\n def __getitem__(self, i):\n  "


INIT = "class A(Dataset):\n def __init__(self, root):\n  "


SPAWN = "def main():\n train(DataLoader(data, num_workers=2, multiprocessing_context=mp.get_context('spawn')))\n"


PARTIAL = "from functools import partial\ndef f(n, b): return b.cuda()\n"


DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n"


FORMS = {
    "a list that a loop fills": (
        "list-of-objects",
        f"{INIT}self.items = []\n  for path in root.iterdir():\n   self.items.append((path, 1))",
        f"{INIT}self.items = []\n  for path in ('a', 'b', 'c'):\n   self.items.append((path, 1))",
    ),
    "a list that becomes an attribute": (
        "list-of-objects",
        f"{INIT}items = []\n  for path in root.iterdir():\n   items.append(path)\n  self.items = items",
        f"{INIT}items = []\n  for path in root.iterdir():\n   items.append(path)\n  self.items = np.array(items)",
    ),
    "a list that is replaced by an array": (
        "list-of-objects",
        f"{INIT}self.x = list()\n  for i in range(len(root)):\n   self.x.append(f(i))",
        f"{INIT}self.x = []\n  for i in range(len(root)):\n   self.x.append(f(i))\n  self.x = np.array(self.x)",
    ),
    "a list of a short range": (
        "list-of-objects",
        f"{INIT}self.x = []\n  for i in range(100_000):\n   self.x.append(f(i))",
        f"{INIT}self.x = []\n  for i in range(3):\n   self.x.append(f(i))",
    ),
    "a list of the arguments": (
        "list-of-objects",
        f"{INIT}self.x = []\n  for part in root:\n   self.x.append(f(part))",
        "class A(Dataset):\n def __init__(self, *parts):\n  self.x = []\n  for part in parts: self.x.append(f(part))",
    ),
    "a list that is extended": (
        "list-of-objects",
        f"{INIT}self.x = []\n  self.x.extend(f(p) for p in root)\n  for p in root: self.x.extend(f(p))",
        f"{INIT}self.x = []\n  self.x.extend(['a', 'b'])\n  self.x.extend(f(root))",
    ),
    "a list that grows by another": (
        "list-of-objects",
        f"{INIT}self.x = []\n  self.x += [f(p) for p in root.iterdir()]",
        f"{INIT}self.x = []\n  self.n = 0\n  for p in root: self.n += f(p)\n  self.x += ['a']",
    ),
    "a tensor made on the device": (
        "device-in-getitem",
        f"{SAMPLE}return torch.zeros(3, device='cuda')",
        f"{SAMPLE}return torch.zeros(3, device=self.x.device)\nfor x in loader: y = torch.zeros(3, device='cuda')",
    ),
    "a dataset of torchvision": (
        "device-in-getitem",
        "from torchvision import datasets\nclass A(datasets.MNIST):\n def __getitem__(self, i): return f(i).cuda()",
        "from torchvision.models import VGG\nclass A(VGG):\n def __getitem__(self, i): return f(i).cuda()",
    ),
    "a method of the dataset": (
        "device-in-getitem",
        f"{SAMPLE}return self.load(i)\n def load(self, i): return self.x[i].cuda()",
        f"{SAMPLE}return self.x[i]\n def on_device(self, i): return self.x[i].cuda()",
    ),
    "a function that makes samples": (
        "device-in-getitem",
        f"def load(x): return x.cuda()\n{SAMPLE}return load(i)",
        f"def load(x): return x.cuda()\n{SAMPLE}return i",
    ),
    "a collate function": (
        "device-in-getitem",
        "def stack(b): return torch.stack(b).cuda()\nDataLoader(data, collate_fn=stack, num_workers=4)",
        "def stack(b): return torch.stack(b).cuda()\nDataLoader(data, collate_fn=stack)",
    ),
    "a lambda that collates": (
        "device-in-getitem",
        "DataLoader(data, collate_fn=lambda b: torch.stack(b).cuda(), num_workers=4)",
        "DataLoader(data, collate_fn=lambda b: torch.stack(b), num_workers=4)\ny = (lambda b: b.cuda())(x)",
    ),
    "a lambda in a variable": (
        "device-in-getitem",
        "stack = lambda b: torch.stack(b).to('cuda')\nDataLoader(data, collate_fn=stack, num_workers=4)",
        "stack = lambda b: torch.stack(b).to('cuda')\nDataLoader(data, collate_fn=stack)",
    ),
    "a method that collates": (
        "device-in-getitem",
        "class C:\n def stack(self, b): return b.cuda()\nDataLoader(data, collate_fn=C().stack, num_workers=4)",
        "class C:\n def move(self, b): return b.cuda()\nDataLoader(data, collate_fn=C().stack, num_workers=4)",
    ),
    "a part of a function that collates": (
        "device-in-getitem",
        f"{PARTIAL}DataLoader(data, collate_fn=partial(f, 1), num_workers=4)",
        f"{PARTIAL}DataLoader(data, collate_fn=partial(g, f), num_workers=4)",
    ),
    "a tensor of a dataset on the device": (
        "device-in-init",
        f"{INIT}self.x = torch.zeros(9, device='cuda')\nDataLoader(A('.'), num_workers=4)",
        f"{INIT}self.x = torch.zeros(9, device='cpu')\nDataLoader(A('.'), num_workers=4)",
    ),
    "a generator of the class": (
        "generator-in-init",
        "class A(Dataset):\n rng = np.random.default_rng(0)\n def __getitem__(self, i): return self.rng.random()",
        "class A(Dataset):\n rng = np.random.default_rng(0)\n def __init__(self, x): self.x = self.rng.permutation(x)",
    ),
    "a generator of the module": (
        "generator-in-init",
        f"rng = np.random.default_rng(0)\n{SAMPLE}return rng.random()",
        f"rng = np.random.default_rng(0)\n{SAMPLE}rng = np.random.default_rng(i)\n  return rng.random()",
    ),
    "a handle of the module": (
        "handle-in-init",
        f"X = h5py.File('x.h5')\n{SAMPLE}return X['x'][i]",
        f"X = h5py.File('x.h5')\nsize = len(X['x'])\n{SAMPLE}return i",
    ),
    "a file descriptor": (
        "handle-in-init",
        f"import os\n{INIT}self.fd = os.open(root, os.O_RDONLY)",
        f"import os\n{INIT}fd = os.open(root, os.O_RDONLY)\n  self.size = os.fstat(fd).st_size\n  os.close(fd)",
    ),
    "a sampler in a variable": (
        "conflicting-arguments",
        "order = D.RandomSampler(data)\nDataLoader(data, shuffle=True, sampler=order)",
        "order = None\nDataLoader(data, shuffle=True, sampler=order)",
    ),
    "prefetching without workers": (
        "conflicting-arguments",
        "DataLoader(data, num_workers=0, prefetch_factor=4)",
        "DataLoader(data, prefetch_factor=4, **options)",
    ),
    "persistent workers without workers": (
        "conflicting-arguments",
        "DataLoader(data, persistent_workers=True)",
        "DataLoader(data, num_workers='auto', persistent_workers=True)",
    ),
    "a call that starts the loop": ("unguarded-spawn", f"{SPAWN}main()", f"{SPAWN}if '__main__' == __name__:\n main()"),
    "a start method for all": (
        "unguarded-spawn",
        "torch.multiprocessing.set_start_method('spawn')\nfor x in DataLoader(data, num_workers=2): print(x)",
        "torch.multiprocessing.set_start_method('fork')\nfor x in DataLoader(data, num_workers=2): print(x)",
    ),
    "a module that others import": ("unguarded-spawn", f"{SPAWN}main()", SPAWN),
    "parallel training by another name": (
        "undivided-ranks",
        f"{DDP}DataLoader(data, shuffle=True)",
        f"{DDP}DataLoader(data, shuffle=True, seed=0, distributed='auto')",
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_rule_finds_other_forms_of_its_mistake_and_nothing_else(tmp_path: Path, form: str) -> None:
    code, wrong, right = FORMS[form]
    head = HEAD.replace(", DistributedSampler", "")
    assert [hit.code for hit in hits(tmp_path, head + wrong)].count(code) == 1
    assert code not in {hit.code for hit in hits(tmp_path, head + right)}


def test_every_rule_has_a_case() -> None:
    assert list(CASES) == [rule.code for rule in RULES]


@pytest.mark.parametrize("code", CASES)
def test_a_rule_finds_its_mistake_and_nothing_else(tmp_path: Path, code: str) -> None:
    wrong, right = CASES[code]
    lines = wrong.count("\n") + 1
    found = [hit for hit in hits(tmp_path, HEAD + wrong) if hit.code == code]
    assert len(found) == 1
    assert 5 < found[0].place.line <= 5 + lines
    assert found[0].text
    assert found[0].remedy
    assert code not in {hit.code for hit in hits(tmp_path, HEAD + right)}


@pytest.mark.parametrize("comment", ["# feedline: ignore", "# feedline: ignore[workers-restart]"])
def test_a_comment_switches_a_rule_off(tmp_path: Path, comment: str) -> None:
    text = f"{HEAD}DataLoader(data, num_workers=4)  {comment}\n"
    assert hits(tmp_path, text) == []
    assert len(hits(tmp_path, text.replace("workers-restart", "no-workers"))) == (1 if "[" in comment else 0)
    assert hits(tmp_path, f"\f\n{text}") == [], "a form feed is no line"


def test_notebooks_are_read_by_cells_and_folders_of_others_are_not(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "source": ["# title"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "from feedline import DataLoader as Loader\n"]},
        {"cell_type": "code", "source": ["%%bash\n", "ls -l | wc\n"]},
        {"cell_type": "code", "source": "\nLoader(data, num_workers=2)"},
    ]
    (tmp_path / "try.ipynb").write_text(json.dumps({"cells": cells}))
    for folder in (".venv", "node_modules", "build"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "other.py").write_text("from torch.utils.data import DataLoader")
    survey = command.run([str(tmp_path)])
    assert survey.files == 1
    assert [str(hit.place) for hit in survey.hits] == [f"{tmp_path / 'try.ipynb'}:cell 4:2"]


def test_files_that_cannot_be_parsed_are_listed_and_the_rest_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A(Dataset):\n def (:")
    (tmp_path / "b.py").write_bytes(b"Dataset = 1\0")
    (tmp_path / "c.py").write_text("from torch.utils.data import DataLoader")
    (tmp_path / "d.ipynb").write_text("{ Dataset")
    (tmp_path / "e.py").write_text("def (: # nothing that loads data")
    (tmp_path / "f.py").symlink_to(tmp_path / "gone")
    (tmp_path / "g.ipynb").write_text('["Dataset"]')
    (tmp_path / "h.py").write_text(f"for x in {'+'.join(['Dataset'] * 500)}: pass")  # deeper than ast can unparse
    survey = command.run([str(tmp_path)])
    unreadable = [Path(file.path).name for file in survey.unreadable]
    assert unreadable == ["a.py", "b.py", "d.ipynb", "f.py", "g.ipynb", "h.py"]
    assert all(file.reason for file in survey.unreadable)
    assert [hit.code for hit in survey.hits] == ["torch-import"]
    with pytest.raises(ArgumentError, match="there is no file or folder nowhere"):
        command.run(["nowhere"])


UNREADABLE = {
    "syntax.py": (b"def f(:", "invalid syntax in line 1"),
    "bytes.py": (b"\xff\xfe", "invalid or missing encoding declaration"),
    "broken.ipynb": (b"{", "Expecting property name"),
    "latin.py": (b"x = '\xe9'  # Dataset", "invalid or missing encoding declaration"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_named_file_that_cannot_be_read_is_listed_and_fails_the_command(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    content, reason = UNREADABLE[name]
    file.write_bytes(content)
    result = CliRunner().invoke(app, ["lint", str(file)])
    assert result.exit_code == 1
    line, end = result.stdout.splitlines()
    assert line.startswith(f"{file} cannot be read: {reason}")
    assert end == "1 file: 1 not read."
    listed = json.loads(CliRunner().invoke(app, ["lint", str(file), "--json"]).stdout)["unreadable"]
    assert [entry["path"] for entry in listed] == [str(file)]


def test_a_file_in_its_declared_encoding_is_read(tmp_path: Path) -> None:
    text = f"# coding: latin-1\n{HEAD}name = 'é'\nsampler = DistributedSampler(data)\n"
    (tmp_path / "a.py").write_text(text, encoding="latin-1")
    survey = command.run([str(tmp_path / "a.py")])
    assert (survey.unreadable, {hit.code for hit in survey.hits}) == ([], {"missing-set-epoch"})


ARTICLES = {
    "zipfile.ZipFile(p)": "an archive",
    "h5py.File(p)": "an HDF5 file",
    "lmdb.open(p)": "an LMDB environment",
    "open(p)": "a file",
    "os.open(p, 0)": "a file descriptor",
}


@pytest.mark.parametrize("call", ARTICLES)
def test_a_handle_is_named_with_its_article(tmp_path: Path, call: str) -> None:
    found = hits(tmp_path, f"{HEAD}class A(Dataset):\n def __init__(self, p):\n  self.x = {call}\n")
    assert [hit.text.partition(" in ")[0] for hit in found] == [f"A opens {ARTICLES[call]}"]


ODD = {
    "sorted without arguments": "class A(Dataset):\n def __init__(self):\n  self.x = sorted(sorted())",
    "bases in a circle": "class A(B): pass\nclass B(A): pass\nclass B(B): pass",
    "a huge integer": f"for epoch in range(0x{'f' * 5000}):\n DataLoader(data)",
}


@pytest.mark.parametrize("name", ODD)
def test_odd_code_does_not_hide_the_mistakes_around_it(tmp_path: Path, name: str) -> None:
    (tmp_path / "a.py").write_text(f"{HEAD}{ODD[name]}\nsampler = DistributedSampler(data)\n")
    survey = command.run([str(tmp_path)])
    assert survey.unreadable == []
    assert "missing-set-epoch" in {hit.code for hit in survey.hits}


@pytest.mark.parametrize("width", [40, 80])
def test_every_line_fits(tmp_path: Path, width: int) -> None:
    found = hits(tmp_path, HEAD + "\n".join(case[0] for case in CASES.values() if "epoch in" not in case[0]))
    screen = StringIO()
    short = [hit._replace(place=hit.place._replace(path="train.py")) for hit in found]
    command.show(LintSurvey(1, short, []), Console(width=width, file=screen))
    assert max(map(len, screen.getvalue().splitlines())) <= width


def test_the_exit_code_reports_mistakes(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("from torch.utils.data import DataLoader\n")
    assert CliRunner().invoke(app, ["lint", str(tmp_path)]).exit_code == 0
    (tmp_path / "b.py").write_text(HEAD + CASES["constant-seed"][0])
    result = CliRunner().invoke(app, ["lint", str(tmp_path), "--json"])
    assert result.exit_code == 1
    assert {hit["severity"] for hit in json.loads(result.stdout)["hits"]} >= {Severity.BAD.value, Severity.GOOD.value}


def test_code_of_this_project_has_no_mistakes() -> None:
    root = Path(__file__).parents[3]
    survey = command.run([str(root / "src"), str(root / "examples")])
    assert [hit for hit in survey.hits if hit.severity is Severity.BAD] == []
    assert survey.unreadable == []
    assert survey.files > 200


def test_another_file_of_the_same_package_may_have_what_a_rule_misses(tmp_path: Path) -> None:
    package = tmp_path / "trainer"
    package.mkdir()
    (package / "__init__.py").touch()
    stream = "class A(IterableDataset):\n def __iter__(self):\n  yield from self.reader\n"
    (package / "data.py").write_text(f"{HEAD}sampler = DistributedSampler(data)\n{stream}")
    alone = command.run([str(tmp_path)])
    assert {hit.code for hit in alone.hits if hit.severity is Severity.BAD} == {"missing-set-epoch", "duplicate-stream"}
    (package / "loop.py").write_text("def train(loader):\n loader.sampler.set_epoch(3)\n get_worker_info()\n")
    together = command.run([str(tmp_path)])
    assert [(hit.code, hit.severity) for hit in together.hits] == [("duplicate-stream", Severity.NOTE)]
    (package / "__init__.py").unlink()
    assert not command.run([str(tmp_path)]).is_clean, "scripts of one folder are no package"


def test_a_script_that_imports_a_module_may_set_the_epochs_of_its_samplers(tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(f"{HEAD}sampler = DistributedSampler(data)\n")
    (tmp_path / "train.py").write_text("import other\nfor epoch in range(3): sampler.set_epoch(epoch)\n")
    (hit,) = command.run([str(tmp_path)]).hits
    assert hit.code == "missing-set-epoch"
    (tmp_path / "train.py").write_text("from data import sampler\nfor epoch in range(3): sampler.set_epoch(epoch)\n")
    assert command.run([str(tmp_path)]).hits == []


@pytest.mark.parametrize("line", ["import lightning.pytorch as pl", "from pytorch_lightning import LightningModule"])
def test_lightning_sets_the_epochs_of_samplers(line: str, tmp_path: Path) -> None:
    (tmp_path / "data.py").write_text(f"{HEAD}{line}\nsampler = DistributedSampler(data)\n")
    assert command.run([str(tmp_path)]).hits == []


PARALLEL = "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)\n"


@pytest.mark.parametrize(
    ("trainer", "imports", "is_hit"),
    [
        (PARALLEL, "from data import make", True),
        (PARALLEL, "import project.data as d", True),
        (PARALLEL, "from . import data", True),
        (PARALLEL, "from other import make", False),
        ("", "from data import make", False),
        (f"{PARALLEL}sampler = DistributedSampler(x)\n", "from data import make", False),
    ],
)
def test_a_loader_is_not_divided_among_the_ranks_of_the_script_that_imports_it(
    tmp_path: Path, trainer: str, imports: str, is_hit: bool
) -> None:
    (tmp_path / "train.py").write_text(f"{imports}\n{trainer}")
    (tmp_path / "data.py").write_text(f"{HEAD}def make(x): return DataLoader(x, shuffle=True, num_workers=n)\n")
    found = [hit for hit in command.run([str(tmp_path)]).hits if hit.code == "undivided-ranks"]
    assert [(Path(hit.place.path).name, hit.place.line) for hit in found] == ([("data.py", 6)] if is_hit else [])
    assert all("train.py" in hit.text for hit in found)


def test_a_script_in_the_current_folder_may_be_in_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "__init__.py").touch()
    (tmp_path / "train.py").write_text(f"{HEAD}sampler = DistributedSampler(data)\n", encoding="utf-8-sig")
    monkeypatch.chdir(tmp_path)
    for path in ("train.py", "."):
        survey = command.run([path])
        assert (survey.unreadable, {hit.code for hit in survey.hits}) == ([], {"missing-set-epoch"})


def test_places_in_files_are_never_cut() -> None:
    place = "/a/long/folder/of/some/project/datasets/images.py:123"
    text = render([Finding(place, "a mistake that is described in words", Severity.NOTE)], 40, names_first=True)
    assert f"{place}:" in text.plain
    screen = StringIO()
    hit = Hit(SourcePlace(place[:-4], 123), "no-workers", Severity.NOTE, "a mistake in words", "mend it")
    command.show(LintSurvey(1, [hit], []), Console(width=40, file=screen))
    assert f"! {place}:\n" in screen.getvalue()
