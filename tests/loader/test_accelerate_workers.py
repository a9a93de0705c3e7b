"""Datasets that open images with Pillow, in the workers of a loader: torch's batches, decoded by the kernels."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from image_cases import jpeg
from PIL import Image
from torch.utils.data import DataLoader as TorchDataLoader

import feedline as fl
from feedline.images import accelerate_pillow, pillow_obstacle

pytestmark = pytest.mark.skipif(pillow_obstacle() is not None, reason=str(pillow_obstacle()))


class Photos(torch.utils.data.Dataset[Any]):
    """A user's own dataset: an augmented image, and a flag for pixels that were not decoded yet."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, bool]:
        with self.files[index].open("rb") as file:
            image = Image.open(file).convert("RGB")
        deferred = not {"im", "_im"} & vars(image).keys()
        x, y = (int(torch.randint(0, 40, ())) for _ in range(2))
        image = image.crop((x, y, x + 50, y + 40)).resize((32, 24), Image.Resampling.BILINEAR)
        if torch.rand(()) < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(255), deferred


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, photos: Photos) -> None:
        self.photos = photos

    def __iter__(self) -> Iterator[Any]:
        worker = fl.get_worker_info()
        for index in range(worker.id, len(self.photos), worker.num_workers):
            yield self.photos[index]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("photos")
    paths = [folder / f"{number}.jpg" for number in range(10)]
    for number, path in enumerate(paths):
        path.write_bytes(jpeg(120, 100, number, sampling=["4:2:0", "4:4:4", "gray"][number % 3]))
    return paths


def batches(loader_type: Any, dataset: Any, **options: Any) -> tuple[list[torch.Tensor], list[bool]]:
    torch.manual_seed(5)
    loader = loader_type(dataset, 4, **options)
    pairs = list(loader)
    if isinstance(loader, fl.DataLoader):
        loader.close()
    return [images for images, _ in pairs], [bool(flag) for _, flags in pairs for flag in flags]


def equal(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("kind", "context"),
    [
        pytest.param(Photos, None, id="map"),
        pytest.param(Photos, "fork", id="map-fork"),
        pytest.param(Photos, "spawn", id="map-spawn", marks=pytest.mark.nightly),
        pytest.param(lambda files: Stream(Photos(files)), None, id="stream"),
    ],
)
def test_worker_processes_defer_and_give_torchs_batches(files: list[Path], context: str | None, kind: Any) -> None:
    workers = 1 if context == "spawn" else 2
    expected, never = batches(TorchDataLoader, kind(files), num_workers=workers)
    found, always = batches(fl.DataLoader, kind(files), num_workers=workers, multiprocessing_context=context)
    assert all(always)
    assert not any(never)
    assert equal(found, expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "accelerate": False},
        {"num_workers": 2, "worker_method": "thread"},
        {"num_workers": 0},
    ],
)
def test_pillow_is_left_alone_elsewhere(files: list[Path], options: dict[str, Any]) -> None:
    _, flags = batches(fl.DataLoader, Photos(files), **options)
    assert not any(flags)


@pytest.mark.parametrize("options", [{"num_workers": 2, "worker_method": "thread"}, {"num_workers": 0}])
def test_threads_and_inline_defer_on_request(files: list[Path], options: dict[str, Any]) -> None:
    expected, _ = batches(fl.DataLoader, Photos(files), num_workers=0)
    with accelerate_pillow():
        found, flags = batches(fl.DataLoader, Photos(files), **options)
    assert all(flags)
    if options["num_workers"] == 0:  # threads share torch's generator
        assert equal(found, expected)


def test_a_truncated_image_raises_pillows_error_where_pillow_does(files: list[Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken.jpg"
    broken.write_bytes(files[0].read_bytes()[:-200])
    loader = fl.DataLoader(Photos([broken]), num_workers=1)
    with loader, pytest.raises(OSError, match="image file is truncated") as caught:
        next(iter(loader))
    assert any('.convert("RGB")' in note for note in caught.value.__notes__)


def test_arguments_are_attributes_for_trainers_that_read_them_back(files: list[Path]) -> None:
    assert fl.DataLoader(Photos(files), accelerate=False).accelerate is False
    assert fl.DataLoader(Photos(files)).accelerate is True


LATE = """
import sys
import torch
import feedline as fl

class Late(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        before = "PIL" in sys.modules
        from PIL import Image
        image = Image.open({path!r}).convert("RGB")
        return before, "_feedline_deferred" in vars(image), "feedline.images" in sys.modules

class Without(Late):
    def __getitem__(self, index):
        return "PIL" in sys.modules, "feedline.images" in sys.modules, False

if __name__ == "__main__":
    assert "PIL" not in sys.modules
    for data in (Late(), Without()):
        with fl.DataLoader(data, num_workers=2) as loader:
            print([[bool(flag) for flag in flags] for flags in loader])
"""


def test_pillow_imported_by_a_sample_is_accelerated_and_never_imported_for_others(
    files: list[Path], tmp_path: Path
) -> None:
    script = tmp_path / "late.py"
    script.write_text(LATE.format(path=str(files[0])))
    # A fresh interpreter: that of `preloaded` has imported Pillow.
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True, timeout=240)
    late, without = done.stdout.splitlines()
    assert late == str([[False, True, True]] * 2 + [[True, True, True]] * 2)
    assert without == str([[False, False, False]] * 4)


def test_images_pass_from_a_worker_to_the_loop(files: list[Path]) -> None:
    class Opened(Photos):
        def __getitem__(self, index: int) -> Any:
            return Image.open(io.BytesIO(self.files[index].read_bytes())).resize((9, 8))

    expected = [Image.open(path).resize((9, 8)) for path in files]
    with fl.DataLoader(Opened(files), batch_size=None, num_workers=2) as loader:
        assert list(loader) == expected
