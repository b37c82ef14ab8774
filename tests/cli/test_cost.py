"""``lancewal cost``: bills and limits for people and for scripts."""

from __future__ import annotations

import pytest

from lancewal.cli.cost import _number, _price
from tests.cli.support import ok, run


def test_shows_bills_and_limits() -> None:
    out = ok("cost").out
    for part in ("a million …", "an idle day, a look every 5 s", "limits, with 8 shards and 1 writer"):
        assert part in out
    assert "no limit is met; the first would be: MemTables of one writer" in out
    assert max(len(line) for line in out.splitlines()) <= 100


def test_a_narrow_screen_cut_figures() -> None:
    load = ("--shards", 1000, "--per-day", "1TB")
    out, bills = ok("cost", *load, columns=64).out, ok("cost", *load, "--json").document
    assert max(len(line) for line in out.splitlines()) <= 64
    for line in (*bills["per_million"], *bills["per_idle_day"], *bills["per_day"]):
        for figure in (_number(line["puts"]), _number(line["gets"]), _price(line["price"])):
            assert f"{figure} " in out or f"{figure}\n" in out
    assert out.count("…") == 1


def test_a_load_that_is_too_large_is_told_what_to_set() -> None:
    out = ok("cost", "--shards", 1000, "--per-day", "1TB", "--writers", 100).out
    assert "what to set" in out
    assert "log entries kept in a shard: put" in out


def test_json_holds_the_same_for_other_prices() -> None:
    usual, free = ok("cost", "--json").document, ok("cost", "--json", "--put-price", 0).document
    assert usual.keys() == {"per_million", "per_idle_day", "per_day", "storage_per_month", "limits"}
    first = usual["per_million"][0]
    assert (first["puts"], round(first["price"], 6)) == (1_000_000, 5.0)
    assert free["per_million"][0]["price"] == 0
    assert usual["limits"] == free["limits"]


@pytest.mark.parametrize(
    "wrong", [("--per-day", "much"), ("--row-size", "0"), ("--poll", "often"), ("--shards", "0")]
)
def test_senseless_figures_are_refused(wrong: tuple[str, str]) -> None:
    outcome = run("cost", *wrong)
    assert outcome.code == 2
    assert wrong[0] in outcome.err


def test_nothing_waits_and_nothing_costs_where_all_is_free() -> None:
    document = ok("cost", "--json", "--put-price", 0, "--get-price", 0, "--storage-price", 0).document
    assert sum(line["price"] for line in document["per_day"]) == 0
    assert document["storage_per_month"] == 0
