"""ingest, as a new user runs it, and as things go wrong."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import urllib.request
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.cli import exits
from lancewal.storage import local
from tests.cli.support import new_table, ok, run, start, write_files
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, KEYED, ids

FAST = ["--set", "fsync=false"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / "in")


def test_create_ignored_the_key_of_a_table_that_is_there_and_took_rows_twice(tmp_path: Path) -> None:
    source = tmp_path / "rows.jsonl"
    source.write_text('{"id": 1, "name": "a"}\n')
    lance.write_dataset(pa.table({"id": [5, 5], "name": ["x", "y"]}), str(tmp_path / "plain"))
    ok("ingest", tmp_path / "keyless", source, "--create")
    ok("ingest", tmp_path / "keyed", source, "--create", "--key", "id", "--bucket", "id:2")
    for table, *arguments in (
        ["plain", "--key", "id"],
        ["keyless", "--key", "id"],
        ["keyed", "--key", "name"],
        ["keyed", "--bucket", "id:4"],
        ["keyed", "--identity", "id"],
        ["keyed", "--unsharded"],
        ["keyed", "--set", "durable_write=false"],
        ["keyed", "--vector-column", "name"],
    ):
        refused = run("ingest", tmp_path / table, source, "--create", "--again", *arguments)
        assert refused.code == exits.REFUSED, arguments
        assert run("query", tmp_path / table, "--count").out.strip() in ("1", "")
    # The very command that made the table goes on with it.
    ok("ingest", tmp_path / "keyed", source, "--create", "--key", "id", "--bucket", "id:2", "--again")
    assert ok("query", tmp_path / "keyed", "--count").out.strip() == "1"


def test_create_declares_the_key_of_a_lance_table_that_has_none(tmp_path: Path) -> None:
    lance.write_dataset(APPEND_ONLY.empty_table(), str(tmp_path / "t"))
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "name": "a"}\n')
    for _ in range(2):
        ok("ingest", tmp_path / "t", tmp_path / "rows.jsonl", "--create", "--key", "id", "--again")
    assert lancewal.open(tmp_path / "t").primary_key == ("id",)
    assert ok("query", tmp_path / "t", "--count").out.strip() == "1"


def test_ingest_creates_the_table_and_takes_every_format(tmp_path: Path, folder: Path) -> None:
    outcome = ok("ingest", tmp_path / "t", folder, "--create", "--key", "id", "--bucket", "id:2", *FAST)
    assert "13 rows from 3 files" in outcome.out
    assert "created" in outcome.err
    table = lancewal.open(tmp_path / "t")
    assert table.primary_key == ("id",)
    assert ids(table.scan().to_table()) == list(range(13))
    assert table.status().unflushed.count == 0


def test_ingest_skips_what_it_has(tmp_path: Path, folder: Path) -> None:
    ok("ingest", tmp_path / "t", folder, "--create", *FAST)
    outcome = ok("ingest", tmp_path / "t", folder)
    assert "0 rows from 0 files; 3 files skipped" in outcome.out
    document = ok("ingest", tmp_path / "t", folder / "b.csv", "--again", "--json").document
    assert document == {"files": 1, "rows": 2, "skipped": 0, "refused": {}}
    assert lancewal.open(tmp_path / "t").count_rows() == 15


def test_ingest_may_leave_rows_in_the_wal(tmp_path: Path, folder: Path) -> None:
    ok("ingest", tmp_path / "t", folder, "--create", "--no-flush", *FAST)
    assert lancewal.open(tmp_path / "t").status().unflushed.count > 0


def test_create_gives_a_lance_table_its_write_path(tmp_path: Path, folder: Path) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    ok("ingest", tmp_path / "t", folder, "--create", "--unsharded", *FAST)
    ok("ingest", tmp_path / "t", folder, "--create", "--unsharded", *FAST)
    assert lancewal.open(tmp_path / "t").count_rows() == 13


def test_vectors_get_their_dimension_from_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "v.jsonl").write_text('{"id": 1, "v": [1, 2, 3]}\n{"id": 2, "v": [4, 5, 6]}\n')
    ok(
        "ingest",
        tmp_path / "t",
        tmp_path / "v.jsonl",
        "--create",
        "--key",
        "id",
        "--vector-column",
        "v",
        *FAST,
    )
    assert lancewal.open(tmp_path / "t").schema.field("v").type == pa.list_(pa.float32(), 3)
    (near, *_) = ok("query", tmp_path / "t", "--vector", "v=[4,5,6]", "--json").documents
    assert near["id"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["t", "in"], exits.NOT_FOUND, "lancewal ingest --create"),
        (["t", "nothing.csv", "--create"], exits.REFUSED, "there is no file or directory nothing.csv"),
        (["t", "empty", "--create"], exits.REFUSED, "no file"),
        (["t", "in", "--create", "--key", "nothing"], exits.REFUSED, "no column nothing"),
        (
            ["t", "in", "--create", "--bucket", "name:2", "--key", "id"],
            exits.REFUSED,
            "not part of the primary key",
        ),
        (["t", "in", "--key", "id"], exits.REFUSED, "are for --create"),
        (["t", "in", "--format", "xlsx", "--create"], exits.REFUSED, "unknown format"),
        (["t", "in", "--create", "--vector-column", "name"], exits.REFUSED, "dimension"),
        (["t", "in", "--create", "--metrics", "http"], exits.REFUSED, "[HOST:]PORT"),
        (["t", "in", "--engine", "flink"], exits.REFUSED, "flink"),
        (["t"], exits.REFUSED, "SOURCE"),
    ],
)
def test_ingest_explains_what_it_refuses(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    outcome = run("ingest", *arguments)
    assert outcome.code == code, outcome.err
    assert words in " ".join(outcome.err.replace("│", " ").split())
    assert "Traceback" not in outcome.err


def test_a_file_that_does_not_fit_is_named(tmp_path: Path, folder: Path) -> None:
    table = new_table(tmp_path / "t")
    (folder / "b.csv").write_text("id,name\nten,x\n")
    outcome = run("ingest", table.uri, folder)
    assert outcome.code == exits.REFUSED
    assert "b.csv" in outcome.error
    assert table.count_rows() == 10
    (folder / "b.csv").write_text("id,name,extra\n10,x,1\n")
    assert "no column extra" in run("ingest", table.uri, folder).error
    assert ok("ingest", table.uri, folder, "--drop-unknown", "--json").document["rows"] == 2


# --- things that go wrong ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EACCES, "permission denied"), (errno.ENOSPC, "the disk is full")]
)
def test_a_disk_that_refuses_half_way_and_then_does_not(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    create = local.LocalBackend._create
    calls = 0

    def sometimes(self: local.LocalBackend, directory: str, target: str, data: memoryview) -> bool:
        nonlocal calls
        calls += 1
        if calls > 12:
            raise OSError(number, "refused", target)
        return create(self, directory, target, data)

    monkeypatch.setattr(local.LocalBackend, "_create", sometimes)
    outcome = run("ingest", table.uri, folder)
    assert outcome.code == exits.FAILED
    assert words in outcome.error
    assert "run the same command again to go on" in outcome.error
    monkeypatch.undo()
    ok("ingest", table.uri, folder)
    assert ids(table.scan().to_table()) == list(range(13))


def many_files(where: Path, count: int) -> Path:
    where.mkdir()
    for place in range(count):
        (where / f"{place:03}.csv").write_text(f"id,name\n{place},x\n")
    return where


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, exits.INTERRUPTED), (signal.SIGTERM, exits.TERMINATED)]
)
def test_ctrl_c_leaves_good_state_and_says_how_to_go_on(tmp_path: Path, number: int, code: int) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    folder = many_files(tmp_path / "in", 200)
    with start("ingest", table.uri, folder) as process:
        wait_until(lambda: table.count_rows() >= 3)
        process.send_signal(number)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == code, err
    (line,) = err.splitlines()
    assert "of 200 files" in line
    assert "Run the same command again to go on" in line
    assert ok("verify", table.uri, "--quick", "--json").document["ok"]
    before = table.count_rows()
    assert 3 <= before < 200
    report = ok("ingest", table.uri, folder, "--json").document
    # The file that was under way may be in already, and is written once more without effect.
    assert report["rows"] - (200 - before) in (0, 1)
    assert ids(table.scan().to_table()) == list(range(200))


def test_an_ingest_that_was_killed_is_finished_by_the_next(tmp_path: Path) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    folder = many_files(tmp_path / "in", 60)
    for seen in (2, 20):
        with start("ingest", table.uri, folder) as process:
            wait_until(lambda seen=seen: table.count_rows() >= seen)  # type: ignore[misc]
            process.kill()
    ok("ingest", table.uri, folder)
    assert ids(table.scan().to_table()) == list(range(60))


# --- streams -------------------------------------------------------------------------------


def test_a_stream_takes_new_files_and_goes_on_after_a_stop(tmp_path: Path, folder: Path) -> None:
    table = new_table(tmp_path / "t", schema=APPEND_ONLY)
    with start("ingest", table.uri, folder, "--stream", "--every", "0.1", "--json") as process:
        assert process.stdout is not None
        taken = [json.loads(process.stdout.readline())["file"] for _ in range(3)]
        hidden = folder / ".d.csv"
        hidden.write_text("id,name\n13,late\n")
        hidden.rename(folder / "d.csv")
        taken.append(json.loads(process.stdout.readline())["file"])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert sorted(os.path.basename(name) for name in taken) == ["a.parquet", "b.csv", "c.jsonl", "d.csv"]
    assert process.returncode == exits.INTERRUPTED
    assert "4 files and 14 rows are in the table" in err
    (folder / "e.csv").write_text("id,name\n14,later\n")
    outcome = ok("ingest", table.uri, folder, "--stream", "--every", "0.1", "--looks", "3")
    assert "e.csv  1 row" in outcome.out
    assert "1 row from 1 file" in outcome.out
    assert ids(table.scan().to_table()) == list(range(15))


def test_a_stream_leaves_bad_files_out_and_tells_once(tmp_path: Path, folder: Path) -> None:
    table = new_table(tmp_path / "t")
    (folder / "b.csv").write_text("id,name\nten,x\n")
    outcome = run("ingest", table.uri, folder, "--stream", "--every", "0.1", "--looks", "4")
    assert outcome.code == exits.FAILED
    assert outcome.err.count("left out:") == 1
    assert "11 rows from 2 files" in outcome.out


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_metrics_are_served_meanwhile(tmp_path: Path, folder: Path) -> None:
    table = new_table(tmp_path / "t")
    port = free_port()
    with start("ingest", table.uri, folder, "--stream", "--json", "--metrics", port) as process:
        assert process.stdout is not None
        for _ in range(3):
            process.stdout.readline()
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).read().decode()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE)
    assert "lancewal_object_store_seconds_count" in page
    assert "lancewal_unflushed_entries" in page
