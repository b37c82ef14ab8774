"""Rows of an older or newer schema read as the table's own."""

from __future__ import annotations

import pyarrow as pa
import pytest

from lancewal.errors import ColumnMismatchError
from lancewal.format.align import align, shown
from lancewal.format.schema import TOMBSTONE, TOMBSTONE_FIELD, TableSchema


def field(name: str, type_: pa.DataType, number: int | None, nullable: bool = True) -> pa.Field:
    metadata = None if number is None else {"lance:field_id": str(number)}
    return pa.field(name, type_, nullable, metadata)


def table(*fields: pa.Field) -> TableSchema:
    return TableSchema(pa.schema(fields), ("id",) if ID in fields else ())


def batch(columns: list[pa.Array], *fields: pa.Field) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


ID = field("id", pa.int64(), 0, nullable=False)


def test_rows_of_the_same_schema_are_passed_on_uncopied() -> None:
    rows = batch([pa.array([1]), pa.array([False])], ID, TOMBSTONE_FIELD)
    assert align(rows, table(ID)) is rows


def test_a_renamed_column_is_found_by_its_id() -> None:
    rows = batch([pa.array([1]), pa.array(["a"])], ID, field("old", pa.string(), 1))
    assert align(rows, table(ID, field("new", pa.string(), 1))).to_pydict() == {
        "id": [1],
        "new": ["a"],
        TOMBSTONE: [False],
    }


def test_a_column_that_was_added_later_reads_as_null_and_a_dropped_one_not_at_all() -> None:
    rows = batch([pa.array([1]), pa.array(["gone"])], ID, field("dropped", pa.string(), 1))
    aligned = align(rows, table(ID, field("added", pa.list_(pa.int8()), 2)))
    assert aligned.to_pydict() == {"id": [1], "added": [None], TOMBSTONE: [False]}


def test_a_name_that_was_dropped_and_used_again_is_another_column() -> None:
    rows = batch([pa.array([1]), pa.array(["old"])], ID, field("note", pa.string(), 1))
    assert align(rows, table(ID, field("note", pa.string(), 5))).column("note").to_pylist() == [None]


def test_a_reused_field_id_of_another_type_does_not_pair_the_wrong_columns() -> None:
    rows = batch([pa.array([1]), pa.array(["old"])], ID, field("note", pa.string(), 1))
    wanted = TableSchema(pa.schema([ID, field("price", pa.float64(), 1)]), ("id",), Replaced(1))
    for written_for in (5, None):
        assert align(rows, wanted, written_for).column("price").to_pylist() == [None]


def test_a_column_of_another_type_under_its_own_id_is_no_column_of_nulls() -> None:
    rows = batch([pa.array([1]), pa.array(["old"])], ID, field("note", pa.string(), 1))
    always_there = TableSchema(pa.schema([ID, field("note", pa.int64(), 1)]), ("id",), Replaced())
    for schema in (always_there, table(ID, field("note", pa.int64(), 1))):
        for written_for in (5, 9, None):
            with pytest.raises(ColumnMismatchError, match=r"'note'.*field id 1.*string.*int64"):
                align(rows, schema, written_for)
    added_since = TableSchema(always_there.columns, ("id",), Replaced(1))
    with pytest.raises(ColumnMismatchError, match="int64"):
        align(rows, added_since, 6)


def test_a_child_of_another_type_under_its_own_id_is_no_child_of_nulls() -> None:
    old, new = (pa.struct([field("a", kind, 2)]) for kind in (pa.string(), pa.int32()))
    rows = batch([pa.array([1]), pa.array([{"a": "x"}], old)], ID, field("s", old, 1))
    with pytest.raises(ColumnMismatchError, match=r"'a'.*string.*int32"):
        align(rows, table(ID, field("s", new, 1)))
    reused = TableSchema(pa.schema([ID, field("s", new, 1)]), ("id",), Replaced(2))
    assert align(rows, reused).column("s").to_pylist() == [{"a": None}]


def test_rows_without_the_key_are_not_rows_with_a_null_key() -> None:
    other = batch([pa.array(["x"])], field("note", pa.string(), 1))
    unnumbered = batch([pa.array(["x"])], pa.field("note", pa.string()))
    for rows in (other, unnumbered):
        with pytest.raises(ColumnMismatchError, match="no key column 'id'"):
            align(rows, table(ID, field("note", pa.string(), 1)))


@pytest.mark.parametrize("marks", [pa.array([0]), pa.array([None], pa.bool_())], ids=["number", "null"])
def test_a_tombstone_mark_that_says_neither_true_nor_false_is_refused(marks: pa.Array) -> None:
    rows = batch([pa.array([1]), marks], ID, pa.field(TOMBSTONE, marks.type))
    with pytest.raises(ColumnMismatchError, match=TOMBSTONE):
        align(rows, table(ID))


def test_json_text_of_older_entries_is_stored_in_lances_encoding() -> None:
    schema = table(ID, field("document", pa.json_(), 1))
    text = pa.ExtensionArray.from_storage(pa.json_(), pa.array(['{"a": 1}', None]))
    rows = batch([pa.array([1, 2]), text], *schema.columns)
    stored = align(rows, schema)
    assert stored.schema.field("document").type == pa.large_binary()
    assert shown(pa.table(stored), schema).column("document").to_pylist() == ['{"a":1}', None]


def test_the_tombstone_is_never_paired_with_a_column_that_got_its_id() -> None:
    marked = field(TOMBSTONE, pa.bool_(), 1, nullable=False)
    rows = batch([pa.array([1, 2]), pa.array([False, True])], ID, marked)
    aligned = align(rows, table(ID, field("flag", pa.bool_(), 1)))
    assert aligned.to_pydict() == {"id": [1, 2], "flag": [None, None], TOMBSTONE: [False, True]}


def test_names_count_only_when_no_field_has_an_id() -> None:
    plain = batch([pa.array([1]), pa.array(["a"])], pa.field("id", pa.int64()), pa.field("s", pa.string()))
    wanted = table(ID, field("s", pa.string(), 7))
    assert align(plain, wanted).column("s").to_pylist() == ["a"]
    half = batch([pa.array([1]), pa.array(["a"])], ID, pa.field("s", pa.string()))
    assert align(half, wanted).column("s").to_pylist() == [None]


def test_a_column_without_id_and_of_another_type_is_refused() -> None:
    plain = batch([pa.array([1], pa.int32())], pa.field("id", pa.int32()))
    with pytest.raises(ColumnMismatchError, match="int32"):
        align(plain, table(ID))


def _struct(*children: pa.Field) -> pa.DataType:
    return pa.struct(list(children))


def test_children_of_structs_are_matched_by_id_and_null_structs_stay_null() -> None:
    old = _struct(field("a", pa.int64(), 2), field("b", pa.string(), 3))
    new = _struct(field("bb", pa.string(), 3), field("c", pa.int64(), 4))
    rows = batch([pa.array([{"a": 1, "b": "x"}, None, {"a": 2, "b": None}], old)], field("s", old, 1))
    aligned = align(rows.slice(1), table(field("s", new, 1)))
    assert aligned.column("s").to_pylist() == [None, {"bb": None, "c": None}]
    assert align(rows, table(field("s", new, 1))).column("s").to_pylist()[0] == {"bb": "x", "c": None}


@pytest.mark.parametrize(
    "wrap", [pa.list_, pa.large_list, lambda item: pa.list_(item, 2)], ids=["list", "large_list", "fixed"]
)
def test_structs_in_lists_are_matched_by_id(wrap: object) -> None:
    assert callable(wrap)
    old = wrap(field("item", _struct(field("a", pa.int64(), 3)), 2))
    new = wrap(field("item", _struct(field("z", pa.int64(), 3), field("n", pa.bool_(), 4)), 2))
    values = [[{"a": 1}, {"a": 2}], None, [{"a": 3}, {"a": 4}]]
    rows = batch([pa.array(values, old)], field("l", old, 1))
    wanted = [[{"z": 1, "n": None}, {"z": 2, "n": None}], None, [{"z": 3, "n": None}, {"z": 4, "n": None}]]
    assert align(rows, table(field("l", new, 1))).column("l").to_pylist() == wanted
    assert align(rows.slice(1, 2), table(field("l", new, 1))).column("l").to_pylist() == wanted[1:]


def test_a_list_of_another_width_or_item_type_is_another_type() -> None:
    old = pa.list_(pa.float32(), 2)
    rows = batch([pa.array([[1.0, 2.0]], old)], field("v", old, 1))
    for new in (pa.list_(pa.float32(), 4), pa.list_(pa.float64(), 2), pa.list_(pa.float32())):
        with pytest.raises(ColumnMismatchError, match="'v'"):
            align(rows, table(field("v", new, 1)))


class Replaced:
    """A table at version 9, in which some fields got their ids after version 5."""

    version = 9

    def __init__(self, *field_ids: int) -> None:
        self._field_ids = frozenset(field_ids)

    def was_called(self, field_id: int, name: str) -> bool:
        return True

    def replaced_since(self, version: int) -> frozenset[int]:
        return self._field_ids if version <= 5 else frozenset()


def test_a_field_id_that_means_another_column_now_is_not_paired_though_name_and_type_are_the_same() -> None:
    note = field("note", pa.string(), 1)
    wanted = TableSchema(pa.schema([ID, note]), ("id",), Replaced(1))
    rows = batch([pa.array([1]), pa.array(["old"]), pa.array([False])], ID, note, TOMBSTONE_FIELD)
    assert align(rows, wanted, 5).column("note").to_pylist() == [None]
    assert align(rows, wanted, 6) is rows
    # Nothing says for which version it was written: the name decides.
    assert align(rows, wanted) is rows


def test_a_replaced_field_of_a_struct_reads_as_null_and_its_neighbours_do_not() -> None:
    inner = pa.struct([field("a", pa.int32(), 2), field("b", pa.string(), 3)])
    outer = field("s", inner, 1)
    wanted = TableSchema(pa.schema([ID, outer]), (), Replaced(3))
    rows = batch([pa.array([1]), pa.array([{"a": 7, "b": "old"}], inner)], ID, outer)
    assert align(rows, wanted, 5).column("s").to_pylist() == [{"a": 7, "b": None}]
    assert align(rows, wanted, 6).column("s").to_pylist() == [{"a": 7, "b": "old"}]
