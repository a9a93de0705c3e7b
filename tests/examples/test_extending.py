"""Each example of an extension passes the public conformance check of its kind, and equals the code of its how-to."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from extensions import registered
from recordio_files import file_of, packed
from rich.console import Console
from writers.values import jpeg

import feedline as fl
from feedline.cli.inspect.command import InspectOptions
from feedline.cli.inspect.command import run as inspect
from feedline.core.rng import SampleRng

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples/extending").glob("*.py"))
SIZES = (40, 1, 25)


@pytest.fixture(autouse=True)
def tables() -> Iterator[None]:
    """The rows of the examples, removed afterwards."""
    with registered():
        yield


@pytest.fixture
def record_files() -> dict[str, bytes]:
    records = iter(packed(i, [float(i)], jpeg(i, (40, 30))) for i in range(sum(SIZES)))
    return {f"{n}.rec": file_of([next(records) for _ in range(size)]) for n, size in enumerate(SIZES)}


@pytest.fixture
def folder(tmp_path: Path, record_files: dict[str, bytes]) -> Path:
    (tmp_path / "data").mkdir()
    for name, data in record_files.items():
        (tmp_path / "data" / name).write_bytes(data)
    return tmp_path / "data"


def test_the_format(record_files: dict[str, bytes]) -> None:
    from recordio_dataset import RecordIO

    fl.testing.check_format(partial(RecordIO, decode="bytes"), record_files, collate_fn=list)
    crop = fl.transforms.Compose([fl.transforms.RandomResizedCrop(16), fl.transforms.ToTensor()])
    fl.testing.check_format(partial(RecordIO, transform={"image": crop}), record_files)


@pytest.mark.parametrize("decode", ["bytes", "image"])
def test_the_format_passes_the_check_of_datasets_in_every_kind_of_worker(folder: Path, decode: str) -> None:
    dataset = fl.datasets.RecordIO(folder, decode=decode)
    fl.testing.check_dataset(dataset, collate_fn=list, methods=("process", "executor"))


def test_a_batch_of_the_format_is_decoded_in_place(folder: Path) -> None:
    crop = fl.transforms.Compose([fl.transforms.CenterCrop(24), fl.transforms.ToTensor()])
    dataset = fl.datasets.RecordIO(folder, transform={"image": crop})
    batch = next(iter(fl.DataLoader(dataset, 5, sampler=[0, 39, 40, 41, 65])))
    assert batch["id"].tolist() == batch["label"].tolist() == [0, 39, 40, 41, 65]
    assert torch.equal(batch["image"], torch.stack([dataset[n]["image"] for n in (0, 39, 40, 41, -1)]))
    assert dataset.traits.reads_batches
    assert dataset.shard_sizes.tolist() == list(SIZES)
    assert dataset.address(41) == (str(folder / "2.rec"), "record 0")


def test_the_format_names_damaged_records(folder: Path, record_files: dict[str, bytes]) -> None:
    (folder / "1.rec").write_bytes(b"no record of this format")
    with pytest.raises(fl.errors.SampleError, match=r"1\.rec has no record at byte 0: it is damaged, or no RecordIO"):
        fl.datasets.RecordIO(folder)
    (folder / "1.rec").write_bytes(file_of([b"too short"]))
    with pytest.raises(fl.errors.SampleError, match=r"record 0 of .*1\.rec cannot be read \(error: unpack requires"):
        fl.datasets.RecordIO(folder)[40]
    (folder / "1.rec").write_bytes(file_of([packed(0, [0.0], b"no image")]))
    with pytest.raises(fl.errors.SampleError, match=r"record 0 of .*1\.rec cannot be decoded as image"):
        fl.datasets.RecordIO(folder)[40]


def test_inspect_reads_the_format(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary, healthy = inspect([str(folder)], InspectOptions(order=(1, 8)), Console())
    assert healthy
    assert (summary["format"], summary["samples"], summary["shards"]) == ("RecordIO", 66, list(SIZES))
    assert "RecordIO" in capsys.readouterr().out


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
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    once = fl.transforms.Compose([Invert()])(image)
    assert np.array_equal(np.asarray(once), 255 - image)
    assert np.array_equal(np.asarray(fl.transforms.Compose([Invert(), Invert()])(image)), image)


@pytest.mark.parametrize("times", [1, 2, 3])
def test_fused_transforms_give_the_values_of_single_ones(times: int) -> None:
    from invert_transform import Invert, fuse

    steps = [fl.transforms.RandomCrop(16), *[Invert()] * times, fl.transforms.ToTensor()]
    fused = fl.transforms.Compose(steps)
    fl.transforms.unregister_fusion(Invert, Invert)
    apart = fl.transforms.Compose(steps)
    assert len(apart.plan.steps) == 2 + times
    fl.transforms.register_fusion(Invert, Invert, fuse)
    assert len(fused.plan.steps) == 3
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), np.uint8)
    for key in range(8):
        assert torch.equal(fused(image, SampleRng(key)), apart(image, SampleRng(key)))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_is_one_file_of_the_public_protocols(path: Path) -> None:
    names: list[Any] = re.findall(r"^(?:from|import) (feedline[\w.]*)", path.read_text(), re.MULTILINE)
    assert names
    assert set(names) <= {
        "feedline",
        "feedline.datasets",
        "feedline.samplers",
        "feedline.stores",
        "feedline.transforms",
        "feedline.workers",
    }


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_the_page_shows_the_example(path: Path) -> None:
    assert path.read_text().strip() in (ROOT / "docs/how-to/extend.md").read_text()


def test_the_options_of_the_pool_reach_it() -> None:
    import executor_pool

    pool = executor_pool.ExecutorPool(lambda request, allocate: request, fl.workers.PoolOptions(2))
    with pool:
        assert pool.statistics() == replace(pool.statistics(), workers=2)
