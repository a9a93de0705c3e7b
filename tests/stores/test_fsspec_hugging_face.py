"""Parquet files on the Hugging Face Hub, by their `hf://` address, with its own client and a hub on this machine."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from web_servers import Handler, serving

import feedline as fl
from feedline import stores
from feedline.datasets import Parquet

N = 100


def content(first: int) -> bytes:
    file = io.BytesIO()
    rows = [{"x": i, "image": {"bytes": b"%d" % i, "path": f"{i}.jpg"}} for i in range(first, first + N)]
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=30)
    return file.getvalue()


FILES = {f"data/lang={lang}/train-{n}.parquet": content(N * n) for n, lang in enumerate(("de", "pl"))}
JSON = {"Content-Type": "application/json"}


class Hub(Handler):
    """Answers for the one dataset `someone/things`, which holds FILES."""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api, resolved = "/api/datasets/someone/things", "/datasets/someone/things/resolve/main/"
        if path in (api, f"{api}/revision/main"):
            self.answer(200, json.dumps({"id": "someone/things", "sha": "0" * 40}).encode(), JSON)
        elif path.startswith(f"{api}/tree/main"):
            folder = path.removeprefix(f"{api}/tree/main").lstrip("/")
            found = [
                {"type": "file", "path": name, "size": len(data), "oid": f"{len(data):040}"}
                for name, data in FILES.items()
                if name.startswith(folder)
            ]
            self.answer(200, json.dumps(found).encode(), JSON)
        elif path.startswith(resolved):
            self._ranged(FILES[path.removeprefix(resolved).replace("%3D", "=")])
        else:
            self.answer(404, b"{}", {**JSON, "X-Error-Code": "RepoNotFound"})

    def _ranged(self, data: bytes) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[first : last + 1]
        self.answer(206, part, {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    with serving(Hub, None) as server:
        yield {"endpoint": server.url}


@pytest.mark.parametrize("cached", [False, True], ids=["direct", "cached"])
def test_a_dataset_is_read_from_the_hub(options: dict[str, Any], cached: bool, tmp_path: Path) -> None:
    cache = tmp_path / "cache" if cached else None
    address = "hf://datasets/someone/things/data/**/*.parquet"
    dataset = Parquet(address, ["x", "lang"], cache=cache, options=options)
    with fl.DataLoader(dataset, 32, shuffle=True, seed=0, num_workers=2, worker_method="thread") as loader:
        batches = list(loader)
    assert sorted(torch.cat([batch["x"] for batch in batches]).tolist()) == list(range(2 * N))
    assert all((x < N) == (lang == "de") for b in batches for x, lang in zip(b["x"], b["lang"], strict=True))


def test_images_come_as_their_bytes(options: dict[str, Any]) -> None:
    dataset = Parquet("hf://datasets/someone/things", ["image"], filters=[("lang", "=", "pl")], options=options)
    assert dataset[-1] == {"image": {"bytes": b"199", "path": "199.jpg"}}


def test_a_dataset_that_is_not_there_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(stores.ObjectNotFoundError, match=r"hf://datasets/someone/else/x\.parquet"):
        Parquet("hf://datasets/someone/else/x.parquet", options=options)
