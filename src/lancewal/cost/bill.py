"""The requests, bytes and costs of a million operations, of an idle day, and of a day's load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from lancewal.cost.load import DAY, Load
from lancewal.cost.measured import FREE, WRITES_AND_LISTS, measured
from lancewal.errors import InvalidInputError

MILLION = 1_000_000
GB = 1e9
#: The number of shards in the operations that were measured on many shards.
_MANY = 64
_SSTABLES = 8
_PUTS_OF_THREADS = 1024
_DUE_ENTRIES = 400


@dataclass(frozen=True)
class Prices:
    """Prices in dollars per 1,000 requests and per GB and month; by default S3 Standard in us-east-1."""

    put: float = 0.005
    get: float = 0.0004
    storage: float = 0.023

    def __post_init__(self) -> None:
        for name in ("put", "get", "storage"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidInputError(f"the price {name} must not be negative, got {getattr(self, name)}")

    def of(self, kinds: Mapping[str, float]) -> float:
        """
        >>> round(Prices().of({"PUT": 1000, "LIST": 1000, "GET": 1000, "DELETE MANY": 9}), 4)
        0.0104
        """
        return sum(number * self._of_one(kind) for kind, number in kinds.items())

    def _of_one(self, kind: str) -> float:
        if kind in FREE:
            return 0.0
        return (self.put if kind in WRITES_AND_LISTS else self.get) / 1000


@dataclass(frozen=True)
class Line:
    """One line of a bill: the requests by kind, and the bytes written and read."""

    name: str
    kinds: Mapping[str, float] = field(default_factory=dict)
    bytes_written: float = 0.0
    bytes_read: float = 0.0

    @property
    def puts(self) -> float:
        """The number of PUT, LIST and similar requests."""
        return sum(number for kind, number in self.kinds.items() if kind in WRITES_AND_LISTS)

    @property
    def gets(self) -> float:
        """The number of GET and HEAD requests."""
        return sum(n for kind, n in self.kinds.items() if kind not in WRITES_AND_LISTS | FREE)

    def price(self, prices: Prices) -> float:
        return prices.of(self.kinds)

    def to_dict(self, prices: Prices) -> dict[str, object]:
        return {
            "name": self.name,
            "puts": self.puts,
            "gets": self.gets,
            "bytes_written": self.bytes_written,
            "bytes_read": self.bytes_read,
            "price": self.price(prices),
        }


def per_million(load: Load) -> list[Line]:
    """What a million of each operation costs, with the row size and the settings of ``load``."""
    rows = MILLION * load.row_bytes
    flushes = rows / load.flushed_bytes
    return [
        Line("rows put one by one, by one thread", _times("durable put", MILLION), rows),
        Line(
            "rows put one by one, by 128 threads",
            _times("1,024 puts of 128 threads", MILLION / _PUTS_OF_THREADS),
            rows,
        ),
        Line("rows flushed to SSTables", _times("flush with three indexes", flushes), rows),
        Line(
            "rows compacted into the base",
            _times("compact 8 SSTables", flushes / _SSTABLES),
            rows,
            rows,
        ),
        Line("log entries collected", _times(f"gc of {_DUE_ENTRIES} due entries", MILLION / _DUE_ENTRIES)),
        _reads("lookups of fresh keys", "lookup of a fresh key, warm"),
        _reads("lookups of keys in the base", "lookup of a base key, warm"),
        _reads("vector searches, 8 SSTables", "vector search of 8 SSTables, warm"),
        _reads("text searches, 8 SSTables", "text search of 8 SSTables, warm"),
    ]


def per_idle_day(load: Load) -> list[Line]:
    """What a day without writes costs."""
    shards = load.shards
    return [
        Line("a writer", _heartbeats(load)),
        Line("a reader of one key", _times("lookup of a fresh key, warm", load.polls_per_day)),
        Line(f"a feed of {shards:,} shards", _polls(load)),
        Line("garbage collection", _per_shard("gc with nothing to do", DAY / load.gc_seconds, shards)),
    ]


def per_day(load: Load) -> list[Line]:
    """What a day of ``load`` costs, with compaction, garbage collection and one feed."""
    flushes = load.flushes_per_day
    compactions = max(flushes / _SSTABLES, load.compactions_per_day)
    collected = _times(f"gc of {_DUE_ENTRIES} due entries", load.entries_per_day / _DUE_ENTRIES)
    looks = _per_shard("gc with nothing to do", DAY / load.gc_seconds, load.shards)
    written = load.bytes_per_day
    return [
        Line("write to the log", _times("durable put", load.entries_per_day), written),
        Line("say who writes", {kind: load.writers * n for kind, n in _heartbeats(load).items()}),
        Line("flush", _times("flush with three indexes", flushes), written),
        Line("compact", _times("compact 8 SSTables", compactions), written, written),
        Line("collect garbage", Counter(collected) + Counter(looks)),
        Line("one feed", _polls(load), bytes_read=written),
    ]


def _times(name: str, number: float) -> dict[str, float]:
    return {kind: count * number for kind, count in measured()[name].kinds.items()}


def _per_shard(name: str, number: float, shards: int) -> dict[str, float]:
    """The requests for ``shards`` shards, computed linearly from the figures for one shard and for many."""
    one, many = measured()[name].kinds, measured()[f"{name}, {_MANY} shards"].kinds
    found = {}
    for kind in one.keys() | many.keys():
        first, last = one.get(kind, 0), many.get(kind, 0)
        found[kind] = max(first + (last - first) / (_MANY - 1) * (shards - 1), 0) * number
    return found


def _heartbeats(load: Load) -> dict[str, float]:
    """The heartbeats of one process: it writes its owner record and lists requests to it, for all shards."""
    return {"PUT": load.heartbeats_per_day, "LIST": load.heartbeats_per_day}


def _polls(load: Load) -> dict[str, float]:
    return _per_shard("idle feed poll", load.polls_per_day, load.shards)


def _reads(name: str, operation: str) -> Line:
    return Line(name, _times(operation, MILLION), bytes_read=measured()[operation].bytes_read * MILLION)
