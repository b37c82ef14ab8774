"""Predicates in memory mean what they mean in Lance, which is asked about each of them."""

from __future__ import annotations

import datetime as dt
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from uuid import uuid4

import lance
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lancewal.errors import InvalidInputError
from lancewal.predicate.dialect import among, for_datafusion
from lancewal.predicate.predicate import Expression, Predicate

N = 10
ROWS = pa.table(
    {
        "id": pa.array(range(N), pa.int32()),
        "text": [None, *(f"a{i}" for i in range(1, N))],
        "Camel": list(range(N)),
        "nested": pa.array(
            [{"b": i, "Cc": {"d": str(i)}, "f": 0.1} for i in range(N)],
            pa.struct([("b", pa.int64()), ("Cc", pa.struct([("d", pa.string())])), ("f", pa.float32())]),
        ),
        "day": pa.array(range(N), pa.date32()),
        "list": [[i, i + 1] for i in range(N)],
        "words": [["x", f"y{i}"] for i in range(N)],
        "my col": list(range(N)),
        "single": pa.array([0.1, 0.2, -0.0, 0.0, None, float("nan"), 1.5, 2, 3, 4], pa.float32()),
        "double": pa.array([1.5, -0.0, 0.0, float("nan"), None, 3, 0.1, -float("nan"), 6, float("inf")]),
        "half": pa.array(np.array([0.1] * N, np.float16)),
        "moment": pa.array([dt.datetime(2021, 1, 1 + i) for i in range(N)], pa.timestamp("us")),
        "zoned": pa.array([dt.datetime(2021, 1, 1 + i) for i in range(N)], pa.timestamp("us", "UTC")),
        "flag": [True, False, None, True, False, None, True, False, None, True],
        "raw": [b"x%d" % i for i in range(N)],
        "fixed": pa.array([b"%02d" % i for i in range(N)], pa.binary(2)),
        "big": pa.array([*range(N - 1), 2**64 - 1], pa.uint64()),
        "money": pa.array([Decimal(i) for i in range(N)], pa.decimal128(10, 2)),
        "select": list(range(N)),
        "tiny": pa.array(range(N), pa.int8()),
        "wide": pa.array([str(i) for i in range(N)], pa.large_string()),
        "quoted": ['a"b', "a'b", "a`b", *"ghijklm"],
    }
)

SAME_AS_IN_LANCE = """
id = 3
3 = id
3 < id
ID = 3
id == 3
id != 3 AND id <> 4
id > 3 OR text IS NULL
NOT (id = 3)
not id = 1 and id = 2
-id = -3
id > -1
id = null
id IN (1, 1, 2)
id IN (1, NULL)
id NOT IN (1, 2)
id in (id)
text NOT IN ('a1', NULL)
id IN (1, 2) AND text IN ('a1')
id BETWEEN 2 AND 4
id NOT BETWEEN 2 AND 4
id BETWEEN 4 AND 2
id between id and 3
id IS NOT NULL AND NOT text IS NULL
id % 2 = 0
id + 1 = 4
abs(id - 5) < 2
id = 1 and id = 2
id = 1 OR NULL
id in (1, 2) = true
id is distinct from 3
id = cast(3 as int)
cast(id as string) = '4'
id::string = '4'
arrow_cast(id, 'Int64') = 3
nullif(id, 3) is null
nested.b = 3
nested['b'] = 3
`nested`.`b` = 3
nested.Cc.d = '4'
nested.f = 0.1
nested.f in (0.1)
nested is not null
Camel = 4
camel = 4
`Camel` = 4
`my col` = 4
select = 3
`select` = 3
text = "a3"
text in ("a1", "a2")
text like "a%"
quoted = "a""b"
quoted = "a'b"
quoted = 'a''b'
quoted = 'a`b'
TEXT = 'a3' AND LOWER(text) = 'a3'
text > 'a5'
text LIKE 'a%'
text ILIKE 'A%'
text NOT LIKE '%3'
text || 'x' = 'a3x'
text = ''
starts_with(text, 'a1')
contains(text, '3')
length(text) = 2
char_length(text) = 2
upper(text) = 'A3'
strpos(text, '3') > 0
concat(text, 'x') = 'a3x'
coalesce(text, 'z') = 'z'
md5(text) is not null
try_cast(text as int) is null
regexp_match(text, 'a[12]')
regexp_match(text, 'a[12]') and id = 1
NOT regexp_match(text, 'a[12]')
regexp_like(text, 'a[12]')
array_has(list, 3)
array_contains(list, 3)
array_has_any(words, ['y1', 'y2'])
array_has_all(words, ['x', 'y2'])
array_length(list) = 2
list[1] = 3
day > date '1970-01-03'
day BETWEEN date '1970-01-03' AND date '1970-01-05'
day = cast('1970-01-03' as date)
moment >= timestamp '2021-01-03 00:00:00'
moment >= date '2021-01-03'
moment > cast('2021-01-03' as timestamp)
zoned >= timestamp '2021-01-03 00:00:00'
cast(moment as date) = date '2021-01-04'
date_part('day', moment) = 3
now() > moment
single = 0.1
single = 1e-1
0.1 = single
single in (0.1, null)
single not in (0.1)
single between 0.05 and 0.1
single not between 0.05 and 0.1
single is distinct from 0.1
single is not distinct from 0.1
NOT single = 0.1
single > 1
single < 0.0
single >= 0.0
single != 0.0
single + 0 = 0.1
half = 0.1
double = 0.0
double in (-0.0)
double > 3
double < 0.0
double <= 0.0
double != 0
double is null
isnan(double)
id < single
flag
not flag
flag = true
flag is true
flag is not true
flag is false
flag or text = 'a1'
raw = X'7833'
fixed = X'3033'
big = 3
big > 18446744073709551610
money = 3
tiny = 3
wide = '4'
wide in ('4', '5')
true
TRUE
false
random() >= 0
-- a comment
 id = 1
id /* a comment */ = 1
single in (0, 5, 6, 7, 8)
single not in (-0.0, 5, 6, 7, 8)
double in (0.0, 5.5, 6, 7, 8, null)
not (double in (0, 5, 6, 7, 8) or id = 9)
not (double not in (-0.0, 5.5, 6, 7, 8))
double = 0 or double = 5 or double = 6 or double = 7
not (0.0 = single or single = 5 or single = 6 or single = 7)
double in (0.0, cast('inf' as double), 5, 6)
single not in (0, cast('inf' as double), 5, 6)
double * -1.0 in (0.0, 5.0, 6.0, 7.0)
not (id = 1 or (big > 3 and text is null))
single < 1700000001
single in (16777217, 2)
double < 9007199254740993
""".strip()

REFUSED_AS_IN_LANCE = """
nope = 3
id = = 3
id = 3 and
id IN ()
id = 3.0
id = '3'
id = 99999999999
id in (1, 99999999999)
id in ('3')
id between 1 and 99999999999
id > -2147483649
big = -1
tiny > 300
text = 1
text in (1)
double = 'NaN'
`Text` = 'a1'
nested.cc.d = '4'
t.id = 3
count(id) = 1
cast(text as int) = 1
1
id
id is true
raw = 'x3'
id = 1 xor id = 2
(select 1) = 1
id in (select 1)
exists (select 1)
unheard_of(id)
unnest([true])
half = 70000
half > -1e5
""".strip()


def _lines(block: str) -> list[str]:
    return block.replace("-- a comment\n id", "-- a comment\x00 id").splitlines()


@pytest.fixture(scope="module")
def in_lance(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    return lance.write_dataset(ROWS, str(tmp_path_factory.mktemp("predicates") / "rows"))


def _matches(sql: str) -> list[int]:
    mask = Predicate.parse(sql, ROWS.schema).mask(ROWS)
    return list(ROWS.column("id").filter(pa.array(mask)).to_pylist())


@pytest.mark.parametrize("line", _lines(SAME_AS_IN_LANCE))
def test_a_predicate_matches_the_rows_that_it_matches_in_lance(
    line: str, in_lance: lance.LanceDataset
) -> None:
    sql = line.replace("\x00", "\n")
    assert _matches(sql) == in_lance.to_table(columns=["id"], filter=sql).column("id").to_pylist()


@pytest.mark.parametrize("sql", _lines(REFUSED_AS_IN_LANCE))
def test_what_lance_refuses_is_refused_in_words(sql: str, in_lance: lance.LanceDataset) -> None:
    with pytest.raises((ValueError, OSError)):
        in_lance.to_table(filter=sql)
    with pytest.raises(InvalidInputError, match="filter") as refused:
        _matches(sql)
    assert sql in str(refused.value)
    assert "?table?" not in str(refused.value)


@pytest.mark.parametrize("sql", ["_rowid = 3", "_rowaddr = 3", "id = 3; drop table x", "id = 1) or (1 = 1"])
def test_row_ids_and_second_statements_mean_nothing_across_levels(sql: str) -> None:
    with pytest.raises(InvalidInputError):
        Predicate.parse(sql, ROWS.schema)


def test_an_unknown_column_is_refused_with_the_columns_there_are() -> None:
    with pytest.raises(InvalidInputError, match=r"No field named nope.*id, text"):
        Predicate.parse("nope = 3", ROWS.schema)


@pytest.mark.parametrize(
    ("sql", "columns"),
    [
        ("id = 3", {"id"}),
        ("nested.b = 3 OR flag", {"nested", "flag"}),
        ("lower(text) = 'x' AND id > 1", {"text", "id"}),
        ("array_contains(list, 3)", {"list"}),
        ("true", set()),
    ],
)
def test_columns_are_those_that_are_read(sql: str, columns: set[str]) -> None:
    predicate = Predicate.parse(sql, ROWS.schema)
    assert predicate.columns == columns
    assert predicate.mask(ROWS.select(sorted(columns) or ["id"])).shape == (N,)


@pytest.mark.parametrize(
    ("sql", "values"),
    [
        ("id = 3", [3]),
        ("id IN (1, 1, 2)", [1, 2]),
        ("id IN (1, 2, 3) AND id IN (2, 3, 4)", [2, 3]),
        ("id = 1 AND id = 2", []),
        ("id IN (1, NULL)", [1]),
        ("id = 3 AND lower(text) = 'x'", [3]),
        ("id = 1 OR id = 2", None),
        ("id NOT IN (1, 2)", None),
        ("NOT id = 1", None),
        ("id > 3", None),
        ("nested.b = 3", None),
    ],
)
def test_values_of_a_column_are_known_where_conditions_name_them_all(
    sql: str, values: list[int] | None
) -> None:
    found = Predicate.parse(sql, ROWS.schema).values_of("id")
    assert (None if found is None else found.to_pylist()) == values


def test_simple_means_that_nothing_is_left_to_the_engine() -> None:
    assert Predicate.parse("id = 3 AND (text = 'a' OR flag IS NULL)", ROWS.schema).is_simple
    assert not Predicate.parse("id = 3 AND text LIKE 'a%'", ROWS.schema).is_simple


def test_a_record_batch_a_chunked_table_and_no_rows_are_all_fine() -> None:
    predicate = Predicate.parse("id > 3 AND text LIKE 'a%'", ROWS.schema)
    chunked = pa.concat_tables([ROWS.slice(i, 1) for i in range(N)])
    whole = predicate.mask(ROWS.combine_chunks().to_batches()[0])
    assert whole.tolist() == predicate.mask(chunked).tolist()
    assert predicate.mask(ROWS.slice(0, 0)).tolist() == []


def test_threads_share_predicates_and_engine() -> None:
    predicate = Predicate.parse("text LIKE 'a%' AND id < 5", ROWS.schema)

    def evaluate(number: int) -> tuple[list[int], int]:
        own = Predicate.parse(f"double > 0.5 AND id = {number}", ROWS.schema)
        return np.flatnonzero(predicate.mask(ROWS)).tolist(), int(own.mask(ROWS).sum())

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(evaluate, [0, 5] * 20))
    assert results == [([1, 2, 3, 4], 1)] * 40


_CONDITIONS = st.sampled_from(
    [
        "id = 3",
        "id IN (1, 2, NULL)",
        "id NOT IN (1, NULL)",
        "id > 4",
        "id BETWEEN 2 AND 6",
        "text = 'a2'",
        "text IS NULL",
        "text < 'a5'",
        "flag",
        "flag = false",
        "single > 0.1",
        "text LIKE '%2'",
    ]
)
_TREES = st.recursive(
    _CONDITIONS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} AND {pair[1]})"),
        st.tuples(inner, inner).map(lambda pair: f"({pair[0]} OR {pair[1]})"),
        inner.map(lambda one: f"(NOT {one})"),
    ),
    max_leaves=6,
).filter(lambda sql: sql.count("NULL)") < 2)


# Two lists of one column with a NULL are left out: DataFusion makes one list of them and forgets the NULL, so
# that Lance finds a row by ``id IN (1, 2, NULL) AND id NOT IN (1, NULL)``, which is true of none.
@settings(max_examples=60)
@given(sql=_TREES)
def test_three_valued_logic_is_lances(sql: str, in_lance: lance.LanceDataset) -> None:
    assert _matches(sql) == in_lance.to_table(columns=["id"], filter=sql).column("id").to_pylist()


@settings(max_examples=25)
@given(values=st.lists(st.text(max_size=5), min_size=1, max_size=4, unique=True))
def test_any_text_can_be_asked_for_as_a_key(values: list[str]) -> None:
    rows = pa.table({"key": [*values, "other-key"]})
    sql = among("key", pa.array(values))
    dataset = lance.write_dataset(rows, f"memory://{uuid4().hex}")
    assert dataset.to_table(filter=sql).column("key").to_pylist() == values
    asked = Predicate.parse(sql, rows.schema).values_of("key")
    assert asked is not None
    assert asked.to_pylist() == values


def test_words_in_texts_and_names_are_left_alone() -> None:
    sql = "a = 'A AND b' AND `B` = X'00' AND s.A = \"Text\""
    assert for_datafusion(sql, ["A", "s", "X"]) == "A = 'A AND b' AND `B` = X'00' AND s.A = 'Text'"


@pytest.mark.parametrize("operator", ["OR", "AND"])
def test_a_chain_of_many_terms_was_too_deep(operator: str) -> None:
    terms = [f"id = {i % 4}" if operator == "OR" else f"id != {i + 4}" for i in range(1200)]
    terms[7] = "length(text) = 2"  # which Arrow cannot evaluate
    sql = f" {operator} ".join(terms)
    found = ROWS.filter(pa.array(Predicate.parse(sql, ROWS.schema).mask(ROWS)))
    dataset = lance.write_dataset(ROWS.select(["id", "text"]), f"memory://{uuid4().hex}")
    assert found.column("id").to_pylist() == dataset.to_table(filter=sql).column("id").to_pylist()


NULL_STRUCT = pa.struct([("x", pa.int32()), ("deep", pa.struct([("z", pa.int32())]))])
NULLS_ABOVE = pa.table(
    {
        "id": range(3),
        "row": pa.array([None, {"x": 0, "deep": None}, {"x": 1, "deep": {"z": 0}}], NULL_STRUCT),
        "strict": pa.array(
            [None, {"x": 0}, {"x": 1}], pa.struct([pa.field("x", pa.int32(), nullable=False)])
        ),
        "rows": pa.array([None, [None], [{"x": 0, "deep": {"z": 0}}]], pa.list_(NULL_STRUCT)),
        "named": pa.array([[("k", None)], None, [("k", {"x": 0})]], pa.map_(pa.string(), NULL_STRUCT)),
    }
)


@pytest.mark.parametrize(
    ("sql", "matching"),
    [
        ("row.x + 1 = 1", [1]),
        ("row.x in (0, 1.5)", [1]),
        ("row['x'] <= 0", [1]),
        ("row.deep.z + 0 = 0", [2]),
        ("coalesce(row.x, 7) = 7", [0]),
        ("strict.x + 0 = 0", [1]),
        ("rows[1]['x'] + 0 = 0", [2]),
        ("named['k']['x'] + 0 = 0", [2]),
        ("named['k']['x'] IS NULL", [0, 1]),
        ("named['k'] IS NOT NULL", [2]),
    ],
)
def test_the_fields_of_a_null_struct_had_values(sql: str, matching: list[int]) -> None:
    for rows in (NULLS_ABOVE, pa.concat_tables([NULLS_ABOVE.slice(0, 2), NULLS_ABOVE.slice(2)])):
        found = np.flatnonzero(Predicate.parse(sql, rows.schema).mask(rows))
        assert found.tolist() == matching
        assert np.flatnonzero(Predicate.parse(sql, rows.schema).mask(rows.slice(1))).tolist() == [
            row - 1 for row in matching if row
        ]


@pytest.mark.parametrize(
    "sql",
    [
        " OR ".join(f"id + {number} = 5" for number in range(20_000)),
        " AND ".join(f"id != {number}" for number in range(20_000)),
        "id" + " + 1" * 20_000 + " = 1",
        "true" + " = true" * 20_000,
        "NOT " * 20_000 + "true",
        "(" * 20_000 + "true" + ")" * 20_000,
    ],
    ids=["or", "and", "plus", "equal", "not", "parentheses"],
)
def test_a_chain_that_fills_the_stack_ended_the_process(sql: str) -> None:
    schema = pa.schema({"id": pa.int64()})
    with pytest.raises(InvalidInputError, match="too many parts"):
        Predicate.parse(sql, schema)
    with pytest.raises(InvalidInputError, match="too many parts"):
        Expression.parse(sql, schema)


def test_many_values_and_ranges_are_no_deep_chain() -> None:
    rows = pa.table({"id": [1, 7]})
    many = f"id IN ({', '.join(map(str, range(-20_000, 2)))})"
    assert Predicate.parse(many, rows.schema).mask(rows).tolist() == [True, False]
    ranges = " OR ".join(f"id BETWEEN {10 * number} AND {10 * number + 5}" for number in range(1000))
    assert Predicate.parse(ranges, rows.schema).mask(rows).tolist() == [True, False]
