"""How deep maintenance reaches: many shards cost it hardly more round trips than one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.distant import distant_store, measured_depth
from lancewal.config import ShardWriterConfig
from lancewal.maintenance import collect_garbage, verify
from lancewal.maintenance.commits import open_base
from lancewal.shard import discover_manifests
from lancewal.status import table_status
from lancewal.storage import ObjectStore
from lancewal.writer import flush_shards
from tests.tables import rows, wal_table

SHARDS = 64


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """One shard and many, each with an SSTable and rows in its log that nobody flushed."""
    where = tmp_path_factory.mktemp("depth")
    for shards in (1, SHARDS):
        table = wal_table(where / str(shards), bucket=("id", shards))
        with table.writer() as writer:
            writer.put(rows(0, 8 * shards))
        # Without MemTables rows stay in the log, as after a crash.
        with table.writer(enable_memtable=False) as writer:
            writer.put(rows(1000, 8 * shards))
    return {shards: where / str(shards) for shards in (1, SHARDS)}


def gc(store: ObjectStore) -> None:
    assert collect_garbage(store).collected == []


def check(store: ObjectStore) -> None:
    report = verify(store)
    assert report.findings == []
    assert report.checked["rows"] == report.checked["SSTables"] * 8


def status(store: ObjectStore) -> None:
    found = table_status(store, lambda: open_base(store))
    assert found.unflushed.count == len(found.shards)
    assert found.uncompacted.rows == 8 * len(found.shards)


def flush(store: ObjectStore) -> None:
    base = open_base(store)
    config = ShardWriterConfig.from_defaults(base.details.writer_config_defaults)
    flush_shards(base, discover_manifests(store), store, config)


@pytest.mark.parametrize(
    ("operation", "at_one"),
    [(gc, 6), (check, 12), (status, 5), (flush, 18)],
    ids=["gc", "verify", "status", "flush"],
)
def test_many_shards_are_hardly_deeper_than_one(
    tables: dict[int, Path], tmp_path: Path, operation: Callable[[ObjectStore], None], at_one: int
) -> None:
    """What Lance asks for by itself is not counted here."""
    depths = {}
    for shards, source in tables.items():
        store, _ = distant_store(shutil.copytree(source, tmp_path / str(shards)))
        with measured_depth() as depth:
            operation(store)
            depths[shards] = depth()
    assert depths[1] <= at_one
    assert depths[SHARDS] <= 3 * depths[1]
    if operation is flush:
        assert all(manifest.sstables[1:] for manifest in discover_manifests(store))
