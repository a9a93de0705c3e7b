"""MDS, LitData, TFRecord and texts in a store: the same samples as on the disk, by few requests."""

from __future__ import annotations

import json
import logging
import pickle
import struct
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import google_crc32c
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feedline as fl
from feedline.datasets import CSV, JSONL, MDS, Lines, LitData, TFRecord, streams
from feedline.errors import SampleError
from feedline.stores import Cache, CacheWarning, ObjectChangedError, ObjectNotFoundError, StoreError
from format_cases import all_ways_agree, equal, hidden
from record_cases import CASES, order

FRESH = [HealthCheck.function_scoped_fixture]


class Place:
    """A folder, and the same files in a store in memory."""

    address = "memory://bucket/data"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.system = fsspec.filesystem("memory")

    def upload(self) -> None:
        for path in self.folder.rglob("*"):
            if path.is_file():
                self.put(str(path.relative_to(self.folder)), path.read_bytes())

    def put(self, name: str, data: bytes) -> None:
        self.system.pipe(f"/bucket/data/{name}", data)

    def get(self, name: str) -> bytes:
        found: bytes = self.system.cat(f"/bucket/data/{name}")
        return found

    def rm(self, name: str) -> None:
        self.system.rm(f"/bucket/data/{name}")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    made = Place(tmp_path / "data")
    made.folder.mkdir()
    made.system.pipe("/bucket/other", b"")
    yield made
    made.system.rm("/bucket", recursive=True)


def filled(place: Place, case: str) -> Any:
    """What opens the dataset whose files now lie in the folder and in the store."""
    write, opened = CASES[case]
    write(place.folder)
    place.upload()
    return opened


def asked(place: Place, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of objects of which bytes were fetched, as it goes on."""
    names: list[str] = []
    fetch = type(place.system).cat_file

    def noting(system: Any, path: str, start: Any = None, end: Any = None, **more: Any) -> Any:
        names.append(path.rpartition("/")[2])
        return fetch(system, path, start, end, **more)

    monkeypatch.setattr(type(place.system), "cat_file", noting)
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


class TestEqual:
    @pytest.mark.parametrize("cached", [False, True])
    @pytest.mark.parametrize("case", CASES)
    def test_samples_and_batches_are_those_of_the_files(
        self, place: Place, tmp_path: Path, case: str, cached: bool
    ) -> None:
        opened = filled(place, case)
        cache = {"cache": Cache(tmp_path / "cache", "100 MB", 5000)} if cached else {}
        near, far = opened(place.folder), opened(place.address, **cache)
        indices = order(near)
        assert far.shard_sizes.tolist() == near.shard_sizes.tolist()
        if "pictures" not in case:
            assert equal([far[i] for i in indices], [near[i] for i in indices])
            all_ways_agree(far, indices)
        for seed in (None, 3):
            batches = []
            for dataset in (near, far, pickle.loads(pickle.dumps(far))):
                torch.manual_seed(5)
                loader = fl.DataLoader(dataset, 5, sampler=[i % len(near) for i in indices], seed=seed, drop_last=True)
                if not equal(near[0], near[1]) and not isinstance(near[0], torch.Tensor):
                    loader = fl.DataLoader(
                        dataset, 5, sampler=[i % len(near) for i in indices], seed=seed, collate_fn=list
                    )
                with loader:
                    batches.append(list(loader))
            assert equal(batches[1], batches[0])
            assert equal(batches[2], batches[0])

    @pytest.mark.parametrize("case", ["mds, pictures", "litdata, pictures", "tfrecord, pictures"])
    def test_batches_of_pictures_are_gathered(self, place: Place, case: str) -> None:
        opened = filled(place, case)
        near, far = opened(place.folder), opened(place.address)
        keys = np.arange(7, dtype=np.uint64)
        indices = np.array([7, 0, 3, 3, -1, 5, 6])
        ours, theirs = (each.gather(indices, fl.rows.torch_empty, keys) for each in (far, near))
        assert equal(ours, theirs)
        image = ours["jpeg" if "mds" in case else "image"]
        assert image.shape == (7, 3, 6, 6)
        assert not torch.equal(image[2], image[3])

    @settings(suppress_health_check=FRESH, max_examples=30)
    @given(payloads=st.lists(st.binary(max_size=30), max_size=8), part=st.integers(1, 40))
    def test_records_are_found_however_they_come(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, payloads: list[bytes], part: int
    ) -> None:
        monkeypatch.setattr(streams, "_PART_NBYTES", part)
        place.put("a.tfrecord", records(payloads))
        assert all_of(TFRecord(f"{place.address}/a.tfrecord", decode="bytes")) == payloads

    @settings(suppress_health_check=FRESH, max_examples=60)
    @given(
        text=st.text(st.sampled_from('aé," \r\n'), max_size=40),
        bom=st.booleans(),
        part=st.integers(3, 9),
    )
    def test_texts_are_cut_alike_however_they_come(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, text: str, bom: bool, part: int
    ) -> None:
        data = b"\xef\xbb\xbf" * bom + text.encode()
        monkeypatch.setattr(streams, "_PART_NBYTES", part)
        for name, kind in (("t.txt", Lines), ("t.jsonl", Lines), ("t.csv", CSV)):
            (place.folder / name).write_bytes(data)
            place.put(name, data)
            for index in place.folder.glob("*-index"):
                index.unlink()
            assert outcome(kind, f"{place.address}/{name}") == outcome(kind, place.folder / name)
        lines = text.split("\n")
        lines = lines[:-1] if lines[-1] == "" else lines
        found = Lines(f"{place.address}/t.txt")
        assert [found[i] for i in range(len(found))] == [line.removesuffix("\r") for line in lines]
        assert len(JSONL(f"{place.address}/t.jsonl")) == sum(bool(line.strip()) for line in lines)


class TestRequests:
    @pytest.mark.parametrize("case", ["mds", "litdata", "tfrecord", "lines"])
    def test_the_shards_of_a_batch_are_read_at_once(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, case: str
    ) -> None:
        far = filled(place, case)(place.address)
        first = [0, int(far.shard_sizes[0])]
        far.__getitems__(first)  # all that is read only once
        meeting = threading.Barrier(2, timeout=30)
        fetch = type(place.system).cat_file

        def met(*arguments: Any, **more: Any) -> Any:
            meeting.wait()  # nobody gets anything before both have asked
            return fetch(*arguments, **more)

        monkeypatch.setattr(type(place.system), "cat_file", met)
        assert len(far.__getitems__(first)) == 2

    @pytest.mark.parametrize("case", CASES)
    def test_what_is_wanted_is_all_that_is_read(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
    ) -> None:
        opened = filled(place, case)
        assert opened(place.address).wants(np.array([0, -1])) == []
        far = opened(place.address, cache=Cache(tmp_path / "cache", "100 MB", 64))
        indices = np.array([0, len(far) // 2, -1])
        wants = far.wants(indices)
        assert wants
        for store, (path, start, stop) in wants:
            store.fill(path, start, stop)
        names = asked(place, monkeypatch)
        far.__getitems__(indices.tolist())
        assert names == []

    @pytest.mark.parametrize("case", CASES)
    def test_what_was_learned_of_the_shards_is_kept(
        self, place: Place, monkeypatch: pytest.MonkeyPatch, case: str
    ) -> None:
        opened = filled(place, case)
        sample = opened(place.address)[0]
        names = asked(place, monkeypatch)
        far = opened(place.address)
        assert set(names) <= {"index.json"}
        if "pictures" not in case:
            assert equal(far[0], sample)

    def test_a_shard_that_changed_is_looked_at_anew(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = filled(place, "mds")
        opened(place.address)
        place.put("shard.00001.mds", place.get("shard.00001.mds"))
        names = asked(place, monkeypatch)
        opened(place.address)
        assert sorted(names) == ["index.json", "shard.00001.mds"]

    def test_many_objects_are_listed_not_asked_for(self, place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
        opened = filled(place, "mds")
        shard, told = place.get("shard.00000.mds"), json.loads(place.get("index.json"))
        first = told["shards"][0]
        told["shards"] = []
        for number in range(70):
            name = f"s.{number}"
            place.put(name, shard)
            told["shards"].append({**first, "raw_data": {**first["raw_data"], "basename": name}})
        place.put("index.json", json.dumps(told).encode())
        infos: list[str] = []
        info = type(place.system).info

        def noting(system: Any, path: str, **more: Any) -> Any:
            infos.append(path)
            return info(system, path, **more)

        monkeypatch.setattr("feedline.datasets.shard_ends.ObjectEnds._learn", lambda self: None)
        monkeypatch.setattr(type(place.system), "info", noting)
        assert len(opened(place.address)) == 70 * first["samples"]
        assert len(infos) < 10
        place.rm("s.69")
        with pytest.raises(ObjectNotFoundError, match=r"memory://bucket/data/s\.69: "):
            opened(place.address)


class TestCompressed:
    @pytest.mark.parametrize(("case", "codec"), [("mds, zstd", "mds"), ("litdata, chunks", "litdata")])
    def test_shards_are_decompressed_once_for_all(self, place: Place, tmp_path: Path, case: str, codec: str) -> None:
        opened = filled(place, case)
        far = opened(place.address, cache=tmp_path / "cache")
        assert equal([far[i] for i in range(len(far))], [opened(place.folder)[i] for i in range(len(far))])
        place.system.rm("/bucket/data", recursive=True)
        with hidden("cramjam"):
            again = pickle.loads(pickle.dumps(far))
            assert equal(again.__getitems__([0, 7, -1]), far.__getitems__([0, 7, -1]))
        assert again.wants(np.arange(3)) == []

    def test_the_plain_shard_is_preferred(self, place: Place) -> None:
        filled(place, "mds, zstd")
        for shard in json.loads(place.get("index.json"))["shards"]:
            data = fl.datasets.inflating.inflated(
                np.frombuffer(place.get(shard["zip_data"]["basename"]), np.uint8),
                *("zstd", shard["raw_data"]["bytes"], "", "mds"),
            )
            place.put(shard["raw_data"]["basename"], data.tobytes())
        with hidden("cramjam"):
            assert MDS(place.address, columns=["int"])[9] == {"int": 9}

    def test_hashes_are_compared(self, place: Place) -> None:
        filled(place, "mds, zstd")
        told = json.loads(place.get("index.json"))
        told["shards"][0]["raw_data"]["hashes"]["sha1"] = "0" * 40
        place.put("index.json", json.dumps(told).encode())
        with pytest.raises(
            SampleError, match=r"memory://.*shard.00000.mds.zstd is damaged: its sha1 is \w+, its index"
        ):
            MDS(place.address, columns=["int"])[0]
        with pytest.raises(SampleError, match=r"its sha1 is"):
            MDS(place.address, columns=["int"], check_hashes=True)

    def test_a_cache_without_room_says_so(self, place: Place, tmp_path: Path) -> None:
        filled(place, "mds, zstd")
        with pytest.warns(
            CacheWarning, match=r"take \d\d,\d+ bytes, and the cache in .* keeps 20,000: .*ShardShuffled"
        ):
            far = MDS(place.address, columns=["int"], cache=Cache(tmp_path / "cache", 20_000, 5000))
        assert [far[i]["int"] for i in range(len(far))] == list(range(len(far)))
        with pytest.warns(CacheWarning):
            far = MDS(place.folder, columns=["int"], cache=Cache(tmp_path / "tiny", 100))
        with pytest.raises(
            StoreError, match=r"shard.00000.mds.zstd makes [\d,]+ bytes .* give cache= a folder with more"
        ):
            far[0]


class TestFolders:
    def test_folders_follow_one_another(self, place: Place) -> None:
        filled(place, "mds")
        both = MDS([place.folder, place.address], columns=["int"])
        assert [both[i]["int"] for i in (0, 19, 20, 39)] == [0, 19, 0, 19]
        assert [sample["int"] for sample in both.__getitems__([25, 5])] == [5, 5]
        assert both.paths == [str(place.folder), place.address]

    @pytest.mark.parametrize("far", [False, True])
    def test_a_merged_index_names_files_in_sub_folders(self, place: Place, far: bool) -> None:
        CASES["mds"][0](place.folder / "a/b")
        told = json.loads((place.folder / "a/b/index.json").read_text())
        for shard in told["shards"]:
            shard["raw_data"]["basename"] = f"a/b/{shard['raw_data']['basename']}"
        (place.folder / "index.json").write_text(json.dumps(told))
        place.upload()
        assert MDS(place.address if far else place.folder, columns=["int"])[13] == {"int": 13}

    def test_hashes_of_objects_on_demand(self, place: Place) -> None:
        CASES["mds"][0](place.folder)
        place.upload()
        assert len(MDS(place.address, check_hashes=True)) == 20


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
    def test_one_that_lies_beside_an_object_is_used_if_it_fits(
        self, place: Place, caplog: pytest.LogCaptureFixture, kind: Any, name: str, rows: Any
    ) -> None:
        several = [b"a" * length for length in range(1, 50)]
        (place.folder / name).write_bytes(rows(several))
        near = kind(place.folder / name)  # writes its index
        place.upload()
        with caplog.at_level(logging.INFO, "feedline"):
            assert equal(outcome(kind, f"{place.address}/{name}"), [near[i] for i in range(49)])
            assert caplog.messages == []
            place.put(name, rows(several[::-1]))
            assert equal(outcome(kind, f"{place.address}/{name}"), [near[i] for i in range(49)][::-1])
            assert len(caplog.messages) == 1

    def test_building_one_is_told_and_can_be_kept_elsewhere(
        self, place: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        place.put("a.jsonl", b"1\n2\n")
        with caplog.at_level(logging.INFO, "feedline"):
            JSONL(f"{place.address}/a.jsonl", index=tmp_path / "indexes")
        (told,) = caplog.messages
        assert told.startswith("indexing memory://bucket/data/a.jsonl: all its 4 bytes are read once")
        assert "a.jsonl.jsonl-index" in told
        assert [path.name[12:] for path in (tmp_path / "indexes").iterdir()] == ["-a.jsonl.jsonl-index"]
        assert not (tmp_path / "xdg/feedline/indexes").exists()

    def test_rubbish_beside_an_object_is_passed_over(self, place: Place) -> None:
        place.put("a.txt", b"one\ntwo\n")
        place.put("a.txt.lines-index", b"feedline arrays\n no, not at all")
        assert Lines(f"{place.address}/a.txt")[1] == "two"


class TestTrouble:
    @pytest.mark.parametrize("case", CASES)
    def test_an_object_that_changed_or_went_is_named(self, place: Place, case: str) -> None:
        opened = filled(place, case)
        far = opened(place.address)
        for path in place.system.find("/bucket/data"):
            place.system.pipe(path, place.system.cat(path) + b"more")
        with pytest.raises(
            ObjectChangedError, match=r"memory://bucket/data/\S+ changed: version .* Make the dataset anew"
        ):
            far[0]
        place.system.rm("/bucket/data", recursive=True)
        with pytest.raises(ObjectNotFoundError, match=r"memory://bucket/data/\S+"):
            far.__getitems__([0])
        with pytest.raises(ObjectNotFoundError, match=r"memory://bucket/data"):
            opened(place.address)

    @pytest.mark.parametrize(
        ("case", "name", "message"),
        [
            ("mds", "shard.00001.mds", r"shard.00001.mds has \d+ bytes, its index promises \d+; copy it again"),
            ("litdata", "chunk-0-1.bin", r"chunk-0-1.bin has \d+ bytes, its index promises \d+; copy it again"),
            ("litdata, tokens", "chunk-0-1.bin", r"chunk-0-1.bin has \d+ bytes, its index promises"),
            ("mds, zstd", "shard.00001.mds.zstd", r"shard.00001.mds.zstd cannot be decompressed to \d+ bytes"),
            ("litdata, chunks", "chunk-0-1.zstd.bin", r"chunk-0-1.zstd.bin cannot be decompressed to \d+ bytes"),
            ("tfrecord", "two.tfrecord", r"record \d+ of memory://\S+two.tfrecord, .* was the file copied whole"),
        ],
    )
    def test_a_truncated_object_is_named(self, place: Place, case: str, name: str, message: str) -> None:
        opened = filled(place, case)
        place.put(name, place.get(name)[:-7])
        with pytest.raises(SampleError, match=message):
            all_of(opened(place.address))

    @pytest.mark.parametrize(
        ("case", "name", "at", "message"),
        [
            ("mds", "shard.00000.mds", 0, r"/shard.00000.mds is damaged: it does not hold \d+ samples"),
            ("litdata", "chunk-0-0.bin", 0, r"/chunk-0-0.bin is damaged: it does not hold 8 samples"),
            ("litdata, batches", "chunk-0-0.bin", 8, r"/chunk-0-0.bin is damaged: it does not hold 8 samples"),
            ("litdata, batches", "chunk-0-0.bin", 12, r"/chunk-0-0.bin is cut off within its head"),
            ("litdata, batches", "chunk-0-0.bin", 80, r"frame 0 of memory://\S+/chunk-0-0.bin claims"),
            ("litdata, many rows", "chunk-0.bin", -12, r"/chunk-0.bin has no readable table at its end"),
            ("litdata, many rows", "chunk-0.bin", -22, r"/chunk-0.bin has no readable table at its end"),
            ("litdata, many rows", "chunk-0.bin", -1, r"/chunk-0.bin is damaged: it does not hold 400 samples"),
            ("litdata, many rows", "chunk-0.bin", 1700, r"/chunk-0.bin has no readable table at its end"),
        ],
    )
    def test_damaged_heads_are_named(self, place: Place, case: str, name: str, at: int, message: str) -> None:
        opened = filled(place, case)
        data = bytearray(place.get(name))
        for near in range(at % len(data), min(at % len(data) + 4, len(data))):
            data[near] ^= 0xFF
        place.put(name, bytes(data))
        with pytest.raises(SampleError, match=message):
            opened(place.address)[0]

    def test_no_dataset_at_an_address(self, place: Place) -> None:
        for kind, what in ((MDS, "MDS data set"), (LitData, "LitData set")):
            with pytest.raises(
                ObjectNotFoundError, match=rf"no {what}: memory://bucket/data/index.json does not exist"
            ):
                kind(place.address)
        with pytest.raises(ObjectNotFoundError, match=r"memory://bucket/data"):
            TFRecord(place.address)

    def test_a_line_in_trouble_is_named_without_reading_what_is_before_it(self, place: Place) -> None:
        place.put("a.jsonl", b"1\n\n{\n")
        place.put("a.csv", b"x\n1\n?\n")
        with pytest.raises(SampleError, match=r"memory://bucket/data/a.jsonl, the line at byte 3, is not JSON"):
            JSONL(f"{place.address}/a.jsonl")[1]
        with pytest.raises(SampleError, match=r"a.csv, the line at byte 4, column 'x': '\?' is no int"):
            CSV(f"{place.address}/a.csv", {"x": int})[1]

    def test_an_index_that_cannot_be_kept_is_worked_out_again(
        self, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        opened = filled(place, "mds")
        (tmp_path / "file").touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
        with pytest.warns(RuntimeWarning, match="could not be written"):
            far = opened(place.address)
        assert equal(far[3], pickle.loads(pickle.dumps(far))[3])
