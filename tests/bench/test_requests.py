"""The table of requests: every operation needs no more than it says, and the page shows what is stored."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.far import Cost, FarStorage
from bench.operations import OPERATIONS, Goal, Lab, Operation
from bench.requests import END, PAGE, exceeds, meets_goal, with_tables
from lancewal.cost import Measured, measured
from tests.servers import S3Server

#: Seconds a request. Where a busy machine let requests overlap too little, the next try is slower.
LATENCIES = (0.02, 0.04, 0.08, 0.12)


@pytest.fixture(scope="module")
def lab(s3: S3Server) -> Iterator[Lab]:
    with FarStorage(server=s3) as far, Lab(far) as lab:
        yield lab


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_needs_no_more_requests_than_the_table_says(operation: Operation, lab: Lab) -> None:
    stored = measured()[operation.name]
    least: Cost | None = None
    for latency in LATENCIES:
        lab.far.latency = latency
        least = lab.measure(operation, tries=1).least(least)
        if not exceeds(operation, least, stored):
            return
    assert least is not None
    assert exceeds(operation, least, stored) == [], "see python -m bench.requests"


def test_the_page_shows_what_is_stored() -> None:
    assert PAGE.read_text() == with_tables(PAGE.read_text()), "run python -m bench.requests --write"


def test_every_operation_is_stored_and_no_other() -> None:
    assert list(measured()) == [operation.name for operation in OPERATIONS]


def test_a_page_without_a_place_for_a_table_is_refused() -> None:
    with pytest.raises(ValueError, match="no place for requests"):
        with_tables(f"# Cost\n{END}\n")


def _figures(depth: int, requests: int = 4, plain: tuple[int, int] | None = None) -> Measured:
    return Measured("x", 1, {"GET": requests}, depth, 0, 0, plain)


def test_more_requests_or_depth_than_stored_are_noticed() -> None:
    operation = Operation("x", lambda lab: lambda: None)
    assert exceeds(operation, Cost(3, {"GET": 4}, 0, 0), _figures(3)) == []
    assert "5 requests, not 4" in exceeds(operation, Cost(3, {"GET": 5}, 0, 0), _figures(3))[0]
    assert exceeds(operation, Cost(4, {"GET": 4}, 0, 0), _figures(3)) == ["a depth of 4, not 3"]


def test_a_goal_beyond_plain_lance_counts_from_its_depth() -> None:
    goal = Goal(depth=3, text="depth ≤ 3 beyond plain Lance")
    operation = Operation("x", lambda lab: lambda: None, goal=goal, beyond_peer=True)
    assert meets_goal(operation, _figures(5, plain=(2, 2))) is True
    assert meets_goal(operation, _figures(6, plain=(2, 2))) is False
    assert meets_goal(Operation("x", lambda lab: lambda: None), _figures(6)) is None


def test_a_hundred_and_twenty_eight_threads_share_entries() -> None:
    """One request a put is what each thread alone would need, 1,024 in all."""
    assert measured()["1,024 puts of 128 threads"].requests <= 64
    assert measured()["durable put"].kinds == {"PUT": 1}
