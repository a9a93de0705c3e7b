"""`FormatSuite`: laws of every dataset in every place. A row in a table applies them to a new format."""

from __future__ import annotations

import gc
import os
import pickle
import re
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, ClassVar

import numpy as np
import pytest
from format_cases import all_ways_agree, equal

import feedline as fl
from feedline.collate.batch_reads import reader_of
from feedline.datasets.fingerprints import fingerprint
from feedline.errors import FeedlineError, SampleError
from feedline.stores import ObjectChangedError, ObjectNotFoundError, statistics
from formats import arrays, files, media, outside, records, tables, tars, text
from formats.format import Format, epoch
from formats.places import Place

FORMATS: dict[str, Format] = {
    **arrays.FORMATS,
    **files.FORMATS,
    **media.FORMATS,
    **outside.FORMATS,
    **records.FORMATS,
    **text.FORMATS,
    **tables.FORMATS,
    **tars.FORMATS,
}
INDICES = [3, -1, 17, 3, 0, 8, 7, 20]
PICKLED_NBYTES = 12_000


class Corpus:
    """A format, its files, and their samples."""

    def __init__(self, form: Format, files: dict[str, bytes], local: Callable[[], Any]) -> None:
        self.format, self.files = form, files
        self._local = local

    @property
    def expected(self) -> list[Any]:
        form = self.format
        return [form.sample(i) for i in range(form.count)] if form.sample else self.local

    @property
    def local(self) -> list[Any]:
        """The samples of the local files, as `epoch` gives them."""
        samples: list[Any] = self._local()
        return samples

    def open(self, place: Place, **store: Any) -> Any:
        return self.format.open(place.root, **{**place.store_of(self.format), **store})

    def indices(self) -> list[int]:
        return [index for index in INDICES if index < self.format.count]


FAMILIES = {re.split("[, ]", name)[0]: name for name in reversed(FORMATS)}.values()
"""The first format of each family."""

READERS = ("npy", "hdf5", "zarr 2", "lmdb", "folder", "tfrecord", "parquet", "tar", "lines")
"""One format for each way in which the formats read a store: ranges, libraries of several kinds, copies, listings."""


def open_files() -> Counter[str]:
    """Number of descriptors of this process by what they lead to."""
    targets = Counter[str]()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the descriptor of this very listing
            targets[os.readlink(entry.path)] += 1  # noqa: PTH115 - of hundreds
    return targets


def settle() -> None:
    """Collect what was dropped, and let later collections visit only what is new: that takes milliseconds."""
    gc.collect()
    gc.freeze()


def assert_soon(condition: Callable[[], bool]) -> None:
    """Assert it after collections: a thread that has read for a dataset may hold it for a moment."""
    until = time.monotonic() + 10
    while True:
        gc.collect()
        if condition():
            return
        assert time.monotonic() < until
        time.sleep(0.01)


def law(
    *places: str,
    few: tuple[str, ...] = (),
    fewest: tuple[str, ...] = (),
    turns: tuple[str, ...] = (),
    nightly: tuple[str, ...] = (),
    of: Callable[[Format], object] = bool,
) -> Callable[[Any], Any]:
    """The places in which a law is tested, on all formats that it applies to.

    In those of `few` it is tested on the first format of each family, as these places differ in the store alone. In
    those of `fewest` it is tested on `READERS`: failures are those of the store, and other places show how formats
    react. In those of `turns` it is tested on `READERS`, too, by day on each in one of the places; in those of
    `nightly` on all formats, by night.
    """

    def mark(test: Any) -> Any:
        daily = [(form, place) for place in places for form in FORMATS]
        daily += [(form, place) for place in few for form in FORMATS if form in FAMILIES]
        daily += [(form, place) for place in fewest for form in READERS]
        daily += [(form, place) for turn, place in enumerate(turns) for form in READERS[turn :: len(turns)]]
        night = [(form, place) for place in turns for form in READERS]
        night += [(form, place) for place in nightly for form in FORMATS]
        marks = dict.fromkeys(night, (pytest.mark.nightly,)) | dict.fromkeys(daily, ())
        test.cases = [pytest.param(name, place, marks=marks[name, place]) for name, place in marks if of(FORMATS[name])]
        return test

    return mark


class FormatSuite:
    """Subclasses name their `places`; tests get a `corpus` and a `place` that is still empty."""

    places: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        """Leave out the laws that hold in none of the places."""
        for name, test in vars(FormatSuite).items():
            if hasattr(test, "cases") and not cls._cases(test):
                setattr(cls, name, None)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if hasattr(metafunc.function, "cases"):
            metafunc.parametrize(("corpus", "place"), self._cases(metafunc.function), indirect=True)

    @classmethod
    def _cases(cls, test: Any) -> list[Any]:
        return [case for case in test.cases if case.values[1] in cls.places]

    @law("files", fewest=("memory",), turns=("cached", "s3, cached"))
    def test_samples_are_the_expected_ones_in_every_way(self, corpus: Corpus, place: Place) -> None:
        """One by one, many at once, in batches, pickled, through loaders of every kind, and resumed."""
        place.fill(corpus.files)
        dataset, form = corpus.open(place), corpus.format
        assert equal(epoch(dataset), corpus.expected)
        if not form.random:
            all_ways_agree(dataset, corpus.indices())
        assert dataset.traits.thread_safe  # so that it is read in threads, too
        fl.testing.check_dataset(dataset, collate_fn=form.collate_fn, methods=place.methods)
        assert not place.remote or len(pickle.dumps(dataset)) < PICKLED_NBYTES
        assert "cache" in place.store or form.needs_cache or dataset.ranges(np.array([0, -1])) == []

    @law(few=("files",), fewest=("memory",), nightly=("files", "memory"))
    def test_a_dropped_dataset_is_gone(self, corpus: Corpus, place: Place) -> None:
        """Cycles through the memory of a library would keep it, with its open files."""
        place.fill(corpus.files)

        def use() -> weakref.ref[Any]:
            dataset = corpus.open(place)
            dataset.__getitems__([0, *corpus.indices()])
            assert dataset[0] is not None
            return weakref.ref(dataset)

        use()  # what the first use of a library opens for good
        settle()
        before = open_files()
        dropped = [use() for _ in range(3)]
        assert_soon(lambda: [dataset() for dataset in dropped] == [None] * 3 and open_files() <= before)

    @law("files", of=lambda form: form.cut)
    def test_an_error_keeps_no_file_open(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        assert corpus.format.cut is not None
        name, left, _ = corpus.format.cut
        data = corpus.files[name]
        place.write(name, data[: int(len(data) * left) if isinstance(left, float) else left])

        def refused() -> None:
            with pytest.raises((FeedlineError, OSError)):
                corpus.open(place).__getitems__(list(range(corpus.format.count)))

        refused()
        settle()
        before = open_files()
        for _ in range(3):
            refused()
        assert_soon(lambda: open_files() <= before)

    @law("cached", fewest=("s3, cached",), of=lambda form: not form.needs_cache)
    def test_prefetched_ranges_are_all_that_is_read(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        dataset, indices = corpus.open(place), np.array(corpus.indices())
        if corpus.format.opened_late:
            dataset.__getitems__([1, -2])
        before = statistics()
        wanted = dataset.ranges(indices)
        assert wanted
        assert statistics() == before
        for store, (path, start, stop) in wanted:
            store.fetch_range(path, start, stop)
        before = statistics()
        samples = dataset.__getitems__(indices.tolist())
        after = statistics()
        assert corpus.format.random or equal(samples, [corpus.local[index] for index in indices])
        assert corpus.format.looks_up or (after.nbytes, after.cache_misses) == (before.nbytes, before.cache_misses)
        assert after.cache_hits > before.cache_hits

    @law("memory", of=lambda form: form.together)
    def test_a_batch_is_read_at_once(self, corpus: Corpus, place: Any, together: Callable[[int], Any]) -> None:
        place.fill(corpus.files)
        dataset, count = corpus.open(place), corpus.format.together
        dataset[-1]  # what is read only once
        sizes = getattr(dataset, "shard_sizes", [])
        first = np.cumsum([0, *sizes])[:count].tolist() if len(sizes) >= count else list(range(count))
        with together(count):
            assert len(dataset.__getitems__(first)) == count

    @law(few=("cached",), turns=("cached", "s3, cached"), nightly=("cached",), of=lambda form: form.own_layout)
    def test_with_a_cache_the_next_run_fetches_no_data(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        epoch(corpus.open(place))
        before = statistics().nbytes
        assert equal(epoch(corpus.open(place)), corpus.local)
        assert statistics().nbytes - before <= corpus.format.described_nbytes(corpus.files)

    @law(few=("memory",), fewest=("s3",), nightly=("memory",), of=lambda form: form.indexed and form.own_layout)
    def test_facts_about_the_files_are_kept(self, corpus: Corpus, place: Place) -> None:
        """With the index on this machine, the next opening reads only the description of the corpus."""
        place.fill(corpus.files)
        corpus.open(place)
        before = statistics().nbytes
        dataset = corpus.open(place)
        assert statistics().nbytes - before <= corpus.format.described_nbytes(corpus.files)
        assert equal(epoch(dataset), corpus.local)

    @law("memory", fewest=("s3",), of=lambda form: not form.needs_cache and form.own_layout)
    def test_an_object_that_changed_or_went_is_named(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        dataset, form = _opened(corpus, place), corpus.format
        place.fill({name: data + b"more" for name, data in corpus.files.items()})
        if form.versions == "always":
            for read in _ways(dataset):
                with _raises(ObjectChangedError, place, "{}.* has changed .*: version .*(?i:create the dataset again)"):
                    read(corpus.indices())
        place.remove(*corpus.files)
        if form.gone:
            with _raises(ObjectNotFoundError, place, form.gone):
                dataset.__getitems__(corpus.indices())
        with _raises((FileNotFoundError, SampleError), place, form.gone or "{}"):
            corpus.open(place)[0]

    @law(few=("cached",), of=lambda form: form.versions != "never")
    def test_with_a_cache_a_changed_object_is_named_or_the_old_one_served(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        dataset = _opened(corpus, place)
        for name, data in corpus.files.items():
            place.write(name, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))
        try:
            seen = epoch(dataset)
        except ObjectChangedError:
            return
        assert equal(seen, corpus.local)

    @law("files", fewest=("memory", "s3"), of=lambda form: form.cut)
    def test_a_truncated_file_is_named(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        name, left, message = corpus.format.cut
        data = corpus.files[name]
        place.write(name, data[: int(len(data) * left)] if isinstance(left, float) else data[:left])
        with pytest.raises(SampleError, match=message.replace("{}", re.escape(f"{place.root}/{name}"))):
            epoch(corpus.open(place))

    @law(few=("files",), turns=("memory", "cached"), nightly=("files",), of=lambda form: form.own_layout)
    def test_each_change_of_the_data_gives_another_fingerprint(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        dataset = corpus.open(place)
        seen = [fingerprint(dataset)]
        copy = pickle.loads(pickle.dumps(dataset))
        dataset[0], copy[-1]  # files opened and values cached in between are no change
        assert seen == [fingerprint(copy)] == [fingerprint(dataset)] == [fingerprint(corpus.open(place))]
        changed = corpus.format.data_files(corpus.files)
        assert changed
        for name in changed:
            place.touch(name, corpus.files[name])
            seen.append(fingerprint(corpus.open(place)))
        assert len({*seen}) == 1 + len(changed)

    @law(fewest=("s3",))  # in other places, rewriting the same content makes another version, too
    def test_other_content_is_refused_or_has_another_fingerprint(self, corpus: Corpus, place: Place) -> None:
        place.fill(corpus.files)
        before = fingerprint(corpus.open(place))
        name = corpus.format.data_files(corpus.files)[-1]
        data = bytearray(corpus.files[name])
        data[len(data) // 2] ^= 1
        place.touch(name, bytes(data))
        with suppress(SampleError):
            assert fingerprint(corpus.open(place)) != before


def _opened(corpus: Corpus, place: Place) -> Any:
    """The dataset, after the reads that its first sample causes."""
    dataset = corpus.open(place)
    if corpus.format.opened_late:
        dataset.__getitems__([0, -1])
    return dataset


def _ways(dataset: Any) -> Iterator[Callable[[list[int]], Any]]:
    yield dataset.__getitems__
    yield lambda indices: [dataset[index] for index in indices]
    if reader_of(dataset) is not None:
        yield lambda indices: next(iter(fl.DataLoader(dataset, len(indices), sampler=indices, seed=1)))


@contextmanager
def _raises(error: Any, place: Place, message: str) -> Iterator[None]:
    """That error, with the address of an object where the message has `{}`."""
    with pytest.raises(error, match=message.replace("{}", rf"{re.escape(place.root)}(/\S+)?")):
        yield
