"""Speculation on a cluster of two hosts: the slow attempt of a task writes after the commit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lancewal.publish.staging import is_staged
from lancewal.shard.discovery import discover_manifests
from lancewal.storage import ObjectStore
from tests.spark.processes import STANDALONE, Driver, running_cluster
from tests.spark.speculation import ROWS
from tests.spark.tables import content, named, new_table
from tests.spark.test_stream_faults import changes_in
from tests.tables import APPEND_ONLY

WAYS = ("by format", "by format, few rows", "low latency", "low latency, named")


@pytest.mark.soak
def test_a_slow_loser_that_writes_after_the_commit_changes_nothing(tmp_path: Path) -> None:
    """Without a key, where a row that is written twice is there twice."""
    tables = {way: new_table(tmp_path / way, APPEND_ONLY) for way in WAYS}
    notes = tmp_path / "notes"
    notes.mkdir()
    config = {"directory": str(notes), "tables": {way: table.uri for way, table in tables.items()}}
    with running_cluster(STANDALONE, tmp_path) as cluster:
        driver = Driver("tests.spark.speculation", cluster, config)
        try:
            driver.expect_success()
        finally:
            driver.end()
    done = {way: json.loads((notes / f"{way} loser").read_text()) for way in WAYS}
    for way, table in tables.items():
        assert content(table) == named(0, ROWS), way
        assert changes_in(table.uri) == ROWS, way
    sent, *staged = done["by format"]
    assert sent == 0
    assert staged
    assert all(map(is_staged, staged))
    listed = {
        entry.path
        for manifest in discover_manifests(ObjectStore.from_uri(tables["by format"].uri))
        for entry in manifest.sstables
    }
    assert listed.isdisjoint(staged)
    assert done["by format, few rows"][0] > 0, "its rows are in a message that no commit gets"
    assert len(done["by format, few rows"]) == 1, "and nowhere else"
    assert done["low latency"] == ["ConflictError"], "nothing is left that says what it would repeat"
    assert done["low latency, named"] == [True], "skipped"
