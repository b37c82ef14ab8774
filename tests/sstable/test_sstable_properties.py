"""Any history of rows and deletes, written as an SSTable, against a dict."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.format.schema import TOMBSTONE
from tests.sstable.tables import Base, Row, by_key, key_field, live, rows_of, where

KEYS: dict[str, tuple[list[pa.Field], st.SearchStrategy[dict[str, Any]]]] = {
    "int64": (
        [key_field("k", pa.int64())],
        st.fixed_dictionaries({"k": st.integers(-3, 3) | st.integers(-(1 << 63), (1 << 63) - 1)}),
    ),
    "text": ([key_field("k", pa.string())], st.fixed_dictionaries({"k": st.text(max_size=2)})),
    "bool": ([key_field("k", pa.bool_())], st.fixed_dictionaries({"k": st.booleans()})),
    "binary": ([key_field("k", pa.binary())], st.fixed_dictionaries({"k": st.binary(max_size=2)})),
    "composite": (
        [key_field("k", pa.binary(), 1), key_field("l", pa.uint8(), 2)],
        st.fixed_dictionaries({"k": st.binary(max_size=1), "l": st.integers(0, 2)}),
    ),
}
VALUE = st.none() | st.integers(0, 9)


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, list[list[Row]], list[dict[str, Any]]]:
    kind = draw(st.sampled_from(sorted(KEYS)))
    key = KEYS[kind][1]
    row = st.builds(
        lambda k, x, dead: {**k, "x": None if dead else x, TOMBSTONE: dead}, key, VALUE, st.booleans()
    )
    batches = draw(st.lists(st.lists(row, max_size=6), min_size=1, max_size=4).filter(any))
    return kind, batches, draw(st.lists(key, max_size=5))


@settings(max_examples=40)
@given(histories())
def test_reads_equal_a_dict(history: tuple[str, list[list[Row]], list[dict[str, Any]]]) -> None:
    kind, batches, strangers = history
    fields, _ = KEYS[kind]
    names = [field.name for field in fields]
    directory = Path(tempfile.mkdtemp())
    try:
        base = Base.create(directory / "t", [*fields, pa.field("x", pa.int64())]).initialize()
        entry = base.write(*batches)
        _check(base, entry, batches, strangers, names)
    finally:
        shutil.rmtree(directory)


def _check(
    base: Base, entry: Any, batches: list[list[Row]], strangers: list[dict[str, Any]], names: list[str]
) -> None:
    schema, table = base.schema, base.open(entry)
    newest = {tuple(row[n] for n in names): row for rows in batches for row in rows}
    expected = {
        key: {n: v for n, v in row.items() if n != TOMBSTONE} for key, row in live(batches, names).items()
    }

    everything = [*names, "x"]
    assert by_key(rows_of(table.scan(schema, everything)), names) == expected
    assert table.count_live() == base.lsm(entry).count_rows() == len(expected)
    assert by_key(base.lsm(entry).to_table().to_pylist(), names) == expected
    filtered = {key: row for key, row in expected.items() if row["x"] is not None and row["x"] > 4}
    assert by_key(rows_of(table.scan(schema, everything, filter=where("x > 4", schema))), names) == filtered

    asked = [*newest, *(tuple(key[n] for n in names) for key in strangers)]
    columns = [pa.array([key[i] for key in asked], schema.columns.field(n).type) for i, n in enumerate(names)]
    found = table.lookup(columns)
    assert (found >= 0).tolist() == [key in newest for key in asked]
    rows = table.take(found[found >= 0], schema, everything, with_tombstone=True).to_pylist()
    assert rows == [newest[key] for key in asked if key in newest]
    keys, offsets, tombstones = table.keys(schema)
    listed = list(zip(*(column.to_pylist() for column in keys), strict=True))
    assert dict(zip(listed, tombstones.tolist(), strict=True)) == {k: r[TOMBSTONE] for k, r in newest.items()}
    assert table.lookup(keys).tolist() == offsets.tolist()
