"""Generate the tables of contests in the documentation from bench/results/*.json.

A page names a contest in `<!-- contest: its name -->`; the text up to `<!-- end of contest -->` is generated. `--check`
writes nothing, and fails if a table differs from the results.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness import RESULTS, file_name

DOCS = Path(__file__).parents[1] / "docs"
_MARKED = re.compile(r"(<!-- contest: ([^\n]+) -->\n).*?(<!-- end of contest -->\n)", re.DOTALL)

Result = dict[str, Any]


def pages(docs: Path = DOCS) -> list[Path]:
    """The pages with contests."""
    return [path for path in sorted(docs.rglob("*.md")) if _MARKED.search(path.read_text(encoding="utf-8"))]


def rewritten(text: str, results: Path = RESULTS) -> str:
    """The page with tables that match the results."""

    def made(marked: re.Match[str]) -> str:
        result = json.loads((results / f"{file_name(marked[2])}.json").read_text(encoding="utf-8"))
        return "".join((marked[1], *(f"{line}\n" for line in _lines(result)), marked[3]))

    return _MARKED.sub(made, text)


def _lines(result: Result) -> Iterator[str]:
    if "lines" in result:  # a script with a table of its own
        yield from result["lines"]
        return
    yield f"| | {result['unit']} | quartiles | ratio |"
    yield "|---|---:|---:|---:|"
    for standing in result["standings"]:
        low, high = _short(standing["low"]), _short(standing["high"])
        yield f"| {standing['name']} | {_short(standing['median'])} | {low} to {high} | {standing['ratio']:.2f} |"
    yield ""
    machine, rounds = result["machine"], len(result["standings"][0]["runs"])
    yield (
        f"{'Medians' if rounds > 1 else 'Figures'} of {rounds} round{'s' * (rounds > 1)}, ratios to "
        f"*{result['baseline']}*; {machine['cores']} cores of {machine['cpu']}{_gpu(result)}, {result['date'][:10]}."
    )


def _gpu(result: Result) -> str:
    """The GPU of a result, with torch's version; nothing without one."""
    gpu = result["machine"].get("gpu")
    return f", {gpu}, torch {result['versions']['torch']}" if gpu else ""


def _short(figure: float) -> str:
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def main() -> int:
    """Rewrite the pages, or only compare them with `--check`; returns the exit code."""
    wrong = 0
    for page in pages():
        text = page.read_text(encoding="utf-8")
        wanted = rewritten(text)
        wrong |= wanted != text
        if "--check" not in sys.argv[1:]:
            page.write_text(wanted, encoding="utf-8")
    return int(wrong and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
