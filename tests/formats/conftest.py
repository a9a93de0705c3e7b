"""The places of the suite, and the corpora, each written once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from ceph import S3
from fsspec.implementations.memory import MemoryFileSystem

from formats.format import contents, epoch
from formats.places import Bucket, Memory, Place, Web, small_pieces
from formats.suite import FORMATS, Corpus


@pytest.fixture(autouse=True)
def indexes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Indexes of remote objects stay in the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


@pytest.fixture(scope="session")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Corpus]:
    @cache
    def corpus(name: str) -> Corpus:
        folder, form = tmp_path_factory.mktemp("corpus"), FORMATS[name]
        form.write(folder)
        # Files that are opened where they were written may get indexes next to them.
        return Corpus(form, contents(folder), cache(lambda: epoch(form.open(str(folder)))))

    return corpus


@pytest.fixture
def corpus(request: pytest.FixtureRequest, corpora: Callable[[str], Corpus]) -> Corpus:
    return corpora(request.param)


@pytest.fixture
def memory() -> Iterator[Memory]:
    place = Memory()
    yield place
    place.clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for files that are written first and then put into a store."""
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.fixture(scope="session")
def bucket(s3: S3) -> str:
    return s3.bucket()


@pytest.fixture
def keys(s3: S3, monkeypatch: pytest.MonkeyPatch) -> S3:
    """The server, whose keys are in the environment of this process and its workers."""
    monkeypatch.setenv("SUITE_KEY", s3.access_key_id)
    monkeypatch.setenv("SUITE_SECRET", s3.secret_access_key)
    return s3


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """The place of that name, empty."""
    kind, _, cached = request.param.partition(", ")
    store = {"cache": small_pieces(tmp_path)} if cached or kind == "cached" else {}
    made: Any
    if kind == "files":
        (tmp_path / "data").mkdir()
        made = Place(str(tmp_path / "data"))
    elif kind in ("memory", "cached"):
        made = request.getfixturevalue("memory")
        made.store = store
    elif kind == "web":
        folder = request.getfixturevalue("web_root") / uuid4().hex
        made = Web(request.getfixturevalue("web"), folder)
    else:
        made = Bucket(request.getfixturevalue("keys"), request.getfixturevalue("bucket"), uuid4().hex, **store)
    made.copies = small_pieces(tmp_path, 4 << 20)
    return made


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], AbstractContextManager[None]]:
    """Makes reads from memory wait until that many have begun; sequential reads would wait forever."""

    @contextmanager
    def waiting(count: int) -> Iterator[None]:
        meeting, plain = threading.Barrier(count, timeout=60), MemoryFileSystem.cat_file

        def cat_file(*arguments: Any, **more: Any) -> Any:
            meeting.wait()
            return plain(*arguments, **more)

        with monkeypatch.context() as patched:
            patched.setattr(MemoryFileSystem, "cat_file", cat_file)
            yield

    return waiting
