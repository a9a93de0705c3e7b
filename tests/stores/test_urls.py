"""Addresses, patterns and options, without a request, and without showing secrets."""

from __future__ import annotations

import io
import pickle
import tarfile
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import example, given
from hypothesis import strategies as st

from feedline import stores
from feedline.datasets import Files, TarShards
from feedline.errors import ArgumentError, NotPicklableError
from feedline.stores.globs import glob_regex
from feedline.stores.options import StoreOptions
from feedline.stores.urls import join

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("address", "root", "path"),
    [
        ("s3://bucket/a/b.tar", "s3://bucket", "a/b.tar"),
        ("S3://bucket", "s3://bucket", ""),
        ("gs://bucket/x", "gs://bucket", "x"),
        ("abfss://container@account.dfs.core.windows.net/x", "abfss://container@account.dfs.core.windows.net", "x"),
        ("https://host:8080/dir/file", "https://host:8080", "dir/file"),
        ("https://host/my%20data/a%3Fb%2525%.tar", "https://host", "my data/a?b%25%.tar"),
        ("https://host/o/a%2Fb%2bc%1F.jpg", "https://host", "o/a\x1e2Fb\x1e2bc\x1e1F.jpg"),
        ("s3://bucket/my%20data?", "s3://bucket", "my%20data?"),
        ("hdfs://node:8020/d/0.tar", "hdfs://node:8020", "d/0.tar"),
        ("sftp://me@host/d/0.tar", "sftp://me@host", "d/0.tar"),
        ("github://org:repo@main/x", "github://org:repo@main", "x"),
        ("memory://x.tar", "memory://", "x.tar"),
        ("memory://a/x.tar", "memory://", "a/x.tar"),
        ("hf://datasets/user/repo/x", "hf://", "datasets/user/repo/x"),
        ("/data/x.tar", "/", "data/x.tar"),
        ("file:///data/x.tar", "/", "data/x.tar"),
        ("file:///my%20data/x.tar", "/", "my data/x.tar"),
        ("/my%20data/x.tar", "/", "my%20data/x.tar"),
    ],
)
def test_split(address: str, root: str, path: str) -> None:
    assert stores.split(address) == (root, path)
    assert stores.split(join(root, path)) == (root, path)


def test_a_relative_path_is_made_absolute() -> None:
    assert stores.split("x.tar") == ("/", f"{str(Path.cwd()).lstrip('/')}/x.tar")
    assert stores.split(Path("x.tar")) == stores.split("x.tar")


@pytest.mark.parametrize("address", ["s3:///key", "https://"])
def test_an_address_without_a_host_is_refused(address: str) -> None:
    with pytest.raises(ArgumentError, match="names no bucket or server"):
        stores.split(address)


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    for address in (
        f"https://user:{SECRET}@host/x",
        f"s3://key:{SECRET}@bucket/x",
        f"https://host/x?sig={SECRET}",
        f"s3://bucket/x?X-Amz-Signature={SECRET}",
        f"ftp://user:{SECRET}@host/x",
        f"hdfs://user:{SECRET}@host",
    ):
        with pytest.raises(ArgumentError) as caught:
            stores.open_store(address)
        assert SECRET not in str(caught.value)


def test_a_server_with_a_password_is_not_shown() -> None:
    for server in (f"https://me:{SECRET}@minio", f"https://minio/?token={SECRET}"):
        options = StoreOptions({"endpoint": server})
        assert SECRET not in repr(options)
        with pytest.raises(NotPicklableError):
            pickle.dumps(options)


@pytest.mark.parametrize(
    "pattern", [f"https://host/{{0..3.tar?sig={SECRET}", f"https://me:{SECRET}@host/{{0..3}}{{.tar"]
)
def test_a_wrong_pattern_does_not_tell_credentials(pattern: str) -> None:
    for open_it in (stores.expand, Files, TarShards):
        with pytest.raises(ArgumentError) as caught:
            open_it(pattern)
        assert SECRET not in str(caught.value)


class HostFileSystem(MemoryFileSystem):  # type: ignore[misc]
    """One server of many, like those of hdfs, ftp and sftp; it has no versions, and its errors reveal too much."""

    protocol = "hostfs"
    store: ClassVar[dict[str, Any]] = {}

    def __init__(self, host: str, **more: Any) -> None:
        super().__init__(**more)
        if host == "down":
            raise ConnectionRefusedError(SECRET)
        self.host = host

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        host = path.partition("://")[2].partition("/")[0]
        return {"host": host} if host else {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.partition("://")[2].partition("/")[2] if "://" in path else path

    def info(self, path: str, **more: Any) -> dict[str, Any]:
        if path.endswith("trouble"):
            raise RuntimeError(f"token={SECRET}")
        found = super().info(path, **more)
        return {"name": f"{self.host}{found['name']}", "size": found["size"], "type": found["type"]}


@pytest.fixture
def hostfs() -> Iterator[type[HostFileSystem]]:
    fsspec.register_implementation("hostfs", HostFileSystem, clobber=True)
    HostFileSystem.store.clear()
    yield HostFileSystem
    HostFileSystem.clear_instance_cache()


def test_requests_go_to_the_server_in_the_address(hostfs: type[HostFileSystem]) -> None:
    hostfs(host="nn:8020").pipe("/d/0.txt", b"zero")
    data = Files("hostfs://nn:8020/d/0.txt")
    assert data[0] == b"zero"
    assert stores.open_store("hostfs://nn:8020/d").read("0.txt") == b"zero"


def test_an_unavailable_server_is_named_and_retried(hostfs: type[HostFileSystem]) -> None:
    before = stores.statistics().retries
    store = stores.open_store("hostfs://down/d", retry=stores.Retry(attempts=2, first_wait_s=0.001))
    with pytest.raises(stores.StoreUnavailableError, match="hostfs://down/d/x") as caught:
        store.size("x")
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert stores.statistics().retries == before + 1
    with pytest.raises(ArgumentError, match=r"hostfs://: .*lacks an argument"):
        stores.open_store("hostfs://").size("x")


def test_the_text_of_a_file_system_is_not_repeated(hostfs: type[HostFileSystem]) -> None:
    with pytest.raises(stores.StoreError, match="hostfs://nn/trouble: RuntimeError of fsspec") as caught:
        stores.open_store("hostfs://nn").size("trouble")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_an_object_without_a_version_is_kept_for_one_dataset_only(hostfs: type[HostFileSystem], tmp_path: Path) -> None:
    system = hostfs(host="nn")

    def opened() -> stores.CachedStore:
        store = stores.open_store("hostfs://nn/d", cache=tmp_path)
        assert isinstance(store, stores.CachedStore)
        return store

    system.pipe("/d/0.txt", b"old")
    first = opened()
    assert not first.info("0.txt").is_versioned
    assert first.read("0.txt") == b"old"
    system.pipe("/d/0.txt", b"new")
    assert opened().read("0.txt") == b"new"
    assert pickle.loads(pickle.dumps(first)).read("0.txt") == b"old"


def test_the_index_of_an_object_without_a_version_is_compared(
    hostfs: type[HostFileSystem], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    system = hostfs(host="nn")
    for names in ("ab", "ba"):
        system.pipe("/0.tar", _tar({f"{name}.txt": name.encode() for name in names}))
        assert [sample["txt"] for sample in TarShards("hostfs://nn/0.tar")] == list(names)


def _tar(files: dict[str, bytes]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return written.getvalue()


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a\0b"])
def test_a_path_cannot_lead_out_of_a_store(path: str, tmp_path: Path) -> None:
    for store in (stores.open_store(tmp_path), stores.open_store("memory://folder"), stores.open_store("s3://bucket")):
        with pytest.raises(ArgumentError, match="is not a path within a store"):
            store.read(path, 0, 1)
        with pytest.raises(ArgumentError, match="is not a path within a store"):
            list(store.list(path))


def test_braces_of_a_remote_store_need_no_request() -> None:
    before = stores.statistics().requests
    assert len(stores.expand("s3://no-such-bucket/{00000..99999}.tar")) == 100_000
    assert stores.statistics().requests == before


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        ("a/*.tar", ["a/x.tar", "a/.tar"], ["a/b/x.tar", "a/x.tarx", "xa/x.tar"]),
        ("a/**/x", ["a/x", "a/b/x", "a/b/c/x"], ["a/bx", "b/x"]),
        ("a/**", ["a/x", "a/b/c"], ["b/x"]),
        ("?[0-9].[!t]", ["a1.x"], ["/1.x", "a1.t", "ab.x"]),
        ("a.b", ["a.b"], ["axb"]),
        ("[[]", ["["], ["a"]),
        ("[^a]", ["^", "a"], ["b"]),
        ("[!^]", ["a"], ["^"]),
        ("[+--]", ["+", ",", "-"], ["."]),
        ("img[!0]*", ["img1", "img1.jpg"], ["img0", "img/x.jpg"]),
        ("a[+-9]b", ["a.b", "a0b"], ["a/b"]),
        ("[a&&b-]", ["a", "b", "&", "-"], ["c"]),
        ("[\\\\-]", ["\\", "-"], ["]"]),
    ],
)
def test_globs(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = glob_regex(pattern).fullmatch
    assert all(map(matches, matching))
    assert not any(map(matches, others))


@example("[b-a]")
@example("[[]")
@given(st.text(alphabet="ab/.*?[]!\\{}-", max_size=12))
def test_every_glob_is_a_regular_expression(pattern: str) -> None:
    with suppress(ArgumentError):  # [b-a]
        glob_regex(pattern)


def test_globs_of_local_files(tmp_path: Path) -> None:
    for name in ("b-1.tar", "b-0.tar", "c.txt", "sub/d.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    below = [str(tmp_path / name) for name in ("b-0.tar", "b-1.tar", "sub/d.tar")]
    assert stores.expand(tmp_path / "*.tar") == below[:2]
    assert stores.expand(f"file://{tmp_path}/**/*.tar") == below
    assert stores.expand([tmp_path / "c.txt", str(tmp_path / "b-{1,0}.tar")]) == [
        str(tmp_path / "c.txt"),
        below[1],
        below[0],
    ]
    with pytest.raises(stores.ObjectNotFoundError, match=r"\*\.jpg: nothing matches"):
        stores.expand(tmp_path / "*.jpg")


def test_a_file_whose_name_looks_like_a_pattern_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "a[0]{1}.tar").touch()
    assert stores.expand(tmp_path / "a[0]{1}.tar") == [str(tmp_path / "a[0]{1}.tar")]


def test_options_show_names_and_no_secrets() -> None:
    options = StoreOptions({"endpoint": "http://host", "secret_access_key": SECRET, "token": stores.FromEnv("TOKEN")})
    assert repr(options) == "Options(endpoint='http://host', secret_access_key=***, token=FromEnv(variable='TOKEN'))"


def test_secrets_are_not_pickled_and_the_error_says_what_to_do() -> None:
    store = stores.open_store("s3://bucket", options={"endpoint": "http://host", "secret_access_key": SECRET})
    assert SECRET not in repr(store)
    with pytest.raises(NotPicklableError, match=r"'secret_access_key'.*FromEnv\('VARIABLE'\)") as caught:
        pickle.dumps(store)
    assert SECRET not in str(caught.value)


def test_an_option_from_the_environment_is_pickled_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_KEY", SECRET)
    store = stores.open_store("s3://bucket/prefix", options={"secret_access_key": stores.FromEnv("STORAGE_KEY")})
    pickled = pickle.dumps(store)
    assert SECRET.encode() not in pickled
    assert repr(pickle.loads(pickled)) == repr(store)
    options = pickle.loads(pickle.dumps(StoreOptions({"key": stores.FromEnv("STORAGE_KEY")})))
    assert options["key"] == SECRET
    monkeypatch.delenv("STORAGE_KEY")
    with pytest.raises(ArgumentError, match="environment variable STORAGE_KEY"):
        options["key"]


def test_a_folder_takes_no_options(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="takes no options"):
        stores.open_store(tmp_path, options={"endpoint": "x"})


def test_an_unknown_scheme_is_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="nonsense://x: neither obstore nor fsspec"):
        stores.open_store("nonsense://x").size("y")
