"""Names of objects that look like patterns, folders, or paths that lead elsewhere."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import partialmethod
from pathlib import Path
from typing import Any

import fsspec
import pytest
from azurite import Azure
from ceph import S3
from gcs import GCS, guard, service_account
from google_cases import without_credentials
from web_servers import Handler, serving

import feedline as fl
from feedline import stores
from feedline.stores.signed_requests import AzureReader, SignedReader

NAMED = {"why?.txt": b"why", "img[1].txt": b"literal", "img1.txt": b"matched", "star*.txt": b"star", "whys.txt": b"s"}
FOLDERS = ("train/", "train/cats/", "lonely/")
IMAGES = {"train/cats/0.bin": b"zero", "train/dogs/1.bin": b"one", "empty.bin": b""}


class Place:
    """A folder or store with the same files: `at(name)` is the address of one."""

    def __init__(self, root: str, options: dict[str, Any] | None = None) -> None:
        self.root, self.options = root, options

    def at(self, name: str) -> str:
        return f"{self.root}/{name}"

    def texts(self, *names: str) -> list[str]:
        return list(fl.datasets.Files([self.at(name) for name in names], decode="text", options=self.options))


@pytest.fixture(params=["local", "s3", "memory", "web"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "s3":
        server: S3 = request.getfixturevalue("s3")
        return Place(f"s3://{server.bucket(NAMED)}", server.options)
    if request.param == "memory":
        fsspec.filesystem("memory").pipe({f"/names/{name}": data for name, data in NAMED.items()})
        return Place("memory://names")
    folder = request.getfixturevalue("web_root") / "names" if request.param == "web" else tmp_path
    folder.mkdir(exist_ok=True)
    for name, data in NAMED.items():
        (folder / name).write_bytes(data)
    return Place(f"{request.getfixturevalue('web')}/names") if request.param == "web" else Place(str(tmp_path))


@pytest.mark.parametrize("name", ["why?.txt", "img[1].txt", "star*.txt"])
def test_an_address_is_the_object_of_that_name_before_it_is_a_pattern(place: Place, name: str) -> None:
    # In the address of a web server a question mark begins the query.
    written = name.replace("?", "%3F") if place.root.startswith("http") else name
    assert place.texts(written) == [NAMED[name].decode()]
    found = fl.datasets.Lines(place.at(written), options=place.options)
    assert list(found) == [NAMED[name].decode()]


def test_patterns_match_where_there_is_no_object_of_that_name(place: Place) -> None:
    if place.root.startswith("http"):
        with pytest.raises(stores.StoreError, match="web servers do not list"):
            place.texts("img[0-9].txt")
        return
    assert place.texts("img[0-9].txt") == ["matched"]
    with pytest.raises(FileNotFoundError):
        place.texts("no[0-9].txt")


@pytest.fixture
def folders(s3: S3) -> Place:
    bucket = s3.bucket(IMAGES)
    for name in FOLDERS:
        s3.put_key(bucket, name, b"")
    s3.put_key(bucket, "hadoop_$folder$", b"")
    return Place(f"s3://{bucket}", s3.options)


WAYS: dict[str, Callable[[Place], list[str]]] = {
    "list": lambda place: [info.path for info in stores.open_store(place.root, options=place.options).list()],
    "glob": lambda place: [
        address.removeprefix(f"{place.root}/") for address in stores.expand(place.at("**"), options=place.options)
    ],
    "files": lambda place: list(fl.datasets.Files(place.at("**"), options=place.options).paths),
}


@pytest.mark.parametrize("way", WAYS)
def test_markers_of_folders_are_no_files(folders: Place, way: str) -> None:
    assert WAYS[way](folders) == sorted(IMAGES)


def test_a_folder_stands_for_the_files_in_it(folders: Place) -> None:
    for address in ("train/cats/", "train/cats/*"):
        assert list(fl.datasets.Files(folders.at(address), options=folders.options)) == [b"zero"]
    found = fl.datasets.Lines(folders.at("train/cats"), inside="*", options=folders.options)
    assert list(found) == ["zero"]


def test_class_folders_with_markers(folders: Place) -> None:
    images = fl.datasets.ImageFolder(
        folders.at("train"), options=folders.options, loader=bytes, is_valid_file=lambda _: True
    )
    assert [Path(path).name for path, _ in images.samples] == ["0.bin", "1.bin"]
    assert images.classes == ["cats", "dogs"]


def test_a_folder_whose_name_looks_like_a_pattern(s3: S3) -> None:
    bucket = s3.bucket({"run[1]/0.txt": b"zero", "run1/1.txt": b"one", "run[2]/2.txt": b"two"})
    lines = [
        list(fl.datasets.Lines(f"s3://{bucket}/{name}", inside="*.txt", options=s3.options))
        for name in ("run[2]", "run[2]/")
    ]
    assert lines == [["two"], ["two"]]


def test_files_notice_objects_that_change(s3: S3, tmp_path: Path) -> None:
    bucket = s3.bucket({"a.txt": b"before", "b.txt": b"other"})
    table = tmp_path / "table.db"
    with closing(sqlite3.connect(table)) as database, database:
        database.execute("create table files (id integer primary key, path text)")
        database.executemany("insert into files (path) values (?)", [("a.txt",), ("b.txt",)])
    root = f"s3://{bucket}"

    def opened() -> list[Any]:
        files = fl.datasets.Files([f"{root}/a.txt", f"{root}/b.txt"], options=s3.options)
        rows = fl.datasets.SQLManifest(
            str(table), "select id, path from files", root=root, key="id", options=s3.options
        )
        return [files, rows]

    datasets, before = opened(), stores.statistics().requests
    for data in datasets:
        assert len([data[index] for index in (0, 1, 0)]) == 3
    assert stores.statistics().requests - before == 6, "no request is additional"
    s3.put(bucket, {"a.txt": b"behind"})
    for data in datasets:
        with pytest.raises(stores.ObjectChangedError, match=r"a\.txt has changed since .* create the dataset again"):
            data[0]
        assert data[1] is not None
    assert opened()[0][0] == b"behind"
    loader = fl.DataLoader(datasets[0], 2, num_workers=1, worker_method="thread")
    with loader, pytest.raises(stores.ObjectChangedError):
        list(loader)


ODD = {
    "a//b.txt": b"empty part",
    "a/ok.txt": b"ok",
    "line\nbreak.txt": b"line",
    "x/é ü/%2F&+.txt": b"odd",
    "z.txt": b"last",
}


@pytest.fixture(params=["s3", "gs", "az"])
def odd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Place, Place]:
    """A public bucket with odd keys, opened with credentials and without."""
    without_credentials(monkeypatch, tmp_path)
    if request.param == "s3":
        s3: S3 = request.getfixturevalue("s3")
        bucket = s3.bucket()
        for key, data in ODD.items():
            s3.put_key(bucket, key, data)
        s3.make_public(bucket)
        settings: list[dict[str, Any]] = [s3.options, {"endpoint": s3.endpoint, "skip_signature": True}]
    elif request.param == "gs":
        google: GCS = request.getfixturevalue("gcs")
        bucket = google.bucket(ODD)
        settings = [{"endpoint": google.endpoint, "service_account_key": service_account()}, google.options]
    else:
        azure: Azure = request.getfixturevalue("azure")
        bucket = azure.container({})
        for key, data in ODD.items():
            azure.put_key(bucket, key, data)
        azure.make_public(bucket)
        public = {"account_name": azure.options["account_name"], "skip_signature": True}
        settings = [azure.options, {"endpoint": azure.endpoint, **public}]
    known, unknown = (Place(f"{request.param}://{bucket}", options) for options in settings)
    return known, unknown


@pytest.mark.parametrize("anonymous", [False, True])
def test_keys_that_are_no_paths_are_listed_and_read(odd: tuple[Place, Place], tmp_path: Path, anonymous: bool) -> None:
    root, options = odd[anonymous].root, odd[anonymous].options
    for cache in (None, tmp_path):
        store = stores.open_store(root, options=options, cache=cache)
        listed = list(store.list())
        assert {info.path: info.size for info in listed} == {key: len(data) for key, data in ODD.items()}
        assert [info.path for info in listed] == sorted(ODD)
        for info in listed:
            assert store.read(info.path, version=info.version) == ODD[info.path]
            assert store.info(info.path) == info
        assert store.read("a//b.txt", 2, 5) == b"pty"
    data = fl.datasets.Files(f"{root}/**/*.txt", decode="text", options=options)
    assert list(data) == [ODD[key].decode() for key in sorted(ODD)]
    assert list(fl.datasets.Files(f"{root}/a/*.txt", decode="text", options=options)) == ["ok"]
    with pytest.raises(stores.ObjectNotFoundError, match="no//such: there is no such object"):
        store.read("no//such")


def test_a_token_of_google_reads_such_keys(gcs: GCS, tmp_path: Path) -> None:
    bucket = gcs.bucket(ODD)
    with guard(tmp_path, gcs) as guarded:

        def opened(token: str) -> stores.Store:
            return stores.open_store(f"gs://{bucket}", options={"endpoint": guarded.endpoint, "bearer_token": token})

        store = opened(guarded.token)
        assert {info.path: bytes(store.read(info.path)) for info in store.list()} == ODD
        with pytest.raises(stores.AccessDeniedError, match=r"status 401"):
            opened("wrong").read("a//b.txt")


def test_a_token_of_azure_goes_with_requests_for_such_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    without_credentials(monkeypatch, tmp_path)
    pages = {
        "comp=list": b"<EnumerationResults><Blobs><Blob><Name>a//b.txt</Name><Properties><Content-Length>3"
        b"</Content-Length><Etag>1</Etag><Content-Type>text/plain</Content-Type>"
        b"<Last-Modified>Tue, 01 Oct 2024 10:00:00 GMT</Last-Modified>"
        b"</Properties></Blob></Blobs><NextMarker/></EnumerationResults>",
        "a//b.txt": b"odd",
    }
    seen = list[tuple[str, str | None, str | None]]()

    class Server(Handler):
        def do_GET(self) -> None:
            seen.append((self.path, self.headers.get("Authorization"), self.headers.get("x-ms-version")))
            self.answer(200, next(data for mark, data in pages.items() if mark in self.path), {"ETag": "1"})

    with serving(Server, None) as server:
        options = {"endpoint": server.url, "account_name": "a", "bearer_token": "secret"}
        store = stores.open_store("az://box", options=options)
        assert store.read("a//b.txt") == b"odd"
        assert [info.path for info in store.list()] == ["a//b.txt"]
    ours = {(token, version) for path, token, version in seen if "//" in path or "delimiter" not in path}
    assert ("Bearer secret", "2020-12-06") in ours
    assert all(token == "Bearer secret" for _, token, _ in seen)
    assert not any("sig=" in path or "secret" in path for path, _, _ in seen)


def test_credentials_that_sign_no_links_are_named(
    azure: Azure, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    without_credentials(monkeypatch, tmp_path)
    bucket, remedy = azure.container({}), r"the key of the account, a SAS token"
    azure.put_key(bucket, "a//b.txt", b"odd")
    azure.make_public(bucket)
    # The reader of odd keys sees other credentials than the client, as it does with an identity of the machine.
    monkeypatch.setattr("feedline.stores.signed_requests.AzureReader._option", lambda self, *names: None)
    with pytest.raises(stores.StoreError, match=r"there is an object named 'a//b\.txt'.* Rename or remove") as caught:
        list(stores.open_store(f"az://{bucket}", options=azure.options).list())
    assert remedy in "".join(caught.value.__notes__)


@pytest.mark.nightly
def test_listings_of_many_pages_with_an_odd_key(s3: S3) -> None:
    """With pages of their usual size; `test_odd_keys_on_many_pages` has smaller ones."""
    names = {f"{number:04}.txt": b"x" for number in range(1010)}  # a page has 1000
    bucket = s3.bucket(names)
    s3.put_key(bucket, "1005//odd.txt", b"odd")
    store = stores.open_store(f"s3://{bucket}", options=s3.options)
    assert [info.path for info in store.list()] == sorted([*names, "1005//odd.txt"])


def _with(reader: SignedReader, first: Any, more: dict[str, str], *arguments: str) -> dict[str, str]:
    return {**first(reader, *arguments), **more}


# The stand-in for Google sends all keys at once.
@pytest.mark.parametrize("odd", ["s3", "az"], indirect=True)
def test_odd_keys_on_many_pages(odd: tuple[Place, Place], monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"max-keys": "2", "maxresults": "2"}
    for kind in (SignedReader, AzureReader):
        first = kind.first_page
        monkeypatch.setattr(kind, "first_page", partialmethod(_with, first, small))
    before, place = stores.statistics().requests, odd[0]
    listed = stores.open_store(place.root, options=place.options).list()
    assert [info.path for info in listed] == sorted(ODD)
    assert stores.statistics().requests - before >= 4


def test_a_key_with_dots_is_an_error_of_its_own(s3: S3) -> None:
    store = stores.open_store(f"s3://{s3.bucket({'b.txt': b'other'})}", options=s3.options)
    with pytest.raises(stores.StoreError, match=r"a/\./b\.txt: the key has a part \. or \.\."):
        store.read("a/./b.txt")
