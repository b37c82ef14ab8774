"""Spark beside a living service on the same shards: through its owner, in its order, exactly once."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import UUID

import pytest

import lancewal
from lancewal.spark import flush, low_latency, write
from tests.cli.support import ok
from tests.service.child import WritingProcess
from tests.service.test_requests import followed, names, owned
from tests.spark import faulty
from tests.spark.changes import ChangeFiles
from tests.spark.tables import frame, new_table, schema_of
from tests.spark.test_stream_faults import run_to_the_end
from tests.tables import ids, write_parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

#: The service's ids that no stream touches.
SERVICE = 10_000


def epochs(table: lancewal.Table) -> dict[UUID, int]:
    return {shard.shard_id: shard.epoch for shard in table.shards()}


def written_once(df: DataFrame, table: lancewal.Table, path: str, version: int) -> None:
    """Write by one of both ways, as version ``version`` of a job."""
    if path == "wal":
        write(df, table.uri, txn_app_id="job", txn_version=version, change_type_column="op")
        return
    writer = df.write.format("lancewal").mode("append").option("changeTypeColumn", "op")
    writer.option("txnAppId", "job").option("txnVersion", version).save(table.uri)


@pytest.mark.parametrize("path", ["format", "wal"])
def test_a_write_lands_once_between_what_the_owner_took_before_and_after(
    spark: SparkSession, tmp_path: Path, path: str
) -> None:
    table = new_table(tmp_path / "table")
    changes = [(n, f"spark_{n}", "upsert") for n in range(4, 10)] + [(n, None, "delete") for n in (10, 11)]
    with WritingProcess(table) as owner:
        owner.ask("put", start=0, count=13, prefix="before")
        owned(table, owner)
        before = epochs(table)
        df = frame(spark, changes, "id long, name string, op string")
        written_once(df, table, path, 1)
        assert owner.ask("put", start=4, count=1, prefix="after") == {"done": 1}
        assert owner.ask("put", start=10, count=1, prefix="after") == {"done": 1}
        written_once(df, table, path, 1)  # a driver that did not learn of its success
        expected = {n: f"before_{n}" for n in (0, 1, 2, 3, 12)} | {n: f"spark_{n}" for n in range(5, 10)}
        expected |= {4: "after_4", 10: "after_10"}
        assert names(table) == expected
        assert epochs(table) == before
        assert owner.ask("put", start=5, count=1, prefix="last") == {"done": 1}
    table.flush()
    table.compact()
    assert names(table) == expected | {5: "last_5"}
    assert table.verify().ok


@pytest.mark.parametrize("path", ["format", "wal"])
def test_a_stream_beside_a_service_lands_once_although_tasks_commits_and_the_service_die(
    spark: SparkSession, tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a key a doubled row would show."""
    monkeypatch.setattr(low_latency, "FORMAT", faulty.FORMAT)
    spark.dataSource.register(faulty.FaultySource)
    files = ChangeFiles(tmp_path / "changes", keyed=False)
    files.add(2)
    table = new_table(tmp_path / "table", schema_of(False))
    with WritingProcess(table) as owner:
        owner.ask("put", start=SERVICE, count=20)
        owned(table, owner)
        before = epochs(table)
        assert len(before) == 3
        owner.send({"do": "fill", "start": SERVICE + 20, "count": 200})
        # A commit dies while it stages few rows; the next one once the owner has done its part, so that the
        # batch comes again.
        faulty.issue("after kill", "commit 3", "commit 999", "commit pass")
        try:
            restarts = run_to_the_end(spark, path, files, table.uri, tmp_path / "checkpoint", 8)
            suffered = faulty.suffered()
        finally:
            faulty.withdraw()
        assert restarts > 0
        assert suffered
        assert owner.answer() == {"done": list(range(SERVICE + 20, SERVICE + 220))}
        assert epochs(table) == before  # nobody has claimed a shard of it
        owner.kill()
    files.add(1)
    run_to_the_end(spark, path, files, table.uri, tmp_path / "checkpoint", 1)
    found = Counter(ids(table.scan().to_table()))
    assert sorted(found) == [*range(36), *range(SERVICE, SERVICE + 220)]
    assert set(found.values()) == {1}


def test_flush_and_ingest_by_spark_leave_the_owner_its_shards(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    file = write_parquet(tmp_path / "rows.parquet", 0, 8)
    with WritingProcess(table) as owner:
        owner.ask("put", start=0, count=20, prefix="before")
        owned(table, owner)
        before = epochs(table)
        assert sum(outcome.details["rows"] for outcome in flush(spark, table.uri)) == 20
        assert table.status().unflushed.count == 0
        assert ok("ingest", table.uri, file, "--engine", "spark", "--json").document["rows"] == 8
        assert ok("ingest", table.uri, file, "--engine", "spark", "--json").document["skipped"] == 1
        assert owner.ask("put", start=7, count=1, prefix="after") == {"done": 1}
        assert epochs(table) == before
        expected = {n: f"before_{n}" for n in range(8, 20)} | {n: f"name_{n}" for n in range(7)}
        assert names(table) == followed(table) == expected | {7: "after_7"}
