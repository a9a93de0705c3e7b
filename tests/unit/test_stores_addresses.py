"""Addresses, patterns and options: nothing is asked of anybody, and nothing secret is told."""

from __future__ import annotations

import pickle
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from feedline import stores
from feedline.errors import ArgumentError, NotPicklableError
from feedline.stores.options import Options
from feedline.stores.patterns import translated

SECRET = "hunter2-very-secret"


@pytest.mark.parametrize(
    ("address", "root", "path"),
    [
        ("s3://bucket/a/b.tar", "s3://bucket", "a/b.tar"),
        ("S3://bucket", "s3://bucket", ""),
        ("gs://bucket/x", "gs://bucket", "x"),
        ("abfss://container@account.dfs.core.windows.net/x", "abfss://container@account.dfs.core.windows.net", "x"),
        ("https://host:8080/dir/file", "https://host:8080", "dir/file"),
        ("hf://datasets/user/repo/x", "hf://", "datasets/user/repo/x"),
        ("/data/x.tar", "/", "data/x.tar"),
        ("file:///data/x.tar", "/", "data/x.tar"),
    ],
)
def test_split(address: str, root: str, path: str) -> None:
    assert stores.split(address) == (root, path)


def test_a_relative_path_is_made_absolute() -> None:
    assert stores.split("x.tar") == ("/", f"{str(Path.cwd()).lstrip('/')}/x.tar")
    assert stores.split(Path("x.tar")) == stores.split("x.tar")


@pytest.mark.parametrize("address", ["s3:///key", "https://"])
def test_an_address_without_a_host_is_refused(address: str) -> None:
    with pytest.raises(ArgumentError, match="names no bucket or server"):
        stores.split(address)


def test_credentials_in_an_address_are_refused_and_not_repeated() -> None:
    for address in (f"https://user:{SECRET}@host/x", f"s3://key:{SECRET}@bucket/x", f"https://host/x?sig={SECRET}"):
        with pytest.raises(ArgumentError) as caught:
            stores.open_store(address)
        assert SECRET not in str(caught.value)


@pytest.mark.parametrize("path", ["../x", "a/../../x", "/etc/passwd", "a\0b"])
def test_a_path_cannot_lead_out_of_a_store(path: str, tmp_path: Path) -> None:
    for store in (stores.open_store(tmp_path), stores.open_store("memory://folder"), stores.open_store("s3://bucket")):
        with pytest.raises(ArgumentError, match="is no path within a store"):
            store.read(path, 0, 1)
        with pytest.raises(ArgumentError, match="is no path within a store"):
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
    ],
)
def test_globs(pattern: str, matching: list[str], others: list[str]) -> None:
    matches = translated(pattern).fullmatch
    assert all(map(matches, matching))
    assert not any(map(matches, others))


@example("[b-a]")
@given(st.text(alphabet="ab/.*?[]!\\{}-", max_size=12))
def test_every_glob_is_a_regular_expression(pattern: str) -> None:
    with suppress(ArgumentError):  # [b-a]
        translated(pattern)


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
    options = Options({"endpoint": "http://host", "secret_access_key": SECRET, "token": stores.FromEnv("TOKEN")})
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
    options = pickle.loads(pickle.dumps(Options({"key": stores.FromEnv("STORAGE_KEY")})))
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
