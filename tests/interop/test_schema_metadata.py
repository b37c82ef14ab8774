"""Tables whose schema has metadata of its own, as those that pandas wrote."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import lance
import pyarrow as pa

from tests.tables import KEYED, abandon, ids, new_table, open_writer, rows


def test_lance_replays_our_entries_and_we_its_on_a_table_with_schema_metadata(tmp_path: Path) -> None:
    """An entry without the table's own metadata was refused: the shard became unopenable for Lance."""
    schema = KEYED.with_metadata({"pandas": "{}"})
    base = new_table(tmp_path / "t", schema)
    shard = uuid4()
    ours = open_writer(base, shard)
    ours.put(rows(0, 3))
    abandon(ours)
    lances = lance.dataset(base.uri).mem_wal_writer(str(shard), durable_write=True)
    assert lances.memtable_stats()["row_count"] == 3
    lances.put(pa.Table.from_batches([rows(3, 2)]).replace_schema_metadata({"pandas": "{}"}))
    del lances
    with open_writer(base, shard) as again:
        assert ids(again.scan()) == [0, 1, 2, 3, 4]
