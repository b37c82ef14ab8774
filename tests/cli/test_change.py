"""delete and update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import lancewal
from lancewal.cli import exits
from tests.cli.support import new_table, ok, run
from tests.tables import APPEND_ONLY, KEY, rows

TEXT_KEY = pa.schema([pa.field("name", pa.string(), False, KEY)])
MANY_TYPES = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("number", pa.float64()),
        pa.field("flag", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)


@pytest.fixture
def table(table: lancewal.Table) -> lancewal.Table:
    """Ids 0 to 9 in the base, 10 to 29 above it."""
    with table.writer() as writer:
        writer.put(rows(10, 20))
    return table


def test_delete_by_key_and_by_filter(table: lancewal.Table) -> None:
    assert "2 keys deleted" in ok("delete", table.uri, "3", "12").out
    assert ok("delete", table.uri, "--filter", "id < 5", "--yes", "--json").document == {"deleted": 4}
    assert table.count_rows() == 24
    assert run("get", table.uri, "4").code == exits.NOT_FOUND


def test_delete_of_a_condition_reported_a_row_and_deleted_nothing(tmp_path: Path) -> None:
    table = new_table(tmp_path / "t", schema=TEXT_KEY, bucket=("name", 2))
    with table.writer() as writer:
        writer.put(pa.table({"name": ["x", "name = 'x'"]}))
    refused = run("delete", table.uri, "name = 'x'")
    assert refused.code == exits.REFUSED
    assert "--filter" in refused.err
    ok("delete", table.uri, "--filter", "name = 'name = ''x'''", "--yes")
    assert table.scan().to_table()["name"].to_pylist() == ["x"]


def test_delete_by_filter_asks(table: lancewal.Table) -> None:
    outcome = run("delete", table.uri, "--filter", "id < 5", input="n\n")
    assert outcome.code == 1
    assert "Delete 5 rows" in outcome.err
    assert table.count_rows() == 30
    assert "5 keys deleted" in ok("delete", table.uri, "--filter", "id < 5", input="y\n").out


def test_a_script_that_nobody_answers_is_told_of_the_option(table: lancewal.Table) -> None:
    """It was "Aborted.", and the code of a failure."""
    outcome = run("delete", table.uri, "--filter", "id < 5", input="")
    assert outcome.code == exits.REFUSED
    assert "pass --yes" in outcome.err
    assert outcome.out == ""
    assert table.count_rows() == 30


def test_delete_needs_keys_or_a_filter(table: lancewal.Table) -> None:
    assert run("delete", table.uri).code == exits.REFUSED
    assert run("delete", table.uri, "1", "--filter", "id = 1").code == exits.REFUSED


def test_where_and_filter_are_one_option(table: lancewal.Table) -> None:
    assert ok("delete", table.uri, "--where", "id >= 20", "-y", "--json").document == {"deleted": 10}
    assert ok("delete", table.uri, "-f", "id >= 10", "-y", "--json").document == {"deleted": 10}
    assert table.count_rows() == 10


def test_update_changes_what_matches_and_nothing_else(table: lancewal.Table) -> None:
    before = {row["id"]: row for row in table.scan().to_table().to_pylist()}
    done = ok("update", table.uri, "--where", "id BETWEEN 8 AND 12", "--set", "name=new", "-y", "--json")
    assert done.document == {"updated": 5}
    after = {row["id"]: row for row in table.scan().to_table().to_pylist()}
    assert after == {id_: {**row, "name": "new"} if 8 <= id_ <= 12 else row for id_, row in before.items()}
    assert "0 rows updated" in ok("update", table.uri, "-f", "id > 99", "--set", "name=x", "-y").out


def test_update_asks(table: lancewal.Table) -> None:
    arguments = ["update", table.uri, "--where", "id < 5", "--set", "name=new"]
    asked = run(*arguments, input="n\n")
    assert asked.code == 1
    assert "Update 5 rows" in asked.err
    assert table.count_rows("name = 'new'") == 0
    assert "5 rows updated" in ok(*arguments, input="y\n").out


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ("text=two words", "two words"),
        ("text=17", "17"),
        ("text=a=b", "a=b"),
        ("text=", ""),
        ("text=null", None),
        ('text="null"', "null"),
        ("number=-2.5", -2.5),
        ("number=null", None),
        ("flag=true", True),
        ("day=2024-02-29", "2024-02-29"),
        ("vector=[0.5, 2]", [0.5, 2.0]),
    ],
)
def test_values_are_read_as_the_columns_type(tmp_path: Path, given: str, value: Any) -> None:
    table = new_table(tmp_path / "v", schema=MANY_TYPES)
    with table.writer() as writer:
        writer.put({"id": 1, "text": "old", "number": 1.0, "vector": [1.0, 1.0]})
    ok("update", table.uri, "--where", "id = 1", "--set", given, "--yes")
    row = table.lookup(1)
    assert row is not None
    found = row[given.partition("=")[0]]
    assert (str(found) if given.startswith("day") else found) == value


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--set", "nope=1"], "no column nope"),
        (["--set", "name"], "is not KEY=VALUE"),
        (["--set", "id=7"], "part of the key"),
        (["--set", "number=many"], "no value of the column number"),
        (["--set", "vector=[1, 2, 3]"], "vector"),
        ([], "--set"),
    ],
)
def test_updates_that_cannot_be_are_refused(tmp_path: Path, given: list[str], why: str) -> None:
    table = new_table(tmp_path / "v", schema=MANY_TYPES)
    with table.writer() as writer:
        writer.put({"id": 1, "text": "old"})
    before = table.scan().to_table()
    refused = run("update", table.uri, "--where", "id = 1", *given, "--yes")
    assert refused.code == exits.REFUSED
    assert why in " ".join(refused.err.split())
    assert table.scan().to_table().equals(before)


def test_update_leaves_the_shards_of_a_live_writer_to_it(table: lancewal.Table) -> None:
    arguments = ["update", table.uri, "--where", "id < 30", "--set", "name=new", "--yes"]
    with table.writer() as writer:
        writer.put(rows(0, 30))
        refused = run(*arguments)
        assert refused.code == exits.TAKEN_OVER
        assert table.count_rows("name = 'new'") == 0
        writer.put(rows(30, 1))  # it was not fenced
    assert "30 rows updated" in ok(*arguments).out


def test_a_table_without_a_key_is_not_updated(tmp_path: Path) -> None:
    table = new_table(tmp_path / "a", 3, APPEND_ONLY)
    refused = run("update", table.uri, "--where", "id = 1", "--set", "name=x", "--yes")
    assert refused.code == exits.REFUSED
    assert "no primary key" in refused.error


def test_update_computes_values_from_the_row_as_it_was(table: lancewal.Table) -> None:
    done = ok("update", table.uri, "-f", "id < 2", "--set-sql", "name=name || '-' || id", "--yes", "--json")
    assert done.document == {"updated": 2}
    assert [row["name"] for row in table.lookup([0, 1, 2]).table.to_pylist()] == [
        "name_0-0",
        "name_1-1",
        "name_2",
    ]


def test_update_without_a_value_or_with_two_for_a_column_is_refused(table: lancewal.Table) -> None:
    before = table.scan().to_table()
    for given in (
        (),
        ("--set", "name=a", "--set-sql", "name=name"),
        ("--set-sql", "name=no_column + 1"),
        ("--set-sql", "nothing=1"),
    ):
        assert run("update", table.uri, "-f", "id < 2", "--yes", *given).code == exits.REFUSED
    assert table.scan().to_table() == before
