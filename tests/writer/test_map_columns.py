"""Maps, which Lance stores from file version 2.2 on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from tests.tables import KEY, fast

STRICT = pa.map_(pa.string(), pa.field("value", pa.int32(), nullable=False))
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("loose", pa.map_(pa.string(), pa.list_(pa.int32()))),
        pa.field("strict", STRICT),
    ]
)


def rows(*values: tuple[int, Any, Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(
        [dict(zip(SCHEMA.names, v, strict=True)) for v in values], schema=SCHEMA
    )


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    lance.write_dataset(SCHEMA.empty_table(), str(tmp_path / "table"), data_storage_version="2.2")
    return lancewal.initialize(str(tmp_path / "table"), bucket=("id", 2), writer_defaults=fast())


def test_maps_go_through_the_log_and_sstables_to_the_base_table(table: lancewal.Table) -> None:
    first = rows((1, [("a", [1, None]), ("b", None)], [("c", 1)]), (2, None, None), (3, [], []))
    second = rows((2, [("z", [])], None), (4, None, [("d", 4)]))
    with table.writer() as writer:
        writer.put(first)
    with table.writer(enable_memtable=False) as writer:
        writer.put(second)
        writer.delete([3])
    expected = [*first.to_pylist()[:1], *second.to_pylist()]
    assert table.scan().to_table().sort_by("id").to_pylist() == expected
    table.flush()
    assert table.scan().to_table().sort_by("id").to_pylist() == expected
    table.compact()
    assert lance.dataset(table.uri).to_table().sort_by("id").to_pylist() == expected


def test_a_null_that_a_map_cannot_hold_is_refused(table: lancewal.Table) -> None:
    loose = pa.array([[("a", 1)], [("b", None)]], pa.map_(pa.string(), pa.int32()))
    batch = pa.record_batch({"id": [1, 2], "strict": loose})
    with table.writer() as writer, pytest.raises(InvalidInputError, match="strict"):
        writer.put(batch)
    assert table.scan().count_rows() == 0
