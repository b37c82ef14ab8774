"""Keys at the ends of their types, at every level and in every operation, against a dict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.predicate.dialect import literal
from lancewal.reader import TableReader
from lancewal.reader import base_keys as base_overlap
from lancewal.storage import ObjectStore
from lancewal.table import Table
from tests.tables import KEY, fast

Key = tuple[Any, ...]
#: Operations in turn; each applies to some of the keys.
Step = tuple[str, list[Key]]

_TEXTS = [
    "",
    "\0",
    "a\0b",
    "a",
    "'",
    "''",
    '"',
    "`",
    "\\",
    "\\'",
    "--",
    "/*",
    "%_",
    "\r\n\t",
    "e\u0301",
    "é",
    "😀",
    "\U0010ffff",
    "\ufeff",
    "x" * 70_000,
]
_BYTES = [b"", b"\0", b"\0\0", b"a\0b", b"\xff", b"\x00\xff", b"'", b"\\", b"\xed\xa0\x80", b"y" * 70_000]


def _integers(type_: pa.DataType) -> list[int]:
    bits = type_.bit_width
    if pa.types.is_signed_integer(type_):
        low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
        return [low, low + 1, -1, 0, 1, high - 1, high]
    high = (1 << bits) - 1
    return [0, 1, high >> 1, (high >> 1) + 1, high - 1, high]


_INTEGERS = [
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
]
EXTREMES: dict[pa.DataType, list[Any]] = {
    pa.bool_(): [False, True],
    **{type_: _integers(type_) for type_ in _INTEGERS},
    pa.string(): _TEXTS,
    pa.large_string(): _TEXTS,
    pa.binary(): _BYTES,
    pa.large_binary(): _BYTES,
}
COMPOSITES = [
    (pa.int64(), pa.string()),
    (pa.binary(), pa.bool_(), pa.uint64()),
    (pa.large_string(), pa.int8()),
]
KINDS: list[tuple[pa.DataType, ...]] = [*((type_,) for type_ in EXTREMES), *COMPOSITES]


def _keys(kind: Sequence[pa.DataType]) -> st.SearchStrategy[Key]:
    return st.tuples(*(st.sampled_from(EXTREMES[type_]) for type_ in kind))


def _steps(kind: Sequence[pa.DataType]) -> st.SearchStrategy[list[Step]]:
    some = st.lists(_keys(kind), min_size=1, max_size=8, unique=True)
    step = st.tuples(st.sampled_from(["put", "delete"]), some)
    # Every level is reached by every example: rows of the base, of two SSTables, of a log.
    return st.tuples(some, step, step, step, step).map(
        lambda drawn: [
            ("base", drawn[0]),
            *(drawn[1], ("flush", []), drawn[2], ("flush", []), drawn[3]),
            *(("compact", []), drawn[4]),
        ]
    )


class Model:
    """A table, and the dict that it must equal."""

    def __init__(self, where: Path, kind: Sequence[pa.DataType], base: list[Key], *, btree: bool) -> None:
        self.names = [f"k{place}" for place in range(len(kind))]
        marks = [
            {**KEY, "lance-schema:unenforced-primary-key:position": str(i + 1)} for i in range(len(kind))
        ]
        keys = [pa.field(n, t, False, m) for n, t, m in zip(self.names, kind, marks, strict=True)]
        self.schema = pa.schema(
            [*keys, pa.field("version", pa.int64()), pa.field("v", pa.list_(pa.float32(), 2), False)]
        )
        self.rows: dict[Key, int] = {}
        self.writes = 0
        uri = str(where)
        dataset = lance.write_dataset(self.rows_of(base), uri, schema=self.schema)
        if btree:
            dataset.create_scalar_index(self.names[0], "BTREE")
        lancewal.initialize(uri, unsharded=True, writer_defaults=fast())
        self.table = Table.open(uri)
        self.readers = [self.table, TableReader(ObjectStore.from_uri(uri, fsync=False), live_writers=False)]

    def rows_of(self, keys: Iterable[Key]) -> pa.Table:
        """New versions of some keys, remembered."""
        listed = list(keys)
        self.writes += 1
        self.rows.update(dict.fromkeys(listed, self.writes))
        columns = [
            pa.array([key[place] for key in listed], self.schema.field(place).type)
            for place in range(len(self.names))
        ]
        vectors = pa.array([[float(self.writes), 0.0]] * len(listed), pa.list_(pa.float32(), 2))
        versions = pa.array([self.writes] * len(listed), pa.int64())
        return pa.table([*columns, versions, vectors], schema=self.schema)

    def key_table(self, keys: Sequence[Key]) -> pa.Table:
        return pa.table(
            [pa.array([key[i] for key in keys], self.schema.field(i).type) for i in range(len(self.names))],
            self.names,
        )

    def found(self, rows: pa.Table) -> dict[Key, int]:
        keys = list(zip(*(rows.column(name).to_pylist() for name in self.names), strict=True))
        assert len(keys) == len(set(keys)), "a key came twice"
        return dict(zip(keys, rows.column("version").to_pylist(), strict=True))

    def check(self, asked: Sequence[Key], singly: Sequence[Key]) -> None:
        for reader in self.readers:
            assert self.found(reader.scan().to_table()) == self.rows
            assert reader.scan().count_rows() == len(self.rows)
            everything = f"`{self.names[0]}` IS NOT NULL AND version > 0"
            assert self.found(reader.scan(filter=everything).to_table()) == self.rows
            answer = reader.lookup(self.key_table(asked))
            wanted = {key: self.rows[key] for key in asked if key in self.rows}
            assert self.found(answer.table) == wanted
            assert list(answer.found) == [key in self.rows for key in asked]
            for key in singly:
                one = {key: self.rows[key]} if key in self.rows else {}
                assert self.found(reader.lookup(self.key_table([key])).table) == one
                assert self.found(reader.scan(filter=self.condition(key)).to_table()) == one
                assert reader.scan(filter=self.condition(key)).count_rows() == len(one)
        if not singly:
            return
        nearest = self.table.vector_search("v", np.zeros(2, np.float32), k=len(self.rows) + 5)
        assert self.found(nearest) == self.rows

    def condition(self, key: Key) -> str:
        typed = zip(self.names, key, self.schema.types, strict=False)
        return " AND ".join(f"`{name}` = {literal(pa.scalar(value, t))}" for name, value, t in typed)


def _asked(steps: Sequence[Step]) -> list[Key]:
    return list(dict.fromkeys(key for _, keys in steps for key in keys))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "+".join(map(str, kind)))
@settings(max_examples=2, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_extreme_keys_are_keys_like_others_at_every_level(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    kind: tuple[pa.DataType, ...],
    data: st.DataObject,
) -> None:
    # The index is asked however few rows the base has.
    monkeypatch.setattr(base_overlap, "_ROWS_PER_SEARCH", 0)
    (_, base), *steps = data.draw(_steps(kind))
    model = Model(tmp_path_factory.mktemp("extreme") / "t", kind, base, btree=data.draw(st.booleans()))
    asked = [*dict.fromkeys([*base, *_asked(steps)])]
    writer = model.table.writer(config=fast())
    for action, keys in steps:
        if action == "put":
            writer.put(model.rows_of(keys))
        elif action == "delete":
            writer.delete(model.key_table(keys))
            for key in keys:
                model.rows.pop(key, None)
        elif action == "flush":
            writer.close()
            writer = model.table.writer(config=fast())
        else:
            model.table.compact()
            model.table.gc(min_age=timedelta(0))
        model.check(asked, keys[:2])
    writer.close()
    model.table.compact()
    model.check(asked, asked[:3])
    in_base = lance.dataset(model.table.uri).to_table()
    assert model.found(in_base) == model.rows


def test_the_least_integer_and_an_index_on_the_key_leave_the_table_readable(tmp_path: Path) -> None:
    least = -(1 << 63)
    schema = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("n", pa.int64())])
    rows = pa.table({"id": [least, *range(1000)], "n": [least] * 1001}, schema)
    lance.write_dataset(rows, str(tmp_path / "t")).create_scalar_index("id", "BTREE")
    table = lancewal.initialize(tmp_path / "t", unsharded=True, maintained_indexes=[])
    with table.writer(config=fast()) as writer:
        writer.put(pa.table({"id": [least], "n": [5]}, schema))
        assert table.scan().count_rows() == table.scan().to_table().num_rows == 1001
        for condition, count in {
            f"id = {least}": 1,
            f"id IN ({least}, 3)": 2,
            f"n = {least}": 1000,
            f"n >= {least}": 1001,
            f"n <= {least} AND id < 3": 3,
            f"n BETWEEN {least} AND 0": 1000,
            f"n NOT IN ({least})": 1,
        }.items():
            assert table.scan(filter=condition).count_rows() == count, condition
            assert table.scan(filter=condition).to_table().num_rows == count, condition


def test_text_with_a_lone_surrogate_is_refused_as_a_key(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("id", pa.string(), False, KEY)])
    lance.write_dataset(schema.empty_table(), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", unsharded=True)
    with table.writer(config=fast()) as writer:
        for ask in (writer.delete, table.lookup):
            with pytest.raises(InvalidInputError):
                ask(["\ud800"])


@pytest.mark.parametrize("bits", [16, 32, 64])
def test_floats_at_their_ends_come_back_bit_by_bit(tmp_path: Path, bits: int) -> None:
    kind, word = np.dtype(f"f{bits // 8}"), np.dtype(f"u{bits // 8}")
    limits = np.finfo(kind)
    values = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, limits.max, limits.min, limits.tiny], kind)
    values = np.append(values, np.array([1, (1 << (bits - 1)) + 1], word).view(kind))
    type_ = pa.from_numpy_dtype(kind)
    schema = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("x", type_)])
    lance.write_dataset(schema.empty_table(), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", unsharded=True)
    rows = pa.table([pa.array(range(len(values)), pa.int64()), pa.array(values)], schema=schema)

    def stored() -> list[int]:
        found = table.scan().to_table().sort_by("id").column("x").combine_chunks()
        return np.frombuffer(found.buffers()[1], word)[: len(values)].tolist()  # type: ignore[no-any-return]

    with table.writer(config=fast()) as writer:
        writer.put(rows)
        assert stored() == values.view(word).tolist()
    assert stored() == values.view(word).tolist()
    table.compact()
    assert stored() == values.view(word).tolist()
