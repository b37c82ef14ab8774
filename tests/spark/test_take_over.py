"""Shards that another process has: every write and job of Spark takes them, or leaves them, as it is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.sql import functions as F  # noqa: N812

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.service import TakeOver
from lancewal.spark import apply_changes, batch_writer, delete, flush, jobs, merge, stream, update, write
from tests.cli.support import run
from tests.service.test_requests import left_in_the_log
from tests.spark.tables import content, frame, named, new_table, options_of
from tests.tables import write_parquet

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

BEFORE = named(0, 3)
NOW = {"availableNow": True}


def incoming(spark: SparkSession, place: Path) -> DataFrame:
    write_parquet(place / "in" / "one.parquet", 3, 3)
    return spark.readStream.schema("id long, name string").parquet(str(place / "in"))


def by_format(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    frame(spark, named(3, 3)).write.format("lancewal").mode("append").option("takeOver", take).save(uri)


def as_sstables(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    writer = frame(spark, named(3, 3)).write.format("lancewal").mode("append").option("takeOver", take)
    writer.option("walBytes", 0).save(uri)


def stream_by_format(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    writer = incoming(spark, place).writeStream.format("lancewal").option("takeOver", take)
    writer = writer.option("checkpointLocation", str(place / take)).trigger(availableNow=True)
    writer.start(uri).awaitTermination()


def low_latency(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    write(frame(spark, named(3, 3)), uri, take_over=take)


def stream_of_entries(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    stream(incoming(spark, place), uri, str(place / take), trigger=NOW, take_over=take).awaitTermination()


def in_sequence(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    events = incoming(spark, place)
    started = apply_changes(events, uri, str(place / take), sequence_by="name", trigger=NOW, take_over=take)
    started.awaitTermination()


def for_each_batch(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    batch_writer(uri, "app", take_over=take)(frame(spark, named(3, 3)), 0)


def deleting(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    delete(spark, uri, "id = 1", take_over=take)


def updating(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    update(spark, uri, {"name": "upper(name)"}, "id = 1", take_over=take)


def merging(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    merge(frame(spark, named(3, 3)), uri, take_over=take)


def flushing(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    flush(spark, uri, take_over=take)


def _command(*arguments: object) -> None:
    done = run(*arguments)
    if done.code:
        raise RuntimeError(done.err)


def flushing_by_command(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    _command("flush", uri, "--engine", "spark", "--take-over", take)


def taking_files_by_command(spark: SparkSession, uri: str, place: Path, take: TakeOver) -> None:
    # The second time the command finishes what it had begun to write.
    file = place / "rows.parquet"
    if not file.exists():
        write_parquet(file, 3, 3)
    _command("ingest", uri, file, "--engine", "spark", "--take-over", take)


MORE = named(0, 6)
#: What each leaves in a table with three rows.
WAYS: dict[Callable[[Any, str, Path, TakeOver], None], list[tuple[int, str]]] = {
    by_format: MORE,
    as_sstables: MORE,
    stream_by_format: MORE,
    low_latency: MORE,
    stream_of_entries: MORE,
    in_sequence: MORE,
    for_each_batch: MORE,
    deleting: [BEFORE[0], BEFORE[2]],
    updating: [BEFORE[0], (1, "NAME_1"), BEFORE[2]],
    merging: MORE,
    flushing: BEFORE,
    flushing_by_command: BEFORE,
    taking_files_by_command: MORE,
}


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_shards_of_another_process_are_left_alone_or_taken_as_is_said(
    spark: SparkSession, tmp_path: Path, way: Callable[[Any, str, Path, TakeOver], None]
) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    (tmp_path / "in").mkdir()
    left_in_the_log(table)
    before = table.shards()
    with pytest.raises(Exception, match="leaves it alone"):
        way(spark, table.uri, tmp_path, "never")
    assert table.shards() == before
    assert content(table) == BEFORE
    way(spark, table.uri, tmp_path, "now")
    assert content(table) == WAYS[way]
    assert table.shards()[0].epoch > before[0].epoch


def test_any_other_word_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    rows = frame(spark, named(3, 3)).withColumn("name", F.lower("name"))
    with pytest.raises(Exception, match="when_gone"):
        rows.write.format("lancewal").mode("append").option("takeOver", "perhaps").save(table.uri)
    with pytest.raises(InvalidInputError, match="when_gone"):
        write(rows, table.uri, take_over="perhaps")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="when_gone"):
        flush(spark, table.uri, take_over="perhaps")  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="when_gone"):
        _ = options_of(table, takeOver="perhaps").take_over
    assert content(table) == []


def test_the_program_for_spark_submit_takes_it_too(
    spark: SparkSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = new_table(tmp_path / "table", unsharded=True)
    left_in_the_log(table)
    assert jobs.main(["flush", table.uri, "--take-over", "never"]) == 1
    assert "leaves it alone" in capsys.readouterr().err
    assert jobs.main(["flush", table.uri, "--take-over", "now"]) == 0
    assert lancewal.open(table.uri).status().unflushed.count == 0
