"""Records and texts in a store: what is special to their indexes, their compression and their damage."""

from __future__ import annotations

import json
import logging
import os
import pickle
import struct
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest
from format_cases import equal, hidden
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rounds import rounds

import feedline as fl
from feedline.datasets import CSV, JSONL, MDS, Lines, LitData, TFRecord, file_objects
from feedline.errors import SampleError, StateError
from feedline.stores import Cache, CacheWarning, ObjectNotFoundError, StoreError
from feedline.stores.local import RECHECK_S
from formats.places import Memory
from formats.records import FORMATS

FRESH = [HealthCheck.function_scoped_fixture]


def filled(memory: Memory, folder: Path, name: str) -> Any:
    """Function that opens the dataset from files that are both in the folder and in the store."""
    FORMATS[name].write(folder)
    memory.put(folder)
    return FORMATS[name].open


def asked(memory: Memory, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of objects of which bytes were fetched so far."""
    names: list[str] = []
    fetch = type(memory.system).cat_file

    def noting(system: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        names.append(path.rpartition("/")[2])
        return fetch(system, path, start, end, **more)

    monkeypatch.setattr(type(memory.system), "cat_file", noting)
    return names


def outcome(kind: Any, path: Any) -> Any:
    """All samples, or the kind of error."""
    try:
        return all_of(kind(path))
    except SampleError:
        return SampleError


def all_of(dataset: Any) -> list[Any]:
    return [dataset[i] for i in range(len(dataset))]


def records(payloads: Sequence[bytes]) -> bytes:
    """A TFRecord file."""
    heads = [struct.pack("<Q", len(payload)) for payload in payloads]
    return b"".join(h + masked(h) + payload + masked(payload) for h, payload in zip(heads, payloads, strict=True))


def masked(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


class TestParts:
    @settings(suppress_health_check=FRESH, max_examples=30)
    @given(payloads=st.lists(st.binary(max_size=30), max_size=8), part=st.integers(1, 40))
    def test_records_are_found_however_they_come(
        self, memory: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch, payloads: list[bytes], part: int
    ) -> None:
        monkeypatch.setattr(file_objects, "_PART_NBYTES", part)
        memory.write("a.tfrecord", records(payloads))
        assert all_of(TFRecord(f"{memory.root}/a.tfrecord", decode="bytes")) == payloads

    @settings(suppress_health_check=FRESH, max_examples=rounds(25, 60))
    @given(
        text=st.text(st.sampled_from('aé," \r\n'), max_size=40),
        bom=st.booleans(),
        part=st.integers(3, 9),
    )
    def test_texts_are_cut_alike_however_they_come(
        self, memory: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, bom: bool, part: int
    ) -> None:
        data = b"\xef\xbb\xbf" * bom + text.encode()
        monkeypatch.setattr(file_objects, "_PART_NBYTES", part)
        for name, kind in (("t.txt", Lines), ("t.jsonl", Lines), ("t.csv", CSV)):
            (folder / name).write_bytes(data)
            memory.write(name, data)
            for index in folder.glob("*-index"):
                index.unlink()
            assert outcome(kind, f"{memory.root}/{name}") == outcome(kind, folder / name)
        lines = text.split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        found = Lines(f"{memory.root}/t.txt")
        assert [found[i] for i in range(len(found))] == [line.removesuffix("\r") for line in lines]
        assert len(JSONL(f"{memory.root}/t.jsonl")) == sum(bool(line.strip()) for line in lines)


class TestRequests:
    def test_a_shard_that_changed_is_looked_at_again(
        self, memory: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = filled(memory, folder, "mds")
        opened(memory.root)
        memory.write("shard.00001.mds", memory.read("shard.00001.mds"))
        names = asked(memory, monkeypatch)
        opened(memory.root)
        assert sorted(names) == ["index.json", "shard.00001.mds"]

    def test_many_objects_are_listed_and_not_looked_up(
        self, memory: Memory, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = filled(memory, folder, "mds")
        shard, reported = memory.read("shard.00000.mds"), json.loads(memory.read("index.json"))
        first = reported["shards"][0]
        reported["shards"] = []
        for number in range(70):
            name = f"s.{number}"
            memory.write(name, shard)
            reported["shards"].append({**first, "raw_data": {**first["raw_data"], "basename": name}})
        memory.write("index.json", json.dumps(reported).encode())
        infos: list[str] = []
        info = type(memory.system).info

        def noting(system: Any, path: str, **more: Any) -> Any:
            infos.append(path)
            return info(system, path, **more)

        monkeypatch.setattr("feedline.datasets.shards.files.ObjectEnds._learn", lambda *_: None)
        monkeypatch.setattr(type(memory.system), "info", noting)
        assert len(opened(memory.root)) == 70 * first["samples"]
        assert len(infos) < 10
        memory.remove("s.69")
        with pytest.raises(
            ObjectNotFoundError, match=r"memory://far/s\.69 does not exist, but index.json lists it for 2 samples"
        ):
            opened(memory.root)


class TestCompressed:
    @pytest.mark.parametrize(("case", "codec"), [("mds, zstd", "mds"), ("litdata, chunks", "litdata")])
    def test_shards_are_decompressed_once_for_all(
        self, memory: Memory, folder: Path, tmp_path: Path, case: str, codec: str
    ) -> None:
        opened = filled(memory, folder, case)
        far = opened(memory.root, cache=tmp_path / "cache")
        assert equal([far[i] for i in range(len(far))], [opened(folder)[i] for i in range(len(far))])
        memory.system.rm("/far", recursive=True)
        with hidden("cramjam"):
            again = pickle.loads(pickle.dumps(far))
            assert equal(again.__getitems__([0, 7, -1]), far.__getitems__([0, 7, -1]))
        assert again.ranges(np.arange(3)) == []

    def test_the_plain_shard_is_preferred(self, memory: Memory, folder: Path) -> None:
        filled(memory, folder, "mds, zstd")
        for shard in json.loads(memory.read("index.json"))["shards"]:
            data = fl.datasets.compression.inflate(
                np.frombuffer(memory.read(shard["zip_data"]["basename"]), np.uint8),
                *("zstd", shard["raw_data"]["bytes"], "", "mds"),
            )
            memory.write(shard["raw_data"]["basename"], data.tobytes())
        with hidden("cramjam"):
            assert MDS(memory.root, columns=["int"])[9] == {"int": 9}

    def test_hashes_are_compared(self, memory: Memory, folder: Path) -> None:
        filled(memory, folder, "mds, zstd")
        reported = json.loads(memory.read("index.json"))
        reported["shards"][0]["raw_data"]["hashes"]["sha1"] = "0" * 40
        memory.write("index.json", json.dumps(reported).encode())
        with pytest.raises(
            SampleError, match=r"memory://.*shard.00000.mds.zstd is damaged: its sha1 is \w+, its index"
        ):
            MDS(memory.root, columns=["int"])[0]
        with pytest.raises(SampleError, match=r"its sha1 is"):
            MDS(memory.root, columns=["int"], check_hashes=True)

    def test_a_cache_without_room_says_so(self, memory: Memory, folder: Path, tmp_path: Path) -> None:
        filled(memory, folder, "mds, zstd")
        with pytest.warns(
            CacheWarning, match=r"take \d\d,\d+ bytes, but the cache in .* keeps 20,000: .*ShardShuffled"
        ):
            far = MDS(memory.root, columns=["int"], cache=Cache(tmp_path / "cache", 20_000, 5000))
        assert [far[i]["int"] for i in range(len(far))] == list(range(len(far)))
        with pytest.warns(CacheWarning):
            far = MDS(folder, columns=["int"], cache=Cache(tmp_path / "tiny", 100))
        with pytest.raises(
            StoreError,
            match=r"shard.00000.mds.zstd cannot be kept decompressed in .*the limit .* pass cache=, a folder",
        ):
            far[0]


class TestFolders:
    def test_folders_follow_one_another(self, memory: Memory, folder: Path) -> None:
        filled(memory, folder, "mds")
        both = MDS([folder, memory.root], columns=["int"])
        assert [both[i]["int"] for i in (0, 19, 20, 39)] == [0, 19, 0, 19]
        assert [sample["int"] for sample in both.__getitems__([25, 5])] == [5, 5]
        assert both.paths == [str(folder), memory.root]

    @pytest.mark.parametrize("far", [False, True])
    def test_a_merged_index_names_files_in_sub_folders(self, memory: Memory, folder: Path, far: bool) -> None:
        FORMATS["mds"].write(folder / "a/b")
        reported = json.loads((folder / "a/b/index.json").read_text())
        for shard in reported["shards"]:
            shard["raw_data"]["basename"] = f"a/b/{shard['raw_data']['basename']}"
        (folder / "index.json").write_text(json.dumps(reported))
        memory.put(folder)
        assert MDS(memory.root if far else folder, columns=["int"])[13] == {"int": 13}

    def test_hashes_of_objects_on_demand(self, memory: Memory, folder: Path) -> None:
        FORMATS["mds"].write(folder)
        memory.put(folder)
        assert len(MDS(memory.root, check_hashes=True)) == 20


class TestIndexes:
    @pytest.mark.parametrize(
        ("kind", "name", "rows"),
        [
            (partial(TFRecord, decode="bytes"), "a.tfrecord", records),
            (Lines, "a.txt", b"\n".join),
            (JSONL, "a.jsonl", lambda rows: b"\n".join(b'"%s"' % row for row in rows)),
            (CSV, "a.csv", lambda rows: b"\n".join([b"x", *rows])),
            (CSV, "a.csv", lambda rows: b"\r\n".join([b"x", *(b'"%s""\r\n"' % row for row in rows)])),
        ],
    )
    def test_one_next_to_an_object_is_used_if_it_fits(
        self, memory: Memory, folder: Path, caplog: pytest.LogCaptureFixture, kind: Any, name: str, rows: Any
    ) -> None:
        several = [b"a" * length for length in range(1, 50)]
        (folder / name).write_bytes(rows(several))
        near = kind(folder / name)  # writes its index
        memory.put(folder)
        with caplog.at_level(logging.INFO, "feedline"):
            assert equal(outcome(kind, f"{memory.root}/{name}"), [near[i] for i in range(49)])
            assert caplog.messages == []
            memory.write(name, rows(several[::-1]))
            assert equal(outcome(kind, f"{memory.root}/{name}"), [near[i] for i in range(49)][::-1])
            assert len(caplog.messages) == 1

    def test_building_one_is_reported_and_can_be_kept_elsewhere(
        self, memory: Memory, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory.write("a.jsonl", b"1\n2\n")
        with caplog.at_level(logging.INFO, "feedline"):
            JSONL(f"{memory.root}/a.jsonl", index_dir=tmp_path / "indexes")
        (reported,) = caplog.messages
        assert reported.startswith("indexing memory://far/a.jsonl: all its 4 bytes are read once")
        assert ".a.jsonl.jsonl-index" in reported
        assert [path.name[16:] for path in (tmp_path / "indexes").iterdir()] == ["-a.jsonl.jsonl-index"]
        assert not (tmp_path / "xdg/feedline/indexes").exists()

    def test_rubbish_next_to_an_object_is_passed_over(self, memory: Memory, folder: Path) -> None:
        memory.write("a.txt", b"one\ntwo\n")
        memory.write(".a.txt.lines-index", b"feedline arrays\n no, not at all")
        assert Lines(f"{memory.root}/a.txt")[1] == "two"


@pytest.mark.parametrize("case", ["mds", "litdata", "litdata, rows", "litdata, batches", "litdata, tokens"])
def test_a_shard_that_is_cut_short_while_it_is_read(folder: Path, case: str) -> None:
    """An access to a truncated page would kill the process."""
    FORMATS[case].write(folder)
    dataset = FORMATS[case].open(str(folder))
    dataset[0]
    for shard in folder.glob("*0.[bm]*"):
        os.truncate(shard, 0)
    time.sleep(2 * RECHECK_S)
    for read in (lambda: dataset[1], lambda: dataset.__getitems__([0, 2])):
        with pytest.raises(StateError, match=r"has changed since this dataset was made"):
            read()


class TestTrouble:
    @pytest.mark.parametrize(
        ("case", "name", "at", "message"),
        [
            ("mds", "shard.00000.mds", 0, r"/shard.00000.mds is damaged: it does not hold the \d+ samples"),
            ("litdata", "chunk-0-0.bin", 0, r"/chunk-0-0.bin is damaged: it does not hold the 8 samples"),
            ("litdata, batches", "chunk-0-0.bin", 8, r"/chunk-0-0.bin is damaged: it does not hold the 8 samples"),
            ("litdata, batches", "chunk-0-0.bin", 12, r"/chunk-0-0.bin is truncated within its header"),
            ("litdata, batches", "chunk-0-0.bin", 80, r"frame 0 of memory://\S+/chunk-0-0.bin claims"),
            ("litdata, many rows", "chunk-0.bin", -12, r"/chunk-0.bin has no valid Arrow file at its end"),
            ("litdata, many rows", "chunk-0.bin", -22, r"/chunk-0.bin has no valid Arrow file at its end"),
            ("litdata, many rows", "chunk-0.bin", -1, r"/chunk-0.bin is damaged: it does not hold the 400 samples"),
            ("litdata, many rows", "chunk-0.bin", 1700, r"/chunk-0.bin has no valid Arrow file at its end"),
        ],
    )
    def test_damaged_heads_are_named(
        self, memory: Memory, folder: Path, case: str, name: str, at: int, message: str
    ) -> None:
        opened = filled(memory, folder, case)
        data = bytearray(memory.read(name))
        for near in range(at % len(data), min(at % len(data) + 4, len(data))):
            data[near] ^= 0xFF
        memory.write(name, bytes(data))
        with pytest.raises(SampleError, match=message):
            opened(memory.root)[0]

    def test_no_dataset_at_an_address(self, memory: Memory, folder: Path) -> None:
        for kind, what in ((MDS, "MDS data set"), (LitData, "LitData set")):
            with pytest.raises(ObjectNotFoundError, match=rf"no {what}: memory://far/index.json does not exist"):
                kind(memory.root)
        with pytest.raises(ObjectNotFoundError, match=r"memory://far"):
            TFRecord(memory.root)

    def test_a_line_in_trouble_is_named_without_reading_what_is_before_it(self, memory: Memory, folder: Path) -> None:
        memory.write("a.jsonl", b"1\n\n{\n")
        memory.write("a.csv", b"x\n1\n?\n")
        with pytest.raises(SampleError, match=r"memory://far/a.jsonl, the line at byte 3, is not JSON"):
            JSONL(f"{memory.root}/a.jsonl")[1]
        with pytest.raises(SampleError, match=r"a.csv, the line at byte 4, column 'x': cannot convert '\?' to int"):
            CSV(f"{memory.root}/a.csv", {"x": int})[1]

    def test_an_index_that_cannot_be_kept_is_worked_out_again(
        self, memory: Memory, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = filled(memory, folder, "mds")
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.warns(RuntimeWarning, match="could not be written"):
            far = opened(memory.root)
        assert equal(far[3], pickle.loads(pickle.dumps(far))[3])
