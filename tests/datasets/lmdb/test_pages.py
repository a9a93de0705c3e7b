"""The check of an LMDB file's pages: sound files pass, and no damage reaches the library."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import lmdb
import pytest

from feedline.datasets import LMDB
from feedline.datasets.lmdb import environment, pages
from feedline.errors import SampleError

PAGE = 4096


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))


def write(path: Path, count: int = 300, *, database: bytes | None = None, dupsort: bool = False) -> bytearray:
    """An environment with branch pages and a large value; its bytes."""
    with lmdb.open(str(path), map_size=1 << 24, max_dbs=2) as held:
        named = held.open_db(database, dupsort=dupsort) if database else None
        with held.begin(write=True, db=named) as transaction:
            for number in range(count):
                transaction.put(b"%05d" % number, bytes(1 + number % 60))
                if dupsort:
                    transaction.put(b"%05d" % number, b"another")
            if not dupsort:
                transaction.put(b"large", bytes(3 * PAGE))
    return bytearray((path / "data.mdb").read_bytes())


def first_page(data: bytearray, kind: int) -> int:
    """Offset of the first page of a type with more than one node."""
    pages = range(2 * PAGE, len(data), PAGE)
    return next(at for at in pages if data[at + 10 : at + 12] == bytes([kind, 0]) and data[at + 12] > 18)


def first_node(data: bytearray, page: int) -> int:
    return page + int.from_bytes(data[page + 16 : page + 18], "little")


@pytest.mark.parametrize(("database", "dupsort"), [(None, False), (b"named", False), (b"named", True)])
def test_sound_files_pass(tmp_path: Path, database: bytes | None, dupsort: bool) -> None:
    rng = random.Random(1)
    write(tmp_path / "a", database=database, dupsort=dupsort)
    with lmdb.open(str(tmp_path / "a"), map_size=1 << 24, max_dbs=2) as held:
        named = held.open_db(database) if database else None
        for _ in range(10):
            with held.begin(write=True, db=named) as transaction:
                for _ in range(40):
                    key = b"%05d" % rng.randrange(400)
                    transaction.delete(key) if rng.random() < 0.5 else transaction.put(key, rng.randbytes(90))
            with held.begin(db=named) as transaction:
                keys = [bytes(key) for key in transaction.cursor().iternext(values=False)]
            name = None if database is None else database.decode()
            data = (tmp_path / "a/data.mdb").read_bytes()
            (tmp_path / "copy").write_bytes(data)
            assert len(LMDB(tmp_path / "copy", sorted(set(keys)), database=name)) == len(set(keys))


Damage = Callable[[bytearray], None]


def several_values(data: bytearray) -> None:
    data[first_node(data, first_page(data, 2)) + 4] |= 4


def a_node_of_another_page(data: bytearray) -> None:
    at = first_page(data, 2) + 16
    data[at : at + 2] = b"\xfe\xff"


def a_long_key(data: bytearray) -> None:
    at = first_node(data, first_page(data, 2)) + 6
    data[at : at + 2] = b"\xff\xff"


def a_long_value(data: bytearray) -> None:
    at = first_node(data, first_page(data, 2))
    data[at : at + 4] = b"\xff\xff\xff\x7f"


def many_nodes(data: bytearray) -> None:
    at = first_page(data, 2) + 12
    data[at : at + 2] = b"\xff\xff"


def a_page_beyond_the_file(data: bytearray) -> None:
    at = first_node(data, first_page(data, 1))
    data[at : at + 4] = b"\xff\xff\xff\x7f"


def a_page_that_leads_to_itself(data: bytearray) -> None:
    page = first_page(data, 1)
    at = first_node(data, page)
    data[at : at + 4] = (page // PAGE).to_bytes(4, "little")


def a_larger_value(data: bytearray) -> None:
    node = next(at for at in range(2 * PAGE, len(data)) if data[at + 8 : at + 13] == b"large")
    data[node : node + 4] = b"\xff\xff\xff\x7f"


def another_number(data: bytearray) -> None:
    data[first_page(data, 2)] += 1


DAMAGES: list[Damage] = [
    *(several_values, a_node_of_another_page, a_long_key, a_long_value, many_nodes, a_page_beyond_the_file),
    *(a_page_that_leads_to_itself, a_larger_value, another_number),
]


@pytest.mark.parametrize(("damage", "database"), [*((damage, None) for damage in DAMAGES), (a_long_key, b"named")])
def test_damage_is_named_before_the_library_sees_it(tmp_path: Path, damage: Damage, database: bytes | None) -> None:
    data = write(tmp_path / "a", database=database)
    damage(data)
    (tmp_path / "a/data.mdb").write_bytes(data)
    with pytest.raises(SampleError, match=r"/a is damaged: a page .*; copy the environment again"):
        LMDB(tmp_path / "a", "{:05d}", database=database.decode() if database else None)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("count", [3, 3000])  # in a page within a node; in a tree
def test_damage_of_several_values_is_named(tmp_path: Path, fixed: bool, count: int) -> None:
    with lmdb.open(str(tmp_path / "a"), map_size=1 << 24, max_dbs=1) as held:
        several = held.open_db(b"several", dupsort=True, dupfixed=fixed)
        with held.begin(write=True, db=several) as transaction:
            for number in range(count):
                transaction.put(b"key", b"%08d" % number)
    data = (tmp_path / "a/data.mdb").read_bytes()
    (tmp_path / "sound").write_bytes(data)
    assert bytes(LMDB(tmp_path / "sound", ["key"], database="several")[0]) == b"00000000"
    value = data.rindex(b"00000002")
    kind = 0x72 if fixed else 0x52
    start = value // PAGE * PAGE if count > 3 else data.rindex(bytes([kind, 0]), 0, value) - 10
    damaged = bytearray(data)
    damaged[start + 12 : start + 14] = b"\xf0\xff"  # the end of the offsets of its nodes
    (tmp_path / "a/data.mdb").write_bytes(damaged)
    with pytest.raises(SampleError, match=r"/a is damaged: a page has wrong bounds"):
        LMDB(tmp_path / "a", ["key"], database="several")


@pytest.mark.parametrize("size", [0, 3, 1 << 31])
def test_an_impossible_page_size_is_named(tmp_path: Path, size: int) -> None:
    data = write(tmp_path / "a")
    data[40:44] = size.to_bytes(4, "little")
    (tmp_path / "a/data.mdb").write_bytes(data)
    with pytest.raises(SampleError, match=r"/a cannot be opened as an LMDB environment: .*INVALID"):
        LMDB(tmp_path / "a", "{:05d}")


def test_a_version_of_a_file_is_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a")
    checked = list[object]()
    check = pages.Pages.check
    monkeypatch.setattr(pages.Pages, "check", lambda self, tree: (checked.append(tree), check(self, tree)))
    for _ in range(3):
        LMDB(tmp_path / "a", "{:05d}", length=300)
    assert len(checked) == 1
    write(tmp_path / "a", 301)
    LMDB(tmp_path / "a", "{:05d}", length=301)
    assert len(checked) == 2


def test_a_writer_meanwhile_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a")
    check, tries = pages.Pages.check, list[object]()

    def first_while_written(self: pages.Pages, tree: pages.Tree) -> None:
        tries.append(tree)
        if len(tries) == 1:
            raise pages.DamageError("a page was used again")
        check(self, tree)

    monkeypatch.setattr(pages.Pages, "check", first_while_written)
    numbers = iter([1, 2, 3, 4])
    monkeypatch.setattr(environment._OpenEnvironment, "_last_transaction", lambda _: next(numbers))
    assert len(LMDB(tmp_path / "a", "{:05d}", length=300)) == 300
    assert len(tries) == 2
