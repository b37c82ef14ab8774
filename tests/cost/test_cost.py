"""The calculator: what more of anything does to bills and limits, and the load of the documentation."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lancewal.config import ShardWriterConfig
from lancewal.cost import Line, Load, Prices, limits, measured, per_day, per_idle_day, per_million
from lancewal.errors import InvalidInputError

LOADS = st.builds(
    Load,
    shards=st.integers(1, 1024),
    bytes_per_day=st.floats(1e3, 1e14),
    row_bytes=st.floats(1, 1e6),
    rows_per_put=st.integers(1, 100_000),
    writers=st.integers(1, 1000),
    memory=st.floats(1e8, 1e12),
    poll_seconds=st.floats(0.1, 3600),
)


def total(load: Load, prices: Prices | None = None) -> float:
    return sum(line.price(prices or Prices()) for line in per_day(load))


def share(load: Load, name: str) -> float:
    return next(limit.share for limit in limits(load) if limit.name == name)


@given(LOADS, st.integers(1, 8))
def test_more_shards_never_cost_less(load: Load, times: int) -> None:
    more = replace(load, shards=load.shards * times)
    assert total(more) >= total(load) * 0.999
    idle = [sum(line.price(Prices()) for line in per_idle_day(each)) for each in (load, more)]
    assert idle[1] >= idle[0]


@given(LOADS, st.floats(1, 100))
def test_more_rows_a_day_never_cost_less(load: Load, times: float) -> None:
    assert total(replace(load, bytes_per_day=load.bytes_per_day * times)) >= total(load) * 0.999


@given(LOADS, st.integers(1, 100))
def test_more_rows_in_a_put_never_cost_more(load: Load, times: int) -> None:
    more = replace(load, rows_per_put=load.rows_per_put * times)
    assert total(more) <= total(load) * 1.001
    for name in ("PUT and LIST", "log entries kept in a shard"):
        assert share(more, name) <= share(load, name) * 1.001


@given(LOADS, st.floats(1, 100), st.sampled_from(["put", "get"]))
def test_a_higher_price_never_costs_less(load: Load, times: float, name: str) -> None:
    dearer = replace(Prices(), **{name: getattr(Prices(), name) * times})
    assert total(load, dearer) >= total(load)


@given(LOADS, st.integers(1, 10))
def test_more_writers_never_need_more_memory_each(load: Load, times: int) -> None:
    more = replace(load, writers=load.writers * times)
    assert share(more, "MemTables of one writer") <= share(load, "MemTables of one writer")


@given(LOADS)
def test_the_limit_that_is_met_first_comes_first(load: Load) -> None:
    shares = [limit.share for limit in limits(load)]
    assert shares == sorted(shares, reverse=True)
    assert all(each >= 0 for each in shares)


def test_the_memtable_size_that_is_advised_fits() -> None:
    load = Load(shards=64, bytes_per_day=1e12, writers=2, memory=2e9, rows_per_put=6400)
    over = {limit.name: limit for limit in limits(load) if limit.share > 1}
    assert "set max_memtable_size to 15 MB" in over["MemTables of one writer"].advice
    small = replace(load, config=ShardWriterConfig(max_memtable_size=15_000_000))
    assert share(small, "MemTables of one writer") <= 1


@pytest.mark.parametrize("name", ["log entries kept in a shard", "PUT and LIST"])
def test_the_rows_of_a_put_that_are_advised_are_enough(name: str) -> None:
    load = Load(shards=1000, bytes_per_day=1e13, writers=100, rows_per_put=1000)
    over = {limit.name: limit for limit in limits(load) if limit.share > 1}
    found = re.search(r"put ([0-9,]+) rows at a time", over[name].advice)
    assert found is not None
    assert share(replace(load, rows_per_put=int(found[1].replace(",", ""))), name) <= 1


def test_a_thousand_shards_and_a_terabyte_a_day_meet_the_log_first() -> None:
    """Puts of 1,000 rows over 1,000 shards are entries of one row."""
    load = Load(shards=1000, bytes_per_day=1e12, writers=100)
    first, second, *_ = limits(load)
    assert (first.name, second.name) == ("log entries kept in a shard", "PUT and LIST")
    assert load.entries_per_day == pytest.approx(1e9)
    assert replace(load, rows_per_put=100_000).entries_per_day == pytest.approx(1e7)


def test_puts_during_one_round_trip_share_an_entry() -> None:
    quick = Load(shards=1, bytes_per_day=1e12, rows_per_put=1)
    assert quick.puts_per_second_and_shard > 10_000
    assert quick.entries_per_day == pytest.approx(86_400 / 0.03)


def test_a_million_puts_cost_what_their_requests_do() -> None:
    lines = {line.name: line for line in per_million(Load())}
    one, many = lines["rows put one by one, by one thread"], lines["rows put one by one, by 128 threads"]
    assert (one.puts, one.gets, round(one.price(Prices()), 9)) == (1_000_000, 0, 5.0)
    assert many.price(Prices()) <= 0.2


def test_deletes_are_free_and_heads_are_gets() -> None:
    line = Line("x", {"PUT": 1, "LIST": 2, "GET": 3, "HEAD": 4, "DELETE MANY": 5, "DELETE": 6})
    assert (line.puts, line.gets) == (3, 7)
    assert line.price(Prices(put=1000, get=1)) == pytest.approx(3.007)


@pytest.mark.parametrize("wrong", [{"shards": 0}, {"row_bytes": -1.0}, {"memory": float("nan")}])
def test_an_impossible_load_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError, match="must be above zero"):
        Load(**wrong)


def test_a_negative_price_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="must not be negative"):
        Prices(get=-1)


def test_every_operation_that_is_billed_was_measured() -> None:
    for bill in (per_million(Load()), per_idle_day(Load()), per_day(Load())):
        assert bill
    assert measured()["idle feed poll, 64 shards"].shards == 64
