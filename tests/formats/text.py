"""Lines, JSON lines and CSV: the suite's corpora of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from feedline.datasets import CSV, JSONL, Lines
from formats.format import Format

LINES = ["one", "", "two", "last without an end"]


def write_texts(folder: Path) -> None:
    for number in range(3):
        rows = [json.dumps(_object(8 * number + i)) for i in range(8)]
        (folder / f"{number}.jsonl").write_text("\r\n".join([*rows[:3], "", " ", *rows[3:]]) + "\n" * number)
        quoted = [f'{i},"{i}\n""deep"" é"' if i % 3 == number else f"{i},plain {i}" for i in range(9)]
        (folder / f"{number}.csv").write_text("\n".join(["x,name", *quoted, ""]))
        (folder / f"{number}.txt").write_bytes(b"\xef\xbb\xbf" * (number == 1) + b"one\r\n\ntwo\n" + LINES[3].encode())


def _object(i: int) -> dict[str, Any]:
    return {"x": i, "t": "é\t" * i}


def _record(i: int) -> dict[str, Any]:
    number, x = divmod(i, 9)
    return {"x": x, "name": f'{x}\n"deep" é' if x % 3 == number else f"plain {x}"}


FORMATS = {
    "lines": Format(
        write_texts,
        lambda root, **store: Lines(f"{root}/*.txt", **store),
        lambda i: LINES[i % 4],
        12,
        data="*.txt",
        together=2,
    ),
    "jsonl": Format(
        write_texts,
        lambda root, **store: JSONL(f"{root}/{{0..2}}.jsonl", **store),
        _object,
        data="*.jsonl",
        lists=False,
    ),
    "csv": Format(
        write_texts,
        lambda root, **store: CSV(f"{root}/{{0..2}}.csv", {"x": int, "name": str}, **store),
        _record,
        27,
        data="*.csv",
        lists=False,
    ),
}
