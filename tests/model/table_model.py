"""What a table should hold, in plain Python: the truth that the state machines compare with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

Row = dict[str, Any]
Key = tuple[Any, ...]

KEY_NUMBERS = 12
TEXT, NUMBER = pa.string(), pa.int64()
_TEXTS = (None, "v0", "v1", "v2", "it's")
_NUMBERS = (None, 0, 1, 2, 3)


@dataclass(frozen=True)
class Column:
    """A column that is no key. The number tells it from every other that ever had its name."""

    name: str
    type: pa.DataType
    number: int

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type)

    def value(self, seed: int) -> Any:
        """What a row made of ``seed`` has here; other columns have other values."""
        values = _TEXTS if self.type == TEXT else _NUMBERS
        return values[(seed * 7 + seed // 3 + self.number) % len(values)]


@dataclass(frozen=True)
class Keys:
    """The key columns (or, without a primary key, the columns in their place) and some keys."""

    fields: tuple[pa.Field, ...]
    shard_column: str
    columns_of: Callable[[int], Row]
    filters: tuple[tuple[str, Callable[[Row], bool | None]], ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    def key(self, number: int) -> Key:
        return tuple(self.columns_of(number).values())


def _key_field(name: str, type_: pa.DataType, position: int) -> pa.Field:
    metadata = {"lance-schema:unenforced-primary-key:position": str(position)}
    return pa.field(name, type_, nullable=False, metadata=metadata)


_NUMBER_FILTERS: tuple[tuple[str, Callable[[Row], bool | None]], ...] = (
    ("id = 3", lambda r: r["id"] == 3),
    ("id IN (1, 1, 5, 99, 5)", lambda r: r["id"] in (1, 5)),
    ("id > 4 AND id <= 9", lambda r: 4 < r["id"] <= 9),
    ("id % 2 = 1", lambda r: r["id"] % 2 == 1),
    ("id != 0 AND NOT id = 7", lambda r: r["id"] not in (0, 7)),
    ("id IS NULL", lambda r: False),
    ("id IN (2, 3) OR id = 11", lambda r: r["id"] in (2, 3, 11)),
)
_PAIR_FILTERS: tuple[tuple[str, Callable[[Row], bool | None]], ...] = (
    ("tenant = 'a' AND id = 1", lambda r: r["tenant"] == "a" and r["id"] == 1),
    (
        "tenant IN ('a', 'a', 'b''s') AND id IN (0, 1, 1)",
        lambda r: r["tenant"] in ("a", "b's") and r["id"] in (0, 1),
    ),
    ("tenant = 'c'", lambda r: r["tenant"] == "c"),
    ("id = 1", lambda r: r["id"] == 1),
    ("tenant > 'a' AND id < 2", lambda r: r["tenant"] > "a" and r["id"] < 2),
    ("tenant IS NOT NULL", lambda r: True),
)

_WORDS = ("key", "it's")
_WORD_FILTERS: tuple[tuple[str, Callable[[Row], bool | None]], ...] = (
    ("word = 'key 3'", lambda r: r["word"] == "key 3"),
    ("word IN ('key 1', 'key 1', 'it''s 5')", lambda r: r["word"] in ("key 1", "it's 5")),
    ("word LIKE 'key%' AND word > 'key 2'", lambda r: r["word"].startswith("key") and r["word"] > "key 2"),
)

NUMBER_KEYS = Keys((_key_field("id", pa.int64(), 1),), "id", lambda i: {"id": i}, _NUMBER_FILTERS)
PAIR_KEYS = Keys(
    (_key_field("tenant", pa.string(), 1), _key_field("id", pa.int32(), 2)),
    "tenant",
    lambda i: {"tenant": ("a", "b's", "", "c")[i % 4], "id": i // 4},
    _PAIR_FILTERS,
)
WORD_KEYS = Keys(
    (_key_field("word", pa.string(), 1),),
    "word",
    lambda i: {"word": f"{_WORDS[i % 2]} {i}"},
    _WORD_FILTERS,
)
NO_KEYS = Keys((pa.field("id", pa.int64()),), "id", lambda i: {"id": i}, _NUMBER_FILTERS)


class TableModel:
    """Columns and rows. Rows are kept by column number, so that a rename changes none."""

    def __init__(self, keys: Keys, *, append_only: bool = False) -> None:
        self.keys = keys
        self.append_only = append_only
        self._made = 0
        self.columns = [self._new_column("name", TEXT), self._new_column("n", NUMBER)]
        self._rows: dict[Key, dict[int, Any]] = {}
        self._appended: list[tuple[Key, dict[int, Any]]] = []

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([*self.keys.fields, *(column.field for column in self.columns)])

    def add_column(self, type_: pa.DataType, name: str | None = None) -> Column:
        column = self._new_column(name or f"c{self._made}", type_)
        self.columns.append(column)
        return column

    def drop_column(self, place: int) -> Column:
        return self.columns.pop(place % len(self.columns))

    def rename_column(self, place: int) -> tuple[Column, Column]:
        place %= len(self.columns)
        old = self.columns[place]
        self._made += 1
        new = Column(f"r{self._made}", old.type, old.number)
        self.columns[place] = new
        return old, new

    def upsert(self, key: Key, seed: int, columns: Iterable[Column]) -> None:
        values = {column.number: column.value(seed) for column in columns}
        if self.append_only:
            self._appended.append((key, values))
        else:
            self._rows[key] = values

    def delete(self, key: Key) -> None:
        self._rows.pop(key, None)

    def rows(self) -> list[Row]:
        """Every row as the table's columns show it now."""
        kept = self._appended if self.append_only else list(self._rows.items())
        return [self._shown(key, values) for key, values in kept]

    def row(self, key: Key) -> Row | None:
        values = self._rows.get(key)
        return None if values is None else self._shown(key, values)

    def filters(self) -> list[tuple[str, Callable[[Row], bool | None]]]:
        """Conditions in SQL, and the same as functions of a row; ``None`` is SQL's unknown."""
        found = list(self.keys.filters)
        for column in self.columns:
            found += _text_filters(column.name) if column.type == TEXT else _number_filters(column.name)
        texts = [column.name for column in self.columns if column.type == TEXT]
        numbers = [column.name for column in self.columns if column.type == NUMBER]
        for text, number in zip(texts, numbers, strict=False):
            found += _mixed_filters(text, number)
        if "id" in self.keys.names:
            for column in self.columns:
                found += _key_and_value_filters(column.name)
        return found

    def _shown(self, key: Key, values: Mapping[int, Any]) -> Row:
        shown = dict(zip(self.keys.names, key, strict=True))
        return {**shown, **{column.name: values.get(column.number) for column in self.columns}}

    def _new_column(self, name: str, type_: pa.DataType) -> Column:
        self._made += 1
        return Column(name, type_, self._made)


def _text_filters(c: str) -> list[tuple[str, Callable[[Row], bool | None]]]:
    return [
        (f"{c} = 'v1'", lambda r: r[c] == "v1"),
        (f"{c} IS NULL", lambda r: r[c] is None),
        (f"{c} IN ('v1', 'v1', 'it''s')", lambda r: r[c] in ("v1", "it's")),
        (f"{c} LIKE 'v%' AND {c} != 'v0'", lambda r: r[c] in ("v1", "v2")),
        (f"NOT ({c} = 'v2')", lambda r: r[c] not in (None, "v2")),
    ]


def _number_filters(c: str) -> list[tuple[str, Callable[[Row], bool | None]]]:
    return [
        (f"{c} >= 1 AND {c} < 3", lambda r: r[c] in (1, 2)),
        (f"{c} IS NULL", lambda r: r[c] is None),
        (f"NOT ({c} > 1)", lambda r: r[c] in (0, 1)),
        (f"{c} + 1 = 2", lambda r: r[c] == 1),
    ]


def _mixed_filters(text: str, number: str) -> list[tuple[str, Callable[[Row], bool | None]]]:
    return [
        (f"{text} = 'v1' AND {number} IS NULL", lambda r: r[text] == "v1" and r[number] is None),
        (f"{text} IS NULL OR {number} = 2", lambda r: r[text] is None or r[number] == 2),
    ]


def _key_and_value_filters(c: str) -> list[tuple[str, Callable[[Row], bool | None]]]:
    return [
        (f"id IN (1, 2, 2, 0) AND {c} IS NOT NULL", lambda r: r["id"] in (0, 1, 2) and r[c] is not None),
        (f"id = 1 AND {c} IS NULL", lambda r: r["id"] == 1 and r[c] is None),
    ]


def as_bag(rows: Sequence[Row]) -> list[str]:
    """Rows in an order of their own, so that two lists of the same rows are equal."""
    return sorted(repr(sorted(row.items())) for row in rows)
