"""Changes of another database, as Debezium sends them, into a table: inserts, updates, deletes, tombstones.

The events come from files here; with Kafka, ``spark.readStream.format("kafka")`` stands in their place.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812

import lancewal
from lancewal.spark import from_debezium, session, stream

ENVELOPE = (
    "op STRING, before STRUCT<id: BIGINT, name: STRING>, after STRUCT<id: BIGINT, name: STRING>, "
    "source STRUCT<ts_ms: BIGINT>"
)


def event(at: int, op: str, before: dict[str, object] | None, after: dict[str, object] | None) -> str:
    return json.dumps({"op": op, "before": before, "after": after, "source": {"ts_ms": at}})


def main() -> None:
    directory = Path(tempfile.mkdtemp())
    events = directory / "events"
    events.mkdir()
    ada, newer, grace = {"id": 1, "name": "Ada"}, {"id": 1, "name": "Ada L."}, {"id": 2, "name": "Grace"}
    lines = [event(1, "c", None, ada), event(2, "c", None, grace), event(3, "u", ada, newer)]
    (events / "1.json").write_text("\n".join([*lines, event(4, "d", grace, None), "null"]))

    columns = pa.schema([("id", pa.int64()), ("name", pa.string())])
    table = lancewal.create(directory / "people.lance", columns, key="id")
    spark = session()
    raw = spark.readStream.text(str(events))
    rows = from_debezium(raw.select(F.from_json("value", ENVELOPE).alias("e")).select("e.*"))
    checkpoint = str(directory / "checkpoint")
    changes = stream(
        rows,
        table.uri,
        checkpoint,
        change_type_column="_op",
        order_by="_sequence",
        trigger={"availableNow": True},
    )
    changes.awaitTermination()
    spark.stop()
    print("people:", table.scan().to_table().to_pylist())
    assert table.scan().to_table().to_pylist() == [newer]


if __name__ == "__main__":
    main()
