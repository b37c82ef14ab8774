"""The tasks: what each is called, and what must come out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

WORDS = ("red fox", "blue whale", "grey owl", "red hen", "brown bear", "white stork")
#: The rows that a task finds: key, number, text and vector, as dicts.
ROWS: list[dict[str, Any]] = [
    {"id": i, "n": i * 10, "text": words, "vector": [float(i == place) for place in range(6)]}
    for i, words in enumerate(WORDS)
]
NEWER = [
    {**ROWS[1], "n": 11},
    {"id": 6, "n": 60, "text": "black swan", "vector": [0.0, 0.0, 0.0, 0.0, 0.5, 0.5]},
]
QUERY = [0.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@dataclass(frozen=True)
class Task:
    """``name`` is that of the function in each tool's module; ``expected`` says whether its result is right.

    A task finds the table with :data:`ROWS`, made by the same tool's ``create`` and ``insert``, unless it
    makes the table itself.
    """

    name: str
    title: str
    expected: Callable[[Any], bool]
    on_new_table: bool = False
    on_empty_table: bool = False


def _ids(*expected: int) -> Callable[[Any], bool]:
    return lambda found: sorted(found) == sorted(expected)


def _is(expected: Any) -> Callable[[Any], bool]:
    return lambda found: bool(found == expected)


#: Functions return what they read; of those that write, the module's ``contents`` (id → n) is compared.
TASKS = (
    Task("create", "create a table with a key", _is({}), on_new_table=True),
    Task("insert", "write rows that are dicts", _is({i: i * 10 for i in range(6)}), on_empty_table=True),
    Task("upsert", "upsert by key", _is({0: 0, 1: 11, 2: 20, 3: 30, 4: 40, 5: 50, 6: 60})),
    Task("delete_keys", "delete two keys", _is({0: 0, 1: 10, 4: 40, 5: 50})),
    Task("delete_where", "delete by a condition", _is({0: 0, 1: 10, 2: 20})),
    Task("update_where", "update by a condition", _is({0: 0, 1: 10, 2: 20, 3: 30, 4: 41, 5: 51})),
    Task("lookup", "read one row by its key", _is((3, 30))),
    Task("lookup_many", "read many rows by their keys", _ids(1, 3, 5)),
    Task("count", "count rows with a condition", _is(4)),
    Task("scan", "read some columns with a condition", _ids(4, 5)),
    Task("to_pandas", "read a data frame", _is((6, 150))),
    Task("sql", "ask with SQL", _is(30)),
    Task("vector_search", "search by vector", _is(1)),
    Task("text_search", "search by words", _ids(0, 3)),
    Task("hybrid_search", "search by vector and words", _is(0)),
    Task("add_column", "add a column", _is(True)),
    Task("earlier_state", "name a state, and read it later", _is(6)),
    Task("changes", "read what has changed", _ids(1, 6)),
    Task(
        "one_by_one",
        "write 20 rows, each durable when its call returns",
        _is(20),
        on_empty_table=True,
    ),
    Task("keep_in_shape", "keep the table in shape after many small writes", _is(6)),
)
