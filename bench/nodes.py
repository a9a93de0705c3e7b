"""Bytes that each of four nodes fetches in one epoch, with a cold cache of its own, and the order over other nodes.

Nodes are ranks of one process with caches of their own. An HTTP server on this machine counts the bytes that it sends
to each node.
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import feedline as fl
from harness import Contest

FILES, ROWS = 60, 120

SIZES = {"files of 5 MB": 40_000, "files of 0.5 MB": 4_000}
"""Bytes of a row. Every node reads the footers of all files, a larger share where files are small."""

NODES, BATCH, PARTITIONS = 4, 60, 60
"""The partitions, and the samples of all nodes in a step, are a multiple of 3, 4 and 5."""

CUT = 20
"""Steps before each change of the number of nodes."""


class Ranges(SimpleHTTPRequestHandler):
    """Files of a folder, whole or by ranges, to any node."""

    protocol_version = "HTTP/1.1"
    sent: Counter[str]

    def do_GET(self) -> None:
        _, node, name = self.path.split("/", 2)
        content = (Path(self.directory) / name).read_bytes()
        start, stop, status = 0, len(content), 200
        if wanted := self.headers.get("Range"):
            first, last = wanted.removeprefix("bytes=").split("-")
            start = int(first) if first else len(content) - int(last)
            stop, status = (int(last) + 1 if first and last else len(content)), 206
        body = content[start:stop]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", '"1"')
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{start + len(body) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "GET":
            self.sent[node] += len(body)
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815 - the name that the server looks up

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


def write(folder: Path, row_nbytes: int) -> int:
    """Parquet files of random bytes; returns their size."""
    rng = np.random.default_rng(0)
    for number in range(FILES):
        numbers = np.arange(number * ROWS, (number + 1) * ROWS)
        table = pa.table({"number": numbers, "data": [rng.bytes(row_nbytes) for _ in range(ROWS)]})
        pq.write_table(table, folder / f"{number:03}.parquet", row_group_size=ROWS, compression="none")
    return sum(path.stat().st_size for path in folder.iterdir())


class Cluster:
    """Nodes that read from one server, with a cold cache each."""

    def __init__(self, address: str, caches: Path) -> None:
        self._address, self._caches = address, caches

    def loaders(self, nodes: int, name: str = "") -> list[Any]:
        return [self._loader(node, nodes, f"{name}{node}of{nodes}") for node in range(nodes)]

    def _loader(self, node: int, nodes: int, name: str) -> Any:
        urls = [f"{self._address}/{name}/{number:03}.parquet" for number in range(FILES)]
        data = fl.datasets.Parquet(urls, columns=["number", "data"], cache=self._caches / name, index_dir=self._caches)
        order = fl.samplers.ShardShuffled(
            data.shard_sizes, seed=0, window=2, partitions=PARTITIONS, global_batch_size=BATCH
        )
        return fl.DataLoader(data, BATCH // nodes, sampler=order, seed=0, distributed=(node, nodes), collate_fn=numbers)


def numbers(samples: Sequence[Any]) -> list[int]:
    """The numbers of samples."""
    return [int(sample["number"]) for sample in samples]


def steps(loaders: list[Any], count: int | None = None) -> list[int]:
    """The samples of steps, over all nodes."""
    return [number for step in islice(zip(*loaders, strict=True), count) for batch in step for number in batch]


def shares(cluster: Cluster, sent: Counter[str], total: int) -> list[float]:
    """Bytes of each node in one epoch, as multiples of its quarter."""
    steps(cluster.loaders(NODES))
    return [sent[f"{node}of{NODES}"] / (total / NODES) for node in range(NODES)]


def elastic(cluster: Cluster) -> bool:
    """True if the order is the same after four nodes become three, and then five."""
    whole = steps(cluster.loaders(1, name="whole"))
    seen, state = list[int](), None
    for nodes, count in ((4, CUT), (3, CUT), (5, None)):
        loaders = cluster.loaders(nodes, name=f"after{len(seen)}-")
        for each in loaders:
            if state is not None:
                each.load_state_dict(state)
        seen += steps(loaders, count)
        state = loaders[0].state_dict()
    return seen == whole and sorted(set(whole)) == list(range(FILES * ROWS))


def measured(row_nbytes: int) -> float:
    """The share of the node that fetches most, in quarters; prints that of each, and whether the order is kept."""
    with tempfile.TemporaryDirectory() as files, tempfile.TemporaryDirectory() as caches:
        total, Ranges.sent = write(Path(files), row_nbytes), Counter()
        with ThreadingHTTPServer(("127.0.0.1", 0), partial(Ranges, directory=files)) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            cluster = Cluster(f"http://127.0.0.1:{server.server_port}", Path(caches))
            owned = shares(cluster, Ranges.sent, total)
            same = elastic(cluster)
            server.shutdown()
    print(f"each node, in quarters of {total / 1e6:.1f} MB: {', '.join(f'{share:.3f}' for share in owned)}")
    print(f"4, 3 and 5 nodes: {'the same order, each sample once' if same else 'ANOTHER ORDER'}")
    return max(owned)


def main() -> None:
    contest = Contest("bytes of a node, four nodes, cold caches", unit="quarters", baseline="its quarter")
    contest.measure("its quarter", lambda: 1.0)
    for name, row_nbytes in SIZES.items():
        contest.measure(f"the node that fetches most, {name}", lambda row_nbytes=row_nbytes: measured(row_nbytes))
    contest.run(rounds=1, warm_up=0).publish()


if __name__ == "__main__":
    main()
