"""Column names and kinds: a table works through its whole life, or is refused before its first row."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lancewal
from lancewal.errors import InvalidInputError, PartialWriteError
from lancewal.publish.feed import ChangeFeed
from lancewal.table import Table
from tests.tables import KEY

FAST = {"fsync": "false", "stats_log_interval_ms": "0"}
POSITION = "lance-schema:unenforced-primary-key:position"

#: All of them in one table, as values and as fields of a struct; as keys those without a double quote.
USABLE = [
    *(
        "a b",
        " a",
        "a'b",
        'a"b',
        '"a"',
        "a\nb",
        "é",
        "日本",
        "1",
        "-",
        "a,b",
        "(a)",
        "a=b",
        "a\\b",
        "%",
        "a[0]",
    ),
    *("select", "FROM", "null", "true", "and", "ID", "Id", "matches", "row", "key", "item", "\x1b[31m"),
    *("_row_offset", "_", "__lance_mem_wal", "_rank", "position", "x" * 300),
]


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def table_schema(keys: Sequence[str], values: Sequence[str], fields: Sequence[str]) -> pa.Schema:
    marks = [{**KEY, POSITION: str(place)} for place in range(1, len(keys) + 1)]
    return pa.schema(
        [
            *(pa.field(name, pa.string(), False, mark) for name, mark in zip(keys, marks, strict=True)),
            *(pa.field(name, pa.int64()) for name in values),
            *([pa.field("nested", pa.struct([(name, pa.int64()) for name in fields]))] if fields else []),
        ]
    )


def rows_of(schema: pa.Schema, values: dict[str, int]) -> pa.Table:
    """A row for each key, with its value in every column and field."""

    def cell(field: pa.Field, key: str, value: int) -> Any:
        if pa.types.is_struct(field.type):
            return {child.name: value for child in field.type}
        return key if field.type == pa.string() else value

    columns = [[cell(field, key, value) for key, value in values.items()] for field in schema]
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema=schema)


def live_through_everything(where: Path, schema: pa.Schema) -> None:
    """Put, read in every way, delete, flush and compact; raises where initialisation refuses."""
    uri = str(where / "t")
    lance.write_dataset(rows_of(schema, {"a": 1, "b": 2}), uri)
    table = lancewal.initialize(uri, bucket=(schema.names[0], 2), writer_defaults=FAST)
    # Two fragments, as appends make them: Lance must be able to append to this table.
    lance.write_dataset(rows_of(schema, {"c": 3, "d": 4}), uri, mode="append")
    keys = pa.schema([field for field in schema if field.type == pa.string()])
    model = {"a": 1, "b": 2, "c": 3, "d": 4}

    def check(table: Table) -> None:
        expected = rows_of(schema, dict(sorted(model.items())))
        found = table.scan().to_table()
        assert found.sort_by([(schema.names[0], "ascending")]).equals(expected.cast(found.schema))
        assert table.scan(with_row_source=True).to_table().num_rows == table.count_rows() == len(model)
        for field in schema:
            assert table.scan(columns=[field.name]).to_table().num_rows == len(model)
        numbers = [quoted(field.name) for field in schema if field.type == pa.int64()]
        numbers += [f"nested.{quoted(child.name)}" for child in struct_fields(schema)]
        sevens = sum(value == 7 for value in model.values())
        assert table.count_rows(" AND ".join(f"{name} = 7" for name in numbers)) == sevens
        assert table.count_rows(" AND ".join(f"abs({name}) = 7" for name in numbers)) == sevens
        assert table.count_rows(" AND ".join(f"{quoted(name)} = 'b'" for name in keys.names)) == (
            "b" in model
        )
        wanted = rows_of(keys, dict.fromkeys("abcxyz", 0))
        assert table.lookup(wanted).found.tolist() == [key in model for key in "abcxyz"]

    with table.writer() as writer:
        for changed, deleted in ({"b": 7, "x": 7}, "a"), ({"c": 8, "y": 7}, "b"):
            writer.put(rows_of(schema, changed))
            writer.delete(rows_of(keys, {deleted: 0}))
            model.update(changed)
            del model[deleted]
            check(table)
            writer.flush()
            check(table)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows_of(schema, {"z": 7}))
        model["z"] = 7
    table = lancewal.open(uri)
    check(table)
    feed = ChangeFeed.open(uri)
    assert sum(batch.num_rows for batch in feed.changes(feed.earliest(), feed.latest())) == 7
    table.flush()
    table.compact()
    check(table)
    plain = lance.dataset(uri).to_table()
    assert (
        dict(zip(plain[0].to_pylist(), plain[schema.names[-1]].to_pylist(), strict=True)).keys()
        == model.keys()
    )
    assert table.verify().ok


def struct_fields(schema: pa.Schema) -> list[pa.Field]:
    return list(schema.field("nested").type) if "nested" in schema.names else []


def test_unusual_names_of_values_and_fields_work_from_put_to_compaction(tmp_path: Path) -> None:
    live_through_everything(tmp_path, table_schema(["id"], USABLE, USABLE))


@pytest.mark.parametrize("keys", [["_row_offset"], ["a'b", "select"], ["日本 %", "ID", "id"]])
def test_unusual_names_of_keys_work_from_put_to_compaction(tmp_path: Path, keys: list[str]) -> None:
    live_through_everything(tmp_path, table_schema(keys, ["value"], []))


@pytest.mark.parametrize("name", ["", "_tombstone", "a`b", "`a`", "*"])
@pytest.mark.parametrize("role", ["key", "value"])
def test_name_that_puts_took_and_scans_or_compaction_did_not_is_refused(
    tmp_path: Path, name: str, role: str
) -> None:
    keys, values = ([name], ["v"]) if role == "key" else (["id"], [name])
    uri = str(tmp_path / "t")
    lance.write_dataset(table_schema(keys, values, []).empty_table(), uri)
    with pytest.raises(InvalidInputError, match="column"):
        lancewal.initialize(uri, unsharded=True)
    lance.dataset(uri).initialize_mem_wal(unsharded=True)
    table = lancewal.open(uri)
    with pytest.raises(InvalidInputError, match="column"):
        table.writer()
    with pytest.raises(InvalidInputError, match="column"):
        table.shard_writer(table.shard_for())


def test_key_with_a_double_quote_that_compaction_could_not_merge_by_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    lance.write_dataset(table_schema(['a"b'], ["v"], []).empty_table(), uri)
    with pytest.raises(InvalidInputError, match="double quote"):
        lancewal.initialize(uri, unsharded=True)


def test_field_without_a_name_is_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    lance.write_dataset(table_schema(["id"], ["v"], [""]).empty_table(), uri)
    with pytest.raises(InvalidInputError, match="without a name"):
        lancewal.initialize(uri, unsharded=True)


@pytest.mark.parametrize("name", ["_source", "_shard_id", "_change_type", "_wal_position", "_writer_epoch"])
def test_name_that_reads_add_gave_two_columns_of_that_name(tmp_path: Path, name: str) -> None:
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(table_schema(["id"], [name], []).empty_table(), uri)
    if name == "_source":
        with pytest.raises(InvalidInputError, match=name):
            lancewal.initialize(uri, unsharded=True)
        dataset.initialize_mem_wal(unsharded=True)
    else:
        # A table that keeps what a change feed gave has the feed's columns.
        lancewal.initialize(uri, unsharded=True)
    # What does not add such columns works.
    table = lancewal.open(uri)
    with table.writer(fsync=False) as writer:
        writer.put(pa.table({"id": ["a"], name: [1]}))
    assert table.lookup("a") == {"id": "a", name: 1}
    with pytest.raises(InvalidInputError, match=name):
        table.scan(with_row_source=True) if name == "_source" else ChangeFeed.open(uri)


@pytest.mark.parametrize("name", ["_distance", "_score"])
def test_name_that_searches_add_failed_inside_lance(tmp_path: Path, name: str) -> None:
    uri = str(tmp_path / "t")
    schema = pa.schema(
        [
            pa.field("id", pa.int64(), False, KEY),
            pa.field("v", pa.list_(pa.float32(), 2)),
            pa.field("text", pa.string()),
            pa.field(name, pa.float32()),
        ]
    )
    dataset = lance.write_dataset(schema.empty_table(), uri)
    with pytest.raises(InvalidInputError, match=name):
        lancewal.initialize(uri, unsharded=True)
    dataset.initialize_mem_wal(unsharded=True)
    table = lancewal.open(uri)
    with pytest.raises(InvalidInputError, match=name):
        table.vector_search("v", [1, 0]) if name == "_distance" else table.full_text_search("text", "word")


_NAMES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00"), max_size=6),
    st.sampled_from(
        ["_rowid", "_rowaddr", "_tombstone", "*", "`", '"', "a.b", "_row_offset", "_score", "NULL"]
    ),
)


@settings(max_examples=10)
@given(st.lists(_NAMES, min_size=3, max_size=3, unique=True))
def test_any_name_is_refused_at_the_door_or_works_to_the_end(names: list[str]) -> None:
    key, value, field = names
    with tempfile.TemporaryDirectory() as directory:
        where = Path(directory)
        try:
            live_through_everything(where, table_schema([key], [value], [field]))
        except InvalidInputError:
            # By initialisation, which has written nothing.
            assert not (where / "t" / "_mem_wal").exists()
        except OSError:
            # By Lance, which makes no such table.
            assert not (where / "t" / "_versions").exists()


# --- blobs ------------------------------------------------------------------------------

ROWS = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("text", pa.string())])
MARKED = pa.field("blob", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
BLOBS = {
    "marked, 2.0": ("2.0", MARKED),
    "marked, 2.1": ("2.1", MARKED),
    "marked, 2.2": ("2.2", MARKED),
    "typed, 2.2": ("2.2", lance.blob_field("blob")),
}


def text_rows(*ids: int) -> pa.Table:
    return pa.table({"id": ids, "text": [f"row {number}" for number in ids]}, ROWS)


def blob_rows(field: pa.Field, number: int) -> pa.Table:
    value = b"x" * 10
    blobs = pa.array([value], pa.large_binary()) if field is MARKED else lance.blob_array([value])
    return pa.table([*text_rows(number).columns, blobs], pa.schema([*ROWS, field]))


@pytest.mark.parametrize("kind", BLOBS)
def test_table_with_a_blob_column_wedged_its_shard_and_is_refused(tmp_path: Path, kind: str) -> None:
    version, field = BLOBS[kind]
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(blob_rows(field, 1), uri, data_storage_version=version)
    with pytest.raises(InvalidInputError, match="column blob is a blob column"):
        lancewal.initialize(uri, unsharded=True)
    dataset.initialize_mem_wal(unsharded=True)
    table = lancewal.open(uri)
    with pytest.raises(InvalidInputError, match="column blob is a blob column"):
        table.writer()
    with pytest.raises(InvalidInputError, match="column blob is a blob column"):
        table.shard_writer(table.shard_for())
    for read in (
        lambda: table.scan().to_table(),
        lambda: table.scan(columns=["blob"]).to_table(),
        lambda: table.scan().to_batches(),
        lambda: table.lookup(1),
    ):
        with pytest.raises(InvalidInputError, match="take_blobs"):
            read()
    assert table.scan(columns=["id", "text"]).to_table().to_pylist() == [{"id": 1, "text": "row 1"}]
    assert table.lookup(1, columns=["text"]) == {"text": "row 1"}
    assert [table.count_rows(), table.count_rows("id = 1"), table.count_rows("length(text) > 0")] == [1, 1, 1]


@pytest.mark.parametrize("kind", BLOBS)
def test_blob_column_that_comes_while_writers_are_open_keeps_nothing_from_the_base(
    tmp_path: Path, kind: str
) -> None:
    version, field = BLOBS[kind]
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(text_rows(1, 2), uri, data_storage_version=version)
    table = lancewal.initialize(uri, unsharded=True, writer_defaults=FAST)
    log_only = table.writer(enable_memtable=False)
    writer = table.writer()
    writer.put(text_rows(2, 3))
    dataset.checkout_version(dataset.latest_version).add_columns(pa.schema([field]))
    lance.write_dataset(blob_rows(field, 9), uri, mode="append")
    writer.put(text_rows(4))
    writer.close()
    log_only.put(text_rows(5))
    log_only.close()
    assert table.count_rows("text LIKE 'row%'") == 6
    with pytest.raises(InvalidInputError, match="blob column"):
        table.writer()
    table.flush()
    table.compact()
    plain = lance.dataset(uri)
    assert sorted(plain.to_table(columns=["id"])["id"].to_pylist()) == [1, 2, 3, 4, 5, 9]
    kept = plain.take_blobs("blob", indices=list(range(6)))
    assert [blob.readall() for blob in kept if blob is not None] == [b"x" * 10]
    assert table.verify().ok


def test_blobs_that_lances_own_writer_logged_or_flushed_are_never_replaced_by_nulls(tmp_path: Path) -> None:
    field = lance.blob_field("blob")
    uri = str(tmp_path / "t")
    dataset = lance.write_dataset(blob_rows(field, 1), uri, data_storage_version="2.2")
    dataset.initialize_mem_wal(unsharded=True)
    table = lancewal.open(uri)
    lances = lance.dataset(uri).mem_wal_writer(str(table.shard_for()), durable_write=True)
    lances.put(blob_rows(field, 1))
    del lances
    with pytest.raises(PartialWriteError, match="the log holds values of a blob column"):
        table.flush()
    with pytest.raises(InvalidInputError, match="the log holds values of a blob column"):
        table.count_rows()
    with lance.dataset(uri).mem_wal_writer(str(table.shard_for()), durable_write=True) as lances:
        lances.put(blob_rows(field, 2))
    assert table.status().uncompacted.count == 1
    with pytest.raises(PartialWriteError, match="holds values of the blob column blob"):
        table.compact()
    assert table.count_rows() == 2
    assert [blob.readall() for blob in lance.dataset(uri).take_blobs("blob", indices=[0])] == [b"x" * 10]
