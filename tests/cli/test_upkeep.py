"""lancewal upkeep: what is due is shown, done once, or done for as long as it runs."""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from pathlib import Path

import lance
import pytest

import lancewal
from lancewal.cli import exits
from lancewal.storage import layout
from tests.cli.support import ok, run, start
from tests.patience import PATIENCE, wait_until
from tests.tables import rows, wal_table


@pytest.fixture
def behind(tmp_path: Path) -> lancewal.Table:
    table = wal_table(tmp_path / "t", upkeep={"max_sstables": 2, "interval": timedelta(seconds=0.1)})
    for number in range(3):
        with table.writer() as writer:
            writer.put(rows(10 * number, 10))
    return table


def test_a_dry_run_shows_what_is_due_and_does_nothing(behind: lancewal.Table) -> None:
    outcome = ok("upkeep", behind.uri, "--dry-run", columns=200)
    assert "compact (1 shard): shard" in outcome.out
    assert "3 SSTables, at most 2 are wanted" in outcome.out
    (document,) = ok("upkeep", behind.uri, "--dry-run", "--json").documents
    assert [task["work"] for task in document["tasks"]] == ["compact", "collect"]
    assert behind.status().uncompacted.count == 3


def test_a_run_does_what_is_due(behind: lancewal.Table, tmp_path: Path) -> None:
    other = wal_table(tmp_path / "other")
    outcome = ok("upkeep", behind.uri, other.uri, columns=200)
    assert "3 SSTables with 30 rows compacted" in outcome.out
    assert f"{other.uri}: " in outcome.out.replace("\n", "")
    assert lance.dataset(behind.uri).count_rows() == 30
    assert "nothing is due" in ok("upkeep", behind.uri, columns=200).out
    assert "compact" in ok("status", behind.uri, columns=200).out


def test_a_failure_is_told_and_ends_with_a_code(behind: lancewal.Table) -> None:
    (shard,) = behind.shards()
    [victim] = (Path(behind.uri) / layout.shard_dir(shard.shard_id)).glob("*_gen_2")
    victim.rename(victim.parent.parent.parent / "hidden")
    outcome = run("upkeep", behind.uri, "--json")
    assert outcome.code == 1
    assert list(outcome.documents[0]["failed"]) == [str(shard.shard_id)]


def test_it_refuses_what_makes_no_sense(behind: lancewal.Table, tmp_path: Path) -> None:
    assert run("upkeep", behind.uri, "--dry-run", "--watch").code == 2
    assert run("upkeep", tmp_path / "nowhere").code == exits.NOT_FOUND


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_it_watches_until_it_is_stopped(behind: lancewal.Table, end: signal.Signals) -> None:
    process = start("upkeep", behind.uri, "--watch", "--json")
    try:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["work"] == "compact"
        for number in range(3):
            with behind.writer() as writer:
                writer.put(rows(10 * number, 10, prefix="newer"))
        wait_until(lambda: behind.status().uncompacted.count == 0, "the next compaction")
        process.send_signal(end)
        process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0
    assert {row["name"] for row in lance.dataset(behind.uri).to_table().to_pylist()} == {
        f"newer_{number}" for number in range(30)
    }


def test_status_did_not_show_garbage_nor_the_tables_own_settings(behind: lancewal.Table) -> None:
    behind.set_upkeep(max_garbage_bytes=1, garbage_age=timedelta(hours=6))
    behind.compact()
    shown = ok("status", behind.uri, columns=200).out
    assert "kept within" in shown
    assert "garbage_age 6 h" in shown
    assert "max_garbage_bytes 1 B" in shown
    assert f"{behind.status().garbage.count} files" in shown
    [plan] = run("upkeep", behind.uri, "--dry-run", "--json").documents
    assert [task.get("min_age") for task in plan["tasks"] if task["work"] == "collect"] == [600.0]
