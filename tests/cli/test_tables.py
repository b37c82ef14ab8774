"""init, status, flush, compact, gc and verify, as a new user runs them."""

from __future__ import annotations

import os
import pty
import signal
import termios
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.cli import exits
from lancewal.storage import layout
from tests.cli.support import new_table, ok, run, start
from tests.tables import APPEND_ONLY, KEYED, rows


@pytest.fixture
def busy(table: lancewal.Table) -> lancewal.Table:
    """10 rows in the base, 20 in SSTables, 30 in the WAL."""
    with table.writer() as writer:
        writer.put(rows(10, 20))
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(30, 30))
    return table


# --- init ---------------------------------------------------------------------------------


def test_init_without_a_choice_hashes_the_first_key_column(tmp_path: Path) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    outcome = ok("init", tmp_path / "t")
    assert "bucket(id, 4)" in outcome.out
    assert "lancewal ingest" in outcome.out
    assert len(lancewal.open(tmp_path / "t").shards()) == 4


def test_init_without_a_key_makes_one_shard(tmp_path: Path) -> None:
    lance.write_dataset(APPEND_ONLY.empty_table(), str(tmp_path / "t"))
    document = ok("init", tmp_path / "t", "--json").document
    assert (document["sharding"], document["primary_key"], len(document["shards"])) == ("unsharded", [], 1)


@pytest.mark.parametrize(
    ("arguments", "sharding"),
    [
        (["--bucket", "id:3"], "bucket(id, 3)"),
        (["--identity", "id"], "identity(id)"),
        (["--unsharded"], "unsharded"),
        (["--by-hand"], "by hand"),
    ],
)
def test_init_shards_as_told(tmp_path: Path, arguments: list[str], sharding: str) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    assert ok("init", tmp_path / "t", *arguments, "--json").document["sharding"] == sharding


def test_init_keeps_settings_and_indexes(tmp_path: Path) -> None:
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 3)]), str(tmp_path / "t"))
    dataset.create_scalar_index("id", "BTREE")
    outcome = ok(
        "init", tmp_path / "t", "--set", "durable_write=false", "--set", "max_wal_flush_interval_ms=5",
        "--index", "id_idx", "--json",
    )  # fmt: skip
    document = outcome.document
    assert document["writer_defaults"] == {"durable_write": "false", "max_wal_flush_interval_ms": "5"}
    assert document["maintained_indexes"] == ["id_idx"]


def test_init_declares_the_key_of_a_table_that_has_none(tmp_path: Path) -> None:
    lance.write_dataset(APPEND_ONLY.empty_table(), str(tmp_path / "t"))
    ok("init", tmp_path / "t", "--key", "id")
    assert lancewal.open(tmp_path / "t").primary_key == ("id",)


def test_init_refuses_a_key_with_nulls_and_takes_a_column_that_has_none(tmp_path: Path) -> None:
    for name, value, code in (("t", None, exits.REFUSED), ("u", "a", 0)):
        lance.write_dataset(pa.table({"name": pa.array([value], pa.string())}), str(tmp_path / name))
        outcome = run("init", tmp_path / name, "--key", "name")
        assert outcome.code == code
        assert (code == 0) or "name has nulls" in outcome.error


def test_init_creates_a_table_like_a_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"tenant": "a", "id": 1, "v": [1, 2, 3]}\n')
    ok(
        "init",
        tmp_path / "t",
        "--like",
        tmp_path / "rows.jsonl",
        "--key",
        "tenant,id",
        "--vector-column",
        "v",
    )
    table = lancewal.open(tmp_path / "t")
    assert table.primary_key == ("tenant", "id")
    assert table.schema.field("v").type == pa.list_(pa.float32(), 3)
    again = run("init", tmp_path / "t", "--like", tmp_path / "rows.jsonl")
    assert again.code == exits.REFUSED
    assert "already" in again.error


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bucket", "id"],
        ["--bucket", "id:2", "--unsharded"],
        ["--by-hand", "--unsharded"],
        ["--set", "durable_write"],
        ["--index", "a", "--no-indexes"],
        ["--no-such-option"],
    ],
)
def test_init_explains_wrong_usage(tmp_path: Path, arguments: list[str]) -> None:
    outcome = run("init", tmp_path / "t", *arguments)
    assert outcome.code == exits.REFUSED
    assert "Traceback" not in outcome.err


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bucket", "id:0"],
        ["--bucket", "nope:2"],
        ["--bucket", "text:2"],
        ["--identity", "nope"],
        ["--set", "max_memtable_rows=0"],
        ["--index", "nope"],
    ],
)
def test_init_like_a_file_left_a_table_behind_when_it_was_refused(
    tmp_path: Path, arguments: list[str]
) -> None:
    sample = tmp_path / "sample.jsonl"
    sample.write_text('{"id": 1, "text": "a"}\n')
    for command, *rest in (["init", "--like", sample], ["ingest", sample, "--create"]):
        refused = run(command, tmp_path / "t", *rest, "--key", "id", *arguments)
        assert refused.code == exits.REFUSED
        assert not (tmp_path / "t").exists()


def test_init_left_a_key_behind_when_it_was_refused(tmp_path: Path) -> None:
    uri = str(tmp_path / "t")
    lance.write_dataset(APPEND_ONLY.empty_table(), uri)
    before = lance.dataset(uri).version
    assert run("init", uri, "--key", "id", "--bucket", "id:0").code == exits.REFUSED
    assert lance.dataset(uri).version == before


def test_init_twice_says_that_it_is_done(table: lancewal.Table) -> None:
    outcome = run("init", table.uri)
    assert outcome.code == exits.REFUSED
    assert "initialised already" in outcome.error


# --- status -------------------------------------------------------------------------------


def test_status_shows_what_waits(busy: lancewal.Table) -> None:
    text = ok("status", busy.uri).out
    assert "key id, bucket(id, 2), 2 shards" in text
    assert "10 rows in 1 fragment" in text
    assert "2 SSTables" in text
    assert "20 rows" in text
    assert "2 entries" in text


def test_status_as_json_has_every_lag(busy: lancewal.Table) -> None:
    document = ok("status", busy.uri, "--json").document
    assert document["base"]["rows"] == 10
    assert document["unflushed"]["count"] == 2
    assert document["unflushed"]["bytes"] > 0
    assert document["uncompacted"]["rows"] == 20
    assert [shard["values"] for shard in document["shards"]] == [{"bucket": 0}, {"bucket": 1}]
    assert {shard["status"] for shard in document["shards"]} == {"active"}


@pytest.mark.parametrize("columns", [60, 80, 160])
def test_status_fits_the_terminal(busy: lancewal.Table, columns: int) -> None:
    lines = ok("status", busy.uri, columns=columns).out.splitlines()
    assert max(map(len, lines)) <= columns
    shards = [line for line in lines if line.rstrip().endswith("active")]
    assert len(shards) == 2


@pytest.mark.parametrize("columns", [80, 160])
def test_a_shard_that_status_showed_could_not_be_sealed_by_what_it_showed(
    busy: lancewal.Table, columns: int
) -> None:
    """Below 120 columns there was the sharding value alone; ``seal`` takes the beginning of an id."""
    lines = ok("status", busy.uri, columns=columns).out.splitlines()
    shown = [line.split()[1] for line in lines if line.rstrip().endswith("active")]
    assert len(shown) == 2
    for text in shown:
        assert "sealed" in ok("seal", busy.uri, text).out


def test_status_watch_looks_again(busy: lancewal.Table) -> None:
    text = ok("status", busy.uri, "--watch", "--times", "2", "--every", "0.1").out
    assert "Ctrl-C ends" in text
    assert len(ok("status", busy.uri, "--watch", "--times", "2", "--every", "0.1", "--json").documents) == 2


def test_status_watch_fills_a_screen_and_gives_it_back(tmp_path: Path) -> None:
    """On a real terminal of 24 lines: the most that fits, and what was there before comes back."""
    table = new_table(tmp_path / "t", bucket=("id", 30))
    controller, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    with start("status", table.uri, "--watch", "--every", "0.1", stdin=terminal, stdout=terminal) as process:
        os.close(terminal)
        seen = b""
        while b"Ctrl-C ends" not in seen:
            seen += os.read(controller, 65536)
        process.send_signal(signal.SIGINT)
        while b"\x1b[?1049l" not in seen:
            seen += os.read(controller, 65536)
    os.close(controller)
    assert process.returncode == 0
    assert b"\x1b[?1049h" in seen
    first_screen = seen.partition(b"Ctrl-C ends")[0]
    assert b"shards with less to do" in first_screen
    assert first_screen.count(b"\n") < 24


def test_status_names_indexes_that_lag(tmp_path: Path) -> None:
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, 30)]), str(tmp_path / "t"))
    dataset.create_scalar_index("id", "BTREE")
    lance.write_dataset(pa.Table.from_batches([rows(30, 12)]), str(tmp_path / "t"), mode="append")
    lancewal.initialize(str(tmp_path / "t"), unsharded=True)
    text = ok("status", tmp_path / "t").out
    assert "id_idx" in text
    assert "12 rows" in text
    (index,) = ok("status", tmp_path / "t", "--json").document["indexes"]
    assert (index["kind"], index["rows_covered"], index["rows_behind"]) == ("BTree", 30, 12)


# --- flush, compact, gc, verify -----------------------------------------------------------


def test_flush_then_compact_leaves_nothing_waiting(busy: lancewal.Table) -> None:
    assert "2 WAL entries" in ok("flush", busy.uri).out
    assert "nothing to flush" in ok("flush", busy.uri).out
    document = ok("compact", busy.uri, "--json").document
    assert (document["rows_upserted"], document["generations"]) == (50, 4)
    assert "nothing to compact" in ok("compact", busy.uri).out
    assert lance.dataset(busy.uri).count_rows() == 60


def test_compact_flushes_when_told(busy: lancewal.Table) -> None:
    assert "4 SSTables with 50 rows" in ok("compact", busy.uri, "--flush").out


def test_gc_shows_before_it_deletes(busy: lancewal.Table) -> None:
    ok("compact", busy.uri)
    dry = ok("gc", busy.uri, "--dry-run", "--min-age", "0s", "--json").document
    assert dry["dry_run"]
    assert dry["counts"]["sstables"] == 2
    assert "would delete" in ok("gc", busy.uri, "--dry-run").out
    done = ok("gc", busy.uri, "--min-age", "0s", "--json").document
    assert done["counts"]["sstables"] == 2
    assert busy.count_rows() == 60


def test_gc_refuses_what_is_no_duration(busy: lancewal.Table) -> None:
    outcome = run("gc", busy.uri, "--min-age", "soon")
    assert outcome.code == exits.REFUSED
    assert "30min" in outcome.err


def test_a_duration_beyond_all_bounds_was_called_a_bug(busy: lancewal.Table) -> None:
    outcome = run("gc", busy.uri, "--min-age", "9" * 20 + "d")
    assert outcome.code == exits.REFUSED
    assert "longer than any table" in outcome.err
    ok("gc", busy.uri, "--min-age", "999999999d")


def test_verify_passes_a_sound_table(busy: lancewal.Table) -> None:
    busy.checkpoint("one")
    assert "1 checkpoint in" in " ".join(ok("verify", busy.uri).out.split())
    assert ok("verify", busy.uri, "--quick", "--json").document["ok"]


def test_the_place_of_a_restored_table_is_shown_as_it_is(table: lancewal.Table, tmp_path: Path) -> None:
    """Brackets in it were taken for markup, and not printed."""
    ok("backup", table.uri, tmp_path / "backups")
    restored = ok("restore", tmp_path / "backups", tmp_path / "copy[dim]", columns=300)
    assert str(tmp_path / "copy[dim]") in restored.out


def test_backup_and_restore(busy: lancewal.Table, tmp_path: Path) -> None:
    first = ok("backup", busy.uri, tmp_path / "backups", "--check", "--json").document
    assert (first["damaged"], first["copied_files"]) == ([], first["files"])
    assert "files" in ok("backup", busy.uri, tmp_path / "backups").out
    restored = ok("restore", tmp_path / "backups", tmp_path / "restored", "--backup", first["id"], "--json")
    assert lancewal.open(restored.document["table"]).count_rows() == busy.count_rows()
    again = run("restore", tmp_path / "backups", tmp_path / "restored")
    assert (again.code, "restore to an empty place" in again.error) == (2, True)
    assert run("restore", tmp_path / "nothing", tmp_path / "other").code == 2


def test_verify_finds_damage_and_repairs_what_it_can(busy: lancewal.Table) -> None:
    shard = next(shard for shard in busy.shards() if shard.generations)
    (bloom,) = Path(busy.uri, layout.shard_dir(shard.shard_id)).glob(f"*/{layout.BLOOM_FILTER_NAME}")
    bloom.unlink()
    outcome = run("verify", busy.uri)
    assert outcome.code == exits.PROBLEMS
    assert "sidecar missing" in outcome.out
    assert "--repair" in outcome.out
    assert run("verify", busy.uri, "--json").document["ok"] is False
    assert "all is well" in ok("verify", busy.uri, "--repair").out
