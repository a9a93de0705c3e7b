"""A consumer of a live stream that saves its state with each batch; run by test_live_kills.py, which kills it.

`live_consumer.py FILE SOURCE NAME ADDRESS WORKERS`: continues from the last line of FILE, and appends a line for each
batch.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import feedline as fl
from feedline import streams


def number_of(row: dict[str, str]) -> int:
    return int(row["content"])


def stream_of(source: str, name: str, address: str) -> object:
    if source == "postgres":
        query = f"SELECT id, content FROM {name}"
        return streams.SQLRows(
            address, query, partitions=3, decode=number_of, settle_s=0.0, every_s=0.02, max_wait_s=0.02
        )
    if source == "lines":
        return streams.SocketLines(address.split(","), decode="json", max_wait_s=0.02)
    common = {"decode": "json", "max_wait_s": 0.02}
    if source == "kafka":
        return streams.Kafka(name, servers=address, **common)
    if source == "redis":
        return streams.Redis([f"{name}-{number}" for number in range(3)], server=address, **common)
    return streams.NATS(name, servers=address, subjects=[f"{name}.{number}" for number in range(3)], **common)


def main(file: Path, source: str, name: str, address: str, workers: str) -> None:
    text = file.read_bytes()
    complete = text[: text.rfind(b"\n") + 1]
    os.truncate(file, len(complete))  # a line that was cut by the kill was not saved
    loader = fl.DataLoader(stream_of(source, name, address), 7, seed=0, num_workers=int(workers))  # type: ignore[arg-type]
    if complete:
        loader.load_state_dict(json.loads(complete.splitlines()[-1])["state"])
    with open(file, "ab", buffering=0) as lines:
        for batch in loader:
            line = json.dumps({"numbers": batch.tolist(), "state": loader.state_dict()})
            lines.write(line.encode() + b"\n")  # one call: a line is saved with its state, or not at all


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
