"""What looks after a table: flush, compaction, garbage collection, backup, verification, repair."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID

from lancewal.base import BaseTable
from lancewal.config import ShardWriterConfig
from lancewal.maintenance import (
    BackupReport,
    CompactionPlan,
    CompactionReport,
    Finding,
    GcReport,
    Progress,
    RepairReport,
    Resource,
    Retention,
    VerifyReport,
    back_up,
    collect_garbage,
    compact,
    plan_compaction,
    process_totals,
    repair,
    verify,
)
from lancewal.reader import MaxStaleness, TableReader
from lancewal.service import flush_through_owners
from lancewal.shard import discover_manifests
from lancewal.storage import ObjectStore, both


class MaintainedTable:
    """The part of :class:`lancewal.Table` that keeps it in shape."""

    def __init__(
        self, store: ObjectStore, *, share_store: bool = False, max_staleness: MaxStaleness = None
    ) -> None:
        """``share_store`` has writers use ``store`` as well, whatever their ``fsync`` says."""
        self._store = store
        self._share_store = share_store
        self._reader = TableReader(store, max_staleness=max_staleness)

    @property
    def uri(self) -> str:
        """Where the table lies."""
        return self._store.uri

    def flush(self, config: ShardWriterConfig | None = None, **overrides: Any) -> None:
        """Move all rows from MemTables and WALs to SSTables.

        A shard with a writer in this process flushes through it. The owner of one in another process is
        asked to flush, and waited for; one that cannot, in WAL-only mode, is left alone
        (:class:`ShardOwnedError`). Any other shard that has rows in its WAL is claimed, replayed,
        flushed and let go: a writer on it that nobody knows of (Lance's own) is fenced, and so is one of
        this process in WAL-only mode. Shards without such rows are left alone. Settings as in
        :meth:`writer`, for the shards that are claimed.
        """
        # Damage to any manifest is told before anything is flushed.
        base, manifests = both(
            self._reader.base, lambda: discover_manifests(self._store), at_once=not self._store.is_local
        )
        config = ShardWriterConfig.resolved(config, base.details.writer_config_defaults, overrides)
        flush_through_owners(base, manifests, self._writer_store(base, config), config)

    def plan_compaction(self, shards: Sequence[UUID | str] | None = None) -> CompactionPlan:
        """What :meth:`compact` would do now; can be looked at, stored, and passed to it."""
        return plan_compaction(self._store, shards)

    def compact(
        self,
        shards: Sequence[UUID | str] | None = None,
        *,
        plan: CompactionPlan | None = None,
        optimize_indexes: bool = True,
        compact_files: bool | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> CompactionReport:
        """Bring all flushed generations into the base table, where plain Lance reads them.

        Safe beside live writers, readers, other compactors and direct writes to the base; may
        be killed and repeated at any point. Rows in MemTables and WALs stay there: call
        :meth:`flush` first to include them. Then the base's indexes are brought up to date, unless
        ``optimize_indexes`` is false, and some of its small files are joined where that pays; with
        ``compact_files`` all of them, or none if it is false.
        """

        work = partial(
            compact,
            self._store,
            shards,
            plan=plan,
            optimize_indexes=optimize_indexes,
            compact_files=compact_files,
            progress=progress,
        )
        return process_totals.counted(self.uri, "compaction", work)

    def gc(
        self,
        dry_run: bool = False,
        min_age: timedelta | None = None,
        *,
        retention: Retention | None = None,
        resources: Iterable[Resource | str] | None = None,
        shards: Sequence[UUID | str] | None = None,
    ) -> GcReport:
        """Delete what nobody needs any more: compacted SSTables, covered WAL entries, leftovers.

        ``dry_run`` deletes nothing and reports the same. ``min_age`` is how old garbage must
        be, for all kinds alike (a day by default; WAL entries never less than ten minutes);
        ``retention`` sets it kind by kind. Run it regularly: what has to have an age goes when
        an earlier call has seen it, that long ago, so that no clock that is wrong does harm.
        """

        work = partial(
            collect_garbage,
            self._store,
            retention=retention,
            min_age=min_age,
            resources=resources,
            shards=shards,
            dry_run=dry_run,
        )
        return process_totals.counted(self.uri, "collection", work)

    def backup(
        self, destination: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
    ) -> BackupReport:
        """Copy the table as it is now to ``destination``, beside earlier backups of it.

        Safe beside writers, compaction and garbage collection. What an earlier backup there has already
        is not copied again. Rows that are in memory alone (``durable_write=False``) are not part of
        it. ``storage_options`` are for the destination; :func:`lancewal.restore` makes a table of it.
        """
        return back_up(self._store, ObjectStore.from_uri(destination, storage_options))

    def verify(
        self,
        shards: Sequence[UUID | str] | None = None,
        *,
        deep: bool = True,
        progress: Callable[[UUID], object] | None = None,
    ) -> VerifyReport:
        """Check every invariant of the table on storage; ``report.ok`` says whether all hold.

        ``deep`` reads all rows that are not compacted, the retained WAL and the base's keys.
        """
        return verify(self._store, shards, deep=deep, progress=progress)

    def repair(
        self,
        findings: Sequence[Finding] | None = None,
        *,
        accept_lost_entries: bool = False,
        earlier: str | None = None,
    ) -> RepairReport:
        """Rebuild what can be rebuilt without touching a row: hints, key indexes, bloom filters.

        Where several shards are for one sharding value (:class:`~lancewal.errors.SplitShardError`), all
        but one are taken over from their writers, flushed, compacted and sealed. Where the table is a
        copy, its shards' generations are numbered above the copied markers, which fences their writers.

        ``accept_lost_entries`` also gives up the rows of WAL entries that are missing, so that the
        shard can be read and written again; get the objects back from a backup if you can.
        ``earlier`` decides on rows that shards have from before the table was made anew at its place:
        "keep" has them count as the newest, "drop" takes them out.
        """
        return repair(self._store, findings, accept_lost_entries=accept_lost_entries, earlier=earlier)

    def _writer_store(self, base: BaseTable, config: ShardWriterConfig) -> ObjectStore:
        return self._store if self._share_store else base.writer_store(fsync=config.fsync)
