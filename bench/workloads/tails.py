"""Long WAL tails: lookups by number of entries and around the memory budget, and the depth of a cold read.

The peer of a lookup is a Python dictionary with all rows, which no log could beat; what counts is how ours
grows. The peer of a cold read is one request after another.
"""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pyarrow as pa

from bench.comparison import Comparison
from bench.context import Context, Laps
from bench.distant import distant_store, measured_depth
from bench.growth import exponent_of
from bench.registry import workload
from bench.tables import KEY, expect, new_table
from lancewal.reader import TableReader, tail
from lancewal.shard import WalAppender
from lancewal.storage import Cache, ObjectStore

PEER = "Python dictionary"

_ROWS = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("payload", pa.binary())])


@workload(
    "tails", "one key from WAL tails of 100 to 100,000 entries and around the memory budget; a cold read"
)
def tails(context: Context) -> list[Comparison]:
    sizes = (20, 200) if context.quick else (100, 1_000, 10_000, 100_000)
    comparisons, taken = [], []
    for entries in sizes:
        cache = Cache(1 << 30)
        reader = _reader(_tail(context.directory(f"entries_{entries}"), entries, 1, 20), cache)
        laps = _lookups(context, reader, entries)
        comparisons.append(_median(f"lookup, {entries:,} one-row entries", laps))
        taken.append(laps["ours"].percentile(50))
        rows = entries * (8 + 20 + 4)
        comparisons.append(
            Comparison(
                f"memory, {entries:,} one-row entries",
                _held_bytes() / 1e6,
                rows / 1e6,
                "MB",
                False,
                "rows",
            )
        )
    comparisons.append(exponent_of("exponent by entries", sizes, taken, 0.2))
    return [*comparisons, *_around_budget(context), _cold(context, sizes[-2])]


def _around_budget(context: Context) -> list[Comparison]:
    """The same tail, with a budget from twice its bytes to a tenth of them."""
    entries, rows, width = context.size(full=200, quick=20), 200, context.size(full=4_000, quick=2_000)
    where = _tail(context.directory("bytes"), entries, rows, width)
    whole = entries * rows * width
    comparisons = []
    for share in (2.0, 0.9, 0.1):
        cache = Cache(int(whole * share))
        reader = _reader(where, cache)
        laps = _lookups(context, reader, entries * rows)
        comparisons.append(_median(f"lookup, budget {share} of the tail", laps))
        used = Comparison(
            f"memory, budget {share} of the tail",
            _held_bytes() / 1e6,
            whole * share / 1e6,
            "MB",
            False,
            "budget",
            1.0,
        )
        comparisons.append(used)
    return comparisons


def _cold(context: Context, entries: int) -> Comparison:
    """Round trips on end of the first lookup, where storage is far away."""
    where = _tail(context.directory("cold"), entries, 1, 20)
    store, backend = distant_store(where)
    with measured_depth() as depth:
        TableReader(store, live_writers=False).lookup([0])
        deep = depth()
    return Comparison(
        f"depth of a cold read, {entries:,} entries",
        deep,
        sum(backend.requests.values()),
        "",
        False,
        "all requests",
    )


def _lookups(context: Context, reader: TableReader, rows: int) -> dict[str, Laps]:
    plain = dict.fromkeys(range(rows), b"row")
    return context.alternate(
        context.size(full=200, quick=5),
        ours=lambda number: expect(int(reader.lookup([number * 7 % rows]).found.sum()), 1),
        peer=lambda number: expect(int(plain[number * 7 % rows] is not None), 1),
    )


def _tail(where: Path, entries: int, rows: int, width: int) -> Path:
    stored = new_table(where, _ROWS).schema.stored
    appender = WalAppender.open(ObjectStore.from_uri(str(where), fsync=False), uuid4())
    payload = pa.array([b"x" * width] * rows)
    for number in range(entries):
        ids = pa.array(range(number * rows, (number + 1) * rows), pa.int64())
        columns = [ids, payload, pa.array([False] * rows)]
        appender.append([pa.RecordBatch.from_arrays(columns, schema=stored)], generation=1)
    return where


def _reader(where: Path, cache: Cache) -> TableReader:
    """A reader, after its first read, whose tails have ``cache`` for themselves."""
    tail.ROOM = tail.LogRoom(cache)
    reader = TableReader(ObjectStore.from_uri(str(where)), live_writers=False)
    expect(int(reader.lookup([0]).found.sum()), 1)
    return reader


def _held_bytes() -> int:
    """What tails hold, also what they hold without a lease because no budget has room for it."""
    return sum(run.held_bytes for each in tail.ROOM._tails for run in each._kept.runs)


def _median(name: str, laps: dict[str, Laps]) -> Comparison:
    ours, peer = (laps[side].percentile(50) * 1e3 for side in ("ours", "peer"))
    return Comparison(name, ours, peer, "ms", False, PEER)
