"""What looks after a table: flush, compaction, collection, checkpoints, backup, verification, repair."""

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
    Checkpoint,
    CompactionPlan,
    CompactionReport,
    Finding,
    GcReport,
    Progress,
    RepairReport,
    Resource,
    Retention,
    UpkeepSettings,
    VerifyReport,
    back_up,
    checkpoint_state,
    collect_garbage,
    compact,
    create_checkpoint,
    drop_checkpoint,
    list_checkpoints,
    plan_compaction,
    process_totals,
    read_upkeep_settings,
    repair,
    store_upkeep_settings,
    verify,
)
from lancewal.reader import FixedReader, MaxStaleness, TableReader, TableView
from lancewal.service import flush_through_owners
from lancewal.shard import discover_manifests
from lancewal.status import TableStatus, table_status
from lancewal.storage import ObjectStore, both
from lancewal.upkeep.means import Here
from lancewal.upkeep.plan import UpkeepPlan, plan_upkeep
from lancewal.upkeep.rounds import TaskOutcome, Upkeep, UpkeepReport
from lancewal.upkeep.upkeeper import MOST_COMMITS, Upkeeper
from lancewal.writer import written

#: Not at once: whoever opens a writer wants to write.
_FIRST_LOOK_SECONDS = 1.0


class MaintainedTable(TableView):
    """The part of :class:`lancewal.Table` that keeps it in shape."""

    def __init__(
        self, store: ObjectStore, *, share_store: bool = False, max_staleness: MaxStaleness = None
    ) -> None:
        """``share_store`` has writers use ``store`` as well, whatever their ``fsync`` says."""
        super().__init__(store, TableReader(store, max_staleness=max_staleness))
        self._share_store = share_store

    def status(self) -> TableStatus:
        """What waits for a flush, for compaction and for an index, shard by shard."""
        return table_status(self._store, self._reader.base)

    def set_upkeep(self, settings: UpkeepSettings | None = None, **changes: Any) -> UpkeepSettings:
        """Store what the table is kept within: ``settings``, or those it has with some of them changed.

        Whoever keeps the table in shape goes by them from its next look on. Returns what was stored.

        .. code-block:: python

            table.set_upkeep(max_sstables=8, garbage_age=timedelta(hours=6))
        """
        base = read_upkeep_settings(self._store) if settings is None else UpkeepSettings.of(settings)
        wanted = base.changed(changes)
        store_upkeep_settings(self._store, wanted)
        return wanted

    def plan_upkeep(self, settings: UpkeepSettings | None = None) -> UpkeepPlan:
        """What is due to keep the table in shape, why, and in which order. Changes nothing.

        By its own settings, or by others. Empty where the table is in shape.
        """
        return plan_upkeep(self.status(), settings)

    def upkeep(self, settings: UpkeepSettings | None = None) -> UpkeepReport:
        """Do what is due, as :meth:`plan_upkeep` tells it.

        One round, each kind of work once. Safe beside writers, readers and upkeep elsewhere; may be killed
        and repeated at any point. What another process is at is left to it. A shard that fails does not stop
        the others: the report has its error.

        >>> import tempfile, lance, lancewal, pyarrow as pa
        >>> uri = tempfile.mkdtemp() + "/table"
        >>> _ = lance.write_dataset(pa.schema([("id", pa.int64())]).empty_table(), uri)
        >>> table = lancewal.initialize(uri, unsharded=True, upkeep=lancewal.UpkeepSettings(max_sstables=1))
        >>> for number in range(3):
        ...     with table.writer() as writer:
        ...         _ = writer.put(pa.table({"id": [number]}))
        >>> [str(task.work) for task in table.plan_upkeep()]
        ['compact', 'collect']
        >>> table.upkeep().ok, lance.dataset(uri).count_rows()
        (True, 3)
        """
        return self._upkeep().round(settings)

    def upkeeper(
        self,
        settings: UpkeepSettings | None = None,
        *,
        report: Callable[[TaskOutcome], object] = lambda outcome: None,
    ) -> Upkeeper:
        """Keep the table in shape from a thread of this process, until what this returns is closed.

        By the table's settings, which are read with every look, or by others. ``report`` is told of every
        task. ``Table.writer(upkeep=True)`` and ``lancewal serve`` do the same for tables that they write.

        .. code-block:: python

            with table.upkeeper():
                serve_requests()
        """

        def flushes() -> int:
            """How often writers of this process have flushed: each time there is an SSTable more."""
            uri = self.uri.rstrip("/")
            return sum(stats.memtable_flush_count for (at, _), stats in written().items() if at == uri)

        keeper = Upkeeper(self._upkeep(MOST_COMMITS), changes=flushes, report=report, settings=settings)
        return keeper.start(after=_FIRST_LOOK_SECONDS)

    def _upkeep(self, most_commits: int | None = None) -> Upkeep:
        read_base = self._reader.base
        means = Here(self._store, read_base, writer_store=self._writer_store, most_commits=most_commits)
        return Upkeep(self._store, read_base, means)

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
        return process_totals.counted(self._store.uri, "compaction", work)

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
        return process_totals.counted(self._store.uri, "collection", work)

    def checkpoint(self, name: str, *, keep: timedelta | None = None) -> Checkpoint:
        """Keep the table as it is now under a name, for :meth:`at`; copies no row.

        All rows that are durable now are in it, of every shard at one moment. What it needs stays through
        flushes, compaction, :meth:`gc` and Lance's ``cleanup_old_versions`` (pass that one
        ``error_if_tagged_old_versions=False``), until :meth:`drop_checkpoint`, or until a collection
        after ``keep``. Safe beside all of them. Refuses a name that is taken.

        >>> import tempfile, lance, lancewal, pyarrow as pa
        >>> key = pa.field("id", pa.int64(), False, {"lance-schema:unenforced-primary-key": "true"})
        >>> uri = tempfile.mkdtemp() + "/table"
        >>> _ = lance.write_dataset(pa.schema([key]).empty_table(), uri)
        >>> table = lancewal.initialize(uri, unsharded=True)
        >>> with table.writer() as writer:
        ...     _ = writer.put(pa.table({"id": [1, 2]}))
        ...     _ = table.checkpoint("training")
        ...     _ = writer.delete(1)
        >>> table.count_rows(), table.at("training").count_rows()
        (1, 2)
        >>> [each.name for each in table.checkpoints()]
        ['training']
        >>> table.drop_checkpoint("training")
        """
        return create_checkpoint(self._store, name, keep=keep)

    def checkpoints(self) -> list[Checkpoint]:
        """All checkpoints, oldest first."""
        return list_checkpoints(self._store)

    def drop_checkpoint(self, name: str) -> None:
        """Let go of a checkpoint; the next garbage collections delete what only it needed."""
        drop_checkpoint(self._store, name)

    def at(self, name: str) -> TableView:
        """The rows and columns of a checkpoint, to scan, look up and search as those of the table."""
        return TableView(self._store, FixedReader(self._store, checkpoint_state(self._store, name), name))

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
