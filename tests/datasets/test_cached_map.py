"""Cached results are valid only for the data and the code that they were computed from."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property, lru_cache, partial, partialmethod, wraps
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import fsspec
import h5py
import numpy as np
import PIL.Image
import pytest
import torch
import zarr
from fsspec.implementations.memory import MemoryFileSystem
from preloaded import Preloaded
from record_files import filled
from tar_cases import write_tar

import feedline
from feedline.datasets import HDF5, LMDB, CachedMap, Files, Filter, ImageFolder, Map, PackedStrings, TarShards, Zarr
from feedline.datasets.fingerprints import _distributed_version, _function, fingerprint
from feedline.errors import ArgumentError
from formats.files import manifest, write_texts
from formats.suite import FORMATS


def _tars(folder: Path) -> None:
    for name in ("a", "b"):
        write_tar(folder / f"{name}.tar", {f"{i:03}.txt": f"{i:0800}".encode() for i in range(100)})


class Here:
    """Files of this machine."""

    def __init__(self, folder: Path) -> None:
        self.root = str(folder)

    def change(self, path: Path, data: bytes) -> None:
        before = path.stat().st_mtime_ns
        path.write_bytes(data)
        os.utime(path, ns=(before + 10**6, before + 10**6))


class Away:
    """The same files as objects."""

    root = "memory://bucket"

    def __init__(self, folder: Path) -> None:
        self._folder, self._system = folder, fsspec.filesystem("memory")
        for path in folder.rglob("*"):
            if path.is_file():
                self.change(path, path.read_bytes())

    def change(self, path: Path, data: bytes) -> None:
        self._system.pipe(f"/bucket/{path.relative_to(self._folder).as_posix()}", data)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    (tmp_path / "data").mkdir()
    yield tmp_path / "data"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


class Times:
    """An instance that a class holds."""

    def __init__(self, by: int) -> None:
        self.by = by


def _texts(folder: Path, number: int) -> None:
    write_texts(folder)
    (folder / "07.txt").write_text(f"text {number}")


def _image(folder: Path, number: int) -> None:
    (folder / "class").mkdir(exist_ok=True)
    PIL.Image.new("RGB", (4, 4), (number, 0, 0)).save(folder / "class" / "a.bmp")


def _chunks(folder: Path, number: int) -> None:
    zarr.create_array(folder / "a.zarr", data=np.full(9, number), chunks=(1,), compressors=None, overwrite=True)


def _environments(folder: Path, number: int) -> None:
    (folder / "a").mkdir(exist_ok=True)
    for path in (folder / "a" / "data.mdb", folder / "a.lmdb"):
        filled(folder / "new", {b"0": b"0", b"1": b"%d" % number}, subdir=False).replace(path)  # the other may be open


def _other_files(folder: Path, number: int) -> None:
    """Rows of `0.h5` and `raw`, by a link, virtual datasets and as external data."""
    with h5py.File(folder / "new", "w") as file:
        file["x"] = np.full(4, number)
    (folder / "new").replace(folder / "0.h5")  # the other may be open
    np.full(4, number).tofile(folder / "raw")
    if not (folder.parent / "all.h5").exists():  # itself unchanged
        with h5py.File(folder.parent / "all.h5", "w") as file:
            file["link"] = h5py.ExternalLink("data/0.h5", "x")
            layout = h5py.VirtualLayout((4,), "i8")
            layout[:] = h5py.VirtualSource("data/0.h5", "x", (4,))
            file.create_virtual_dataset("virtual", layout)
            blocks = h5py.h5s.create_simple((4,), (h5py.h5s.UNLIMITED,))
            blocks.select_hyperslab((0,), (h5py.h5s.UNLIMITED,), (4,), (4,))
            form = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            form.set_virtual(blocks, b"data/%b.h5", b"x", h5py.h5s.create_simple((4,)))
            h5py.h5d.create(file.id, b"pattern", h5py.h5t.NATIVE_INT64, blocks, form)
            file.create_dataset("external", (4,), "i8", external=str(folder / "raw"))


def _tar(folder: Path, number: int) -> None:
    _tars(folder)
    with open(folder / "a.tar", "r+b") as file:  # within a member, which no index covers
        file.seek((7 * 3 + 1) * 512)
        file.write(f"{number}".encode())


def _opened_environment(name: str, keys: Any, root: str, **more: Any) -> LMDB:
    return LMDB(f"{root}/{name}", keys, **more)


def _opened_hdf5(name: str, root: str) -> HDF5:
    return HDF5(f"{root}/../all.h5", name)


CHANGED: dict[str, tuple[Callable[[Path, int], None], Callable[..., Any], Callable[[Any], str]]] = {
    "files": (_texts, lambda root, **more: Files(f"{root}/*.txt", decode="text", **more), str),
    "manifest": (_texts, manifest, lambda sample: sample["data"]),
    "folder": (
        _image,
        lambda root, **more: ImageFolder(root, **more),
        lambda sample: str(sample[0].getpixel((0, 0))),
    ),
    "zarr": (_chunks, lambda root, **more: Zarr(f"{root}/a.zarr", **more), str),
    **{
        f"lmdb {name} {keys}": (_environments, partial(_opened_environment, name, keys), bytes.decode)
        for name in ("a", "a.lmdb")
        for keys in (None, "{}", ("0", "1"))
    },
    **{
        f"hdf5 {name}": (_other_files, partial(_opened_hdf5, name), str)
        for name in ("link", "virtual", "pattern", "external")
    },
    "tars": (_tar, lambda root, **more: TarShards(f"{root}/*.tar", **more), lambda sample: sample["txt"]),
}

LOCAL = {name for name in CHANGED if name.startswith(("lmdb", "hdf5"))}


@pytest.mark.parametrize(
    ("name", "place"),
    [
        *((name, place) for name in CHANGED for place in ("here", "away") if place == "here" or name not in LOCAL),
        *((name, "cached") for name in ("files", "tars", "lmdb a.lmdb {}")),
    ],
)
def test_results_are_those_of_the_data_as_they_are(name: str, place: str, folder: Path, tmp_path: Path) -> None:
    write, opened, seen = CHANGED[name]
    more = {"cache": tmp_path / "cache"} if place == "cached" else {}
    for number in (3, 4, 3):
        write(folder, number)
        for path in folder.rglob("*"):
            os.utime(path, ns=(number, number))  # as if long ago, or at the same moment
        dataset = opened((Here(folder) if place == "here" else Away(folder)).root, **more)
        wanted = [seen(dataset[at]) for at in range(len(dataset))]
        assert any(str(number) in text for text in wanted)
        kept = CachedMap(dataset, seen, tmp_path / "kept")
        assert [kept[at] for at in range(len(kept))] == wanted
        with_four = Filter(Map(dataset, seen), lambda text: "4" in text, index_dir=tmp_path / "chosen").indices.tolist()
        assert with_four == [at for at, text in enumerate(wanted) if "4" in text]
        del dataset, kept  # HDF5 reads sources as they were while a virtual dataset of them is open


class TestObjectsWithoutVersions:
    @pytest.fixture(autouse=True)
    def _no_versions(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def reported(info: dict[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in info.items() if name != "created"}

        asked, found = MemoryFileSystem.info, MemoryFileSystem.find
        monkeypatch.setattr(MemoryFileSystem, "info", lambda *given, **more: reported(asked(*given, **more)))
        monkeypatch.setattr(
            MemoryFileSystem,
            "find",
            lambda *given, detail=False, **more: (
                {name: reported(info) for name, info in found(*given, detail=True, **more).items()}
                if detail
                else found(*given, **more)
            ),
        )

    @pytest.mark.parametrize(
        ("name", "cached"),
        [
            *((name, False) for name in ("files", "manifest", "folder", "zarr 3", "tokens", "jsonl", "litdata")),
            *(("parquet", False), ("tar", False), ("tar", True)),  # a cache asks the same store for versions
        ],
    )
    def test_nothing_is_kept_of_them(self, name: str, cached: bool, folder: Path, tmp_path: Path) -> None:
        case = FORMATS[name]
        case.write(folder)
        dataset = case.open(Away(folder).root, **({"cache": tmp_path / "cache"} if cached else {}))
        with pytest.raises(ArgumentError, match=r"has no version of .*copy the data to a store with versions"):
            CachedMap(dataset, str, tmp_path / "kept")
        with pytest.raises(ArgumentError, match=r"has no version of .*Leave out index_dir= of Filter"):
            Filter(dataset, bool, index_dir=tmp_path / "kept")


@pytest.fixture(scope="class")
def preloaded(preloaded: Preloaded) -> Iterator[Preloaded]:
    # No bytecode: a module that is written again within a second must be read again.
    with Preloaded(trunk=preloaded, setup="sys.dont_write_bytecode = True") as server:
        yield server


def _lent(server: Preloaded, folder: Path, **sources: str) -> list[str]:
    """Output of a job that caches results of functions, which call functions of the user's own modules."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    output = folder / "output.log"
    assert server.run(folder / "job.py", output, 120.0) == 0, output.read_text()
    return output.read_text().split()


FUNCTIONS = """
import numpy as np
import lent
import package.inner
from feedline.datasets import Arrays, CachedMap, Filter, Map
from feedline.datasets.fingerprints import _distributed_version, fingerprint
from lent import Scale as Taken


def by_attribute(x):
    return lent.scaled(int(x))


def by_class(x):
    return Taken()(int(x))


def by_instance(x):
    return lent.Scale()(int(x))


def by_static_method(x):
    return lent.Scale.apart(int(x))


def by_class_method(x):
    return Taken.of_class(int(x))


def by_property(x):
    return Taken().factor * int(x)


def by_what_remembers(x):
    return lent.remembered(int(x))


def by_name(x):
    return getattr(lent, "scaled")(int(x))


def imported_when_called(x):
    import lent as theirs

    return theirs.scaled(int(x))


def imported_of_a_package(x):
    from package import lazy

    return lazy.deep(int(x))


def in_a_package(x):
    return package.inner.deep(int(x))


def closed_over(module):
    return lambda x: module.scaled(int(x))


class Method:
    def __call__(self, x):
        return lent.scaled(int(x))


functions = [by_attribute, by_class, by_instance, by_name, imported_when_called, imported_of_a_package]
functions += [package.inner.relative, in_a_package, by_static_method, by_class_method, by_property, by_what_remembers]
"""
JOB = f"""{FUNCTIONS}
data = Arrays(np.arange(4))
for fn in (*functions, closed_over(lent), Method()):
    print(CachedMap(data, fn, "kept")[1])
    print(CachedMap(Map(data, fn), str, "kept")[1])
    print(Filter(data, lambda x: fn(x) == 2, index_dir="found").indices.sum())
"""
INNER = """
import lent


def deep(x):
    return lent.scaled(x)


def relative(x):
    from .later import deep

    return deep(int(x))
"""
LENT = """
import functools


def scaled(x):
    return x * {by}


class Scale:
    by = [{by}]

    def __call__(self, x):
        return x * self.by[0]

    @staticmethod
    def apart(x):
        return x * {by}

    @classmethod
    def of_class(cls, x):
        return x * {by}

    @functools.cached_property
    def factor(self):
        return {by}


@functools.lru_cache
def remembered(x):
    return x * {by}
"""


class TestCodeOfTheUsersOwn:
    def test_results_follow_the_modules_that_functions_name(self, preloaded: Preloaded, tmp_path: Path) -> None:
        (tmp_path / "package").mkdir()
        (tmp_path / "package" / "__init__.py").write_text("")
        for name in ("inner", "lazy", "later"):
            (tmp_path / "package" / f"{name}.py").write_text(INNER)
        for by, found in ((2, 1), (3, 0)):
            assert _lent(preloaded, tmp_path, job=JOB, lent=LENT.format(by=by)) == [str(by), str(by), str(found)] * 14

    def test_a_job_that_is_run_again_finds_its_results(self, preloaded: Preloaded, tmp_path: Path) -> None:
        job = JOB.replace(
            "data = Arrays", "from feedline.datasets.fingerprints import fingerprint as CachedMap\ndata = Arrays"
        )
        job = job[: job.index("    print(")] + "    print(CachedMap(fn))\n"
        (tmp_path / "package").mkdir()
        for name in ("inner", "lazy", "later"):
            (tmp_path / "package" / f"{name}.py").write_text(INNER)
        first = _lent(preloaded, tmp_path, job=job, lent=LENT.format(by=2))
        assert first == _lent(preloaded, tmp_path, job=job)

    @pytest.mark.parametrize(
        ("before", "after"),
        [
            ([1], [2]),
            ({"k": 1}, {"k": 2}),
            ((1, [2]), (1, [3])),
            ({1}, {2}),
            (b"a", b"b"),
            (None, 1),
            (np.arange(3), np.arange(3) + 1),
            (torch.arange(3), torch.arange(3) + 1),
            (np.float32(1), np.float32(2)),
            (torch.float32, torch.float16),
            (Times(2), Times(3)),
            (lru_cache(lambda self: 2), lru_cache(lambda self: 3)),
            (partialmethod(max, 2), partialmethod(max, 3)),
            (Path("here"), Path("there")),
            (re.compile("a"), re.compile("b")),
        ],
    )
    def test_values_of_classes_count(self, before: Any, after: Any) -> None:
        class Kind(type):
            value = before

        class Settings(metaclass=Kind):
            value = before
            __value__ = before

        def named() -> None: ...

        named.value = before  # type: ignore[attr-defined]

        def used(x: Any) -> Any:
            return Settings.value, named.value, x  # type: ignore[attr-defined]

        reported = fingerprint(used)
        assert fingerprint(used) == reported
        for holder, name in ((Settings, "value"), (Settings, "__value__"), (Kind, "value"), (named, "value")):
            setattr(holder, name, after)
            assert fingerprint(used) != reported
            setattr(holder, name, before)
            assert fingerprint(used) == reported

    @pytest.mark.parametrize(
        ("first", "second"),
        [(np.arange(1), np.arange(2)), (torch.tensor(1), torch.tensor(2)), (lambda x: x, lambda x: -x), (int, str)],
    )
    def test_it_counts_which_of_the_known_things_is_used(self, first: Any, second: Any) -> None:
        assert fingerprint([first, second, first]) != fingerprint([first, second, second])

    def test_the_parameters_of_functions_count(self) -> None:
        kinds: list[Any] = [lambda x, y=1: x, lambda *x, y=1: x, lambda x, *, y=1: x, lambda x, y=1, /: x]
        assert len(set(map(fingerprint, kinds))) == len(kinds)

    @pytest.mark.parametrize(("thing", "package"), [(PIL.Image.Image, PIL), (PIL.Image.open, PIL), (Files, feedline)])
    def test_the_versions_of_packages_count(self, thing: Any, package: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        before = fingerprint(thing)
        monkeypatch.setattr(package, "__version__", "another one", raising=False)
        assert fingerprint(thing) != before

    def test_the_version_of_a_package_is_also_known_to_its_installer(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(PIL, "__version__")
        _distributed_version.cache_clear()
        before = fingerprint(PIL.Image.open)
        _distributed_version.cache_clear()
        monkeypatch.setattr(metadata, "version", lambda name: f"another {name}")
        assert fingerprint(PIL.Image.open) != before
        _distributed_version.cache_clear()

    @pytest.mark.parametrize("kind", [str, Path, lambda path: PackedStrings([str(path)]), lambda path: {str(path)}])
    @pytest.mark.parametrize("place", ["", "below", "..", "absolute"])
    def test_the_path_of_a_file_is_the_file_as_it_is(
        self, kind: Callable[[Path], Any], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = tmp_path / "here" / place if place == "below" else tmp_path / ".." / tmp_path.name / "here"
        (tmp_path / "here" / "below").mkdir(parents=True)
        (tmp_path / "here" / "up").mkdir()
        monkeypatch.chdir(tmp_path / "here" / ("up" if place == ".." else ""))
        file = folder / "a.txt"
        named = kind({"": Path("a.txt"), "..": Path("../a.txt"), "below": Path("below/a.txt")}.get(place, file))
        file.write_text("one")
        before = fingerprint(named, lambda: named)
        assert fingerprint(named, lambda: named) == before
        file.write_text("longer")
        assert fingerprint(named, lambda: named) != before

    def test_attributes_that_python_and_decorators_add_to_classes_do_not_matter(self) -> None:
        @dataclass
        class Point(Hashable):
            x: int = 1
            tags: list[str] = field(default_factory=list)
            lock: ClassVar[Any] = threading.Lock()

            class Inner(Enum):
                ONE = 1
                TWO = 2

            @cached_property
            def both(self) -> int:
                return self.x

        class Pair(NamedTuple):
            first: int
            second: float = 2.0

        for thing in (Point, Point(3), Point.Inner, Point.Inner.TWO, Pair, Pair(1)):
            assert fingerprint(thing) == fingerprint(thing)
        assert fingerprint(Point.Inner.ONE) != fingerprint(Point.Inner.TWO)
        before = fingerprint(Point)
        Point.__pydantic_core_schema__ = {"ref": f"Point:{id(Point)}"}  # type: ignore[attr-defined]
        assert fingerprint(Point) == before

    def test_a_function_that_remembers_is_the_function(self) -> None:
        def remembering(by: int) -> Any:
            return lru_cache(lambda x: x * by)

        assert fingerprint(remembering(1)) == fingerprint(remembering(1)) != fingerprint(remembering(2))

    @pytest.mark.parametrize("original", [np.median, torch.optim.SGD.step])
    def test_a_function_that_wraps_one_of_a_package_is_its_own_code(self, original: Any) -> None:
        def wrapping(by: int) -> Any:
            return wraps(original)(lambda x: x * by)

        assert fingerprint(wrapping(2)) == fingerprint(wrapping(2)) != fingerprint(wrapping(3))
        # A decorator of a package makes a function of that package, with the user's arguments.
        forbidden, allowed = torch.no_grad()(np.median), torch.inference_mode()(np.median)
        assert fingerprint(np.median) != fingerprint(forbidden) != fingerprint(allowed)

    @pytest.mark.parametrize("thing", [torch.nn.utils.clip_grad_norm_, torch.nn.functional.fold])
    def test_decorated_functions_of_a_package_are_its_version(self, thing: Any) -> None:
        assert _function(thing)[0] == "of"
