"""What holds far away: threads share requests, and refused requests are repeated until all is done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.context import by_threads
from bench.far import FarStorage
from bench.operations import Lab, rows
from bench.tables import peer_writer
from bench.workloads.remote import _run, session
from tests.servers import S3Server


@pytest.fixture(scope="module")
def lab(s3: S3Server) -> Iterator[Lab]:
    with FarStorage(server=s3, latency=0.02) as far, Lab(far) as lab:
        yield lab


def test_threads_share_requests_where_lance_makes_one_for_each_put(lab: Lab) -> None:
    def requests(writer: Any) -> int:
        writer.put(rows(1, 1))
        return _run(lab.far, lambda: by_threads(32, 4, lambda number: writer.put(rows(number, 1)))).requests

    theirs = peer_writer(lab.far.place(lab.empty).dataset())
    assert requests(theirs) >= 100
    theirs.close()
    ours = []
    # Where threads come slowly, fewer of them meet during a short round trip.
    for latency in (0.02, 0.1, 0.5):
        lab.far.latency = latency
        ours.append(requests(lab.keep(lab.far.place(lab.empty).table().writer())))
        if ours[-1] <= 24:
            return
    pytest.fail(f"{ours} requests for 128 puts")


def test_what_the_storage_refuses_is_done_all_the_same(lab: Lab) -> None:
    lab.far.latency = 0.0
    # On a busy machine requests come slowly: then fewer of them are let through.
    for rate in (40, 12, 4):
        lab.far.proxy.set(requests_per_second=rate)
        try:
            run = session(lab.far, lab.far.place(lab.empty))
        finally:
            lab.far.proxy.set(requests_per_second=None)
        if run.refused:
            return
    pytest.fail("nothing was refused, so nothing was tried again")
