"""Statements are distinguished from calls whose result is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from feedline.images.accelerate import result_is_discarded


class Watched:
    """Object that records if the result of its method is discarded."""

    seen: bool | None = None

    def load(self, *_: Any) -> Watched:
        self.seen = result_is_discarded(sys._getframe(1), "load", self)
        return self

    other = load


def statement(watched: Watched) -> None:
    watched.load()


def closure(watched: Watched) -> None:
    def inner() -> None:
        watched.load()

    inner()


def in_blocks(watched: Watched) -> None:
    for _ in range(2):
        try:
            if watched.seen is not False:
                watched.load()
        finally:
            pass


def many_names(watched: Watched) -> None:
    names = {f"v{number}": number for number in range(300)}
    code = "".join(f"    {name} = owner.{name} = {number}\n" for name, number in names.items())
    space: dict[str, Any] = {}
    exec(f"def run(owner, watched):\n{code}    image = watched\n    image.load()\n", space)
    space["run"](Watched(), watched)


def after_many_calls(watched: Watched) -> None:
    for _ in range(200):  # the interpreter specializes the call
        watched.load()


@pytest.mark.parametrize("call", [statement, closure, in_blocks, many_names, after_many_calls])
def test_a_statement_is_seen(call: Callable[[Watched], None]) -> None:
    watched = Watched()
    call(watched)
    assert watched.seen is True


def assigned(watched: Watched) -> Any:
    found = watched.load()
    return found.seen


def returned(watched: Watched) -> Any:
    return watched.load()


def chained(watched: Watched) -> None:
    watched.load().__class__  # noqa: B018 - a use of the result


def of_another_name(watched: Watched) -> None:
    watched.other()


def with_an_argument(watched: Watched) -> None:
    watched.load(1)


def in_a_list(watched: Watched) -> None:
    [watched.load()]


def by_a_function_of_c(watched: Watched) -> None:
    found: list[Watched] = []
    found.extend(map(Watched.load, [watched]))


def conditional(watched: Watched) -> None:
    if watched.load() is None:
        raise AssertionError


USES = [assigned, returned, chained, of_another_name, with_an_argument, in_a_list, by_a_function_of_c, conditional]


@pytest.mark.parametrize("call", USES)
def test_a_use_of_the_result_is_seen(call: Callable[[Watched], Any]) -> None:
    watched = Watched()
    call(watched)
    assert watched.seen is False


def test_a_variable_with_another_object_is_no_receiver() -> None:
    watched = Watched()

    class Between:
        load = watched.load

    between = Between()
    between.load()
    assert watched.seen is False
