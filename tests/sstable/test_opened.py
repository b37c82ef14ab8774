"""What a process keeps open of SSTables, and that it lets go of those which are gone."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import lance
import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.sstable import opened
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from tests.patience import PATIENCE
from tests.tables import KEY

SCHEMA = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("text", pa.string())])
#: Enough that Lance does not read the files whole and close them.
ROWS = 20_000

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="tells open files by /proc")


def data(start: int) -> pa.Table:
    ids = np.arange(start, start + ROWS)
    return pa.table({"id": ids, "text": [f"word{i % 100} and {i}" for i in ids]}, schema=SCHEMA)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    """A base table with a text index, which SSTables have too."""
    dataset = lance.write_dataset(data(10 * ROWS), tmp_path / "table")
    dataset.create_scalar_index("text", "INVERTED")
    return lancewal.initialize(str(tmp_path / "table"), unsharded=True)


def flush(table: Table, *starts: int) -> None:
    for start in starts:
        with table.writer(fsync=False, stats_log_interval=None) as writer:
            writer.put(data(start))


def read(table: Table) -> None:
    """Every way that opens files: rows, keys, and an index."""
    assert table.scan(limit=1).to_table().num_rows == 1
    assert table.lookup([1, ROWS + 1]).found.all()
    assert table.full_text_search("text", "word5", k=3).num_rows == 3


def open_files(table: Table, *, deleted: bool) -> list[str]:
    """The files of SSTables that this process has open."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(f"{table.uri}/{layout.MEM_WAL_DIR}") and target.endswith("(deleted)") == deleted:
            found.append(target)
    return found


def still_open(table: Table) -> list[str]:
    """The deleted files that stay open; Lance closes those that it lets go in threads of its own."""
    deadline = time.monotonic() + PATIENCE
    while (found := open_files(table, deleted=True)) and time.monotonic() < deadline:
        # What lies in a circle of references goes with the next collection, whenever that is.
        gc.collect()
        time.sleep(0.01)
    return found


def collect_elsewhere(table: Table) -> None:
    code = (
        "import sys, datetime, lancewal; table = lancewal.open(sys.argv[1]); "
        "table.compact(optimize_indexes=True); "
        "assert table.gc(min_age=datetime.timedelta(0)).counts()['sstables']"
    )
    subprocess.run([sys.executable, "-c", code, table.uri], check=True, capture_output=True)


def test_deleted_files_stayed_open_in_a_reader_after_another_process_collected_them(table: Table) -> None:
    flush(table, 0, ROWS)
    reader = lancewal.open(table.uri)
    read(reader)
    assert open_files(table, deleted=False)
    collect_elsewhere(table)
    assert open_files(table, deleted=True)
    read(reader)
    assert still_open(table) == []


def test_and_in_a_reader_that_is_opened_for_each_request(table: Table) -> None:
    flush(table, 0, ROWS)
    read(lancewal.open(table.uri))
    collect_elsewhere(table)
    read(lancewal.open(table.uri))
    assert still_open(table) == []


def test_a_collection_here_closes_them_also_in_tables_that_nobody_uses(table: Table) -> None:
    flush(table, 0, ROWS)
    idle = lancewal.open(table.uri)
    read(idle)
    assert open_files(table, deleted=False)
    table.compact(optimize_indexes=True)
    assert table.gc(min_age=timedelta(0)).counts()["sstables"] == 2
    assert still_open(table) == []
    read(idle)


def test_deleted_files_stayed_open_while_a_reader_had_an_sstable_beyond_the_limit(
    table: Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the limit pushed out was not among those that were asked to let Lance's session go."""
    lance.write_dataset(data(10 * ROWS), tmp_path / "other")
    other = lancewal.initialize(str(tmp_path / "other"), unsharded=True)
    flush(other, 0)
    reader = lancewal.open(other.uri)
    assert reader.lookup([1]).found.all()
    monkeypatch.setattr(opened, "_MAX_OPEN", 2)
    flush(table, 0, ROWS)
    read(table)
    assert open_files(table, deleted=False)
    table.compact(optimize_indexes=True)
    assert table.gc(min_age=timedelta(0)).counts()["sstables"] == 2
    assert still_open(table) == []
    assert reader.lookup([1]).found.all()


def test_what_is_still_listed_is_read_on(table: Table) -> None:
    """Lance's session is a new one then; whoever has an SSTable of the old one goes on."""
    flush(table, 0, ROWS)
    reader = lancewal.open(table.uri)
    read(reader)
    plan = table.plan_compaction()
    flush(table, 2 * ROWS)
    read(reader)
    table.compact(plan=plan, optimize_indexes=True)
    assert table.gc(min_age=timedelta(0)).counts()["sstables"] == 2
    read(reader)
    assert reader.lookup([2 * ROWS + 7]).table["text"].to_pylist() == [f"word7 and {2 * ROWS + 7}"]
    assert reader.count_rows() == 4 * ROWS
    assert still_open(table) == []


def test_a_scan_under_way_keeps_what_it_has(table: Table) -> None:
    flush(table, 0, ROWS)
    batches = iter(lancewal.open(table.uri).scan().to_batches())
    first = next(batches)
    table.compact()
    read(lancewal.open(table.uri))
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 3 * ROWS


def test_sstables_of_other_tables_and_shards_stay_open(tmp_path: Path) -> None:
    store = ObjectStore.from_uri(tmp_path / "table", fsync=False)
    other = ObjectStore.from_uri(tmp_path / "table-2", fsync=False)
    shard, neighbour = UUID(int=1), UUID(int=2)
    kept = [
        (store, layout.sstable_dir(shard, "00000000_gen_2")),
        (store, layout.sstable_dir(neighbour, "00000000_gen_1")),
        (other, layout.sstable_dir(shard, "00000000_gen_1")),
    ]
    gone = store, layout.sstable_dir(shard, "00000000_gen_1")
    before = {where: opened.open_sstable(*where) for where in [*kept, gone]}
    opened.keep_sstables(store, shard, {"00000000_gen_2"})
    assert [opened.open_sstable(*where) is before[where] for where in [*kept, gone]] == [True] * 3 + [False]
