"""`kill -9` of `feedline pack` at any moment: the next run has the same bytes, without duplicates or partial files."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from packing_cases import class_folders, contents, members
from preloaded import Preloaded

from feedline.cli.pack import PackOptions, ShardSize, pack
from feedline.datasets.webdataset import open_index

pytestmark = pytest.mark.stress

SCRIPT = Path(__file__).with_name("pack_until.py")


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return class_folders(tmp_path_factory.mktemp("kill") / "images", ("a", "b", "c"), 10)


@pytest.fixture(scope="module")
def whole(images: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The result of an undisturbed run: five shards."""
    folder = tmp_path_factory.mktemp("whole") / "out"
    finish(images, folder)
    return contents(folder)


def finish(images: Path, folder: Path) -> int:
    """Run to the end; returns the number of shards that were kept."""
    return pack(
        [str(images)], folder, PackOptions(shard_size=ShardSize(samples=7), grid=True), 2, lambda reported: None
    ).kept


Kill = Callable[[Path, str, int], None]


@pytest.fixture
def kill(images: Path, tmp_path: Path, preloaded: Preloaded) -> Kill:
    """Packs into a folder until the process kills itself at that call of that function."""

    def killed(folder: Path, moment: str, count: int) -> None:
        log = tmp_path / "output.log"
        code = preloaded.run(SCRIPT, log, 120, str(images), str(folder), moment, str(count))
        assert code == -signal.SIGKILL, log.read_text()

    return killed


# A shard is finished by: its tar's fsync and replace, its index's replace, the manifest's open, fsync and replace.
# All are finished alike: the run is killed at each replace of one shard, and at the last of the next.
@pytest.mark.parametrize(
    ("moment", "count", "least"),
    [
        ("samples", 1, 0),
        ("samples", 30, 4),
        ("open", 6, 1),
        ("fsync", 1, 0),
        ("fsync", 4, 1),
        *(("replace", count, (count - 3) // 3) for count in (3, 4, 5, 8)),
    ],
)
def test_a_killed_run_is_completed(
    kill: Kill, images: Path, whole: dict[str, bytes], tmp_path: Path, moment: str, count: int, least: int
) -> None:
    folder = tmp_path / "out"
    kill(folder, moment, count)
    kept = finish(images, folder)
    assert kept >= least
    assert contents(folder) == whole
    assert len(members(folder)) == 60
    assert {path.name for path in folder.glob("*.index")} == {f"{name}.index" for name in whole if "tar" in name}
    for tar in folder.glob("*.tar"):
        index = open_index(tar, f"{tar}.index")
        index.verify()
        assert index.has_grids


def test_a_run_that_is_killed_again_and_again_comes_to_its_end(
    kill: Kill, images: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for samples in (3, 15, 29):
        kill(tmp_path / "out", "samples", samples)
    assert finish(images, tmp_path / "out") == 4
    assert contents(tmp_path / "out") == whole


def test_a_run_continues_in_a_folder_that_was_moved(
    kill: Kill, images: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    kill(tmp_path / "out", "samples", 16)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert finish(images, moved) == 2
    assert contents(moved) == whole
