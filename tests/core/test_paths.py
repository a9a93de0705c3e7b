from __future__ import annotations

import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import jpeg
from tar_cases import write_tar

from feedline import datasets, stores
from feedline.core.paths import PARTIAL, expand_user, make_folder, missing_error, replacing
from feedline.datasets import MDS, ArrayFile, Files, ImageFolder, Lines, LitData, Raw, TarShards, TFRecord, TokenFile
from feedline.errors import ArgumentError, FeedlineError
from feedline.stores.base import ObjectInfo
from feedline.stores.globs import expand


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder with one entry of each kind."""
    data = tmp_path / "data"
    (data / "images" / "cat").mkdir(parents=True)
    (data / "images" / "cat" / "0.jpg").write_bytes(jpeg(8, 8, 0))
    (data / "words").mkdir()
    for name in ("0.txt", "1.txt"):
        (data / "words" / name).write_text(name)
    write_tar(data / "train.tar", {"0.txt": b"0", "0.cls": b"0"})
    np.save(data / "rows.npy", np.zeros((2, 3)))
    np.zeros(8, np.uint16).tofile(data / "tokens.bin")
    return data


OPEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "images": (ImageFolder, "imagse"),
    "images/cat": (ImageFolder, "imagse/cat"),
    "words": (Files, "wods"),
    "words/0.txt": (Files, "word/0.txt"),
    "train.tar": (TarShards, "train.tra"),
    "rows.npy": (ArrayFile, "rows.npz"),
    "tokens.bin": (lambda path: TokenFile(path, window=2), "Token.bin"),
    "tokens.bin ": (lambda path: ArrayFile(Raw(path, "uint16")), "tokns.bin"),
}


@pytest.mark.parametrize("near", OPEN)
def test_a_path_that_is_not_there_is_reported_with_a_near_one(data: Path, near: str) -> None:
    open_, wrong = OPEN[near]
    gone = wrong.partition("/")[0]
    with pytest.raises(FileNotFoundError) as caught:
        open_(data / wrong)
    assert isinstance(caught.value, FeedlineError)
    text = str(caught.value)
    assert f": {data / wrong} ({data} exists, but has no {gone}); did you mean {data / near.strip()}?" in text
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


@pytest.mark.parametrize("open_", [MDS, LitData])
def test_a_folder_with_an_index_that_is_not_there(data: Path, open_: Callable[[Path], object]) -> None:
    with pytest.raises(FileNotFoundError, match=r"image/index.json does not exist .* did you mean .*/images\?"):
        open_(data / "image")
    with pytest.raises(FileNotFoundError, match=r"pass the folder that it is in"):
        open_(data / "train.tar")


def test_what_is_nowhere_near(data: Path) -> None:
    for open_ in (TarShards, TFRecord, Lines):
        with pytest.raises(
            FileNotFoundError, match=rf"no such file: {data}/xyz.q \({data} exists, but has no xyz.q\)$"
        ):
            open_(data / "xyz.q")
    with pytest.raises(FileNotFoundError, match=rf"\({data}/train.tar is a file, not a folder\)"):
        TarShards(data / "train.tar" / "0.tar")


def test_another_number_is_no_near_name(data: Path) -> None:
    for number in range(3):
        (data / f"shard-{number:03}.tar").touch()
    assert "did you mean" not in str(missing_error(data / "shard-003.tar"))
    assert str(missing_error(data / "shard-2.tar")).endswith(f"did you mean {data}/shard-002.tar?")


def test_links_to_nothing(data: Path) -> None:
    (data / "link").symlink_to("gone")
    for path in (data / "link", data / "link" / "0.tar"):
        with pytest.raises(
            FileNotFoundError, match=rf"no such file: {path} \({data}/link is a link to gone, which does not exist"
        ):
            TarShards(path)


def test_home(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(data))
    assert len(TarShards("~/train.tar")) == len(ImageFolder("~/images")) == 1
    assert len(TarShards(["~/t*.tar"], index_dir="~/indexes")) == 1
    assert (data / "indexes").is_dir()
    assert len(Files("~/words/{0,1}.txt")) == len(ArrayFile("~/rows.npy")) == 2
    assert stores.expand("~/words/*.txt") == [str(data / "words" / name) for name in ("0.txt", "1.txt")]
    ImageFolder("~/images", index_dir="~/listings")
    assert len(list((data / "listings").iterdir())) == 1
    with pytest.raises(FileNotFoundError, match=rf"/index.json does not exist .*: {data}/gone \("):
        MDS("~/gone")
    with pytest.raises(FileNotFoundError, match=rf"no such file: {data}/trian.tar .* did you mean {data}/train.tar\?"):
        TarShards("~/trian.tar")


def test_a_folder_of_that_name_is_meant_itself(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    (data / "~").mkdir()
    assert expand_user("~/x") == "~/x"
    assert expand_user("~backup-of-none.tar") == "~backup-of-none.tar"


def test_a_folder_that_cannot_be_made(data: Path) -> None:
    make_folder(data / "a" / "b", "cache='a/b'")
    assert (data / "a" / "b").is_dir()
    with pytest.raises(
        ArgumentError, match=rf"^cache='x': {data}/train.tar is not a folder and cannot be created \(File"
    ):
        make_folder(data / "train.tar", "cache='x'")


class TestFiles:
    def test_only_files_are_samples(self, data: Path) -> None:
        words = data / "words"
        (words / "folder").mkdir()
        (words / "folder" / "2.txt").write_text("2.txt")
        (words / "folder.txt").mkdir()
        os.mkfifo(words / "pipe.txt")
        with socket.socket(socket.AF_UNIX) as opened:
            opened.bind(os.path.relpath(words / "socket.txt"))
        (words / "link.txt").symlink_to("0.txt")
        (words / "linked").symlink_to("folder")
        (words / "null.txt").symlink_to("/dev/null")

        def names(paths: object) -> list[str]:
            return [Path(path).name for path in Files(paths, decode="text").paths]  # type: ignore[arg-type]

        assert names(words) == names(words / "*") == ["0.txt", "1.txt", "link.txt"]
        assert names(words / "**/*.txt") == ["0.txt", "1.txt", "2.txt", "link.txt", "2.txt"]
        assert names(words / "*/2.txt") == ["2.txt", "2.txt"]
        assert list(Files(words, decode="text")) == ["0.txt", "1.txt", "0.txt"]
        with pytest.raises(FileNotFoundError, match=r"no files: .*/f\*' matches none except folders or special files"):
            Files(words / "f*")
        with pytest.raises(ArgumentError, match=r"pipe.txt is a pipe or a device, which cannot be read in any order"):
            Files(words / "pipe.txt")

    def test_relative_patterns(self, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(data / "words")
        (data / "words" / "folder").mkdir()
        assert len(Files("*")) == len(Files(".")) == 2

    def test_a_link_to_nothing_is_named_when_it_is_read(self, data: Path) -> None:
        (data / "words" / "2.txt").symlink_to("gone")
        files = Files(data / "words")
        assert len(files) == 3
        with pytest.raises(FileNotFoundError, match=r"2.txt does not exist"):
            files[2]

    def test_an_empty_result_names_the_pattern_and_the_folder(
        self, data: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (data / "empty").mkdir()
        monkeypatch.chdir(data)
        for paths, message in (
            ("empty", rf"no files: '{data}/empty/\*' matches none$"),
            ("empty/*.txt", rf"no files: '{data}/empty/\*.txt' matches none$"),
            (
                "wrods/*.txt",
                rf"no files: '{data}/wrods/\*.txt' matches none: no such folder: .* did you mean {data}/words",
            ),
            ([], r"no files: the list of paths is empty"),
        ):
            with pytest.raises(FileNotFoundError, match=message):
                Files(paths)

    def test_images_are_files(self, data: Path) -> None:
        os.mkfifo(data / "images" / "cat" / "pipe.jpg")
        (data / "images" / "cat" / "link.jpg").symlink_to("0.jpg")
        assert [Path(path).name for path, _ in ImageFolder(data / "images").samples] == ["0.jpg", "link.jpg"]

    def test_a_store_of_files_lists_them_only(self, data: Path) -> None:
        os.mkfifo(data / "words" / "pipe.txt")
        assert [info.path for info in stores.open_store(data / "words").list()] == ["0.txt", "1.txt"]

    def test_objects_that_stand_for_folders_are_no_files(self) -> None:
        class Store:
            url = "s3://bucket"

            def list(self, prefix: str) -> list[ObjectInfo]:
                return [ObjectInfo(path, 0, "") for path in ("a/", "a/0.txt", "a/b/", "a/b/1.txt")]

        for pattern in ("s3://bucket/a/**", "s3://bucket/a/**/*"):
            found = expand(pattern, lambda _: Store())  # type: ignore[arg-type, return-value]
            assert found == ["s3://bucket/a/0.txt", "s3://bucket/a/b/1.txt"]


def test_images_in_a_file(data: Path) -> None:
    with pytest.raises(NotADirectoryError, match=r"0.jpg is a file: give a folder `root` with images in root/class"):
        ImageFolder(data / "images" / "cat" / "0.jpg")


def test_a_listing_that_cannot_be_kept_is_named(data: Path) -> None:
    with pytest.raises(
        ArgumentError, match=r"the listing '.*/train.tar/x/.*' cannot be written \(.*\): give a writable fold"
    ):
        ImageFolder(data / "images", index_dir=data / "train.tar" / "x")
    datasets.ImageFolder(data / "images", index_dir=data / "new" / "x")
    assert len(list((data / "new" / "x").iterdir())) == 1


class TestReplacing:
    @pytest.mark.parametrize("durable", [False, True])
    def test_the_new_file_takes_the_place_of_the_old(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
    ) -> None:
        place, synced = tmp_path / "a", list[bytes]()
        place.write_bytes(b"old")
        monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").read_bytes()))
        with replacing(place, durable=durable) as file:
            file.write(b"new")
            (unfinished,) = (each.name for each in tmp_path.iterdir() if each != place)
            match = PARTIAL.fullmatch(unfinished)
            assert match is not None
            assert match[1] == "a"
            assert place.read_bytes() == b"old"
        assert place.read_bytes() == b"new"
        assert synced == [b"new"] * durable, "all data are on the disk before the name points to it"
        assert list(tmp_path.iterdir()) == [place]

    def test_after_an_error_the_old_one_stays(self, tmp_path: Path) -> None:
        place = tmp_path / "a"
        place.write_bytes(b"old")
        with pytest.raises(ZeroDivisionError), replacing(place) as file:
            file.write(bytes([1 // 0]))
        assert [each.read_bytes() for each in tmp_path.iterdir()] == [b"old"]
