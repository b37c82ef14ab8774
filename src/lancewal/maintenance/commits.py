"""Commits to the base table, and what Lance says when one does not succeed.

Lance has one class for most of its errors, so that its texts have to be looked at. This is
the only place that does.
"""

from __future__ import annotations

import ctypes
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TypeVar
from uuid import UUID

import lance
import pyarrow as pa
from lance.commit import CommitConflictError
from lance.mem_wal import CompactedSsTable

from lancewal.base import BaseTable, lance_errors, tags
from lancewal.errors import ConflictError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.format import no_rows
from lancewal.maintenance import points
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

# Making what Lance committed as durable as what we delete because of it.


def sync_file_system(store: ObjectStore) -> None:
    """Write all that the table's file system holds in memory to disk.

    Lance never syncs. Before anything is deleted that the base table holds by now, the base
    table's own files must survive a power cut. Does nothing on object storage, nor on a
    store that was opened without fsync.
    """
    root = store.local_path("_versions")
    if root is None or not store.fsync:
        return
    try:
        descriptor = os.open(root, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if sys.platform != "linux" or ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
                os.sync()
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        raise StorageError(f"cannot sync the file system of {store.uri}: {error}") from error


T = TypeVar("T")

#: Conflicts that Lance resolves by itself, by merging again into the newest version.
LANCE_RETRIES = 10
LANCE_RETRY_TIMEOUT = timedelta(minutes=10)
#: Times that we try again after Lance gave up, or where it cannot merge by itself.
ATTEMPTS = 32
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 2.0

_STALE = "Stale SSTable compaction"
_CONFLICTS = ("Too many concurrent writers", "commit conflict", "Incompatible transaction", "preempted by")
_EXHAUSTED = "Resources exhausted"


class AlreadyCompactedError(LanceWalError):
    """A marker is not above the stored one: another compactor was faster. Nothing was written."""


class LostRaceError(LanceWalError):
    """Another commit came first; nothing of this one was written."""


class JoinTooLargeError(LanceWalError):
    """Lance's pool of memory for joins did not suffice; nothing was written."""


@contextmanager
def commit_errors(action: str, *, commits: bool = True) -> Iterator[None]:
    """Turns what pylance raises in a commit into the classes of this module, or ours.

    ``commits=False`` is for a step before the commit. After an unknown outcome it is safe to compact again.
    """
    try:
        with lance_errors(action, commits=commits):
            yield
    except (StorageError, OutcomeUnknownError) as error:
        cause = error.__cause__
        text = str(cause)
        if _STALE in text:
            raise AlreadyCompactedError(text) from error
        if isinstance(cause, CommitConflictError) or any(each in text for each in _CONFLICTS):
            raise LostRaceError(text) from error
        if _EXHAUSTED in text:
            raise JoinTooLargeError(text) from error
        raise


def marked_merge(
    dataset: lance.LanceDataset, columns: list[str], markers: Mapping[UUID, int]
) -> lance.dataset.MergeInsertBuilder:
    """A merge on ``columns`` that sets ``markers`` in the same commit, all of them or nothing."""
    builder = dataset.merge_insert(columns)
    builder = builder.conflict_retries(LANCE_RETRIES).retry_timeout(LANCE_RETRY_TIMEOUT)
    return builder.mark_sstables_as_compacted([CompactedSsTable(str(k), v) for k, v in markers.items()])


def commit_marker(dataset: lance.LanceDataset, shard_id: UUID, generation: int) -> None:
    """Mark without a change to any row: a merge of nothing, on whichever column."""
    schema: pa.Schema = dataset.schema
    builder = marked_merge(dataset, [schema.names[0]], {shard_id: generation})
    with commit_errors(f"mark generation {generation} of shard {shard_id}"):
        builder.when_matched_update_all().use_index(False).execute(no_rows(schema))


def until_won(what: str, attempt: Callable[[], T], *, attempts: int = ATTEMPTS) -> tuple[T, int]:
    """Call ``attempt`` until it loses no race; its result, and how many races it lost.

    ``attempt`` must look at the newest state of the table itself, every time.
    """
    for lost in range(attempts):
        try:
            return attempt(), lost
        except LostRaceError as error:
            logger.debug("%s lost a race (%d so far): %s", what, lost + 1, error)
            failure = error
        pause = min(_FIRST_PAUSE_SECONDS * 2**lost, _LONGEST_PAUSE_SECONDS)
        time.sleep(pause * random.uniform(0.5, 1.0))
    raise ConflictError(
        f"{what} lost {attempts} races in a row against other commits to the table; nothing of it was "
        f"written, try again when there are fewer: {failure}"
    ) from failure


# Tags of appends (see :mod:`lancewal.base.markers`): turned into markers, and removed.


def open_base(store: ObjectStore) -> BaseTable:
    """The newest version of the table."""
    return BaseTable.open(store.uri, store.storage_options, store=store)


def stale_tags(base: BaseTable) -> set[str]:
    """Tags whose generation a marker covers."""
    stored = base.details.compacted
    return {
        key
        for key, (shard_id, generation) in tags(base.schema.columns).items()
        if generation <= stored.get(shard_id, 0)
    }


def unmarked_tags(base: BaseTable) -> dict[UUID, int]:
    """The shards with a tag above their marker: an append whose marker is still to come."""
    stored = base.details.compacted
    pending: dict[UUID, int] = {}
    for shard_id, generation in tags(base.schema.columns).values():
        if generation > stored.get(shard_id, 0):
            pending[shard_id] = max(pending.get(shard_id, 0), generation)
    return pending


def mark_pending(store: ObjectStore) -> list[UUID]:
    """Finish appends that were interrupted before their marker; the shards it was done for."""
    done = []
    for shard_id, generation in unmarked_tags(open_base(store)).items():
        try:
            until_won(f"marking shard {shard_id}", partial(_mark_one, store, shard_id, generation))
        except AlreadyCompactedError:
            continue
        done.append(shard_id)
    return done


def _mark_one(store: ObjectStore, shard_id: UUID, generation: int) -> None:
    commit_marker(open_base(store).dataset, shard_id, generation)


def remove_tags(store: ObjectStore) -> bool:
    """Step 5: remove the tags that markers cover; whether there were any.

    Needed for nothing but tidiness: a tag at or below its marker means nothing.
    """

    def attempt() -> bool:
        base = open_base(store)
        outdated = stale_tags(base)
        if not outdated:
            return False
        changes = {
            field.name: {key: None for key in outdated if key.encode() in (field.metadata or {})}
            for field in base.schema.columns
        }
        with commit_errors("remove the tags of finished appends"):
            base.dataset.update_field_metadata({name: keys for name, keys in changes.items() if keys})
        return True

    removed, _ = until_won("removing tags", attempt)
    points.reached("append: the tag is removed")
    return removed
