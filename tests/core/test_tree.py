"""Every container of a batch is walked, and rebuilt with its type."""

from __future__ import annotations

from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from feedline.core.tree import arrays, leaves, map_leaves


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Pair:
    image: Any
    label: Any
    tag: str = field(default="tag", init=False)


class Stubborn(list):
    """A sequence that cannot be built from its items."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])


class Locked(UserDict):
    """A mapping that cannot be built from its items."""

    def __init__(self, key: str, value: Any) -> None:
        super().__init__({key: value})


atoms = st.one_of(st.integers(), st.text(max_size=3), st.binary(max_size=3), st.none(), st.floats(allow_nan=False))
trees = st.recursive(
    atoms,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.builds(Point, inner, inner),
        st.builds(Pair, inner, inner),
    ),
)


@given(trees)
def test_mapping_the_identity_changes_nothing(tree: Any) -> None:
    assert map_leaves(lambda leaf: leaf, tree) == tree


@given(trees)
def test_leaves_come_in_the_order_of_the_map(tree: Any) -> None:
    seen: list[Any] = []
    map_leaves(seen.append, tree)
    assert [leaf for leaf in leaves(tree) if leaf != "tag"] == [leaf for leaf in seen if leaf != "tag"]


@given(trees)
def test_leaves_are_not_containers(tree: Any) -> None:
    assert not any(isinstance(leaf, (list, tuple, dict, Pair)) for leaf in leaves(tree))


@pytest.mark.parametrize(
    "container",
    [
        [1, 2],
        (1, 2),
        Point(1, 2),
        {"a": 1, "b": 2},
        OrderedDict(a=1, b=2),
        UserDict(a=1, b=2),
        UserList([1, 2]),
        deque([1, 2]),
        Pair(1, 2),
    ],
    ids=lambda container: type(container).__name__,
)
def test_containers_keep_their_type(container: Any) -> None:
    negated = map_leaves(lambda leaf: -leaf, container)
    assert type(negated) is type(container)
    assert negated != container
    assert map_leaves(lambda leaf: -leaf, negated) == container


def test_containers_that_cannot_be_rebuilt_become_plain() -> None:
    assert map_leaves(str, Stubborn(1, 2)) == ["1", "2"]
    assert type(map_leaves(str, Stubborn(1, 2))) is list
    assert map_leaves(str, Locked("only", 1)) == {"only": "1"}


@pytest.mark.parametrize(
    "mapping",
    [defaultdict(list, a=1), Counter(a=1), ChainMap({"a": 1}), MappingProxyType({"a": 1})],
    ids=lambda mapping: type(mapping).__name__,
)
def test_odd_mappings_keep_their_items(mapping: Any) -> None:
    assert dict(map_leaves(lambda leaf: leaf + 1, mapping)) == {"a": 2}


@pytest.mark.parametrize(
    "leaf", ["text", b"bytes", bytearray(b"x"), 1, None, range(3), {1, 2}, np.zeros(3), torch.zeros(3), Pair, object()]
)
def test_everything_else_is_a_leaf(leaf: Any) -> None:
    assert next(leaves(leaf)) is leaf
    assert map_leaves(lambda found: (found,), leaf)[0] is leaf


def test_arrays_are_found_in_every_container() -> None:
    first, second, third = torch.zeros(2), np.ones(3), torch.zeros(())
    assert list(map(id, arrays({"a": [first, "text"], "b": Pair(second, UserList([third, 1]))}))) == [
        *map(id, (first, second, third))
    ]


def test_errors_of_the_function_pass_through() -> None:
    def refuse(leaf: Any) -> None:
        raise TypeError(f"not {leaf}")

    with pytest.raises(TypeError, match="not 1"):
        map_leaves(refuse, {"a": [1]})
