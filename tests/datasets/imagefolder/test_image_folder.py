from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_cases import encoded, jpeg, photo, rgb
from PIL import Image
from recorder import Recorder
from torch.utils.data import DataLoader, default_collate

import feedline as fl
from feedline import transforms as T
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import ImageFolder, array_container
from feedline.datasets.imagefolder import scan
from feedline.errors import ArgumentError, SampleError, SampleIndexError
from feedline.images import ImageError

CROP = T.Compose([T.RandomResizedCrop(32), T.RandomHorizontalFlip(), T.ToTensor()])
CENTER = T.Compose([T.Resize(40), T.CenterCrop(32)])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Ten images of three classes."""
    root = tmp_path / "images"
    for number in range(10):
        put(root / f"class {number % 3}" / f"{number}.jpg", jpeg(100 + number, 80, number))
    return root


def put(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def as_torchvision(root: str, extensions: tuple[str, ...]) -> tuple[list[str], list[tuple[str, int]]]:
    """Torchvision's rule: sorted folders are classes; `os.walk` sorted as it is, and in each folder sorted names."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    samples = []
    for target, name in enumerate(classes):
        for folder, _, names in sorted(os.walk(f"{root}/{name}", followlinks=True)):
            samples += [(f"{folder}/{each}", target) for each in sorted(names) if each.lower().endswith(extensions)]
    return classes, samples


class TestListing:
    def test_order_and_classes_are_torchvisions(self, tmp_path: Path) -> None:
        names = [
            "b/2.jpg",
            "b/10.JPG",
            "a/x/1.png",
            "a/x-y/1.png",
            "a/x.y/0.png",
            "a/z.jpeg",
            "a/x/sub/é.webp",
            "b/n.txt",
        ]
        for name in names:
            put(tmp_path / "root" / name, b"")
        put(tmp_path / "root" / "loose.jpg", b"")
        put(tmp_path / "far" / "away.jpg", b"")
        (tmp_path / "root/a/link").symlink_to(tmp_path / "far")
        data = ImageFolder(tmp_path / "root")
        classes, samples = as_torchvision(str(tmp_path / "root"), folder_scan_extensions())
        assert data.classes == classes == ["a", "b"]
        assert data.class_to_idx == {"a": 0, "b": 1}
        assert data.samples == samples
        assert samples == data.imgs
        assert data.targets == [target for _, target in samples]
        assert len(data) == 8

    @settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        st.sets(
            st.lists(
                st.text("aB-._é1 ", min_size=1, max_size=3).filter(lambda t: set(t) != {"."}), min_size=2, max_size=4
            ).map(tuple),
            min_size=1,
        )
    )
    def test_any_tree(self, tmp_path: Path, paths: set[tuple[str, ...]]) -> None:
        root = tmp_path / "root"
        shutil.rmtree(root, ignore_errors=True)
        for path in paths:
            put(root.joinpath(*(f"{part}d" for part in path[:-1]), path[-1] + ".jpg"), b"")
        classes, samples = as_torchvision(str(root), (".jpg",))
        data = ImageFolder(root)
        assert (data.classes, list(data.samples)) == (classes, samples)

    def test_relative_roots_stay_relative_and_are_read_from_anywhere(
        self, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(root.parent)
        data = ImageFolder("images")
        assert data.samples[0] == ("images/class 0/0.jpg", 0)
        monkeypatch.chdir("/")
        assert data[0][0].size == (100, 80)

    def test_names_that_are_no_text(self, tmp_path: Path) -> None:
        name = os.fsencode(tmp_path) + b"/c/odd\xff.jpg"
        (tmp_path / "c").mkdir()
        with open(name, "wb") as file:
            file.write(jpeg(64, 64))
        data = ImageFolder(tmp_path, CENTER)
        assert os.fsencode(data.samples[0][0]) == name
        assert data[0][0].shape == (32, 32, 3)

    def test_what_is_an_image_can_be_chosen(self, root: Path) -> None:
        put(root / "class 0" / "x.raw", jpeg(64, 64))
        assert len(ImageFolder(root, extensions=(".raw",), allow_empty=True)) == 1
        assert len(ImageFolder(root, is_valid_file=lambda path: path.endswith(("0.jpg", "1.jpg", "2.jpg")))) == 3

    def test_a_subclass_finds_other_classes(self, root: Path) -> None:
        class Two(ImageFolder):
            def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
                return ["odd", "even"], {"class 2": 5, "class 0": 5, "nowhere": 1}

        data = Two(root, allow_empty=True)
        assert data.classes == ["odd", "even"]
        assert set(data.targets) == {5}
        assert len(data) == 7

    def test_samples_look_like_a_list_and_can_be_assigned(self, root: Path) -> None:
        data = ImageFolder(root)
        assert data.samples[-1] == (str(root / "class 2/8.jpg"), 2)
        assert data.samples[1:3] == list(data.samples)[1:3]
        assert data.samples != data.samples[1:]
        assert data.samples != 3
        assert "class 0/0.jpg" in repr(data.samples)
        with pytest.raises(IndexError, match="10 is out of range"):
            data.samples[10]
        assert data.targets.count(0) == 4
        data.samples = [*data.samples[4:6], (str(root / "class 0/9.jpg"), 7)]
        assert len(data) == 3
        assert data.targets == [1, 1, 7]
        assert data[2][1] == 7
        assert data[2][0].size == (109, 80)
        data.samples = [(path, label) for (path, _), label in zip(data.samples, [np.int64(-1), 2.0, True], strict=True)]
        assert data.targets == [-1, 2, 1]
        for label in (0.75, float("nan"), 2**31, np.float32(2**31), "1", None):
            message = re.escape(f"class index of sample 1={label!r}: give whole numbers, from -2")
            with pytest.raises(ArgumentError, match=message):
                data.samples = [data.samples[0], ("x.jpg", label)]
        assert data.targets == [-1, 2, 1]

    def test_memory(self, tmp_path: Path) -> None:
        (tmp_path / "c").mkdir()
        for number in range(2000):
            (tmp_path / "c" / f"{number:06d}.jpg").touch()
        data = ImageFolder(tmp_path)
        assert data.targets[0] == 0
        assert len(pickle.dumps(data)) / 2000 <= 64 + len("c/000000.jpg")


def folder_scan_extensions() -> tuple[str, ...]:
    return (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


class TestKeptListing:
    def test_is_read_instead_of_the_tree(self, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        kept = tmp_path / "listings"
        first = ImageFolder(root, index_dir=kept)
        monkeypatch.setattr(scan, "_list", None)
        again = ImageFolder(root, CROP, index_dir=str(kept))
        assert list(again.samples) == list(first.samples) == list(first.imgs)
        assert again[3][0].shape == (3, 32, 32)

    @pytest.mark.parametrize("change", ["added", "removed", "folder", "class", "extensions"])
    def test_is_made_again_when_a_folder_has_changed(self, root: Path, tmp_path: Path, change: str) -> None:
        kept = tmp_path / "listings"
        before = list(ImageFolder(root, index_dir=kept).samples)
        extensions: tuple[str, ...] = (".jpg",)
        if change == "added":
            put(root / "class 1/new.jpg", b"")
        elif change == "removed":
            (root / "class 2/2.jpg").unlink()
        elif change == "folder":
            shutil.rmtree(root / "class 2")
        elif change == "class":
            put(root / "class 9/new.jpg", b"")
        else:
            extensions = (".jpg", "0.jpg")
        found = ImageFolder(root, index_dir=kept, extensions=extensions)
        assert list(found.samples) == list(ImageFolder(root).samples)
        assert (list(found.samples) == before) == (change == "extensions")

    def test_what_is_no_listing_is_left_alone(self, root: Path, tmp_path: Path) -> None:
        ImageFolder(root, index_dir=tmp_path / "listings")
        (other,) = (tmp_path / "listings").iterdir()
        other.write_bytes(b"precious")
        with pytest.raises(SampleError, match=rf"{other.name} is not a file of feedline arrays"):
            ImageFolder(root, index_dir=tmp_path / "listings")
        assert other.read_bytes() == b"precious"
        array_container.write(str(other), {}, {"x": np.zeros(3, np.uint8)})
        with pytest.raises(
            SampleError, match=rf"{other.name} is not the listing of an ImageFolder: give another index_dir="
        ):
            ImageFolder(root, index_dir=tmp_path / "listings")

    def test_knows_no_functions(self, root: Path, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"index_dir= cannot be used with is_valid_file="):
            ImageFolder(root, is_valid_file=bool, index_dir=tmp_path / "x")


class TestSamples:
    def test_images_are_torchvisions(self, root: Path) -> None:
        image, target = ImageFolder(root)[5]
        path, wanted = ImageFolder(root).samples[5]
        assert target == wanted
        assert isinstance(image, Image.Image)
        assert np.array_equal(np.asarray(image), np.asarray(rgb(Path(path).read_bytes())))

    def test_foreign_transforms_get_them(self, root: Path) -> None:
        data = ImageFolder(root, lambda image: image.size, lambda target: -target)
        assert data[9] == ((108, 80), -2)
        assert data.__getitems__([9, -1]) == [data[9], data[9]]
        with_rng = ImageFolder(root, lambda image, rng: (image.size, rng.integers(1 << 60)))
        rows = [list(fl.DataLoader(with_rng, batch_size=5, seed=1, num_workers=n, collate_fn=list)) for n in (0, 2)]
        assert rows[0] == rows[1]

    def test_a_loader_of_ones_own(self, root: Path) -> None:
        data = ImageFolder(root, CENTER, loader=lambda path: np.full((50, 50, 3), len(path), np.uint8))
        assert data[0][0].shape == (32, 32, 3)
        assert set(data[0][0].reshape(-1).tolist()) == {len(data.samples[0][0])}
        assert reader_of(data) is None
        plain = ImageFolder(root, CENTER)
        assert reader_of(plain) is not None
        plain.loader = data.loader
        assert reader_of(plain) is None
        assert np.array_equal(plain[3][0], data[3][0])

    def test_a_transform_can_be_assigned(self, root: Path) -> None:
        data = ImageFolder(root)
        assert reader_of(data) is None
        data.transform = CENTER
        assert data.transform is CENTER
        assert reader_of(data) is not None
        assert data[0][0].shape == (32, 32, 3)

    def test_a_subclass_that_adds_the_path(self, root: Path) -> None:
        class WithPath(ImageFolder):
            def __getitem__(self, index: int) -> Any:
                return (*super().__getitem__(index), self.samples[index][0])

        data = WithPath(root, CROP)
        assert reader_of(data) is None
        [batch] = fl.DataLoader(data, batch_size=10, seed=2)
        assert list(batch[2]) == [path for path, _ in data.samples]
        [fused] = fl.DataLoader(ImageFolder(root, CROP), batch_size=10, seed=2)
        assert torch.equal(batch[0], fused[0])

    @pytest.mark.parametrize("transform", [CROP, CENTER], ids=["crop", "center"])
    def test_a_gather_is_the_collation_of_samples(self, root: Path, transform: Any) -> None:
        data, recorder = ImageFolder(root, transform), Recorder()
        read = reader_of(data)
        assert read is not None
        torch.manual_seed(7)
        batch = read(BatchRead(np.array([3, 1, 1, -1]), recorder))
        torch.manual_seed(7)
        wanted = default_collate(
            [(torch.as_tensor(image), target) for image, target in map(data.__getitem__, [3, 1, 1, -1])]
        )
        assert isinstance(batch, list)
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(batch, wanted, strict=True))
        assert recorder.holds(batch)

    def test_what_has_no_one_shape_is_not_gathered(self, root: Path) -> None:
        assert reader_of(ImageFolder(root, T.Resize(40))) is None
        assert reader_of(ImageFolder(root, CENTER, target_transform=str)) is None

    def test_orientation(self, tmp_path: Path) -> None:
        exif = Image.Exif()
        exif[0x0112] = 6
        for number in range(3):
            put(tmp_path / f"c/{number}.jpg", encoded(photo(80, 60, number), exif=exif, quality=95))
        upright = {True: (60, 80), False: (80, 60)}
        for oriented, size in upright.items():
            data = ImageFolder(tmp_path, apply_exif_orientation=oriented)
            assert data[0][0].size == size
            whole = ImageFolder(tmp_path, T.RandomCrop((50, 50)), apply_exif_orientation=oriented)
            fused = ImageFolder(tmp_path, T.Resize((40, 20)), apply_exif_orientation=oriented)
            direct = T.Resize((40, 20))(data[1][0])
            assert abs(fused[1][0].astype(int) - direct.astype(int)).max() <= 1
            for each in (whole, fused):
                batch = next(iter(fl.DataLoader(each, batch_size=3, seed=0)))[0]
                alone = [row[0] for row in fl.DataLoader(each, batch_size=None, seed=0)]
                assert all(np.array_equal(a, b) for a, b in zip(batch.numpy(), map(np.asarray, alone), strict=True))

    def test_conformance(self, root: Path) -> None:
        fl.testing.check_dataset(ImageFolder(root, CROP))

    def test_torchs_own_loader(self, root: Path) -> None:
        batches = list(DataLoader(ImageFolder(root, CROP), batch_size=4, num_workers=1, multiprocessing_context="fork"))
        assert [tuple(images.shape) for images, _ in batches] == [(4, 3, 32, 32), (4, 3, 32, 32), (2, 3, 32, 32)]
        assert torch.cat([labels for _, labels in batches]).tolist() == ImageFolder(root).targets

    def test_repr(self, root: Path) -> None:
        assert repr(ImageFolder(root)) == f"<ImageFolder {root}: 10 images of 3 classes>"


class TestBadInput:
    def test_no_root(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"nowhere"):
            ImageFolder(tmp_path / "nowhere")

    def test_no_class_folders(self, tmp_path: Path) -> None:
        put(tmp_path / "x/1.jpg", b"")
        with pytest.raises(FileNotFoundError, match=r"x has no class folders: images must be in root/class/name.jpg"):
            ImageFolder(tmp_path / "x")

    def test_empty_classes(self, root: Path) -> None:
        put(root / "empty/readme.txt", b"")
        with pytest.raises(
            FileNotFoundError, match=r"ends with .jpg, .* class folder empty of .*pass extensions= .*allow_"
        ):
            ImageFolder(root)
        with pytest.raises(
            FileNotFoundError, match=r"no file that is_valid_file accepts in the class folders class 0, cla"
        ):
            ImageFolder(root, is_valid_file=lambda path: False)
        data = ImageFolder(root, allow_empty=True)
        assert (len(data), len(data.classes)) == (10, 4)

    def test_an_index_out_of_range(self, root: Path) -> None:
        data = ImageFolder(root, CENTER)
        with pytest.raises(SampleIndexError, match=r"index 10 is out of range for ImageFolder with 10"):
            data[10]
        with pytest.raises(SampleIndexError, match=r"index -11"):
            data.read_batch(BatchRead(np.array([0, -11]), torch.empty))

    def test_links_without_end(self, root: Path) -> None:
        (root / "class 0/loop").symlink_to(root)
        with pytest.raises(ArgumentError, match=r"class 0/loop is a link to its own parent folder .*images: remove"):
            ImageFolder(root)

    def test_a_link_to_itself_is_a_file_that_cannot_be_read(self, root: Path) -> None:
        (root / "class 0/self.jpg").symlink_to(root / "class 0/self.jpg")
        data = ImageFolder(root)
        assert len(data) == 11
        with pytest.raises(OSError, match=r"self.jpg"):
            data[4]

    @pytest.mark.parametrize("data", [b"hello, no image", b"", jpeg(64, 64)[:20]], ids=["text", "empty", "cut"])
    def test_files_that_are_no_images(self, root: Path, data: bytes) -> None:
        put(root / "class 1/1.jpg", data)
        for transform in (CENTER, CROP):
            folder = ImageFolder(root, transform)
            with pytest.raises(ImageError, match=r"class 1/1.jpg could not be read") as raised:
                folder[4]
            assert f"{root}/class 1/1.jpg (sample 4 of the ImageFolder {root})" in raised.value.__notes__[0]
            with pytest.raises(ImageError, match=r"class 1/1.jpg could not be read") as raised:
                folder.read_batch(BatchRead(np.array([0, 3, 4]), allocate_tensor))
            assert "1.jpg (sample 4 of" in raised.value.__notes__[0]
        with pytest.raises(SampleError, match=r"class 1/1.jpg cannot be read as an image .* on_error='skip'"):
            ImageFolder(root)[4]

    def test_broken_links(self, root: Path) -> None:
        (root / "class 1/0.jpg").symlink_to(root / "nowhere.jpg")
        for transform in (None, CENTER):
            data = ImageFolder(root, transform)
            with pytest.raises(FileNotFoundError, match=r"class 1/0.jpg \(sample 4 .* is a broken link: restore it"):
                data[4]
        with pytest.raises(FileNotFoundError, match=r"class 1/0.jpg \(sample 4 .* is a broken link: restore it"):
            data.read_batch(BatchRead(np.array([0, 4]), allocate_tensor))

    def test_lying_names_are_read_by_content(self, root: Path) -> None:
        put(root / "class 0/0.png", jpeg(70, 60))
        put(root / "class 0/00.jpg", encoded(photo(70, 60), "PNG"))
        data = ImageFolder(root)
        assert [data[at][0].size for at in (1, 2)] == [(70, 60), (70, 60)]
        assert [ImageFolder(root, CENTER)[at][0].shape for at in (1, 2)] == [(32, 32, 3)] * 2

    @pytest.mark.parametrize("transform", [CROP, lambda image, rng: rng.random()], ids=["fused", "foreign"])
    def test_bad_images_can_be_left_out(self, root: Path, transform: Any) -> None:
        put(root / "class 1/1.jpg", b"no image")
        (root / "class 1/4.jpg").unlink()
        (root / "class 1/4.jpg").symlink_to(root / "nowhere.jpg")
        data = ImageFolder(root, transform)
        with fl.DataLoader(data, batch_size=5, seed=0, on_error="skip") as loader:
            labels = torch.cat([labels for _, labels in loader])
            assert loader.stats().skipped == 2
        assert labels.tolist() == [0, 0, 0, 0, 1, 2, 2, 2]
