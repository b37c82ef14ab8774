"""Ours and Lance on an S3 server that is far away, through the same proxy in one run: time and requests.

Where Lance has no such thing as ours (fresh rows of another process, a feed, garbage of a log) it reads or
writes the same rows in its own way. Latency is 15 and 60 ms, with a fifth of it as jitter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from bench.comparison import Comparison
from bench.context import Context, by_threads
from bench.far import FarStorage, Place
from bench.operations import BASE_KEY, BASE_ROWS, OPERATIONS, Lab, rows
from bench.registry import workload
from bench.tables import expect, peer_writer, upsert

WRITER, PLAIN = "Lance writer", "plain Lance"
PEER_SESSION = "Lance writer, then merge_insert"
LATENCIES = (0.015, 0.060)
#: Of these operations Lance does the same, beside ours.
_READS = (
    "lookup of a base key, warm",
    "scan of 8 SSTables, warm",
    "vector search of 8 SSTables, warm",
    "text search of 8 SSTables, warm",
)
#: A storage that refuses what goes beyond.
_REQUESTS_PER_SECOND = 20
_NEW_KEYS = 10_000
_THREADS, _PUTS = 16, 16


@dataclass(frozen=True)
class Run:
    seconds: float
    requests: int
    refused: int = 0


@workload("remote", "an S3 server 15 and 60 ms away: puts, replay, reads, flush, compaction, gc, feed")
def remote(context: Context) -> list[Comparison]:
    comparisons = []
    for latency in LATENCIES[: context.size(full=2, quick=1)]:
        with FarStorage(latency=latency, jitter=latency / 5) as far, Lab(far) as lab:
            pairs = {**_puts(lab, context), **_reads(lab), **_others(lab)}
        for name, (ours, peer, peer_name) in pairs.items():
            where = f"{name}, {latency * 1e3:.0f} ms"
            comparisons += [
                Comparison(where, ours.seconds * 1e3, peer.seconds * 1e3, "ms", False, peer_name),
                Comparison(f"{where}: requests", ours.requests, peer.requests, "requests", False, peer_name),
            ]
    return comparisons


@workload("throttled", "an S3 server that refuses all beyond 20 requests a second: all is done, none is lost")
def throttled(context: Context) -> list[Comparison]:
    with FarStorage(latency=0.002) as far, Lab(far) as lab:
        sides = {side: lambda work=work: work(far, far.place(lab.empty)) for side, work in _SESSIONS.items()}
        far.proxy.set(requests_per_second=_REQUESTS_PER_SECOND)
        slow = context.in_turn(**sides)
        far.proxy.set(requests_per_second=None)
        free = context.in_turn(**sides)
    if not slow["ours"].refused:
        raise RuntimeError("nothing was refused, so nothing was tried again")
    return [
        Comparison(f"puts, flush, merge; {where}: {name}", ours, peer, unit, False, PEER_SESSION)
        for where, runs in (("throttled", slow), ("not throttled", free))
        for name, unit, ours, peer in (
            ("time", "s", runs["ours"].seconds, runs["peer"].seconds),
            ("requests, refused ones too", "requests", runs["ours"].requests, runs["peer"].requests),
        )
    ]


def session(far: FarStorage, place: Place) -> Run:
    """What a table goes through, by some threads; fails when a row is missing."""

    def work() -> None:
        table = place.table()
        with table.writer() as writer:
            by_threads(_THREADS, _PUTS, lambda number: writer.put(rows(_NEW_KEYS + number, 1)))
        table.compact()

    done = _run(far, work)
    expect(place.table().count_rows(), BASE_ROWS + _THREADS * _PUTS)
    if not place.table().verify().ok:
        raise RuntimeError("the table is damaged where requests were refused")
    return done


def _peer_session(far: FarStorage, place: Place) -> Run:
    """As Lance has it: its writer logs and flushes the rows, which are then merged into the table."""

    def work() -> None:
        dataset = place.dataset()
        writer = peer_writer(dataset)
        by_threads(_THREADS, _PUTS, lambda number: writer.put(rows(_NEW_KEYS + number, 1)))
        writer.close()
        upsert(dataset, pa.Table.from_batches([rows(_NEW_KEYS, _THREADS * _PUTS)]))

    done = _run(far, work)
    expect(place.dataset().count_rows(), BASE_ROWS + _THREADS * _PUTS)
    return done


_SESSIONS = {"ours": session, "peer": _peer_session}


def _puts(lab: Lab, context: Context) -> dict[str, tuple[Run, Run, str]]:
    found = {}
    each = context.size(full=8, quick=2)
    for threads in (1, 16, 128):
        ours = lab.far.place(lab.empty).table().writer()
        theirs = peer_writer(lab.far.place(lab.empty).dataset())
        for writer in (ours, theirs):
            writer.put(rows(1, 1))

        def put(writer: Any, threads: int = threads) -> Run:
            return _run(
                lab.far, lambda: by_threads(threads, each, lambda number: writer.put(rows(number, 1)))
            )

        sides = context.in_turn(ours=lambda: put(ours), peer=lambda: put(theirs))  # noqa: B023
        ours.close()
        theirs.close()
        found[f"{threads} × {each} durable puts"] = (sides["ours"], sides["peer"], WRITER)
    return found


def _reads(lab: Lab) -> dict[str, tuple[Run, Run, str]]:
    found = {}
    for operation in OPERATIONS:
        if operation.name in _READS and operation.peer is not None:
            ours, peer = operation.prepare(lab), operation.peer(lab)
            found[operation.name] = (_run(lab.far, ours), _run(lab.far, peer), PLAIN)
    return found


def _others(lab: Lab) -> dict[str, tuple[Run, Run, str]]:
    far = lab.far
    ours = {each.name: each.prepare for each in OPERATIONS}
    opened: list[Any] = []
    place = far.place(lab.long_tail)
    shard, dataset = str(place.table().shards()[0].shard_id), place.dataset()

    def replay() -> None:
        opened.append(peer_writer(dataset, shard))
        opened[0].put(rows(1, 1))

    replayed = _run(far, replay)
    opened[0].close()
    flushing = peer_writer(far.place(lab.empty).dataset())
    flushing.put(rows(1, 50))
    closed = _run(far, flushing.close)
    dataset = far.place(lab.empty).dataset()
    fresh = pa.Table.from_batches([rows(BASE_KEY, 400)])
    merged = _run(far, lambda: upsert(dataset, fresh))
    looking = far.place(lab.empty).dataset()
    looked = _run(far, looking.checkout_latest)
    cleaned = _run(far, looking.cleanup_old_versions)
    name = "gc of 400 due entries"
    return {
        "replay of 40 entries, and a put": (
            _run(far, ours["replay 40 entries and put"](lab)),
            replayed,
            WRITER,
        ),
        "close, with its flush": (_run(far, ours["close with rows in memory"](lab)), closed, WRITER),
        "compaction of 8 SSTables": (
            _run(far, ours["compact 8 SSTables"](lab)),
            merged,
            "merge_insert of as many rows",
        ),
        name: (_run(far, ours[name](lab)), cleaned, "cleanup_old_versions"),
        "idle feed poll": (_run(far, ours["idle feed poll"](lab)), looked, "checkout_latest"),
    }


def _run(far: FarStorage, call: Callable[[], object]) -> Run:
    far.proxy.set(latency=far.latency)
    try:
        with far.proxy.recording() as recording:
            started = time.perf_counter()
            call()
            seconds = time.perf_counter() - started
    finally:
        far.proxy.set(latency=0.0)
    refused = sum(request.status == 503 for request in recording.requests)
    return Run(seconds, max(len(recording.requests), 1), refused)
