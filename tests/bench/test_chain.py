"""The longest chain of requests, and who made each of them."""

from __future__ import annotations

from bench.chain import OURS, Calls, longest_chain, stored, summed, table
from bench.operations import OPERATIONS
from bench.proxy import Request, depth_of
from lancewal.cost import measured


def request(began: float, ended: float, path: str = "/bucket/table/data/x") -> Request:
    return Request("GET", path, 200, began, ended, 0, 0)


def test_a_chain_is_as_long_as_the_depth_and_names_who_asked() -> None:
    requests = [request(0, 1), request(0.5, 3), request(1.5, 2), request(2.5, 4), request(4, 5)]
    calls = Calls([("merge_insert.execute", 1.4, 4.1)])
    chain = longest_chain(requests, calls)
    assert len(chain) == depth_of(requests) == 4
    assert summed(chain) == [(OURS, 1), ("merge_insert.execute", 3)]


def test_our_own_files_are_ours_whatever_pylance_does_meanwhile() -> None:
    calls = Calls([("optimize_indices", 0, 9)])
    ours = request(1, 2, "/bucket/table/_mem_wal/_lancewal/columns.json")
    assert calls.of(ours) == OURS
    assert calls.of(request(1, 2)) == "optimize_indices"


def test_of_chains_that_are_equally_long_the_one_of_the_same_caller_counts() -> None:
    calls = Calls([("optimize_indices", 0, 9)])
    beside = request(0, 1.1, "/bucket/table/_mem_wal/_lancewal/columns.json")
    chain = longest_chain([request(0, 1), beside, request(2, 3)], calls)
    assert summed(chain) == [("optimize_indices", 2)]


def test_without_requests_there_is_no_chain() -> None:
    assert longest_chain([], Calls()) == []


def test_every_compaction_is_stored_with_the_depth_that_the_table_of_requests_says() -> None:
    """Both are counted, so they may differ by the little that a busy machine adds."""
    compactions = {each.name: each for each in OPERATIONS if each.name.startswith("compact ")}
    chains = stored()
    assert chains.keys() == {
        name + suffix
        for name, each in compactions.items()
        for suffix in ("", *([", plain Lance"] * bool(each.peer)))
    }
    for name in compactions:
        assert abs(sum(number for _, number in chains[name]) - measured()[name].depth) <= 2


def test_the_page_says_what_pylance_asked_for() -> None:
    (line,) = table({"compact": [["lancewal", 2], ["merge_insert.execute", 6]]})[2:]
    assert line == "| compact | 8 | 2 lancewal, 6 `merge_insert.execute` |"
