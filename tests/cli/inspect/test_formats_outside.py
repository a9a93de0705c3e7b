"""`feedline inspect` and `feedline index` of formats and stores from outside, which need only a row in a table."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from packing_cases import feedline, inspected
from PIL import Image
from recordio_files import file_of, packed
from writers.values import jpeg

import feedline as fl
from feedline.cli.inspect.formats import format_of
from feedline.datasets import Format, Sample, SampleList, SamplePart
from feedline.errors import SampleError
from feedline.stores import AccessDeniedError, ObjectInfo, ObjectNotFoundError, Scheme
from feedline.stores.local import LocalStore


def list_album(paths: Sequence[str], progress: Callable[[str, int, int], None]) -> SampleList:
    """Albums: files that begin with a label and the sizes of their images."""
    listed = SampleList([], classes=["cat", "dog"])
    files = [file for path in paths for file in sorted(Path(path).glob("*.album") if Path(path).is_dir() else [path])]
    for number, file in enumerate(files, 1):
        label, count = struct.unpack("<II", Path(file).read_bytes()[:8])
        start, before = 8 + 4 * count, len(listed.samples)
        if label > 1:
            listed.unreadable.append(f"{file} is no album")
            continue
        for row, size in enumerate(struct.unpack(f"<{count}I", Path(file).read_bytes()[8:start])):
            part = SamplePart("photo", str(file), start, size, member=str(row), kind="image")
            listed.samples.append(Sample(f"{Path(file).stem}/{row}", label, (part,)))
            start += size
        listed.shards.append(len(listed.samples) - before)
        progress("albums", number, len(files))
    return listed


class AlbumIndex:
    """The index of an album: a file with the number of its images."""

    def __init__(self, path: str, folder: Path | None) -> None:
        self.name = path
        self.place = f"{path}.count" if folder is None else str(folder / f"{Path(path).name}.count")

    def known(self, *, checksum: bool) -> int | None:
        return int(Path(self.place).read_text()) if Path(self.place).exists() and not checksum else None

    def write(self, *, checksum: bool) -> int:
        count: int = struct.unpack("<II", Path(self.name).read_bytes()[:8])[1]
        Path(self.place).write_text(str(count))
        return count

    def check(self) -> tuple[int, str]:
        count = self.known(checksum=False)
        if count is None:
            raise SampleError(f"{self.name} has no index")
        return count, self.place


def find_albums(paths: Sequence[str], folder: Path | None, allow_truncated: bool) -> list[AlbumIndex]:
    return [AlbumIndex(str(file), folder) for path in paths for file in sorted(Path(path).glob("*.album"))]


ALBUMS = Format(
    "albums",
    pattern="*.album",
    unit="album",
    list_samples=list_album,
    index_suffix=".count",
    index_targets=find_albums,
)


@pytest.fixture
def albums(tmp_path: Path) -> Iterator[Path]:
    fl.datasets.register_format("album", ALBUMS)
    for name, label, count in (("a", 0, 5), ("b", 1, 3)):
        images = [jpeg(i, (24, 18)) for i in range(count)]
        sizes = struct.pack(f"<II{count}I", label, count, *map(len, images))
        (tmp_path / f"{name}.album").write_bytes(sizes + b"".join(images))
    yield tmp_path
    fl.datasets.unregister_format("album")


def test_a_registered_format_is_found_and_its_samples_are_listed(albums: Path) -> None:
    found = inspected(albums, "--order", "--window", 1, "--batch-size", 2)
    assert (found["format"], found["samples"], found["shards"]) == ("albums", 8, [5, 3])
    assert found["classes"] == {"cat": 5, "dog": 3}
    assert found["fields"] == {"photo": 8}
    assert found["order"]["unit"] == "album"
    (albums / "c.album").write_bytes(struct.pack("<II", 9, 0))
    assert inspected(albums, code=1)["unreadable"] == [f"{albums / 'c.album'} is no album"]


def test_a_contact_sheet_of_a_registered_format(albums: Path) -> None:
    result = feedline("inspect", albums, "--contact-sheet", albums / "sheet.png", "--samples", 4)
    assert "4 samples on" in " ".join(result.output.split())
    with Image.open(albums / "sheet.png") as sheet:
        assert sheet.width > 100


def test_indexes_of_a_registered_format_are_written_and_checked(albums: Path) -> None:
    assert feedline("index", albums, "--check").exit_code == 1
    assert feedline("index", albums).exit_code == 0
    assert sorted(path.name for path in albums.glob("*.count")) == ["a.album.count", "b.album.count"]
    assert feedline("index", albums, "--check").exit_code == 0


@pytest.mark.parametrize("target", ["folder", "file"])
def test_the_format_of_the_example_is_found_and_summarized(tmp_path: Path, target: str) -> None:
    from extensions import registered

    (tmp_path / "x.rec").write_bytes(file_of([packed(i, [1.0], b"data") for i in range(7)]))
    with registered():
        found = inspected(tmp_path if target == "folder" else tmp_path / "x.rec")
    assert (found["format"], found["samples"], found["shards"]) == ("RecordIO", 7, [7])
    assert not list(tmp_path.glob(".*"))


class Unlisted(LocalStore):
    """A folder below the working directory, as seen through a server without listings."""

    denies = False

    def info(self, path: str) -> ObjectInfo:
        try:
            return super().info(path)
        except ObjectNotFoundError as error:
            if self.denies:
                raise AccessDeniedError(str(error)) from error
            raise

    def list(self, prefix: str = "") -> Any:
        raise AssertionError("this store lists nothing")


class Denying(Unlisted):
    denies = True


@pytest.fixture
def unlisted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    for name, store in (("unlisted", Unlisted), ("denying", Denying)):
        opened = lambda url, options, policy, store=store: store(url.partition("://")[2])  # noqa: E731 - one line
        fl.stores.register_scheme(name, Scheme(opened, lists=False))
    yield tmp_path
    for name in ("unlisted", "denying"):
        fl.stores.unregister_scheme(name)


@pytest.mark.parametrize("scheme", ["unlisted", "denying"])
@pytest.mark.parametrize(
    ("marker", "label"), [("zarr.json", "Zarr"), (".zarray", "Zarr"), ("data.mdb", "LMDB"), ("index.json", "MDS")]
)
def test_a_marker_is_found_where_nothing_is_listed(unlisted: Path, scheme: str, marker: str, label: str) -> None:
    (unlisted / "corpus").mkdir()
    (unlisted / "corpus" / marker).write_text("{}")
    assert format_of([f"{scheme}://corpus"]).label == label


def test_without_a_marker_the_store_says_why(unlisted: Path) -> None:
    (unlisted / "corpus").mkdir()
    with pytest.raises(ObjectNotFoundError, match="corpus"):
        format_of(["unlisted://corpus"])
    with pytest.raises(AccessDeniedError, match="corpus"):
        format_of(["denying://corpus"])
