"""Each example of an extension passes the public conformance check of its kind, and is the text of its how-to."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import feedline as fl
from feedline.cli.inspect.command import InspectOptions
from feedline.cli.inspect.command import run as inspect
from feedline.datasets.formats import FORMATS
from feedline.stores.schemes import unregister_scheme
from feedline.transforms import FUSIONS
from feedline.workers import POOLS

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/extending").glob("*.py"))


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """The tables as they were, once a test is over."""
    import executor_pool
    import idx_dataset
    import invert_transform
    import zip_store

    before = [dict(table) for table in (FORMATS, POOLS, FUSIONS)]
    FORMATS.setdefault("idx", idx_dataset.FORMAT)
    fl.workers.register_pool("executor", executor_pool.KIND)
    fl.transforms.register_fusion(invert_transform.Invert, invert_transform.Invert, invert_transform.fuse)
    fl.stores.register_scheme("zipfile", zip_store.SCHEME)
    yield
    unregister_scheme("zipfile")
    for table, rows in zip((FORMATS, POOLS, FUSIONS), before, strict=True):
        table.clear()
        table.update(rows)


@pytest.fixture
def idx_files(tmp_path: Path) -> list[str]:
    paths = []
    for shard, count in enumerate((40, 1, 25)):
        paths.append(str(tmp_path / f"{shard}.idx"))
        rows = np.arange(100 * shard, 100 * shard + count)[:, None].repeat(3, axis=1).astype(">i4")
        Path(paths[-1]).write_bytes(bytes([0, 0, 12, 2]) + np.array(rows.shape, ">i4").tobytes() + rows.tobytes())
    return paths


def test_the_format(idx_files: list[str]) -> None:
    from idx_dataset import IDX

    data = IDX(idx_files)
    assert [data[n].tolist() for n in (0, 39, 40, 41, -1)] == [[n] * 3 for n in (0, 39, 100, 200, 224)]
    assert data.shard_sizes.tolist() == [40, 1, 25]
    assert data.address(41) == (idx_files[2], "row 0")
    fl.testing.check_dataset(data)
    Path(idx_files[1]).write_bytes(b"no index")
    with pytest.raises(fl.errors.SampleError, match=r"1\.idx is not a whole IDX file"):
        IDX(idx_files)


def test_inspect_reads_the_format(idx_files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    summary, healthy = inspect(idx_files, InspectOptions(order=(1, 8)), Console())
    assert healthy
    assert (summary["format"], summary["samples"], summary["shards"]) == ("IDX", 66, [40, 1, 25])
    assert "IDX" in capsys.readouterr().out


def test_the_pool() -> None:
    fl.testing.check_pool("executor")


def test_the_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    contents = {f"folder/{n}.txt": b"%d" % n * n for n in range(12)}
    with zipfile.ZipFile(tmp_path / "x.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            archive.writestr(name, data)
    url = "zipfile://x.zip"
    fl.testing.check_store(fl.stores.open_store(url), contents)
    files = fl.datasets.Files(f"{url}/folder/*.txt", decode="bytes")
    with fl.DataLoader(files, batch_size=4, num_workers=2, worker_method="process", collate_fn=list) as loader:
        samples = [bytes(sample) for batch in loader for sample in batch]
    assert sorted(samples) == sorted(contents.values())


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_the_sampler(n: int) -> None:
    from zigzag_sampler import Zigzag

    fl.testing.check_sampler(Zigzag(n))
    assert [*Zigzag(n).take(1, 0, n)] == [*range(n)][::-1]


def test_the_transform() -> None:
    from invert_transform import Invert

    crop, convert = fl.transforms.RandomCrop(16), fl.transforms.ToTensor()
    for times in (1, 2, 3):
        pipeline = fl.transforms.Compose([crop, *[Invert()] * times, convert])
        assert len(pipeline.plan.steps) == 3
        fl.testing.check_transform(pipeline)
    image = np.arange(20 * 20 * 3, dtype=np.uint8).reshape(20, 20, 3)
    once = fl.transforms.Compose([Invert()])(image)
    assert np.array_equal(np.asarray(once), 255 - image)
    assert np.array_equal(np.asarray(fl.transforms.Compose([Invert(), Invert()])(image)), image)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_one_file_of_the_public_protocols(path: Path) -> None:
    names: list[Any] = re.findall(r"^(?:from|import) (feedline[\w.]*)", path.read_text(), re.MULTILINE)
    assert names
    assert set(names) <= {"feedline", "feedline.samplers", "feedline.stores", "feedline.transforms", "feedline.workers"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_page_shows_the_example(path: Path) -> None:
    assert path.read_text().strip() in (ROOT / "docs/how-to/extend.md").read_text()


def test_the_options_of_the_pool_reach_it() -> None:
    import executor_pool

    pool = executor_pool.ExecutorPool(lambda request, allocate: request, fl.workers.PoolOptions(2))
    with pool:
        assert pool.statistics() == replace(pool.statistics(), workers=2)
