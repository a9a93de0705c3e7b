"""The image contests: feedline and its peers in turns on one machine, with the same images and work.

    python -m images.contest                    all contests; writes bench/results and docs/benchmarks.md
    python -m images.contest --quick            one short round each, printed only, as a check
    python -m images.contest --only feedline --event 500x375,

Missing images, environments of peers and their file formats are made first, once, below build/.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from harness import RESULTS, Contest, Outcome, Standing, file_name, machine
from images import page
from images.contestant import Contestant, DisqualifiedError
from images.contestants import BASELINE, EVENTS, WORKERS, Entrant, Event
from images.corpus import CACHE, Corpus, Manifest, manifest, write
from images.environments import ENVIRONMENTS, UnavailableError
from images.forms import FORMS
from images.peers.task import Task
from images.weigh import MIB

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Options:
    rounds: int = ROUNDS
    quick: bool = False
    only: tuple[str, ...] = ()


class Absent:
    """A contestant that cannot run, and the reason."""

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    @contextmanager
    def excused(self, entrant: Entrant) -> Iterator[None]:
        try:
            yield
        except (UnavailableError, DisqualifiedError) as error:
            self.reasons[entrant.name] = str(error)
            print(f"without {entrant.name}: {error}")


def prepare_corpus(corpus: Corpus) -> Manifest:
    """The corpus's images, made if missing."""
    found = manifest(corpus)
    if found:
        return found
    with Progress(transient=True) as progress:
        task = progress.add_task(f"images of {corpus.name}", total=corpus.image_count)
        return write(corpus, lambda: progress.advance(task))


def ready(event: Event, options: Options, absent: Absent) -> dict[Entrant, int]:
    """The contestants that can run, each with the size of its data."""
    able = {}
    for entrant in event.entrants(options.only):
        with absent.excused(entrant):
            if not entrant.ours:
                ENVIRONMENTS[entrant.environment].make()
            able[entrant] = FORMS[entrant.form].nbytes(event.corpus)
    return able


def run(event: Event, options: Options) -> dict[str, Any]:
    """One contest, from the start of its processes to its figures."""
    corpus_manifest, absent = prepare_corpus(event.corpus), Absent()
    sizes = ready(event, options, absent)
    task = event.task(2 * event.workers if options.quick else None)
    with ExitStack() as stack:
        processes = [stack.enter_context(Contestant(entrant, task, corpus_manifest)) for entrant in sizes]
        present = _weighed_in(processes, absent)
        race = Contest(event.name, unit="images/s", baseline=_baseline(present))
        for contestant in present:
            race.measure(contestant.entrant.name, contestant.turn)
        outcome = race.run(1 if options.quick else options.rounds, warm_up=0)
    standings = [
        _standing(contestant, outcome[contestant.entrant.name], sizes[contestant.entrant]) for contestant in present
    ]
    return {
        "title": event.title,
        **_describe(outcome, corpus_manifest, task),
        "entrants": standings,
        "absent": [{"name": name, "reason": reason} for name, reason in absent.reasons.items()],
    }


def _weighed_in(processes: Sequence[Contestant], absent: Absent) -> list[Contestant]:
    """The contestants that started and delivered a correct first epoch."""
    present = []
    with ThreadPoolExecutor(WORKERS) as pool:
        starts = [pool.submit(contestant.start) for contestant in processes]
    with Progress(transient=True) as progress:
        for contestant, start in progress.track(list(zip(processes, starts, strict=True)), description="weigh-in"):
            with absent.excused(contestant.entrant):
                start.result()
                contestant.weigh_in()
                present.append(contestant)
    return present


def _baseline(present: Sequence[Contestant]) -> str:
    names = [contestant.entrant.name for contestant in present]
    if not names:
        raise SystemExit("no contestant is left")
    return BASELINE if BASELINE in names else names[0]


def _standing(contestant: Contestant, standing: Standing, nbytes: int) -> dict[str, Any]:
    entrant, weight = contestant.entrant, contestant.weight
    return {
        **asdict(standing),
        "cpu_s_per_1000": median(turn.cpu_s_per_1000 for turn in contestant.turns),
        "pss_mib": weight.own / MIB,
        "mapped_mib": weight.mapped / MIB,
        "reads": entrant.form,
        "reads_mib": nbytes / MIB,
        "kind": "limit" if entrant.limit else "ours" if entrant.ours else "peer",
        "version": entrant.version,
        "note": entrant.note,
    }


def _describe(outcome: Outcome, manifest: Manifest, task: Task) -> dict[str, Any]:
    return {
        "name": outcome.name,
        "unit": outcome.unit,
        "baseline": outcome.baseline,
        "corpus": asdict(manifest),
        "task": {name: value for name, value in asdict(task).items() if name != "root"},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(),
        "versions": {name: metadata.version(name) for name in ("feedline", "torch", "numpy")},
    }


def results_table(result: dict[str, Any]) -> Table:
    """The figures of one contest for a terminal."""
    table = Table(title=f"{result['name']}, {result['unit']}", caption=f"ratio to {result['baseline']}")
    table.add_column("", no_wrap=True)
    for heading in ("median", "quartiles", "ratio", "CPU s/1,000", "MiB"):
        table.add_column(heading, justify="right")
    for e in result["entrants"]:
        quartiles = f"{e['low']:,.0f} … {e['high']:,.0f}"
        figures = f"{e['median']:,.0f}", quartiles, f"{e['ratio']:.2f}"
        table.add_row(e["name"], *figures, f"{e['cpu_s_per_1000']:.2f}", f"{e['pss_mib']:,.0f}")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short round each; nothing is kept")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", action="append", default=[], help="contestants with this in their names")
    parser.add_argument("--event", action="append", default=[], help="contests with this in their names")
    chosen = parser.parse_args(arguments)
    options = Options(chosen.rounds, chosen.quick, tuple(chosen.only))
    kept = not (chosen.quick or chosen.only)
    folder = RESULTS if kept else CACHE / "results"
    folder.mkdir(parents=True, exist_ok=True)
    for event in EVENTS:
        if not chosen.event or any(word in event.name for word in chosen.event):
            result = run(event, options)
            Console().print(results_table(result))
            _save(result, folder)
    if kept:
        page.rewrite()


def _save(result: dict[str, Any], folder: Path) -> None:
    text = json.dumps(result, indent=2, ensure_ascii=False)
    (folder / f"{file_name(result['name'])}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
