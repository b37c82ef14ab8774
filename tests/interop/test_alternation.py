"""Our writer and Lance's take turns on one shard; after every turn both read what a dict holds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest
from lance.mem_wal import ShardSnapshot

import lancewal
from lancewal.base.table import BaseTable
from lancewal.reader import TableReader
from lancewal.writer import ShardWriter
from tests.shards import manifest_of, newest, settled_rows, store_of
from tests.tables import abandon, open_writer

TURNS = 30
CHILD = Path(__file__).with_name("alternation_child.py")

_KEY = "lance-schema:unenforced-primary-key"

Row = dict[str, Any]
Key = tuple[Any, ...]


def key_field(name: str, type_: pa.DataType, position: int) -> pa.Field:
    return pa.field(name, type_, nullable=False, metadata={_KEY: "true", f"{_KEY}:position": str(position)})


PAYLOAD = [
    pa.field("name", pa.string()),
    pa.field("place", pa.struct([pa.field("x", pa.int32()), pa.field("tag", pa.string())])),
    pa.field("vector", pa.list_(pa.float32(), 2)),
]


@dataclass
class Kind:
    """A shape of table: its key columns, how to make the n-th key, and columns that were dropped."""

    key: list[pa.Field]
    make_key: Callable[[int], Key]
    dropped_before: Sequence[str] = ()
    extra: list[pa.Field] = field(default_factory=list)

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*self.extra[:1], *self.key, *self.extra[1:2], *PAYLOAD, *self.extra[2:]])


GONE = [pa.field(f"gone_{i}", pa.int64()) for i in range(3)]

KINDS = {
    "int": Kind([key_field("id", pa.int64(), 1)], lambda n: (n - 20,)),
    "text": Kind([key_field("id", pa.string(), 1)], lambda n: (f"kéy {n}" * (1 + n % 3),)),
    "composite": Kind(
        [key_field("part", pa.string(), 1), key_field("number", pa.int32(), 2)],
        lambda n: ("ab\0"[: n % 4], n // 4 - 4),
    ),
    "gaps": Kind([key_field("id", pa.int64(), 1)], lambda n: (n,), ["gone_0", "gone_1", "gone_2"], GONE),
    "nested gaps": Kind([key_field("id", pa.int32(), 1)], lambda n: (n,), ["place.x", "gone_0"], GONE[:1]),
}


class Shard:
    """One shard, what must be in it, and both ways to write and read it."""

    def __init__(self, where: Path, kind: Kind, seed: int) -> None:
        self.kind = kind
        self.choose = random.Random(seed)
        dataset = lance.write_dataset(kind.schema.empty_table(), str(where), schema=kind.schema)
        for column in kind.dropped_before:
            dataset.drop_columns([column])
        lance.dataset(str(where)).initialize_mem_wal(unsharded=True)
        self.uri = str(where)
        self.shard_id: UUID = uuid4()
        self.reader = TableReader(store_of(self.base), live_writers=False)
        self.model: dict[Key, Row] = {}
        self.writes = 0
        self.changed = False
        # Not together with small MemTables of Lance's: where its replay must split a generation at
        # an entry that has none, it publishes it, and passes over the rest of that generation.
        self.wal_only = self.choose.random() < 0.5

    @property
    def base(self) -> BaseTable:
        return BaseTable.open(self.uri)

    @property
    def schema(self) -> pa.Schema:
        return lance.dataset(self.uri).schema

    @property
    def key_names(self) -> list[str]:
        return [key.name for key in self.kind.key]

    def new_rows(self) -> list[Row]:
        """Rows for some keys, one of them twice at times; null in what may be null."""
        self.writes += 1
        numbers = [self.choose.randrange(40) for _ in range(self.choose.randint(1, 8))]
        return [self._row(number, i) for i, number in enumerate(numbers)]

    def _row(self, number: int, i: int) -> Row:
        row: Row = dict(zip(self.key_names, self.kind.make_key(number), strict=True))
        for column in self.schema:
            if column.name not in row:
                filled = self.choose.random() < 0.8
                row[column.name] = self._value(column.type, number, i) if filled else None
        return row

    def _value(self, type_: pa.DataType, number: int, i: int) -> Any:
        if pa.types.is_struct(type_):
            return {child.name: self._value(child.type, number, i) for child in type_}
        if pa.types.is_fixed_size_list(type_):
            return [float(number), float(self.writes)]
        return f"w{self.writes}.{i}" if pa.types.is_string(type_) else number

    def remember(self, rows: list[Row]) -> None:
        for row in rows:
            self.model[tuple(row[name] for name in self.key_names)] = row

    def forget(self, rows: list[Row]) -> None:
        for row in rows:
            self.model.pop(tuple(row[name] for name in self.key_names), None)

    def some_keys(self) -> list[Row]:
        """Keys to delete: mostly ones that are there."""
        there = list(self.model)
        keys = self.choose.sample(there, min(len(there), self.choose.randint(1, 4)))
        if self.choose.random() < 0.3:
            keys.append(self.kind.make_key(self.choose.randrange(40)))
        return [dict(zip(self.key_names, key, strict=True)) for key in dict.fromkeys(keys)]

    def table(self, rows: list[Row]) -> pa.Table:
        return pa.Table.from_pylist(rows, schema=self.schema)

    def key_table(self, rows: list[Row]) -> pa.Table:
        return pa.Table.from_pylist(rows, schema=pa.schema([self.schema.field(n) for n in self.key_names]))

    def operations(self) -> list[tuple[str, list[Row]]]:
        found = []
        for _ in range(self.choose.randint(1, 4)):
            kind = self.choose.choices(["put", "delete", "flush"], [6, 2, 2])[0]
            rows = {"put": self.new_rows, "delete": self.some_keys, "flush": list}[kind]()
            if kind == "put":
                self.remember(rows)
            elif kind == "delete":
                self.forget(rows)
            if rows or kind == "flush":
                found.append((kind, rows))
        return found

    def change_schema(
        self, change: Callable[[lance.LanceDataset], None], on_row: Callable[[Row], Row]
    ) -> None:
        change(lance.dataset(self.uri))
        self.model = {key: on_row(dict(row)) for key, row in self.model.items()}
        self.changed = True

    # --- turns ----------------------------------------------------------------------

    def our_turn(self) -> None:
        memtable = not self.wal_only or self.choose.random() < 0.6
        durable = self.choose.random() < 0.7
        rows = self.choose.choice([3, 10, 100_000])
        writer = open_writer(
            self.base,
            self.shard_id,
            enable_memtable=memtable,
            durable_write=durable,
            max_memtable_rows=rows,
            sync_indexed_write=self.choose.random() < 0.5,
        )
        for kind, rows_ in self.operations():
            self._apply_ours(writer, kind, rows_, memtable)
        if durable and self.choose.random() < 0.5:
            abandon(writer)
        else:
            writer.close()

    def _apply_ours(self, writer: ShardWriter, kind: str, rows: list[Row], memtable: bool) -> None:
        if kind == "put":
            writer.put(self.table(rows))
        elif kind == "delete":
            writer.delete(self.key_table(rows))
        elif memtable:
            writer.force_seal_active()
            if self.choose.random() < 0.5:
                writer.wait_for_flush_drain()

    def their_turn(self) -> None:
        # By bytes: it refuses to replay a generation with more rows or batches than its own limit.
        size = 1 << 20 if self.wal_only else self.choose.choice([500, 1 << 20])
        writer = self.their_writer(max_memtable_size=size)
        for kind, rows_ in self.operations():
            if kind == "put":
                writer.put(self.table(rows_))
            elif kind == "delete":
                writer.delete(self.key_table(rows_))
            else:  # Closing is its only way to flush on demand.
                writer.close()
                writer = self.their_writer(max_memtable_size=size)
        if self.choose.random() < 0.5:
            writer.close()
        del writer

    def their_writer(self, **settings: Any) -> lance.mem_wal.ShardWriter:
        dataset = lance.dataset(self.uri)
        return dataset.mem_wal_writer(str(self.shard_id), max_wal_flush_interval_ms=1, **settings)

    def killed_turn(self, library: str) -> None:
        """A process of its own, killed right after its last acknowledgement."""
        order = {
            "library": library,
            "uri": self.uri,
            "shard": str(self.shard_id),
            "operations": self.operations(),
            "key": self.key_names,
        }
        done = subprocess.run(
            [sys.executable, str(CHILD)],
            input=json.dumps(order),
            env={**os.environ, "PYTHONPATH": str(Path(lancewal.__file__).parent.parent)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == -9, done.stderr

    # --- reads ----------------------------------------------------------------------

    def check_ours(self) -> None:
        """As another process reads it, and as a writer that opens the shard finds it."""
        self._compare("our reader", self.reader.scan().to_table().to_pylist())
        if self.choose.random() < 0.3 and not self.changed:
            writer = open_writer(self.base, self.shard_id)
            found = newest(settled_rows(self.base, writer), self.key_names)
            abandon(writer)
            self._compare("our writer", list(found.values()))

    def check_theirs(self) -> None:
        writer = self.their_writer()
        manifest = manifest_of(self.base, self.shard_id)
        snapshot = ShardSnapshot(str(self.shard_id)).with_current_generation(manifest.current_generation)
        for entry in manifest.sstables:
            snapshot = snapshot.with_sstable(entry.generation, entry.path)
        found = writer.lsm_scanner([snapshot]).to_table().to_pylist()
        del writer
        self._compare("Lance", found)

    def _compare(self, who: str, found: list[Row]) -> None:
        by_key = {tuple(row[name] for name in self.key_names): row for row in found}
        assert len(by_key) == len(found), f"{who} reads a key twice"
        assert by_key == self.model, f"{who} reads something else"


def play(shard: Shard, turns: int, killed: dict[int, str] | None = None) -> None:
    for turn in range(turns):
        if killed and turn in killed:
            shard.killed_turn(killed[turn])
        else:
            shard.choose.choice([shard.our_turn, shard.their_turn])()
        checks = [shard.check_ours, shard.check_theirs]
        shard.choose.shuffle(checks)
        for check in checks:
            check()


@pytest.mark.parametrize("kind", KINDS)
def test_both_read_the_same_after_every_turn(tmp_path: Path, kind: str) -> None:
    play(Shard(tmp_path / "t", KINDS[kind], seed=len(kind)), TURNS)


def test_both_read_the_same_after_kills_of_either(tmp_path: Path) -> None:
    killed = {3: "lance", 5: "lancewal", 7: "lance", 8: "lancewal"}
    play(Shard(tmp_path / "t", KINDS["int"], seed=77), 10, killed)


def without(name: str) -> Callable[[Row], Row]:
    return lambda row: {column: value for column, value in row.items() if column != name}


CHANGES: list[tuple[Callable[[lance.LanceDataset], None], Callable[[Row], Row]]] = [
    (
        lambda dataset: dataset.add_columns(pa.schema([pa.field("extra", pa.int32())])),
        lambda row: {**row, "extra": None},
    ),
    (
        lambda dataset: dataset.alter_columns({"path": "name", "name": "title"}),
        lambda row: {**without("name")(row), "title": row["name"]},
    ),
    (lambda dataset: dataset.drop_columns(["vector"]), without("vector")),
    # Adding another column after this would reuse a field id, which Lance's own reader refuses.
    (lambda dataset: dataset.drop_columns(["extra"]), without("extra")),
]


@pytest.mark.parametrize("seed", [1, 2])
def test_both_read_the_same_while_the_schema_changes(tmp_path: Path, seed: int) -> None:
    shard = Shard(tmp_path / "t", KINDS["int"], seed)
    for change, on_row in CHANGES:
        play(shard, 3)
        shard.change_schema(change, on_row)
    play(shard, 3)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("kind", KINDS)
def test_both_read_the_same_for_many_seeds(tmp_path: Path, kind: str, seed: int) -> None:
    play(Shard(tmp_path / "t", KINDS[kind], seed), TURNS)
