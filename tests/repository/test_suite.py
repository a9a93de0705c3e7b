"""The rules of the tests themselves: how many examples a law gets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import settings
from law_settings import Reason, law_settings

TESTS = Path(__file__).parents[1]


def test_no_law_sets_the_number_of_its_examples_itself() -> None:
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted((TESTS / "laws").glob("*.py"))
        for line in path.read_text(encoding="utf-8").splitlines()
        if re.search(r"max_examples|@settings", line)
    ]
    assert not found, "take law_settings(...)"


def test_a_law_has_the_examples_of_the_profile() -> None:
    assert law_settings().max_examples == settings().max_examples
    assert law_settings(at_least=10_000).max_examples == 10_000
    assert law_settings(at_most=2, because=Reason.PROCESSES).max_examples == 2


def test_fewer_examples_need_a_reason() -> None:
    with pytest.raises(TypeError, match="pass at_most= and because= together"):
        law_settings(at_most=2)


def test_ci_takes_300_examples() -> None:
    assert settings.get_profile("ci").max_examples >= 300
