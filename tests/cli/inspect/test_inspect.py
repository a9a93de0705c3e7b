"""`feedline inspect`: counts, headers, broken files, a contact sheet, and the costs of an order."""

from __future__ import annotations

import gzip
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_cases import encoded, jpeg, photo
from packing_cases import class_folders, feedline, inspected, packed
from PIL import Image
from tar_cases import write_tar

from feedline.cli.inspect import contact_sheet, show, survey
from feedline.cli.inspect.order import compare_windows
from feedline.cli.inspect.survey import spread, summarize_listing
from feedline.datasets.sample_lists import Sample, SamplePart
from feedline.datasets.webdataset.listing import list_tars as tars_listed
from feedline.errors import ArgumentError
from feedline.samplers import ShardShuffled
from feedline.stores import statistics


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = class_folders(tmp_path / "images")
    (folder / "cat" / "p.jpg").write_bytes(jpeg(640, 300, progressive=True))
    (folder / "dog" / "q.png").write_bytes(encoded(photo(90, 70), "PNG"))
    return folder


def test_a_folder_of_classes(images: Path) -> None:
    found = inspected(images)
    assert found["samples"] == found["examined"] == 14
    assert found["fields"] == {"jpg": 13, "png": 1}
    assert found["classes"] == {"cat": 7, "dog": 7}
    assert found["nbytes"] == sum(path.stat().st_size for path in images.rglob("*.*"))
    assert found["headers"]["formats"] == {"JPEG": 13, "PNG": 1}
    assert found["headers"]["progressive"] == 1
    assert found["headers"]["shorter_sides"] == {"64–127": 1, "128–223": 12, "224–255": 0, "256–383": 1}
    assert found["order"] is None


def test_shards_tell_the_same_and_more(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "shards", "--shard-size", 5)
    found, folder = inspected(tmp_path / "shards"), inspected(images)
    assert found["shards"] == [5, 5, 4]
    assert found["fields"] == {"cls": 14, "jpg": 13, "png": 1}
    for same in ("classes", "headers", "samples", "image_nbytes"):
        assert found[same] == folder[same]
    assert inspected(tmp_path / "shards" / "*.tar")["shards"] == [5, 5, 4]


def test_images_with_a_grid_are_counted(tmp_path: Path) -> None:
    packed(class_folders(tmp_path / "images", size=400), tmp_path / "shards", "--grid")
    assert inspected(tmp_path / "shards")["with_grid"] == 12
    result = feedline("inspect", tmp_path / "shards")
    assert "12 of 12 images" in result.output


def test_labels_come_from_cls_or_json(tmp_path: Path) -> None:
    members = {"0.cls": b"3\n", "1.json": b'{"label": "dog"}', "2.json": b"[1]", "3.json": b"{", "4.txt": b"none"}
    assert inspected(write_tar(tmp_path / "a.tar", members))["classes"] == {"3": 1, "dog": 1}


@pytest.mark.parametrize("way", ["files", "compressed", "far"])
@pytest.mark.parametrize(("other", "label"), [('["cat", "dog"]', "dog"), ('["dog", "cat"]', "1"), (None, "1")])
def test_class_names_are_those_of_all_folders(
    tmp_path: Path, memory: Any, way: str, other: str | None, label: str
) -> None:
    for name, classes in (("a", '["cat", "dog"]'), ("b", other)):
        (tmp_path / name).mkdir()
        path = write_tar(tmp_path / name / "x.tar", {"0.cls": b"1"})
        if classes is not None:
            (tmp_path / name / "classes.json").write_text(classes)
        if way == "compressed":
            path.with_suffix(".tar.gz").write_bytes(gzip.compress(path.read_bytes()))
            path.unlink()
        for each in (tmp_path / name).iterdir():
            memory.pipe(f"/far/{name}/{each.name}", each.read_bytes())
    folder = "memory://far" if way == "far" else tmp_path
    assert inspected(f"{folder}/a", f"{folder}/b")["classes"] == {label: 2}


def test_what_is_broken_is_named_and_fails(images: Path, tmp_path: Path) -> None:
    bad = images / "cat" / "bad.jpg"
    bad.write_bytes(b"text")
    found = inspected(images, code=1)
    assert len(found["headers"]["broken"]) == 1
    assert str(bad) in found["headers"]["broken"][0]
    tar = write_tar(tmp_path / "a.tar", {"x.jpg": b"text", "y.jpg": jpeg(60, 40)})
    (tmp_path / "b.tar").write_bytes(b"no tar" * 500)
    found = inspected(tar, tmp_path / "b.tar", code=1)
    assert f"{tar}: member 'x.jpg'" in found["headers"]["broken"][0]
    assert str(tmp_path / "b.tar") in found["unreadable"][0]
    assert found["samples"] == 2


def test_keys_of_several_shards_are_named(tmp_path: Path) -> None:
    tars = [write_tar(tmp_path / f"{i}.tar", {"same.txt": b"", f"{i}.txt": b""}) for i in range(2)]
    assert inspected(*tars)["repeated_keys"] == ["same"]


def test_large_headers_are_read_whole(tmp_path: Path) -> None:
    data = encoded(photo(60, 40), icc_profile=bytes(200_000))
    assert inspected(write_tar(tmp_path / "a.tar", {"0.jpg": data}))["headers"]["formats"] == {"JPEG": 1}


def test_only_some_samples_are_examined_on_request(images: Path) -> None:
    found = inspected(images, "--limit", 4)
    assert (found["samples"], found["examined"], sum(found["headers"]["formats"].values())) == (14, 4, 4)
    assert "4 samples, evenly spaced" in feedline("inspect", images, "--limit", 4).output


def test_places_are_spread_evenly() -> None:
    assert spread(3, 5) == [0, 1, 2]
    assert spread(10, 4) == [0, 2, 5, 7]
    assert len(set(spread(1_000_003, 1000))) == 1000


def test_inspecting_writes_nothing(images: Path, tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b""})
    before = sorted(tmp_path.rglob("*"))
    inspected(tar)
    inspected(images)
    assert sorted(tmp_path.rglob("*")) == before


def test_everything_fits_a_narrow_terminal(images: Path, tmp_path: Path) -> None:
    packed(images, tmp_path / "shards", "--shard-size", 3)
    (tmp_path / "shards" / "x.tar").write_bytes(b"no tar" * 500)
    result = feedline("inspect", tmp_path / "shards", "--order", "--window", 2, "--batch-size", 4)
    assert max(map(len, result.output.splitlines())) <= 60
    for word in ("samples", "shards", "progressive", "Shorter side", "2 classes", "window", "cannot be read"):
        assert word in result.output


def test_a_contact_sheet_shows_the_images(images: Path, tmp_path: Path) -> None:
    (images / "dog" / "bad.jpg").write_bytes(b"text")
    packed(class_folders(tmp_path / "other"), tmp_path / "decoded", "--decoded", "--shorter-side", 60)
    for source, number in ((images, 15), (tmp_path / "decoded", 12)):
        feedline("inspect", source, "--contact-sheet", tmp_path / "sheet.png")
        with Image.open(tmp_path / "sheet.png") as image:
            drawn = np.asarray(image.convert("L"))
            assert image.width == 8 + 6 * (176 + 8)
            assert image.height == 8 + -(-number // 6) * (176 + 34 + 8)
        first = drawn[8 : 8 + 176, 8 : 8 + 176]
        assert first[-1].std() > 5, "the image stands on its label"
        assert drawn[8 + 176 : 8 + 176 + 34, 8 : 8 + 176].min() < 60, "dark letters"


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float64", (8, 8, 3)), ("int64", (8, 8)), ("uint8", (8, 8, 5)), ("float32", ())]
)
def test_arrays_that_are_no_images_are_drawn_as_unreadable(dtype: str, shape: Any, tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.zeros(shape, dtype))
    tar = write_tar(tmp_path / "a.tar", {"0.npy": file.getvalue()})
    feedline("inspect", tar, "--contact-sheet", tmp_path / "sheet.png")
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.getpixel((8, 8)) == contact_sheet._WARNING


def test_a_sheet_of_nothing_is_an_error(tmp_path: Path) -> None:
    tar = write_tar(tmp_path / "a.tar", {"0.txt": b""})
    with pytest.raises(ArgumentError, match="no image for a contact sheet"):
        feedline("inspect", tar, "--contact-sheet", tmp_path / "sheet.png")


def test_long_texts_are_cut_to_the_width_of_a_tile() -> None:
    assert contact_sheet._shorten("short", 14) == "short"
    for from_end in (False, True):
        cut = contact_sheet._shorten("a very long name of a class " * 5, 14, from_end=from_end)
        assert contact_sheet._font(14).getlength(cut) <= 176
        assert cut.startswith("…") if from_end else cut.endswith("…")


def test_windows_are_judged_as_the_sampler_does() -> None:
    found = compare_windows(summarize_listing("tar", [100] * 40, [1000] * 4000), 8, 32)
    assert found is not None
    assert [mixed.window for mixed in found.windows] == [1, 4, 8, 16, 40]
    at = found.windows[2]
    mixing = ShardShuffled([100] * 40, 0, 8).mixing(32)
    assert (at.same_shard_pairs, at.shards_per_batch) == (mixing.same_shard_pairs, mixing.shards_per_batch)
    assert at.window_nbytes == 8 * 100 * 1000
    assert {mixed.nbytes_per_sample for mixed in found.windows} == {1000}
    assert found.page_nbytes is not None
    assert found.page_nbytes > 1000


def test_what_has_no_shards_is_reported_so_in_words(images: Path) -> None:
    found = inspected(images, "--order")
    assert found["order"] is None
    assert any("there are no shards here" in note for note in found["notes"])


def test_one_of_something_is_reported_in_the_singular(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.cls": b"1", "0.jpg": jpeg(64, 64)})
    write_tar(tmp_path / "b.tar", {"0.cls": b"1", "0.jpg": jpeg(64, 64)})
    (tmp_path / "c.tar").write_bytes(b"no tar" * 500)
    output = " ".join(feedline("inspect", tmp_path, "--limit", 1).output.split())
    for words in (
        "2, of 1 sample",
        "1 sample, evenly spaced",
        "1 shard that cannot",
        "1 key that came more than",
        "1 class",
    ):
        assert words in output
    for wrong in ("1 samples", "1 shards", "1 keys", "1 classes"):
        assert wrong not in output


@pytest.mark.parametrize("special", [(), ("0",)])
def test_classes_that_number_the_samples_are_reported_in_one_line(tmp_path: Path, special: tuple[str, ...]) -> None:
    labels = [*(str(i) for i in range(200)), *special]
    write_tar(tmp_path / "a.tar", {f"{i}.cls": label.encode() for i, label in enumerate(labels)})
    output = feedline("inspect", tmp_path / "a.tar").output
    assert f"200 classes of {'1 to 2 samples' if special else '1 sample'} each" in output
    assert "█" not in output


@pytest.mark.parametrize("members", [{}, {"nodot": b""}])
def test_a_tar_without_samples_does_not_end_the_survey(tmp_path: Path, members: dict[str, bytes]) -> None:
    write_tar(tmp_path / "a.tar", {"0.txt": b"x"})
    write_tar(tmp_path / "b.tar", members)
    found = inspected(tmp_path, code=1)
    assert found["samples"] == 1
    assert str(tmp_path / "b.tar") in found["unreadable"][0]


def test_a_header_with_a_size_of_many_digits_does_not_end_the_survey(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {"0.txt": b"x"})
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        info = tarfile.TarInfo("1.txt")
        info.pax_headers = {"size": "9" * 5000}
        tar.addfile(info)
    found = inspected(tmp_path, code=1)
    assert found["samples"] == 1
    assert [line for line in found["unreadable"] if str(tmp_path / "b.tar") in line]


def test_any_error_of_one_tar_is_reported_and_the_others_are_surveyed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "ab":
        write_tar(tmp_path / f"{name}.tar", {f"{name}.cls": b"9" * 5000})
    (tmp_path / "classes.json").write_text('["x"]')

    def listed(tars: list[str]) -> Any:
        if tars[0].endswith("b.tar"):
            raise OverflowError("too large")
        return tars_listed(tars)

    monkeypatch.setattr("feedline.datasets.webdataset.listing.list_tars", listed)
    found = inspected(tmp_path, code=1)
    assert found["unreadable"] == [f"{tmp_path / 'b.tar'}: OverflowError: too large"]
    assert found["classes"] == {"9" * 5000: 1}


def test_quantiles_of_nothing() -> None:
    assert show.quantiles([]) == {}
    assert show.shorter_sides([]) == {}


def test_an_object_that_cannot_be_read_leaves_the_others_to_be_looked_at() -> None:
    class Gone:
        def read(self, spans: Any) -> Any:
            raise ValueError("gone")

    class There:
        def read(self, spans: Any) -> Any:
            return [memoryview(b"7") for _ in spans]

    samples = [
        Sample(name, None, (SamplePart("cls", name, 0, 1, "x.cls", file=blob, kind="class"),))
        for name, blob in (("a", Gone()), ("b", There()))
    ]
    a, b = survey.with_headers(samples)
    assert b.parts[0].read() == b"7"
    with pytest.raises(ValueError, match="gone"):
        a.parts[0].read()


class TestFar:
    """Tars in stores."""

    def put(self, memory: Any, folder: Path) -> str:
        for path in folder.iterdir():
            memory.pipe(f"/far/{path.name}", path.read_bytes())
        return "memory://far"

    def test_they_tell_the_same_as_on_this_machine(self, memory: Any, images: Path, tmp_path: Path) -> None:
        (images / "dog" / "profile.jpg").write_bytes(jpeg(64, 64, icc_profile=bytes(300_000)))
        packed(images, tmp_path / "shards", "--shard-size", 5)
        write_tar(tmp_path / "shards" / "x.tar", {"broken.jpg": jpeg(64, 64)[:100], "broken.cls": b"1"})
        near = inspected(tmp_path / "shards", "--order", code=1)
        survey = inspected(self.put(memory, tmp_path / "shards"), "--order", code=1)
        near["headers"]["broken"] = [
            each.replace(str(tmp_path / "shards"), "memory://far") for each in near["headers"]["broken"]
        ]
        assert survey == near
        assert survey["classes"] == {"cat": 7, "dog": 9}

    def test_only_what_is_looked_at_is_read(self, memory: Any, tmp_path: Path) -> None:
        members = {
            f"{at}.{name}": data for at in range(9) for name, data in (("jpg", jpeg(64, 64)), ("bin", bytes(300_000)))
        }
        memory.pipe("/far/x.tar", write_tar(tmp_path / "x.tar", members).read_bytes())
        inspected("memory://far")
        before = statistics().nbytes
        assert inspected("memory://far")["headers"]["formats"] == {"JPEG": 9}
        assert statistics().nbytes - before < 150_000

    def test_shards_that_cannot_be_read_and_sheets(self, memory: Any, tmp_path: Path) -> None:
        write_tar(tmp_path / "a.tar", {"0.jpg": jpeg(300, 200), "0.cls": b"3"})
        (tmp_path / "b.tar").write_bytes(b"junk" * 500)
        for name in ("a.tar", "b.tar"):
            memory.pipe(f"/far/{name}", (tmp_path / name).read_bytes())
        found = inspected("memory://far", "--contact-sheet", tmp_path / "sheet.png", code=1)
        assert [line.partition(" is ")[0] for line in found["unreadable"]] == ["memory://far/b.tar"]
        with Image.open(tmp_path / "sheet.png") as image:
            assert len(image.getcolors(1 << 24)) > 500

    def test_pack_takes_files(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match=r"s3://b/x.tar is a URL, but this command reads local files only"):
            feedline("pack", "s3://b/x.tar", tmp_path / "out")
