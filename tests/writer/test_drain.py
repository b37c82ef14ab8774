"""Logs are flushed together while they are small, and one at a time when they are not."""

from __future__ import annotations

import threading
from pathlib import Path
from uuid import UUID

import lance
import pytest

import lancewal
from lancewal.shard.discovery import discover_shards
from lancewal.storage import ObjectStore, layout
from lancewal.writer.drain import DrainBudget, unflushed_bytes
from tests.patience import PATIENCE
from tests.tables import KEYED, fast, rows


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    """Four shards with one entry each."""
    uri = str(tmp_path / "table")
    lance.write_dataset(KEYED.empty_table(), uri)
    table = lancewal.initialize(uri, bucket=("id", 4), writer_defaults=fast())
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 100))
    return ObjectStore.from_uri(uri, fsync=False)


def test_what_is_not_flushed_is_measured(store: ObjectStore) -> None:
    shards = discover_shards(store)
    sizes = [unflushed_bytes(store, shard) for shard in shards]
    assert all(100 < size < 100_000 for size in sizes)
    table = lancewal.open(store.uri)
    table.flush()
    assert all(unflushed_bytes(store, shard) < size for shard, size in zip(shards, sizes, strict=True))
    assert unflushed_bytes(store, UUID(int=1)) == 0, "a shard that is not there yet"
    with table.writer(enable_memtable=False) as writer:
        for _ in range(20):
            writer.put(rows(0, 100))
    entries = {shard: [info.size for info in store.list(layout.wal_dir(shard))][-20:] for shard in shards}
    assert all(unflushed_bytes(store, shard) >= 20 * min(entries[shard]) for shard in shards)


@pytest.mark.parametrize(("max_bytes", "together"), [(1 << 20, 4), (1, 1)])
def test_as_many_logs_are_drained_together_as_fit(store: ObjectStore, max_bytes: int, together: int) -> None:
    budget = DrainBudget(store, max_bytes)
    most = inside = 0
    lock, all_are_in = threading.Lock(), threading.Barrier(together)

    def drain(shard: UUID) -> None:
        nonlocal most, inside
        with budget.for_log_of(shard):
            with lock:
                inside += 1
                most = max(most, inside)
            all_are_in.wait(PATIENCE)
            with lock:
                inside -= 1

    threads = [threading.Thread(target=drain, args=(shard,)) for shard in discover_shards(store)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == together


def test_a_flush_that_fails_gives_its_bytes_back(store: ObjectStore) -> None:
    budget = DrainBudget(store, 1)
    for shard in discover_shards(store):
        with pytest.raises(OSError, match="full"), budget.for_log_of(shard):
            raise OSError("full")
