"""Spark's filters in Lance's SQL, judged by both ways in which lancewal evaluates them."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import datasource as ds

from lancewal.predicate.predicate import Predicate
from lancewal.spark.filters import split_filters, to_sql

#: What 0.0 / 0.0 is on most processors: its sign is set.
NAN = float(np.copysign(np.nan, -1.0))
TENTH = float(np.float32(0.1))
NOON = dt.datetime(2024, 1, 1, 12, 0, 0, 5)
ROWS = pa.table(
    {
        "id": [1, 2, 3],
        "ratio": pa.array(np.array([0.1, NAN, -1.5])),
        "half": pa.array(np.array([0.1, NAN, -1.5], np.float16)),
        "text": ["it's", None, "a%c"],
        "flag": [True, False, None],
        "raw": [b"a", b"\0", None],
        "score": pa.array(np.array([0.1, NAN, -1.5], np.float32)),
        "price": pa.array([Decimal("1.10"), None, Decimal("2.00")], pa.decimal128(10, 2)),
        "large": pa.array([None, None, Decimal(1)], pa.decimal128(38, 10)),
        "day": pa.array([dt.date(2024, 1, 1), dt.date(2024, 1, 2), None]),
        "zoned": pa.array([NOON, None, dt.datetime(2025, 1, 1)], pa.timestamp("us", "UTC")),
        "local": pa.array([NOON, None, dt.datetime(2025, 1, 1)], pa.timestamp("us")),
        "big": pa.array([2**63, 5, None], pa.uint64()),
        "point": [{"x": 1}, {"x": None}, None],
        "tags": [["a"], None, []],
    }
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> lance.LanceDataset:
    path: Path = tmp_path_factory.mktemp("filters") / "table"
    return lance.write_dataset(ROWS, str(path), data_storage_version="2.1")


CASES: list[tuple[ds.Filter, list[int]]] = [
    (ds.EqualTo(("id",), 2), [2]),
    (ds.GreaterThan(("id",), 1), [2, 3]),
    (ds.GreaterThanOrEqual(("id",), 2), [2, 3]),
    (ds.LessThan(("id",), 2), [1]),
    (ds.LessThanOrEqual(("id",), 2), [1, 2]),
    (ds.In(("id",), (1, 3)), [1, 3]),
    (ds.Not(ds.In(("id",), (1, 3))), [2]),
    (ds.Not(ds.EqualTo(("id",), 2)), [1, 3]),
    (ds.EqualTo(("text",), "it's"), [1]),
    (ds.Not(ds.EqualTo(("text",), "it's")), [3]),
    (ds.EqualNullSafe(("text",), "it's"), [1]),
    (ds.Not(ds.EqualNullSafe(("text",), "it's")), [2, 3]),
    (ds.EqualNullSafe(("text",), None), [2]),
    (ds.Not(ds.EqualNullSafe(("text",), None)), [1, 3]),
    (ds.IsNull(("text",)), [2]),
    (ds.IsNotNull(("text",)), [1, 3]),
    (ds.Not(ds.IsNull(("text",))), [1, 3]),
    (ds.StringStartsWith(("text",), "a%"), [3]),
    (ds.StringEndsWith(("text",), "s"), [1]),
    (ds.StringContains(("text",), "%"), [3]),
    (ds.Not(ds.StringContains(("text",), "%")), [1]),
    (ds.EqualTo(("flag",), True), [1]),
    (ds.Not(ds.EqualTo(("flag",), True)), [2]),
    (ds.EqualTo(("raw",), b"\0"), [2]),
    (ds.GreaterThan(("score",), 0.0625), [1, 2]),
    (ds.GreaterThanOrEqual(("score",), TENTH), [1, 2]),
    (ds.LessThan(("score",), 0.0625), [3]),
    (ds.LessThanOrEqual(("score",), TENTH), [1, 3]),
    (ds.EqualTo(("score",), TENTH), [1]),
    (ds.In(("score",), (TENTH, -1.5)), [1, 3]),
    (ds.Not(ds.GreaterThan(("score",), TENTH)), [1, 3]),
    (ds.Not(ds.LessThan(("score",), TENTH)), [1, 2]),
    (ds.Not(ds.EqualTo(("score",), TENTH)), [2, 3]),
    (ds.Not(ds.In(("score",), (TENTH, -1.5))), [2]),
    (ds.GreaterThan(("ratio",), 0.05), [1, 2]),
    (ds.LessThan(("ratio",), 0.05), [3]),
    (ds.GreaterThanOrEqual(("half",), -1.5), [1, 2, 3]),
    (ds.LessThan(("half",), 0.5), [1, 3]),
    (ds.EqualTo(("price",), Decimal("1.10")), [1]),
    (ds.LessThan(("large",), Decimal("123456789012345678901234567")), [3]),
    (ds.EqualTo(("day",), dt.date(2024, 1, 2)), [2]),
    (ds.EqualTo(("zoned",), NOON.replace(tzinfo=dt.UTC)), [1]),
    (ds.GreaterThan(("zoned",), dt.datetime(2024, 6, 1, tzinfo=dt.timezone(dt.timedelta(hours=2)))), [3]),
    (ds.LessThanOrEqual(("local",), NOON), [1]),
    (ds.EqualTo(("big",), Decimal(2**63)), [1]),
    (ds.EqualTo(("point", "x"), 1), [1]),
]


@pytest.mark.parametrize(("condition", "ids"), CASES, ids=str)
def test_a_pushed_filter_finds_what_spark_would(
    dataset: lance.LanceDataset, condition: ds.Filter, ids: list[int]
) -> None:
    sql = to_sql(condition, ROWS.schema)
    assert sql is not None
    assert dataset.scanner(columns=["id"], filter=sql).to_table()["id"].to_pylist() == ids
    mask = Predicate.parse(sql, ROWS.schema).mask(ROWS)
    assert ROWS["id"].filter(pa.array(mask)).to_pylist() == ids


@pytest.mark.parametrize(
    "condition",
    [
        # Spark takes -0.0 and 0.0 for equal, and NaN for equal to NaN.
        ds.EqualTo(("score",), 0.0),
        ds.EqualTo(("score",), float("nan")),
        # No value of the column: the table would round the number, Spark does not.
        ds.LessThan(("score",), 0.1),
        ds.LessThan(("half",), TENTH),
        ds.In(("id",), (1, None)),
        ds.In(("id",), ()),
        ds.EqualTo(("id",), "1"),
        ds.EqualTo(("tags",), ["a"]),
        ds.IsNull(("point",)),
        ds.EqualTo(("absent",), 1),
        ds.EqualTo(("point", "absent"), 1),
        ds.EqualTo(("zoned",), NOON),
        ds.EqualTo(("price",), Decimal("1.105")),
        ds.StringStartsWith(("id",), "1"),
        # PySpark rounds what has more digits.
        ds.EqualTo(("large",), Decimal("-1234567890123456789012345678")),
        ds.Not(ds.In(("large",), (Decimal(1), Decimal("0.1234567890123456789012345678")))),
    ],
    ids=str,
)
def test_what_the_table_may_judge_differently_is_left_to_spark(condition: ds.Filter) -> None:
    pushed, left = split_filters([condition], ROWS.schema)
    assert pushed == []
    assert left == [condition]
    assert left[0] is condition
