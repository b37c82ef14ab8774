"""Prometheus metrics of this process (the extra ``metrics``); ``docs/metrics.md`` lists the names.

Writers always keep their counters; this module names them when metrics are collected. Only timing the
object store costs anything, a few microseconds per call, and it begins with :func:`register`.

>>> from prometheus_client import CollectorRegistry
>>> registry = CollectorRegistry()
>>> _ = register(registry)
>>> sorted(family.name for family in registry.collect())[:3]
['lancewal_backpressure', 'lancewal_backpressure_seconds', 'lancewal_collected']
"""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING
from uuid import UUID
from wsgiref.simple_server import WSGIServer

from lancewal.storage import LATENCY_BOUNDS, check_process, observe_all, process_totals, read_times
from lancewal.writer import open_writers, written

if TYPE_CHECKING:
    from lancewal.table import Table

try:
    from prometheus_client import REGISTRY, CollectorRegistry, Histogram, start_http_server
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
    from prometheus_client.registry import Collector
except ImportError as error:
    raise ImportError("metrics need the Prometheus client: pip install 'lancewal[metrics]'") from error

#: Name, the counter of WriteStatsSnapshot, and what it means. Times are in seconds.
WRITER_COUNTERS = (
    ("lancewal_puts", "put_count", "Calls of put and delete that returned"),
    ("lancewal_put_rows", "put_rows", "Rows of those calls"),
    ("lancewal_put_seconds", "put_time", "Time spent in them"),
    ("lancewal_wal_entries", "wal_flush_count", "WAL entries written"),
    ("lancewal_wal_bytes", "wal_flush_bytes", "Bytes of those entries"),
    ("lancewal_wal_puts", "wal_flush_puts", "Puts in those entries; divided by entries: the group size"),
    ("lancewal_wal_seconds", "wal_flush_time", "Time from the start of a group commit to its end"),
    ("lancewal_wal_io_seconds", "wal_io_time", "Part of it that was spent in the object store"),
    ("lancewal_index_updates", "index_update_count", "Updates of in-memory indexes"),
    ("lancewal_index_rows", "index_update_rows", "Rows of those updates"),
    ("lancewal_index_seconds", "index_update_time", "Time spent in them"),
    ("lancewal_flushes", "memtable_flush_count", "MemTables flushed to SSTables"),
    ("lancewal_flush_rows", "memtable_flush_rows", "Rows of those MemTables"),
    ("lancewal_flush_seconds", "memtable_flush_time", "Time spent flushing"),
    ("lancewal_flush_failures", "memtable_flush_failures", "Flushes that failed and are tried again"),
    ("lancewal_backpressure", "backpressure_count", "Puts that had to wait for memory"),
    ("lancewal_backpressure_seconds", "backpressure_wait", "Time that they waited"),
    ("lancewal_slowdowns", "slowdown_count", "Puts that were delayed because compaction is behind"),
    ("lancewal_slowdown_seconds", "slowdown_wait", "Time that they were delayed"),
    ("lancewal_stops", "stop_count", "Puts that had to wait until compaction caught up"),
    ("lancewal_stop_seconds", "stop_wait", "Time that they waited"),
    ("lancewal_stop_refusals", "stop_refusals", "Puts of those that were refused, to be sent again"),
    ("lancewal_replayed_entries", "replayed_entries", "WAL entries replayed at open"),
    ("lancewal_replayed_rows", "replayed_rows", "Rows of those entries"),
    ("lancewal_replay_seconds", "replay_time", "Time spent replaying"),
)
#: Name, level, and what it means.
WRITER_GAUGES = (
    ("lancewal_writers", "writers", "Open shard writers"),
    ("lancewal_wal_pending_bytes", "pending_bytes", "Bytes of rows that are not in the WAL yet"),
)
#: Name, attribute of MemTableStats, and what it means.
MEMTABLE_GAUGES = (
    ("lancewal_memtable_rows", "row_count", "Rows in active MemTables"),
    ("lancewal_memtable_bytes", "estimated_size", "Bytes of rows and indexes in active MemTables"),
    ("lancewal_memtable_index_bytes", "index_bytes", "Bytes of their indexes"),
    ("lancewal_frozen_memtables", "frozen_count", "MemTables that wait for their flush"),
    ("lancewal_frozen_bytes", "frozen_bytes", "Bytes of those MemTables"),
)
#: Name, total of ``lancewal.storage.process_totals``, and what it means.
MAINTENANCE_COUNTERS = (
    ("lancewal_compactions", "compactions", "Compactions that ended well"),
    ("lancewal_compaction_failures", "compaction_failures", "Compactions that failed"),
    ("lancewal_compaction_seconds", "compaction_seconds", "Time spent compacting"),
    ("lancewal_compaction_generations", "compaction_generations", "SSTables brought into the base table"),
    ("lancewal_compaction_rows_upserted", "compaction_rows_upserted", "Rows inserted or updated there"),
    ("lancewal_compaction_rows_deleted", "compaction_rows_deleted", "Rows deleted there"),
    ("lancewal_compaction_bytes", "compaction_bytes", "Bytes of the compacted SSTables in memory"),
    ("lancewal_compaction_conflicts", "compaction_conflicts", "Commits repeated after another came first"),
    ("lancewal_collections", "collections", "Garbage collections that ended well"),
    ("lancewal_collection_failures", "collection_failures", "Garbage collections that failed"),
    ("lancewal_collection_seconds", "collection_seconds", "Time spent collecting garbage"),
    ("lancewal_collection_bytes", "collection_bytes", "Bytes deleted"),
)
#: Name and meaning; one counter for each kind of work, and one for looking at the table.
UPKEEP_COUNTERS = (
    ("tasks", "Tasks of upkeep that this process did"),
    ("failures", "Shards, or the table as a whole, that failed in them"),
    ("seconds", "Time spent in them"),
)
#: Name and meaning, for each table of the collector.
TABLE_GAUGES = (
    ("lancewal_unflushed_entries", "WAL entries that no SSTable covers"),
    ("lancewal_unflushed_bytes", "Bytes of those entries"),
    ("lancewal_unflushed_age_seconds", "Age of the oldest of them"),
    ("lancewal_uncompacted_sstables", "SSTables that the base table does not hold"),
    ("lancewal_uncompacted_rows", "Rows of those SSTables"),
    ("lancewal_uncompacted_bytes", "Bytes of those rows in memory"),
    ("lancewal_uncompacted_age_seconds", "Age of the oldest of them"),
    ("lancewal_base_rows", "Rows of the base table"),
    ("lancewal_garbage_files", "Files that no reader of the newest state needs"),
    ("lancewal_garbage_bytes", "Bytes of those files"),
)

_STORE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class LanceWalCollector(Collector):
    """Collects what the writers, compactions and garbage collections of this process have done.

    Every sample has a label ``table``; with ``per_shard`` the samples of writers also have ``shard``.
    The lags of ``tables`` are read when metrics are collected, at most every ``refresh`` seconds. Reading the
    lags costs requests to the object store; everything else costs none.
    """

    def __init__(
        self, tables: Sequence[Table] = (), *, per_shard: bool = False, refresh: float = 15.0
    ) -> None:
        self._watched = [_Watched(table, refresh) for table in tables]
        self._labels = ("table", "shard") if per_shard else ("table",)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, because registering must not read the tables."""
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._writers()
        yield _reads()
        yield from _maintenance()
        for families in zip(*(watched.families() for watched in self._watched), strict=True):
            joined = copy.copy(families[0])
            joined.samples = [sample for family in families for sample in family.samples]
            yield joined

    def _writers(self) -> Iterator[Metric]:
        totals: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        latencies = HistogramMetricFamily(
            "lancewal_put_latency_seconds", "How long calls of put and delete took", labels=self._labels
        )
        by_labels: dict[tuple[str, ...], list[int]] = {}
        for key, stats in written().items():
            labels = self._label_values(key)
            known = by_labels.get(labels, [0] * len(stats.put_latencies))
            by_labels[labels] = [sum(pair) for pair in zip(known, stats.put_latencies, strict=True)]
            sums = totals[labels]
            for _, name, _ in WRITER_COUNTERS:
                value = getattr(stats, name)
                sums[name] += value.total_seconds() if hasattr(value, "total_seconds") else value
        for name, attribute, text in WRITER_COUNTERS:
            family = CounterMetricFamily(name, text, labels=self._labels)
            for labels, sums in totals.items():
                family.add_metric(labels, sums[attribute])
            yield family
        for labels, counts in by_labels.items():
            latencies.add_metric(labels, _cumulative(counts), totals[labels]["put_time"])
        yield latencies
        levels: dict[tuple[str, ...], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for key, writer in open_writers().items():
            sums = levels[self._label_values(key)]
            sums["writers"] += 1
            sums["pending_bytes"] += writer.wal_stats().pending_bytes
            if writer.config.enable_memtable:
                stats_now = writer.memtable_stats()
                for _, attribute, _ in MEMTABLE_GAUGES:
                    sums[attribute] += getattr(stats_now, attribute)
        for name, attribute, text in (*WRITER_GAUGES, *MEMTABLE_GAUGES):
            gauge = GaugeMetricFamily(name, text, labels=self._labels)
            for labels, sums in levels.items():
                gauge.add_metric(labels, sums[attribute])
            yield gauge

    def _label_values(self, key: tuple[str, UUID]) -> tuple[str, ...]:
        return (key[0], str(key[1]))[: len(self._labels)]


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    """The buckets of a histogram in Prometheus form: each counts all calls up to its bound."""
    bounds = [*(str(bound) for bound in LATENCY_BOUNDS), "+Inf"]
    return list(zip(bounds, accumulate(counts), strict=True))


def _reads() -> Metric:
    family = HistogramMetricFamily(
        "lancewal_read_latency_seconds", "How long reads took", labels=("table", "operation")
    )
    for labels, taken in read_times.taken().items():
        family.add_metric(labels, _cumulative(taken.counts), taken.seconds)
    return family


def _maintenance() -> Iterator[Metric]:
    totals = process_totals.by_table()
    for name, total, text in MAINTENANCE_COUNTERS:
        family = CounterMetricFamily(name, text, labels=("table",))
        for table, amounts in totals.items():
            family.add_metric((table,), amounts.get(total, 0))
        yield family
    collected = CounterMetricFamily("lancewal_collected", "Objects deleted", labels=("table", "resource"))
    for table, amounts in totals.items():
        for name, amount in amounts.items():
            if name.startswith("collected."):
                collected.add_metric((table, name.removeprefix("collected.")), amount)
    yield collected
    for name, text in UPKEEP_COUNTERS:
        family = CounterMetricFamily(f"lancewal_upkeep_{name}", text, labels=("table", "work"))
        for table, amounts in totals.items():
            for total, amount in amounts.items():
                upkeep, _, rest = total.partition(".")
                if upkeep == "upkeep" and rest.endswith(f".{name}"):
                    family.add_metric((table, rest.removesuffix(f".{name}")), amount)
        yield family


class _Watched:
    """The lags of one table, kept for ``refresh`` seconds."""

    def __init__(self, table: Table, refresh: float) -> None:
        self._table = table
        self._refresh = refresh
        self._lock = threading.Lock()
        self._until = 0.0
        self._known: list[Metric] = []

    def families(self) -> list[Metric]:
        check_process()
        with self._lock:
            if time.monotonic() >= self._until:
                self._known = self._read()
                self._until = time.monotonic() + self._refresh
            return self._known

    def _read(self) -> list[Metric]:
        status = self._table.status()
        flush, compact, now = status.unflushed, status.uncompacted, status.taken_at
        values: list[float | None] = [
            flush.count,
            flush.num_bytes,
            flush.seconds(now),
            compact.count,
            compact.rows,
            compact.num_bytes,
            compact.seconds(now),
            status.base_rows,
            status.garbage.count,
            status.garbage.num_bytes,
        ]
        families: list[Metric] = []
        for (name, text), value in zip(TABLE_GAUGES, values, strict=True):
            family = GaugeMetricFamily(name, text, labels=("table",))
            if value is not None:
                family.add_metric((status.uri,), value)
            families.append(family)
        behind = GaugeMetricFamily(
            "lancewal_index_rows_behind",
            "Rows of the base table that an index lacks",
            labels=("table", "index"),
        )
        for index in status.indexes:
            behind.add_metric((status.uri, index.name), index.rows_behind)
        return [*families, behind]


class _StoreTimes:
    """Times the calls of the object store by operation and error."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            "lancewal_object_store_seconds",
            "Calls of the object store, retries included; error is empty where there was none",
            ("operation", "error"),
            buckets=_STORE_SECONDS,
            registry=registry,
        )
        # Looking up a histogram by its labels costs more than the observation.
        self._children: dict[tuple[str, str], Histogram] = {}

    def __call__(self, operation: str, seconds: float, error: BaseException | None) -> None:
        labels = (operation, "" if error is None else type(error).__name__)
        child = self._children.get(labels)
        if child is None:
            child = self._children[labels] = self._histogram.labels(*labels)
        child.observe(seconds)


def register(
    registry: CollectorRegistry = REGISTRY,
    tables: Sequence[Table] = (),
    *,
    per_shard: bool = False,
    refresh: float = 15.0,
) -> LanceWalCollector:
    """Add lancewal's metrics to a registry, and time the object store from now on."""
    collector = LanceWalCollector(tables, per_shard=per_shard, refresh=refresh)
    registry.register(collector)
    observe_all(_StoreTimes(registry))
    return collector


class Endpoint:
    """A running HTTP endpoint; ``close`` ends it."""

    def __init__(self, server: WSGIServer, thread: threading.Thread) -> None:
        self._server = server
        self._thread = thread

    @property
    def port(self) -> int:
        return int(self._server.server_port)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        observe_all(None)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def serve(
    port: int = 9464,
    host: str = "127.0.0.1",
    tables: Sequence[Table] = (),
    *,
    per_shard: bool = False,
    refresh: float = 15.0,
) -> Endpoint:
    """Serve lancewal's metrics at ``http://host:port/metrics``; port 0 takes a free one.

    If the process already serves metrics, add lancewal's to its registry with :func:`register` instead.
    """
    registry = CollectorRegistry()
    register(registry, tables, per_shard=per_shard, refresh=refresh)
    return Endpoint(*start_http_server(port, host, registry))
