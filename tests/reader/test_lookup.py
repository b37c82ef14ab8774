"""Look-ups by key: order, missing keys, forms of asking, and which shards are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.reader import base_keys, base_source
from lancewal.reader.state import ShardPlace, ShardReader
from lancewal.shard.routing import ShardRouter
from tests.reader.support import TableUnderTest, looked_up, named
from tests.tables import KEY


@pytest.fixture
def table(tmp_path: Path) -> TableUnderTest:
    table = TableUnderTest(tmp_path / "t", data=named({i: f"base {i}" for i in range(100)}))
    table.flushed({i: f"flushed {i}" for i in range(10, 20)}, [30])
    return table


def test_answers_come_in_the_order_asked_and_missing_keys_are_told(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({5: "live 5"}))
        writer.delete([40])
        asked = [99, 5, 10, 40, -1, 30, 0, 5]
        assert looked_up(table, asked) == [
            "base 99", "live 5", "flushed 10", None, None, None, "base 0", "live 5",
        ]  # fmt: skip


def test_a_point_lookup_returns_the_newest_duplicate_not_the_oldest(table: TableUnderTest) -> None:
    with table.writer() as writer:
        writer.put(named({7: "first"}))
        writer.put(named({7: "second"}))
        assert looked_up(table, [7]) == ["second"]
    assert looked_up(table, [7]) == ["second"] == [row["name"] for row in table.lance_lookup(7)]


@pytest.mark.parametrize(
    "keys",
    [
        7,
        [7],
        pa.array([7]),
        pa.chunked_array([[7]]),
        pa.table({"id": [7], "more": ["x"]}),
        pa.record_batch({"id": [7]}),
        [(7,)],
        {"id": 7},
        [{"id": 7}],
        np.array([7]).tolist(),
    ],
)
def test_keys_are_taken_in_many_forms(table: TableUnderTest, keys: object) -> None:
    answer = table.live.lookup(keys, ["name"])
    assert answer.table.to_pydict() == {"name": ["base 7"]}
    assert answer.found.tolist() == [True]


@pytest.mark.parametrize(
    "keys", ["text", [None], ["7"], [2**70], pa.array([1.5]), pa.table({"other": [1]}), [(1, 2)]]
)
def test_keys_that_are_none_are_refused(table: TableUnderTest, keys: object) -> None:
    with pytest.raises(InvalidInputError):
        table.live.lookup(keys)


def test_an_unknown_column_is_refused(table: TableUnderTest) -> None:
    with pytest.raises(InvalidInputError, match="nope"):
        table.live.lookup([1], ["nope"])


def test_no_key_no_row(table: TableUnderTest) -> None:
    answer = table.live.lookup([])
    assert answer.table.num_rows == 0
    assert answer.table.schema.names == ["id", "name"]
    assert len(answer.found) == 0


def test_many_keys_are_asked_of_the_base_in_portions(
    table: TableUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base_source, "KEYS_AT_A_TIME", 7)
    monkeypatch.setattr(base_keys, "MOST_KEPT", 0)
    asked = [(i * 37) % 120 for i in range(60)]
    assert looked_up(table, asked) == [
        None if key >= 100 or key == 30 else f"{'flushed' if 10 <= key < 20 else 'base'} {key}"
        for key in asked
    ]


def test_a_btree_on_the_key_answers_the_same(table: TableUnderTest) -> None:
    table.dataset.create_scalar_index("id", "BTREE")
    assert looked_up(table, [3, 15, 30, 500, 98]) == ["base 3", "flushed 15", None, None, "base 98"]


def test_only_the_keys_own_shard_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TableUnderTest(tmp_path / "t", bucket_column="id", num_buckets=4, maintained_indexes=[])
    base = table.live.base()
    router = ShardRouter.for_table(base.details, base.schema)
    for shard, rows in router.route(named({i: f"n{i}" for i in range(40)}).combine_chunks().to_batches()[0]):
        shard.create(table.store)
        with table.writer(shard.shard_id) as writer:
            writer.put(rows)
    assert looked_up(table, list(range(41))) == [*(f"n{i}" for i in range(40)), None]
    assert looked_up(table, [11]) == ["n11"]
    asked: list[UUID] = []
    read = ShardReader.read

    def watched(self: ShardReader) -> ShardPlace | None:
        asked.append(self.shard_id)
        return read(self)

    monkeypatch.setattr(ShardReader, "read", watched)
    assert table.live.lookup([11]).table["name"].to_pylist() == ["n11"]
    assert asked == [router.shard_of(11)]


def test_boolean_binary_and_small_integer_keys(tmp_path: Path) -> None:
    kinds: list[tuple[pa.DataType, list[Any]]] = [
        (pa.bool_(), [True, False]),
        (pa.binary(), [b"\x00'", b"\xff"]),
        (pa.int16(), [-3, 4]),
        (pa.string(), ["o'x", "é"]),
    ]
    for number, (type_, values) in enumerate(kinds):
        schema = pa.schema([pa.field("id", type_, False, KEY), pa.field("name", pa.string())])
        data = pa.table([pa.array(values, type_), pa.array(["base 0", "base 1"])], schema=schema)
        table = TableUnderTest(tmp_path / f"t{number}", schema, data)
        assert looked_up(table, values) == ["base 0", "base 1"]
        with table.writer() as writer:
            writer.put(data.slice(1).set_column(1, "name", pa.array(["new"])).cast(schema))
            assert looked_up(table, values[::-1]) == ["new", "base 0"]
        assert looked_up(table, values[::-1]) == ["new", "base 0"]
        for reader in table.readers:
            assert sorted(reader.scan().to_table()["name"].to_pylist()) == ["base 0", "new"]


def test_an_array_without_dimensions_was_an_untyped_error(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", [{"id": 1, "n": 2}], key="id")
    assert table.lookup(np.array(1)) == {"id": 1, "n": 2}
    with table.writer() as writer:
        writer.delete(np.array(1))
    assert table.lookup(np.array(1)) is None
