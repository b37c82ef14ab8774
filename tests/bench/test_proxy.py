"""The proxy in front of an S3 server: what it records, how it delays and refuses."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.proxy import Proxy, Request, depth_of
from tests.patience import PATIENCE
from tests.servers import S3Server


def _request(began: float, ended: float) -> Request:
    return Request("GET", "/x", 200, began, ended, 0, 0)


@pytest.mark.parametrize(
    ("times", "depth"),
    [
        ([], 0),
        ([(0, 1), (0, 1), (0.5, 1.5)], 1),
        ([(0, 1), (1, 2), (2, 3)], 3),
        ([(0, 1), (0.5, 3), (1.5, 2), (2.5, 4)], 3),
        ([(0, 10), (1, 2), (3, 4), (11, 12)], 3),
    ],
)
def test_depth_is_the_longest_chain_of_requests_that_wait(
    times: list[tuple[float, float]], depth: int
) -> None:
    assert depth_of(_request(*each) for each in times) == depth


@pytest.fixture
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.endpoint, latency=0.02) as proxy:
        yield proxy


def _get(proxy: Proxy, path: str) -> int:
    try:
        with urllib.request.urlopen(f"{proxy.endpoint}{path}", timeout=PATIENCE) as reply:
            reply.read()
            return int(reply.status)
    except urllib.error.HTTPError as error:
        error.read()
        return error.code


def test_requests_side_by_side_count_once_in_depth_and_those_in_turn_each(proxy: Proxy) -> None:
    with ThreadPoolExecutor(4) as pool, proxy.recording() as recording:
        list(pool.map(lambda number: _get(proxy, f"/bucket/none-{number}"), range(4)))
        for number in range(3):
            _get(proxy, f"/bucket/none-{number}")
    assert len(recording.requests) == 7
    assert 4 <= recording.depth <= 7
    assert recording.requests[-1].path == "/bucket/none-2"
    assert recording.requests[-1].ended - recording.requests[-1].began >= 0.02


def test_too_many_requests_in_a_second_are_refused_as_object_storage_does_it(proxy: Proxy) -> None:
    proxy.set(latency=0.0, requests_per_second=0)
    with proxy.recording() as recording:
        assert _get(proxy, "/bucket/none") == 503
    assert [request.status for request in recording.requests] == [503]
    proxy.set(requests_per_second=None)
    assert _get(proxy, "/bucket/none") == 404
