"""Rows in every form that callers have them: what they become, and what is refused with column and row."""

from __future__ import annotations

import asyncio
import collections
import datetime as dt
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.writer.rows import as_batches, is_stream, streamed_batches
from tests.patience import PATIENCE
from tests.tables import fast

NOON = dt.datetime(2026, 1, 2, 12, 0, 0, 5000)
COLUMNS = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("small", pa.int8()),
        pa.field("score", pa.float32()),
        pa.field("at", pa.timestamp("ms")),
        pa.field("price", pa.decimal128(8, 2)),
        pa.field("tags", pa.list_(pa.string())),
        pa.field("place", pa.struct([("x", pa.int32()), ("y", pa.float32())])),
        pa.field("counts", pa.map_(pa.string(), pa.int64())),
        pa.field("raw", pa.binary()),
        pa.field("flag", pa.bool_()),
        pa.field("json", pa.json_()),
    ]
)


@dataclass
class Place:
    x: int
    y: float


@dataclass
class Document:
    id: int
    text: str
    vector: list[float]
    place: Place


Named = collections.namedtuple("Named", ["id", "text", "vector"])


class Model:
    """What pydantic models have."""

    def model_dump(self) -> dict[str, Any]:
        return {"id": 1, "text": "a", "vector": [0.1, 2]}


@pytest.fixture
def table(tmp_path: Path) -> lancewal.Table:
    return lancewal.create(tmp_path / "t", COLUMNS, key="id", writer_defaults=fast())


ROW = {"id": 1, "text": "a", "vector": [0.1, 2.0]}
KIND = np.dtype([("id", ">i4"), ("text", "U3"), ("vector", "<f8", (2,))])
FORMS: dict[str, Callable[[], Any]] = {
    "dict": lambda: ROW,
    "dicts": lambda: [ROW],
    "tuple of dicts": lambda: (ROW,),
    "iterator of dicts": lambda: iter([ROW]),
    "mapping": lambda: collections.ChainMap(ROW),
    "integers in a vector": lambda: {**ROW, "id": 1.0},
    "dataclass": lambda: Document(1, "a", [0.1, 2.0], Place(1, 0.5)),
    "named tuples": lambda: [Named(1, "a", (0.1, 2))],
    "model": Model,
    "numpy in a dict": lambda: {"id": np.int32(1), "text": "a", "vector": np.array([0.1, 2.0])},
    "half floats": lambda: {"id": 1, "text": "a", "vector": np.array([0.1, 2.0], np.float32)},
    "objects of numpy": lambda: np.array([ROW], dtype=object),
    "objects of pandas": lambda: pd.Series([ROW]),
    "pandas": lambda: pd.DataFrame([ROW]),
    "pandas with arrays": lambda: pd.DataFrame({"id": [1], "text": ["a"], "vector": [np.array([0.1, 2.0])]}),
    "polars": lambda: pl.DataFrame([ROW]),
    "polars array": lambda: pl.DataFrame([ROW], schema_overrides={"vector": pl.Array(pl.Float64, 2)}),
    "structured numpy": lambda: np.array([(1, "a", [0.1, 2.0])], KIND),
    "list of frames": lambda: [pd.DataFrame([ROW])],
}


@pytest.mark.parametrize("form", FORMS)
def test_a_row_in_any_form_is_the_same_row(table: lancewal.Table, form: str) -> None:
    with table.writer() as writer:
        assert writer.put(FORMS[form]()).num_rows == 1
    expected = {"id": 1, "text": "a", "vector": [float(np.float32(0.1)), 2.0]}
    assert table.lookup(1, columns=["id", "text", "vector"]) == expected


def test_values_of_all_kinds(table: lancewal.Table) -> None:
    row = {
        "id": 2**40,
        "small": 7.0,
        "score": 1,
        "at": NOON,
        "price": Decimal("12.5"),
        "tags": ["a", None],
        "place": {"x": 1, "y": 0.5},
        "counts": [("a", 1), ("b", 2)],
        "raw": b"\x00",
        "flag": True,
        "json": {"a": [1, None]},
    }
    with table.writer() as writer:
        writer.put([row, {"id": 3, "tags": [], "place": {"x": 4}, "counts": [], "json": '{"b": 1}'}])
    found = table.lookup(2**40)
    assert found is not None
    assert found == {
        **row,
        "small": 7,
        "text": None,
        "vector": None,
        "json": '{"a":[1,null]}',
        "counts": row["counts"],
    }
    other = table.lookup(3, columns=["tags", "place", "counts", "json"])
    assert other == {"tags": [], "place": {"x": 4, "y": None}, "counts": [], "json": '{"b":1}'}


REFUSED: dict[str, tuple[Any, str]] = {
    "text for a number": ([{"id": 1}, {"id": "x"}], "column id, row 1: 'x' is str"),
    "text for every number": ([{"id": "7"}], "column id, row 0: '7' is str, the table has int64.*cast=True"),
    "a number for text": ([{"id": 1, "text": 5}], "column text, row 0: 5 is int, the table has string"),
    "truth for a number": ([{"id": 1, "small": True}], "column small, row 0: True is bool"),
    "too large": ([{"id": 1, "small": 1}, {"id": 2, "small": 300}], "column small .* row 1 is 300"),
    "a fraction": ([{"id": 1.5}], "column id .* row 0 is 1.5"),
    "digits of a number": ([{"id": 1, "score": 0.1}], 'column score .* row 0 is 0.1.*cast="round"'),
    "digits of a time": ([{"id": 1, "at": NOON.replace(microsecond=1)}], "column at .* row 0"),
    "another length": (
        [{"id": 1, "vector": [1.0, 2]}, {"id": 2, "vector": [1.0]}],
        r"column vector .* row 1 is \[1.0\]: it has 1 items, the table has 2; change the value",
    ),
    "too large for a float": ([{"id": 1, "vector": [1e300, 0.0]}], "column vector .* row 0 is"),
    "words in a vector": ([{"id": 1, "vector": ["a", "b"]}], "column vector, row 0"),
    "an unknown column": ([{"id": 1, "nope": 2}], "no column nope; its columns are id, text"),
    "no key": ([{"text": "a"}], "column id is missing"),
    "a null key": ([{"id": 1}, {"id": None}], "1 nulls in key column id.*the first in row 1"),
    "a field too many": ([{"id": 1, "place": {"z": 1}}], "column place, row 0.*no field z in it: leave it"),
    "digits in a struct": ([{"id": 1, "place": {"x": 1, "y": 0.1}}], "column place .* row 0"),
    "a list for a number": ({"id": [1, 2]}, "column id, row 0.*a row has one value .* pass a list of dicts"),
    "text for a list": ([{"id": 1, "tags": "ab"}], "column tags, row 0: 'ab' is str.*; convert the value$"),
    "bare values": ([(1, "a")], r"cannot read rows from int \(1\); pass a dict"),
    "a class": (Document, "class Document; pass objects of it"),
    "a key that is the index": (
        pd.DataFrame({"text": ["a"]}, pd.Index([1], name="id")),
        "id is .*reset_index",
    ),
    "one column of pandas": (pd.Series([1]), "Series, which is one column"),
    "a plan of polars": (pl.LazyFrame({"id": [1]}), "pass what its collect"),
    "numbers without names": (np.zeros((2, 2)), "array of float64, whose columns have no names"),
    "something else": ([{"id": 1, "text": object()}], "column text, row 0"),
    "rows of two kinds": ([{"id": 1}, 7], "row 1 is 7"),
    "no columns": ([{}], "no columns"),
    "a number for a name": ([{1: 2}], "names of columns are text"),
    "mixed pandas": (pd.DataFrame({"id": [1, 2], "text": ["a", 5]}), "column text, row 1: 5 is int"),
    "no rows": (7, r"cannot read rows from int \(7\); pass a dict"),
    "JSON that is none": ([{"id": 1, "json": "{"}], "no JSON"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_column_and_row_and_nothing_is_written(
    table: lancewal.Table, case: str
) -> None:
    data, text = REFUSED[case]
    with table.writer() as writer:
        with pytest.raises(InvalidInputError, match=text):
            writer.put(data)
        assert table.count_rows() == 0


def test_arrow_says_its_types_and_is_never_rounded(table: lancewal.Table) -> None:
    doubles = pa.table({"id": [1], "vector": pa.array([[0.1, 2.0]], pa.list_(pa.float64(), 2))})
    with table.writer() as writer, pytest.raises(InvalidInputError, match=r'row 0 is .*cast="round"'):
        writer.put(doubles)
    exact = pa.table({"id": pa.array([1], pa.uint8()), "vector": [[0.5, 2.0]], "score": [2]})
    with table.writer() as writer:
        writer.put(exact)
    assert table.lookup(1, columns=["vector", "score"]) == {"vector": [0.5, 2.0], "score": 2.0}


def test_keys_as_rows_delete(tmp_path: Path) -> None:
    rows = [{"a": 1, "b": "x"}, {"a": 1, "b": "y"}, {"a": 2, "b": "x"}]
    table = lancewal.create(tmp_path / "t", rows, key=["a", "b"], writer_defaults=fast())
    with table.writer() as writer:
        writer.delete({"a": 1, "b": "x"})
        writer.delete([{"b": "x", "a": 2.0}])
        with pytest.raises(InvalidInputError, match="lacks the key column b"):
            writer.delete({"a": 1})
    assert table.scan().to_table().to_pylist() == [{"a": 1, "b": "y"}]


def test_single_rows_of_a_stream_are_gathered() -> None:
    def rows() -> Iterator[Any]:
        yield from ({"id": n} for n in range(2500))
        yield pa.record_batch({"id": [2500]})
        yield {"id": 2501}

    assert is_stream(rows())
    batches = list(streamed_batches(rows(), COLUMNS))
    assert [batch.num_rows for batch in batches] == [1024, 1024, 452, 1, 1]
    assert [n for batch in batches for n in batch["id"].to_pylist()] == list(range(2502))


def test_the_gateway_takes_the_same_rows(table: lancewal.Table) -> None:
    with (
        lancewal.Gateway({"t": table}) as gateway,
        lancewal.connect(gateway.address, timeout=PATIENCE) as remote,
    ):
        with remote.writer() as writer:
            writer.put(ROW)
            writer.put(pl.DataFrame([{**ROW, "id": 2}]))
            writer.put(pa.table({"id": pa.array([3], pa.int8())}))
            writer.put(iter([{"id": 4}, {"id": 5}]))
            writer.delete({"id": 5})
            with pytest.raises(InvalidInputError, match="column id, row 0"):
                writer.put({"id": "x"})
        with remote.writer(cast=False) as writer, pytest.raises(InvalidInputError, match='cast="numbers"'):
            writer.put(pa.table({"id": pa.array([6], pa.int8())}))
        with remote.writer(cast=True) as writer:
            writer.put({"id": "7", "small": "3"})
            writer.put(iter([{"id": "8"}]))
    assert sorted(table.scan(columns=["id"]).to_table()["id"].to_pylist()) == [1, 2, 3, 4, 7, 8]


_scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(width=64),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.datetimes(),
    st.dates(),
    st.decimals(allow_nan=False, allow_infinity=False, places=2),
    st.uuids(),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=2)), max_size=3),
    st.dictionaries(st.sampled_from("xyz"), st.one_of(st.integers(), st.floats()), max_size=2),
)


@given(
    st.lists(st.dictionaries(st.sampled_from(COLUMNS.names), _scalars, max_size=4), min_size=1, max_size=4)
)
def test_any_row_becomes_a_batch_or_is_refused_by_a_typed_error(rows: list[dict[str, Any]]) -> None:
    try:
        (batch,) = as_batches(rows, COLUMNS)
    except InvalidInputError:
        return
    assert batch.num_rows == len(rows)


@pytest.mark.parametrize("cast", ["numbers", True])
def test_uuids_are_told_how(table: lancewal.Table, cast: Any) -> None:
    """Their bytes may be text by chance, which is not what they say."""
    number = uuid.UUID(bytes=b"sixteen letters!")
    with table.writer(cast=cast) as writer:
        with pytest.raises(InvalidInputError, match=r"column text, row 0: UUID.*pass str\(\) of it"):
            writer.put({"id": 1, "text": number})
        assert table.count_rows() == 0


AS_TEXT = {
    "id": "7",
    "small": "3",
    "score": "1.5",
    "at": "2026-01-02 12:00:00",
    "price": "1.25",
    "flag": "true",
}
CONVERTED = {"id": 7, "small": 3, "score": 1.5, "at": dt.datetime(2026, 1, 2, 12), "price": Decimal("1.25")}


def test_a_writer_that_casts_refused_dicts_and_told_callers_to_cast(table: lancewal.Table) -> None:
    with table.writer(cast=True) as writer:
        writer.put(AS_TEXT)
        writer.put(pd.DataFrame([{**AS_TEXT, "id": "8"}], dtype=object))
        writer.put({**AS_TEXT, "id": "9"} for _ in range(1))
        writer.put({"id": 10, "text": 5, "tags": [1], "place": {"x": "4"}})
        with pytest.raises(InvalidInputError, match=r"column small .* row 0 is 'x'"):
            writer.put({"id": 11, "small": "x"})
        writer.delete([{"id": "9"}])
    for key in (7, 8):
        found = table.lookup(key, columns=[*CONVERTED, "flag"])
        assert found == {**CONVERTED, "id": key, "flag": True}
    other = table.lookup(10, columns=["text", "tags", "place"])
    assert other == {"text": "5", "tags": ["1"], "place": {"x": 4, "y": None}}
    assert table.count_rows() == 3


def test_coroutines_cast_as_their_writer_does(table: lancewal.Table) -> None:
    async def put() -> None:
        async with lancewal.AsyncTable(table).writer(cast=True) as writer:
            await writer.put(AS_TEXT)

    asyncio.run(put())
    assert table.lookup(7, columns=["small"]) == {"small": 3}


def test_days_of_numpy_were_refused_and_so_were_its_records(tmp_path: Path) -> None:
    days = [{"id": 1, "x": np.datetime64("2026-01-02")}, {"id": 2, "x": np.datetime64("NaT", "D")}]
    record = np.array([(3, "2026-01-03")], dtype=[("id", "i8"), ("x", "M8[D]")])[0]
    columns = pa.schema([("id", pa.int64()), ("x", pa.date32())])
    table = lancewal.create(tmp_path / "t", columns, key="id", unsharded=True, writer_defaults=fast())
    with table.writer() as writer:
        writer.put(days)
        writer.put(record)
    assert _in_order(table) == [dt.date(2026, 1, 2), None, dt.date(2026, 1, 3)]


def _stored(tmp_path: Path, type_: pa.DataType, rows: Any) -> list[Any]:
    """What column ``x`` holds after ``rows`` were put, by key, read from the base table."""
    columns = pa.schema([("id", pa.int64()), ("x", type_)])
    table = lancewal.create(tmp_path / "t", columns, key="id", unsharded=True, writer_defaults=fast())
    with table.writer() as writer:
        writer.put(rows)
    table.compact()
    return _in_order(table)


def _in_order(table: lancewal.Table) -> list[Any]:
    return table.scan().to_table().sort_by("id")["x"].to_pylist()


def _rows_of(*values: Any) -> list[dict[str, Any]]:
    return [{"id": place, "x": value} for place, value in enumerate(values)]


DAY, EVENING = dt.date(2026, 1, 2), dt.datetime(2026, 1, 3, 20)
FINE = pd.Timestamp("2026-01-02T00:00:00.123456789")


@pytest.mark.parametrize("form", [list, pd.DataFrame], ids=["dicts", "pandas"])
def test_a_day_before_a_datetime_does_not_cut_off_its_time(tmp_path: Path, form: Any) -> None:
    stored = _stored(tmp_path, pa.timestamp("us"), form(_rows_of(DAY, EVENING)))
    assert stored == [dt.datetime(2026, 1, 2), EVENING]


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.date32(), [DAY, EVENING]),
        (pa.timestamp("us"), [FINE]),
        (pa.time64("us"), [dt.time(1, tzinfo=dt.UTC)]),
        (pa.map_(pa.string(), pa.int64()), [[("a", 1.5)]]),
        (pa.map_(pa.string(), pa.int64()), [{"a": True}]),
        (pa.struct([("a", pa.int32()), ("m", pa.map_(pa.string(), pa.int8()))]), [{"a": 1, "m": {}, "b": 2}]),
        (pa.struct([("a", pa.int32()), ("raw", pa.binary(2))]), [{"a": 1.5, "raw": b"ab"}]),
        (pa.json_(), [float("nan")]),
        (pa.json_(), [{"a": float("inf")}]),
    ],
    ids=repr,
)
def test_arrow_cuts_nothing_off_what_python_gives(
    tmp_path: Path, type_: pa.DataType, values: list[Any]
) -> None:
    with pytest.raises(InvalidInputError, match="column x"):
        _stored(tmp_path, type_, _rows_of(*values))


def test_maps_and_what_holds_them_keep_every_value(tmp_path: Path) -> None:
    maps = pa.map_(pa.string(), pa.int64())
    type_ = pa.list_(pa.struct([("m", maps), ("raw", pa.binary(2)), ("n", pa.float32())]))
    given = [
        [{"m": {"a": 1, "b": None}, "raw": b"ab", "n": 0.5}, None],
        None,
        [],
        [{"m": None}, {"m": [("c", 3)]}],
    ]
    whole = [
        [{"m": [("a", 1), ("b", None)], "raw": b"ab", "n": 0.5}, None],
        None,
        [],
        [{"m": None, "raw": None, "n": None}, {"m": [("c", 3)], "raw": None, "n": None}],
    ]
    assert _stored(tmp_path, type_, _rows_of(*given)) == whole


@pytest.mark.parametrize(
    ("type_", "values"),
    [
        (pa.timestamp("ns"), [FINE, None]),
        (pa.duration("ns"), [pd.Timedelta(1, "ns")]),
        (pa.uint64(), [2**64 - 1, 1]),
    ],
    ids=["timestamp", "duration", "uint64"],
)
def test_values_at_the_end_of_the_range_of_a_type_are_taken_whole(
    tmp_path: Path, type_: pa.DataType, values: list[Any]
) -> None:
    assert _stored(tmp_path, type_, _rows_of(*values)) == values


def test_what_pandas_has_no_value_for_is_null_beside_objects_too(table: lancewal.Table) -> None:
    frame = pd.DataFrame(
        {
            "id": [1, 2],
            "score": [np.nan, 0.5],
            "json": [{"a": 1}, [2]],
            "at": pd.to_datetime(["2026-01-02", None]),
        }
    )
    with table.writer() as writer:
        writer.put(frame)
    rows = table.scan(["score", "json", "at"]).to_table().to_pylist()
    assert sorted(rows, key=str) == [
        {"score": 0.5, "json": "[2]", "at": None},
        {"score": None, "json": '{"a":1}', "at": dt.datetime(2026, 1, 2)},
    ]


def test_masked_values_of_numpy_are_nulls(tmp_path: Path) -> None:
    kind = [("id", "i8"), ("x", "f8")]
    masked = np.ma.array(np.array([(0, 1.5), (1, 2.5)], kind), mask=[(False, True), (False, False)])
    assert _stored(tmp_path, pa.float64(), masked) == [None, 2.5]


def test_categories_of_polars_are_their_words(tmp_path: Path) -> None:
    frame = pl.DataFrame(_rows_of("a", None), schema={"id": pl.Int64, "x": pl.Categorical})
    assert _stored(tmp_path, pa.string(), frame) == ["a", None]


@pytest.mark.parametrize(
    "rows",
    [
        pd.DataFrame([[1, "a", "b"]], columns=["id", "x", "x"]),
        pd.DataFrame([[1, "a", "b"]], columns=["id", "1", 1]),
        np.array([(1, 2j)], [("id", "i8"), ("x", "c16")]),
        np.array([(1, (2,))], [("id", "i8"), ("x", [("a", "i8")])]),
        np.array([(1, "2020")], [("id", "i8"), ("x", "M8[Y]")]),
        np.array([(1, "a"), (2, 5)], [("id", "i8"), ("x", "O")]),
    ],
    ids=["a name twice", "the same name as text", "complex", "nested", "years", "mixed"],
)
def test_frames_that_arrow_cannot_read_are_refused_by_a_typed_error(tmp_path: Path, rows: Any) -> None:
    with pytest.raises(InvalidInputError):
        _stored(tmp_path, pa.string(), rows)


def test_a_key_between_two_integers_deletes_and_finds_neither(tmp_path: Path) -> None:
    columns = pa.schema([("id", pa.int64()), ("part", pa.int32())])
    one = lancewal.create(tmp_path / "one", columns, key="id", writer_defaults=fast())
    two = lancewal.create(tmp_path / "two", columns, key=["id", "part"], writer_defaults=fast())
    for table, keys in (one, (1.5, [1.5], [np.float64(1.5)], (1.5,))), (two, ({"id": 1, "part": 1.5},)):
        with table.writer() as writer:
            writer.put([{"id": 1, "part": 1}, {"id": 2, "part": 2}])
            for key in keys:
                with pytest.raises(InvalidInputError):
                    writer.delete(key)
                with pytest.raises(InvalidInputError):
                    table.lookup(key)
            assert table.count_rows() == 2
    with pytest.raises(InvalidInputError):
        two.lookup((1, 1.5))
    with pytest.raises(InvalidInputError):
        one.shard_for(1.5)
    assert one.lookup([1.0]).found.tolist() == [True]


@pytest.mark.parametrize(
    "text", ["NaN", "[1, -Infinity ]", '{"a": nan}', "1e400", "1" * 400, '{"a": [-1E+999]}']
)
def test_json_text_with_a_number_that_lance_reads_as_null_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InvalidInputError, match="no JSON: row 1"):
        _stored(tmp_path, pa.json_(), _rows_of("1", text))


def test_json_text_that_only_looks_like_such_a_number_is_taken(tmp_path: Path) -> None:
    texts = ['"NaN, inf"', '{"nan":"inf"}', "1e300", '["Infinity ]",1]', '"1e400"', None]
    stored = _stored(tmp_path, pa.json_(), _rows_of(*texts))
    assert [text and json.loads(text) for text in stored] == [text and json.loads(text) for text in texts]
    assert lancewal.open(tmp_path / "t").verify().ok


BERLIN = dt.timezone(dt.timedelta(hours=1))


def _wrapped(type_: pa.DataType, value: Any) -> dict[str, tuple[pa.DataType, Any]]:
    """A value in each thing that a column may hold."""
    return {
        "list": (pa.list_(type_), [value]),
        "struct": (pa.struct([("a", type_)]), {"a": value}),
        "structs": (pa.list_(pa.struct([("a", type_)])), [{"a": value}]),
        "map": (pa.map_(pa.string(), type_), [("a", value)]),
    }


@pytest.mark.parametrize("inside", ["list", "struct", "structs", "map"])
@pytest.mark.parametrize(
    ("type_", "value"),
    [(pa.timestamp("ns"), FINE), (pa.duration("ns"), pd.Timedelta(1, "ns"))],
    ids=["timestamp", "duration"],
)
def test_nanoseconds_inside_a_column_were_cut_off(
    tmp_path: Path, type_: pa.DataType, value: Any, inside: str
) -> None:
    nested, given = _wrapped(type_, value)[inside]
    assert _stored(tmp_path, nested, _rows_of(given)) == [given]


CUT: dict[str, tuple[pa.DataType, list[Any]]] = {
    "nanoseconds": (pa.timestamp("us"), [FINE]),
    "nanoseconds of a duration": (pa.duration("us"), [pd.Timedelta(1, "ns")]),
    "the time of a day": (pa.date32(), [DAY, EVENING]),
    "the zone of a time": (pa.time64("us"), [dt.time(1, tzinfo=dt.UTC)]),
    "a zone that is not UTC": (pa.timestamp("us"), [EVENING.replace(tzinfo=BERLIN)]),
    "a zone behind UTC": (
        pa.timestamp("us"),
        [EVENING.replace(tzinfo=dt.UTC), EVENING.replace(tzinfo=BERLIN)],
    ),
    "a zone that is guessed": (pa.timestamp("us", "Europe/Berlin"), [EVENING]),
    "with a zone and without": (pa.timestamp("us", "UTC"), [EVENING, EVENING.replace(tzinfo=dt.UTC)]),
    "bytes among text": (pa.string(), ["a", b"b"]),
    "text among bytes": (pa.binary(), [b"b", "a"]),
}


@pytest.mark.parametrize("case", CUT)
def test_what_arrow_cuts_off_is_refused_in_a_column_and_inside_one(tmp_path: Path, case: str) -> None:
    type_, values = CUT[case]
    columns = pa.schema(
        [("id", pa.int64()), ("x", type_), ("list", pa.list_(type_)), ("s", pa.struct([("a", type_)]))]
    )
    table = lancewal.create(tmp_path / "t", columns, key="id", unsharded=True, writer_defaults=fast())
    with table.writer() as writer:
        for rows in (
            _rows_of(*values),
            [{"id": 1, "list": values}],
            [{"id": place, "s": {"a": value}} for place, value in enumerate(values)],
        ):
            with pytest.raises(InvalidInputError, match=r"column (x|list|s)\b.*row"):
                writer.put(rows)
        assert table.count_rows() == 0


def test_frames_with_another_zone_were_shifted(tmp_path: Path) -> None:
    at = pd.to_datetime(["2026-01-01"]).tz_localize("Europe/Berlin")
    frame = pd.DataFrame({"id": [1], "x": at})
    with pytest.raises(InvalidInputError, match=r"column x, row 0: .*time zone"):
        _stored(tmp_path, pa.timestamp("us"), frame)
    (utc,) = _stored(tmp_path / "utc", pa.timestamp("us", "UTC"), frame)
    assert utc == at[0]


def test_utc_is_added_and_dropped(tmp_path: Path) -> None:
    aware = EVENING.replace(tzinfo=dt.UTC)
    assert _stored(tmp_path / "a", pa.timestamp("us"), _rows_of(aware)) == [EVENING]
    assert _stored(tmp_path / "b", pa.timestamp("us", "UTC"), _rows_of(EVENING)) == [aware]


def test_no_value_of_pandas_became_the_first_of_january_in_the_year_one(tmp_path: Path) -> None:
    days = _stored(tmp_path, pa.list_(pa.date32()), _rows_of([DAY, pd.NaT], [pd.NaT], [pd.NA, DAY]))
    assert days == [[DAY, None], [None], [None, DAY]]


def test_rows_that_pandas_gives_as_dicts(tmp_path: Path) -> None:
    frame = pd.DataFrame({"id": [1, 2], "x": pd.to_datetime(["2026-01-01", None])})
    assert _stored(tmp_path, pa.timestamp("us"), frame.to_dict("records")) == [dt.datetime(2026, 1, 1), None]


@pytest.mark.parametrize(
    ("type_", "given", "stored"),
    [
        (pa.decimal128(10, 2), 3, Decimal("3.00")),
        (pa.int64(), Decimal("2"), 2),
        (pa.uint64(), Decimal(2**64 - 1), 2**64 - 1),
    ],
    ids=repr,
)
def test_integers_and_decimals_of_the_same_value(
    tmp_path: Path, type_: pa.DataType, given: Any, stored: Any
) -> None:
    assert _stored(tmp_path, type_, _rows_of(given)) == [stored]


@pytest.mark.parametrize(
    ("type_", "given"),
    [
        (pa.decimal128(10, 2), 10**9),
        (pa.int64(), Decimal("1.5")),
        (pa.int8(), Decimal(300)),
        (pa.uint8(), Decimal(-1)),
    ],
    ids=repr,
)
def test_integers_and_decimals_that_do_not_fit(tmp_path: Path, type_: pa.DataType, given: Any) -> None:
    with pytest.raises(InvalidInputError, match=r"column x .* row 0"):
        _stored(tmp_path, type_, _rows_of(given))


@dataclass
class Chunk:
    number: int
    at: dt.datetime | None = None


def test_dataclasses_inside_a_list_were_refused(tmp_path: Path) -> None:
    chunks = pa.list_(pa.struct([("number", pa.int32()), ("at", pa.timestamp("us"))]))
    stored = _stored(tmp_path, chunks, _rows_of([Chunk(1, EVENING), Chunk(2)]))
    assert stored == [[{"number": 1, "at": EVENING}, {"number": 2, "at": None}]]


def test_objects_of_polars_were_stored_as_addresses(tmp_path: Path) -> None:
    frame = pl.DataFrame({"id": [1], "x": pl.Series([object()], dtype=pl.Object)})
    with pytest.raises(InvalidInputError, match="column x holds objects"):
        lancewal.create(tmp_path / "t", frame, key="id")
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("value", [{"a": None}, [], [[None]], [{"a": None}]], ids=repr)
def test_a_part_of_a_column_without_a_type_made_a_table_that_takes_no_value(
    tmp_path: Path, value: Any
) -> None:
    with pytest.raises(InvalidInputError, match=r"column x\.\S+ holds nothing but nulls"):
        lancewal.create(tmp_path / "t", [{"id": 1, "x": value}], key="id")
    assert not (tmp_path / "t").exists()


def test_a_row_that_is_refused_in_a_stream_says_what_was_written_before(table: lancewal.Table) -> None:
    rows = ({"id": number, "text": "a" if number < 1030 else 5} for number in range(1031))
    with table.writer() as writer:
        with pytest.raises(InvalidInputError, match=r"column text, row 6: .*1024 rows before it are written"):
            writer.put(rows)
        assert table.count_rows() == 1024
