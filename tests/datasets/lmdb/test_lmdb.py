from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import lmdb
import numpy as np
import pytest
import torch
from format_cases import all_ways_agree, equal, hidden
from record_files import filled
from torch.utils.data import DataLoader
from writers.values import jpeg, random_image

import feedline as fl
from feedline.core.dataset import BatchRead
from feedline.datasets import LMDB
from feedline.datasets.indexes import IndexFileWarning
from feedline.errors import ArgumentError, MissingExtraError, SampleError, StateError
from feedline.transforms import Compose, RandomResizedCrop, ToTensor

COUNT = 12


def npy(array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return file.getvalue()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return filled(tmp_path / "texts", {b"%04d" % i: f"text {i}".encode() for i in range(COUNT)})


class TestKeys:
    def test_all_keys_are_enumerated_in_their_order(self, tmp_path: Path) -> None:
        words = [b"b", b"a", b"longer", b"\x00\xff"]
        path = filled(tmp_path / "words", {word: word * 2 for word in words})
        assert list(LMDB(path).__getitems__(range(4))) == [word * 2 for word in sorted(words)]

    def test_patterns_number_the_samples(self, texts: Path) -> None:
        assert LMDB(texts, "{:04d}", decode="text")[-1] == "text 11"
        assert len(LMDB(texts, "{:04d}", length=5)) == 5

    @pytest.mark.parametrize(("keys", "layout"), [("uint32", ">I"), ("uint64", ">Q")])
    def test_numbers_are_big_endian(self, tmp_path: Path, keys: str, layout: str) -> None:
        path = filled(tmp_path / keys, {struct.pack(layout, i): b"%d" % i for i in range(300)})
        assert LMDB(path, keys)[299] == b"299"

    @pytest.mark.parametrize("bookkeeping", [("__keys__", "__len__"), ("__len__",)])
    @pytest.mark.parametrize("keys", [None, "{:04d}"])
    def test_pickled_keys_and_length_are_no_samples(
        self, tmp_path: Path, keys: str | None, bookkeeping: tuple[str, ...], request: pytest.FixtureRequest
    ) -> None:
        names = [b"%04d" % i for i in range(COUNT)]
        pickled = {"__keys__": pickle.dumps(names), "__len__": pickle.dumps(COUNT)}
        values = {name: b"text " + name for name in names}
        path = filled(tmp_path / "imagenet", values | {each.encode(): pickled[each] for each in bookkeeping})
        dataset = LMDB(path, keys)
        assert list(dataset) == list(values.values())
        system = fsspec.filesystem("memory")
        request.addfinalizer(lambda: system.rm("/imagenet", recursive=True))
        system.pipe("/imagenet/data.mdb", (path / "data.mdb").read_bytes())
        remote = LMDB("memory://imagenet", keys, index_dir=tmp_path / "index", cache=tmp_path / "cache")
        assert list(remote) == list(values.values())

    def test_a_requested_pickled_length_is_returned(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "one", {b"__len__": b"bytes", b"a": b"value"})
        assert list(LMDB(path, ["__len__", "a"])) == [b"bytes", b"value"]

    def test_a_list_picks_and_orders(self, texts: Path) -> None:
        dataset = LMDB(texts, ["0007", b"0001"])
        assert dataset.__getitems__([0, 1]) == [b"text 7", b"text 1"]

    def test_named_databases_and_single_files(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "one.lmdb", {b"k": b"named"}, database=b"part", subdir=False)
        assert LMDB(path, database="part")[0] == b"named"
        with pytest.raises(ArgumentError, match=r"one.lmdb has no named database 'other'; it has part"):
            LMDB(path, database="other")

    def test_a_database_that_is_none(self, texts: Path) -> None:
        for name in ("other", "0001", "", "0001\0"):
            with pytest.raises(ArgumentError, match=r"no named database .*; it has none: leave out database="):
                LMDB(texts, database=name)

    @pytest.mark.parametrize("others", [{}, {b"a": b"plain"}, {b"%04d" % i: bytes(48) for i in range(30)}])
    def test_records_of_named_databases_are_no_samples(self, tmp_path: Path, others: dict[bytes, bytes]) -> None:
        path = filled(filled(tmp_path / "named", {b"k": b"v"}, database=b"train"), others)
        filled(path, {b"k": b"v"}, database=b"val")
        message = r"named holds named databases, .*: pass database=, one of train, val; or pass keys="
        for keys in (None, ["train"], ["val", *others]):
            with pytest.raises(ArgumentError, match=message):
                LMDB(path, keys)
        assert len(LMDB(path, list(others))) == len(others)
        assert LMDB(path, database="train")[0] == LMDB(path, database="val")[0] == b"v"

    def test_values_as_long_as_the_record_of_a_database(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "plain", {b"%04d" % i: bytes(48) for i in range(200)} | {b"a\0b": bytes(48)})
        assert len(LMDB(path)) == 201

    def test_several_values_under_one_key_are_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "dup"
        with lmdb.open(str(path), max_dbs=2, map_size=1 << 24) as environment:
            for name, count in ((b"many", 3), (b"one", 1)):
                held = environment.open_db(name, dupsort=True)
                with environment.begin(write=True, db=held) as transaction:
                    for i in range(12):
                        transaction.put(b"%d" % (i // count), b"%d" % i)
        with pytest.raises(ArgumentError, match=r"dup holds several values under one key \(b'0'\).*pass keys="):
            LMDB(path, database="many")
        assert LMDB(path, ["0", "1"], database="many").__getitems__([0, 1]) == [b"0", b"3"]
        assert len(LMDB(path, database="one")) == 12

    @pytest.mark.parametrize(
        ("keys", "message"),
        [
            ([1, 2], r"keys= holds 1, but a key must be bytes or str; for numbers, pass a pattern"),
            ([b"0001", None], r"keys= holds None, but a key must be bytes or str"),
            (b"0001", r"keys= holds 48, but a key must be bytes or str"),
            ({"0001"}, r"keys= is a set, whose order differs .*: pass a list"),
            (5, r"keys=5 is neither a pattern, nor a list of keys, nor None for all"),
        ],
    )
    def test_what_is_no_key_is_refused(self, texts: Path, keys: Any, message: str) -> None:
        with pytest.raises(ArgumentError, match=message):
            LMDB(texts, keys)

    @pytest.mark.parametrize("length", [-1, 2.5, "3"])
    def test_a_length_that_is_none(self, texts: Path, length: Any) -> None:
        with pytest.raises(ArgumentError, match=r"length=.*: pass the number of samples, or None"):
            LMDB(texts, "{:04d}", length=length)

    @pytest.mark.parametrize("keys", [None, ["0001", "0002"]])
    def test_a_length_of_other_keys_than_numbers(self, texts: Path, keys: Any) -> None:
        with pytest.raises(ArgumentError, match=r"length=1 is the number of samples for a pattern; leave it out"):
            LMDB(texts, keys, length=1)

    def test_keys_that_the_library_does_not_take(self, texts: Path) -> None:
        with pytest.raises(SampleError, match=r"texts cannot be read: .*BAD_VALSIZE.*; correct keys="):
            LMDB(texts, [""])
        with pytest.raises(SampleError, match=r"texts has no key b'xxx"):
            LMDB(texts, ["x" * 600])

    def test_nothing_at_all(self, texts: Path, tmp_path: Path) -> None:
        for dataset in (LMDB(texts, []), LMDB(filled(tmp_path / "empty", {})), LMDB(texts, "{}", length=0)):
            assert len(dataset) == 0
            assert dataset.__getitems__([]) == []
            with fl.DataLoader(dataset, batch_size=2) as loader:
                assert list(loader) == []

    @pytest.mark.parametrize("keys", ["no field", "{:d", "{other}", "int32"])
    def test_what_is_no_pattern_is_refused(self, texts: Path, keys: str) -> None:
        with pytest.raises(
            ArgumentError, match=r"is neither a pattern for a number, such as '\{:08d\}', nor one of uint32"
        ):
            LMDB(texts, keys)

    @pytest.mark.parametrize("keys", ["{}", ["0001", "gone"], "uint32"])
    def test_keys_that_do_not_fit_are_reported_at_once(self, texts: Path, keys: Any) -> None:
        with pytest.raises(SampleError, match=r"texts has no key b'.*correct keys=, or pass on_error='skip'"):
            LMDB(texts, keys)

    def test_a_key_that_is_missing_later_is_named(self, texts: Path) -> None:
        dataset = LMDB(texts, ["0001", "gone", "0002"])
        with pytest.raises(SampleError, match=r"texts has no key b'gone'"):
            dataset[1]
        with fl.DataLoader(dataset, batch_size=3, on_error="skip") as loader:
            assert list(loader) == [[b"text 1", b"text 2"]]


class TestIndexFile:
    def test_it_is_made_once(self, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert len(LMDB(texts)) == COUNT
        assert (texts / "data.mdb.main.keys").exists()
        monkeypatch.setattr("feedline.datasets.lmdb.dataset._enumerate_keys", lambda _: pytest.fail("enumerated again"))
        assert LMDB(texts, decode="text")[3] == "text 3"

    def test_a_changed_environment_is_enumerated_again(self, texts: Path) -> None:
        assert len(LMDB(texts)) == COUNT
        filled(texts, {b"9999": b"more"})
        assert LMDB(texts)[-1] == b"more"

    @pytest.mark.parametrize("index_dir", [None, "own", "own.keys"])
    @pytest.mark.parametrize("first", [None, "main"])
    def test_each_database_has_its_own(self, tmp_path: Path, first: str | None, index_dir: str | None) -> None:
        path = filled(filled(tmp_path / "both", {b"k": b"named"}, database=b"main"), {b"k": b"plain"})
        kept = None if index_dir is None else tmp_path / index_dir
        for database in (first, None, "main"):
            if database is None:
                with pytest.raises(ArgumentError, match=r"both holds named databases"):
                    LMDB(path, index_dir=kept)
            else:
                assert list(LMDB(path, database="main", index_dir=kept)) == [b"named"]

    def test_it_is_next_to_the_data_whatever_the_database_is_called(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "named", {b"k": b"v"}, database=b"../x")
        assert LMDB(path, database="../x")[0] == b"v"
        assert [each.name for each in path.glob("*.keys")] == ["data.mdb.named-..%2Fx.keys"]

    @pytest.mark.parametrize("rest", [0, 10, 100])
    def test_a_damaged_one_is_made_again(self, texts: Path, rest: int) -> None:
        place = texts / "data.mdb.main.keys"
        assert len(LMDB(texts)) == COUNT
        os.truncate(place, rest)
        assert len(LMDB(texts)) == COUNT
        assert place.stat().st_size > rest

    def test_one_that_cannot_be_written_is_reported(self, texts: Path, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("in the way")
        with pytest.warns(IndexFileWarning, match=r"file/.*keys could not be written .* give index_dir="):
            dataset = LMDB(texts, index_dir=tmp_path / "file")
        assert pickle.loads(pickle.dumps(dataset))[1] == b"text 1"

    def test_it_can_be_in_another_folder(self, texts: Path, tmp_path: Path) -> None:
        LMDB(texts, index_dir=tmp_path / "new/keys")
        (kept,) = (tmp_path / "new/keys").iterdir()
        assert kept.name.endswith(f"-{texts.name}.main.keys")
        assert not (texts / "data.mdb.main.keys").exists()


class TestValues:
    def test_ways_to_decode(self, tmp_path: Path) -> None:
        arrays = [np.arange(i + 1, dtype=np.float32) for i in range(3)]
        path = filled(tmp_path / "npy", {b"%d" % i: npy(array) for i, array in enumerate(arrays)})
        assert equal(LMDB(path, decode="npy").__getitems__([2, 0]), [torch.arange(3.0), torch.arange(1.0)])
        assert LMDB(path, decode=len)[0] == len(npy(arrays[0]))

    def test_images_without_a_transform_are_pils(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "jpegs", {b"0": jpeg(1)})
        assert LMDB(path, decode="image")[0].size == random_image(1).size

    def test_transforms_of_images_see_no_pil(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "jpegs", {b"%02d" % i: jpeg(i, (40, 30)) for i in range(COUNT)})
        transform = Compose([RandomResizedCrop(16), ToTensor()])
        dataset = LMDB(path, decode="image", transform=transform)
        with fl.DataLoader(dataset, batch_size=4, shuffle=True, seed=3) as loader:
            whole = list(loader)
        assert whole[0].shape == (4, 3, 16, 16)
        one_by_one = LMDB(path, decode="image", transform=lambda image, rng: transform(image, rng))
        with fl.DataLoader(one_by_one, batch_size=4, shuffle=True, seed=3) as loader:
            assert all((a - b).abs().max() < 0.02 for a, b in zip(whole, loader, strict=True))
        torch.manual_seed(0)
        samples = torch.stack([dataset[i] for i in range(4)])
        torch.manual_seed(0)
        assert torch.equal(
            dataset.read_batch(BatchRead(np.arange(4), lambda s, d: torch.empty(s, dtype=d), None)), samples
        )

    def test_a_function_may_not_keep_the_memory(self, texts: Path) -> None:
        kept: list[Any] = []
        for keep in (lambda view: np.frombuffer(view, np.uint8), lambda view: kept.append(view[:2])):
            with pytest.raises(SampleError, match=r"key b'0000' in .*texts cannot be decoded.*return a copy"):
                LMDB(texts, decode=keep)[0]

    def test_pickled_arrays_stay_closed(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "objects", {b"0": npy(np.array([{}], object))})
        with pytest.raises(SampleError, match=r"key b'0' in .* cannot be decoded as npy .*on_error='skip'"):
            LMDB(path, decode="npy")[0]

    def test_an_unknown_decode_is_refused(self, texts: Path) -> None:
        with pytest.raises(ArgumentError, match=r"decode='jpg': give a function, or one of bytes, text, npy, image"):
            LMDB(texts, decode="jpg")


class MyLMDB(LMDB):
    """A subclass may do anything."""


class TestSeeds:
    """Seeding costs as much as reading, so it is skipped where nothing can draw."""

    def drawn(self, dataset: Any, collate_fn: Any) -> bool:
        """True if the generators were seeded for a batch, as the numbers drawn during its fetch show."""
        torch.manual_seed(7)
        begun = torch.default_generator.initial_seed()
        seen = []
        fetch = type(dataset)._values

        class Spied(type(dataset)):  # type: ignore[misc]
            __module__ = type(dataset).__module__

            def _values(self, transaction: Any, keys: Any) -> Any:
                seen.append(torch.default_generator.initial_seed())
                return fetch(self, transaction, keys)

        dataset.__class__ = Spied
        with fl.DataLoader(dataset, 4, seed=0, collate_fn=collate_fn, num_workers=0) as loader:
            assert sum(map(len, loader)) == COUNT
        assert torch.default_generator.initial_seed() == begun
        return set(seen) != {begun}

    def test_only_what_may_draw_is_seeded(self, texts: Path) -> None:
        assert not self.drawn(LMDB(texts), list)
        assert not self.drawn(LMDB(texts, decode="text"), tuple)
        assert self.drawn(LMDB(texts), lambda samples: samples)
        assert self.drawn(LMDB(texts, decode=len), list)
        assert self.drawn(LMDB(texts, transform=len), list)
        assert self.drawn(MyLMDB(texts), list)


class TestProcesses:
    def test_ways_to_fetch_agree(self, texts: Path) -> None:
        all_ways_agree(LMDB(texts), [3, -1, 0, 3])

    def test_it_pickles_by_path(self, texts: Path) -> None:
        dataset = LMDB(texts, decode="text")
        data = pickle.dumps(dataset)
        assert len(data) < 1000
        assert pickle.loads(data)[2] == dataset[2]

    def test_an_environment_that_was_open_before_a_fork_serves_parent_and_child(self, texts: Path) -> None:
        dataset = LMDB(texts, decode="text")
        assert dataset[0] == "text 0"
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                os.write(write, " ".join(dataset.__getitems__([1, 2])).encode())
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        os.close(write)
        with open(read, encoding="utf-8") as pipe:
            assert pipe.read() == "text 1 text 2"
        assert dataset[3] == "text 3"

    @pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
    def test_torchs_forked_workers(self, texts: Path) -> None:
        dataset = LMDB(texts, decode="text")
        assert dataset[0] == "text 0"
        loader = DataLoader(dataset, 5, num_workers=2, multiprocessing_context="fork")
        assert [text for batch in loader for text in batch] == [f"text {i}" for i in range(COUNT)]

    def test_datasets_over_one_path_share_it(self, texts: Path) -> None:
        first, second = LMDB(texts), LMDB(texts, ["0003"])
        assert (first[3], second[0]) == (b"text 3", b"text 3")
        del first
        assert second[0] == b"text 3"

    def test_other_code_that_has_it_open_is_named(self, texts: Path) -> None:
        with (
            lmdb.open(str(texts), readonly=True, lock=False),
            pytest.raises(ArgumentError, match=r"texts is open in this process through other code.*close that one"),
        ):
            LMDB(texts)
        assert len(LMDB(texts)) == COUNT


GROW = """
import lmdb, sys
with lmdb.open(sys.argv[1], map_size=1 << 28) as environment, environment.begin(write=True) as transaction:
    for i in range(3000):
        transaction.put(b"more %08d" % i, bytes(10_000))
"""


def grown(path: Path) -> None:
    """Another process has made the environment larger than it was mapped."""
    subprocess.run([sys.executable, "-c", GROW, path], check=True)


class TestGrowth:
    def test_what_was_open_is_mapped_again(self, texts: Path) -> None:
        dataset = LMDB(texts, decode="text")
        assert dataset[0] == "text 0"
        grown(texts)
        assert dataset.__getitems__([3, 1]) == ["text 3", "text 1"]
        assert len(LMDB(texts)) == COUNT + 3000
        assert LMDB(texts, ["more 00002999"])[0] == bytes(10_000)
        assert dataset[2] == "text 2"

    def test_a_named_database_is_found_in_it(self, texts: Path) -> None:
        dataset = LMDB(texts)
        grown(texts)
        with pytest.raises(ArgumentError, match=r"no named database 'other'; it has none"):
            LMDB(texts, database="other")
        assert dataset[0] == b"text 0"

    def test_views_of_other_threads_stay_valid(self, texts: Path) -> None:
        dataset, begun, done = LMDB(texts), threading.Event(), threading.Event()
        waiting = LMDB(texts, decode=lambda view: (begun.set(), done.wait(), bytes(view))[2])
        with ThreadPoolExecutor(5) as pool:
            held = pool.submit(waiting.__getitem__, 1)
            begun.wait()
            grown(texts)
            others = [pool.submit(dataset.__getitem__, i) for i in range(4)]
            done.set()
            assert held.result() == b"text 1"
            assert [other.result() for other in others] == [b"text %d" % i for i in range(4)]

    def test_a_transaction_that_does_not_end_is_reported(self, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("feedline.datasets.lmdb.environment._REMAP_TIMEOUT_S", 0.0)
        dataset = LMDB(texts)

        def reading(view: memoryview) -> bytes:
            grown(texts)
            with pytest.raises(StateError, match=r"texts was enlarged by another process, and cannot be mapped"):
                dataset[0]
            return bytes(view)

        assert LMDB(texts, decode=reading)[1] == b"text 1"
        assert dataset[0] == b"text 0"

    def test_one_that_was_replaced_is_opened_again(self, texts: Path, tmp_path: Path) -> None:
        old = LMDB(texts)
        texts.rename(tmp_path / "old")
        filled(tmp_path / "texts", {b"k": b"new"})
        assert list(LMDB(texts)) == [b"new"]
        assert old[0] == b"text 0"


class TestDamage:
    def test_a_file_that_is_truncated_while_it_is_open(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "cut", {b"%d" % i: bytes(100_000) for i in range(3)})
        dataset = LMDB(path)
        assert len(dataset[2]) == 100_000
        for rest in (200_000, 4000, 0):
            os.truncate(path / "data.mdb", rest)
            with (
                fl.DataLoader(dataset, batch_size=3, collate_fn=len) as loader,
                pytest.raises(SampleError, match=rf"data.mdb is truncated: the file has {rest} bytes, .* copy the"),
            ):
                list(loader)

    def test_a_path_without_an_environment(self, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no LMDB environment: .*/data.mdb \(.* exists, but has no data"):
            LMDB(tmp_path)
        (tmp_path / "gone.lmdb").mkdir()
        with pytest.raises(FileNotFoundError, match=r"/gone.lmbd \(.*; did you mean .*/gone.lmdb\?"):
            LMDB(tmp_path / "gone.lmbd")

    def test_a_file_of_something_else(self, tmp_path: Path) -> None:
        (tmp_path / "junk").write_bytes(b"junk" * 4000)
        with pytest.raises(SampleError, match=r"junk cannot be opened as an LMDB environment: .*INVALID"):
            LMDB(tmp_path / "junk")

    def test_a_truncated_file(self, tmp_path: Path) -> None:
        path = filled(tmp_path / "cut", {b"%d" % i: bytes(100_000) for i in range(3)})
        os.truncate(path / "data.mdb", 200_000)
        with pytest.raises(
            SampleError, match=r"data.mdb is truncated: the file has 200000 bytes, its header requires \d+"
        ):
            LMDB(path, "{}")

    def test_a_missing_library(self, texts: Path) -> None:
        with hidden("lmdb"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[lmdb\]'"):
            LMDB(texts)


@pytest.mark.parametrize("keys", [None, "{:04d}"])
def test_pages_of_a_wrong_type_are_damage(tmp_path: Path, keys: str | None) -> None:
    with lmdb.open(str(tmp_path / "a"), map_size=1 << 20) as held, held.begin(write=True) as transaction:
        for i in range(24):
            transaction.put(b"%04d" % i, b"text")
    data = bytearray((tmp_path / "a/data.mdb").read_bytes())
    for page in range(2, len(data) // 4096):
        data[4096 * page + 10 : 4096 * page + 12] = b"\0\0"  # the type
    (tmp_path / "a/data.mdb").write_bytes(data)
    with pytest.raises(SampleError, match=r"a .*(damaged|Located page was wrong type)"):
        LMDB(tmp_path / "a", keys)[0]
