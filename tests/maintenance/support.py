"""A small table with one shard, whose generations tests flush one by one."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa

from lancewal.base.table import BaseTable
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance import (
    CompactionReport,
    GcReport,
    Pack,
    Retention,
    ShardPlan,
    VerifyReport,
    collect_garbage,
    compact,
    execute_pack,
    plan_compaction,
    verify,
)
from lancewal.maintenance.reports import ShardReport
from lancewal.publish.staging import Staged, Stager
from lancewal.reader.table_reader import TableReader
from lancewal.shard.log import retained_positions
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.routing import Shard, ShardRouter
from lancewal.storage import ObjectStore, layout
from lancewal.storage.clock import HostClock, boot_time, host_clock
from lancewal.writer import ShardWriter
from lancewal.writer.intake import Intake
from tests.tables import KEYED, new_table, open_writer, rows

LATER = timedelta(days=365)
#: Ages that no real collection may have; tests of what is left at once use them.
NOTHING_KEPT = Retention(*[timedelta(0)] * 6, allow_unsafe=True)


def execute_shard(plan: ShardPlan, *where: Mapping[str, str], **how: Any) -> ShardReport:
    """Carry out one shard's part of a plan; raises if it fails."""
    done = execute_pack(Pack((plan,)), *where, **how)
    for error in done.failed.values():
        raise error
    return done.shards[plan.shard_id]


class Site:
    """One table, one shard, and shorthands for what maintenance does to them."""

    def __init__(
        self,
        where: Path | str,
        schema: pa.Schema = KEYED,
        data: pa.Table | None = None,
        store: ObjectStore | None = None,
        **mem_wal: Any,
    ) -> None:
        options = dict(store.storage_options) if store is not None else None
        new_table(where, schema, data, options, **mem_wal)
        self.store = store or ObjectStore.from_uri(str(where), fsync=False)
        self.shard_id = uuid4()

    @classmethod
    def of(cls, dataset: lance.LanceDataset) -> Site:
        """A site on a table that exists."""
        dataset.initialize_mem_wal(unsharded=True)
        site = cls.__new__(cls)
        site.store = ObjectStore.from_uri(dataset.uri, fsync=False)
        site.shard_id = uuid4()
        return site

    @property
    def base(self) -> BaseTable:
        return BaseTable.open(self.store.uri, self.store.storage_options, store=self.store)

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.store.uri, storage_options=dict(self.store.storage_options) or None)

    @property
    def manifest(self) -> ShardManifest:
        return ShardManifestStore(self.store, self.shard_id).require_latest()

    @property
    def marker(self) -> int:
        return self.base.details.compacted.get(self.shard_id, 0)

    def writer(self, shard_id: UUID | None = None, **settings: Any) -> ShardWriter:
        return open_writer(self.base, shard_id or self.shard_id, store=self.store, **settings)

    def flush(self, *operations: pa.RecordBatch | pa.Table | list[Any], shard_id: UUID | None = None) -> None:
        """One generation: batches are put, lists of keys deleted, in this order."""
        writer = self.writer(shard_id)
        apply(writer, *operations)
        writer.close()

    def compact(self, **how: Any) -> CompactionReport:
        return compact(self.store, **how)

    def merge(self) -> None:
        """Compaction that dies before its end: what it has compacted is still listed."""
        for shard in plan_compaction(self.store).shards:
            execute_shard(shard, store=self.store)

    def look(self) -> GcReport:
        """A collection that only sees what there is: it keeps everything for ever."""
        return look(self.store)

    def collect(self, **how: Any) -> GcReport:
        """Everything that may go, as if a year had passed since a collection saw it.

        With ``now`` it is that time on all clocks, and only what :meth:`look` or an
        earlier collection saw may go; with ``None`` it is the time that it is.
        """
        if "now" not in how:
            return collect_later(self.store, **how)
        if how["now"] is not None:
            how.setdefault("clock", clock_at(how["now"]))
        return collect_garbage(self.store, **how)

    def verify(self, **how: Any) -> VerifyReport:
        return verify(self.store, **how)

    def merged(self, value: str = "name") -> list[tuple[Any, Any]]:
        """All rows through the reader: id and one more column, sorted."""
        return pairs(TableReader(self.store).scan().to_table(), value)

    def plain(self, value: str = "name") -> list[tuple[Any, Any]]:
        """All rows of the base table as plain Lance shows them."""
        return pairs(self.dataset.to_table(), value)


def three_generations(where: Path) -> Site:
    site = Site(where, data=pa.Table.from_batches([rows(0, 5)]))
    for generation in range(3):
        site.flush(rows(10 * generation, 12, prefix=f"g{generation}"))
    return site


def look(store: ObjectStore) -> GcReport:
    return collect_garbage(store, min_age=100 * LATER)


def collect_later(store: ObjectStore, **how: Any) -> GcReport:
    """A collection a year after one that saw everything which is there now."""
    look(store)
    later = datetime.now(UTC) + LATER
    return collect_garbage(store, now=later, clock=clock_at(later), **how)


def clock_at(now: datetime) -> HostClock:
    """This machine's clock at another time."""
    ahead = (now - datetime.now(UTC)).total_seconds()
    return HostClock(host_clock().name, lambda: boot_time() + ahead)


def directories(site: Site) -> list[int]:
    """The numbers in the names of the SSTables that exist."""
    names = site.store.list_directories(layout.shard_dir(site.shard_id))
    return sorted(n for n in map(layout.parse_sstable_name, names) if n is not None)


def positions(site: Site) -> list[int]:
    return retained_positions(site.store, site.shard_id)


def versions(site: Site) -> list[int]:
    names = (info.path.rsplit("/", 1)[-1] for info in site.store.list(layout.manifest_dir(site.shard_id)))
    return sorted(v for v in map(layout.parse_manifest_name, names) if v is not None)


def age(site: Site, path: str, by: timedelta) -> None:
    """Make a local file, or all below a directory, look older than it is."""
    root = Path(site.store.uri) / path
    then = time.time() - by.total_seconds()
    for each in [root, *root.rglob("*")] if root.is_dir() else [root]:
        os.utime(each, (then, then))


def stage(site: Site, batch: pa.RecordBatch) -> list[Staged]:
    base = site.base
    stager = Stager(base, site.store, ShardRouter.for_table(base.details, base.schema))
    stager.add(Intake(base.schema).upserts(batch).batches[0])
    staged = stager.finish()
    # The router's own shard is another one; the site's has more to collect.
    here = layout.sstable_dir(site.shard_id, staged[0].entry.path)
    source = layout.sstable_dir(staged[0].shard.shard_id, staged[0].entry.path)
    (Path(site.store.uri) / source).rename(Path(site.store.uri) / here)
    return [replace(staged[0], shard=Shard(site.shard_id, 0, ()))]


def apply(writer: ShardWriter, *operations: pa.RecordBatch | pa.Table | list[Any]) -> None:
    for operation in operations:
        if isinstance(operation, list):
            writer.delete(operation)
        else:
            writer.put(operation)


def pairs(table: pa.Table, value: str = "name") -> list[tuple[Any, Any]]:
    return sorted(zip(table["id"].to_pylist(), table[value].to_pylist(), strict=True))


def named(ids: range | list[int], prefix: str) -> list[tuple[int, str]]:
    """What :func:`tests.tables.rows` gives for these ids."""
    return [(i, f"{prefix}_{i}") for i in ids]
