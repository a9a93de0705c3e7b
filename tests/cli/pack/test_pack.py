"""`feedline pack`: packed data equals its sources, bytes are reproducible, and a stopped run continues."""

from __future__ import annotations

import errno
import gc
import gzip
import io
import json
import os
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset
from image_cases import encoded, photo
from packing_cases import class_folders, contents, feedline, members, packed
from PIL import Image
from tar_cases import write_tar

from feedline.cli import pack
from feedline.cli.pack import PackOptions, ShardSize
from feedline.cli.pack.run import list_samples, lock_folder
from feedline.core import kernels
from feedline.datasets.sample_lists import Sample, SampleList
from feedline.datasets.webdataset import open_index
from feedline.errors import ArgumentError, SampleError, StateError


@pytest.fixture
def images(tmp_path: Path) -> Path:
    return class_folders(tmp_path / "images")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def expected(images: Path) -> dict[str, bytes]:
    """The members of a folder of classes, with torchvision's labels."""
    found = {}
    for label, folder in enumerate(sorted(images.iterdir())):
        for file in folder.iterdir():
            found[f"{folder.name}/{file.stem}.jpg"] = file.read_bytes()
            found[f"{folder.name}/{file.stem}.cls"] = str(label).encode()
    return found


def test_every_file_of_a_folder_of_classes_is_there_with_its_label(images: Path, out: Path) -> None:
    reported = packed(images, out, "--shard-size", 5)
    assert [shard["samples"] for shard in reported["shards"]] == [5, 5, 2]
    assert members(out) == expected(images)
    assert json.loads((out / "classes.json").read_text()) == ["cat", "dog"]


@pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
def test_webdataset_reads_what_was_packed(images: Path, out: Path) -> None:
    packed(images, out, "--shard-size", 5, "--grid")
    urls = [str(shard) for shard in sorted(out.glob("*.tar"))]
    pipeline = webdataset.WebDataset(urls, shardshuffle=False).decode("pil").to_tuple("__key__", "jpg", "cls")
    labels = Counter()
    for key, image, label in pipeline:
        with Image.open(images / f"{key}.jpg") as original:
            assert np.array_equal(np.asarray(image), np.asarray(original))
        assert label == ["cat", "dog"].index(key.partition("/")[0])
        labels[label] += 1
    assert labels == {0: 6, 1: 6}
    del pipeline
    gc.collect()  # webdataset leaves its files to the collector, which warns: in this test, not in a later one


@pytest.mark.parametrize("options", [(), ("--grid",), ("--quality", 80, "--grid"), ("--decoded", "--shorter-side", 64)])
def test_the_bytes_do_not_depend_on_the_number_of_workers(images: Path, tmp_path: Path, options: Any) -> None:
    for workers in (1, 3):
        packed(images, tmp_path / str(workers), "--shard-size", "128KiB", "--workers", workers, *options)
    assert contents(tmp_path / "1") == contents(tmp_path / "3")


def test_members_have_neither_owner_nor_time(images: Path, out: Path) -> None:
    packed(images, out)
    with tarfile.open(out / "shard-000000.tar") as tar:
        assert {(m.uid, m.gid, m.uname, m.gname, m.mode, m.mtime) for m in tar} == {(0, 0, "", "", 0o644, 946_684_800)}


def test_classes_are_shuffled_and_files_only_on_request(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "a")
    keys = list(open_index(tmp_path / "a" / "shard-000000.tar").keys)
    assert keys != sorted(keys)
    packed(images, tmp_path / "b", "--seed", 1)
    assert list(open_index(tmp_path / "b" / "shard-000000.tar").keys) != keys
    packed(images, tmp_path / "c", "--no-shuffle")
    assert list(open_index(tmp_path / "c" / "shard-000000.tar").keys) == sorted(keys)
    packed(images / "cat", tmp_path / "d")
    assert list(open_index(tmp_path / "d" / "shard-000000.tar").keys) == [f"{i:03}" for i in range(6)]


def test_shards_stay_below_the_size_in_bytes(images: Path, out: Path) -> None:
    reported = packed(images, out, "--shard-size", "64KiB")
    assert len(reported["shards"]) > 2
    for shard in reported["shards"]:
        assert shard["nbytes"] == (out / shard["name"]).stat().st_size
        assert shard["nbytes"] <= 64 * 1024 or shard["samples"] == 1


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("256MB", ShardSize(nbytes=256_000_000)),
        ("1.5 GiB", ShardSize(nbytes=3 << 29)),
        ("100000b", ShardSize(nbytes=100_000)),
        ("10000", ShardSize(samples=10_000)),
    ],
)
def test_sizes_are_read(text: str, size: ShardSize) -> None:
    assert ShardSize.parse(text) == size


@pytest.mark.parametrize("text", ["", "0", "many", "1kb", "-5", "5 TBs", "1.5"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="--shard-size"):
        ShardSize.parse(text)


def test_files_that_belong_to_an_image_come_with_it_and_others_are_named(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    for name, data in {
        "a.b.JPEG": encoded(photo(60, 50)),
        "a.b.json": b'{"label": 3}',
        "c.png": encoded(photo(60, 50), "PNG"),
        "c.txt": b"caption",
        "c.cls": b"7",
        "alone.txt": b"no image",
        "notes.md": b"",
        ".hidden.jpg": b"",
    }.items():
        (folder / name).write_bytes(data)
    reported = packed(folder, out)
    assert list(members(out)) == ["a_b.jpg", "a_b.json", "c.png", "c.txt", "c.cls"]
    assert sum("left out" in note for note in reported["notes"]) == 3
    assert any(".md" in note for note in reported["notes"])
    assert not (out / "classes.json").exists()


def test_existing_shards_are_packed_again_with_all_their_fields(images: Path, tmp_path: Path, out: Path) -> None:
    first = tmp_path / "first"
    packed(images, first, "--shard-size", 4)
    reported = packed(first, out, "--shard-size", 7, "--grid")
    assert [shard["samples"] for shard in reported["shards"]] == [7, 5]
    assert set(members(out)) == set(expected(images))
    assert (out / "classes.json").read_bytes() == (first / "classes.json").read_bytes()
    one_by_one = packed(*sorted(first.glob("*.tar")), tmp_path / "again", "--shard-size", 7, "--grid")
    assert one_by_one["shards"] == reported["shards"]


def test_keys_that_come_again_get_a_number(tmp_path: Path, out: Path) -> None:
    tars = [write_tar(tmp_path / f"{i}.tar", {"0.txt": b"%d" % i, "0-2.txt": b"x"}) for i in range(3)]
    reported = packed(*tars, out)
    found = members(out)
    assert len(found) == 6
    assert [found[f"{key}.txt"] for key in ("0", "0-3", "0-4")] == [b"0", b"1", b"2"]
    assert "renamed: 4 samples" in reported["notes"][0]


def test_unique_keys_stay_as_they_are() -> None:
    samples = [Sample(key, None, ()) for key in ("a", "b", "a-2", "a", "a")]
    assert [s.key for s in SampleList(samples).with_unique_keys().samples] == ["a", "b", "a-2", "a-3", "a-4"]


def test_names_that_no_ustar_header_holds_survive(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "files" / ("long" * 50) / ("Blüte" * 20)
    folder.mkdir(parents=True)
    (folder / "日本.png").write_bytes(encoded(photo(40, 30), "PNG"))
    packed(tmp_path / "files", out)
    key = f"{'long' * 50}/{'Blüte' * 20}/日本"
    assert set(members(out)) == {f"{key}.png", f"{key}.cls"}
    assert list(open_index(out / "shard-000000.tar").keys) == [key]


def test_the_index_is_there_with_grids_and_a_checksum(images: Path, out: Path) -> None:
    packed(images, out, "--grid")
    index = open_index(out / "shard-000000.tar", out / "shard-000000.tar.index")
    index.verify()
    column = index.column("jpg")
    assert column is not None
    assert all(index.grid(row, column) is not None for row in range(len(index)))


def test_a_finished_folder_is_checked_and_left_alone(images: Path, out: Path) -> None:
    packed(images, out, "--shard-size", 5)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name != "manifest.json"}
    reported = packed(images, out, "--shard-size", 5)
    assert reported["kept_shards"] == 3
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir() if path.name in before} == before


@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "index"])
def test_what_was_damaged_since_is_made_again(images: Path, out: Path, damage: str) -> None:
    packed(images, out, "--shard-size", 3, "--grid")
    whole = contents(out)
    shard = out / "shard-000002.tar"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[5000] ^= 1
        shard.write_bytes(data)
    elif damage == "cut":
        os.truncate(shard, 4096)
    elif damage == "remove":
        shard.unlink()
    else:
        (out / "shard-000002.tar.index").unlink()
    reported = packed(images, out, "--shard-size", 3, "--grid")
    assert reported["kept_shards"] == (4 if damage == "index" else 2)
    assert contents(out) == whole
    index = open_index(shard, out / "shard-000002.tar.index")
    assert index.has_grids
    index.verify()


def test_what_an_interrupted_run_leaves_is_cleared(images: Path, out: Path) -> None:
    packed(images, out, "--shard-size", 3)
    whole = contents(out)
    manifest = pack.Manifest.load(out)
    assert manifest is not None
    manifest.truncate(1).save(out)
    (out / f"shard-000001.tar.partial-{12 * '7'}").write_bytes(b"half")
    (out / "shard-000007.tar").write_bytes(b"of a run that came further")
    (out / f"shard-000001.tar.index.partial-{12 * '7'}").write_bytes(b"half")
    assert packed(images, out, "--shard-size", 3)["kept_shards"] == 1
    assert contents(out) == whole


def test_other_options_are_named(images: Path, out: Path) -> None:
    packed(images, out, "--shorter-side", 100)
    with pytest.raises(StateError, match=r"shorter_side was 100 and is 90; .*quality was None and is 80"):
        feedline("pack", images, out, "--shorter-side", 90, "--quality", 80)


def test_other_sources_are_refused(images: Path, out: Path) -> None:
    packed(images, out)
    (images / "cat" / "000.jpg").unlink()
    with pytest.raises(StateError, match="started from other files: 12 samples then, 11 now"):
        feedline("pack", images, out)


def test_a_folder_with_other_things_in_it_is_refused(images: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(ArgumentError, match=r"contains thesis\.tex"):
        feedline("pack", images, out)
    assert (out / "thesis.tex").exists()


def test_a_manifest_that_cannot_be_read_is_named(images: Path, out: Path) -> None:
    packed(images, out)
    (out / "manifest.json").write_text("{")
    with pytest.raises(StateError, match=r"manifest\.json cannot be read"):
        feedline("pack", images, out)


def test_the_folder_of_the_sources_is_no_place_for_shards(images: Path) -> None:
    for inside in (images, images / "shards"):
        with pytest.raises(ArgumentError, match=r"is inside the source .*; choose a folder elsewhere"):
            feedline("pack", images, inside)


def test_two_runs_at_once_are_refused(images: Path, out: Path) -> None:
    with lock_folder(out), pytest.raises(ArgumentError, match="another feedline pack is writing into"):
        feedline("pack", images, out)
    packed(images, out)


BROKEN = {
    "nothing.jpg": b"",
    "text.jpg": b"not an image at all",
    "short.png": encoded(photo(40, 30), "PNG")[:20],
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_bad_file_is_named_with_what_to_do(images: Path, out: Path, name: str) -> None:
    bad = images / "cat" / name
    bad.write_bytes(BROKEN[name])
    with pytest.raises(SampleError) as error:
        feedline("pack", images, out)
    assert str(error.value).startswith(f"{bad} could not be packed: ")
    assert str(error.value).endswith("Replace or remove it, or pass --on-error skip to leave it out.")
    assert "on_error=" not in str(error.value)
    assert not list(out.glob("*.tar"))
    assert not list(out.glob("*.partial-*"))


def test_bad_files_are_left_out_and_listed(images: Path, out: Path) -> None:
    whole = expected(images)
    for name, data in BROKEN.items():
        (images / "dog" / name).write_bytes(data)
    result = feedline("pack", images, out, "--on-error", "skip", "--shard-size", 4)
    assert result.exit_code == 0
    assert "3 samples were left out" in result.output
    assert members(out) == whole
    reported = packed(images, out, "--on-error", "skip", "--shard-size", 4)
    assert {Path(skip["file"]).name for skip in reported["skipped"]} == set(BROKEN)


def test_a_file_that_shrinks_meanwhile_is_named(images: Path, out: Path) -> None:
    listing = list_samples([str(images)])
    part = listing.samples[0].parts[0]
    os.truncate(part.path, 10)
    with pytest.raises(SampleError, match=r"000\.jpg became shorter while it was packed"):
        part.read()


def test_nothing_but_bad_files_is_an_error(tmp_path: Path, out: Path) -> None:
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a.jpg").write_bytes(b"text")
    with pytest.raises(ArgumentError, match="none of 1 samples could be packed"):
        feedline("pack", tmp_path / "files", out, "--on-error", "skip")


def empty(root: Path) -> Path:
    (root / "empty").mkdir()
    return root / "empty"


def empty_class(root: Path) -> Path:
    shutil.rmtree(class_folders(root / "classes") / "cat")
    (root / "classes" / "cat").mkdir()
    return root / "classes"


def compressed(root: Path) -> Path:
    tar = write_tar(root / "a.tar", {"0.txt": b""})
    tar.write_bytes(gzip.compress(tar.read_bytes()))
    return tar


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (empty, "contains neither files with an extension"),
        (empty_class, r"the class folder .*cat contains no image, sound or video; remove it"),
        (lambda root: root / "nowhere", "does not exist"),
        (lambda root: Path(__file__), r"is neither a folder nor a \.tar file"),
        (compressed, "compressed with gzip"),
    ],
)
def test_sources_that_cannot_be_are_explained(tmp_path: Path, out: Path, make: Any, message: str) -> None:
    with pytest.raises((ArgumentError, SampleError), match=message):
        feedline("pack", make(tmp_path), out)


def test_sources_of_two_kinds_are_refused(images: Path, tmp_path: Path, out: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b""})
    with pytest.raises(ArgumentError, match="some sources are tar shards, others folders of files"):
        feedline("pack", images, tar, out)
    with pytest.raises(ArgumentError, match=r"SOURCE\.\.\. DEST"):
        feedline("pack", images)


@pytest.mark.parametrize(
    "options", [{"decoded": True, "grid": True}, {"decoded": True, "quality": 80}, {"quality": 0}, {"shorter_side": 0}]
)
def test_options_that_exclude_each_other_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match="--"):
        PackOptions(**options)


def test_the_summary_fits_a_narrow_terminal(images: Path, out: Path) -> None:
    (images / "cat" / "x.png").write_bytes(encoded(photo(40, 30), "PNG"))
    (images / "cat" / "README.rst").touch()
    output = feedline("pack", images, out, "--grid").output
    assert max(map(len, output.splitlines())) <= 60
    assert "PNG, not JPEG" in output
    assert "…" not in output


def test_a_full_disk_leaves_what_is_finished_and_says_how_to_go_on(
    images: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, fsync = iter([True, True, True, False]), os.fsync

    def full(descriptor: int) -> None:
        if not next(calls, True):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)  # of the manifest, of a shard, of the manifest; of the second shard
    with pytest.raises(OSError, match="No space left") as error:
        feedline("pack", images, out, "--shard-size", 5)
    assert "the same command continues there" in error.value.__notes__[0]
    assert [path.name for path in out.glob("*.tar")] == ["shard-000000.tar"]
    assert not list(out.glob("*.partial-*"))
    assert packed(images, out, "--shard-size", 5)["kept_shards"] == 1
    assert members(out) == expected(images)


def test_grids_need_the_native_kernels(images: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "native", None)
    with pytest.raises(ImportError, match="libjpeg62-turbo-dev"):
        feedline("pack", images, out, "--grid")
    assert not out.exists()


def test_pixels_are_aligned_in_the_tar(images: Path, out: Path) -> None:
    packed(images, out, "--decoded", "--shorter-side", 64)
    index = open_index(out / "shard-000000.tar")
    column = index.column("npy")
    assert column is not None
    tar = (out / "shard-000000.tar").read_bytes()
    for row in range(len(index)):
        start = index.start(row, column)
        array = np.load(io.BytesIO(tar[start : start + int(index.sizes[row, column])]), allow_pickle=False)
        assert (array.dtype, array.ndim, min(array.shape[:2])) == (np.uint8, 3, 64)
        assert (start + int(index.sizes[row, column]) - array.nbytes) % 64 == 0
        with Image.open(images / f"{index.key(row)}.jpg") as image:
            wanted = np.asarray(image.resize(array.shape[1::-1], Image.Resampling.BICUBIC))
        assert np.array_equal(array, wanted)
