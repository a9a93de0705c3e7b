"""Manifests from a real PostgreSQL."""

from __future__ import annotations

import hashlib
import os
import pickle
import traceback
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import adbc_driver_postgresql.dbapi
import numpy as np
import pytest

import feedline as fl
from feedline.datasets import SQLManifest
from feedline.errors import ArgumentError, SampleError, StateError

COUNT = 40
QUERY = "SELECT id, path, label, weight FROM samples WHERE split = $1 AND label < $2"


@pytest.fixture
def database(postgres: str, tmp_path: Path) -> Iterator[str]:
    """A database with a table of samples, whose files are in the test's folder."""
    rows = [
        f"({i}, '{i:02}.txt', {i % 3}, {i / 2}, '{'val' if i % 4 == 0 else 'train'}')" for i in reversed(range(COUNT))
    ]
    run(
        postgres,
        "CREATE TABLE samples (id bigint PRIMARY KEY, path text, label integer, weight double precision, split text,"
        " made timestamp DEFAULT now())",
        f"INSERT INTO samples VALUES {', '.join(rows)}",
    )
    for i in range(COUNT):
        (tmp_path / f"{i:02}.txt").write_text(f"text {i}")
    yield postgres
    run(postgres, "DROP TABLE samples")


def run(address: str, *statements: str) -> None:
    with adbc_driver_postgresql.dbapi.connect(address) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        connection.commit()


def manifest(source: Any, folder: Path, query: str = QUERY, params: Any = ("train", 9)) -> SQLManifest:
    return SQLManifest(source, query, params=params, root=folder, key="id", decode="text")


def test_rows_come_in_the_order_of_their_keys(database: str, tmp_path: Path) -> None:
    dataset = manifest(database, tmp_path)
    assert len(dataset) == 30
    assert dataset[1] == {"id": 2, "path": "02.txt", "label": 2, "weight": 1.0, "data": "text 2"}
    assert len(manifest(database, tmp_path, params=("train", 1))) == 10


def test_a_connection_of_the_users_own(database: str, tmp_path: Path) -> None:
    ours = manifest(lambda: adbc_driver_postgresql.dbapi.connect(database), tmp_path)
    assert ours.state_dict() == manifest(database, tmp_path).state_dict()


def test_workers_of_every_kind_agree(database: str, tmp_path: Path) -> None:
    dataset, seen = manifest(database, tmp_path), []
    for settings in ({}, {"num_workers": 2, "worker_method": "thread"}, {"num_workers": 2, "worker_method": "process"}):
        with fl.DataLoader(dataset, 4, shuffle=True, seed=1, **settings) as loader:
            seen.append(str(list(loader)))
    assert len(set(seen)) == 1


def test_new_rows_are_for_the_next_epoch(database: str, tmp_path: Path) -> None:
    dataset = manifest(database, tmp_path)
    state = dataset.state_dict()
    run(database, "INSERT INTO samples VALUES (99, '00.txt', 1, 0.5, 'train')")
    new = dataset.refreshed()
    assert (len(dataset), len(new), len(new.as_of(state))) == (30, 31, 30)
    run(database, "UPDATE samples SET label = 2 WHERE id = 1")
    with pytest.raises(StateError, match=r"the first 30 are not those of the state"):
        dataset.refreshed().as_of(state)


def test_types_that_arrow_does_not_have(database: str, tmp_path: Path) -> None:
    query = """
        SELECT md5(id::text)::uuid AS id, path, id / 2.0 AS half, 'NaN'::numeric AS nan, '{"a": 1}'::jsonb AS mapping,
        (SELECT sum(id) FROM samples) AS sum, CASE WHEN id < 39 THEN 0.5 END AS missing FROM samples WHERE id > 37"""
    dataset = manifest(database, tmp_path, query, ())
    rows = {dataset.column("path")[i]: i for i in range(len(dataset))}
    sample = dataset[rows["38.txt"]]
    assert sample.pop("id") == str(uuid.UUID(hashlib.md5(b"38", usedforsecurity=False).hexdigest()))
    assert np.isnan(sample.pop("nan"))
    assert sample == {
        "path": "38.txt",
        "half": 19.0,
        "mapping": '{"a": 1}',
        "sum": float(sum(range(COUNT))),
        "missing": 0.5,
        "data": "text 38",
    }
    with pytest.raises(SampleError, match=r"has null for its missing: replace it, COALESCE\(missing, \.\.\.\)"):
        dataset[rows["39.txt"]]


def test_libpqs_own_strings(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(database)
    address = f"host={parts.hostname} port={parts.port} user=postgres dbname=postgres"
    dataset = manifest(address, tmp_path)
    assert len(dataset) == len(pickle.loads(pickle.dumps(dataset)).refreshed()) == 30
    monkeypatch.setenv("MANIFEST_URL", f"{address} password='hun ter2'")
    dataset = manifest("env:MANIFEST_URL", tmp_path)
    assert len(dataset) == 30
    assert b"ter2" not in pickle.dumps(dataset)
    monkeypatch.setenv("MANIFEST_URL", f"{address} password='hun ter2' sslmode='hun ter2'")
    with pytest.raises(SampleError, match="could not connect to the database") as caught:
        manifest("env:MANIFEST_URL", tmp_path)
    assert "ter2" not in "".join(traceback.format_exception(caught.value))


def test_values_go_through_parameters_alone(database: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="returns no rows"):
        manifest(database, tmp_path, params=("train' OR '1'='1", 9))


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("SELECT * FROM nowhere", r'the database refused the query .*relation "nowhere" does not exist'),
        ("SELECT id, pfad FROM samples", r'the database refused the query .*column "pfad" does not exist'),
        ("SELECT id, path, made FROM samples", r"column 'made' of .* the type timestamp, .*CAST\(made AS TEXT\)"),
        ("SELECT id, path, 'infinity'::date AS x FROM samples", r"column 'x' of the query has the type date"),
        ("SELECT id, path, '10.0.0.1'::inet AS x FROM samples", r"has the type inet, .*CAST\(x AS TEXT\)"),
        ("SELECT id, path, 1.5::money AS x FROM samples", r"has the type money, .*CAST\(x AS NUMERIC\)"),
        ("SELECT id, path, ARRAY[1, 2] AS x FROM samples", r"has the type _int4, .*CAST\(x AS TEXT\)"),
        ("SELECT id, path, '[1,2]'::int4range AS x FROM samples", r"has the type (int4range|unnamed\S*), .*CAST"),
        (
            "SELECT id, path, 9007199254740993 + id / 1.0 AS x FROM samples",
            r"row 1 \(id = 38\) of the result of .*'x' holds 90\d*\.0+, which float64, .*cannot hold .*AS BIGINT",
        ),
    ],
)
def test_queries_that_do_not_work(database: str, tmp_path: Path, query: str, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        manifest(database, tmp_path, query, ())


def test_a_password_shows_nowhere(database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = urlsplit(database)
    monkeypatch.setenv("MANIFEST_URL", f"postgresql://postgres:hunter2@{parts.hostname}:{parts.port}/postgres")
    dataset = manifest("env:MANIFEST_URL", tmp_path)
    assert len(dataset) == 30
    assert b"hunter2" not in pickle.dumps(dataset)
    assert "hunter2" not in repr(dataset)
    monkeypatch.setenv("MANIFEST_URL", os.environ["MANIFEST_URL"].replace("/postgres", "/nowhere"))
    with pytest.raises(SampleError, match="could not connect to the database") as caught:
        manifest("env:MANIFEST_URL", tmp_path)
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))
