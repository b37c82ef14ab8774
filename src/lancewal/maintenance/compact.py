"""Compaction: flushed generations into the base table, many shards in a commit.

Compaction claims no shard and fences no writer; it reads manifests and SSTables, and commits to
the base table. It may run beside writers, readers, other compactors and direct writes to the
table, may be killed anywhere, and may be run again.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from uuid import UUID

from lancewal.base import BaseTable, store_column_history
from lancewal.errors import InvalidInputError, LanceWalError, PartialWriteError
from lancewal.maintenance.append_only import AppendOnlyCompaction, mark_pending, remove_tags
from lancewal.maintenance.commits import open_base
from lancewal.maintenance.gc import Pruning
from lancewal.maintenance.keyed import KeyedCompaction
from lancewal.maintenance.plan import DEFAULT_COMMIT_BYTES, CompactionPlan, Pack, ShardPlan, planned
from lancewal.maintenance.reports import (
    PACK_SUMS,
    CompactionReport,
    PackReport,
    ProgressCallback,
    ShardReport,
)
from lancewal.maintenance.tidy import open_indexes, optimize_base, tidy
from lancewal.shard import discover_manifests, read_manifests
from lancewal.storage import ObjectStore, Task, boot_time, both, in_thread, ordered_map

logger = logging.getLogger(__name__)

#: Commits that are prepared side by side; each needs memory for its rows.
DEFAULT_WORKERS = 2


def compact(
    store: ObjectStore,
    shards: Sequence[UUID | str] | None = None,
    *,
    plan: CompactionPlan | None = None,
    max_commit_bytes: int = DEFAULT_COMMIT_BYTES,
    max_workers: int = DEFAULT_WORKERS,
    optimize_indexes: bool = True,
    compact_files: bool | None = None,
    progress: ProgressCallback | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> CompactionReport:
    """Bring all flushed generations (of some ``shards``, or as in ``plan``) into the base table.

    Then the table's indexes are brought up to date, unless ``optimize_indexes`` is false, and some of its
    small files are joined where that pays; with ``compact_files`` all of them, or none if it is false. Raises
    :class:`~lancewal.errors.PartialWriteError` when some shards failed; what the others did stays. From when
    ``stop()`` is true no more is begun, and what is left waits for the next compaction.
    """
    if max_workers < 1:
        raise InvalidInputError(f"max_workers must be at least 1, got {max_workers}")
    started = time.perf_counter()
    read_after = boot_time()
    base: BaseTable | None = None
    if plan is None:
        found = planned(store, shards, max_commit_bytes=max_commit_bytes, open_sstables=True)
        plan, base, manifests = found.plan, found.base, found.manifests
    else:
        read = read_manifests(store, list({part.shard_id: None for part in plan.shards}))
        manifests = [manifest for manifest in read if manifest is not None]
    # Without a key commits would only refuse each other.
    workers = max_workers if plan.has_key else 1
    compacted = {part.shard_id for part in plan.shards}
    pruning = Pruning(store, [each for each in manifests if each.shard_id in compacted], read_after)
    aside = [] if base is None else _aside(store, base, pruning, with_indexes=optimize_indexes and bool(plan))
    packs = plan.packs
    bases = iter([base])
    done = PackReport()

    def execute(pack: Pack) -> PackReport:
        if stop():
            return PackReport()
        try:
            # The first commits move the table on: whoever comes later opens it again.
            return execute_pack(pack, store=store, progress=progress, base=next(bases, None))
        except Exception as error:
            # Nothing of the pack was tried; the others go on.
            failed = PackReport.of(part.shard_id for part in pack.parts)
            failed.failed.update(dict.fromkeys(failed.shards, error))
            return failed

    try:
        for each in ordered_map(execute, packs, workers):
            done.add(each)
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
            # The only commit of all, through this very handle.
            newest, _ = both(
                partial(base.committed, store),
                partial(pruning.read_tags, copy.copy(base.dataset)),
                at_once=not store.is_local,
            )
        else:
            newest = base if base is not None and not report.commits else open_base(store)
        if not aside:
            store_column_history(store, newest.version)
        if stop():
            optimize_indexes = compact_files = False
        _finish(store, newest, report, pruning, optimize_indexes, compact_files)
    except LanceWalError as error:
        if not done.failed:
            raise
        # The next compaction does what is left; which shards failed only this one can tell.
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

    Takes nothing that cannot be pickled, so that it can be a task of a distributed job. Generations
    that the base holds by now are skipped. What fails is in the report; a
    :class:`~lancewal.errors.ConflictError` says that other commits to the table kept coming first.
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
            # What comes after it in order would lie below it.
            break
    return report


def execute_shard(
    plan: ShardPlan,
    storage_options: Mapping[str, str] | None = None,
    *,
    store: ObjectStore | None = None,
    progress: ProgressCallback | None = None,
) -> ShardReport:
    """:func:`execute_pack` for one shard's part of a plan; raises if it fails."""
    done = execute_pack(Pack((plan,)), storage_options, store=store, progress=progress)
    for error in done.failed.values():
        raise error
    return done.shards[plan.shard_id]


def _aside(store: ObjectStore, base: BaseTable, pruning: Pruning, *, with_indexes: bool) -> list[Task[None]]:
    """What waits for no commit, while the rows are merged; only where storage is far away."""
    if store.is_local:
        return []
    calls: list[Callable[[], None]] = [partial(store_column_history, store, base.version), pruning.read_ahead]
    if with_indexes:
        # With a handle of its own: one is for one thread at a time.
        calls.append(partial(open_indexes, copy.copy(base.dataset), base.manifest.indexes))
    return [in_thread(call, "lancewal-io") for call in calls]


def _finish(
    store: ObjectStore,
    base: BaseTable,
    report: CompactionReport,
    pruning: Pruning,
    optimize_indexes: bool,
    compact_files: bool | None,
) -> None:
    """Bring indexes and files of the newest version, ``base``, into shape, and shorten manifests."""
    if compact_files:
        shaped = optimize_base(store, indexes=optimize_indexes)
        base = open_base(store)
        pruning.prune(base)
    else:
        # Neither looks at what the other does.
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
    """What follows the packs of a plan that tasks carried out; harmless if it is left out.

    ``optimize_indexes`` and ``compact_files`` are those of :func:`compact`.
    """
    read_after = boot_time()
    manifests = discover_manifests(store)
    base = open_base(store)
    if not base.schema.primary_key:
        mark_pending(store)
        remove_tags(store)
        base = open_base(store)
    store_column_history(store, base.version)
    pruning = Pruning(store, manifests, read_after)
    _finish(store, base, CompactionReport(store.uri), pruning, optimize_indexes, compact_files)
