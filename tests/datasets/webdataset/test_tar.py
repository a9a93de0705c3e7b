from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tar_cases import entry, write_tar

from feedline.datasets.webdataset import ShardError, TarMember, members, split

LONG = "folder/" * 30 + "ä" * 20 + ".jpg"
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "pax": tarfile.PAX_FORMAT, "gnu": tarfile.GNU_FORMAT}


def contents(path: Path) -> dict[str, bytes]:
    data = path.read_bytes()
    return {name: data[start : start + size] for name, start, size in members(path)}


class TestReading:
    @pytest.mark.parametrize("form", FORMATS)
    def test_every_format(self, tmp_path: Path, form: str) -> None:
        held = {"a.jpg": b"1" * 700, "dir/b.cls": b"", "./c.txt": b"3" * 512, "x" * 90 + "/" + "y" * 60 + ".png": b"4"}
        path = write_tar(tmp_path / "x.tar", held, format=FORMATS[form])
        assert contents(path) == held

    @pytest.mark.parametrize("form", ["pax", "gnu"])
    def test_long_and_foreign_names(self, tmp_path: Path, form: str) -> None:
        held = {LONG: b"long", "短い.txt": b"short", "odd\udcff.txt": b"bytes", LONG + "x": b"longer"}
        assert contents(write_tar(tmp_path / "x.tar", held, format=FORMATS[form])) == held

    def test_sizes_in_pax_headers_and_in_base_256(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("a.txt")
            info.size, info.pax_headers = 3, {"size": "3", "comment": "x=y\n"}
            tar.addfile(info, io.BytesIO(b"abc"))
        assert contents(path) == {"a.txt": b"abc"}
        data = bytearray(write_tar(path, {"a.txt": b"abc"}, format=tarfile.GNU_FORMAT).read_bytes())
        data[124:136] = b"\x80" + (3).to_bytes(11, "big")
        assert contents(resealed(path, data)) == {"a.txt": b"abc"}

    def test_folders_and_labels_are_passed_over(self, tmp_path: Path) -> None:
        for kind in (tarfile.DIRTYPE, b"V"):
            assert list(contents(entry(tmp_path / "x.tar", "folder", kind))) == ["0000.txt"]

    def test_old_tars_without_magic(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"abc"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[156:157] = b"\0"
        data[257:265] = bytes(8)
        assert contents(resealed(path, data)) == {"a.txt": b"abc"}

    def test_sums_of_bytes_with_signs(self, tmp_path: Path) -> None:
        """Old writers add the bytes of a header as numbers from -128 on, as tarfile knows."""
        path = write_tar(tmp_path / "x.tar", {"é.txt": b"abc"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[148:156] = b" " * 8
        data[148:156] = b"%06o\0 " % sum(struct.unpack("512b", data[:512]))
        path.write_bytes(data)
        with tarfile.open(path) as tar:
            assert tar.getnames() == ["é.txt"]
        assert contents(path) == {"é.txt": b"abc"}

    @settings(deadline=None, max_examples=60)
    @given(st.dictionaries(st.from_regex(r"[a-zé]{1,60}(/[a-z.]{1,80}){0,3}\.[a-z]{1,3}", fullmatch=True), st.binary()))
    def test_what_tarfile_writes(self, tmp_path_factory: pytest.TempPathFactory, held: dict[str, bytes]) -> None:
        held = {name: data for name, data in held.items() if ".." not in name.split("/")}
        path = write_tar(tmp_path_factory.getbasetemp() / "law.tar", held, format=tarfile.PAX_FORMAT)
        assert contents(path) == held


def resealed(path: Path, data: bytearray) -> Path:
    """The tar with the checksum of its first header set right."""
    data[148:156] = b" " * 8
    data[148:156] = b"%06o\0 " % sum(data[:512])
    path.write_bytes(data)
    return path


class TestRefusing:
    @pytest.mark.parametrize(
        ("kind", "what"),
        [
            (tarfile.LNKTYPE, "is a hard link, which holds no data; re-create the tar with --hard-dereference"),
            (tarfile.SYMTYPE, "is a symbolic link, which holds no data; re-create the tar with --dereference"),
            (tarfile.CHRTYPE, "is a character device"),
            (tarfile.BLKTYPE, "is a block device"),
            (tarfile.FIFOTYPE, "is a named pipe"),
            (tarfile.GNUTYPE_SPARSE, "is stored sparsely"),
            (b"M", "continues another volume"),
            (b"Q", "unknown kind b'Q'"),
        ],
    )
    def test_what_is_no_file(self, tmp_path: Path, kind: bytes, what: str) -> None:
        path = entry(tmp_path / "x.tar", "0001.txt", kind, "0000.txt")
        with pytest.raises(ShardError, match=rf"x\.tar: member '0001\.txt' .*{what}"):
            list(members(path))

    @pytest.mark.parametrize(
        ("name", "what"),
        [("../up.txt", "points out"), ("a/../../b.txt", "points out"), ("/etc/x.txt", "has an absolute path")],
    )
    def test_dangerous_names(self, tmp_path: Path, name: str, what: str) -> None:
        path = write_tar(tmp_path / "x.tar", {name: b""}, format=tarfile.GNU_FORMAT)
        with pytest.raises(ShardError, match=f"x.tar: member '{name}' {what}.*relative names"):
            list(members(path))

    def test_sparse_members_of_pax(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("GNUSparseFile.0/a.bin")
            info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.name": "a.bin"}
            tar.addfile(info)
        with pytest.raises(ShardError, match=r"member 'a.bin' is stored sparsely"):
            list(members(path))

    @pytest.mark.parametrize("method", [gzip.compress, lambda data: b"\x28\xb5\x2f\xfd" + data])
    def test_compressed_tars(self, tmp_path: Path, method: Callable[[bytes], bytes]) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"abc"})
        path.write_bytes(method(path.read_bytes()))
        with pytest.raises(ShardError, match=r"x.tar is compressed with (gzip|zstd).*Decompress it to a plain .tar"):
            list(members(path))

    def test_no_tar_at_all(self, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        path.write_bytes(b"\1\2\3" * 400)
        with pytest.raises(ShardError, match=r"x.tar is damaged: no tar header at byte 0"):
            list(members(path))
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" * 20)
        with pytest.raises(ShardError, match=r"x.tar is a pointer of Git LFS, not a tar; fetch the file itself"):
            list(members(path))
        path.write_bytes(b"")
        with pytest.raises(ShardError, match=r"x.tar is empty, which is not a valid tar"):
            list(members(path))

    def test_damage_in_the_middle(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"abc", "b.txt": b"abc"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[1024 + 10] ^= 1
        path.write_bytes(data)
        with pytest.raises(ShardError, match=r"no tar header at byte 1,024"):
            list(members(path))

    def test_more_after_the_end(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"abc"})
        path.write_bytes(2 * path.read_bytes())
        with pytest.raises(ShardError, match=r"continues after its end mark \(byte 1,024\).*tar --concatenate"):
            list(members(path))

    @pytest.mark.parametrize("size", [b"\xff" * 12, b"77777777777z", b"-0000000003\0"])
    def test_impossible_sizes(self, tmp_path: Path, size: bytes) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"abc"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[124:136] = size
        with pytest.raises(ShardError, match=r"member 'a.txt' has an impossible size"):
            list(members(resealed(path, data)))

    @pytest.mark.parametrize("records", [b"junk", b"99 path=x\n", b"5 path=x\n", b"0 =\n"])
    def test_damaged_pax_records(self, tmp_path: Path, records: bytes) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": records}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[156:157] = b"x"
        with pytest.raises(ShardError, match=r"member 'a.txt' has a damaged extended header"):
            list(members(resealed(path, data)))

    def test_pax_sizes_that_are_none(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"pax": b"12 size=abc\n", "a.txt": b"abc"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[156:157] = b"x"
        with pytest.raises(ShardError, match=r"member 'a.txt' has the size 'abc'"):
            list(members(resealed(path, data)))

    def test_an_endless_name(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"x"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[156:157], data[124:136] = b"L", b"%011o\0" % (1 << 30)
        with pytest.raises(ShardError, match=r"member 'a.txt' has an extended header of 1,073,741,824 bytes"):
            list(members(resealed(path, data)))

    @pytest.mark.parametrize("digits", [21, 4299, 5000])
    def test_pax_sizes_of_too_many_digits(self, tmp_path: Path, digits: int) -> None:
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
            info = tarfile.TarInfo("a.txt")
            info.pax_headers = {"size": "9" * digits}
            tar.addfile(info)
        with pytest.raises(
            ShardError, match=rf"x.tar: member 'a.txt' has a size of {digits:,} digits; re-create the tar$"
        ):
            list(members(path))

    @settings(deadline=None, max_examples=150)
    @given(st.integers(0, 4095), st.binary(min_size=1, max_size=30))
    def test_any_damage_is_reported_or_harmless(
        self, tmp_path_factory: pytest.TempPathFactory, at: int, garbage: bytes
    ) -> None:
        path = write_tar(
            tmp_path_factory.getbasetemp() / "damaged.tar",
            {LONG: b"abc", "b.txt": b"x" * 600},
            format=tarfile.PAX_FORMAT,
        )
        data = bytearray(path.read_bytes())
        data[at : at + len(garbage)] = garbage
        path.write_bytes(data)
        try:
            found = list(members(path))
        except ShardError:
            return
        assert all(0 <= start <= start + size <= len(data) for _, start, size in found)


class TestTruncation:
    """A tar of two members of 700 bytes: headers at 0 and 1,536, the end at 3,072."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        return write_tar(tmp_path / "x.tar", {"a.txt": b"1" * 700, "b.txt": b"2" * 700}, format=tarfile.GNU_FORMAT)

    @pytest.mark.parametrize("nbytes", [3072, 3072 + 100, 3072 + 512])
    def test_without_an_end_mark_all_is_there(self, path: Path, nbytes: int) -> None:
        path.write_bytes(path.read_bytes()[:nbytes])
        assert [name for name, *_ in members(path)] == ["a.txt", "b.txt"]

    @pytest.mark.parametrize(
        ("nbytes", "member", "kept"),
        [
            (2748, "b.txt", ["a.txt", "b.txt"]),
            (2700, "b.txt", ["a.txt"]),
            (1300, "a.txt", ["a.txt"]),
            (1600, "after a.txt", ["a.txt"]),
            (800, "a.txt", []),
            (100, "after", []),
        ],
    )
    def test_in_the_middle(self, path: Path, nbytes: int, member: str, kept: list[str]) -> None:
        path.write_bytes(path.read_bytes()[:nbytes])
        with pytest.raises(ShardError, match=f"x.tar is truncated: member '{member}.*allow_truncated=True"):
            list(members(path))
        assert [name for name, *_ in members(path, allow_truncated=True)] == kept

    @pytest.mark.parametrize("form", ["pax", "gnu"])
    @pytest.mark.parametrize("end", [b"", bytes(1024)])
    def test_after_the_header_of_a_long_name(self, tmp_path: Path, form: str, end: bytes) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"1", LONG: b"2"}, format=FORMATS[form])
        path.write_bytes(path.read_bytes()[:2048] + end)
        with pytest.raises(ShardError, match=r"x.tar is truncated: member 'after a.txt' ends at byte 2,560, .* 2,048"):
            list(members(path))
        assert [name for name, *_ in members(path, allow_truncated=True)] == ["a.txt"]

    def test_a_global_header_may_be_the_last(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", {"a.txt": b"1", "b.txt": b"9 note=b\n"}, format=tarfile.GNU_FORMAT)
        data = bytearray(path.read_bytes())
        data[1024 + 156 : 1024 + 157] = b"g"
        block = resealed(tmp_path / "block", data[1024:2048]).read_bytes()
        path.write_bytes(data[:1024] + block + data[2048:])
        assert contents(path) == {"a.txt": b"1"}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("0001.jpg", ("0001", "jpg")),
        ("train/0001.seg.PNG", ("train/0001", "seg.png")),
        ("./a.b/0001.json", ("./a.b/0001", "json")),
        ("README", None),
        ("0001.", None),
        ("dir/.hidden.jpg", None),
        ("._0001.jpg", None),
        ("__index__/0001.jpg", None),
        ("__meta__", None),
        ("__a__b.jpg", ("__a__b", "jpg")),
    ],
)
def test_names_are_split_as_webdataset_does(name: str, place: tuple[str, str] | None) -> None:
    assert split(name) == place


def test_a_member_has_its_offset(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", {"a.txt": b"abc"}, format=tarfile.GNU_FORMAT)
    assert list(members(str(path))) == [TarMember("a.txt", 512, 3)]
