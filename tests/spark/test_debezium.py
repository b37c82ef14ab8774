"""Change events of databases, as Debezium writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lancewal.errors import InvalidInputError
from lancewal.spark import from_debezium, stream
from tests.spark.tables import content, frame, new_table

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROW = "struct<id: bigint, name: string>"
ENVELOPE = f"before {ROW}, after {ROW}, op string, source struct<ts_ms: bigint>"


def event(op: str | None, ts: int, before: Any = None, after: Any = None) -> str:
    if op is None:
        return "{}"
    return json.dumps({"before": before, "after": after, "op": op, "source": {"ts_ms": ts}})


def row(key: int, name: str) -> dict[str, Any]:
    return {"id": key, "name": name}


def test_events_that_came_out_of_order_leave_what_the_source_has(spark: SparkSession, tmp_path: Path) -> None:
    """Reads, creates, updates, deletes with their tombstones, and a key that changed twice in a batch."""
    table = new_table(tmp_path / "table")
    files = tmp_path / "in"
    files.mkdir()
    (files / "first.json").write_text(
        "\n".join(
            [
                event("u", 30, row(1, "b"), row(1, "c")),
                event("r", 10, None, row(1, "a")),
                event("c", 11, None, row(2, "x")),
                event("u", 20, row(1, "a"), row(1, "b")),
                event("d", 40, row(2, "x"), None),
                event(None, 0),
                event("c", 12, None, row(3, "kept")),
            ]
        )
    )
    events = spark.readStream.schema(ENVELOPE).json(str(files))
    query = stream(
        from_debezium(events),
        table.uri,
        str(tmp_path / "checkpoint"),
        change_type_column="_op",
        order_by="_sequence",
        trigger={"availableNow": True},
    )
    query.awaitTermination()
    assert content(table) == [(1, "c"), (3, "kept")]


def test_what_is_no_event_is_refused(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError, match="before, after is missing"):
        from_debezium(frame(spark, [], "id long, op string"))
    with pytest.raises(InvalidInputError, match="the same columns"):
        from_debezium(frame(spark, [], f"op string, before {ROW}, after struct<id: bigint>"))
    twice = "struct<id: bigint, _op: string>"
    with pytest.raises(InvalidInputError, match="rename it"):
        from_debezium(frame(spark, [], f"op string, before {twice}, after {twice}"))
