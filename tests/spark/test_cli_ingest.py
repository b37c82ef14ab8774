"""``lancewal ingest --engine spark``: the same files, the same memory of them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from lancewal.cli import exits
from lancewal.ingest import LocalParts, find_files
from lancewal.ingest.journal import Journal
from lancewal.storage import ObjectStore
from tests.cli.support import new_table, ok, run, write_files
from tests.tables import APPEND_ONLY, ids, rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "in")


def test_files_go_in_once_with_either_engine(spark: SparkSession, tmp_path: Path, folder: Path) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    assert ok("ingest", table.uri, folder / "a.parquet", "--json").document["rows"] == 10
    report = ok("ingest", table.uri, folder, "--engine", "spark", "--json").document
    assert report == {"files": 2, "rows": 3, "skipped": 1, "refused": {}}
    assert ok("ingest", table.uri, folder, "--json").document["skipped"] == 3
    assert ids(table.scan().to_table()) == list(range(13))
    assert {row["id"]: row["name"] for row in table.scan().to_table().to_pylist()}[11] is None


def test_a_file_that_does_not_fit_is_refused_before_anything_is_begun(
    spark: SparkSession, tmp_path: Path, folder: Path
) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    (folder / "b.csv").write_text("id,name\nten,x\n")
    outcome = run("ingest", table.uri, folder, "--engine", "spark")
    assert outcome.code == exits.REFUSED
    assert "b.csv" in outcome.error
    assert "ten" in outcome.error
    (folder / "b.csv").write_text("id,name\n10,x\n")
    assert ok("ingest", table.uri, folder, "--json").document["rows"] == 2
    assert ids(table.scan().to_table()) == [*range(11), 12]


def test_what_spark_cannot_read_is_said(spark: SparkSession, tmp_path: Path) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    with pa.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pa.ipc.new_file(sink, APPEND_ONLY) as writer:
        writer.write_batch(rows(0, 3, schema=APPEND_ONLY))
    outcome = run("ingest", table.uri, tmp_path / "a.arrow", "--engine", "spark")
    assert outcome.code == exits.REFUSED
    assert "--engine local" in outcome.error


def test_a_file_that_was_begun_by_the_other_engine_is_left_to_it(
    spark: SparkSession, tmp_path: Path, folder: Path
) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    store = ObjectStore.from_uri(table.uri, fsync=False)
    (file,) = find_files([folder / "a.parquet"])
    assert Journal(store, str(folder)).begin(0, LocalParts(store).prepare(file, 0).part)
    outcome = run("ingest", table.uri, folder, "--engine", "spark")
    assert outcome.code == exits.REFUSED
    assert "finish it with --engine local" in outcome.error
    ok("ingest", table.uri, folder)
    assert ids(table.scan().to_table()) == list(range(13))
