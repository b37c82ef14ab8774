"""Deletes and updates by a condition, against a dict."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lancewal
from lancewal.errors import InvalidInputError
from tests.tables import KEYED, fast, wal_table

Row = dict[str, Any]
CONDITIONS: dict[str, Callable[[Row], bool]] = {
    "n > 2": lambda row: row["n"] is not None and row["n"] > 2,
    "n IS NULL": lambda row: row["n"] is None,
    "text = 'b' OR id = 3": lambda row: row["text"] == "b" or row["id"] == 3,
    "id >= 0": lambda row: True,
    "id < 0": lambda row: False,
}
_rows = st.fixed_dictionaries(
    {"id": st.integers(0, 6), "n": st.none() | st.integers(0, 5), "text": st.sampled_from("abc")}
)
_steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), _rows),
        st.tuples(st.just("delete"), st.sampled_from(sorted(CONDITIONS))),
        st.tuples(
            st.just("update"), st.tuples(st.sampled_from(sorted(CONDITIONS)), st.none() | st.integers(0, 5))
        ),
        st.tuples(st.sampled_from(["flush", "compact"]), st.none()),
    ),
    max_size=7,
)


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], lancewal.Table]:
    folder, made = tmp_path_factory.mktemp("tables"), []

    def new() -> lancewal.Table:
        made.append(None)
        rows = [{"id": 1, "n": 1, "text": "a"}, {"id": 2, "n": 4, "text": "b"}]
        return lancewal.create(
            folder / str(len(made)), rows, key="id", unsharded=True, writer_defaults=fast()
        )

    return new


@given(_steps)
def test_what_matches_changes_and_nothing_else(
    tables: Callable[[], lancewal.Table], steps: list[tuple[str, Any]]
) -> None:
    table = tables()
    model: dict[int, Row] = {row["id"]: row for row in table.scan().to_table().to_pylist()}
    with table.writer() as writer:
        for step, what in steps:
            if step == "put":
                writer.put(what)
                model[what["id"]] = dict(what)
            elif step == "delete":
                gone = [key for key, row in model.items() if CONDITIONS[what](row)]
                assert writer.delete(where=what).num_rows == len(gone)
                for key in gone:
                    del model[key]
            elif step == "update":
                condition, value = what
                changed = [row for row in model.values() if CONDITIONS[condition](row)]
                assert writer.update(where=condition, set={"n": value}).num_rows == len(changed)
                for row in changed:
                    row["n"] = value
            elif step == "flush":
                writer.flush()
            else:
                table.compact()
            assert {row["id"]: row for row in table.scan().to_table().to_pylist()} == model


def test_vectors_and_several_shards(tmp_path: Path) -> None:
    rows = [{"id": n, "vector": [n / 8, 1.0]} for n in range(100)]
    table = lancewal.create(tmp_path / "t", rows, key="id", writer_defaults=fast())
    with table.writer() as writer:
        assert writer.update("id >= 40", {"vector": [0.1, 0.2]}).num_rows == 60
        assert writer.delete(where="id % 2 = 0").num_rows == 50
    assert table.count_rows() == 50
    assert table.lookup(41)["vector"] == pytest.approx([0.1, 0.2])  # type: ignore[index]
    assert table.lookup(39)["vector"] == [39 / 8, 1.0]  # type: ignore[index]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda w: w.delete(), "keys, or where"),
        (lambda w: w.delete(1, where="id = 1"), "keys, or where"),
        (lambda w: w.delete(where="nope = 1"), "nope"),
        (lambda w: w.update("id = 1", {"id": 2}), "part of the key"),
        (lambda w: w.update("id = 1", {"nope": 2}), "no column nope"),
        (lambda w: w.update("id = 1", {}), "set is empty"),
        (lambda w: w.update("id = 1", set_sql={"n": "nope + 1"}), "nope"),
        (lambda w: w.update("id = 1", set_sql={"n": "n / 0"}), "n / 0"),
        (lambda w: w.update("id = 1", set_sql={"n": "'x'"}), "column n"),
        (lambda w: w.update("id = 1", {"n": 1}, set_sql={"n": "n"}), "set and set_sql"),
        (lambda w: w.update("id = 1", {"n": "x"}), "column n, row 0: 'x'"),
        (lambda w: w.update("id = 1", "n"), "set is 'n'; pass a dict"),
        (lambda w: w.update("id = 1", set_sql=["n"]), "set_sql is .*; pass a dict"),
        # Each of them would be computed for a batch of rows, and so depend on where rows lie.
        (lambda w: w.update("true", set_sql={"n": "sum(n) over ()"}), "over single rows"),
        (lambda w: w.update("true", set_sql={"n": "row_number() over () + 1"}), "over single rows"),
        (lambda w: w.update("true", set_sql={"n": "max(n)"}), "over single rows"),
        (lambda w: w.update("true", set_sql={"n": "(select 1)"}), "over single rows"),
    ],
)
def test_what_is_refused_changes_nothing(
    tables: Callable[[], lancewal.Table], change: Callable[[Any], Any], text: str
) -> None:
    table = tables()
    with table.writer() as writer, pytest.raises(InvalidInputError, match=text):
        change(writer)
    assert table.lookup(1) == {"id": 1, "n": 1, "text": "a"}


def test_expressions_see_the_row_as_it_was(tables: Callable[[], lancewal.Table]) -> None:
    table = tables()
    with table.writer() as writer:
        writer.put({"id": 3, "n": None, "text": "c"})
        result = writer.update(
            "id < 9", {"text": "new"}, set_sql={"n": "n * 10 + CASE WHEN text = 'b' THEN 1 ELSE 0 END"}
        )
    assert result.num_rows == 3
    assert {row["id"]: (row["n"], row["text"]) for row in table.scan().to_table().to_pylist()} == {
        1: (10, "new"),
        2: (41, "new"),
        3: (None, "new"),
    }


def test_a_table_without_a_key_is_refused(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", [{"x": 1}], writer_defaults=fast())
    with table.writer() as writer:
        for change in (lambda: writer.delete(where="x = 1"), lambda: writer.update("x = 1", {"x": 2})):
            with pytest.raises(InvalidInputError, match="no primary key"):
                change()


@pytest.mark.parametrize("condition", [None, 5, b"true"])
def test_a_condition_that_is_none_changes_nothing(
    tables: Callable[[], lancewal.Table], condition: Any
) -> None:
    table = tables()
    before = table.scan().to_table()
    with table.writer() as writer:
        with pytest.raises(InvalidInputError):
            writer.update(condition, {"n": 9})
        with pytest.raises(InvalidInputError):
            writer.delete(where=condition)
        with pytest.raises(InvalidInputError):
            writer.update("true", set_sql={"n": 9})  # type: ignore[dict-item]
    assert table.scan().to_table() == before


def test_an_update_does_not_empty_columns_that_came_after_its_writer(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", [{"id": 1, "n": 1}], key="id", writer_defaults=fast())
    with table.writer() as older:
        lance.dataset(table.uri).add_columns(pa.field("note", pa.string()))
        with table.writer() as newer:
            newer.put({"id": 1, "n": 1, "note": "keep this"})
        with pytest.raises(InvalidInputError, match="columns have changed"):
            older.update("id = 1", {"n": 2})
    assert table.lookup(1) == {"id": 1, "n": 1, "note": "keep this"}


def test_an_update_through_a_table_that_may_be_stale_took_back_what_others_wrote(tmp_path: Path) -> None:
    """It read rows as they had been an hour before, and wrote them again as a whole."""
    schema = pa.schema([KEYED.field("id"), ("a", pa.string()), ("b", pa.string())])
    fresh = wal_table(tmp_path / "table", schema)
    table = lancewal.open(fresh.uri, max_staleness=3600)
    with fresh.writer() as other:
        other.put({"id": 1, "a": "old", "b": "old"})
    assert table.count_rows() == 1
    with fresh.writer() as other:
        other.put([{"id": number, "a": "new", "b": "old"} for number in (1, 2, 3)])
    with table.writer() as writer:
        assert writer.update("id < 3", {"b": "new"}).num_rows == 2
        assert writer.delete(where="id = 3").num_rows == 1
    assert fresh.scan().to_table().to_pylist() == [{"id": i, "a": "new", "b": "new"} for i in (1, 2)]


def test_an_update_that_is_refused_on_its_way_says_what_it_has_written(tmp_path: Path) -> None:
    table = lancewal.create(
        tmp_path / "t", [{"id": 1, "n": 1}], key="id", unsharded=True, writer_defaults=fast()
    )
    with table.writer() as writer:
        writer.put({"id": 2, "n": 2})
        told = []
        for bad in (1, 2):  # one of them is read first, in a batch of its own
            with pytest.raises(InvalidInputError) as error:
                writer.update("true", set_sql={"n": f"CASE WHEN id = {bad} THEN 0.5 ELSE 9 END"})
            told.append("of the update, 1 rows before it are written" in str(error.value))
    assert sorted(told) == [False, True]
    assert table.count_rows("n = 9") == 1
