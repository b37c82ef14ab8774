"""A shard writer against plain Python: random operations, faults, crashes and take-overs.

Memory and SSTables together hold, after every step, what a model holds. Where the outcome of
a write is unknown (it raised, or was not durable when the writer died) the model keeps every
state that is possible, and the next writer must find one of them.
"""

from __future__ import annotations

import shutil
import tempfile
import uuid
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import lancewal.writer.flush
import lancewal.writer.group_commit
from lancewal.errors import FencedError, LanceWalError
from lancewal.storage import layout
from lancewal.writer import ShardWriter
from tests.faults import FAILURES, FaultyStore
from tests.shards import Row, manifest_of, newest, store_of
from tests.tables import APPEND_ONLY, KEYED, abandon, new_table, open_writer

#: Rows by key, or (without a key) the names of all rows in the order of their writing.
State = tuple[tuple[int, str], ...]

IDS = st.integers(0, 9)
TEXTS = st.sampled_from("abc")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(lancewal.writer.group_commit, "RETRY_PAUSE_SECONDS", 0.0)


class ShardMachine(RuleBasedStateMachine):
    keyed = True

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.base = new_table(self.directory / "t", KEYED if self.keyed else APPEND_ONLY)
        self.store = FaultyStore(store_of(self.base))
        self.shard_id = uuid.uuid4()
        self.sstables: dict[str, list[Row]] = {}
        #: The states that a new writer may find; the last one is what the open writer shows.
        self.states: list[State] = [()]
        self.writer: ShardWriter
        self.ended = False
        self.durable = True

    def teardown(self) -> None:
        if hasattr(self, "writer"):
            abandon(self.writer)
        shutil.rmtree(self.directory)

    # --- opening --------------------------------------------------------------------

    @initialize(durable=st.booleans(), limit=st.sampled_from([3, 8, 1000]))
    def first_open(self, durable: bool, limit: int) -> None:
        self.open(durable, limit)

    def open(self, durable: bool, limit: int) -> None:
        self.store.faults.clear()
        self.writer = open_writer(
            self.base,
            self.shard_id,
            store=self.store,
            durable_write=durable,
            max_wal_flush_interval=None,
            max_memtable_rows=limit,
        )
        self.durable = durable
        self.ended = False
        found = self.found()
        assert found in self.states, f"found {found}, possible were {self.states}"
        self.states = [found]

    @rule(durable=st.booleans(), limit=st.sampled_from([3, 8, 1000]))
    def crash_and_reopen(self, durable: bool, limit: int) -> None:
        abandon(self.writer)
        self.open(durable, limit)

    @rule(durable=st.booleans(), limit=st.sampled_from([3, 1000]))
    def take_over(self, durable: bool, limit: int) -> None:
        """The old writer lives on; it must not get another write through, nor a flush."""
        old, epoch = self.writer, self.writer.epoch
        self.open(durable, limit)
        assert self.writer.epoch == epoch + 1
        with pytest.raises(LanceWalError):
            old.put(self.rows([(0, "late")])).durable.wait()
        with pytest.raises(FencedError):
            old.check_fenced()
        abandon(old)

    @rule(durable=st.booleans(), limit=st.sampled_from([3, 8, 1000]))
    def close_and_reopen(self, durable: bool, limit: int) -> None:
        try:
            self.writer.close()
            assert not self.ended or self.writer.memtable_stats().row_count == 0
            self.states = self.states[-1:] if not self.ended else self.states
        except LanceWalError:
            abandon(self.writer)  # what was acknowledged durably is in the WAL
        self.open(durable, limit)

    # --- writing --------------------------------------------------------------------

    @rule(batches=st.lists(st.lists(st.tuples(IDS, TEXTS), min_size=1, max_size=3), min_size=1, max_size=3))
    def put(self, batches: list[list[tuple[int, str]]]) -> None:
        after = self.states[-1]
        for rows in batches:
            after = self.with_rows(after, rows)
        self.write(lambda: self.writer.put([self.rows(rows) for rows in batches]), after)

    @precondition(lambda self: self.keyed)
    @rule(keys=st.lists(IDS, min_size=1, max_size=3, unique=True))
    def delete(self, keys: list[int]) -> None:
        after = tuple(item for item in self.states[-1] if item[0] not in keys)
        self.write(lambda: self.writer.delete(keys), after)

    def write(self, call: Any, after: State) -> None:
        try:
            call()
        except LanceWalError:
            if not self.ended:
                self.states = [*self.states, after]
            self.ended = True
        else:
            assert not self.ended, "a writer that ended took a write"
            self.states = [after] if self.durable else [*self.states, after]

    @rule()
    def make_durable(self) -> None:
        try:
            self.writer._log.commit_all()
        except LanceWalError:
            self.ended = True
        else:
            self.states = self.states if self.ended else self.states[-1:]

    # --- flushing -------------------------------------------------------------------

    @rule()
    def freeze(self) -> None:
        try:
            self.writer.force_seal_active()
        except LanceWalError:
            self.has_ended()

    @rule()
    def drain(self) -> None:
        try:
            self.writer.wait_for_flush_drain()
        except FAILURES:
            self.ended = self.ended or self.writer._state.ended.failure is not None

    def has_ended(self) -> None:
        """A flush in the background may be the first to meet a WAL that cannot be written."""
        assert self.writer._state.ended.failure is not None
        self.ended = True

    # --- faults ---------------------------------------------------------------------

    @rule(times=st.sampled_from([1, 2, 5]), after=st.booleans())
    def flushes_fail(self, times: int, after: bool) -> None:
        self.store.faults.fail("put_if_absent", times=times, after=after, where="/manifest/")

    @rule(times=st.sampled_from([1, 2, None]), after=st.booleans())
    def wal_writes_fail(self, times: int | None, after: bool) -> None:
        self.store.faults.fail("put_if_absent", times=times, after=after, where="/wal/")

    @rule()
    def storage_recovers(self) -> None:
        self.store.faults.clear()

    # --- reading --------------------------------------------------------------------

    @invariant()
    def everything_is_there(self) -> None:
        if not hasattr(self, "writer"):
            return
        try:
            found = self.found()
        except LanceWalError:
            self.has_ended()
        else:
            assert self.ended or found == self.states[-1]
        if self.writer._state.ended.poisoned:
            with pytest.raises(LanceWalError):
                self.writer.scan()

    def found(self) -> State:
        """Every generation once, from memory or from its SSTable; where both have it they agree."""
        refs = self.writer.in_memory_memtable_refs()
        levels = {view.generation: view.stored.to_pylist() for view in [*refs.frozen, refs.active]}
        for entry in manifest_of(self.base, self.shard_id).sstables:
            flushed = self.sstable(entry.path)
            if levels.get(entry.generation):
                assert self.state_of(levels[entry.generation]) == self.state_of(flushed)
            levels[entry.generation] = flushed
        assert sorted(levels) == list(range(1, max(levels) + 1)), "generations have a gap"
        return self.state_of([row for generation in sorted(levels) for row in levels[generation]])

    def sstable(self, path: str) -> list[Row]:
        if path not in self.sstables:
            uri = layout.child_uri(self.base.uri, layout.sstable_dir(self.shard_id, path))
            self.sstables[path] = lance.dataset(uri).to_table().to_pylist()
        return self.sstables[path]

    def state_of(self, rows: list[Row]) -> State:
        if self.keyed:
            return tuple(sorted((row["id"], row["name"]) for row in newest(rows).values()))
        return tuple((row["id"], row["name"]) for row in rows)

    def with_rows(self, state: State, rows: list[tuple[int, str]]) -> State:
        if self.keyed:
            return tuple(sorted({**dict(state), **dict(rows)}.items()))
        return (*state, *rows)

    def rows(self, rows: list[tuple[int, str]]) -> pa.RecordBatch:
        ids, names = zip(*rows, strict=True)
        return pa.record_batch([pa.array(ids, pa.int64()), pa.array(names)], names=["id", "name"])


class AppendOnlyMachine(ShardMachine):
    """Without a key a row that is written or replayed twice is seen twice."""

    keyed = False


def examples(count: int) -> settings:
    return settings(
        max_examples=count,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


class TestKeyedShard(ShardMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = examples(20)


class TestAppendOnlyShard(AppendOnlyMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = examples(20)


@pytest.mark.soak
class TestKeyedShardForLong(ShardMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = examples(500)


@pytest.mark.soak
class TestAppendOnlyShardForLong(AppendOnlyMachine.TestCase):  # type: ignore[misc, valid-type]
    settings = examples(500)
