"""Every format, in files of this machine and in a store in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from feedline.core.dataset_fingerprint import listing_fingerprint_of
from formats.places import Place
from formats.suite import FAMILIES, Corpus, FormatSuite


class TestLocal(FormatSuite):
    places = ("files", "memory", "cached")


LISTED = [name for name in FAMILIES if name not in ("documents", "lmdb", "manifest")]
"""Families whose samples come from files in an order; documents are in the files of the tokens."""


def test_a_listing_has_a_fingerprint_of_its_own(corpora: Callable[[str], Corpus], tmp_path: Path) -> None:
    """A loader's state is refused for other files, and accepted for a copy elsewhere."""
    seen: dict[str, str] = {}
    for name in LISTED:
        corpus, places = corpora(name), [Place(str(tmp_path / folder / name)) for folder in ("here", "there")]
        for place in places:
            place.fill(corpus.files)
        here, there = (listing_fingerprint_of(corpus.open(place)) for place in places)
        assert here == there, name
        assert here is not None
        seen[name] = here
    assert len({*seen.values()}) == len(seen)
