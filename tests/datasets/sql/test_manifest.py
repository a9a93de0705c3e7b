from __future__ import annotations

import pickle
import sqlite3
import traceback
import uuid
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import adbc_driver_sqlite.dbapi
import numpy as np
import pytest
import torch
from format_cases import all_ways_agree, hidden
from torch.utils.data import DataLoader
from writers.values import jpeg

import feedline as fl
from feedline.core.dataset import BatchRead
from feedline.datasets import SQLManifest
from feedline.errors import ArgumentError, MissingExtraError, SampleError, StateError

COUNT = 20
QUERY = "SELECT id, path, label, weight, split FROM samples WHERE split = ?"


@pytest.fixture
def database(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "list.db") as connection:
        connection.execute("CREATE TABLE samples (id INTEGER, path TEXT, label INTEGER, weight REAL, split TEXT)")
        rows = [(i, f"{i:02}.txt", i % 3, i / 2, "val" if i % 4 == 0 else "train") for i in reversed(range(COUNT))]
        connection.executemany("INSERT INTO samples VALUES (?, ?, ?, ?, ?)", rows)
    connection.close()
    (tmp_path / "files").mkdir()
    for i in range(COUNT):
        (tmp_path / f"files/{i:02}.txt").write_text(f"text {i}")
    return tmp_path / "list.db"


def changed(database: Path, *statements: str) -> None:
    connection = sqlite3.connect(database)
    for statement in statements:
        connection.execute(statement)
    connection.commit()
    connection.close()


class Cursor:
    """Cursor that returns rows like drivers with types of their own."""

    description = (("id",), ("path",))

    def __init__(self, rows: list[Any]) -> None:
        self.rows = rows

    def execute(self, *_: Any) -> None: ...
    def close(self) -> None: ...
    def fetchmany(self, _: int) -> list[Any]:
        rows, self.rows = self.rows, []
        return rows


class Connection:
    """A DB-API connection whose queries all return these rows."""

    def __init__(self, *rows: Any) -> None:
        self.rows = list(rows)

    def cursor(self) -> Cursor:
        return Cursor(self.rows)

    def close(self) -> None: ...


def manifest(database: Path, query: str = QUERY, params: Any = ("train",), **settings: Any) -> SQLManifest:
    settings = {"root": database.parent / "files", "key": "id", "decode": "text", **settings}
    return SQLManifest(settings.pop("source", database), query, params=params, **settings)


def without_mask(_: Any) -> Any:
    raise FileNotFoundError("no mask")


class TestRows:
    def test_rows_come_in_the_order_of_their_keys(self, database: Path) -> None:
        dataset = manifest(database)
        assert len(dataset) == 15
        assert dataset[1] == {"id": 2, "path": "02.txt", "label": 2, "weight": 1.0, "split": "train", "data": "text 2"}
        assert [dataset.column("id")[i] for i in range(15)] == [i for i in range(COUNT) if i % 4]
        all_ways_agree(dataset, [3, -1, 0, 3])

    def test_the_content_of_a_file_comes_under_a_name_of_choice(self, database: Path) -> None:
        dataset = manifest(database, "SELECT id, path, 1 AS data FROM samples", params=(), into="text")
        assert dataset[2] == {"id": 2, "path": "02.txt", "data": 1, "text": "text 2"}
        upper = manifest(database, into="text", transform={"text": str.upper})
        assert upper[1]["text"] == "TEXT 2"

    def test_batches(self, database: Path) -> None:
        with fl.DataLoader(manifest(database), 15) as loader:
            batch = next(iter(loader))
        assert batch["label"].dtype == torch.int64
        assert batch["weight"].dtype == torch.float64
        assert batch["data"][:2] == ["text 1", "text 2"]

    @pytest.mark.parametrize("kind", ["factory", "url", "env", "adbc"])
    def test_ways_to_connect(self, database: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THE_DATABASE", f"sqlite:///{database}")
        sources = {
            "factory": lambda: sqlite3.connect(database),
            "url": f"sqlite:///{database}",
            "env": "env:THE_DATABASE",
            "adbc": lambda: adbc_driver_sqlite.dbapi.connect(f"file:{database}?mode=ro"),
        }
        ours, theirs = manifest(database, source=sources[kind]), manifest(database)
        assert [ours[i] for i in range(15)] == [theirs[i] for i in range(15)]
        assert ours.state_dict() == theirs.state_dict()

    def test_text_keys_and_nulls(self, database: Path) -> None:
        changed(
            database, "UPDATE samples SET weight = NULL WHERE id < 3", "UPDATE samples SET split = NULL WHERE id = 1"
        )
        dataset = manifest(database, "SELECT path, weight, split, label = 1 AS flag FROM samples", (), key="path")
        assert dataset[5] == {"path": "05.txt", "weight": 2.5, "split": "train", "flag": 0, "data": "text 5"}
        assert [dataset.column("weight")[i] for i in (1, 5)] == [None, 2.5]
        with pytest.raises(
            SampleError,
            match=r"row 1 \(path = '01.txt'\) of the query .* null for its weight: .*COALESCE\(weight, \.\.\.\)",
        ):
            dataset[1]
        query = "SELECT id, path, COALESCE(weight, -1) AS weight, COALESCE(split, '') AS split FROM samples"
        filled = manifest(database, query, ())
        assert filled[1] == {"id": 1, "path": "01.txt", "weight": -1.0, "split": "", "data": "text 1"}

    def test_rows_with_nulls_are_skipped(self, database: Path) -> None:
        changed(database, "UPDATE samples SET label = NULL WHERE id IN (2, 7)")
        dataset = manifest(database)
        for settings in ({}, {"num_workers": 1, "worker_method": "process"}):
            with fl.DataLoader(dataset, 15, on_error="skip", **settings) as loader:
                assert next(iter(loader))["id"].tolist() == [i for i in range(COUNT) if i % 4 and i not in (2, 7)]
        with pytest.raises(SampleError, match=r"\(id = 2\) .* has null for its label: .*pass on_error='skip'"):
            dataset.__getitems__([0, 1])
        assert dataset.as_of(dataset.state_dict())[0] == dataset[0]

    def test_named_parameters(self, database: Path) -> None:
        assert len(manifest(database, QUERY.replace("?", ":which"), {"which": "val"})) == 5

    def test_parameters_are_values_and_never_sql(self, database: Path) -> None:
        with pytest.raises(ArgumentError, match="returns no rows"):
            manifest(database, params=("train' OR '1'='1",))

    def test_rows_are_held_packed(self, database: Path) -> None:
        connection = sqlite3.connect(database)
        connection.executemany(
            "INSERT INTO samples VALUES (?, ?, ?, ?, 'many')",
            ((i, f"{i:07}.jpg", i % 9, 0.5) for i in range(1000, 31_000)),
        )
        connection.commit()
        connection.close()
        dataset = manifest(database, "SELECT id, path, label FROM samples WHERE split = ?", ("many",))
        assert dataset.nbytes / len(dataset) < 64
        buffers: list[Any] = []
        data = pickle.dumps(dataset, protocol=5, buffer_callback=buffers.append)
        assert len(data) < 5000
        assert pickle.loads(data, buffers=buffers).column("path")[29_999] == "0030999.jpg"

    def test_transforms(self, database: Path) -> None:
        dataset = manifest(database, transform={"data": str.upper, "label": lambda label: label + 0.5})
        assert (dataset[0]["data"], dataset[0]["label"]) == ("TEXT 1", 1.5)
        assert manifest(database, transform=lambda sample: sample["data"])[0] == "text 1"
        with pytest.raises(ArgumentError, match=r"transform= names 'image'; known fields .* id, path, .* data"):
            manifest(database, transform={"image": str})

    def test_images_are_batched(self, database: Path) -> None:
        files = database.parent / "files"
        for i in range(COUNT):
            (files / f"{i:02}.txt").write_bytes(jpeg(i, (24, 18)))
        crop = fl.transforms.Compose([fl.transforms.RandomResizedCrop(8), fl.transforms.ToTensor()])
        dataset = manifest(database, decode="image", transform={"data": crop})
        with fl.DataLoader(dataset, 5, seed=1) as whole, fl.DataLoader(dataset, 5, seed=1, on_error="skip") as each:
            for ours, theirs in zip(whole, each, strict=True):
                assert torch.equal(ours["data"], theirs["data"])
                assert torch.equal(ours["label"], theirs["label"])
        (files / "02.txt").unlink()
        with pytest.raises(
            FileNotFoundError, match=r"the file '02.txt' of row 1 \(id = 2\) of the query 'SELECT id, .*"
        ):
            dataset.read_batch(BatchRead(np.arange(3), fl.core.tensors.allocate_tensor, None))


class TestRefresh:
    def test_new_rows_are_for_the_next_epoch(self, database: Path) -> None:
        dataset = manifest(database)
        changed(database, "INSERT INTO samples VALUES (99, '00.txt', 7, 0, 'train')")
        assert len(dataset) == 15
        new = dataset.refreshed()
        assert len(new) == 16
        assert new[-1]["label"] == 7
        assert [new[i] for i in range(15)] == [dataset[i] for i in range(15)]

    def test_a_running_epoch_continues_over_its_rows(self, database: Path) -> None:
        dataset = manifest(database)
        with fl.DataLoader(dataset, 4, shuffle=True, seed=5) as loader:
            whole = list(loader)
        with fl.DataLoader(dataset, 4, shuffle=True, seed=5) as loader:
            batches = iter(loader)
            begun = [next(batches), next(batches)]
            state, rows = loader.state_dict(), dataset.state_dict()
        changed(database, "INSERT INTO samples VALUES (99, '00.txt', 7, 0, 'train')")
        with fl.DataLoader(manifest(database).as_of(rows), 4, shuffle=True, seed=5) as loader:
            loader.load_state_dict(state)
            assert str(begun + list(loader)) == str(whole)

    @pytest.mark.parametrize(
        "statement",
        [
            "UPDATE samples SET label = 9 WHERE id = 3",
            "DELETE FROM samples WHERE id = 3",
            "INSERT INTO samples VALUES (-1, '00.txt', 0, 0, 'train')",
        ],
    )
    def test_rows_that_are_not_the_first_any_more(self, database: Path, statement: str) -> None:
        dataset = manifest(database)
        state = dataset.state_dict()
        changed(database, statement)
        with pytest.raises(
            StateError, match=r"the first 15 are not those of the state: some were changed or deleted, or"
        ):
            dataset.refreshed().as_of(state)

    @pytest.mark.parametrize("added", ["NULL, NULL", "0.5, 1", "7, 'text'", "'text', 'text'", "x'00', 1"])
    @pytest.mark.parametrize("before", ["label", "NULL"])
    def test_values_of_other_types_that_come_later_change_nothing_before(
        self, database: Path, added: str, before: str
    ) -> None:
        changed(database, f"UPDATE samples SET weight = {before}, label = {before}")
        dataset = manifest(database)
        changed(database, f"INSERT INTO samples VALUES (99, '00.txt', {added}, 'train')")
        if before == "NULL" or "'" not in added:
            now = manifest(database).as_of(pickle.loads(pickle.dumps(dataset.state_dict())))
            columns = [
                [each.column(name)[at] for name in ("label", "weight") for at in range(15)] for each in (now, dataset)
            ]
            assert str(columns[0]) == str(columns[1])
        else:
            with pytest.raises(SampleError, match="cast the column to one of them in the query"):
                manifest(database)

    def test_another_column_is_named(self, database: Path) -> None:
        dataset = manifest(database, query="SELECT * FROM samples WHERE split = ?")
        changed(database, "ALTER TABLE samples ADD COLUMN extra INTEGER")
        with pytest.raises(ArgumentError, match=r"returned id, .*split, and returns id, .*extra now: name the columns"):
            dataset.refreshed()


class TestProcesses:
    def test_connections_are_not_pickled(self, database: Path) -> None:
        dataset = manifest(database, source=lambda: sqlite3.connect(database))
        copy = pickle.loads(pickle.dumps(dataset))
        assert copy[0] == dataset[0]
        with pytest.raises(ArgumentError, match="came from another process"):
            copy.refreshed()
        assert len(pickle.loads(pickle.dumps(manifest(database))).refreshed()) == 15

    @pytest.mark.filterwarnings("ignore:.*use of fork\\(\\) may lead to deadlocks:DeprecationWarning")
    def test_torchs_forked_workers(self, database: Path) -> None:
        dataset = manifest(database)
        loader = DataLoader(dataset, 5, num_workers=2, multiprocessing_context="fork")
        assert [text for batch in loader for text in batch["data"]] == [dataset[i]["data"] for i in range(15)]


class TestSecrets:
    @pytest.mark.parametrize(
        "address",
        [
            "postgresql://me:hunter2@db/x",
            "postgresql://me:#hunter2@db/x",
            "postgresql://me:a/hunter2@db/x",
            "postgresql://me:a?hunter2@db/x",
            "postgresql://me:[hunter2@db/x",
            "postgresql://me:hun@hunter2@db/x",
            "postgresql://me@db/x?password=hunter2",
            "postgresql://me@db/x?%70assword=hunter2",
            "postgresql://me@db/x?sslpassword=hun@hunter2",
            "host=db user=me password=hunter2 dbname=x",
            "password = 'hunter2' host=db",
        ],
    )
    def test_addresses_with_a_password_are_refused(self, database: Path, address: str) -> None:
        with pytest.raises(ArgumentError, match=r"database contains a password.*PGPASSWORD.*env:NAME") as caught:
            manifest(database, source=address)
        assert "hun" not in "".join(traceback.format_exception(caught.value))

    @pytest.mark.parametrize(
        "address",
        [
            "postgresql://me:hunter2@127.0.0.1:1/x",
            "postgresql://me:#hunter2@127.0.0.1:1/x",
            "postgresql://me:[hunter2@127.0.0.1:1/x",
            "postgresql://me:%zzhunter2@127.0.0.1:1/x",
            "postgresql://me:hunter2/y@127.0.0.1:1/x",
            "postgresql://me:a@hunter2@127.0.0.1:1/x",
            "postgresql://me@127.0.0.1:1/x?password=hunter2",
            "host=127.0.0.1 port=1 user=me password=hunter2",
            "host=127.0.0.1 port=1 user=me password=hunter2'",
            "Server=tcp:db;Password=hunter2",
            "Driver={ODBC};Pwd=hunter2",
            "db.hunter2",
            "hunter2/" + 300 * "x",
            "sqlite:///hunter2.db",
            "mysql://me:hunter2@db/x",
        ],
    )
    def test_the_value_of_a_variable_is_never_named(
        self, database: Path, address: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("DBU", address)
        with pytest.raises((ArgumentError, SampleError, FileNotFoundError)) as caught:
            manifest(database, source="env:DBU")
        assert "hunter2" not in "".join(traceback.format_exception(caught.value))
        if isinstance(caught.value, FileNotFoundError):
            assert str(caught.value) == "no such database: what $DBU holds"

    @pytest.mark.parametrize("address", ["Server=tcp:db;Uid=me", "DSN=warehouse", "token=hunter2"])
    def test_strings_of_odbc(self, database: Path, address: str) -> None:
        with pytest.raises(ArgumentError, match=r"ODBC key=value pairs is not an address .* pass a function") as caught:
            manifest(database, source=address)
        assert "hunter2" not in str(caught.value)

    def test_a_path_that_looks_like_a_secret(self, database: Path) -> None:
        odd = database.rename(database.parent / "password=1;x.db")
        assert len(manifest(odd, root=odd.parent / "files")) == 15
        with pytest.raises(FileNotFoundError, match=r"no such database: .*tokens=9/list.db"):
            manifest(odd, source=odd.parent / "tokens=9/list.db", root=odd.parent / "files")

    @pytest.mark.parametrize("kind", [RuntimeError, ConnectionRefusedError, KeyError], ids=lambda kind: kind.__name__)
    def test_errors_of_a_function_keep_their_type(self, database: Path, kind: type[Exception]) -> None:
        error = kind("the server is away")

        def connect() -> Any:
            raise error

        with pytest.raises(kind) as caught:
            manifest(database, source=connect)
        assert caught.value is error

    def test_the_text_of_a_driver_about_a_variable_is_not_shown(
        self, database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THE_DATABASE", "postgresql://me:hunter2@127.0.0.1:1/x")
        with pytest.raises(SampleError, match=r"not shown, because it may quote what \$THE_DATABASE holds; to see it"):
            manifest(database, source="env:THE_DATABASE")
        with pytest.raises(SampleError, match=r"could not connect .*: \w+: .*127\.0\.0\.1"):
            manifest(database, source="postgresql://me@127.0.0.1:1/x")

    def test_a_password_from_the_environment_shows_nowhere(
        self, database: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("THE_DATABASE", "postgresql://me:hunter2@127.0.0.1:1/x")
        with pytest.raises(SampleError, match=r"could not connect to the database for the query") as caught:
            manifest(database, source="env:THE_DATABASE")
        assert "hunter2" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
        monkeypatch.setenv("THE_DATABASE", f"sqlite:///{database}?password=hunter2")
        dataset = manifest(database, source="env:THE_DATABASE")
        assert b"hunter2" not in pickle.dumps(dataset)
        assert "hunter2" not in repr(dataset)

    def test_a_driver_that_quotes_the_address(self, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("THE_DATABASE", "mysql://me:hunter2@db/x")
        with pytest.raises(ArgumentError, match=r"mysql:// is not a database that SQLManifest can open") as caught:
            manifest(database, source="env:THE_DATABASE")
        assert "hunter2" not in str(caught.value)

    def test_an_unset_variable(self, database: Path) -> None:
        with pytest.raises(ArgumentError, match=r"the environment variable NOT_THERE is not set"):
            manifest(database, source="env:NOT_THERE")


class TestDamage:
    @pytest.mark.parametrize(
        ("query", "error", "message"),
        [
            (
                "SELECT * FROM nowhere",
                SampleError,
                r"the database refused the query 'SELECT \* FROM nowhere': .*no such table",
            ),
            ("SELECT id FROM samples", ArgumentError, r"returns no column 'path' for path=; it returns id"),
            ("SELECT path FROM samples", ArgumentError, r"returns no column 'id' for key=; it returns path"),
            ("SELECT id, path FROM samples WHERE id > 999", ArgumentError, r"returns no rows: check its conditions"),
            (
                "SELECT label AS id, path FROM samples",
                ArgumentError,
                r"rows whose id is 0, which is null or not unique",
            ),
            (
                "SELECT NULL AS id, path FROM samples",
                ArgumentError,
                r"rows whose id is None, which is null or not unique",
            ),
            ("SELECT id, path, path FROM samples", ArgumentError, r"two columns named 'path': rename one with AS"),
            ("SELECT id, path, 1 AS data FROM samples", ArgumentError, r"returns a column 'data', .* another into="),
            (
                "SELECT id, path, iif(id < 5, id, path) AS x FROM samples",
                SampleError,
                r"row 15 \(id = 4\) of the result of the query .*: column 'x' holds int64, 4, after text: cast",
            ),
            ("CREATE TABLE x (y)", SampleError, r"the database refused the query .*readonly"),
        ],
    )
    def test_queries_that_do_not_work(self, database: Path, query: str, error: type, message: str) -> None:
        with pytest.raises(error, match=message):
            manifest(database, query, ())

    def test_statements_that_are_no_queries(self, database: Path) -> None:
        with pytest.raises(ArgumentError, match=r"returns no rows: it must be a SELECT"):
            manifest(database, "UPDATE samples SET label = 1", (), source=lambda: sqlite3.connect(database))

    def test_a_missing_file(self, database: Path) -> None:
        (database.parent / "files/02.txt").unlink()
        dataset = manifest(database)
        with pytest.raises(
            FileNotFoundError, match=r"the file '02.txt' of row 1 \(id = 2\) of the query 'SELECT id, path.*on_error"
        ):
            dataset[1]
        with fl.DataLoader(dataset, 15, on_error="skip") as loader:
            assert len(next(iter(loader))["data"]) == 14

    def test_a_file_that_cannot_be_decoded(self, database: Path) -> None:
        with pytest.raises(SampleError, match=r"the file '01.txt' of row 0 \(id = 1\) .* cannot be decoded as npy"):
            manifest(database, decode="npy")[0]

    def test_whole_numbers_that_a_float_cannot_hold(self, database: Path) -> None:
        query = "SELECT id, path, iif(id = 3, ?, 0.5) AS x FROM samples"
        assert manifest(database, query, (1 << 60,))[3]["x"] == float(1 << 60)
        with pytest.raises(
            SampleError, match=r"\(id = 3\) .*'x' holds 9007199254740993, which float64, .* cannot hold"
        ):
            manifest(database, query, ((1 << 53) + 1,))

    def test_numbers_and_keys_of_drivers(self, database: Path) -> None:
        keys = [uuid.UUID(int=i) for i in range(3)]
        dataset = manifest(database, source=lambda: Connection(*((key, "01.txt") for key in keys)))
        assert [dataset.column("id")[i] for i in range(3)] == list(map(str, keys))
        dataset = manifest(database, source=lambda: Connection((Decimal("1.5"), "01.txt"), (Decimal("NaN"), "02.txt")))
        assert dataset[0] == {"id": 1.5, "path": "01.txt", "data": "text 1"}
        for number in (Decimal((1 << 53) + 1), Decimal("1e400")):
            with pytest.raises(SampleError, match=r"column 'id' holds .*, which float64, .* cannot hold exactly: cast"):
                manifest(database, source=lambda number=number: Connection((number, "01.txt")))

    def test_rows_that_are_dicts(self, database: Path) -> None:
        dataset = manifest(database, source=lambda: Connection({"path": "07.txt", "id": 7}))
        assert dataset[0] == {"id": 7, "path": "07.txt", "data": "text 7"}

    @pytest.mark.parametrize("connect", [sqlite3.connect, adbc_driver_sqlite.dbapi.connect])
    def test_a_connection_is_no_source(self, database: Path, connect: Callable[[str], Any]) -> None:
        connection = connect(str(database))
        with pytest.raises(ArgumentError, match=r"source is a connection \(.*Connection\).*pass a function that opens"):
            manifest(database, source=connection)
        connection.cursor().close()  # which is open still
        connection.close()

    def test_sources_that_give_no_connection(self, database: Path) -> None:
        with pytest.raises(
            ArgumentError, match=r"the function passed as source returned NoneType, which has no cursor"
        ):
            manifest(database, source=lambda: None)
        with pytest.raises(ArgumentError, match=r"source is a bytes: pass a path, an address, or a function"):
            manifest(database, source=b"list.db")

    @pytest.mark.parametrize(
        ("decode", "path", "problem"),
        [
            ("text", "", "is not a file (Is a directory)"),
            ("image", ".", "is not a file (Is a directory)"),
            ("text", "00.txt/x", "is not a file (Not a directory)"),
            ("image", "00.txt/x", "is not a file (Not a directory)"),
            ("text", "x" * 300, "is not a file (File name too long)"),
            ("image", "a\0b", "has a NUL character in its path"),
            ("text", "a\0b", "has a NUL character in its path"),
            ("image", "../x", "is outside the root"),
        ],
    )
    def test_paths_that_are_no_files(self, database: Path, path: str, problem: str, decode: str) -> None:
        settings: dict[str, Any] = {"decode": decode}
        if decode == "image":
            (database.parent / "files/00.txt").write_bytes(jpeg(0, (24, 18)))
            settings["transform"] = {
                "data": fl.transforms.Compose([fl.transforms.Resize((8, 8)), fl.transforms.ToTensor()])
            }
        dataset = manifest(database, "SELECT id, iif(id = 1, ?, '00.txt') AS path FROM samples", (path,), **settings)
        reads: list[Callable[[], Any]] = [lambda: dataset[1], lambda: dataset.__getitems__([0, 1])]
        if decode == "image":
            reads.append(lambda: dataset.read_batch(BatchRead(np.arange(2), fl.core.tensors.allocate_tensor)))
        for read in reads:
            with pytest.raises(SampleError) as caught:
                read()
            assert f'the file {path!r} of row 1 (id = 1) of the query "SELECT id, ' in str(caught.value)
            assert problem in str(caught.value)

    def test_the_error_of_a_transform_is_not_blamed_on_the_file(self, database: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"^no mask$"):
            manifest(database, transform={"data": without_mask})[0]

    def test_a_root_that_is_not_there(self, database: Path) -> None:
        for root in ("nowhere", "list.db"):
            with pytest.raises(FileNotFoundError, match=rf"no such folder: .*{root}, given as root="):
                manifest(database, root=database.parent / root)

    def test_an_address_that_is_meant_to_be_relative(self, database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(database.parent)
        assert len(manifest(database, source="list.db")) == 15
        with pytest.raises(FileNotFoundError, match=r"sqlite:///list.db. The path after sqlite:// is absolute"):
            manifest(database, source="sqlite:///list.db")
        with pytest.raises(FileNotFoundError, match=r"no such database: sqlite:///gone.db$"):
            manifest(database, source="sqlite:///gone.db")

    @pytest.mark.parametrize("path", ["../list.db", "/etc/passwd", "a/../../list.db"])
    def test_paths_that_lead_out_of_the_root(self, database: Path, path: str) -> None:
        dataset = manifest(database, "SELECT id, ? AS path FROM samples", (path,))
        with pytest.raises(SampleError, match=r"is outside the root .*files; give a root="):
            dataset[0]

    def test_absolute_paths_below_the_root(self, database: Path) -> None:
        path = str(database.parent / "files/07.txt")
        dataset = manifest(database, "SELECT id, ? AS path FROM samples", (path,), root="/")
        assert dataset[0]["data"] == "text 7"

    def test_a_row_without_a_path(self, database: Path) -> None:
        dataset = manifest(database, "SELECT id, NULL AS path FROM samples", ())
        with pytest.raises(
            SampleError, match=r"row 0 \(id = 0\) of .* has null for its path: .* WHERE path IS NOT NULL"
        ):
            dataset[0]
        with pytest.raises(
            SampleError, match=r"row 0 \(id = 0\) of .* has 0 for its path, which is not a string: cast it"
        ):
            manifest(database, "SELECT id, label AS path FROM samples", ())[0]

    def test_what_is_not_there(self, database: Path, tmp_path: Path) -> None:
        with pytest.raises(FileNotFoundError, match=r"no such database: .*gone.db"):
            manifest(database, source=tmp_path / "gone.db")
        assert not (tmp_path / "gone.db").exists()

    def test_values_that_cannot_be_held(self, database: Path) -> None:
        with pytest.raises(
            SampleError, match=r"row 0 \(id = 1\) of .*column 'path' holds a complex, .*CAST\(path AS TEXT\)"
        ):
            manifest(database, source=lambda: Connection((1, 1j)))
        with pytest.raises(
            SampleError, match=r"row 0 .*column 'id' holds 1180591620717411303424, which 64 bits cannot"
        ):
            manifest(database, source=lambda: Connection((1 << 70, "x")))
        assert manifest(database, source=lambda: Connection((True, "01.txt"), (False, "02.txt")))[0]["data"] == "text 2"

    def test_a_missing_library(self, database: Path) -> None:
        with hidden("adbc_driver_postgresql"), pytest.raises(MissingExtraError, match=r"pip install 'feedline\[sql\]'"):
            manifest(database, source="postgresql://me@db/x")
