"""Compaction of a table with a primary key: a merge of one or many shards that sets markers and fences.

1. Every commit raises the fence of each of its shards by one (see :mod:`lancewal.base.markers`), from the
   value in the version that it was made for. Of two compactors of a shard, one commits. The other changes
   nothing, however long it was stopped, and looks at the new state. This covers deletes too: a late
   delete would remove a key that was written again since.
2. The commit with the last rows of the generations sets their markers. Before that, readers still read the
   SSTables, whose rows hide those of the base. If there are several commits, the first one says up to which
   generation the rows go, for readers that do not know these SSTables yet.
3. If a compactor dies between two commits, the base has rows without a marker. They are as new as the
   SSTables that they came from, and the next compactor replaces or deletes them. Keys that were deleted
   without a marker are hidden by the SSTables' tombstones anyway.
4. A few deleted keys go into the commit of the rows, as a condition. This condition takes two kilobytes of
   memory for each key, and Lance reads the whole key column for it. So many deleted keys, or any if the
   base is large and has a BTree, get commits of their own: they are the source of a merge that deletes the
   rows that it matches, in parts as large as those of rows.
5. Shards of one commit must not share a key, or Lance would insert it twice. The routing of rows ensures
   that. It is checked nevertheless, and a shard that breaks the rule gets a commit of its own.
6. If others have raised the fence of a shard, or it cannot be read, it is left out, and the other shards
   are committed without it.

The rows of a commit are the newest of their keys (:mod:`lancewal.maintenance.newest`).

Compactors other than lancewal's do not know the fence. If one of them runs at the same time, a key that was
deleted in between may come back. Run one kind only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from uuid import UUID

import pyarrow as pa

from lancewal.base import BaseTable, fence_id, open_base, parts_id
from lancewal.errors import LanceWalError
from lancewal.format import SsTableEntry, TableSchema, superseded
from lancewal.maintenance.commits import (
    INDEXED_BYTES,
    AlreadyCompactedError,
    LostRaceError,
    Part,
    crash_point,
    merge,
    until_won,
)
from lancewal.maintenance.newest import (
    Generations,
    NewestRows,
    UnreadableError,
    chunks,
    joined_rows,
    read_shards,
)
from lancewal.maintenance.plan import ShardPlan
from lancewal.maintenance.reports import PackReport, Progress, ProgressCallback, ShardReport
from lancewal.storage import ObjectStore

logger = logging.getLogger(__name__)

#: The most deleted keys that go into the rows' commit as a condition. More are faster in their own commit.
_MOST_LISTED = 4096
#: About how much memory Lance needs for a key in a condition.
_LISTED_KEY_BYTES = 2 << 10


class KeyedCompaction:
    """Merges generations of shards that share no key into a base table with a primary key.

    Several ``parts`` have one planned commit each, and share it. ``base`` is for the first attempt.
    """

    def __init__(
        self,
        parts: Sequence[ShardPlan],
        store: ObjectStore,
        progress: ProgressCallback | None,
        base: BaseTable | None = None,
    ) -> None:
        self._parts = parts
        self._limit = max(part.max_commit_bytes for part in parts)
        self._store = store
        self._progress = progress
        self._base = base
        self._report = PackReport({part.shard_id: ShardReport(part.shard_id) for part in parts})
        # Rows that were read for a commit that has to be retried, and the base whose columns they have.
        self._read: dict[UUID, tuple[BaseTable, NewestRows]] = {}

    def run(self) -> PackReport:
        for number in range(max(len(part.commits) for part in self._parts)):
            parts = [part for part in self._parts if part.shard_id not in self._report.failed]
            commits = {p.shard_id: p.commits[number].sstables for p in parts if number < len(p.commits)}
            self._bring(commits)
            self._read.clear()
        return self._report

    def _bring(self, commits: Generations) -> None:
        """Merge these generations in as few commits as possible; notes failed shards in the report."""
        waiting = [commits]
        while waiting:
            some = waiting.pop()
            try:
                _, lost = until_won(_name(some), partial(self._merge_rest, some))
                self._lost(some, lost)
            except _LeftOutError as error:
                others = {shard_id: some[shard_id] for shard_id in some if shard_id not in error.shards}
                later = {shard_id: some[shard_id] for shard_id in error.again}
                self._lost(later, 1)
                # A stack: the others come first.
                waiting += [part for part in (later, others) if part]
            except Exception as error:
                self._report.failed.update(dict.fromkeys(some, error))

    def _merge_rest(self, commits: Generations) -> None:
        """Merge those of these generations that the base does not hold."""
        base, self._base = self._base or open_base(self._store), None
        rest: dict[UUID, list[SsTableEntry]] = {}
        for shard_id, entries in commits.items():
            held = base.compacted_generation(shard_id)
            self._skip(shard_id, [entry.generation for entry in entries if entry.generation <= held])
            missing = [entry for entry in entries if entry.generation > held]
            if missing:
                rest[shard_id] = missing
        if not rest:
            return
        try:
            rows = self._newest_rows(base, rest)
            self._merge(base, rows)
        except AlreadyCompactedError as error:
            if len(rest) > 1:
                self._leave_out(rest, _moved(base, open_base(self._store), rest))
            raise LostRaceError(str(error)) from error
        except (LostRaceError, _LeftOutError):
            raise
        except Exception as error:
            # Missing SSTables may have been compacted and collected by others: look again.
            newest = open_base(self._store)
            moved = [
                each for each in rest if newest.compacted_generation(each) > base.compacted_generation(each)
            ]
            self._leave_out(rest, moved)
            if moved:
                raise LostRaceError("the generations were compacted meanwhile") from None
            if _has_other_columns(newest, base):
                raise LostRaceError("the table's columns were changed meanwhile") from None
            if isinstance(error, UnreadableError):
                self._report.failed.update(error.errors)
                raise _LeftOutError(error.errors, ()) from None
            raise

    def _leave_out(self, shards: Iterable[UUID], moved: Sequence[UUID]) -> None:
        """Postpone the shards that ``moved``, unless all of them did."""
        if moved and set(moved) != set(shards):
            raise _LeftOutError(moved, moved)

    def _newest_rows(self, base: BaseTable, generations: Generations) -> dict[UUID, NewestRows]:
        """The newest rows of all shards; raises if a shard cannot be read, or if shards share keys."""
        known = {
            shard_id: rows
            for shard_id, (read_for, rows) in self._read.items()
            if shard_id in generations
            and [table.entry for table in rows.sstables] == generations[shard_id]
            and not _has_other_columns(base, read_for)
        }
        missing = {shard_id: entries for shard_id, entries in generations.items() if shard_id not in known}
        errors: dict[UUID, Exception] = {}
        for shard_id, found in read_shards(self._store, base.schema, missing):
            if isinstance(found, Exception):
                errors[shard_id] = found
            else:
                known[shard_id] = found
                self._read[shard_id] = base, found
        if errors:
            raise UnreadableError(errors)
        rows = {shard_id: known[shard_id] for shard_id in generations}
        if len(rows) > 1:
            repeated = superseded([each.keys for each in rows.values()])
            sharing = [shard_id for shard_id, mask in zip(rows, repeated, strict=True) if mask.any()]
            if sharing:
                logger.warning(
                    "shards %s hold keys of other shards: run verify", ", ".join(map(str, sharing))
                )
                raise _LeftOutError(sharing, sharing)
        return rows

    def _merge(self, base: BaseTable, shards: Mapping[UUID, NewestRows]) -> None:
        fences = {shard_id: base.details.compacted.get(fence_id(shard_id), 0) for shard_id in shards}
        markers = {shard_id: rows.sstables[-1].generation for shard_id, rows in shards.items()}
        changed: Counter[str] = Counter()
        commits = 0
        sizes: Counter[UUID] = Counter()
        for part in self._divided(shards, base, sizes):
            crash_point("merge: rows are read")
            # Lance sees no conflict if a column was replaced by another one with the same id and name.
            # Reading the rows takes a while, so look again before the commit.
            if base.dataset.latest_version != base.dataset.version:
                newest = open_base(self._store)
                if _has_other_columns(newest, base):
                    raise LostRaceError("the table's columns were changed meanwhile")
                self._leave_out(shards, _moved(base, newest, shards, commits))
            commits += 1
            raised = {fence_id(shard_id): fence + commits for shard_id, fence in fences.items()}
            if part.is_last:
                raised |= markers
            elif commits == 1:
                raised |= _announced(base, markers)
            changed.update(merge(base, part, raised, _name(self._report.shards)))
            self._report.commits += 1
            if not part.is_last:
                crash_point("merge: a part of the rows is committed")
        crash_point("merge: rows and marker are committed")
        inserted, updated = changed["num_inserted_rows"], changed["num_updated_rows"]
        deleted = changed["num_deleted_rows"]
        merged = PackReport(rows_inserted=inserted, rows_updated=updated, rows_deleted=deleted)
        alone = len(shards) == 1
        for shard_id, rows in shards.items():
            merged.shards[shard_id] = ShardReport(
                shard_id,
                generations=[table.generation for table in rows.sstables],
                rows_in=rows.rows_in,
                rows_upserted=rows.num_rows,
                rows_inserted=inserted if alone else None,
                rows_updated=updated if alone else None,
                rows_deleted=deleted if alone else None,
                num_bytes=sizes[shard_id],
                commits=commits,
            )
        self._report.add(merged)
        for shard_id, rows in shards.items():
            self._tell(rows, markers[shard_id])

    def _tell(self, rows: NewestRows, through: int) -> None:
        shard_id = rows.shard_id
        logger.info(
            "compacted generations %d to %d: %d rows, %d keys deleted",
            rows.sstables[0].generation,
            through,
            rows.num_rows,
            rows.num_dead,
            extra={"shard": str(shard_id), "generation": through},
        )
        if self._progress is not None:
            upserted = self._report.shards[shard_id].rows_upserted
            self._progress(Progress(shard_id, "merged", through, upserted))

    def _divided(
        self, shards: Mapping[UUID, NewestRows], base: BaseTable, sizes: Counter[UUID]
    ) -> Iterator[Part]:
        """The part for each commit, deleted keys before rows; at least one part, which may be empty.

        ``sizes`` counts the bytes of each shard's rows.
        """
        dead = [
            pa.concat_arrays(parts)
            for parts in zip(*(r.dead for r in shards.values() if r.dead), strict=True)
        ]
        num_dead = sum(rows.num_dead for rows in shards.values())
        num_rows = sum(rows.num_rows for rows in shards.values())
        limit = self._limit
        keys = _key_table(dead, base.schema)
        if not num_rows and num_dead:
            for source, is_last in chunks(keys.to_batches(), keys.schema, min(limit, INDEXED_BYTES)):
                yield Part(source, deletes=True, is_last=is_last)
            return
        listed = num_dead <= min(_MOST_LISTED, limit // _LISTED_KEY_BYTES)
        if num_dead and base.key_index_pays(num_dead + num_rows, replaces=True):
            # A condition makes Lance read the whole key column. Using the BTree is worth an extra commit.
            listed = False
        if not listed:
            for source, _ in chunks(keys.to_batches(), keys.schema, min(limit, INDEXED_BYTES)):
                yield Part(source, deletes=True)
        batches = joined_rows(shards, sizes)
        for source, is_last in chunks(batches, base.schema.plain, limit):
            yield Part(source, dead=dead if listed and is_last else (), is_last=is_last)

    def _lost(self, shards: Iterable[UUID], races: int) -> None:
        self._report.retries += races
        for shard_id in shards:
            self._report.shards[shard_id].retries += races

    def _skip(self, shard_id: UUID, generations: Sequence[int]) -> None:
        report = self._report.shards[shard_id]
        known = {*report.skipped, *report.generations}
        report.skipped += [generation for generation in generations if generation not in known]


class _LeftOutError(LanceWalError):
    """The commit continues without some ``shards``; those in ``again`` are retried in a later commit."""

    def __init__(self, shards: Collection[UUID], again: Collection[UUID]) -> None:
        super().__init__("some shards are left out")
        self.shards = shards
        self.again = again


def _name(shards: Collection[UUID]) -> str:
    """The name of a compaction in errors and logs."""
    first = f"compaction of shard {next(iter(shards))}"
    return first if len(shards) == 1 else f"{first} and {len(shards) - 1} others"


def _moved(base: BaseTable, newest: BaseTable, shards: Iterable[UUID], raised: int = 0) -> list[UUID]:
    """The shards that others have compacted since ``base``; we have ``raised`` their fences this often."""

    def states(table: BaseTable, shard_id: UUID) -> tuple[int, int]:
        return table.details.compacted.get(fence_id(shard_id), 0), table.compacted_generation(shard_id)

    def ours(shard_id: UUID) -> tuple[int, int]:
        fence, held = states(base, shard_id)
        return fence + raised, held

    return [shard_id for shard_id in shards if states(newest, shard_id) != ours(shard_id)]


def _announced(base: BaseTable, markers: Mapping[UUID, int]) -> dict[UUID, int]:
    """The ids that tell readers that rows up to these generations come in several commits.

    Leaves out those that an earlier compactor has set already.
    """
    told = {parts_id(shard_id): generation for shard_id, generation in markers.items()}
    return {key: value for key, value in told.items() if value > base.details.compacted.get(key, 0)}


def _has_other_columns(newest: BaseTable, base: BaseTable) -> bool:
    same = newest.schema.columns.equals(base.schema.columns)
    return not same or bool(newest.schema.replaced_since(base.version))


def _key_table(keys: Sequence[pa.Array], schema: TableSchema) -> pa.Table:
    """A table of keys that has only the key columns."""
    columns = pa.schema([schema.plain.field(name) for name in schema.primary_key])
    return pa.Table.from_arrays(list(keys), schema=columns) if keys else columns.empty_table()
