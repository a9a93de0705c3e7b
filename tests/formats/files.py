"""Files of one sample each: the suite's corpora of texts and images."""

from __future__ import annotations

import sqlite3
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from writers.values import jpeg

from feedline import transforms as T
from feedline.datasets import Files, ImageFolder, SQLManifest
from formats.format import Format

COUNT = 24
CROP = T.Compose([T.RandomResizedCrop(16), T.ToTensor()])


def write_texts(folder: Path) -> None:
    for i in range(COUNT):
        (folder / f"{i:02}.txt").write_text(f"text {i}")


def write_images(folder: Path) -> None:
    for i in range(COUNT):
        path = folder / f"class {i % 3}" / ("deep" if i % 2 else "") / f"{i:02}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(jpeg(i, (24, 18)))


@cache
def _database() -> TemporaryDirectory[str]:
    """The folder of a database of this machine that lists the texts."""
    folder = TemporaryDirectory()
    with sqlite3.connect(Path(folder.name, "list.db")) as connection:
        connection.execute("CREATE TABLE samples (id INTEGER PRIMARY KEY, path TEXT, label INTEGER)")
        rows = [(i, f"{i:02}.txt", i % 3) for i in range(COUNT)]
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?)", rows)
    connection.close()
    return folder


def manifest(root: str, **store: Any) -> SQLManifest:
    """The texts below `root`, listed by a database of this machine."""
    query = "SELECT id, path, label FROM samples"
    return SQLManifest(f"{_database().name}/list.db", query, root=root, key="id", decode="text", **store)


def _image_error(name: str) -> tuple[str, float, str]:
    return name, 0.3, "{}"


FORMATS = {
    "files": Format(
        write_texts,
        lambda root, **store: Files(f"{root}/*.txt", decode="text", **store),
        lambda i: f"text {i}",
        versions="never",
        together=6,
    ),
    "files by name": Format(
        write_texts,
        lambda root, **store: Files([f"{root}/{i:02}.txt" for i in range(COUNT)], decode="text", **store),
        lambda i: f"text {i}",
        versions="never",
        lists=False,
    ),
    "manifest": Format(
        write_texts,
        manifest,
        lambda i: {"id": i, "path": f"{i:02}.txt", "label": i % 3, "data": f"text {i}"},
        versions="never",
        gone=r"the file '\d\d\.txt' of row \d+ \(id = \d+\) of the query .* does not exist",
    ),
    "images": Format(
        write_images,
        lambda root, **store: Files(f"{root}/**/*.jpg", decode="image", transform=CROP, **store),
        cut=_image_error("class 0/06.jpg"),
        versions="never",
        random=True,
    ),
    "folder": Format(
        write_images,
        lambda root, **store: ImageFolder(root, CROP, **store),
        cut=_image_error("class 0/06.jpg"),
        versions="cached",
        random=True,
        together=6,
    ),
    "folder of images": Format(
        write_images,
        lambda root, **store: ImageFolder(root, **store),
        cut=_image_error("class 0/06.jpg"),
        versions="cached",
        collates=False,
        own_layout=False,
    ),
}
