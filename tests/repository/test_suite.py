"""The rules of the tests themselves: number of examples of a law, and place of a file."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import watchdog
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


def test_a_law_has_the_examples_of_the_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("CI", "NIGHTLY"):
        monkeypatch.delenv(variable, raising=False)
    assert law_settings().max_examples == settings().max_examples
    assert law_settings(at_most=2, because=Reason.PROCESSES).max_examples == 2


def test_tests_share_a_timer_that_outlives_a_failure(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_s: list[float] = []
    monkeypatch.setattr(watchdog, "faulthandler", Mock(dump_traceback_later=lambda limit_s, **_: set_s.append(limit_s)))
    monkeypatch.setattr(watchdog, "monotonic", lambda: now_s)
    dog = watchdog.Watchdog(request.config)
    item, slow = Mock(), Mock()
    item.get_closest_marker.return_value, slow.get_closest_marker.return_value = None, Mock(args=(900,))
    now_s = 1000.0
    next(dog.pytest_runtest_protocol(item))
    now_s += 9.0
    next(dog.pytest_runtest_protocol(item))
    assert set_s == [310.0]
    dog.pytest_exception_interact()
    next(dog.pytest_runtest_protocol(slow))
    now_s += 11.0
    next(dog.pytest_runtest_protocol(slow))
    next(dog.pytest_runtest_protocol(item))
    assert set_s == [310.0, 310.0, 910.0, 910.0, 310.0]
    dog.pytest_unconfigure()


def test_fewer_examples_need_a_reason() -> None:
    with pytest.raises(TypeError, match="pass at_most= and because= together"):
        law_settings(at_most=2)


def test_ci_takes_100_examples_of_a_law(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "1")
    monkeypatch.delenv("NIGHTLY", raising=False)
    assert law_settings(at_least=600).max_examples == 100
    assert law_settings(at_most=25, because=Reason.COSTLY).max_examples == 25


def test_the_night_takes_several_times_the_examples_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("NIGHTLY", "1")
    assert law_settings().max_examples == law_settings(at_most=25, because=Reason.COSTLY).max_examples == 300
    assert law_settings(at_least=600).max_examples == 600
    assert law_settings(at_most=10, because=Reason.PROCESSES).max_examples == 40


SOURCE = TESTS.parent / "src" / "feedline"

APART = {"conformance", "cuda", "examples", "formats", "laws", "repository", "services", "stress"}
"""Folders whose tests are of the whole; CONTRIBUTING.md lists them."""

SUBJECTS = {
    "cli": {"formats_by_name", "main_module"},
    "collate": {"early_rows", "fields"},
    "datasets": {"subclasses"},
    "datasets/arrays": {"byte_orders"},
    "datasets/shards": {"hostile_records"},
    "datasets/tables": {"table_threads"},
    "images": {"fuzz_run", "grid", "grid_hostile"},
    "loader": {
        "accelerate_workers",
        "checkpoints",
        "notebook",
        "stateful_generators",
        "stateful_protocol",
        "striding",
        "tune",
        "uneven_ranks",
    },
    "stores": {"google", "outage", "slow_lines"},
    "streams/live": {"live_clients"},
    "transforms": {"fusions", "pixels"},
    "workers/process": {"inheritance"},
}
"""Subjects of tests that concern several modules of their folder."""


def test_each_file_is_named_after_a_module_of_its_room_or_a_subject() -> None:
    strays = []
    for path in sorted(TESTS.rglob("test_*.py")):
        folder, subject = path.parent.relative_to(TESTS), path.stem.removeprefix("test_")
        if folder.parts[0] in APART:
            continue
        modules = {each.stem for each in (SOURCE / folder).iterdir()} if (SOURCE / folder).is_dir() else set()
        named = {folder.name, *SUBJECTS.get(folder.as_posix(), ())}
        of_a_module = any(f"{subject}_".startswith(f"{module}_") for module in modules)
        if not of_a_module and subject not in named and subject.replace("_", "") not in named:
            strays.append(path.relative_to(TESTS).as_posix())
    assert not strays


def test_names_of_files_are_unique() -> None:
    """A run of the whole suite cannot import two modules of one name; `formats` is a package."""
    names = Counter(path.name for path in TESTS.rglob("test_*.py") if path.parent != TESTS / "formats")
    assert [name for name, number in names.items() if number > 1] == []
