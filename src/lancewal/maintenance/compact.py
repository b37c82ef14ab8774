"""Compaction: merges flushed generations into the base table, many shards in one commit.

Compaction claims no shard and fences no writer. It reads manifests and SSTables, and commits to
the base table. It may run beside writers, readers, other compactors and direct writes to the
table. It may be killed at any point, and may be run again.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from uuid import UUID

import lance

from lancewal.base import BaseTable, open_base, store_column_history, tagged_versions
from lancewal.errors import LanceWalError, PartialWriteError
from lancewal.format import ShardManifest
from lancewal.maintenance.append_only import AppendOnlyCompaction, mark_pending, remove_tags
from lancewal.maintenance.checkpoints import NeededFiles
from lancewal.maintenance.garbage import ShardGarbage, prune_manifest_entries
from lancewal.maintenance.keyed import KeyedCompaction
from lancewal.maintenance.needs import Looks, Needs, Retention, StoredLooks
from lancewal.maintenance.plan import DEFAULT_COMMIT_BYTES, CompactionPlan, Pack, planned
from lancewal.maintenance.reports import (
    PACK_SUMS,
    CompactionReport,
    GcReport,
    PackReport,
    ProgressCallback,
    ShardReport,
)
from lancewal.maintenance.tidy import open_indexes, optimize_base, tidy
from lancewal.publish import Unsettled
from lancewal.shard import ShardManifestStore, discover_manifests, read_manifests, shard_files
from lancewal.sstable import copy_of
from lancewal.storage import (
    ObjectStore,
    Once,
    Task,
    boot_time,
    both,
    host_clock,
    in_thread,
    ordered_map,
    sync_file_system,
)

logger = logging.getLogger(__name__)

#: How many manifests are pruned in parallel on remote storage.
_SHARDS_AT_ONCE = 64


def compact(
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    plan: CompactionPlan | None = None,
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES,
    optimize_indexes: bool = True,
    compact_files: bool | None = None,
    progress: ProgressCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> CompactionReport:
    """Merge all flushed generations (or those of ``shards``, or those of ``plan``) into the base table.

    Then brings the table's indexes up to date, unless ``optimize_indexes`` is false, and joins some of its
    small files where that pays. If ``compact_files`` is true it joins all small files, if false none. Raises
    :class:`~lancewal.errors.PartialWriteError` if some shards failed; the commits of the others stay. Once
    ``stop()`` returns true nothing new is started, and the rest waits for the next compaction.
    """
    started = time.perf_counter()
    read_after = boot_time()
    base: BaseTable | None = None
    if plan is None:
        found = planned(store, shards, max_commit_bytes=max_commit_bytes, open_sstables=True)
        plan, base, manifests = found.plan, found.base, found.manifests
    else:
        read = read_manifests(store, list({part.shard_id: None for part in plan.shards}))
        manifests = [manifest for manifest in read if manifest is not None]
    packs = plan.packs
    compacted = {part.shard_id for part in plan.shards}
    pruning = Pruning(store, [each for each in manifests if each.shard_id in compacted], read_after)
    indexes_due = optimize_indexes and bool(packs)
    aside = [] if base is None else _aside(store, base, pruning, with_indexes=indexes_due)
    bases = iter([base])
    done = PackReport()

    def execute(pack: Pack) -> PackReport:
        if stop():
            return PackReport()
        try:
            # Only the first pack can use this handle: later packs open the version that earlier commits made.
            return execute_pack(pack, store=store, progress=progress, base=next(bases, None))
        except Exception as error:
            # The pack failed before it started; the other packs continue.
            shards = {part.shard_id: ShardReport(part.shard_id) for part in pack.parts}
            return PackReport(shards, dict.fromkeys(shards, error))

    try:
        # One after the other: Lance lets no two merges that insert rows commit from the same version. The
        # later one would wait and then do all its work again.
        for pack in packs:
            done.add(execute(pack))
    finally:
        for task in aside:
            task.wait()
    report = CompactionReport(store.uri, list(done.shards.values()))
    for name in PACK_SUMS:
        setattr(report, name, getattr(done, name))
    try:
        if not plan.has_key:
            mark_pending(store)
            remove_tags(store)
        alone = len(packs) == report.commits == 1 and not report.retries
        if plan.has_key and base is not None and alone:
            # There was one commit, made through this handle, so the handle is at the version that it made.
            newest, _ = both(
                partial(base.committed, store),
                partial(pruning.read_tags, copy.copy(base.dataset)),
                at_once=not store.is_local,
            )
        else:
            newest = base if base is not None and not report.commits else open_base(store)
        if stop():
            optimize_indexes = compact_files = False
        _finish(store, newest, report, pruning, optimize_indexes, compact_files, with_history=not aside)
    except LanceWalError as error:
        if not done.failed:
            raise
        # The next compaction does the rest. Only this one can report which shards failed, so log and go on.
        logger.warning("compaction of %s was not finished: %s", store.uri, error)
    if done.failed:
        written = [each for each in report.shards if each.generations or each.shard_id not in done.failed]
        raise PartialWriteError("compaction", done.failed, {s.shard_id: s.rows_upserted for s in written})
    report.seconds = time.perf_counter() - started
    return report


def execute_pack(
    pack: Pack,
    storage_options: Mapping[str, str] | None = None,
    *,
    store: ObjectStore | None = None,
    progress: ProgressCallback | None = None,
    base: BaseTable | None = None,
) -> PackReport:
    """Carry out one pack of a plan; in any process, at any time, any number of times.

    ``pack`` and ``storage_options`` can be pickled, so it can be a task of a distributed job. Generations
    that the base already holds are skipped. Failures are in the report. A
    :class:`~lancewal.errors.ConflictError` there means that the pack kept losing races against other commits.
    """
    started = time.perf_counter()
    store = store or ObjectStore.from_uri(pack.parts[0].uri, storage_options)
    base = base or open_base(store)
    kind = KeyedCompaction if base.schema.primary_key else AppendOnlyCompaction
    report = PackReport()
    for parts in [[part] for part in pack.parts] if pack.in_order else [pack.parts]:
        done = kind(parts, store, progress, base).run()
        base = None
        for shard in done.shards.values():
            shard.seconds = time.perf_counter() - started
        report.add(done)
        for shard_id, error in done.failed.items():
            logger.warning("compaction failed: %s", error, extra={"shard": str(shard_id)})
        if done.failed:
            # The next parts hold newer versions of shared keys. In the base table they would lie below the
            # older SSTables of this part.
            break
    return report


def _aside(store: ObjectStore, base: BaseTable, pruning: Pruning, *, with_indexes: bool) -> list[Task[None]]:
    """Start the work that needs no commit, in parallel with the merge; only on remote storage."""
    if store.is_local:
        return []
    calls: list[Callable[[], None]] = [partial(store_column_history, store, base.version), pruning.read_ahead]
    if with_indexes:
        # A handle of its own, because only one thread at a time may use a handle.
        calls.append(partial(open_indexes, copy.copy(base.dataset), base.manifest.indexes))
    return [in_thread(call, "lancewal-io") for call in calls]


def _finish(
    store: ObjectStore,
    base: BaseTable,
    report: CompactionReport,
    pruning: Pruning,
    optimize_indexes: bool,
    compact_files: bool | None,
    with_history: bool = True,
) -> None:
    """Tidy the indexes and files of the newest version, ``base``, and prune the shards' manifests.

    ``with_history`` stores the history of the columns first; otherwise that is done already.
    """
    if with_history:
        store_column_history(store, base.version)
    if compact_files:
        shaped = optimize_base(store, indexes=optimize_indexes)
        base = open_base(store)
        pruning.prune(base)
    else:
        # The two are independent of each other.
        shaped, _ = both(
            lambda: tidy(store, base, indexes=optimize_indexes, files=compact_files is None),
            partial(pruning.prune, base),
            at_once=not store.is_local,
        )
    report.base_version = base.version
    report.indexes_optimized, report.files_removed, report.files_added = shaped


def finish_compaction(
    store: ObjectStore, *, optimize_indexes: bool = True, compact_files: bool | None = None
) -> None:
    """Finish a compaction whose packs were carried out by tasks; harmless if it is left out.

    ``optimize_indexes`` and ``compact_files`` have the same meaning as in :func:`compact`.
    """
    read_after = boot_time()
    manifests = discover_manifests(store)
    base = open_base(store)
    if not base.schema.primary_key:
        mark_pending(store)
        remove_tags(store)
        base = open_base(store)
    pruning = Pruning(store, manifests, read_after)
    _finish(store, base, CompactionReport(store.uri), pruning, optimize_indexes, compact_files)


class Pruning:
    """Removes compacted SSTables that nobody else needs from the shards' manifests, after a compaction.

    Otherwise only markers say that a listed generation is compacted. If the MemWAL index is dropped, the
    markers are gone, and the generation's rows would hide newer rows of the base table. The directories stay
    until garbage collection.

    ``manifests`` are those that the compaction read, after the time ``read_after``. Entries are removed by
    name from the newest manifests. Everything except the base table's tags may be read in parallel with the
    merge. Not thread-safe.
    """

    def __init__(self, store: ObjectStore, manifests: Sequence[ShardManifest], read_after: float) -> None:
        self._store = store
        self._manifests = manifests
        self._read_after = read_after
        self._workers = 1 if store.is_local else max(1, min(len(manifests), _SHARDS_AT_ONCE))
        self._looks: dict[UUID, StoredLooks] = {}
        self._unsettled = Once(partial(Unsettled.read, store))
        self._tags: Mapping[str, int] | None = None

    def read_ahead(self) -> None:
        """Read what may be as old as the manifests: unsettled transactions, looks, and the copy record."""
        calls: list[Callable[[], object]] = []
        if self._manifests:
            calls = [self._unsettled.get, self._read_looks, partial(copy_of, self._store)]
        for _ in ordered_map(lambda call: call(), calls, len(calls)):
            pass

    def _read_looks(self) -> None:
        shards = [manifest.shard_id for manifest in self._manifests]
        read = ordered_map(partial(StoredLooks.read, self._store), shards, self._workers)
        self._looks = dict(zip(shards, read, strict=True))

    def read_tags(self, dataset: lance.LanceDataset) -> None:
        """Read the tags. Call it after the commit: a version tagged before does not hold the new rows."""
        if self._manifests:
            self._tags = tagged_versions(dataset)

    def prune(self, base: BaseTable) -> None:
        """Prune the manifests. A failure is only logged, because garbage collection does the same later."""
        if not self._manifests:
            return
        try:
            # Once no manifest lists the SSTables, a power cut must not lose the rows in the base table.
            sync_file_system(self._store)
            needs = Needs(base, self._store, datetime.now(UTC), tags=self._tags)
            for _ in ordered_map(partial(self._prune_shard, needs), self._manifests, self._workers):
                pass
        except LanceWalError as error:
            logger.warning("compacted generations are still listed: %s", error)

    def _prune_shard(self, needs: Needs, manifest: ShardManifest) -> None:
        store, shard_id = self._store, manifest.shard_id
        manifests = ShardManifestStore(store, shard_id)
        manifests.assume(manifest, self._read_after)
        # The files are listed for their times, which matter only if base versions are tagged.
        infos = shard_files(store, shard_id) if needs.has_tags() else ()
        stored = self._looks.get(shard_id) or StoredLooks.read(store, shard_id)
        looks = Looks.of_shard(stored, manifest, needs.base, host_clock())
        # Never read here: a checkpoint has its own copy of the manifests.
        checkpoints = Once(partial(NeededFiles.read, store, needs.now, dry_run=True))
        shard = ShardGarbage(
            store,
            manifests,
            manifest,
            infos,
            needs,
            looks,
            checkpoints,
            self._unsettled,
            Retention(),
            GcReport(needs.base.uri),
        )
        both(
            partial(prune_manifest_entries, shard),
            partial(looks.record, store, None),
            at_once=not store.is_local,
        )
