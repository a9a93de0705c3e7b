"""Prometheus, which scrapes one endpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode
from urllib.request import urlopen

from servers import answers, free_port, program, running

_CONFIG = """
scrape_configs:
  - job_name: training
    scrape_interval: 200ms
    scrape_timeout: 200ms
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


@dataclass
class Prometheus:
    """A running server; `query` evaluates an expression now."""

    address: str

    def query(self, expression: str) -> list[float]:
        with urlopen(f"{self.address}/api/v1/query?{urlencode({'query': expression})}", timeout=30) as answer:
            result = json.load(answer)["data"]["result"]
        return [float(each["value"][1]) for each in result]


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[Prometheus]:
    """A server that scrapes this port five times a second."""
    config = folder / "prometheus.yml"
    config.write_text(_CONFIG.format(port=target))
    port = free_port()
    command = [
        program("prometheus", "prometheus"), f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn",
    ]  # fmt: skip
    address = f"http://127.0.0.1:{port}"
    with running(command, lambda: answers(f"{address}/-/ready"), folder / "prometheus.out"):
        yield Prometheus(address)
