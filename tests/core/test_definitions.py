"""Functions belong to the module of their code, whatever names decorators give them."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest

from feedline.core.definitions import module_of_code


@functools.wraps(textwrap.dedent)
def wrapping(text: str) -> str:
    return text


class Kind:
    @functools.wraps(textwrap.TextWrapper.wrap)
    def method(self) -> None: ...


@pytest.mark.parametrize("own", [wrapping, Kind.method, Kind().method, lambda: None])
def test_code_of_this_module_is_of_this_module(own: Any) -> None:
    assert module_of_code(own) == __name__


@pytest.mark.parametrize(
    ("other", "module"),
    [(textwrap.dedent, "textwrap"), (textwrap.TextWrapper.wrap, "textwrap"), (list, "builtins"), (len, "builtins")],
)
def test_code_of_other_modules_is_theirs(other: Any, module: str) -> None:
    assert module_of_code(other) == module


def test_an_object_without_a_module_is_of_none() -> None:
    assert module_of_code([].append) is None
