"""What holds far away: threads share requests, and refused requests are repeated until all is done."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.far import FarStorage
from bench.operations import Lab, rows
from bench.workloads.remote import _by_threads, _run, _session, peer_writer
from tests.servers import S3Server


@pytest.fixture(scope="module")
def lab(s3: S3Server) -> Iterator[Lab]:
    with FarStorage(server=s3, latency=0.02) as far, Lab(far) as lab:
        yield lab


def test_threads_share_requests_where_lance_makes_one_for_each_put(lab: Lab) -> None:
    counted = {}
    ours = lab.keep(lab.far.place(lab.empty).table().writer())
    theirs = peer_writer(lab.far.place(lab.empty).dataset())
    for name, writer in (("ours", ours), ("theirs", theirs)):
        writer.put(rows(1, 1))
        put = writer.put
        run = _run(lab.far, lambda put=put: _by_threads(32, 4, lambda number: put(rows(number, 1))))
        counted[name] = run.requests
    theirs.close()
    assert counted["theirs"] >= 100
    assert counted["ours"] <= 24


def test_what_the_storage_refuses_is_done_all_the_same(lab: Lab) -> None:
    lab.far.proxy.set(requests_per_second=40)
    try:
        run = _session(lab.far, lab.far.place(lab.empty))
    finally:
        lab.far.proxy.set(requests_per_second=None)
    assert run.refused > 0
