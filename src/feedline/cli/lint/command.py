"""`feedline lint`: mistakes in code that loads data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console

from feedline.cli.arguments import AsJson, print_json
from feedline.cli.doctor.findings import Finding, Marks, Severity, render
from feedline.cli.lint.rules import RULES, Rule, trains_in_parallel, undivided_loaders
from feedline.cli.lint.source import TOO_DEEP, SourceFile, SourcePlace, UnreadableFile, package_of, parse, python_files
from feedline.errors import ArgumentError


class Hit(NamedTuple):
    """A rule's objection, with its place."""

    place: SourcePlace
    code: str
    severity: Severity
    text: str
    remedy: str

    def summary(self) -> dict[str, Any]:
        """The hit as a JSON object."""
        return {
            "path": self.place.path,
            "line": self.place.line,
            "cell": self.place.cell,
            "code": self.code,
            "severity": self.severity.value,
            "text": self.text,
            "remedy": self.remedy,
        }


class LintSurvey(NamedTuple):
    """All findings in the files read."""

    files: int
    hits: list[Hit]
    unreadable: list[UnreadableFile]

    @property
    def is_clean(self) -> bool:
        """True if every file was read, and no hit is BAD."""
        return not self.unreadable and all(hit.severity is not Severity.BAD for hit in self.hits)

    def summary(self) -> dict[str, Any]:
        """The survey as a JSON object."""
        return {
            "files": self.files,
            "hits": [hit.summary() for hit in self.hits],
            "unreadable": [file._asdict() for file in self.unreadable],
        }


def run(paths: Iterable[str]) -> LintSurvey:
    """Apply all rules to the Python files and notebooks of these paths.

    Raises `ArgumentError` for a path that does not exist. Files that cannot be parsed are listed.
    """
    files, hits, unreadable = 0, list[Hit](), list[UnreadableFile]()
    found, trainers, loaders = set[tuple[Path, str]](), list[SourceFile](), list[Hit]()
    setters = list[SourceFile]()
    for path in paths:
        root = Path(path)
        if not root.exists():
            raise ArgumentError(f"there is no file or folder {path}")
        for file in python_files(root):
            files += 1
            parsed = parse(file, is_named=file == root)
            if isinstance(parsed, UnreadableFile):
                unreadable.append(parsed)
                continue
            found |= {
                (package_of(file), word)
                for word in CALLS_ELSEWHERE.values()
                for source in parsed
                if word in source.text
            }
            try:
                hits += [hit for source in parsed for hit in examine(source)]
                trainers += [source for source in parsed if trains_in_parallel(source)]
                setters += [source for source in parsed if CALLS_ELSEWHERE["missing-set-epoch"] in source.text]
                loaders += [hit for source in parsed for hit in _hits(source, SHARED_BY_TRAINER)]
            except RecursionError:
                unreadable.append(UnreadableFile(str(file), TOO_DEEP))
    hits = [weighed for hit in hits for weighed in _weaken(hit, found) if not _is_set_by_importer(hit, setters)]
    known = {hit.place for hit in hits if hit.code == SHARED_BY_TRAINER.code}
    for hit in loaders:
        trainer = next((each for each in trainers if _uses(each, hit.place.path)), None)
        if trainer is not None and hit.place not in known:
            hits.append(hit._replace(text=f"{hit.text}, in which {trainer.path} wraps the model"))
    return LintSurvey(files, hits, unreadable)


SHARED_BY_TRAINER = Rule("undivided-ranks", Severity.BAD, undivided_loaders)
"""The rule for loaders of modules that a script for several ranks imports."""


def _uses(trainer: SourceFile, path: str) -> bool:
    """True if a script imports a module of its folder or below."""
    return Path(path).stem in trainer.modules and Path(trainer.path).parent in Path(path).parents


def _is_set_by_importer(hit: Hit, setters: Iterable[SourceFile]) -> bool:
    """True if a script that sets epochs imports the hit's module."""
    return hit.code == "missing-set-epoch" and any(_uses(setter, hit.place.path) for setter in setters)


CALLS_ELSEWHERE = {"missing-set-epoch": ".set_epoch(", "duplicate-stream": "get_worker_info"}
"""Calls in another file of the package that weaken or drop a hit, by the rule's code."""


def _weaken(hit: Hit, found: Container[tuple[Path, str]]) -> Iterator[Hit]:
    """Weaken or drop a hit whose remedy is in another file."""
    word = CALLS_ELSEWHERE.get(hit.code)
    if word is None or (package_of(Path(hit.place.path)), word) not in found:
        yield hit
    elif hit.code == "duplicate-stream":  # one class that divides itself says nothing about another one
        yield hit._replace(severity=Severity.NOTE, text=f"{hit.text}, unless its source divides itself among workers")


def examine(source: SourceFile) -> list[Hit]:
    """Hits of all rules in one file, in the order of lines."""
    return sorted((hit for rule in RULES for hit in _hits(source, rule)), key=lambda hit: hit.place.line)


def _hits(source: SourceFile, rule: Rule) -> list[Hit]:
    return [
        Hit(source.place(node), rule.code, rule.severity, text, remedy)
        for node, text, remedy in rule.find(source)
        if not source.ignores(getattr(node, "lineno", 1), rule.code)
    ]


def show(survey: LintSurvey, console: Console) -> None:
    """Print mistakes by file and line, then code that feedline would simplify."""
    marks = Marks.of(console.encoding)
    mistakes = [hit for hit in survey.hits if hit.severity is not Severity.GOOD]
    for title, hits in (("", mistakes), ("With feedline", [hit for hit in survey.hits if hit not in mistakes])):
        if hits and title:
            console.print(f"\n{title}", style="bold")
        for hit in hits:
            severity = hit.severity if hit in mistakes else Severity.NOTE
            finding = Finding(str(hit.place), f"{hit.text} [{hit.code}]", severity, hit.remedy)
            # Wrapped already, except for long places, which stay whole.
            console.print(render([finding], console.width, marks, names_first=True), end="", soft_wrap=True)
    for file in survey.unreadable:
        console.print(f"{file.path} cannot be read: {file.reason}", markup=False, soft_wrap=True)
    console.print(_closing_line(survey), style="bold")


def _closing_line(survey: LintSurvey) -> str:
    counts = Counter(hit.severity for hit in survey.hits)
    files = f"{survey.files:,} file{'' if survey.files == 1 else 's'}"
    if not survey.hits and not survey.unreadable:
        return f"{files}: nothing to change."
    parts = [
        f"{len(survey.unreadable):,} not read" if survey.unreadable else "",
        f"{counts[Severity.BAD]} to mend" if counts[Severity.BAD] else "",
        f"{counts[Severity.NOTE]} worth a look" if counts[Severity.NOTE] else "",
        f"{counts[Severity.GOOD]} that feedline simplifies" if counts[Severity.GOOD] else "",
    ]
    return f"{files}: {', '.join(part for part in parts if part)}."


def command(
    paths: Annotated[list[str], typer.Argument(metavar="PATH", help="Python files, notebooks, or folders of them.")],
    as_json: AsJson = False,
) -> None:
    """Find mistakes in code that loads data.

    Code that feedline would simplify is listed, too.

    No code is executed. The comment `# feedline: ignore[code]` switches a rule off for its line.

    Exit code 1 if there is a mistake, or a file that cannot be read.
    """
    survey = run(paths)
    if as_json:
        print_json(survey.summary())
    else:
        show(survey, Console(highlight=False))
    raise typer.Exit(0 if survey.is_clean else 1)
