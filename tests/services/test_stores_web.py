"""Plain HTTP from a real web server, and Azure's protocol."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from azurite import Azure
from ceph import S3

import feedline as fl
from feedline import stores

CONTENT = random.Random(3).randbytes(3_000_000)


@pytest.fixture(scope="session")
def pages(web: str, web_root: Path) -> str:
    for name in ("data/0.bin", "private/0.bin", "no-ranges/0.bin"):
        (web_root / name).parent.mkdir()
        (web_root / name).write_bytes(CONTENT)
    (web_root / "data/empty").touch()
    (web_root / "data/ü %20.bin").write_bytes(b"odd")
    return web


def test_a_web_server(pages: str, tmp_path: Path) -> None:
    dice = random.Random(4)
    ranges = [(start, start + 9000) for start in (dice.randrange(2_900_000) for _ in range(100))]
    for cache in (None, tmp_path):
        store = stores.open_store(pages, cache=cache)
        assert store.size("data/0.bin") == len(CONTENT)
        assert store.read("data/0.bin") == CONTENT
        found = store.read_many("data/0.bin", ranges)
        assert all(data == CONTENT[start:stop] for data, (start, stop) in zip(found, ranges, strict=True))
        assert store.read("data/empty") == b""
        assert store.read("data/ü %20.bin") == b"odd"


def test_versions_of_a_web_server_change_with_the_file(pages: str, web_root: Path) -> None:
    store, file = stores.open_store(f"{pages}/data"), web_root / "data/changing"
    file.write_bytes(b"before")
    version = store.info("changing").version
    assert store.read("changing", 0, 3, version=version) == b"bef"
    file.write_bytes(b"afterwards")
    with pytest.raises(stores.ObjectChangedError, match="data/changing has changed"):
        store.read("changing", 0, 3, version=version)


def test_refusals_of_a_web_server(pages: str) -> None:
    store = stores.open_store(pages)
    with pytest.raises(stores.ObjectNotFoundError, match=r"data/9\.bin: there is no such object"):
        store.read("data/9.bin")
    with pytest.raises(stores.AccessDeniedError, match=r"private/0\.bin: .*status 403"):
        store.read("private/0.bin")
    with pytest.raises(stores.StoreError, match=r"no-ranges/0\.bin, bytes \[5, 9\): the server ignores ranges"):
        store.read("no-ranges/0.bin", 5, 9)
    with pytest.raises(stores.StoreError, match=r"web servers do not list; name the objects, as in"):
        list(store.list("data"))
    with pytest.raises(stores.StoreError, match="web servers do not list"):
        stores.expand(f"{pages}/data/*.bin")


def test_braces_name_the_objects_of_a_web_server(pages: str) -> None:
    (address,) = stores.expand(f"{pages}/data/{{0..0}}.bin")
    root, path = stores.split(address)
    assert stores.open_store(root).read(path, 7, 70) == CONTENT[7:70]


def test_azure(azure: Azure, tmp_path: Path) -> None:
    container = azure.container({"train/0.bin": CONTENT, "train/1.bin": b"one", "empty": b""})
    for cache in (None, tmp_path):
        store = stores.open_store(f"az://{container}", options=azure.options, cache=cache)
        assert [info.path for info in store.list("train/")] == ["train/0.bin", "train/1.bin"]
        assert store.read("train/0.bin") == CONTENT
        assert store.read_many("train/0.bin", [(5, 9), (2_000_000, 2_500_000)]) == [
            CONTENT[5:9],
            CONTENT[2_000_000:2_500_000],
        ]
        assert store.read("empty") == b""
        with pytest.raises(stores.ObjectNotFoundError, match=f"az://{container}/nothing: there is no such object"):
            store.read("nothing")


def test_wrong_keys_of_azure(azure: Azure) -> None:
    container = azure.container({})
    options = {**azure.options, "account_key": "d3Jvbmcta2V5"}
    with pytest.raises(stores.AccessDeniedError, match="the account key or the signature is wrong"):
        stores.open_store(f"az://{container}", options=options).read("x", 0, 5)


@pytest.mark.parametrize("kind", ["s3", "azure"])
def test_presigned_links_of_real_servers(request: pytest.FixtureRequest, tmp_path: Path, kind: str) -> None:
    # obstore's links to Azure are only right for plain names.
    contents = {"train/0.bin": CONTENT, "ü %20.txt" if kind == "s3" else "1.txt": b"odd", "empty": b""}
    if kind == "s3":
        s3: S3 = request.getfixturevalue("s3")
        bucket = s3.bucket(contents)
        links = [s3.link(bucket, name) for name in contents]
    else:
        azure: Azure = request.getfixturevalue("azure")
        links = [azure.link(azure.container(contents), name) for name in contents]
    for cache in (None, tmp_path):
        files = fl.datasets.Files(links, cache=cache)
        assert [bytes(data) for data in files] == list(contents.values())
    root, path = stores.split(links[0])
    store = stores.open_store(root)
    assert store.size(path) == len(CONTENT)
    assert store.read_many(path, [(5, 9), (2_000_000, 2_500_000)]) == [CONTENT[5:9], CONTENT[2_000_000:2_500_000]]
    assert store.info(path).is_versioned
    refused = [link.replace("ig", "ig=A&other", 1) if kind == "s3" else link.replace("sig=", "sig=A") for link in links]
    with pytest.raises(stores.AccessDeniedError) as caught:
        fl.datasets.Files(refused)[0]
    assert "sig" not in str(caught.value).lower().replace("signature is wrong", "")
