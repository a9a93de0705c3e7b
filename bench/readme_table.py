"""Generate README's table of figures from bench/results/*.json.

`--check` writes nothing, and fails if the table differs from the results.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCH = Path(__file__).parent
README = BENCH.parent / "README.md"
START = "<!-- figures: made by bench/readme_table.py out of bench/results; do not edit by hand -->\n"
STOP = "<!-- end of figures -->\n"
EXISTING = "existing code, "
"""Contests whose names begin with this have their own table, the first of the README."""
START_EXISTING = "<!-- figures of existing code: made by bench/readme_table.py; do not edit by hand -->\n"
OURS, THEIRS = "feedline", "torch"
STOP_EXISTING = "<!-- end of figures of existing code -->\n"
LESS_IS_BETTER = {"s", "ms", "µs", "GiB", "KiB per epoch"}

_EMPTY = "samples that cost nothing, batches of"
TITLES = {
    "38.5 MB batches through processes": "batches of 38.5 MB from worker processes",
    "5 ms of Python per sample": "samples that compute in Python for 5 ms, 2 workers",
    "Pillow code, by hand": "a dataset's own Pillow code, 2 workers",
    "Pillow code, torchvision": "a dataset's own Pillow code, then torchvision's transforms, 2 workers",
    "Pillow code, torchvision v2 on tensors": "a dataset's own Pillow code, then torchvision v2 on tensors, 2 workers",
    "device dataset on cpu": "small images of a `TensorDataset`, no workers; torch's with `__getitems__` by hand",
    "first batch of a later loader": "time to the first batch of a later loader",
    "first batch of a process, forkserver": "time to the first batch, start method forkserver",
    "first batch of a process": "time to the first batch",
    "first batch of the second epoch": "time to the first batch of the second epoch",
    "gpu_busy": "share of time in which an NVIDIA H200 computes, training on decoded images",
    "gpu_prefetch": "training of a ResNet-50 on decoded images, NVIDIA H200",
    "head of line": "samples of 0.5 ms, every 50th of 10 ms, 2 workers",
    "large process, 64 batches": "64 batches and the end of 4 workers, in a process of 14 GB",
    "large process, first batch": "time to the first batch of 4 workers, in a process of 14 GB",
    "memory of 4 workers, array": "memory of 4 workers, 1 GiB in an array",
    "memory of 4 workers, list": "memory of 4 workers, ten million names in a list",
    "memory of 4 workers, packed": "memory of 4 workers, the same names in `PackedStrings`",
    "memory of 4 workers, shared array": "memory of 4 workers, 1 GiB in `fl.share(array)`",
    "overhead, batch 1, 2 process": f"{_EMPTY} 1, 2 processes",
    "overhead, batch 1, 2 thread": f"{_EMPTY} 1, 2 threads",
    "overhead, batch 1, inline": f"{_EMPTY} 1, no workers",
    "overhead, batch 256, 2 process": f"{_EMPTY} 256, 2 processes",
    "overhead, batch 256, 2 thread": f"{_EMPTY} 256, 2 threads",
    "overhead, batch 256, inline": f"{_EMPTY} 256, no workers",
    "overhead, short epochs, 2 persistent processes": "epochs of two batches, 2 persistent processes",
    "overhead, short epochs, inline": "epochs of two batches, no workers",
    "whole loops, dicts of tokens, inline": "200 batches of dicts of 4 tensors, no workers",
    "whole loops, single dicts of tokens, inline": "6,400 single dicts of 4 tensors, no workers",
    "whole loops, detection targets, inline": "200 batches of images and lists of targets, no workers",
    "whole loops, lists of 3,000 integers, inline": "100 batches of 32 lists of 3,000 integers, no workers",
    "whole loops, a stream of integers, inline": "2,000 batches of an iterable dataset of integers, no workers",
    "whole loops, a stream of single integers, inline": "8,000 single integers of an iterable dataset, no workers",
    "resident on cuda": "small images in the memory of an NVIDIA H200; torch's are gathered by hand in host memory",
    "table 1024 x 100 x float32": "rows of 100 numbers from a mapped file, batches of 1,024",
    "tokens 64 x 1024 x uint16": "windows of 1,024 tokens, batches of 64",
    "training on a GPU": "training of a ResNet-50 on JPEGs, NVIDIA H200, 16 workers",
}
"""Titles of contests whose names are unclear to readers who do not know the script."""

Result = dict[str, Any]


def results(folder: Path = BENCH / "results") -> list[Result]:
    """All contests between feedline and torch; contests against a limit alone are not in README."""
    found = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    return [result for result in found if all(_those(result, name) for name in (OURS, THEIRS))]


def table(contests: list[Result]) -> str:
    """The contests as Markdown: the best of feedline and the best of torch."""
    lines = _lines(contests) if contests else ["No figures yet: `make bench` makes them."]
    return "".join(f"{line}\n" for line in lines)


def rewritten(readme: str, contests: list[Result]) -> str:
    """The text with new tables between its markers."""
    existing = [contest for contest in contests if contest["name"].startswith(EXISTING)]
    others = [contest for contest in contests if contest not in existing]
    readme = replaced(readme, START_EXISTING, STOP_EXISTING, table(existing))
    return replaced(readme, START, STOP, table(others))


def replaced(text: str, start: str, stop: str, body: str) -> str:
    """The text with a new body between two markers."""
    before, rest = text.split(start)
    _, after = rest.split(stop)
    return f"{before}{start}{body}{stop}{after}"


def _lines(contests: list[Result]) -> Iterator[str]:
    yield "| what | torch at its best | feedline at its best | times better |"
    yield "|---|---:|---:|---:|"
    for contest in contests:
        theirs, ours = _best(contest, THEIRS), _best(contest, OURS)
        better = theirs / ours if contest["unit"] in LESS_IS_BETTER else ours / theirs
        figures = f"{_short(theirs)} {contest['unit']} | {_short(ours)} {contest['unit']} | {better:.3g}"
        name = contest["name"].removeprefix(EXISTING)
        yield f"| {_linked(TITLES.get(name, name), name)} | {figures} |"
    yield ""
    yield (
        f"Medians; {'; '.join(_surroundings(contests))}. "
        "Quartiles, all contestants and their limits: [bench/results](bench/results)."
    )


def _surroundings(contests: list[Result]) -> Iterator[str]:
    """Machines and versions of the contests, each with its dates."""
    dates: dict[str, set[str]] = {}
    for contest in contests:
        machine, torch = contest["machine"], contest["versions"]["torch"]
        gpu = f", {machine['gpu']}" if "gpu" in machine else ""
        where = f"{machine['cores']} cores of {machine['cpu']}{gpu}, Python {machine['python']}, torch {torch}"
        dates.setdefault(where, set()).add(contest["date"][:10])
    for where in sorted(dates):
        yield f"{where} ({', '.join(sorted(dates[where]))})"


def _those(contest: Result, whose: str) -> list[float]:
    names = whose, f"{whose},", f"{whose} "  # torchcodec is not torch
    return [s["median"] for s in contest.get("standings", ()) if f"{s['name']} ".startswith(names[1:])]


def _best(contest: Result, whose: str) -> float:
    return (min if contest["unit"] in LESS_IS_BETTER else max)(_those(contest, whose))


def _linked(title: str, name: str) -> str:
    """The title of a contest, linked to its script."""
    for part in (name, name.partition(",")[0]):
        scripts = sorted(set(BENCH.rglob("*.py")) - {Path(__file__)})
        for script in sorted(scripts, key=lambda script: script.stem not in name):  # one of that name first
            if f'"{part}' in script.read_text(encoding="utf-8"):
                return f"[{title}]({script.relative_to(README.parent).as_posix()})"
    return title


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def main() -> int:
    """Rewrite README, or only compare it with `--check`; returns the exit code."""
    readme = README.read_text(encoding="utf-8")
    wanted = rewritten(readme, results())
    if "--check" in sys.argv[1:]:
        return int(wanted != readme)
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
