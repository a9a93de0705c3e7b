"""Generate docs/benchmarks.md and its charts from bench/results/images-[0-9]*.json.

`python -m images.page` writes them; with `--check` it only compares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from images.chart import draw
from readme_table import replaced

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
CHARTS = ROOT / "docs" / "images"
START = "<!-- figures: made by bench/images/page.py out of bench/results; do not edit by hand -->\n"
STOP = "<!-- end of figures -->\n"
ORDER = ("500x375", "12-megapixel", "64x64")

Result = dict[str, Any]


def results(folder: Path = ROOT / "bench" / "results") -> list[Result]:
    """The finished image contests, by corpus."""
    paths = sorted(folder.glob("images-[0-9]*.json"), reverse=True)  # other contests of images have no corpus
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return sorted(found, key=lambda result: ORDER.index(result["corpus"]["corpus"]))


def rewritten(page: str, contests: list[Result]) -> str:
    """The page with new text between its markers."""
    return replaced(page, START, STOP, "".join(f"{line}\n" for line in _lines(contests)))


def chart_name(result: Result) -> str:
    return f"bench-{'-'.join(result['name'].replace(',', '').split())}.svg"


def rewrite() -> None:
    """Draw every chart, and rewrite the page."""
    contests = results()
    for result in contests:
        draw(result, CHARTS / chart_name(result))
    PAGE.write_text(rewritten(PAGE.read_text(encoding="utf-8"), contests), encoding="utf-8")


def _lines(contests: list[Result]) -> Iterator[str]:
    if not contests:
        yield "No figures yet: `make bench-images` makes them."
        return
    yield _circumstances(contests)
    for result in contests:
        yield ""
        yield f"### {result['title']}"
        yield ""
        yield f"![bars: images per second of each loader](images/{chart_name(result)})"
        yield ""
        yield from _table(result)
        yield ""
        yield f"{result['date'][:10]}. {result.get('remark', '')}".strip()
    yield ""
    yield "### Loaders and versions"
    yield ""
    yield from _notes(contests)


def _circumstances(contests: list[Result]) -> str:
    latest = max(contests, key=lambda result: result["date"])
    machine, versions = latest["machine"], latest["versions"]
    counts = [len(contest["entrants"][0]["runs"]) for contest in contests]
    rounds = f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else str(counts[0])
    workers = min(contest["task"]["workers"] for contest in contests)
    return (
        f"Medians of {rounds} rounds on {machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB, "
        f"Python {machine['python']}, torch {versions['torch']}; all files were in the page cache. "
        f"{workers} workers each, unless the title says otherwise. Quartiles and single rounds: "
        "[bench/results](../bench/results)."
    )


def _table(result: Result) -> Iterator[str]:
    yield f"| loader | reads | images/s | × {result['baseline']} | CPU s per 1,000 images | memory |"
    yield "|---|---|---:|---:|---:|---:|"
    for e in sorted(result["entrants"], key=lambda e: -e["median"]):
        name = {"ours": f"**{e['name']}**", "limit": f"*{e['name']}* (a limit)"}.get(e["kind"], e["name"])
        yield (
            f"| {name} | {e['reads']}, {_short(e['reads_mib'])} MiB | {e['median']:,.0f} | {e['ratio']:.2f} "
            f"| {_short(e['cpu_s_per_1000'])} | {_short(e['pss_mib'])} MiB |"
        )
    for absent in result["absent"]:
        yield f"| {absent['name']} | not measured: {absent['reason'].replace('|', '/')} | | | | |"


def _notes(contests: list[Result]) -> Iterator[str]:
    for name, version, note in _unique((e["name"], e["version"], e["note"]) for c in contests for e in c["entrants"]):
        details = "; ".join(part for part in (version, note) if part)
        if details:
            yield f"- {name}: {details}."


def _unique(rows: Iterable[tuple[str, str, str]]) -> Iterable[tuple[str, str, str]]:
    return dict.fromkeys(rows)


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def main() -> int:
    """Write everything, or only compare with `--check`; returns the exit code."""
    if "--check" in sys.argv[1:]:
        page = PAGE.read_text(encoding="utf-8")
        return int(rewritten(page, results()) != page)
    rewrite()
    return 0


if __name__ == "__main__":
    sys.exit(main())
