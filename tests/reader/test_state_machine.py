"""Everything that can happen to a table, in any order: reads agree with a dictionary throughout."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lancewal.format.schema import without_field_ids
from lancewal.reader import TableReader
from lancewal.reader import base_keys as base_overlap
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.routing import ShardRouter
from lancewal.writer import ShardWriter
from tests.reader.support import Row, TableUnderTest
from tests.tables import KEY, abandon

SCHEMA = pa.schema(
    [pa.field("id", pa.int64(), False, KEY), pa.field("name", pa.string()), pa.field("size", pa.int64())]
)
KEYS = st.lists(st.integers(0, 11), min_size=1, max_size=5)
NAMES = st.sampled_from(["a", "b", "c", None])


class MergedReads(RuleBasedStateMachine):
    """Two shards; each has at most one writer, which may be replaced, killed or closed."""

    @initialize(keys=KEYS, indexed=st.booleans())
    def start(self, keys: list[int], indexed: bool) -> None:
        # So that the base's BTree is asked although the table is small.
        self.rows_per_search, base_overlap._ROWS_PER_SEARCH = base_overlap._ROWS_PER_SEARCH, 0
        self.directory = tempfile.TemporaryDirectory()
        seed: list[Row] = [{"id": key, "name": "base", "size": key} for key in sorted(set(keys))]
        data = pa.Table.from_pylist(seed, SCHEMA)
        self.table = TableUnderTest(
            Path(self.directory.name) / "t",
            SCHEMA,
            data,
            bucket_column="id",
            num_buckets=2,
            maintained_indexes=[],
        )
        if indexed:
            self.table.dataset.create_scalar_index("id", "BTREE")
        base = self.table.live.base()
        self.router = ShardRouter.for_table(base.details, base.schema)
        for shard in self.router.known_shards():
            shard.create(self.table.store)
        self.shards = [shard.shard_id for shard in self.router.known_shards()]
        self.writers: dict[UUID, ShardWriter] = {}
        self.model: dict[int, Row] = {row["id"]: row for row in seed}
        self.columns = ["id", "name", "size"]
        self.added = 0

    def teardown(self) -> None:
        if hasattr(self, "table"):
            base_overlap._ROWS_PER_SEARCH = self.rows_per_search
            for writer in self.writers.values():
                abandon(writer)
            self.directory.cleanup()

    def _writer(self, shard: UUID) -> ShardWriter:
        if shard not in self.writers:
            self.writers[shard] = self.table.open(shard)
        return self.writers[shard]

    def _split(self, keys: list[int]) -> dict[UUID, list[int]]:
        parts: dict[UUID, list[int]] = {}
        for key in keys:
            parts.setdefault(self.router.shard_of(key), []).append(key)
        return parts

    @rule(keys=KEYS, name=NAMES, size=st.integers(0, 3))
    def put(self, keys: list[int], name: str | None, size: int) -> None:
        for shard, part in self._split(keys).items():
            writer = self._writer(shard)
            # The writer may be older than the table's newest columns; it takes those it knows.
            known = {field.name for field in writer.schema}
            values = {"name": name, "title": name, "size": size}
            row = {column: values.get(column) for column in known if column != "id"}
            writer.put(pa.Table.from_pylist([{"id": key, **row} for key in part], writer.schema))
            for key in part:
                self.model[key] = {"id": key, **self._as_read(row)}

    def _as_read(self, row: dict[str, Any]) -> dict[str, Any]:
        """A row of a writer, under the names that its columns have by now."""
        name = row.get("name", row.get("title"))
        read = {"name": name, "title": name, "size": row.get("size")}
        return {column: read.get(column) for column in self.columns if column != "id"}

    @rule(keys=KEYS)
    def delete(self, keys: list[int]) -> None:
        for shard, part in self._split(keys).items():
            self._writer(shard).delete(part)
            for key in part:
                self.model.pop(key, None)

    @rule(number=st.integers(0, 1), wait=st.booleans())
    def freeze(self, number: int, wait: bool) -> None:
        writer = self._writer(self.shards[number])
        writer.force_seal_active()
        if wait:
            writer.wait_for_flush_drain()

    @rule(number=st.integers(0, 1))
    def close(self, number: int) -> None:
        writer = self.writers.pop(self.shards[number], None)
        if writer is not None:
            writer.close()

    @rule(number=st.integers(0, 1))
    def kill(self, number: int) -> None:
        writer = self.writers.pop(self.shards[number], None)
        if writer is not None:
            abandon(writer)

    @rule(number=st.integers(0, 1))
    def take_over(self, number: int) -> None:
        shard = self.shards[number]
        former = self.writers.pop(shard, None)
        self.writers[shard] = self.table.open(shard)
        if former is not None:
            abandon(former)

    @rule(number=st.integers(0, 1), all_of_them=st.booleans())
    def compact(self, number: int, all_of_them: bool) -> None:
        shard = self.shards[number]
        manifest = ShardManifestStore(self.table.store, shard).require_latest()
        marker = self.table.live.base().compacted_generation(shard)
        generations = sorted(e.generation for e in manifest.sstables if e.generation > marker)
        if generations:
            self.table.compact(generations[-1] if all_of_them else generations[0], shard)

    @precondition(lambda self: self.added < 2)
    @rule()
    def add_column(self) -> None:
        self.added += 1
        name = f"extra_{self.added}"
        self.table.dataset.add_columns(pa.field(name, pa.string()))
        self.columns.append(name)
        for row in self.model.values():
            row[name] = None

    @precondition(lambda self: "size" in self.columns)
    @rule()
    def drop_column(self) -> None:
        self.table.dataset.drop_columns(["size"])
        self.columns.remove("size")
        for row in self.model.values():
            row.pop("size")

    @precondition(lambda self: "name" in self.columns)
    @rule()
    def rename_column(self) -> None:
        self.table.dataset.alter_columns({"path": "name", "name": "title"})
        self.columns[self.columns.index("name")] = "title"
        for row in self.model.values():
            row["title"] = row.pop("name")

    @invariant()
    def reads_agree_with_the_dictionary(self) -> None:
        if not hasattr(self, "model"):
            return
        for reader in self.table.readers:
            self._check(reader)

    def _check(self, reader: TableReader) -> None:
        scan = reader.scan()
        assert _by_key(scan.to_table()) == self.model
        assert scan.count_rows() == len(self.model)
        text = "name" if "name" in self.columns else "title"
        for filter, matches in (
            (f"{text} = 'a'", lambda row: row[text] == "a"),
            (f"{text} IS NULL AND id > 3", lambda row: row[text] is None and row["id"] > 3),
            (
                f"id IN (1, 1, 2, 7) AND {text} != 'b'",
                lambda row: row["id"] in (1, 2, 7) and row[text] in ("a", "c", "base"),
            ),
        ):
            expected = {key: row for key, row in self.model.items() if matches(row)}
            filtered = reader.scan(filter=filter)
            assert _by_key(filtered.to_table()) == expected
            assert filtered.count_rows() == len(expected)
        limited = reader.scan(limit=3, offset=1).to_table()
        assert limited.num_rows == min(3, max(len(self.model) - 1, 0))
        assert _by_key(limited).items() <= self.model.items()
        asked = [11, 0, 5, 0, 3]
        answer = reader.lookup(asked)
        assert answer.found.tolist() == [key in self.model for key in asked]
        assert answer.table.to_pylist() == [
            _ordered(self.model[key], self.columns) for key in asked if key in self.model
        ]
        assert all(field.equals(without_field_ids(field), check_metadata=True) for field in scan.schema)


def _ordered(row: Row, columns: list[str]) -> Row:
    return {column: row[column] for column in columns}


def _by_key(table: pa.Table) -> dict[int, Row]:
    rows = {row["id"]: row for row in table.to_pylist()}
    assert len(rows) == table.num_rows
    return rows


_COMMON: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}

TestMergedReads = MergedReads.TestCase
TestMergedReads.settings = settings(max_examples=6, stateful_step_count=12, **_COMMON)


@pytest.mark.soak
def test_merged_reads_for_long() -> None:
    run_state_machine_as_test(
        MergedReads,
        settings=settings(max_examples=300, stateful_step_count=40, **_COMMON),
    )
