"""The table of formats: rows load, formats from outside join it, and `inspect` shares the datasets' indexes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from packing_cases import inspected

import feedline as fl
from feedline.cli.inspect.formats import format_of
from feedline.datasets import FORMATS, Format, ShardSummary, register_format, unregister_format
from feedline.datasets.formats import load, register_installed
from feedline.datasets.shard_summaries import summarize
from feedline.datasets.tables.parquet_files import Footers
from feedline.errors import ArgumentError

PAIRS = Format("pairs", ("pairs_format:Pairs",), pattern="**/*.pairs")
MODULE = """
from feedline.datasets import Format, Lines

class Pairs(Lines):
    def __init__(self, paths, *, index_dir=None):
        super().__init__(paths, inside="**/*.pairs", transform=str.split, index_dir=index_dir)

FORMAT = Format("pairs", ("pairs_format:Pairs",), pattern="**/*.pairs")
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a format from outside, whose module can be imported."""
    before = set(FORMATS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/pairs_format.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    (tmp_path / "data/inner").mkdir(parents=True)
    (tmp_path / "data/a.pairs").write_text("a b\nc d\n")
    (tmp_path / "data/inner/b.pairs").write_text("e f\n")
    register_installed.cache_clear()
    yield tmp_path / "data"
    for name in FORMATS.keys() - before:
        unregister_format(name)
    register_installed.cache_clear()
    sys.modules.pop("pairs_format", None)


class TestTable:
    @pytest.mark.parametrize("name", FORMATS)
    def test_every_reference_loads(self, name: str) -> None:
        row = FORMATS[name]
        for reference in row.datasets:
            assert load(reference) is getattr(fl.datasets, load(reference).__name__)
            assert load(reference).__name__ in fl.datasets.__all__
        assert row.summarize is None or callable(load(str(row.summarize)))
        assert row.accepts is None or callable(load(row.accepts))

    def test_an_unknown_name_is_an_attribute_error(self) -> None:
        with pytest.raises(AttributeError, match=r"module 'feedline.datasets' has no attribute 'Parket'"):
            fl.datasets.Parket  # noqa: B018

    def test_every_public_name_is_there(self) -> None:
        assert all(hasattr(fl.datasets, name) for name in fl.datasets.__all__)
        assert set(fl.datasets.__all__) <= set(dir(fl.datasets))


class TestFromOutside:
    def test_a_registered_format_is_a_dataset_and_is_inspected(self, folder: Path) -> None:
        assert not hasattr(fl.datasets, "Pairs")
        register_format("pairs", PAIRS)
        register_format("pairs", PAIRS)  # a module that is imported twice
        assert fl.datasets.Pairs(folder)[2] == ["e", "f"]
        before = sorted(folder.rglob("*"))
        found = inspected(folder)
        assert (found["format"], found["samples"], found["shards"], found["nbytes"]) == ("pairs", 3, [2, 1], 12)
        assert sorted(folder.rglob("*")) == before

    def test_an_unregistered_format_is_unknown(self, folder: Path) -> None:
        register_format("pairs", PAIRS)
        assert fl.datasets.Pairs(folder)[0] == ["a", "b"]
        unregister_format("pairs")
        assert not hasattr(fl.datasets, "Pairs")
        with pytest.raises(ArgumentError, match="has no files of a known format"):
            format_of([str(folder)])
        for name in ("pairs", "parquet"):
            with pytest.raises(ArgumentError, match=rf"unregister_format\('{name}'\): no such format was registered"):
                unregister_format(name)

    def test_its_own_function_counts(self, folder: Path) -> None:
        row = Format("pairs", summarize=lambda paths: ShardSummary("page", [4] * len(paths), [1] * len(paths)))
        assert summarize(row, ["x", "y"]) == ShardSummary("page", [4, 4], [1, 1])

    def test_an_installed_package_names_its_formats(self, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        info = folder.parent / "site/pairs-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pairs\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[feedline.formats]\ngone = gone_module:X\npairs = pairs_format:FORMAT\n"
        )
        assert inspected(folder)["format"] == "pairs"
        assert "the format gone (gone_module:X) is left out: No module named 'gone_module'" in caplog.text

    @pytest.mark.parametrize(
        ("name", "row", "message"),
        [
            ("parquet", PAIRS, r"there is already a format 'parquet' \(Parquet\): register yours under another name"),
            ("mine", Format("mine", ("mine:Parquet",)), r"the format 'parquet' has a dataset Parquet already"),
            (
                "mine",
                Format("mine", ("mine.Parquet",)),
                r"of the format 'mine': give 'module:class' for 'mine.Parquet'",
            ),
            (3, PAIRS, "the name of a format must be a string that is not empty, not 3"),
            ("mine", 3, r"register_format\('mine'\) takes a datasets\.Format\(\.\.\.\), not int"),
            ("mine", Format(None), r"Format\(label=\.\.\.\) must be a string, not None"),  # type: ignore[arg-type]
            ("mine", Format("mine", "mine:Mine"), r"Format\(datasets=.* must be a tuple of strings, not 'mine:Mine'"),  # type: ignore[arg-type]
            ("mine", Format("mine", markers=[1]), r"Format\(markers=.* must be a tuple of strings, not \[1\]"),  # type: ignore[arg-type]
            ("mine", Format("mine", summarize=3), r"Format\(summarize=.*'module:function', not 3"),  # type: ignore[arg-type]
        ],
    )
    def test_what_cannot_be_registered(self, name: Any, row: Any, message: str) -> None:
        before = dict(FORMATS)
        with pytest.raises(ArgumentError, match=message):
            register_format(name, row)
        assert before == FORMATS


def test_tars_at_the_top_outrank_other_files(tmp_path: Path) -> None:
    for name in ("a.parquet", "b.jpg", "c/d.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert format_of([str(tmp_path)]) is FORMATS["imagefolder"]
    (tmp_path / "z.tar").touch()
    assert format_of([str(tmp_path)]) is FORMATS["tar"]


def test_inspect_leaves_parquet_footers_to_the_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pq.write_table(pa.table({"x": np.arange(60)}), tmp_path / "a.parquet", row_group_size=10)
    memory: Any = MemoryFileSystem()
    memory.pipe("/footers/a.parquet", (tmp_path / "a.parquet").read_bytes())
    try:
        assert inspected("memory://footers")["shards"] == [10] * 6
        monkeypatch.setattr(Footers, "_build", lambda *_: pytest.fail("footers are read again"))
        assert fl.datasets.Parquet("memory://footers").shard_sizes.tolist() == [10] * 6
    finally:
        memory.rm("/footers", recursive=True)
