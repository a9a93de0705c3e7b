"""Files of one sample each in a store: what is special to lists, manifests and folders of images."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from writers.values import jpeg

import feedline as fl
from feedline.core.dataset import BatchRead
from feedline.core.tensors import allocate_tensor
from feedline.datasets import ImageFolder, array_container
from feedline.errors import SampleError
from feedline.stores import ObjectChangedError, ObjectNotFoundError, ObjectRange
from formats.files import COUNT, CROP, FORMATS, manifest, write_images, write_texts
from formats.places import Memory, small_pieces


class TestFiles:
    def test_a_manifest_of_missing_objects(self, memory: Memory, folder: Path) -> None:
        write_texts(folder)
        far = manifest(memory.put(folder))
        memory.remove("03.txt")
        gone = r"'03.txt' of row 3 \(id = 3\) of the query .* does not exist: it was moved or deleted"
        for fetch in (far.__getitem__, lambda at: far.__getitems__([0, at])):
            with pytest.raises(ObjectNotFoundError, match=gone):
                fetch(3)
        with fl.DataLoader(far, 10, on_error="skip") as loader:
            assert sum(len(batch["id"]) for batch in loader) == COUNT - 1

    def test_a_missing_or_damaged_object(self, memory: Memory, folder: Path) -> None:
        write_images(folder)
        far = FORMATS["images"].open(memory.put(folder))
        names = list(far.paths)
        memory.remove(names[1].removeprefix("far/"))
        memory.write(names[2].removeprefix("far/"), b"no image")
        for fetch in (
            lambda at: far[at],
            lambda at: far.read_batch(BatchRead(np.array([0, at]), allocate_tensor, None)),
        ):
            with pytest.raises(ObjectNotFoundError, match=rf"memory://{names[1]} does not exist: it was moved or dele"):
                fetch(1)
            with pytest.raises(SampleError, match=rf"memory://{names[2]}"):
                fetch(2)

    def test_paths_do_not_lead_out(self, memory: Memory, folder: Path) -> None:
        write_texts(folder)
        data = manifest(memory.put(folder))
        data._columns["path"] = manifest(memory.root)._columns["path"]
        with pytest.raises(SampleError, match=r"'../x' is not a path within a store"):
            data._files("../x", None, lambda: "x")


class TestImageFolder:
    def test_order_and_classes_are_those_of_this_machine(self, memory: Memory, folder: Path) -> None:
        for name in ("b/2.jpg", "b/10.JPG", "a/x/1.png", "a/x-y/1.png", "a/x.y/0.png", "a/z.jpeg", "a/n.txt", "0.jpg"):
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(1, (24, 18)))
        near, far = ImageFolder(folder), ImageFolder(memory.put(folder))
        assert (far.classes, far.class_to_idx, far.targets) == (near.classes, near.class_to_idx, near.targets)
        assert far.samples == [(path.replace(str(folder), "memory://far"), label) for path, label in near.samples]
        assert far.find_classes(far.root) == near.find_classes(near.root)
        raw = ImageFolder(memory.root, is_valid_file=lambda path: path.startswith("memory://far/a/x"), allow_empty=True)
        assert [path for path, _ in raw.samples] == [path for path, _ in far.samples if "/a/x" in path]
        assert pickle.loads(pickle.dumps(far))[0][0].size == (24, 18)

    def test_a_subclass_finds_other_classes(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        class Two(ImageFolder):
            def find_classes(self, _: Any) -> tuple[list[str], dict[str, int]]:
                return ["odd", "even"], {"class 2": 5, "class 0": 5, "nowhere": 1}

        write_images(folder)
        near = Two(folder, allow_empty=True)
        far = Two(memory.put(folder), CROP, allow_empty=True, cache=small_pieces(tmp_path, 4 << 20))
        assert [path.removeprefix("memory://far") for path, _ in far.samples] == [
            path.removeprefix(str(folder)) for path, _ in near.samples
        ]
        assert far.__getitems__([-1])[0][1] == 5

    def test_a_kept_listing_spares_the_next(
        self, memory: Memory, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_images(folder)
        kept, root = tmp_path / "listing", memory.put(folder)
        first = ImageFolder(root, CROP, index_dir=kept, cache=small_pieces(tmp_path, 4 << 20))
        monkeypatch.setattr(MemoryFileSystem, "find", lambda *_, **__: pytest.fail("listed again"))
        again = ImageFolder(root, CROP, index_dir=kept, cache=small_pieces(tmp_path, 4 << 20))
        assert list(again.samples) == list(first.samples)
        assert again.classes == first.classes
        assert (
            [want for _, want in again.ranges(np.array([3]))] == [want for _, want in first.ranges(np.array([3]))] != []
        )
        monkeypatch.undo()
        assert len(ImageFolder(root, index_dir=kept, extensions=(".png",), allow_empty=True)) == 0
        ImageFolder(folder, index_dir=tmp_path / "local")
        (local,), (remote,) = (tmp_path / "local").iterdir(), kept.iterdir()
        shutil.copyfile(local, remote)  # of another root
        assert list(ImageFolder(root, index_dir=kept).samples) == list(first.samples)
        array_container.write(str(remote), {}, {"x": np.zeros(3, np.uint8)})
        expected = rf"{remote.name} is not the listing of an ImageFolder: give another index_dir="
        with pytest.raises(SampleError, match=expected):
            ImageFolder(root, index_dir=kept)

    def test_a_kept_listing_knows_which_classes_it_has(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        class Last(ImageFolder):
            def find_classes(self, directory: Any) -> tuple[list[str], dict[str, int]]:
                name = super().find_classes(directory)[0][-1]
                return [name], {name: 0}

        write_images(folder)
        root = memory.put(folder)
        for _ in range(2):
            assert len(Last(root, index_dir=tmp_path)) == len(ImageFolder(root, index_dir=tmp_path)) / 3 == 8

    def test_a_loader_of_ones_own_gets_a_file(self, memory: Memory, folder: Path) -> None:
        write_images(folder)
        data = ImageFolder(memory.put(folder), loader=lambda file: file.read(2))
        assert data[0] == (b"\xff\xd8", 0)

    def test_samples_can_be_assigned_below_the_root(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        write_images(folder)
        data = ImageFolder(memory.put(folder), CROP, cache=small_pieces(tmp_path, 4 << 20))
        names = [part.path for _, part in data.ranges(np.array([7, 8]))]
        data.samples = [*data.samples[7:9], ("memory://elsewhere/x.jpg", 3)]
        assert data[1][1] == data.samples[1][1]
        assert [part for _, part in data.ranges(np.array([0, 1]))] == [ObjectRange(name) for name in names]
        with pytest.raises(SampleError, match=r"memory://elsewhere/x.jpg is outside memory://far"):
            data[2]

    def test_missing_changed_and_invalid_images(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        write_images(folder)
        root = memory.put(folder)
        fused, plain = ImageFolder(root, CROP), ImageFolder(root)
        known = ImageFolder(root, CROP, cache=small_pieces(tmp_path, 4 << 20))
        names = [path.removeprefix("memory://far/") for path, _ in plain.samples[:3]]
        memory.remove(names[1])
        memory.write(names[2], b"no image")
        batches = [
            lambda at: fused.read_batch(BatchRead(np.array([0, at]), allocate_tensor, None)),
            fused.__getitem__,
            plain.__getitem__,
        ]
        for fetch in (*batches, lambda at: plain.__getitems__([0, at])):
            with pytest.raises(
                ObjectNotFoundError, match=rf"{names[1]} \(sample 1 of the ImageFolder memory://far\) does not exist"
            ):
                fetch(1)
            with pytest.raises(SampleError) as raised:
                fetch(2)
            assert f"{names[2]} (sample 2 of the ImageFolder memory://far)" in raised.value.__notes__[0]
        with pytest.raises(ObjectChangedError, match=f"{names[2]} has changed"):
            known[2]
        with fl.DataLoader(fused, 10, on_error="skip") as loader:
            assert sum(len(labels) for _, labels in loader) == COUNT - 2

    def test_no_images(self, memory: Memory, folder: Path) -> None:
        memory.write("loose.jpg", jpeg(1))
        with pytest.raises(FileNotFoundError, match=r"memory://far has no class folders: images must be in root/class"):
            ImageFolder(memory.root)
        memory.write("c/readme.txt", b"")
        with pytest.raises(FileNotFoundError, match=r"no file that ends with .* in the class folder c of memory://far"):
            ImageFolder(memory.root)
