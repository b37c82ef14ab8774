"""Ctrl-C and storage that refuses, in the middle of work: a sentence, a code, and a table that is whole."""

from __future__ import annotations

import _thread
import errno
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lancewal
from lancewal.cli import exits
from lancewal.storage import local
from lancewal.table import Table
from lancewal.writer.table_writer import TableWriter
from tests.cli.support import new_table, ok, run, spawn
from tests.maintenance.support import execute_shard
from tests.tables import ids, rows


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    """Rows in the base, in SSTables and in WALs."""
    made = new_table(tmp_path / "t", 10, bucket=("id", 3))
    with made.writer() as writer:
        writer.put(rows(10, 30))
    with made.writer(enable_memtable=False) as writer:
        writer.put(rows(40, 30))
    return made


def interrupt_after(call: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """``call``, interrupted once it has returned so many times: in the main thread, as by Ctrl-C."""
    done = 0

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal done
        result = call(*args, **options)
        done += 1
        if threading.current_thread() is not threading.main_thread():
            if done == calls:
                _thread.interrupt_main()
        elif done >= calls:
            raise KeyboardInterrupt
        return result

    return counted


def whole(table: lancewal.Table) -> None:
    assert ok("verify", table.uri, "--json").document["ok"]
    assert ids(table.scan().to_table()) == list(range(70))


def test_a_compaction_that_is_interrupted_goes_on_later(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("flush", table.uri)
    compact = Table.compact

    def interrupted(self: Table, **options: Any) -> Any:
        progress = interrupt_after(options["progress"], 2)
        return compact(self, **{**options, "progress": progress})

    monkeypatch.setattr(Table, "compact", interrupted)
    outcome = run("compact", table.uri)
    assert outcome.code == exits.INTERRUPTED
    assert outcome.error == ("interrupted; every commit so far is whole, run the same command again to go on")
    monkeypatch.undo()
    whole(table)
    ok("compact", table.uri)
    assert "nothing to compact" in ok("compact", table.uri).out
    whole(table)


def test_a_flush_that_is_interrupted_goes_on_later(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local.LocalBackend, "_create", interrupt_after(local.LocalBackend._create, 3))
    outcome = run("flush", table.uri)
    assert outcome.code == exits.INTERRUPTED
    assert "run the same command again to go on" in outcome.error
    monkeypatch.undo()
    whole(table)
    ok("flush", table.uri)
    assert ok("status", table.uri, "--json").document["unflushed"]["count"] == 0
    whole(table)


def merge(table: lancewal.Table) -> None:
    """Compaction that dies before its end, so that a collection has something to prune."""
    table.flush()
    for shard in table.plan_compaction().shards:
        execute_shard(shard, store=table._store)


def test_a_collection_that_is_interrupted_goes_on_later(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge(table)
    monkeypatch.setattr(local.LocalBackend, "_create", interrupt_after(local.LocalBackend._create, 1))
    outcome = run("gc", table.uri, "--min-age", "0s")
    assert outcome.code == exits.INTERRUPTED
    assert "the table is whole, run the same command again" in outcome.error
    monkeypatch.undo()
    whole(table)
    ok("gc", table.uri, "--min-age", "0s")
    whole(table)


def test_a_delete_that_is_interrupted_goes_on_later(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TableWriter, "delete", interrupt_after(TableWriter.delete, 1))
    outcome = run("delete", table.uri, "--filter", "id >= 20", "--yes")
    assert outcome.code == exits.INTERRUPTED
    assert "what was deleted stays deleted" in outcome.error
    monkeypatch.undo()
    left = ids(table.scan().to_table())
    assert left[:20] == list(range(20))
    assert 20 <= len(left) < 70
    ok("delete", table.uri, "--filter", "id >= 20", "--yes")
    assert ids(table.scan().to_table()) == list(range(20))


@pytest.mark.parametrize(
    ("number", "words", "advice"),
    [
        (errno.ENOSPC, "the disk is full", "free some space, then run"),
        (errno.EACCES, "permission denied", "see that you may write there, then run"),
        (errno.EROFS, "the file system is read-only", "see that you may write there, then run"),
    ],
)
@pytest.mark.parametrize("command", [["flush"], ["gc", "--min-age", "0s"], ["delete", "3"], ["ingest"]])
def test_storage_that_refuses_is_told_once_with_what_helps(
    table: lancewal.Table,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    number: int,
    words: str,
    advice: str,
) -> None:
    (tmp_path / "more.csv").write_text("id,name\n" + "".join(f"{each},x\n" for each in range(70)))
    arguments = [str(tmp_path / "more.csv")] if command[0] == "ingest" else command[1:]
    merge(table) if command[0] == "gc" else None

    def refuse(self: object, directory: str, target: str, data: memoryview) -> bool:
        raise OSError(number, "refused", target)

    monkeypatch.setattr(local.LocalBackend, "_create", refuse)
    outcome = run(command[0], table.uri, *arguments)
    assert outcome.code == exits.FAILED
    assert outcome.error.count(words) == 1
    assert outcome.error.count(advice) == 1
    # Names of inner files say nothing to who runs the command.
    assert ".binpb" not in outcome.error
    monkeypatch.undo()
    whole(table)


def test_a_place_below_a_file_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("id,name\n1,a\n")
    below = tmp_path / "rows.csv" / "t"
    assert run("status", below).code == exits.NOT_FOUND
    for command in (["init", below, "--like"], ["ingest", below, "--create", "--key", "id"]):
        outcome = run(*command, tmp_path / "rows.csv")
        assert outcome.code == exits.FAILED
        assert f"cannot create the table at {below}" in outcome.error
        assert "Not a directory" in outcome.error


def test_help_fills_its_lines_and_gives_switches_no_type() -> None:
    text = spawn("init", "--help", env={"COLUMNS": "80", "TERM": "dumb"}).out
    assert "of the first key column, or to a single shard" in " ".join(text.split())
    assert not any(line.rstrip().endswith("first key column, or") for line in text.splitlines())
    assert "<bool>" not in text


_STOPPED_ELSEWHERE = """
import signal, threading, time
from lancewal.cli.exits import guarded, wait_until_stopped

def stop():
    time.sleep(0.5)  # the main thread waits by then
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    threading.Event().wait()

threading.Thread(target=stop, daemon=True).start()
guarded(wait_until_stopped)()
"""


def test_a_service_did_not_stop_when_another_thread_got_the_signal() -> None:
    """Python handles signals in the main thread, which waited without end; the second SIGTERM ended it."""
    done = subprocess.run([sys.executable, "-c", _STOPPED_ELSEWHERE], timeout=120, check=False)
    assert done.returncode == 0
