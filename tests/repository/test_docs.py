"""Every Python block of README.md and docs/ runs, as the script that a reader would make of it."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from peers import trainers
from preloaded import Preloaded

import docs_tables
import readme_table
from feedline import datasets
from feedline.datasets.formats import load

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")
WITHIN_S = 240.0
SHARED = [
    *("torch._dynamo", "torch.distributed.checkpoint", "torchvision.transforms.v2", "datasets", "sklearn.metrics"),
    *("matplotlib.pyplot", "scipy.stats", "sympy", "huggingface_hub", "tokenizers", "rich.console", "boto3"),
]
"""Libraries that several trainers import. None of them knows torch's DataLoader, which some pages replace first."""


WARNINGS = "import warnings; warnings.simplefilter({0!r}); sys.warnoptions[:] = [{0!r}]"
"""What the option `-W` of Python does."""


class Block(NamedTuple):
    page: Path
    line: int
    code: str


def blocks(page: Path) -> list[Block]:
    """The blocks of a page; one that follows `<!-- continues -->` begins with the one before, which runs only there."""
    text, found = page.read_text(encoding="utf-8"), list[Block]()
    for match in BLOCK.finditer(text):
        before = found.pop().code if text.endswith("<!-- continues -->\n", 0, match.start()) else ""
        found.append(Block(page, text.count("\n", 0, match.start()) + 1, before + match[1]))
    return found


@pytest.fixture(scope="module")
def preloaded(preloaded: Preloaded) -> Iterator[Preloaded]:
    more = ["pandas", "torch._dynamo"]
    with Preloaded(ends_quickly=True, more=more, trunk=preloaded, setup=WARNINGS.format("error")) as server:
        yield server


@pytest.fixture(scope="module")
def with_trainers(preloaded: Preloaded) -> Iterator[Preloaded]:
    """Scripts that import packages of other projects, whose imports warn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, *map(str, trainers())])
        server = Preloaded(ends_quickly=True, more=SHARED, trunk=preloaded, setup=WARNINGS.format("ignore"))
    with server:
        yield server


TRAINERS = ROOT / "docs/how-to/trainers"
ELSEWHERE = {"ray-train", "torchrun"}
SLOW = re.compile(r"^import ray$|\[sys\.executable,", re.MULTILINE)
"""Found in scripts that run at night, because others check what they show: they start Ray, or another interpreter."""

ALL = [block for page in PAGES for block in blocks(page)]
OF_TRAINERS = [block for block in ALL if block.page.parent == TRAINERS and block.page.stem not in ELSEWHERE]
ALL = [block for block in ALL if block.page.parent != TRAINERS]


def scripts(blocks: list[Block]) -> list[Any]:
    return [pytest.param(block, marks=pytest.mark.nightly) if SLOW.search(block.code) else block for block in blocks]


@pytest.mark.parametrize("block", scripts(ALL), ids=lambda block: f"{block.page.relative_to(ROOT)}:{block.line}")
def test_block_runs(block: Block, preloaded: Preloaded, tmp_path: Path) -> None:
    script, log = tmp_path / "block.py", tmp_path / "output.log"
    script.write_text(block.code, encoding="utf-8")
    code = preloaded.run(script, log, WITHIN_S)
    assert code == 0, f"{block.page}:{block.line}\n{log.read_text()}"


@pytest.mark.nightly
@pytest.mark.parametrize("block", OF_TRAINERS, ids=lambda block: block.page.stem)
def test_a_page_of_a_trainer_runs(block: Block, with_trainers: Preloaded, tmp_path: Path) -> None:
    """`tests/stress/test_elastic.py` and `test_ray_train.py` run the pages on torchrun and Ray Train.

    At night, for the imports take seconds. `tests/conformance` has tests of their loaders for each run.
    """
    test_block_runs(block, with_trainers, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    missing = [link for link in LINK.findall(page.read_text(encoding="utf-8")) if not (page.parent / link).exists()]
    assert not missing


def test_no_page_is_left_out_of_the_index() -> None:
    """Each page can be reached from the index."""
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(index.read_text(encoding="utf-8"))}
    assert set(PAGES) - {index, ROOT / "README.md"} <= linked


def test_the_table_of_formats_is_that_of_the_package() -> None:
    text = (ROOT / "docs/how-to/formats.md").read_text(encoding="utf-8")
    table = re.search(r"^\| you have \|.*?\n\n", text, re.MULTILINE | re.DOTALL)
    assert table is not None
    assert table[0].strip().splitlines()[2:] == [_row(each) for each in datasets.FORMATS.values()]


def _row(each: datasets.Format) -> str:
    condition = f" ({each.extra_for})" if each.extra_for else ""
    install = f" `pip install 'feedline[{each.extra}]'`{condition}" if each.extra else ""
    return f"| {each.description} | {', '.join(f'`{usage}`' for usage in each.usage)} |{install} |"


def test_the_arguments_of_datasets_are_those_of_the_reference() -> None:
    text = (ROOT / "docs/reference/datasets.md").read_text(encoding="utf-8")
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)\(([^`]*)\)`", text, re.MULTILINE)}
    classes = {load(reference) for each in datasets.FORMATS.values() for reference in each.datasets}
    assert {each.__name__ for each in classes} <= set(rows)
    for each in classes:
        listed = [name.strip().rstrip("=") for name in rows[each.__name__].split(",")]
        assert listed == [*inspect.signature(each).parameters], each


def test_the_figures_in_the_readme_are_those_of_the_results() -> None:
    """After new measurements: `python bench/readme_table.py`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme == readme_table.rewritten(readme, readme_table.results())


def test_the_figures_in_the_docs_are_those_of_the_results() -> None:
    """After new measurements: `python bench/docs_tables.py`."""
    pages = docs_tables.pages()
    assert pages
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert text == docs_tables.rewritten(text), page


def test_a_table_is_made_of_the_results_of_its_contest(tmp_path: Path) -> None:
    standing = {"low": 90.0, "high": 1234.5, "runs": [1, 2, 3]}
    result = contest("MB/s") | {
        "baseline": "theirs",
        "standings": [
            {**standing, "name": "theirs", "median": 100.0, "ratio": 1.0},
            {**standing, "name": "ours", "median": 250.4, "ratio": 2.504},
        ],
    }
    (tmp_path / "a-contest-at-85-.json").write_text(json.dumps(result))
    marked = "before\n<!-- contest: a contest, at 85 % -->\n{}<!-- end of contest -->\nafter\n"
    made = docs_tables.rewritten(2 * marked.format("old\n"), tmp_path)
    assert "old" not in made
    assert made.count("| ours |") == made.count("after") == 2
    assert "| ours | 250 | 90 to 1,234 | 2.50 |" in made
    assert "Medians of 3 rounds, ratios to *theirs*; 2 cores of a CPU, 2026-11-21." in made
    assert docs_tables.rewritten(made, tmp_path) == made
    assert made.startswith("before\n<!-- contest")
    assert made.endswith("-->\nafter\n")


def contest(unit: str, **medians: float) -> dict[str, object]:
    standings = [{"name": name.replace("_", ", "), "median": median} for name, median in medians.items()]
    reported = {"cores": 2, "cpu": "a CPU", "python": "3.11"}
    return {
        "name": "a contest",
        "unit": unit,
        "standings": standings,
        "date": "2026-11-21T00:00:00",
        "machine": reported,
        "versions": {"torch": "2.13"},
    }


def test_the_figures_compare_the_best_with_the_best() -> None:
    rate = readme_table.table([contest("batches/s", torch_0=100.0, torch_2=200.0, feedline_0=900.0, feedline_2=1000.0)])
    assert "| a contest | 200 batches/s | 1,000 batches/s | 5 |" in rate
    time = readme_table.table([contest("s", torch=3.0, feedline=2.0, feedline_2=6.0, limit=1.0)])
    assert "| a contest | 3 s | 2 s | 1.5 |" in time
