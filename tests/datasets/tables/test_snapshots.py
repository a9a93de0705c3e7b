"""Folders of Delta, Iceberg and Hudi tables: the rows of the current version, or a refusal that names the reason."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import fastavro
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from odd_values import each_odd

from feedline.datasets import Parquet
from feedline.errors import ArgumentError, FeedlineError, SampleError

Put = Callable[[str, bytes], None]


class Table:
    """A folder that a test fills; `root` is its path or address."""

    def __init__(self, root: str, put: Put) -> None:
        self.root, self.put = root, put

    def rows(self, name: str, table: Any) -> None:
        file = io.BytesIO()
        pq.write_table(table, file)
        self.put(name, file.getvalue())

    def read(self, columns: Sequence[str] | None = None, name: str = "", **options: Any) -> list[dict[str, Any]]:
        data = Parquet(f"{self.root}{name}", columns, **options)
        samples = data.__getitems__(range(len(data)))
        return [{n: v if isinstance(v, str) else v.item() for n, v in sample.items()} for sample in samples]

    def values(self, column: str = "x", **options: Any) -> list[Any]:
        return [row[column] for row in self.read([column], **options)]


@pytest.fixture(params=["local", "store"])
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Table]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))

    def write(name: str, data: bytes) -> None:
        (tmp_path / "lake/t" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lake/t" / name).write_bytes(data)

    if request.param == "local":
        yield Table(str(tmp_path / "lake/t"), write)
        return
    system = fsspec.filesystem("memory")
    yield Table("memory://lake/t", lambda name, data: system.pipe(f"/lake/t/{name}", data))
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


def xs(*values: int, **more: Any) -> Any:
    return pa.table({"x": pa.array(values, pa.int64(), size=len(values)), **more})


# Delta

SCHEMA = {"x": "long"}


def metadata(schema: Mapping[str, str] = SCHEMA, partitions: Sequence[str] = (), **configuration: str) -> Any:
    fields = [{"name": name, "type": kind, "nullable": True, "metadata": {}} for name, kind in schema.items()]
    text = json.dumps({"type": "struct", "fields": fields})
    return {"metaData": {"schemaString": text, "partitionColumns": list(partitions), "configuration": configuration}}


def add(path: str, vector: Any = None, **partitions: str | None) -> Any:
    return {"add": {"path": path, "partitionValues": partitions, "deletionVector": vector}}


def remove(path: str, vector: Any = None) -> Any:
    return {"remove": {"path": path, "deletionVector": vector}}


VECTOR = {"storageType": "u", "pathOrInlineDv": "abc", "offset": 1}


def commit(table: Table, version: int, *actions: Any) -> None:
    lines = "\n".join(json.dumps(action) for action in actions)
    table.put(f"_delta_log/{version:020}.json", lines.encode())


@pytest.fixture
def delta(table: Table) -> Table:
    """Three files, of which the second was removed."""
    for number in range(3):
        table.rows(f"{number}.parquet", xs(10 * number, 10 * number + 1))
    commit(table, 0, {"protocol": {"minReaderVersion": 1}}, metadata(), add("0.parquet"), add("1.parquet"))
    commit(table, 1, remove("1.parquet"), add("2.parquet"))
    return table


def test_files_that_a_delta_table_removed_are_not_read(delta: Table) -> None:
    assert delta.values() == [0, 1, 20, 21]


def test_the_log_continues_after_a_checkpoint(delta: Table) -> None:
    delta.rows("3.parquet", xs(30))
    state = [metadata(), add("0.parquet"), add("2.parquet")]
    for action in state:  # maps, as in real checkpoints
        for each in action.values():
            for name in ("configuration", "partitionValues"):
                if name in each:
                    each[name] = [*each[name].items()]
    pairs = pa.map_(pa.string(), pa.string())
    file = pa.struct({"path": pa.string(), "partitionValues": pairs})
    schema = {"schemaString": pa.string(), "partitionColumns": pa.list_(pa.string()), "configuration": pairs}
    columns = {"metaData": pa.struct(schema), "add": file, "remove": file}
    arrays = {name: pa.array([each.get(name) for each in state], kind) for name, kind in columns.items()}
    delta.rows(f"_delta_log/{2:020}.checkpoint.parquet", pa.table(arrays))
    delta.put(f"_delta_log/{0:020}.json", b"expired, and may be gone")
    delta.put(f"_delta_log/{1:020}.checkpoint.{1:010}.{2:010}.parquet", b"one part of an incomplete checkpoint")
    commit(delta, 3, add("3.parquet"), remove("0.parquet"))
    assert delta.values() == [20, 21, 30]


def test_partition_columns_have_the_types_of_the_delta_table(table: Table) -> None:
    schema = {"x": "long", "day": "date", "text": "string", "n": "decimal(4,2)", "t": "timestamp"}
    table.rows("text=1/one.parquet", xs(1))
    table.rows("text=2%2F/two.parquet", xs(2))
    commit(
        table,
        0,
        metadata(schema, ("day", "text", "n", "t")),
        add("text=1/one.parquet", day="1970-01-02", text="1", n="1.50", t="1970-01-01 00:00:01"),
        add("text=2%252F/two.parquet", day="1970-01-03", text="2/", n="2.25", t="1970-01-01T00:00:01.000002Z"),
    )
    one, two = table.read()
    assert one == {"x": 1, "day": 1, "text": "1", "n": 1.5, "t": 1_000_000}
    assert two == {"x": 2, "day": 2, "text": "2/", "n": 2.25, "t": 1_000_002}
    assert table.values(filters=[("text", "==", "2/")]) == [2]


def test_columns_that_are_younger_than_a_file_are_null_there(delta: Table) -> None:
    delta.rows("3.parquet", xs(30, y=pa.array([1.5])))
    commit(delta, 2, metadata({"x": "long", "y": "double", "z": "long"}), add("3.parquet"))
    with pytest.raises(SampleError, match=r"0\.parquet, row 0 .*column 'y' is null"):
        delta.read()
    assert [row["y"] for row in delta.read(nulls=-1)] == [-1, -1, -1, -1, 1.5]
    assert delta.values("z", nulls=-1) == [row["z"] for row in delta.read(nulls=-1)] == [-1] * 5  # in no file yet
    assert delta.values() == [0, 1, 20, 21, 30]
    with pytest.raises(ArgumentError, match="column 'none' is not in"):
        delta.read(["x", "none"])


def test_a_column_that_a_table_dropped_is_not_read_from_its_older_files(delta: Table) -> None:
    delta.rows("3.parquet", pa.table({"y": [30]}))
    commit(delta, 2, metadata({"y": "long"}), add("3.parquet"))
    assert delta.values("y", nulls=0) == [0, 0, 0, 0, 30]
    with pytest.raises(ArgumentError, match=r"column 'x' is not in the table of .*; there are y"):
        delta.values("x")


def test_a_column_of_a_nested_type_that_no_file_has_is_named(delta: Table) -> None:
    nested: Any = {"type": "array", "elementType": "long", "containsNull": True}
    commit(delta, 2, metadata({"x": "long", "y": nested}))
    with pytest.raises(ArgumentError, match=r"column 'y' of the table is in none of its files yet.*; leave it out"):
        delta.read()
    assert delta.values() == [0, 1, 20, 21]


def test_a_partition_column_of_a_delta_table_may_be_stored_in_some_files(table: Table) -> None:
    table.rows("0.parquet", xs(0, y=pa.array([5])))
    table.rows("1.parquet", xs(1))
    commit(table, 0, metadata({"x": "long", "y": "long"}, ["y"]), add("0.parquet", y="5"), add("1.parquet", y="6"))
    assert table.values("y", nulls=0) == [5, 6]


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([remove("0.parquet"), add("0.parquet", VECTOR)], "is a Delta table with deletion vectors, such as that of 0"),
        ([metadata(**{"delta.columnMapping.mode": "name"})], "is a Delta table with column mapping by name"),
        ([{"protocol": {"minReaderVersion": 3, "readerFeatures": ["x"]}}], "is a Delta table with the feature x"),
        ([{"protocol": {"minReaderVersion": 4}}], "is a Delta table with the feature reader version 4"),
    ],
)
def test_features_of_delta_that_change_rows_are_refused(delta: Table, actions: Sequence[Any], message: str) -> None:
    commit(delta, 2, *actions)
    with pytest.raises(ArgumentError, match=f"lake/t {message}.*; write its current rows as Parquet files"):
        delta.read()


def test_a_deletion_vector_that_was_removed_again_does_not_matter(delta: Table) -> None:
    commit(delta, 2, add("0.parquet", VECTOR), remove("0.parquet"))
    commit(delta, 3, remove("0.parquet", VECTOR))
    assert delta.values() == [20, 21]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (f"_delta_log/{3:020}.json", b"{}", "log of the Delta table .* is damaged: commits from version 0 on are miss"),
        (f"_delta_log/{2:020}.json", b'{"add"', r"_delta_log/0+2\.json cannot be read: it is damaged"),
        (f"_delta_log/{2:020}.checkpoint.parquet", b"PAR1", r"_delta_log/0+2\.checkpoint\.parquet cannot be read"),
    ],
)
def test_damage_of_a_delta_log_is_named(delta: Table, name: str, data: bytes, message: str) -> None:
    delta.put(name, data)
    with pytest.raises(SampleError, match=message):
        delta.read()


def check_refused_or_read(table: Table) -> None:
    with suppress(FeedlineError):
        table.values()


@pytest.mark.parametrize("table", ["local"], indirect=True)
def test_a_delta_log_may_have_any_value_at_any_place(delta: Table) -> None:
    written = metadata({"x": "long", "p": "long"}, ("p",))
    fields = json.loads(written["metaData"]["schemaString"])
    schemas = [{"metaData": {**written["metaData"], "schemaString": json.dumps(odd)}} for odd in each_odd(fields)]
    removed = remove("2.parquet", VECTOR)
    for action in [*each_odd(add("0.parquet", p="1")), *each_odd(removed), *each_odd(written), *schemas]:
        commit(delta, 2, written, add("0.parquet", p="1"), action)
        check_refused_or_read(delta)


def test_a_lost_file_of_a_delta_table_is_named(delta: Table) -> None:
    commit(delta, 2, add("lost.parquet"))
    with pytest.raises(SampleError, match=r"lake/t/lost\.parquet is a file of the current version .* does not exist"):
        delta.read()


def test_a_table_below_a_folder_is_named(delta: Table) -> None:
    delta.rows("../other/0.parquet", xs(1)) if "://" not in delta.root else None
    with pytest.raises(ArgumentError, match=r"contains .*lake/t, which is a table of Delta.*give the folder of"):
        Parquet(delta.root.removesuffix("/t"))
    assert delta.values() == Table(delta.root + "/", delta.put).values()


# Iceberg


def avro(records: Sequence[Mapping[str, Any]], name: str, **fields: Any) -> bytes:
    schema = {"type": "record", "name": name, "fields": [{"name": n, "type": kind} for n, kind in fields.items()]}
    file = io.BytesIO()
    fastavro.writer(file, schema, records)
    return file.getvalue()


DATE = {"type": "int", "logicalType": "date"}


PARTITION = {
    "type": "record",
    "name": "r102",
    "fields": [{"name": name, "type": ["null", kind]} for name, kind in (("y", "long"), ("day", DATE))],
}


FILE = {
    "type": "record",
    "name": "r2",
    "fields": [
        {"name": name, "type": kind}
        for name, kind in (
            *(("content", "int"), ("file_path", "string"), ("file_format", "string")),
            ("partition", ["null", PARTITION]),
        )
    ],
}


class Iceberg:
    """An Iceberg table that was written at `location`, with the contents of its metadata."""

    def __init__(self, table: Table, location: str = "s3://elsewhere/lake/t") -> None:
        self.table, self.location, self.snapshots = table, location, 0

    def version(
        self,
        number: int,
        files: Mapping[str, int],
        values: Mapping[str, Any] | None = None,
        *,
        content: int = 0,
        form: str = "PARQUET",
        **metadata: Any,
    ) -> None:
        """Write version `number`, whose manifests have these files and states.

        Files with `values` of their partition are in the manifest of another spec.
        """
        self.snapshots += 1
        values, lists = values or {}, []
        for spec in (0, 1):
            manifest = f"metadata/m{spec}-{number}.avro"
            entries = [
                {
                    "status": status,
                    "data_file": {
                        "content": content,
                        "file_format": form,
                        "partition": values.get(name),
                        "file_path": f"{self.location}/data/{name}",
                    },
                }
                for name, status in files.items()
                if (name in values) == spec
            ]
            self.table.put(manifest, avro(entries, "manifest_entry", status="int", data_file=FILE))
            lists += [{"manifest_path": f"{self.location}/{manifest}", "content": content, "partition_spec_id": spec}]
        listing = f"metadata/snap-{number}.avro"
        fields = {"manifest_path": "string", "content": "int", "partition_spec_id": "int"}
        self.table.put(listing, avro(lists, "manifest_file", **fields))
        described = {
            "location": self.location,
            "current-snapshot-id": number,
            "snapshots": [{"snapshot-id": number, "manifest-list": f"{self.location}/{listing}"}],
            "current-schema-id": 0,
            "schemas": [{"schema-id": 0, "fields": [{"id": 1, "name": "x", "type": "long"}]}],
            **metadata,
        }
        self.table.put(f"metadata/{number:05}-aa.metadata.json", json.dumps(described).encode())


@pytest.fixture
def iceberg(table: Table) -> Iceberg:
    """Three files, of which the second was removed."""
    for number in range(3):
        table.rows(f"data/k={number}/0.parquet", xs(10 * number, 10 * number + 1))
    made = Iceberg(table)
    made.version(9, {"k=0/0.parquet": 1, "k=1/0.parquet": 1})
    made.version(10, {"k=0/0.parquet": 0, "k=1/0.parquet": 2, "k=2/0.parquet": 1})
    return made


def test_files_that_an_iceberg_table_removed_are_not_read(iceberg: Iceberg) -> None:
    assert iceberg.table.read() == [{"x": 0}, {"x": 1}, {"x": 20}, {"x": 21}]


def test_a_version_of_an_iceberg_table_is_chosen_by_its_metadata(iceberg: Iceberg) -> None:
    assert [row["x"] for row in iceberg.table.read(name="/metadata/00009-aa.metadata.json")] == [0, 1, 10, 11]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"content": 1}, r"is an Iceberg table with delete files, such as s3://elsewhere/.*k=0/0\.parquet"),
        ({"form": "orc"}, "is an Iceberg table with files of the format orc"),
        (
            {"schemas": [{"schema-id": 0, "fields": [{"id": 1, "name": "x", "type": "int", "initial-default": 3}]}]},
            "is an Iceberg table whose column 'x' has a default for older files",
        ),
        ({"location": "s3://a/b"}, "refers to s3://elsewhere/lake/t/.*, which is not in its folder"),
    ],
)
def test_features_of_iceberg_that_change_rows_are_refused(iceberg: Iceberg, more: Any, message: str) -> None:
    iceberg.version(11, {"k=0/0.parquet": 1}, **more)
    with pytest.raises(ArgumentError, match=message):
        iceberg.table.read()


@pytest.mark.parametrize("table", ["local"], indirect=True)
def test_metadata_of_iceberg_may_have_any_value_at_any_place(iceberg: Iceberg) -> None:
    member = {"type": "struct", "fields": [{"id": 3, "name": "a", "type": "long"}]}
    fields = [{"id": 1, "name": "x", "type": "long"}, {"id": 2, "name": "y", "type": "decimal(4, 2)"}]
    parts = [{"source-id": 2, "transform": "identity", "name": "y"}]
    iceberg.version(
        11,
        {"k=0/0.parquet": 1},
        {"k=0/0.parquet": {"y": 1, "day": None}},
        schemas=[{"schema-id": 0, "fields": [*fields, {"id": 4, "name": "s", "type": member}]}],
        **{"partition-specs": [{"spec-id": 1, "fields": parts}]},
    )
    path = Path(iceberg.table.root, "metadata/00011-aa.metadata.json")
    for odd in each_odd(json.loads(path.read_text())):
        path.write_text(json.dumps(odd))
        check_refused_or_read(iceberg.table)


@pytest.mark.parametrize("table", ["local"], indirect=True)
def test_damaged_manifests_of_iceberg_are_refused_or_read(iceberg: Iceberg) -> None:
    for name in ("m0-10.avro", "snap-10.avro"):
        path = Path(iceberg.table.root, "metadata", name)
        data = path.read_bytes()
        for at in range(0, len(data), 11):
            path.write_bytes(data[:at] + bytes([data[at] ^ 0x41]) + data[at + 1 :])
            check_refused_or_read(iceberg.table)
        path.write_bytes(data)


@pytest.mark.parametrize("hint", [b"9", b"10\n", b"11", b"nonsense"])
def test_the_hint_never_leads_back(iceberg: Iceberg, hint: bytes) -> None:
    iceberg.table.put("metadata/version-hint.text", hint)
    if hint == b"11":
        with pytest.raises(SampleError, match=r"current version .* is unknown: its metadata has 0 files of version 11"):
            iceberg.table.read()
    else:
        assert iceberg.table.values() == [0, 1, 20, 21]


def test_two_metadata_files_of_one_version_are_refused(iceberg: Iceberg) -> None:
    iceberg.table.put("metadata/00010-bb.metadata.json", b"{}")
    with pytest.raises(SampleError, match=r"has 2 files of version 10 \(00010-aa.*; pass the path of that metadata"):
        iceberg.table.read()


def with_ids(ids: Mapping[str, int]) -> Any:
    fields = [pa.field(n, pa.int64(), metadata={"PARQUET:field_id": str(number)}) for n, number in ids.items()]
    return pa.table([[1]] * len(ids), schema=pa.schema(fields))


def test_columns_of_iceberg_are_those_of_their_ids(table: Table) -> None:
    table.rows("data/0.parquet", with_ids({"x": 1, "y": 2}))
    table.rows("data/1.parquet", with_ids({"x": 1, "renamed": 2}))
    fields = [{"id": number, "name": name, "type": "long"} for name, number in {"x": 1, "renamed": 2}.items()]
    Iceberg(table).version(0, {"0.parquet": 1, "1.parquet": 1}, schemas=[{"schema-id": 0, "fields": fields}])
    assert table.values() == [1, 1]
    with pytest.raises(SampleError, match=r"column 'renamed' of the table was renamed or replaced since .*0\.parquet"):
        table.read()


@pytest.mark.parametrize("stored", [(), (1,), (0, 1, 2)])
@pytest.mark.parametrize("younger", [False, True])
def test_partitions_by_the_value_of_a_column_are_its_values(table: Table, stored: Sequence[int], younger: bool) -> None:
    """Files that were added to the table may lack the column; a spec may be younger than some files."""
    for number in range(3):
        more = {"y": pa.array([number]), "day": pa.array([number + 1], pa.date32())} if number in stored else {}
        table.rows(f"data/{number}.parquet", xs(number, **more))
    types = {"x": "long", "y": "long", "day": "date"}
    fields = [{"id": number, "name": name, "type": kind} for number, (name, kind) in enumerate(types.items())]
    parts = [{"source-id": number, "transform": "identity", "name": name} for number, name in ((1, "y"), (2, "day"))]
    values = {f"{number}.parquet": {"y": number, "day": date(1970, 1, number + 2)} for number in range(3)}
    if younger:
        del values["1.parquet"]
    Iceberg(table).version(
        0,
        dict.fromkeys([f"{number}.parquet" for number in range(3)], 1),
        values,
        schemas=[{"schema-id": 0, "fields": fields}],
        **{"partition-specs": [{"spec-id": 0, "fields": []}, {"spec-id": 1, "fields": parts}]},
    )
    if younger and not stored:
        with pytest.raises(SampleError, match=r"0\.parquet is in a folder y=\.\.\., but .*1\.parquet is not"):
            table.read()
    else:
        assert table.read() == [{"x": number, "y": number, "day": number + 1} for number in range(3)]
        assert table.values(filters=[("y", ">", 0)] if len(stored) == 3 or not younger else None)[-2:] == [1, 2]


def test_members_of_iceberg_are_those_of_their_ids(table: Table) -> None:
    def member(number: int, name: str = "a") -> Any:
        return pa.field(name, pa.int64(), metadata={"PARQUET:field_id": str(number)})

    kinds = {"s": pa.struct([member(3), member(9, "b")]), "t": pa.list_(pa.field("element", pa.struct([member(5)])))}
    rows = {"s": [{"a": 1, "b": 2}], "t": [[{"a": 1}]]}
    table.rows("data/0.parquet", pa.table(rows, schema=pa.schema(kinds.items())))

    def described(number: int) -> Any:
        return {"type": "struct", "fields": [{"id": number, "name": "a", "type": "long"}]}

    whole = {"type": "struct", "fields": [*described(3)["fields"], {"id": 9, "name": "b", "type": "long"}]}
    replaced = {"type": "struct", "fields": [*described(4)["fields"], {"id": 9, "name": "b", "type": "long"}]}
    iceberg = Iceberg(table)
    for version, s, t in ((0, whole, 5), (1, replaced, 5), (2, whole, 6)):
        of_list = {"type": "list", "element-id": 7, "element": described(t)}
        fields = [{"id": 1, "name": "s", "type": s}, {"id": 2, "name": "t", "type": of_list}]
        iceberg.version(version, {"0.parquet": 1}, schemas=[{"schema-id": 0, "fields": fields}])
        for column, wrong in (("s", version == 1), ("s.b", False), ("t", version == 2)):
            if wrong:
                with pytest.raises(SampleError, match=rf"column '{column}.*a' of the table was renamed or replaced"):
                    Parquet(table.root, [column])
            else:
                assert len(Parquet(table.root, [column])) == 1


def test_damage_of_iceberg_metadata_is_named(iceberg: Iceberg) -> None:
    iceberg.table.put("metadata/m0-10.avro", b"Obj")
    with pytest.raises(SampleError, match=r"metadata/m0-10\.avro cannot be read: it is damaged"):
        iceberg.table.read()
    iceberg.table.put("metadata/00010-aa.metadata.json", b"{")
    with pytest.raises(SampleError, match=r"metadata/00010-aa\.metadata\.json cannot be read: it is damaged"):
        iceberg.table.read()


def test_an_empty_version_is_named(iceberg: Iceberg) -> None:
    iceberg.version(11, {})
    with pytest.raises(FileNotFoundError, match=r"the current version of the table .*lake/t is empty"):
        iceberg.table.read()


# Hudi


def test_a_hudi_table_is_refused(table: Table) -> None:
    table.rows("0.parquet", xs(1))
    table.put(".hoodie/hoodie.properties", b"")
    with pytest.raises(ArgumentError, match="lake/t is a Hudi table, whose folder also holds files that are no longer"):
        table.read()
