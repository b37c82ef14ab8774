"""Table: the front door to one Lance table and its write path."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa

from lancewal.base import BaseTable, locate
from lancewal.config import ShardWriterConfig
from lancewal.errors import InvalidInputError
from lancewal.format import MemWalDetails, check_columns
from lancewal.maintenance import (
    BackupReport,
    Check,
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
    examine,
    list_checkpoints,
    plan_compaction,
    read_upkeep_settings,
    repair,
    store_upkeep_settings,
    verify,
)
from lancewal.publish import ChangeFeed
from lancewal.reader import FixedReader, MaxStaleness, TableReader, TableView
from lancewal.service import (
    Owner,
    TakeOver,
    checked_take_over,
    flush_through_owners,
    look_at_owners,
    open_owned,
    presence_at,
    seal_through_owner,
)
from lancewal.shard import (
    Shard,
    ShardManifestStore,
    ShardRouter,
    discover_manifests,
    listed_shards,
    require_shard,
)
from lancewal.status import ShardInfo, TableStatus, shard_infos, table_status
from lancewal.storage import ObjectStore, both, layout, process_totals
from lancewal.upkeep import MOST_COMMITS, TaskOutcome, Upkeep, Upkeeper, UpkeepPlan, UpkeepReport, plan_upkeep
from lancewal.writer import (
    Cast,
    ShardWriter,
    TableWriter,
    open_shard_writer,
    unseal_shard,
    written,
)

#: Upkeep starts a little later, so that it does not delay the first writes.
_FIRST_LOOK_SECONDS = 1.0


class Table(TableView):
    """A Lance table with a streaming write path; get one from :func:`lancewal.open`.

    Every call sees the newest state: rows that a writer of this process has put, and rows that any other
    process has made durable. A table that was opened with ``max_staleness`` may show an older state; without
    it, caches between calls only save work. Thread-safe.

    >>> import tempfile, lancewal
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> table = lancewal.create(uri, [{"id": 1, "text": "a"}], key="id", unsharded=True)
    >>> with table.writer() as writer:
    ...     _ = writer.put([{"id": 2, "text": "b"}, {"id": 3, "text": "c"}])
    ...     table.count_rows(), table.lookup(2)
    (3, {'id': 2, 'text': 'b'})
    >>> table.scan(columns=["text"], filter="id > 1").to_table().to_pylist()
    [{'text': 'b'}, {'text': 'c'}]
    >>> result = table.lookup([3, 9])
    >>> result.found.tolist(), result.table["text"].to_pylist()
    ([True, False], ['c'])
    """

    def __init__(
        self, store: ObjectStore, *, share_store: bool = False, max_staleness: MaxStaleness = None
    ) -> None:
        """With ``share_store`` writers use ``store`` as well, whatever their ``fsync`` says."""
        super().__init__(store, TableReader(store, max_staleness=max_staleness))
        self._share_store = share_store

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str] | lance.LanceDataset,
        storage_options: Mapping[str, str] | None = None,
        *,
        store: ObjectStore | None = None,
        max_staleness: MaxStaleness = None,
    ) -> Table:
        """Open an initialised table; raises :class:`NotInitializedError` for any other.

        ``max_staleness`` is as in :func:`lancewal.open`. ``store`` is for tests that need a faulty one.
        """
        shared = store is not None
        if store is None:
            store = ObjectStore.from_uri(*locate(uri, storage_options))
        table = cls(store, share_store=shared, max_staleness=max_staleness)
        table._reader.base()
        return table

    @property
    def details(self) -> MemWalDetails:
        """The details of the write path that the table stores, read again from storage.

        They are the sharding specs, maintained indexes, writer defaults, the compacted generation of each
        shard, and how far each index has caught up with compaction.
        """
        return self._reader.base().details

    def shards(self) -> list[ShardInfo]:
        """Every shard with its state, sorted by id."""
        return shard_infos(self._store, self._reader.base)

    def router(self) -> ShardRouter:
        """The router, which says which shard a row goes to; refused if shards are chosen by hand."""
        return ShardRouter.of_table(self._reader.base(), self._store)

    def shard_for(self, value: Any = None) -> UUID:
        """The shard for ``value`` of the sharding column; created if it is missing."""
        shard = self.router().shard_for(value)
        shard.create(self._store)
        return shard.shard_id

    def create_shard(self, shard_id: UUID | str | None = None) -> UUID:
        """Create a shard by hand, with a random id unless one is given; an existing shard stays as it is.

        Only for tables without a sharding spec: with a spec, the values of a row decide on its shard.
        """
        specs = self.details.sharding_specs
        if specs:
            raise InvalidInputError(
                "this table has a sharding spec, which decides on the shards; write with table.writer(), "
                "or get the shard of a value with table.shard_for(value)"
            )
        shard = uuid4() if shard_id is None else layout.parse_shard_id(shard_id)
        ShardManifestStore(self._store, shard).initialize_shard()
        return shard

    def seal_shard(self, shard_id: UUID | str) -> None:
        """Make a shard refuse all writers, of lancewal or Lance, until :meth:`unseal_shard`.

        The rows are flushed first, by the owner if it is alive, because nobody can claim a sealed shard to
        flush it. **A writer that is open on the shard is fenced.** The shard is still read and compacted.
        Raises :class:`FencedError` if other writers claim the shard meanwhile, again and again. A shard that
        is already sealed stays as it is.
        """
        seal_through_owner(self._reader.base(), self._store, layout.parse_shard_id(shard_id))

    def unseal_shard(self, shard_id: UUID | str) -> None:
        """Let a sealed shard take writers again; a shard that is not sealed stays as it is.

        Refused if another shard takes the rows of the same sharding value, as after :meth:`repair` of
        two shards for one value: nothing would say which of the two shards a row belongs to.
        """
        unseal_shard(self._reader.base(), self._store, layout.parse_shard_id(shard_id))

    def owners(self) -> list[Owner]:
        """The processes that write to the table, with their shards, from their own records.

        The next writer may take the shards of a process that is ``gone``.
        """
        return look_at_owners(self._store)

    def check_storage(self) -> list[Check]:
        """Test what the storage guarantees, above all put-if-absent: only one of several creators may win.

        Writes some test objects beside the table's own, and removes them.
        """
        return list(examine(self._store))

    def announce(self, address: str | None) -> None:
        """Store the address where this process takes requests in its owner record; ``None`` removes it."""
        presence_at(self.uri).announce(self._store, address)

    def writer(
        self,
        config: ShardWriterConfig | None = None,
        *,
        cast: Cast = "numbers",
        take_over: TakeOver = "when_gone",
        upkeep: bool = False,
        **overrides: Any,
    ) -> TableWriter:
        """A writer that sends every row to its shard.

        ``config`` replaces the table's stored writer defaults. Single settings may be overridden by name, as
        in ``table.writer(durable_write=False)``. The writer takes the columns that the table has now; after
        a column was added, open a new writer.

        ``cast`` says which types the writer takes besides the table's own. ``"numbers"``, the default,
        converts numbers and times if no value changes, and refuses the rows otherwise. ``True`` (or
        ``"exact"``) also takes numbers and times from text. ``"round"`` also rounds floats to the table's
        precision, which Arrow vectors of doubles need, but never to infinity. ``False`` converts nothing.

        ``take_over`` is for shards that another writer owns, in this process or elsewhere. ``"when_gone"``
        claims a shard if its owner has closed it, has died, or has sent no heartbeat for a lease. It waits
        while that is not known yet, and raises :class:`ShardOwnedError` if the owner is alive. ``"now"``
        claims the shard and fences the owner. ``"never"`` takes no shard that has an owner, gone or not.

        With ``upkeep`` a thread keeps the whole table in shape until the writer is closed, as
        :meth:`upkeeper` does: nobody has to flush, compact or collect garbage.
        """
        take_over = checked_take_over(take_over)
        base, shards = both(
            self._reader.base, lambda: listed_shards(self._store), at_once=not self._store.is_local
        )
        config = ShardWriterConfig.resolved(config, base.details.writer_config_defaults, overrides)
        check_columns(base.schema)
        store = self._writer_store(base, config)

        def open_shard(shard: Shard) -> ShardWriter:
            return open_owned(
                store,
                shard.shard_id,
                lambda look, claimed: open_shard_writer(
                    base,
                    shard.shard_id,
                    config,
                    store=store,
                    spec_id=shard.spec_id,
                    look=look,
                    claimed=claimed,
                    cast=cast,
                ),
                look=partial(shard.create, store),
                take_over=take_over,
                lease=config.owner_lease,
            )

        return TableWriter(
            base.schema,
            ShardRouter.of_table(base, self._store, shards),
            open_shard,
            cast=cast,
            storage_version=base.storage_version,
            newest=lambda: self._reader.base().schema,
            max_bytes_in_hand=config.max_unflushed_memtable_bytes,
            is_remote=not store.is_local,
            come_back_after=config.owner_lease.total_seconds() if take_over == "when_gone" else None,
            companion=self.upkeeper() if upkeep else None,
            # Always the newest rows, even if reads may be stale: an update writes whole rows again.
            find=lambda where, columns: self._reader.scan(columns, where, max_staleness=0.0).to_batches(),
        )

    def shard_writer(
        self,
        shard_id: UUID | str,
        config: ShardWriterConfig | None = None,
        *,
        cast: Cast = "numbers",
        take_over: TakeOver = "when_gone",
        **overrides: Any,
    ) -> ShardWriter:
        """The writer of one shard.

        Settings and ``take_over`` are as in :meth:`writer`. In a table without a sharding spec a new id
        creates a new shard. With a spec, the caller must make sure that the rows belong to this shard.
        """
        shard = layout.parse_shard_id(shard_id)
        base = self._reader.base()
        config = ShardWriterConfig.resolved(config, base.details.writer_config_defaults, overrides)
        check_columns(base.schema)
        store = self._writer_store(base, config)
        if base.details.sharding_specs:
            require_shard(self._store, base.details, base.schema, shard)
        return open_owned(
            store,
            shard,
            lambda look, claimed: open_shard_writer(
                base, shard, config, store=store, look=look, claimed=claimed, cast=cast
            ),
            look=ShardManifestStore.read_to_claim,
            take_over=checked_take_over(take_over),
            lease=config.owner_lease,
        )

    def feed(self) -> ChangeFeed:
        """The table's change feed, for callers that manage their own cursors; :meth:`changes` is simpler."""
        return ChangeFeed(self._store, self._reader.base().schema)

    def changes(
        self,
        start: Mapping[UUID, int] | Mapping[str, int] | None = None,
        *,
        follow: bool = False,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[tuple[pa.RecordBatch, dict[UUID, int]]]:
        """Every row of the table's logs, in the order of each log, with the columns of the change feed.

        Reads from ``start``, or the earliest retained position, up to now. Each batch comes with the cursor
        of the end: pass it as ``start`` later, but only after all batches were processed.

        With ``follow``, reads from ``start``, or now, until ``stop()`` is true. Each batch then comes with a
        cursor that is valid at once. It lies before the batches of the same shard and poll, so after a
        restart some of them may come again, with the same ``_shard_id`` and ``_wal_position``.
        """
        feed = self.feed()
        return feed.follow(start, stop=stop) if follow else feed.up_to_now(start)

    def status(self) -> TableStatus:
        """What waits for a flush, for compaction and for an index, shard by shard."""
        return table_status(self._store, self._reader.base)

    def set_upkeep(
        self, settings: UpkeepSettings | Mapping[str, Any] | None = None, **changes: Any
    ) -> UpkeepSettings:
        """Store the table's upkeep settings: ``settings``, or the present ones, with ``changes`` applied.

        Upkeep uses them from its next look at the table on. Returns the stored settings. They are stored as a
        whole: of two calls at the same time only the changes of the later one stay.

        .. code-block:: python

            table.set_upkeep(max_sstables=8, garbage_age=timedelta(hours=6))
        """
        base = read_upkeep_settings(self._store) if settings is None else UpkeepSettings.of(settings)
        wanted = base.changed(changes)
        store_upkeep_settings(self._store, wanted)
        return wanted

    def plan_upkeep(self, settings: UpkeepSettings | Mapping[str, Any] | None = None) -> UpkeepPlan:
        """The work that is due to keep the table in shape, with reasons and in order. Changes nothing.

        Uses the table's settings unless others are given. The plan is empty if the table is in shape.
        """
        return plan_upkeep(self.status(), settings)

    def upkeep(self, settings: UpkeepSettings | Mapping[str, Any] | None = None) -> UpkeepReport:
        """Do the work that :meth:`plan_upkeep` says is due.

        This is one round, with each kind of work once. It is safe beside writers, readers and upkeep
        elsewhere; it may be killed and repeated at any point. It skips work that another process is doing. A
        shard that fails does not stop the others: the report has its error.

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
        settings: UpkeepSettings | Mapping[str, Any] | None = None,
        *,
        report: Callable[[TaskOutcome], object] = lambda outcome: None,
    ) -> Upkeeper:
        """Keep the table in shape with a thread of this process, until the returned object is closed.

        Uses the table's settings, which it reads again in every round, unless others are given. ``report`` is
        called with the outcome of every task. ``Table.writer(upkeep=True)`` and ``lancewal serve`` do the
        same for tables that they write.

        .. code-block:: python

            with table.upkeeper():
                serve_requests()
        """

        def flushes() -> int:
            """How often writers of this process have flushed; each flush adds an SSTable."""
            uri = self.uri.rstrip("/")
            return sum(stats.memtable_flush_count for (at, _), stats in written().items() if at == uri)

        keeper = Upkeeper(self._upkeep(MOST_COMMITS), changes=flushes, report=report, settings=settings)
        return keeper.start(after=_FIRST_LOOK_SECONDS)

    def _upkeep(self, most_commits: int | None = None) -> Upkeep:
        return Upkeep.here(
            self._store, self._reader.base, writer_store=self._writer_store, most_commits=most_commits
        )

    def flush(
        self, config: ShardWriterConfig | None = None, *, take_over: TakeOver = "when_gone", **overrides: Any
    ) -> None:
        """Move all rows from MemTables and WALs to SSTables.

        A shard with a writer in this process flushes through that writer. If another process owns the shard,
        this call asks the owner to flush, and waits for it. An owner in WAL-only mode cannot flush and is
        left alone (:class:`ShardOwnedError`). Any other shard that has rows in its WAL is claimed, replayed,
        flushed and released. This fences a writer without an owner record (Lance's own), and a writer of
        this process in WAL-only mode. Shards without rows in the WAL are left alone. ``take_over="now"``
        also claims shards of other processes; ``"never"`` refuses them. Settings are as in :meth:`writer`.
        """
        # Read all manifests first, so that damage to one is reported before anything is flushed.
        base, manifests = both(
            self._reader.base, lambda: discover_manifests(self._store), at_once=not self._store.is_local
        )
        config = ShardWriterConfig.resolved(config, base.details.writer_config_defaults, overrides)
        flush_through_owners(base, manifests, self._writer_store(base, config), config, take_over)

    def plan_compaction(self, shards: Sequence[UUID | str] | None = None) -> CompactionPlan:
        """What :meth:`compact` would do now; the plan can be inspected, stored, and passed to it."""
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
        """Merge all flushed generations into the base table, where plain Lance reads them.

        Safe beside live writers, readers, other compactors and direct writes to the base; may
        be killed and repeated at any point. Rows in MemTables and WALs stay there: call
        :meth:`flush` first to include them. Afterwards the base's indexes are brought up to date, unless
        ``optimize_indexes`` is false. Small files of the base are joined if that pays; with ``compact_files``
        true all of them are joined, with false none.
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
        be, the same for all kinds (a day by default; WAL entries never less than ten minutes);
        ``retention`` sets it for each kind. Run it regularly: garbage that needs an age is deleted only if
        an earlier call saw it that long ago, so that a wrong clock does no harm.
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
        """Keep the present state of the table under a name, for :meth:`at`; copies no row.

        The checkpoint has all rows that are durable now, of every shard at one moment. The files that it
        needs survive flushes, compaction, :meth:`gc` and Lance's ``cleanup_old_versions`` (pass
        ``error_if_tagged_old_versions=False`` to the latter). They stay until :meth:`drop_checkpoint`, or
        until a garbage collection after ``keep``. Safe beside all of these. Refuses a name that is taken.

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
        """Drop a checkpoint; the next garbage collections delete what only it needed."""
        drop_checkpoint(self._store, name)

    def at(self, name: str) -> TableView:
        """The table as of a checkpoint, to scan, look up and search."""
        return TableView(self._store, FixedReader(self._store, checkpoint_state(self._store, name), name))

    def backup(
        self, destination: str | os.PathLike[str], storage_options: Mapping[str, str] | None = None
    ) -> BackupReport:
        """Copy the present state of the table to ``destination``, beside earlier backups of it.

        Safe beside writers, compaction and garbage collection. Files that an earlier backup there already
        has are not copied again. Rows that are only in memory (``durable_write=False``) are not part of the
        backup. ``storage_options`` are for the destination. :func:`lancewal.restore` restores a backup.
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

        ``deep`` also reads all rows that are not compacted, the retained WAL and the base's keys.
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

        If several shards are for one sharding value (:class:`~lancewal.errors.SplitShardError`), repair
        keeps one of them; it takes the others over from their writers, flushes, compacts and seals them. If
        the table is a copy, repair numbers its shards' generations above the copied markers, which fences
        their writers.

        ``accept_lost_entries`` also gives up the rows of WAL entries that are missing, so that the
        shard can be read and written again; get the objects back from a backup if you can.
        ``earlier`` decides on rows of shards that are older than the table, because the table was created
        again at the same place: "keep" treats them as the newest rows, "drop" removes them.
        """
        return repair(self._store, findings, accept_lost_entries=accept_lost_entries, earlier=earlier)

    def _writer_store(self, base: BaseTable, config: ShardWriterConfig) -> ObjectStore:
        return self._store if self._share_store else base.writer_store(fsync=config.fsync)


def open_table(
    uri: str | os.PathLike[str] | lance.LanceDataset,
    storage_options: Mapping[str, str] | None = None,
    *,
    max_staleness: MaxStaleness = None,
) -> Table:
    """Open a table that :func:`lancewal.initialize` (or Lance itself) has prepared.

    ``storage_options`` are those of Lance. A LanceDataset brings its own; its version does
    not matter, because reads always see the newest version.

    With ``max_staleness`` (seconds, or a timedelta) scans, counts, lookups and searches may show a state
    that was read at most that long ago, which saves requests to storage. Rows of writers that are open in
    this process are still visible at once, and reads of this Table never go backwards. Keep it well below
    the ``min_age`` of garbage collection.

    >>> import tempfile, lance, lancewal, pyarrow as pa
    >>> uri = tempfile.mkdtemp() + "/table"
    >>> _ = lance.write_dataset(pa.table({"id": [1, 2]}), uri)
    >>> _ = lancewal.initialize(uri, unsharded=True)
    >>> lancewal.open(uri, max_staleness=5).count_rows()
    2
    """
    return Table.open(uri, storage_options, max_staleness=max_staleness)
