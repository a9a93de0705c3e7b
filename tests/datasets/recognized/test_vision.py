"""Known datasets of torchvision: batches, draws and errors are those of torch's loader."""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from image_cases import photo
from PIL import Image, ImageFile
from torch.utils.data import ConcatDataset, Subset, random_split
from vision_cases import MEAN, PIPELINES, STD, assert_same, cifar, datasets, folder, mnist, seeded, states, v1, v2

import feedline as fl
from feedline.core.kernels import SlowKernelsWarning
from feedline.transforms.recognized.steps import resizes_tensors_of_levels


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder(tmp_path_factory.mktemp("images"))


def epoch(loader_class: Any, dataset: Any, seed: int = 0, **arguments: Any) -> tuple[list[Any], list[Any]]:
    """All batches, and the next numbers of the generators."""
    seeded(seed)
    batches = list(loader_class(dataset, **{"batch_size": 7, "shuffle": True, **arguments}))
    return batches, states()


def compare(dataset: Any, *, seeds: int = 1, **arguments: Any) -> None:
    """Batches and generators after an epoch equal those of torch's loader."""
    for seed in range(seeds):
        ours = epoch(fl.DataLoader, dataset, seed, **arguments)
        assert_same(ours, epoch(torch.utils.data.DataLoader, dataset, seed, **arguments))


def is_read(dataset: Any, **arguments: Any) -> bool:
    accelerated: bool = fl.DataLoader(dataset, **arguments).plan().accelerated
    return accelerated


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_batches_of_a_folder_are_torchs(root: Path, pipeline: str) -> None:
    dataset = datasets.ImageFolder(root, PIPELINES[pipeline]())
    compare(dataset, seeds=2 if pipeline == "train" else 1)
    assert is_read(dataset)


@pytest.mark.skipif(not resizes_tensors_of_levels(), reason="torch resizes uint8 as floats on this CPU")
@pytest.mark.parametrize("pipeline", ["v2 on tensors", "v2 on tensors, documented", "v2 on tensors, validate"])
def test_pipelines_on_tensors_are_executed_by_the_kernels(
    root: Path, pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, calls = sys.modules["torchvision.transforms.v2.functional._geometry"], []
    resize = module.interpolate

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(options)
        return resize(*arguments, **options)

    monkeypatch.setattr(module, "interpolate", counted)
    dataset = datasets.ImageFolder(root, PIPELINES[pipeline]())
    for collate_fn in (None, list):
        calls.clear()
        assert len(list(fl.DataLoader(dataset, batch_size=6, collate_fn=collate_fn))) == 4
        assert len(calls) == 1  # the first sample is compared


@pytest.mark.parametrize(
    ("pipeline", "workers"),
    [
        *(("train", 2), ("own step", 1)),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in [("train", 1), ("v2 levels", 2), ("colors", 2)]),
    ],
)
def test_batches_of_worker_processes_are_torchs(root: Path, pipeline: str, workers: int) -> None:
    dataset = datasets.ImageFolder(root, PIPELINES[pipeline]())
    compare(dataset, num_workers=workers)


@pytest.mark.parametrize(
    "pipeline", ["train", "random crop", "colors", "v2 train", "v2 colors", "v2 on tensors", "reflected"]
)
def test_batches_of_arrays_are_torchs(pipeline: str) -> None:
    dataset = cifar(PIPELINES[pipeline]())
    compare(dataset)
    assert is_read(dataset)


@pytest.mark.parametrize(
    "make",
    [
        lambda: v1.Compose([v1.ToTensor(), v1.Normalize((0.1307,), (0.3081,))]),
        lambda: v1.Compose([v1.RandomCrop(28, padding=4), v1.RandomHorizontalFlip(), v1.PILToTensor()]),
        lambda: v1.Compose([v1.Resize(32), v1.ColorJitter(0.3, 0.3, 0.3, 0.1), v1.RandomGrayscale(), v1.ToTensor()]),
        lambda: v1.Compose([v1.Grayscale(3), v1.RandomResizedCrop(20), v1.ToTensor(), v1.Normalize(MEAN, STD)]),
        lambda: v2.Compose([v2.RandomRotation(10), v2.RandomResizedCrop(20), v2.ToImage()]),
        lambda: v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.13], [0.3])]),
        lambda: v2.Compose([v2.ToImage(), v2.RandomResizedCrop(20), v2.ToDtype(torch.float32, scale=True)]),
    ],
)
def test_batches_of_gray_arrays_are_torchs(make: Any) -> None:
    dataset = mnist(make())
    compare(dataset)
    compare(dataset, collate_fn=list)
    assert is_read(dataset)


def test_samples_for_the_users_own_collate_function_are_torchs(root: Path) -> None:
    def collate(samples: list[Any]) -> Any:
        return [image for image, _ in samples], sum(target for _, target in samples)

    for pipeline in ("train", "v2 train", "v2 levels", "v2 on tensors", "v2 on tensors, validate"):
        compare(datasets.ImageFolder(root, PIPELINES[pipeline]()), collate_fn=collate)


def test_images_that_stay_pillows_keep_what_their_file_says(root: Path) -> None:
    dataset = datasets.ImageFolder(root, v1.RandomResizedCrop(20))
    ours = epoch(fl.DataLoader, dataset, collate_fn=list)[0]
    theirs = epoch(torch.utils.data.DataLoader, dataset, collate_fn=list)[0]
    for mine, other in zip(chain(*ours), chain(*theirs), strict=True):
        assert mine[0] == other[0]
        assert mine[0].getexif() == other[0].getexif()


def test_a_first_image_of_one_pixel_leaves_the_kernels_on(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    Image.new("RGB", (1, 1), "red").save(tmp_path / "a" / "0.png")
    Image.new("RGB", (20, 10), "blue").save(tmp_path / "a" / "1.png")
    compare(datasets.ImageFolder(tmp_path, v1.ToTensor()), batch_size=1, shuffle=False)


def test_unbatched_samples_are_torchs(root: Path) -> None:
    compare(datasets.ImageFolder(root, PIPELINES["train"]()), batch_size=None)


def test_wrappers_of_torch_are_looked_through(root: Path) -> None:
    first, second = (datasets.ImageFolder(root, PIPELINES[name]()) for name in ("train", "v2 train"))
    parts = random_split(first, [10, 14], torch.Generator().manual_seed(0))
    both = ConcatDataset([parts[0], Subset(parts[1], [5, 3, 3]), second, [(torch.zeros(3, 48, 48), 1)]])
    compare(both)
    assert is_read(both)


def test_target_transforms_run_after_each_image(root: Path) -> None:
    def noisy(target: int) -> float:
        return target + torch.rand(1).item()

    compare(datasets.ImageFolder(root, PIPELINES["train"](), target_transform=noisy))


def test_images_that_kernels_refuse_are_read_by_the_dataset_with_its_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    folder(tmp_path, 24)
    for path in sorted(tmp_path.rglob("*.jpg"))[::2]:
        content = path.read_bytes()
        path.write_bytes(content[: len(content) * 3 // 4])
    compare(datasets.ImageFolder(tmp_path, PIPELINES["colors"]()))


@st.composite
def damages(draw: st.DrawFn) -> list[str]:
    """The change of each of nine JPEGs; most stay unchanged."""
    kinds = st.sampled_from(["", "", "", "cut", "no end", "missing", "text", "CMYK", "gray"])
    return draw(st.lists(kinds, min_size=9, max_size=9))


def damaged(root: Path, kinds: list[str]) -> Path:
    for number, kind in enumerate(kinds):
        path = root / "one" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        modes = {"CMYK": "CMYK", "gray": "L"}
        photo(60 + 9 * number, 75, number).convert(modes.get(kind, "RGB")).save(path, quality=80)
        content = path.read_bytes()
        path.write_bytes(
            {"cut": content[: len(content) * 3 // 4], "no end": content[:-2], "text": b"no"}.get(kind, content)
        )
    return root


@settings(max_examples=25)
@given(kinds=damages(), pipeline=st.sampled_from(["train", "levels", "v2 levels", "validate"]), tolerant=st.booleans())
def test_a_refusal_anywhere_in_a_batch_changes_neither_draws_nor_errors(
    kinds: list[str], pipeline: str, tolerant: bool
) -> None:
    results = []
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patched:
        patched.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", tolerant)
        dataset = datasets.ImageFolder(damaged(Path(name), kinds), PIPELINES[pipeline]())
        for number in (at for at, kind in enumerate(kinds) if kind == "missing"):
            Path(dataset.samples[number][0]).unlink()
        for loader_class in (fl.DataLoader, torch.utils.data.DataLoader):
            seeded(3)
            batches = []
            try:
                batches += loader_class(dataset, batch_size=5)
                error: tuple[Any, ...] = ()
            except Exception as caught:  # noqa: BLE001 - compared below
                error = type(caught), str(caught)
            results.append((batches, error, states()))
    assert_same(results[0], results[1])


def test_an_error_after_rows_that_wait_names_its_sample(tmp_path: Path) -> None:
    kinds = ["", "", "cut", "", "", "text", "", "", ""]
    dataset = datasets.ImageFolder(damaged(tmp_path, kinds), PIPELINES["train"]())
    with pytest.raises(OSError, match=r"(?i)truncated") as caught:
        list(fl.DataLoader(dataset, batch_size=9))
    assert "sample 2 of ImageFolder" in caught.value.__notes__[0]


def test_reads_that_the_system_cuts_short_are_completed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, nbytes: read(descriptor, min(nbytes, 700)))
    compare(datasets.ImageFolder(root, PIPELINES["levels"]()), shuffle=False)


@pytest.mark.parametrize("damage", ["truncated", "missing", "empty", "text"])
def test_errors_are_torchs(tmp_path: Path, damage: str) -> None:
    folder(tmp_path, 6)
    dataset = datasets.ImageFolder(tmp_path, PIPELINES["train"]())
    path = Path(dataset.samples[2][0])
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"truncated": content[: len(content) // 2], "empty": b"", "text": b"no image"}[damage])
    errors = []
    for loader_class in (fl.DataLoader, torch.utils.data.DataLoader):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - compared below
            epoch(loader_class, dataset, shuffle=False)
        errors.append((type(caught.value), str(caught.value)))
    assert errors[0] == errors[1]


def test_a_crop_that_does_not_fit_raises_torchvisions_error(root: Path) -> None:
    for crop in (v1.RandomCrop(200), v2.RandomCrop(200)):
        dataset = datasets.ImageFolder(root, v1.Compose([crop, v1.ToTensor()]))
        with pytest.raises(ValueError, match="larger than"):
            epoch(fl.DataLoader, dataset)


def test_images_of_different_sizes_raise_torchs_error(root: Path) -> None:
    dataset = datasets.ImageFolder(root, v1.Compose([v1.Resize(20), v1.ToTensor()]))
    with pytest.raises(RuntimeError, match="equal size"):
        epoch(fl.DataLoader, dataset)


def test_bad_images_can_be_skipped(tmp_path: Path) -> None:
    folder(tmp_path, 12)
    dataset = datasets.ImageFolder(tmp_path, PIPELINES["train"]())
    Path(dataset.samples[3][0]).write_bytes(b"no image")
    loader = fl.DataLoader(dataset, batch_size=4, on_error="skip")
    assert sum(len(images) for images, _ in loader) == 11
    assert loader.stats().skipped == 1


class TestSeeded:
    def test_every_worker_kind_gives_the_same_as_the_datasets_own_code(self, root: Path) -> None:
        dataset = datasets.ImageFolder(root, PIPELINES["own step"]())
        expected = epoch(fl.DataLoader, dataset, seed=1, accelerate=False, num_workers=0)[0]

        def batches(**arguments: Any) -> list[Any]:
            return list(fl.DataLoader(dataset, batch_size=7, shuffle=True, seed=1, **arguments))

        expected = batches(accelerate=False)
        for arguments in ({}, {"num_workers": 2}, {"collate_fn": torch.utils.data.default_collate}):
            assert_same(batches(**arguments), expected)

    def test_a_resumed_epoch_continues_with_the_same_images(self, root: Path) -> None:
        dataset = datasets.ImageFolder(root, PIPELINES["train"]())
        whole = list(fl.DataLoader(dataset, batch_size=7, shuffle=True, seed=3))
        loader = fl.DataLoader(dataset, batch_size=7, shuffle=True, seed=3)
        iterator = iter(loader)
        begun = [next(iterator) for _ in range(3)]
        resumed = fl.DataLoader(dataset, batch_size=7, shuffle=True, seed=3, num_workers=1)
        resumed.load_state_dict(loader.state_dict())
        assert_same(begun + list(resumed), whole)


class TestLeftAlone:
    """Classes with the user's own code are left to their library."""

    def test_a_subclass(self, root: Path) -> None:
        class Mine(datasets.ImageFolder):  # type: ignore[misc]
            def __getitem__(self, index: int) -> Any:
                return super().__getitem__(index)[1]

        dataset = Mine(root, PIPELINES["train"]())
        assert not is_read(dataset)
        compare(dataset)
        assert "subclass of ImageFolder" in str(fl.DataLoader(dataset).plan())

    def test_a_loader_of_the_users_own(self, root: Path) -> None:
        dataset = datasets.ImageFolder(root, PIPELINES["train"](), loader=lambda path: Image.new("RGB", (60, 60)))
        assert not is_read(dataset)
        compare(dataset)

    def test_a_patched_method(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset = datasets.ImageFolder(root, PIPELINES["train"]())
        monkeypatch.setattr(datasets.DatasetFolder, "__getitem__", lambda self, index: index)
        assert not is_read(dataset)
        assert "DatasetFolder.__getitem__ was replaced" in str(fl.DataLoader(dataset).plan())
        compare(dataset)

    def test_a_patched_transform(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(v1.RandomHorizontalFlip, "forward", lambda self, image: image)
        dataset = datasets.ImageFolder(root, PIPELINES["train"]())
        compare(dataset)
        assert "RandomHorizontalFlip.forward was replaced" in str(fl.DataLoader(dataset).plan())

    def test_a_patched_function(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(v1.functional, "hflip", lambda image: image)
        dataset = datasets.ImageFolder(root, PIPELINES["train"]())
        compare(dataset)
        assert "hflip was replaced" in str(fl.DataLoader(dataset).plan())

    def test_a_method_of_the_object(self, root: Path) -> None:
        transform = PIPELINES["train"]()
        transform.transforms[1].forward = lambda image: image
        compare(datasets.ImageFolder(root, transform))

    def test_a_hook(self, root: Path) -> None:
        transform = PIPELINES["train"]()
        calls: list[int] = []
        transform.transforms[1].register_forward_hook(lambda *_: calls.append(1))
        dataset = datasets.ImageFolder(root, transform)
        epoch(fl.DataLoader, dataset)
        assert len(calls) == len(dataset)

    def test_a_dataset_without_known_transforms(self, root: Path) -> None:
        assert not is_read(datasets.ImageFolder(root, lambda image: np.asarray(image).mean()))

    def test_everything_on_request(self, root: Path) -> None:
        dataset = datasets.ImageFolder(root, PIPELINES["train"]())
        assert not is_read(dataset, accelerate=False)
        compare(dataset)


class TestChanges:
    """Changes between batches have the same effect as in torch's loader."""

    def test_of_a_transforms_parameters(self, root: Path) -> None:
        def run(loader_class: Any) -> list[Any]:
            dataset = datasets.ImageFolder(root, PIPELINES["train"]())
            seeded(0)
            batches = []
            for number, batch in enumerate(loader_class(dataset, batch_size=8)):
                batches.append(batch)
                if number == 1:
                    dataset.transform.transforms[1].p = 1.0
                if number == 2:
                    dataset.transform.transforms[3].mean = [0.1, 0.2, 0.3]
                if number == 3:
                    dataset.transform.transforms.pop(1)
                if number == 4:
                    dataset.transform = PIPELINES["v2 train"]()
            return batches

        assert_same(run(fl.DataLoader), run(torch.utils.data.DataLoader))

    def test_of_steps_in_sequences(self, root: Path) -> None:
        def run(loader_class: Any) -> list[Any]:
            inner = v1.Compose([v1.Resize(60), v1.RandomCrop(50)])
            steps = torch.nn.Sequential(v1.RandomHorizontalFlip(0.5))
            outer = v1.Compose([inner, steps, v1.CenterCrop(40), v1.ToTensor()])
            dataset = datasets.ImageFolder(root, outer)
            seeded(0)
            batches = []
            for number, batch in enumerate(loader_class(dataset, batch_size=8)):
                batches.append(batch)
                if number == 1:
                    inner.transforms[1] = v1.CenterCrop(45)
                if number == 2:
                    steps[0] = v1.RandomVerticalFlip(1.0)
                if number == 3:
                    outer.transforms[2].register_forward_hook(lambda *_: Image.new("RGB", (40, 40)))
            return batches

        assert_same(run(fl.DataLoader), run(torch.utils.data.DataLoader))

    def test_of_lists_of_modules_and_numbers_in_place(self, root: Path) -> None:
        def run(loader_class: Any) -> list[Any]:
            mean, std, flips = torch.zeros(3), np.ones(3), torch.nn.ModuleList([v1.RandomHorizontalFlip(0.0)])
            steps = [v1.Resize((20, 20)), v1.RandomApply(flips, 1.0), v1.ToTensor(), v1.Normalize(mean, std)]
            dataset = datasets.ImageFolder(root, v1.Compose(steps))
            batches = []
            for number, batch in enumerate(loader_class(dataset, batch_size=8)):
                batches.append(batch)
                if number == 0:
                    mean += 1
                if number == 1:
                    std *= 2
                if number == 2:
                    flips[0] = v1.RandomVerticalFlip(1.0)
            return batches

        assert_same(run(fl.DataLoader), run(torch.utils.data.DataLoader))

    def test_of_the_function_that_opens_images(self, root: Path) -> None:
        def run(loader_class: Any) -> list[Any]:
            dataset = datasets.ImageFolder(root, v1.Compose([v1.Resize((20, 20)), v1.ToTensor()]))
            own, batches = dataset.loader, []
            for number, batch in enumerate(loader_class(dataset, batch_size=8)):
                batches.append(batch)
                dataset.loader = own if number == 1 else lambda path: Image.new("RGB", (60, 60), "red")
            return batches

        assert_same(run(fl.DataLoader), run(torch.utils.data.DataLoader))

    def test_of_the_default_dtype(self, root: Path) -> None:
        dataset = datasets.ImageFolder(root, PIPELINES["train"]())
        loader = fl.DataLoader(dataset, batch_size=8)
        iterator = iter(loader)
        assert next(iterator)[0].dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert next(iterator)[0].dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)


def test_results_that_differ_turn_the_kernels_off(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from feedline.transforms.recognized.frame import Frame

    monkeypatch.setattr(Frame, "flip_horizontally", Frame.flip_vertically)
    dataset = datasets.ImageFolder(root, v1.Compose([v1.Resize((20, 20)), v1.RandomHorizontalFlip(1.0), v1.ToTensor()]))
    with pytest.warns(SlowKernelsWarning, match="differ from the library's own"):
        ours = epoch(fl.DataLoader, dataset)
    assert_same(ours, epoch(torch.utils.data.DataLoader, dataset))


def test_warnings_of_pillow_still_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path, 3)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300)
    dataset = datasets.ImageFolder(tmp_path, PIPELINES["train"]())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        with pytest.raises(Image.DecompressionBombError):
            epoch(fl.DataLoader, dataset)
