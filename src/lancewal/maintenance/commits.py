"""Commits to the base table: what one merge does, errors, retries, and the points at which tests kill them.

Lance has one class for most of its errors, so the texts of its errors have to be matched. This is
the only place that does.

A crash point is a named moment between two steps that change the storage. Tests stop or kill a process
there. Then they check that readers see no difference, and that the next run finishes what this one began.
Nothing else happens at crash points.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import islice
from typing import TypeVar
from uuid import UUID

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.commit import CommitConflictError
from lance.mem_wal import CompactedSsTable

from lancewal.base import BaseTable, lance_errors, open_base
from lancewal.errors import ConflictError, LanceWalError, OutcomeUnknownError, StorageError
from lancewal.format import is_bytes, is_text, no_rows
from lancewal.predicate import among, column_name, literal
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: Lance joins through an index within a fixed pool of memory, 300 MB by default.
INDEXED_BYTES = 64 << 20
_SEPARATOR = ":"
#: How often Lance itself retries after a conflict, by merging again into the newest version.
_LANCE_RETRIES = 10
_LANCE_RETRY_TIMEOUT = timedelta(minutes=10)
#: How often we retry after Lance gave up, or if it cannot retry by itself.
_ATTEMPTS = 32
_FIRST_PAUSE_SECONDS = 0.02
_LONGEST_PAUSE_SECONDS = 2.0

_STALE = "Stale SSTable compaction"
_CONFLICTS = ("Too many concurrent writers", "commit conflict", "Incompatible transaction", "preempted by")
_EXHAUSTED = "Resources exhausted"


class AlreadyCompactedError(LanceWalError):
    """A marker is not above the stored one, because another compactor was faster. Nothing was written."""


class LostRaceError(LanceWalError):
    """Another commit came first. Nothing was written."""


class JoinTooLargeError(LanceWalError):
    """A join needs more than Lance's memory pool has. Nothing was written."""


@contextmanager
def commit_errors(action: str, *, commits: bool = True) -> Iterator[None]:
    """Turns what pylance raises in a commit into the errors of this module or of lancewal.

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


@dataclass(frozen=True)
class Part:
    """One commit of a merge. It upserts the rows of ``source`` and deletes the ``dead`` keys.

    With ``deletes``, ``source`` holds keys to delete instead. ``is_last`` says that no part comes after it.
    """

    source: pa.Table
    dead: Sequence[pa.Array] = ()
    deletes: bool = False
    is_last: bool = False


def merge(base: BaseTable, part: Part, markers: Mapping[UUID, int], what: str) -> dict[str, int]:
    """Merge a part into the version ``base``, and set ``markers`` in the same commit.

    Returns Lance's counts of rows. Errors name the merge as ``what``.
    """
    if _index_pays(base, part):
        try:
            # Lance counts a slice with the memory of the whole array that it was cut from, so copy it.
            combined = replace(part, source=part.source.combine_chunks())
            return _merge(base, combined, markers, what, use_index=True)
        except JoinTooLargeError as error:
            logger.debug("joined without the index: %s", error)
    return _merge(base, part, markers, what, use_index=False)


def _index_pays(base: BaseTable, part: Part) -> bool:
    if part.dead or part.source.nbytes > INDEXED_BYTES:
        return False
    return base.key_index_pays(part.source.num_rows, replaces=not part.deletes)


def _merge(
    base: BaseTable, part: Part, markers: Mapping[UUID, int], what: str, *, use_index: bool
) -> dict[str, int]:
    key = list(base.schema.primary_key)
    # This clause makes Lance read the whole key column, so it is used only if needed.
    dead = is_dead(key, part.dead) if part.dead else None
    builder = marked_merge(base.dataset, key, markers).use_index(use_index)
    if part.deletes:
        builder = builder.when_matched_delete()
    else:
        builder = builder.when_matched_update_all().when_not_matched_insert_all()
    if dead is not None:
        builder = builder.when_not_matched_by_source_delete(dead)
    with commit_errors(f"commit the {what}"):
        stats: dict[str, int] = builder.execute(part.source)
    return stats


def marked_merge(
    dataset: lance.LanceDataset, columns: list[str], markers: Mapping[UUID, int]
) -> lance.dataset.MergeInsertBuilder:
    """A merge on ``columns`` that sets ``markers`` in the same commit, all of them or nothing."""
    builder = dataset.merge_insert(columns)
    builder = builder.conflict_retries(_LANCE_RETRIES).retry_timeout(_LANCE_RETRY_TIMEOUT)
    return builder.mark_sstables_as_compacted([CompactedSsTable(str(k), v) for k, v in markers.items()])


def is_dead(names: Sequence[str], columns: Sequence[pa.Array]) -> str:
    """The condition, in Lance's SQL, that a row has one of the keys in ``columns``, which are not empty.

    One column becomes a list of its values. Lance has no list of tuples for several columns, and
    alternatives joined by OR cost it a quarter of a millisecond each. So the columns are joined to one text
    per row, with an encoding that differs for different keys, and compared with a list of these texts.

    >>> is_dead(["id"], [pa.array([1, 2])])
    '`id` IN (1, 2)'
    >>> is_dead(["a", "b"], [pa.array([1]), pa.array(["x:y"])])
    "concat(cast(`a` as string), ':', cast(octet_length(`b`) as string), ':', `b`, ':') IN ('1:3:x:y:')"
    """
    if len(names) == 1:
        return among(names[0], columns[0])
    expression = ", ".join(_sql_parts(name, column.type) for name, column in zip(names, columns, strict=True))
    parts = [part for column in columns for part in _text_parts(column)]
    texts = pc.binary_join_element_wise(*parts, "", _SEPARATOR)
    return f"concat({expression}) IN ({', '.join(map(literal, texts))})"


def _sql_parts(name: str, type_: pa.DataType) -> str:
    column = column_name(name)
    if is_text(type_):
        return f"cast(octet_length({column}) as string), '{_SEPARATOR}', {column}, '{_SEPARATOR}'"
    if is_bytes(type_):
        return f"encode({column}, 'hex'), '{_SEPARATOR}'"
    return f"cast({column} as string), '{_SEPARATOR}'"


def _text_parts(column: pa.Array) -> list[pa.Array]:
    """The texts that the SQL of :func:`_sql_parts` computes, each without the separator after it."""
    if is_text(column.type):
        return [pc.binary_length(column).cast(pa.string()), column.cast(pa.string())]
    if is_bytes(column.type):
        return [pa.array([value.hex() for value in column.to_pylist()], pa.string())]
    return [column.cast(pa.string())]


def commit_markers(dataset: lance.LanceDataset, markers: Mapping[UUID, int]) -> None:
    """Set markers without changing any row, with a merge that has no rows; the join column is arbitrary."""
    schema: pa.Schema = dataset.schema
    builder = marked_merge(dataset, [schema.names[0]], markers)
    some = ", ".join(
        f"{generation} of shard {shard_id}" for shard_id, generation in islice(markers.items(), 3)
    )
    with commit_errors(f"mark generation {some}" + (" and others" if len(markers) > 3 else "")):
        builder.when_matched_update_all().use_index(False).execute(no_rows(schema))


def mark(store: ObjectStore, shard_id: UUID, generation: int) -> None:
    """Commit a marker to the newest version; retries while other commits come first."""
    until_won(
        f"marking shard {shard_id}",
        lambda: commit_markers(open_base(store).dataset, {shard_id: generation}),
    )


def until_won(what: str, attempt: Callable[[], T]) -> tuple[T, int]:
    """Call ``attempt`` until it loses no race; returns its result, and how many races it lost.

    ``attempt`` must read the newest state of the table itself, every time.
    """
    for lost in range(_ATTEMPTS):
        try:
            return attempt(), lost
        except LostRaceError as error:
            logger.debug("%s lost a race (%d so far): %s", what, lost + 1, error)
            failure = error
        pause = min(_FIRST_PAUSE_SECONDS * 2**lost, _LONGEST_PAUSE_SECONDS)
        time.sleep(pause * random.uniform(0.5, 1.0))
    raise ConflictError(
        f"{what} lost {_ATTEMPTS} races in a row against other commits to the table; nothing of it was "
        f"written, try again when there are fewer: {failure}"
    ) from failure


#: Crash points of a compaction with a key, in the order in which it passes them.
MERGE_POINTS = (
    "merge: rows are read",
    "merge: a part of the rows is committed",
    "merge: rows and marker are committed",
)
#: Of a compaction without a key.
APPEND_POINTS = (
    "append: files are written",
    "append: rows and tag are committed",
    "append: the marker is committed",
    "append: the tag is removed",
)
#: Of what follows either of them.
TIDY_POINTS = ("tidy: files are written",)
#: Of a garbage collection.
COLLECT_POINTS = (
    "collect: nothing is deleted yet",
    "collect: manifest entries are pruned",
    "collect: a WAL entry is deleted",
    "collect: an SSTable is half deleted",
    "collect: an SSTable is deleted",
    "collect: an old manifest is deleted",
)

_hook: Callable[[str], object] | None = None


def crash_point(name: str) -> None:
    """Called at every crash point; does nothing unless a test has set a hook."""
    if _hook is not None:
        _hook(name)


def at_crash_points(hook: Callable[[str], object] | None) -> None:
    """Call ``hook`` with the name of every crash point that this process reaches from now on."""
    global _hook
    _hook = hook
