"""A table driven at random: writers come, go and die, jobs compact and prune, columns change.

The machines in ``test_table_machine`` are built of this one. After every step all reads must
give what the model holds, through the writers of this process as well as from storage alone.

Few rules with many variants, so that what must come together often does: two writers on
one shard, a column that changes while rows are in the log, a compactor that died.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar
from uuid import UUID

import lance
import pyarrow as pa
from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lancewal
from lancewal.errors import FencedError, PartialWriteError
from lancewal.format.shard_manifest import ShardManifest
from lancewal.maintenance import Resource, at_crash_points, compact
from lancewal.maintenance.commits import APPEND_POINTS, MERGE_POINTS
from lancewal.reader import TableReader
from lancewal.reader import base_keys as base_overlap
from lancewal.shard.discovery import discover_manifests
from lancewal.shard.manifest import ShardManifestStore
from lancewal.storage import ObjectStore
from lancewal.writer.table_writer import TableWriter, TableWriteResult
from tests.maintenance.support import collect_later
from tests.model.compaction import append_by_hand, delete_from_base, merge_by_hand, upsert_into_base
from tests.model.reads import check_lookups, check_scans
from tests.model.table_model import KEY_NUMBERS, NUMBER, TEXT, Column, Keys, TableModel
from tests.tables import abandon

BUCKETS = 3
MAX_COLUMNS = 4
DEFAULTS = {"fsync": "false", "stats_log_interval_ms": "0", "max_wal_flush_interval_ms": "none"}

key_numbers = st.integers(0, KEY_NUMBERS - 1)
#: A row's key and what its values are made of.
cells = st.tuples(key_numbers, st.integers(0, 99))
some_rows = st.lists(st.lists(cells, min_size=1, max_size=5), min_size=1, max_size=3)
places = st.integers(0, 99)
#: Two writers; while both are open, the later one to touch a shard takes it over.
slots = st.integers(0, 1)

WRITER_SETTINGS: dict[str, dict[str, Any]] = {
    "durable": {},
    "log only": {"enable_memtable": False},
    "not waiting": {"durable_write": False},
    "small MemTables": {"max_memtable_rows": 3},
}
settings_names = st.sampled_from(sorted(WRITER_SETTINGS))

Cell = tuple[int, int]


@dataclass(frozen=True)
class OpenWriter:
    """A writer with the columns that it takes: those that the table had when it was opened."""

    writer: TableWriter
    columns: tuple[Column, ...]
    settings: str

    @property
    def has_memtable(self) -> bool:
        return self.settings != "log only"

    @property
    def is_durable(self) -> bool:
        return self.settings != "not waiting"


class _DeadError(BaseException):
    """What a killed compactor leaves behind is what this interrupts."""


class TableMachine(RuleBasedStateMachine):
    """Writers, flushes, compactions and schema changes in any order. Subclasses give the keys."""

    keys: ClassVar[Keys]
    append_only: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="lancewal-machine-"))
        self.uri = str(self.directory / "t")
        self.model = TableModel(self.keys, append_only=self.append_only)
        self.writers: dict[int, OpenWriter] = {}
        self.rows_per_search = base_overlap._ROWS_PER_SEARCH
        self.steps = 0

    @initialize(
        base=st.lists(cells, max_size=6),
        indexed=st.sampled_from([None, "id", "name"]),
        late_column=st.booleans(),
    )
    def make_table(self, base: list[Cell], indexed: str | None, late_column: bool) -> None:
        if not self.append_only:
            base = list(dict(base).items())
        rows = self._table(base, self.model.columns)
        dataset = lance.write_dataset(rows, self.uri, schema=self.model.schema)
        # A BTree is asked for overlapping rows only where the base is large: here always, or never.
        base_overlap._ROWS_PER_SEARCH = 0 if indexed == "id" else self.rows_per_search
        if indexed is not None:
            dataset.create_scalar_index(indexed, "BTREE")
        self._upsert(base, self.model.columns)
        if late_column:
            # No data file has it yet, so Lance gives its field id out again once it is dropped.
            dataset.add_columns(self.model.add_column(TEXT).field)
        self.table = lancewal.initialize(
            self.uri, bucket=(self.keys.shard_column, BUCKETS), writer_defaults=DEFAULTS
        )
        self.store = ObjectStore.from_uri(self.uri, fsync=False)
        self.other = TableReader(self.store, live_writers=False)

    # --- writing ------------------------------------------------------------------------

    @rule(batches=some_rows, slot=slots, settings=settings_names, omit=st.booleans())
    def put(self, batches: list[list[Cell]], slot: int, settings: str, omit: bool) -> None:
        """Keys may recur within a batch and from batch to batch: the last one counts."""
        chosen = self._writer(slot, settings)
        columns = chosen.columns[:-1] if omit else chosen.columns
        data = [batch for part in batches for batch in self._table(part, columns).to_batches()]
        rows = [cell for part in batches for cell in part]
        lost = self._lost_shards(chosen, [number for number, _ in rows])
        assert self._written_without(chosen, chosen.writer.put, data) == lost
        self._upsert([cell for cell in rows if self._shard(cell[0]) not in lost], columns)

    @rule(cell=cells, slot=slots, settings=settings_names)
    def put_one(self, cell: Cell, slot: int, settings: str) -> None:
        self.put([[cell]], slot, settings, False)

    @precondition(lambda self: not self.append_only)
    @rule(numbers=st.lists(key_numbers, min_size=1, max_size=4), slot=slots, settings=settings_names)
    def delete(self, numbers: list[int], slot: int, settings: str) -> None:
        chosen = self._writer(slot, settings)
        columns = [self.keys.columns_of(number) for number in numbers]
        keys = pa.Table.from_pylist(columns, pa.schema(self.keys.fields)).to_batches()
        lost = self._lost_shards(chosen, numbers)
        assert self._written_without(chosen, chosen.writer.delete, keys) == lost
        for number in numbers:
            if self._shard(number) not in lost:
                self.model.delete(self.keys.key(number))

    @rule(how=st.sampled_from(["freeze", "flush the writer", "flush the table"]), slot=slots)
    def flush(self, how: str, slot: int) -> None:
        chosen = self.writers.get(slot)
        if how == "flush the table":
            self.table.flush()
        elif chosen is not None and chosen.has_memtable:
            lost = self._lost_shards(chosen)
            if how == "flush the writer":
                assert _done_without(chosen.writer.flush) <= lost
            else:
                # The flush that follows runs beside the next steps.
                for shard, writer in chosen.writer.shard_writers.items():
                    if shard not in lost:
                        writer.force_seal_active()

    @precondition(lambda self: self.writers)
    @rule(slot=slots, kill=st.booleans())
    def end_writer(self, slot: int, kill: bool) -> None:
        ending = self.writers.pop(slot, None)
        if ending is None:
            return
        if not kill:
            lost = self._lost_shards(ending)
            assert _done_without(ending.writer.close) <= lost
            return
        # As far as that goes within a process: nothing is flushed, closed or said.
        _abandon(ending)
        del ending
        gc.collect()

    @rule(rows=st.lists(cells, min_size=1, max_size=3), dead=st.lists(key_numbers, max_size=2))
    def write_to_base(self, rows: list[Cell], dead: list[int]) -> None:
        """Past the write path, where nothing lies over the base; compacted SSTables may be listed."""
        self.table.flush()
        compact(self.store)
        if self.append_only:
            lance.dataset(self.uri).insert(self._table(rows, self.model.columns))
        else:
            rows = list(dict(rows).items())
            upsert_into_base(self.uri, self._table(rows, self.model.columns), self.keys.names)
        self._upsert(rows, self.model.columns)
        for number in [] if self.append_only else dead:
            delete_from_base(self.uri, self.keys.columns_of(number))
            self.model.delete(self.keys.key(number))

    # --- maintenance --------------------------------------------------------------------

    @rule(files=st.booleans(), indexes=st.booleans())
    def compact(self, files: bool, indexes: bool) -> None:
        compact(self.store, compact_files=files, optimize_indexes=indexes)

    @rule(place=places, count=st.integers(1, 3))
    def compact_by_hand(self, place: int, count: int) -> None:
        """The oldest generations of one shard that the base does not hold yet."""
        base = self.other.base()
        pending = []
        for manifest in discover_manifests(self.store):
            marker = base.compacted_generation(manifest.shard_id)
            generations = sorted(e.generation for e in manifest.sstables if e.generation > marker)
            if generations:
                pending.append((manifest, generations))
        if pending:
            manifest, generations = pending[place % len(pending)]
            merge = append_by_hand if self.append_only else merge_by_hand
            merge(self.store, manifest, generations[min(count, len(generations)) - 1])

    @rule(place=places, passed=st.integers(0, 1))
    def compact_and_die(self, place: int, passed: int) -> None:
        """The compactor is gone when it comes to some point once more than ``passed`` times."""
        known = APPEND_POINTS if self.append_only else MERGE_POINTS
        point = known[place % len(known)]
        left = [passed]

        def die(reached: str) -> None:
            left[0] -= reached == point
            if left[0] < 0:
                raise _DeadError

        at_crash_points(die)
        try:
            compact(self.store)
        except _DeadError:
            event(f"died at {point}")
        finally:
            at_crash_points(None)

    @rule(collect=st.booleans())
    def prune(self, collect: bool) -> None:
        """What the base holds leaves the manifests, or all that nobody needs leaves the storage."""
        if collect and not any(map(self._lost_shards, self.writers.values())):
            # As if all were old. A writer that lost a shard would know by then, so there is none.
            old = set(Resource) - {Resource.ORPHANS, Resource.STAGING_FILES}
            collect_later(self.store, resources=old)
            return
        base = self.other.base()
        for manifest in discover_manifests(self.store):
            marker = base.compacted_generation(manifest.shard_id)

            def pruned(current: ShardManifest, marker: int = marker) -> ShardManifest:
                kept = tuple(entry for entry in current.sstables if entry.generation > marker)
                return replace(current, sstables=kept)

            ShardManifestStore(self.store, manifest.shard_id).commit_update(None, pruned)

    # --- columns ------------------------------------------------------------------------

    @rule(how=st.sampled_from(["add", "drop", "rename"]), type_=st.sampled_from([TEXT, NUMBER]), place=places)
    def change_columns(self, how: str, type_: pa.DataType, place: int) -> None:
        dataset = lance.dataset(self.uri)
        if how == "add" and len(self.model.columns) < MAX_COLUMNS:
            dataset.add_columns(self.model.add_column(type_).field)
        elif how == "drop" and len(self.model.columns) > 1:
            dataset.drop_columns([self.model.drop_column(place).name])
        else:
            old, new = self.model.rename_column(place)
            dataset.alter_columns({"path": old.name, "name": new.name})

    @rule(same_name=st.booleans())
    def replace_last_column(self, same_name: bool) -> None:
        """Another one of the same type, to which Lance may give the field id of the one that went."""
        old = self.model.drop_column(len(self.model.columns) - 1)
        lance.dataset(self.uri).drop_columns([old.name])
        new = self.model.add_column(old.type, old.name if same_name else None)
        lance.dataset(self.uri).add_columns(new.field)

    # --- reading ------------------------------------------------------------------------

    @invariant()
    def all_reads_equal_the_model(self) -> None:
        if not hasattr(self, "table"):
            return
        self.steps += 1
        readers = [self.table._reader, self.other]
        if self.steps % 5 == 0:
            readers.append(TableReader(self.store, live_writers=False))
        for reader in readers:
            check_scans(reader, self.model, self.steps)
            if not self.append_only:
                check_lookups(reader, self.model, self.steps)

    def teardown(self) -> None:
        base_overlap._ROWS_PER_SEARCH = self.rows_per_search
        while self.writers:
            _abandon(self.writers.popitem()[1])
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- pieces -------------------------------------------------------------------------

    def _table(self, rows: Sequence[Cell], columns: Sequence[Column]) -> pa.Table:
        shown = [
            {**self.keys.columns_of(number), **{column.name: column.value(seed) for column in columns}}
            for number, seed in rows
        ]
        return pa.Table.from_pylist(shown, pa.schema([*self.keys.fields, *(c.field for c in columns)]))

    def _upsert(self, rows: Sequence[Cell], columns: Sequence[Column]) -> None:
        for number, seed in rows:
            self.model.upsert(self.keys.key(number), seed, columns)

    def _writer(self, slot: int, settings: str) -> OpenWriter:
        if slot not in self.writers:
            writer = self.table.writer(take_over="now", **WRITER_SETTINGS[settings])
            self.writers[slot] = OpenWriter(writer, tuple(self.model.columns), settings)
        return self.writers[slot]

    def _written_without(
        self,
        chosen: OpenWriter,
        write: Callable[[pa.Table], TableWriteResult],
        batches: Sequence[pa.RecordBatch],
    ) -> set[UUID]:
        """Write, and wait until it is durable; the shards that were lost to another writer."""
        whole = pa.Table.from_batches(batches)
        if chosen.is_durable:
            return _done_without(lambda: write(whole))
        # One shard at a time: after an error there is nothing to wait for the others with.
        lost = set()
        for shard, rows in self.table.router().split(whole.combine_chunks().to_batches()[0]):
            try:
                write(pa.Table.from_batches([rows])).wait()
            except FencedError:
                lost.add(shard)
            except PartialWriteError as error:
                lost |= _fenced(error)
        return lost

    def _shard(self, number: int) -> UUID:
        return self.table.router().shard_of(self.keys.columns_of(number)[self.keys.shard_column])

    def _lost_shards(self, chosen: OpenWriter, numbers: Sequence[int] | None = None) -> set[UUID]:
        """The writer's shards (of some keys) that somebody else has claimed since."""
        asked = None if numbers is None else {self._shard(number) for number in numbers}
        return {
            shard
            for shard, writer in chosen.writer.shard_writers.items()
            if (asked is None or shard in asked) and self._epoch(shard) != writer.epoch
        }

    def _epoch(self, shard: UUID) -> int:
        return ShardManifestStore(self.store, shard).require_latest().writer_epoch


def _done_without(call: Callable[[], object]) -> set[UUID]:
    """The shards for which ``call`` failed because they were lost to another writer."""
    try:
        call()
    except PartialWriteError as error:
        return _fenced(error)
    return set()


def _fenced(error: PartialWriteError) -> set[UUID]:
    """The shards that failed; any other failure than a lost shard is raised again."""
    if not all(isinstance(each, FencedError) for each in error.failed.values()):
        raise error
    return set(error.failed)


def _abandon(dying: OpenWriter) -> None:
    for writer in dying.writer.shard_writers.values():
        abandon(writer)
