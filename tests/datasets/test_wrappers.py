from __future__ import annotations

import errno
import os
import pickle
import sys
import threading
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import torch
from combining_writers import cached, heavy
from hypothesis import given
from hypothesis import strategies as st
from preloaded import Preloaded, Script
from recorder import Recorder
from torch.utils.data import ConcatDataset, DataLoader, Subset, default_collate

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.core.dataset import BatchRead
from feedline.datasets import ArrayFile, Arrays, CachedMap, Filter, Map, Zip
from feedline.datasets.cached_map import CacheWriteWarning, decode, encode
from feedline.datasets.fingerprints import fingerprint
from feedline.errors import ArgumentError, SampleError, SampleIndexError

N = 40
WRITERS = Path(__file__).with_name("combining_writers.py")
FACTOR = 2


def numbers() -> Arrays:
    return Arrays(np.arange(N))


def even(x: Any) -> bool:
    return bool(x % 2 == 0)


def scaled(x: Any) -> Any:
    return x * FACTOR


class TestZip:
    def test_samples_are_combined(self) -> None:
        letters = [str(i) for i in range(N)]
        assert Zip(numbers(), letters)[3] == (3, "3")
        assert Zip(x=numbers(), s=letters)[-1] == {"x": 39, "s": "39"}
        assert Zip(numbers(), letters).__getitems__([1, 2]) == [(1, "1"), (2, "2")]

    @pytest.mark.parametrize("named", [False, True])
    def test_batches_are_gathered_where_all_parts_can(self, named: bool) -> None:
        parts = {"x": numbers(), "y": Arrays(np.ones((N, 3), np.float32))}
        dataset, empty = Zip(**parts) if named else Zip(*parts.values()), Recorder()
        read = reader_of(dataset)
        assert read is not None
        batch, theirs = read(BatchRead(np.array([5, -1]), empty)), default_collate([dataset[5], dataset[-1]])
        assert empty.holds(batch)
        assert str(batch) == str(theirs)
        assert reader_of(Zip(numbers(), list(range(N)))) is None

    def test_other_lengths_are_quoted(self) -> None:
        with pytest.raises(ArgumentError, match=r"Arrays \(argument 0\) has 40, list \(argument 1\) has 2"):
            Zip(numbers(), [1, 2])
        with pytest.raises(ArgumentError, match=r"Arrays \(x\) has 40, list \(y\) has 2"):
            Zip(x=numbers(), y=[1, 2])
        for arguments in ({}, {"x": numbers()}):
            with pytest.raises(ArgumentError, match="either all by position or all by keyword"):
                Zip(*[numbers()] * len(arguments), **arguments)

    def test_it_is_thread_safe_if_its_parts_are(self) -> None:
        assert Zip(numbers(), numbers()).traits.thread_safe
        assert not Zip(numbers(), list(range(N))).traits.thread_safe


class TestMap:
    def test_the_function_sees_each_sample(self) -> None:
        dataset = Map(numbers(), scaled)
        assert [dataset[3].item(), dataset[-1].item()] == [6, 78]
        assert torch.stack(dataset.__getitems__([1, 2])).tolist() == [2, 4]
        assert [batch.tolist() for batch in DataLoader(dataset, 20)] == [
            batch.tolist() for batch in fl.DataLoader(dataset, 20)
        ]

    def test_draws_are_fixed_by_the_seed_and_independent_of_those_within(self) -> None:
        inner = Arrays(np.arange(N), transform=lambda x, rng: (x.item(), rng.integers(1 << 40)))
        dataset = Map(
            Map(inner, lambda s, rng: (*s, rng.integers(1 << 40))), lambda s, rng: (*s, rng.integers(1 << 40))
        )
        loaders = [fl.DataLoader(dataset, 8, shuffle=True, seed=1, num_workers=n) for n in (0, 2)]
        first, second = ([torch.stack(batch).tolist() for batch in loader] for loader in loaders)
        assert first == second
        assert all(len({a, b, c}) == 3 for _, a, b, c in (zip(*first[0], strict=True)))

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda inner: Filter(inner, lambda x: True),
            lambda inner: Subset(Subset(inner, range(N)), [3, 5]),
            lambda inner: ConcatDataset([numbers(), inner]),
            lambda inner: Zip(numbers(), inner),
            lambda inner: Zip(x=inner),
        ],
    )
    def test_draws_differ_from_those_within_other_wrappers(self, wrap: Any) -> None:
        within, outside = list[int](), list[int]()

        def drawing(draws: list[int]) -> Any:
            return lambda sample, rng: (sample, draws.append(int(rng.integers(1 << 40))))[0]

        inner = Map(Map(numbers(), drawing(within)), drawing(within))
        outer = Map(Map(wrap(inner), drawing(outside)), drawing(outside))
        within.clear()
        list(fl.DataLoader(outer, 8, seed=1))
        assert len({*within, *outside}) == len(within) + len(outside)

    def test_parts_of_a_zip_draw_alike(self) -> None:
        parts = [Map(numbers(), lambda x, rng: rng.integers(1 << 40)) for _ in range(2)]
        image, mask = next(iter(fl.DataLoader(Zip(*parts), 4, seed=1)))
        assert image.tolist() == mask.tolist()

    def test_what_is_no_function_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match="fn must be callable, got int"):
            Map(numbers(), 3)


class TestFilter:
    def test_what_the_predicate_keeps(self) -> None:
        dataset = Filter(numbers(), even)
        assert len(dataset) == N // 2
        assert [dataset[1].item(), dataset[-1].item()] == [2, 38]
        assert torch.stack(dataset.__getitems__([0, 3])).tolist() == [0, 6]
        read, empty = reader_of(dataset), Recorder()
        assert read is not None
        assert read(BatchRead(np.array([-1, 2]), empty)).tolist() == [38, 4]
        with pytest.raises(SampleIndexError, match="index 20 is out of range for Filter with 20 samples"):
            dataset[20]

    def test_processes_find_the_same(self) -> None:
        assert Filter(numbers(), even, num_workers=2).indices.tolist() == list(range(0, N, 2))

    def test_nothing_may_be_left(self) -> None:
        assert len(Filter(numbers(), lambda x: False)) == 0
        assert len(Filter([], even)) == 0

    def test_shards_become_smaller(self, tmp_path: Path) -> None:
        for i in range(3):
            (tmp_path / f"{i}.txt").write_text("a\nb\n" * i)
        kept = Filter(fl.datasets.Lines(tmp_path), lambda line: line == "a")
        assert kept.shard_sizes.tolist() == [0, 1, 2]

    def test_the_index_is_found_once(self, tmp_path: Path) -> None:
        folder = tmp_path / "seen"  # the fingerprint covers files, not folders
        folder.mkdir()

        def reported(x: Any) -> bool:
            with open(folder / "log", "a") as file:
                file.write(".")
            return bool(x < 3)

        for _ in range(2):
            dataset = Filter(numbers(), reported, index_dir=tmp_path / "cache")
            assert dataset.indices.tolist() == [0, 1, 2]
        assert len((folder / "log").read_text()) == N
        assert pickle.loads(pickle.dumps(Filter(numbers(), even, index_dir=tmp_path)))[2].item() == 4

    @pytest.mark.parametrize("change", ["predicate", "closure", "data", "file"])
    def test_a_stale_index_is_never_used(self, tmp_path: Path, change: str) -> None:
        np.save(tmp_path / "x.npy", np.arange(N))

        def kept(dataset: Any, predicate: Any) -> list[int]:
            return Filter(dataset, predicate, index_dir=tmp_path / "cache").indices.tolist()

        def below(bound: int) -> Any:
            return lambda x: x < bound

        assert kept(ArrayFile(tmp_path / "x.npy"), below(3)) == [0, 1, 2]
        assert kept(numbers(), below(3)) == [0, 1, 2]
        match change:
            case "predicate":
                assert kept(numbers(), lambda x: x < 1) == [0]
            case "closure":
                assert kept(numbers(), below(2)) == [0, 1]
            case "data":
                assert kept(Arrays(np.arange(N) + 1), below(3)) == [0, 1]
            case "file":
                np.save(tmp_path / "x.npy", np.arange(N) + 2)
                assert kept(ArrayFile(tmp_path / "x.npy"), below(3)) == [0]

    @pytest.mark.parametrize("find", ["filter", "cached"])
    def test_finding_it_draws_nothing(self, tmp_path: Path, find: str) -> None:
        before = torch.get_rng_state()
        for _ in range(2):
            if find == "filter":
                Filter(numbers(), even, index_dir=tmp_path)
            else:
                CachedMap(numbers(), scaled, tmp_path).fill()
            assert torch.equal(torch.get_rng_state(), before)

    def test_a_damaged_index_is_found_again(self, tmp_path: Path) -> None:
        Filter(numbers(), even, index_dir=tmp_path)
        (path,) = tmp_path.glob("filter-*.index")
        path.write_bytes(path.read_bytes()[:-8])
        assert len(Filter(numbers(), even, index_dir=tmp_path)) == N // 2

    def test_an_error_names_the_sample(self) -> None:
        with pytest.raises(ZeroDivisionError) as caught:
            Filter(numbers(), lambda x: 1 // (5 - int(x)))
        assert "sample 5" in caught.value.__notes__[0]
        with pytest.raises(ArgumentError, match="predicate must be callable"):
            Filter(numbers(), 3)  # type: ignore[arg-type]


class TestFingerprint:
    def test_it_follows_what_a_function_names(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = fingerprint(scaled)
        assert fingerprint(scaled) == before
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
        assert fingerprint(scaled) != before

    def test_it_follows_arguments_and_methods(self) -> None:
        class Scale:
            def __init__(self, by: int) -> None:
                self.by = by

            def __call__(self, x: int) -> int:
                return x * self.by

        assert fingerprint(Scale(2)) == fingerprint(Scale(2))
        assert fingerprint(Scale(2)) != fingerprint(Scale(3))
        before = fingerprint(Scale(2))
        Scale.__call__ = lambda self, x: x + self.by  # type: ignore[method-assign]
        assert fingerprint(Scale(2)) != before

    def test_a_function_may_name_itself(self) -> None:
        def down(x: int) -> int:
            return down(x - 1) if x else 0

        assert fingerprint(down) == fingerprint(down)

    def test_it_is_the_same_in_every_process(
        self, capsys: pytest.CaptureFixture[str], preloaded: Preloaded, tmp_path: Path
    ) -> None:
        """Sets of 20 texts have another order in a process with another seed of their hashes, as `preloaded` has."""
        texts = {f"text {number}" for number in range(20)}
        code = (
            "from feedline.datasets.fingerprints import fingerprint\n"
            "__name__ = 'code_of_the_user'\n"
            f"print(fingerprint({texts}, lambda x: x in {texts}), *{texts}, sep='\\n')"
        )
        run = f"exec(compile({code!r}, '<string>', 'exec', dont_inherit=True), {{}})"
        exec(run, {})
        here = capsys.readouterr().out.splitlines()
        status, printed = preloaded.run_code(run, tmp_path)
        assert status == 0, printed
        there = printed.splitlines()
        assert there[0] == here[0]
        assert there[1:] != here[1:]
        assert sorted(there) == sorted(here)

    def test_tensors_and_arrays_count_by_content(self) -> None:
        for make in (np.array, torch.tensor, lambda v: torch.tensor(v, dtype=torch.bfloat16)):
            assert fingerprint(make([1.0, 2.0])) == fingerprint(make([1.0, 2.0]))
            assert fingerprint(make([1.0, 2.0])) != fingerprint(make([1.0, 3.0]))

    def test_a_dataset_may_tell_its_own(self) -> None:
        class Named:
            def __init__(self, reported: str) -> None:
                self._fingerprint, self.lock = reported, threading.Lock()

        assert fingerprint(Named("a")) == fingerprint(Named("a")) != fingerprint(Named("b"))

    def test_what_cannot_be_pickled_is_refused(self) -> None:
        with pytest.raises(ArgumentError, match=r"no fingerprint can be computed .*lock"):
            fingerprint(threading.Lock())


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=10,
)


class TestPlainValues:
    @given(value=PLAIN)
    def test_values_come_back_equal(self, value: Any) -> None:
        back = decode(encode(value))
        assert back == value
        assert repr(back) == repr(value)

    @pytest.mark.parametrize("dtype", [torch.bool, torch.uint16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
    @pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
    def test_tensors_keep_dtype_and_shape(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        tensor = torch.ones(shape).to(dtype)
        back = decode(encode({"t": tensor, "b": b"odd"}))["t"]
        assert (back.dtype, back.shape) == (dtype, shape)
        assert torch.equal(back.view(torch.uint8) if shape else back, tensor.view(torch.uint8) if shape else tensor)
        back.fill_(0)  # memory of its own

    def test_arrays_and_numpy_scalars_stay_what_they_are(self) -> None:
        value = [np.arange(6, dtype=np.int16).reshape(2, 3).T, np.float32(0.1), np.bool_(True)]
        back = decode(encode(value))
        assert np.array_equal(back[0], value[0])
        assert [type(each) for each in back] == [type(each) for each in value]
        assert back[1] == value[1]

    def test_other_types_are_named_with_their_place(self) -> None:
        with pytest.raises(SampleError, match=r"sample\['a'\]\[1\] is of type set, which cannot be cached on disk"):
            encode({"a": [1, {2}]})


def _writer(preloaded: Preloaded, folder: Path, count: int, log: Path) -> tuple[Script, IO[bytes]]:
    """A job that fills the cache, and its output."""
    reading, writing = os.pipe()
    with open(os.devnull) as nothing, log.open("ab") as errors:
        streams = {"stdin": nothing.fileno(), "stdout": writing, "stderr": errors.fileno()}
        job = preloaded.start(str(WRITERS), str(folder), str(count), **streams)
    os.close(writing)
    return job, open(reading, "rb")


class TestCachedMap:
    def test_each_sample_is_computed_once(self, tmp_path: Path) -> None:
        def reported(x: Any) -> Any:
            with open(tmp_path / "calls", "a") as file:  # the fingerprint covers files, not folders
                file.write(f"{int(x)} ")
            return {"x": x, "twice": x * 2}

        for _ in range(2):
            dataset = CachedMap(numbers(), reported, tmp_path / "cache")
            assert dataset[3]["twice"].item() == 6
            assert [s["x"].item() for s in dataset.__getitems__([3, 5, -1, 5])] == [3, 5, 39, 5]
        assert (tmp_path / "calls").read_text().split() == ["3", "5", "39"]

    @pytest.mark.parametrize("method", ["inline", "thread", "process"])
    def test_loaders_agree(self, tmp_path: Path, method: str) -> None:
        dataset, expected = CachedMap(numbers(), scaled, tmp_path), [2 * i for i in range(N)]
        arguments: Any = {} if method == "inline" else {"num_workers": 2, "worker_method": method}
        for _ in range(2):
            with fl.DataLoader(dataset, 8, **arguments) as loader:
                assert torch.cat(list(loader)).tolist() == expected
        assert torch.cat(list(DataLoader(CachedMap(numbers(), scaled, tmp_path), 8))).tolist() == expected
        assert pickle.loads(pickle.dumps(dataset))[7].item() == 14

    def test_another_function_has_results_of_its_own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert CachedMap(numbers(), scaled, tmp_path)[5].item() == 10
        monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
        assert CachedMap(numbers(), scaled, tmp_path)[5].item() == 15
        assert CachedMap(Arrays(np.arange(N) + 1), scaled, tmp_path)[5].item() == 18

    def test_it_can_be_filled_by_processes(self, tmp_path: Path) -> None:
        dataset = CachedMap(numbers(), scaled, tmp_path)
        dataset.fill(num_workers=2)
        assert dataset._store.count() == N

    def test_many_threads_may_share_it(self, tmp_path: Path) -> None:
        dataset, failures = cached(str(tmp_path), 30), list[int]()

        def work() -> None:
            failures.extend(i for i in range(30) if dataset[i]["block"][7] != i)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures

    @pytest.mark.parametrize("damage", ["cut", "flip", "gone"])
    def test_a_damaged_record_is_computed_again(self, tmp_path: Path, damage: str) -> None:
        dataset = cached(str(tmp_path), 3)
        dataset.fill()
        (segment,) = tmp_path.glob("*/segment-*")
        data = bytearray(segment.read_bytes())
        data[-9] ^= 1
        {
            "cut": lambda: segment.write_bytes(data[:-9]),
            "flip": lambda: segment.write_bytes(data),
            "gone": segment.unlink,
        }[damage]()
        again = cached(str(tmp_path), 3)
        assert again[2]["block"].tolist() == heavy(np.int64(2))["block"].tolist()
        assert cached(str(tmp_path), 3)._store.get(2) is not None

    def test_jobs_that_are_killed_leave_only_whole_results(self, preloaded: Preloaded, tmp_path: Path) -> None:
        count, log = 60, tmp_path.with_suffix(".log")
        for _ in range(2):
            jobs = [_writer(preloaded, tmp_path, count, log) for _ in range(2)]
            for job, output in jobs:
                assert output.readline() == b"begun\n", log.read_text()
                job.kill()
                output.close()
        dataset = cached(str(tmp_path), count)
        assert len(list(tmp_path.iterdir())) == 1  # all of them had the same fingerprint
        for i in range(count):
            sample = dataset[i]
            assert sample["row"].item() == i
            assert (sample["block"] == i).all()

    def test_a_full_disk_costs_only_time(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        dataset = CachedMap(numbers(), scaled, tmp_path)

        def full(number: int, data: bytes) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(dataset._store, "put", full)
        with pytest.warns(CacheWriteWarning, match="results cannot be stored in .*No space left on device"):
            assert dataset[1].item() == 2

    def test_a_random_function_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ArgumentError, match="use Map for random functions"):
            CachedMap(numbers(), lambda x, rng: x, tmp_path)

    @pytest.mark.parametrize(
        ("dataset", "fn"),
        [
            (Arrays(np.arange(N), transform=lambda x, rng: x), scaled),
            (Subset(Map(numbers(), lambda x, rng: x), range(N)), scaled),
            (numbers(), lambda x: x * (fl.sample_rng().key % 7)),
        ],
        ids=["transform", "map", "fn"],
    )
    def test_random_samples_are_refused(self, dataset: Any, fn: Any, tmp_path: Path) -> None:
        cached_samples = CachedMap(dataset, fn, tmp_path)
        for read in (lambda: cached_samples[1], lambda: cached_samples.__getitems__([1, 2]), cached_samples.fill):
            with pytest.raises(ArgumentError, match="are random, and a CachedMap would repeat the first ones"):
                read()
        with pytest.raises(ArgumentError, match="are random"):
            list(fl.DataLoader(cached_samples, 4, seed=0))

    def test_each_place_of_a_batch_has_a_sample_of_its_own(self, tmp_path: Path) -> None:
        dataset = Map(CachedMap(numbers(), scaled, tmp_path), lambda x: x.add_(1))
        for _ in range(2):  # computed, then stored
            assert [int(x) for x in dataset.__getitems__([1, 1, 2, 1])] == [3, 3, 5, 3]

    def test_views_of_tensors_are_cached_by_value(self, tmp_path: Path) -> None:
        seen = torch.tensor([1 + 2j, 3 - 1j]).conj()
        dataset = CachedMap(numbers(), lambda x: (seen, seen.imag, x), tmp_path)
        for _ in range(2):
            assert torch.equal(dataset[2][0], seen)
            assert torch.equal(dataset[2][1], seen.imag)

    def test_torchs_subset_and_concat_suffice(self, tmp_path: Path) -> None:
        dataset = ConcatDataset([Subset(numbers(), [3, 4]), numbers()])
        assert reader_of(dataset) is not None
        assert CachedMap(dataset, scaled, tmp_path)[1].item() == 8
