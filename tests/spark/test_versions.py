"""What has to work on every version of Spark that is allowed, in one story; ``matrix.py`` runs it on each."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from lancewal.errors import InvalidInputError
from lancewal.publish import feed_schema
from lancewal.spark import changes, compact, feed_source, flush, spark_session, stream, write
from lancewal.spark.columns import spark_schema
from lancewal.spark.options import OpenTable
from tests.spark import matrix
from tests.spark.tables import content, frame, named, new_table, options_of, spark_content
from tests.tables import rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOW = {"availableNow": True}


def test_rows_go_in_both_ways_are_read_followed_and_compacted(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table")
    frame(spark, named(0, 10)).write.format("lancewal").mode("append").save(table.uri)
    write(frame(spark, named(10, 10)), table.uri, txn_app_id="app", txn_version=0)
    feed = changes(spark, table.uri, starting_position="snapshot").writeStream.format("memory").queryName("v")
    feed = feed.option("checkpointLocation", str(tmp_path / "feed"))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "one.json").write_text('{"id": 20, "name": "name_20"}')
    incoming = spark.readStream.schema("id long, name string").json(str(tmp_path / "in"))
    stream(incoming, table.uri, str(tmp_path / "c"), trigger=NOW).awaitTermination()
    by_format = incoming.writeStream.format("lancewal").option("checkpointLocation", str(tmp_path / "f"))
    by_format.trigger(availableNow=True).start(table.uri).awaitTermination()
    feed.trigger(availableNow=True).start().awaitTermination()
    assert {row.id for row in spark.sql("SELECT id FROM v").collect()} == set(range(21))
    flush(spark, table.uri)
    compact(spark, table.uri)
    assert content(table) == spark_content(spark, table.uri) == named(0, 21)


def test_where_spark_asks_for_no_limits_a_feed_refuses_them_and_brings_the_snapshot_with_what_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Spark 4.1 calls a stream: ``latestOffset()`` does not say where the stream is."""
    monkeypatch.setattr(feed_source, "HAS_LIMITS", False)
    table = new_table(tmp_path / "table")
    with table.writer() as writer:
        writer.put(rows(1, 1))
        options = options_of(table, readChangeFeed="true", startingPosition="snapshot")
        schema = spark_schema(feed_schema(OpenTable.open(options).base.schema))
        following = feed_source.FeedStream(options, schema)
        start = following.initialOffset()
        writer.put(rows(2, 1))
    end = following.latestOffset()
    found = [b for part in following.partitions(start, end) for b in following.read(part)]
    assert sorted(i for batch in found for i in batch["id"].to_pylist()) == [1, 2]
    limited = feed_source.FeedStream(options_of(table, readChangeFeed="true", maxEntriesPerTrigger=1), schema)
    with pytest.raises(InvalidInputError, match=r"needs Spark 4\.2"):
        limited.latestOffset()


def test_the_matrix_has_every_version_that_the_project_allows() -> None:
    declared = tomllib.loads((matrix.ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert declared["spark"][0] == "pyspark>=4.1,<4.4"
    assert matrix.VERSIONS == ("4.1", "4.2", "4.3")
    assert pyspark.__version__.startswith(tuple(f"{version}." for version in matrix.VERSIONS))
    assert tuple(f"{version}." for version in matrix.VERSIONS) == spark_session.FRONT_VERSIONS
    ran = subprocess.run([sys.executable, "-m", "tests.spark.matrix", "--help"], cwd=matrix.ROOT, check=False)
    assert ran.returncode == 0


def test_another_spark_goes_without_the_front_and_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spark_session, "version", lambda name: "4.4.0")
    with pytest.warns(spark_session.FrontUnavailableWarning, match=r'4\.4\.0.*format\("lancewal"\) works'):
        assert spark_session.front_settings({}) == {}


def test_the_result_of_a_run_names_what_failed_and_why_tests_were_skipped(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure/></testcase>'
        '<testcase name="c"><skipped message="no limits"/></testcase><testcase name="d"/>'
        "</testsuite></testsuites>"
    )
    found = matrix.outcome_of("4.1.4", report, 1)
    assert found.line == "| 4.1.4 | 2 | `b` | 1: no limits |"
    assert matrix.table_of([found]).endswith(found.line)
