"""Findings of `feedline doctor`, and their text."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from feedline.core.wrapping import wrap

NAME_COLUMNS = 11
"""Width of the column of names, in a terminal of at least `TWO_COLUMNS`."""


TWO_COLUMNS = 60
"""Width of the narrowest terminal with a column of names."""


class Severity(enum.Enum):
    """Verdict of a finding; the value appears in JSON."""

    GOOD = "good"
    NOTE = "note"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """Result of one check.

    `evidence` is the measurement, `remedy` the advice. The remedy is empty if nothing needs to change.
    """

    name: str
    evidence: str
    severity: Severity = Severity.GOOD
    remedy: str = ""

    def summary(self) -> dict[str, str]:
        """The finding as a JSON object."""
        return {
            "name": self.name,
            "evidence": self.evidence,
            "severity": self.severity.value,
            "remedy": self.remedy,
        }


class Marks(enum.Enum):
    """Signs before findings, for terminals and for ASCII streams."""

    UNICODE = "✓", "!", "✗", "→"
    ASCII = "+", "!", "x", "->"

    def sign(self, severity: Severity) -> str:
        """Sign of a severity."""
        return self.value[list(Severity).index(severity)]

    @property
    def arrow(self) -> str:
        """Sign before a remedy."""
        return self.value[3]

    @classmethod
    def of(cls, encoding: str) -> Marks:
        """Signs that a stream of this encoding can write."""
        try:
            "✓→✗·".encode(encoding)
        except (UnicodeEncodeError, LookupError):
            return cls.ASCII
        return cls.UNICODE

    def adapt(self, text: str) -> str:
        """The text, with replacements for signs that the stream cannot write."""
        return (
            text
            if self is Marks.UNICODE
            else text.replace(" · ", ", ").replace("×", "x").replace("µ", "u").replace("±", "+-")
        )


_COLORS = {Severity.GOOD: "green", Severity.NOTE: "yellow", Severity.BAD: "bold red"}


def render(findings: Sequence[Finding], width: int, marks: Marks = Marks.UNICODE, *, names_first: bool = False) -> Text:
    """Text of a section, findings that need attention first.

    Findings without a remedy share lines. With `names_first`, long names, such as places in files, are on separate
    lines.
    """
    troubled = [finding for finding in findings if finding.severity is not Severity.GOOD]
    healthy = [finding for finding in findings if finding.severity is Severity.GOOD]
    troubled.sort(key=lambda finding: finding.severity is Severity.NOTE)
    text = Text()
    for finding in troubled:
        text.append_text(_render_trouble(finding, width, marks, wide=width >= TWO_COLUMNS and not names_first))
    for line in _pack(healthy, width, marks):
        text.append(line + "\n")
    text.highlight_words([marks.sign(Severity.GOOD) + " "], "green")
    return text


def closing_line(findings: Iterable[Finding]) -> str:
    """Sentence with the numbers of findings that need attention."""
    severities = [finding.severity for finding in findings]
    bad, notes = severities.count(Severity.BAD), severities.count(Severity.NOTE)
    if not bad and not notes:
        return "Nothing to change."
    parts = [
        f"{bad} {'finding stops or slows' if bad == 1 else 'findings stop or slow'} a run" if bad else "",
        f"{notes} {'finding is' if notes == 1 else 'findings are'} worth a look" if notes else "",
    ]
    return ", ".join(part for part in parts if part) + "."


def _render_trouble(finding: Finding, width: int, marks: Marks, *, wide: bool) -> Text:
    indent = " " * (NAME_COLUMNS + 2 if wide else 2)
    name = f"{finding.name:<{NAME_COLUMNS}}" if wide else f"{finding.name}: "
    text = Text(f"{marks.sign(finding.severity)} ", style=_COLORS[finding.severity])
    # A place in a file stays whole, beyond the edge if need be: it is copied, and terminals make links of it.
    evidence = _wrap(name + marks.adapt(finding.evidence), width, "  ", indent, cuts=len(name) <= width)
    text.append(evidence.removeprefix("  "), style="none")
    if finding.remedy:
        text.append(
            "\n" + _wrap(f"{marks.arrow} {marks.adapt(finding.remedy)}", width, indent, indent + "  "), style="yellow"
        )
    return text.append("\n")


def _pack(findings: Sequence[Finding], width: int, marks: Marks) -> Iterator[str]:
    """Lines with as many findings as fit."""
    sign, line = marks.sign(Severity.GOOD), ""
    for finding in findings:
        entry = marks.adapt(f"{sign} {finding.name} {finding.evidence}".rstrip())
        if line and len(line) + 3 + len(entry) > width:
            yield line
            line = ""
        line = f"{line}   {entry}" if line else entry
        if len(line) > width:
            *full, line = wrap(line, width, subsequent_indent="  ")
            yield from full
    if line:
        yield line


def _wrap(text: str, width: int, first: str, further: str, *, cuts: bool = True) -> str:
    return "\n".join(wrap(text, width, initial_indent=first, subsequent_indent=further, break_long_words=cuts))
