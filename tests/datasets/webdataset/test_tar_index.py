from __future__ import annotations

import logging
import os
import pickle
import shutil
import tarfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from image_cases import encoded, jpeg, photo
from tar_cases import image_members, npy, write_tar

from feedline.datasets import array_container
from feedline.datasets.paths import find
from feedline.datasets.webdataset import (
    ShardCache,
    ShardError,
    TarIndex,
    Tars,
    build_index,
    index_files,
    open_index,
    read_head,
    write_index,
)
from feedline.datasets.webdataset.shards import MemberSpan, Shard
from feedline.errors import ArgumentError, SampleError, StateError


def cells(shard: Shard, rows: Any, fields: Any) -> list[MemberSpan]:
    """Members of a tar of this machine."""
    held = shard.get_loaded()
    assert held is not None
    return shard.cells(rows, fields, held)


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    return write_tar(tmp_path / "x.tar", {"b.jpg": jpeg(64, 48), "b.cls": b"1", "a.cls": b"22", "a.JPG": jpeg(40, 80)})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "feedline" / "indexes"


def age(path: Path) -> None:
    """Change the time of modification."""
    os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))


def reported(index: TarIndex) -> Any:
    return list(index.keys), index.fields, index.blocks.tolist(), index.sizes.tolist()


class TestGrouping:
    def test_samples_and_fields_keep_the_order_of_their_first_members(self, tar: Path) -> None:
        index = build_index(tar)
        assert (len(index), list(index.keys), index.fields) == (2, ["b", "a"], ("jpg", "cls"))
        data = tar.read_bytes()
        start = index.start(1, 1)
        assert data[start : start + index.sizes[1, 1]] == b"22"
        assert index.dimensions("jpg").tolist() == [[64, 48], [40, 80]]  # type: ignore[union-attr]
        assert index.dimensions("cls") is None
        assert index.counts() == {"jpg": 2, "cls": 2}
        assert index.member(1, 0) == "a.jpg"

    def test_distant_members_are_one_sample(self, tmp_path: Path) -> None:
        index = build_index(
            write_tar(tmp_path / "x.tar", {"a.jpg": b"", "b.jpg": b"", "a.cls": b"", "c": b"", ".d.e": b""})
        )
        assert list(index.keys) == ["a", "b"]
        assert [index.present(row) for row in range(2)] == [["jpg", "cls"], ["jpg"]]

    def test_a_member_that_comes_twice(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", [("a.jpg", b"1"), ("b.jpg", b"2"), ("a.JPG", b"3")])
        with pytest.raises(
            ShardError, match=r"x.tar: member 'a.JPG' is a duplicate: field 'jpg' of sample 'a'.*Re-create the tar"
        ):
            build_index(path)

    def test_dots_in_the_stem_that_make_fields_without_end(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {f"img.{number:05d}.jpg": b"" for number in range(1025)})
        with pytest.raises(ShardError, match=r"'img.01024.jpg' would be field .* first dot of the base name. Rename"):
            build_index(path)

    def test_images_of_all_kinds_have_dimensions(self, tmp_path: Path) -> None:
        held = {
            "a.png": encoded(photo(30, 20), "PNG"),
            "b.png": b"no image",
            "c.npy": npy(np.zeros((5, 6, 3), np.uint8)),
            "d.npy": npy(np.zeros(7)),
            "e.npy": b"",
        }
        index = build_index(write_tar(tmp_path / "x.tar", held))
        assert index.dimensions("png").tolist() == [[30, 20], [0, 0], [0, 0], [0, 0], [0, 0]]  # type: ignore[union-attr]
        assert index.dimensions("npy").tolist()[2:] == [[6, 5], [0, 0], [0, 0]]  # type: ignore[union-attr]

    def test_memory_of_a_sample(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {f"{n:08d}.{ext}": b"1" for n in range(2000) for ext in ("jpg", "cls")})
        write_index(path)
        assert Path(f"{path}.index").stat().st_size / 2000 <= 64

    def test_an_empty_tar_has_no_samples(self, tmp_path: Path) -> None:
        index = build_index(write_tar(tmp_path / "x.tar", {}))
        assert (len(index), index.fields) == (0, ())
        assert len(open_index(tmp_path / "x.tar")) == len(open_index(tmp_path / "x.tar")) == 0

    def test_truncated_tars_keep_whole_samples(self, tmp_path: Path) -> None:
        members = {"a.jpg": b"1" * 600, "a.cls": b"1", "b.jpg": b"2" * 600, "b.cls": b"2" * 600}
        path = write_tar(tmp_path / "x.tar", members, format=tarfile.GNU_FORMAT)
        path.write_bytes(path.read_bytes()[: 1536 + 1024 + 1536 + 512 + 300])
        with pytest.raises(ShardError, match=r"member 'b.cls' ends at byte 5,208, the file at 4,908"):
            open_index(path)
        assert list(open_index(path, allow_truncated=True).keys) == ["a"]
        with pytest.raises(ShardError, match=r"is truncated: member 'b.cls'"):  # though there is an index now
            open_index(path)
        assert read_head(str(path)) is None
        assert read_head(str(path), allow_truncated=True) is not None

    @pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
    @pytest.mark.parametrize("order", ["by sample", "by field"])
    def test_no_cut_leaves_a_part_of_a_sample(self, tmp_path: Path, form: int, order: str) -> None:
        keys, fields = [f"{'folder/' * 16}{number}" for number in range(3)], ("txt", "cls")
        names = [f"{key}.{name}" for key in keys for name in fields]
        if order == "by field":
            names.sort(key=lambda name: fields.index(name[-3:]))
        path = write_tar(tmp_path / "x.tar", dict.fromkeys(names, b"1" * 700), format=form)
        with tarfile.open(path) as tar:
            stops = [member.offset_data + 700 for member in tar]
        data = path.read_bytes()[: stops[-1]]
        for nbytes in [*range(256, len(data), 256), *stops[:-1]]:
            path.write_bytes(data[:nbytes])
            held = sum(stop <= nbytes for stop in stops)
            if held and nbytes == -(-stops[held - 1] // 512) * 512:  # whole members are a tar, without an end mark too
                assert np.count_nonzero(build_index(path).blocks) == held
                continue
            with pytest.raises(ShardError, match="is truncated"):
                build_index(path)
            index = build_index(path, allow_truncated=True)
            kept = [index.present(row) for row in range(len(index))]
            if order == "by sample":
                assert kept == [[*fields]] * len(kept)
                assert held // 2 - 1 <= len(kept) <= held // 2
            else:
                assert all(each == kept[0] for each in kept)


class TestIndexFile:
    def test_is_built_once_and_mapped_from_then_on(self, tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        first = open_index(tar)
        assert first.path == f"{tar}.index"
        monkeypatch.setattr(index_files.table, "compute_index", None)
        again = open_index(tar)
        assert reported(again) == reported(first) == reported(open_index(tar, f"{tar}.index"))
        head = read_head(str(tar))
        assert head is not None
        assert (head.samples, head.fields) == (2, ("jpg", "cls"))

    def test_a_changed_tar_is_indexed_again(self, tar: Path, caplog: pytest.LogCaptureFixture) -> None:
        open_index(tar)
        write_tar(tar, {"c.jpg": jpeg(8, 8)})
        assert read_head(str(tar)) is None
        with caplog.at_level(logging.WARNING, "feedline"):
            assert list(open_index(tar).keys) == ["c"]
        assert "x.tar.index is built again (the tar has changed)" in caplog.text
        assert read_head(str(tar)) is not None

    def test_a_change_of_equal_size_is_seen(self, tar: Path) -> None:
        open_index(tar)
        before = reported(open_index(tar))
        data = tar.read_bytes().replace(b"a.cls", b"z.cls")
        write_tar(tar, {"b.jpg": jpeg(64, 48), "b.cls": b"1", "z.cls": b"22", "z.JPG": jpeg(40, 80)})
        assert len(data) == tar.stat().st_size
        assert reported(open_index(tar)) != before

    def test_a_copy_with_another_time_fits(self, tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = reported(open_index(tar))
        age(tar)
        monkeypatch.setattr(index_files.table, "compute_index", None)
        assert read_head(str(tar)) is None
        assert reported(open_index(tar)) == before

    def test_a_requested_index_must_fit(self, tar: Path, tmp_path: Path) -> None:
        elsewhere = write_index(tar, tmp_path / "elsewhere.index")
        assert reported(open_index(tar, elsewhere)) == reported(build_index(tar))
        write_tar(tar, {"c.jpg": jpeg(8, 8)})
        with pytest.raises(ShardError, match=r"elsewhere.index does not match its tar .*x.tar.*Delete the index"):
            open_index(tar, elsewhere)
        with pytest.raises(FileNotFoundError):
            open_index(tar, tmp_path / "none.index")

    @pytest.mark.parametrize(
        "damage",
        [
            lambda data: b"",
            lambda data: data[:-100],
            lambda data: b"x" * len(data),
            lambda data: data.replace(b'"samples":2', b'"samples":9'),
            lambda data: data.replace(b'"samples"', b'"simples"'),
            lambda data: data.replace(b'"metadata"', b'"metadatx"'),
            lambda data: data.replace(b"<u2", b"<f2"),
            lambda data: data[:16] + b"\x09" + data[17:],
        ],
    )
    def test_a_damaged_one_is_made_again(
        self, tar: Path, damage: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
    ) -> None:
        place = write_index(tar)
        good = place.read_bytes()
        place.write_bytes(damage(good))
        assert place.read_bytes() != good
        with pytest.raises(SampleError, match=r"x.tar"):
            open_index(tar, place)
        with caplog.at_level(logging.WARNING, "feedline"):
            assert list(open_index(tar).keys) == ["b", "a"]
        assert "is built again" in caplog.text
        assert place.read_bytes() == good

    def test_lost_grids_are_reported(self, tar: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_index(tar, grids={"a.JPG": np.array([1, 2], np.uint16)})
        write_tar(tar, {"c.jpg": jpeg(8, 8)})
        with caplog.at_level(logging.WARNING, "feedline"):
            assert not open_index(tar).has_grids
        assert (
            "without the restart offsets for decoding parts of images: restore them with feedline index --rebuild"
            in caplog.text
        )

    def test_read_only_folders(
        self, tar: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        write = array_container.write

        def refusing(path: str, *contents: Any) -> None:
            if path.startswith(readonly):
                raise PermissionError(13, "Permission denied", path)
            write(path, *contents)

        monkeypatch.setattr(array_container, "write", refusing)
        readonly = f"{tar}."
        found = open_index(tar)
        assert Path(found.path or "").parent == cache
        assert open_index(tar).path == found.path
        assert not Path(f"{tar}.index").exists()
        shutil.rmtree(cache)
        readonly = str(tar.parent)
        with caplog.at_level(logging.WARNING, "feedline"):
            held = open_index(tar)
        assert held.path is None
        assert list(held.keys) == ["b", "a"]
        assert len(caplog.records) == 1
        assert "x.tar stays in memory" in caplog.text

    def test_checksums(self, tar: Path) -> None:
        with pytest.raises(ShardError, match=r"has no checksum; write it with checksum=True"):
            build_index(tar).verify()
        place = write_index(tar, checksum=True)
        index = open_index(tar, place)
        index.verify()
        data = bytearray(tar.read_bytes())
        data[600] ^= 1
        tar.write_bytes(data)
        with pytest.raises(ShardError, match=r"x.tar is not the indexed tar: its checksum"):
            index.verify()

    def test_grids_come_back(self, tar: Path) -> None:
        lengths = np.array([500, 600, 65535], np.uint16)
        index = open_index(tar, write_index(tar, grids={"a.JPG": lengths, "b.jpg": lengths[:1]}))
        assert index.has_grids
        assert index.grid(1, 0).tolist() == lengths.tolist()  # type: ignore[union-attr]
        assert index.grid(0, 0).tolist() == [500]  # type: ignore[union-attr]
        assert index.grid(0, 1) is None
        assert build_index(tar).grid(1, 0) is None
        for name in ("c.jpg", "a.png", "README"):
            with pytest.raises(ArgumentError, match=f"grids= names {name!r}, which is not a member"):
                write_index(tar, grids={name: lengths})

    def test_members_without_a_tar(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"none.tar"):
            open_index(tmp_path / "none.tar")

    @settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.integers(0, 1200), st.binary(min_size=1, max_size=12))
    def test_any_damage_to_an_index_is_reported_or_harmless(self, tar: Path, at: int, garbage: bytes) -> None:
        place = Path(f"{tar}.hurt")
        if not place.exists():
            write_index(tar, place)
        data = bytearray(place.read_bytes())
        hurt = Path(f"{tar}.index")
        data[at : at + len(garbage)] = garbage
        hurt.write_bytes(data)
        try:
            index = open_index(tar, hurt)
            shards = ShardCache(Tars(find(tar, "*.tar")), [index.head.fingerprint], 1)
            for cell in cells(shards[0], np.arange(len(index)), index.fields):
                assert len(bytes(cell.data)) <= tar.stat().st_size
        except SampleError:
            return


class TestOpenShards:
    @pytest.fixture
    def tars(self, tmp_path: Path) -> list[str]:
        return [str(write_tar(tmp_path / f"{n}.tar", {f"{n}.txt": b"%d" % n, f"{n}.cls": b""})) for n in range(6)]

    def opening(self, tars: list[str], most: int = 2) -> ShardCache:
        return ShardCache(Tars(find(tars, "*.tar")), [open_index(tar).head.fingerprint for tar in tars], most)

    def read(self, shards: ShardCache, number: int) -> bytes:
        return bytes(cells(shards[number], np.array([0]), ["txt"])[0].data)

    def test_a_bounded_number_is_open(self, tars: list[str]) -> None:
        shards = self.opening(tars)
        descriptors = len([*Path("/proc/self/fd").iterdir()])
        view = cells(shards[0], np.array([0]), ["txt"])[0].data
        for number in (1, 2, 3, 4, 5, 4, 3):
            assert self.read(shards, number) == b"%d" % number
            assert shards.open_count <= 2
        assert bytes(view) == b"0"  # of a tar that was closed long ago
        del view
        assert len([*Path("/proc/self/fd").iterdir()]) <= descriptors + 4

    def test_the_one_not_used_for_longest_goes(self, tars: list[str]) -> None:
        shards = self.opening(tars)
        first = shards[0]
        assert shards[1] is not first
        assert shards[0] is first
        self.read(shards, 2)
        assert shards[0] is first

    def test_threads_share_them(self, tars: list[str]) -> None:
        shards, wrong = self.opening(tars, 3), list[int]()

        def work(seed: int) -> None:
            for number in np.random.default_rng(seed).integers(0, 6, 60).tolist():
                if self.read(shards, number) != b"%d" % number:
                    wrong.append(number)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert shards.open_count <= 3

    def test_travel_as_paths(self, tars: list[str]) -> None:
        shards = self.opening(tars)
        self.read(shards, 0)
        copy = pickle.loads(pickle.dumps(shards))
        assert copy.open_count == 0
        assert self.read(copy, 5) == b"5"

    def test_another_tar_on_arrival(self, tars: list[str]) -> None:
        shards = self.opening(tars)
        write_tar(Path(tars[0]), {"9.txt": b"9", "0.cls": b""})
        with pytest.raises(StateError, match=r"0.tar has changed since this dataset was made"):
            shards[0]

    def test_an_index_of_another_tar_on_arrival(self, tars: list[str]) -> None:
        shards = self.opening(tars)
        shards._fingerprints = ["another", *shards._fingerprints[1:]]
        with pytest.raises(ShardError, match=r"0.tar has changed since .* it is not the tar that was indexed"):
            shards[0]

    @pytest.mark.parametrize("change", ["shrunk", "touched", "grown"])
    def test_a_tar_that_changes_while_it_is_open(self, tars: list[str], change: str) -> None:
        shards, path = self.opening(tars), Path(tars[0])
        shards[0]
        if change == "shrunk":
            os.truncate(path, 100)
        elif change == "touched":
            age(path)
        else:
            path.write_bytes(path.read_bytes() + bytes(512))
        with pytest.raises(
            StateError, match=r"0.tar has changed since this dataset was made.*create the dataset again"
        ):
            shards[0]

    def test_a_tar_that_is_removed_stays_open(self, tars: list[str]) -> None:
        shards = self.opening(tars)
        shards[0]
        for path in tars[:2]:
            Path(path).unlink()
        assert self.read(shards, 0) == b"0"
        with pytest.raises(FileNotFoundError, match=r"1.tar"):
            shards[1]

    def test_a_sample_without_the_field(self, tars: list[str], tmp_path: Path) -> None:
        path = str(write_tar(tmp_path / "half.tar", {"a.txt": b"", "a.cls": b"", "b.txt": b""}))
        shards = self.opening([path])
        with pytest.raises(SampleError, match=r"half.tar: sample 'b' has no cls or id; it has txt. Repack the sample"):
            cells(shards[0], np.array([0, 1]), ["cls", "id"])
        with pytest.raises(SampleError, match=r"sample 'a' has no png"):
            cells(shards[0], np.array([0]), ["png"])

    def test_a_fork_opens_its_own(self, tars: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        shards = self.opening(tars)
        mine = shards[0]
        monkeypatch.setattr(os, "getpid", lambda: -1)
        assert shards[0] is not mine

    def test_members_are_read_ahead(self, tmp_path: Path) -> None:
        path = str(write_tar(tmp_path / "big.tar", {"a.bin": bytes(100_000), "b.bin": b"1", "c.bin": bytes(50_000)}))
        shard = self.opening([path])[0]
        assert [len(cell.data) for cell in cells(shard, np.arange(3), ["bin"])] == [100_000, 1, 50_000]


def test_an_index_that_is_kept_in_memory_is_built_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tars = [str(write_tar(tmp_path / f"{n}.tar", image_members(2, 2 * n))) for n in range(3)]
    prints = [build_index(tar).head.fingerprint for tar in tars]

    def refusing(path: str, *_: Any) -> None:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setattr(array_container, "write", refusing)
    shards = ShardCache(Tars(find(tars, "*.tar")), prints, 1)
    with caplog.at_level(logging.WARNING, "feedline"):
        for number in (0, 1, 2, 0, 1, 2):
            assert len(shards[number].index) == 2
    assert len(caplog.records) == 3
