"""Every operation whose requests are counted: what it needs, what is measured, and its goal.

An operation is measured by a function that gets a :class:`Lab` and returns the call to measure. All that the
function does itself (open the table, read once so that the next read is warm) is not counted.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar
from unittest import mock

import lance
import numpy as np
import pyarrow as pa

import lancewal
from bench.context import by_threads
from bench.far import Cost, FarStorage, Place
from bench.tables import KEY
from lancewal.maintenance import collect_garbage
from lancewal.publish import ChangeFeed
from lancewal.storage import HostClock, boot_time, host_clock

Call = Callable[[], object]
Writer = TypeVar("Writer", bound=lancewal.TableWriter)

BASE_ROWS = 400
SSTABLES, MANY_SSTABLES = 8, 64
ROWS_IN_SSTABLE = 50
TAIL_ENTRIES = 3
REPLAYED_ENTRIES = 40
DUE_ENTRIES = 400
_SMALL_FILES = 3
MANY_THREADS, PUTS_OF_A_THREAD = 128, 8
DIMENSION = 8
SPARK_SHARDS = 8

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)
#: The first is in the log alone, the second in the base alone.
FRESH_KEY, BASE_KEY = 1_000_000, 307
_VECTOR = [0.5] * DIMENSION
_NINE_DAYS = timedelta(days=9)
_SETTINGS = {"fsync": "false", "stats_log_interval_ms": "0"}


@dataclass(frozen=True)
class Goal:
    """A bound on the depth or on the requests; ``text`` is how the table says it."""

    depth: int | None = None
    requests: int | None = None
    text: str = ""


@dataclass(frozen=True)
class Operation:
    """``prepare`` returns the call to measure; ``peer`` the call of plain Lance beside it."""

    name: str
    prepare: Callable[[Lab], Call]
    peer: Callable[[Lab], Call] | None = None
    goal: Goal = Goal()
    #: The goal is in depth beyond plain Lance's.
    beyond_peer: bool = False
    shards: int = 1
    #: How many times as high a figure may be as the one stored, where threads meet by chance.
    tolerance: float = 1.0


def rows(first: int, count: int) -> pa.RecordBatch:
    random = np.random.default_rng(first)
    vectors = pa.array(random.random(count * DIMENSION, dtype=np.float32))
    return pa.record_batch(
        [
            pa.array(range(first, first + count), pa.int64()),
            pa.array([f"the text of row {number}" for number in range(first, first + count)]),
            pa.FixedSizeListArray.from_arrays(vectors, DIMENSION),
        ],
        schema=SCHEMA,
    )


class Lab:
    """Far storage, and the tables that operations begin with, each built when it is first asked for."""

    def __init__(self, far: FarStorage) -> None:
        self.far = far
        self._scratch = tempfile.TemporaryDirectory(prefix="lancewal-requests-")
        self._root = Path(self._scratch.name)
        self._many: dict[int, Path] = {}
        self._opened = ExitStack()

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.close()
        self._scratch.cleanup()

    def measure(
        self, operation: Operation, tries: int = 2, enough: Callable[[Cost], bool] = lambda cost: False
    ) -> Cost:
        """The least of some tries; no more of them once the figures are ``enough``."""
        return self._least(operation.prepare, tries, enough)

    def measure_peer(self, operation: Operation, tries: int = 2) -> Cost | None:
        return None if operation.peer is None else self._least(operation.peer, tries, lambda cost: False)

    def _least(self, prepare: Callable[[Lab], Call], tries: int, enough: Callable[[Cost], bool]) -> Cost:
        least: Cost | None = None
        for _ in range(tries):
            try:
                least = self.far.cost_of(prepare(self)).least(least)
            finally:
                self._opened.close()
            if enough(least):
                break
        assert least is not None
        return least

    def keep(self, writer: Writer) -> Writer:
        """``writer``, which is closed when its operation has been measured."""
        self._opened.callback(writer.close)
        return writer

    # ------------------------------------------------------------------ tables

    @cached_property
    def empty(self) -> Path:
        """One shard that nobody has opened yet, and a base with three indexes."""
        return self._build("empty", 1)

    @cached_property
    def tail(self) -> Path:
        """A log that its writer did not flush, behind one SSTable."""
        return self._with_entries("tail", TAIL_ENTRIES)

    @cached_property
    def long_tail(self) -> Path:
        return self._with_entries("long-tail", REPLAYED_ENTRIES)

    @cached_property
    def flushed(self) -> Path:
        """Eight SSTables that the base does not hold, each with keys of the base and of its own."""
        return self._with_sstables("flushed", SSTABLES)

    @cached_property
    def much_flushed(self) -> Path:
        return self._with_sstables("much-flushed", MANY_SSTABLES)

    @cached_property
    def plain(self) -> Path:
        """As :attr:`flushed`, without indexes."""
        return self._with_sstables("plain", SSTABLES, indexes=False)

    @cached_property
    def scattered(self) -> Path:
        """As :attr:`flushed`, after compactions that left small files: the next one joins them."""
        where = self._build("scattered", 1)
        table = lancewal.open(where)
        for number in range(_SMALL_FILES):
            with table.writer() as writer:
                writer.put(rows(2_000_000 + number, 1))
            table.compact()
        return self._flush_often(where, SSTABLES)

    def _with_sstables(self, name: str, sstables: int, *, indexes: bool = True) -> Path:
        return self._flush_often(self._build(name, 1, indexes=indexes), sstables)

    def _flush_often(self, where: Path, sstables: int) -> Path:
        table = lancewal.open(where)
        for number in range(sstables):
            with table.writer() as writer:
                writer.put(rows(number * ROWS_IN_SSTABLE // 2, ROWS_IN_SSTABLE))
                writer.put(rows(BASE_ROWS + number * ROWS_IN_SSTABLE, ROWS_IN_SSTABLE))
        return where

    @cached_property
    def compacted(self) -> Path:
        """The rows of :attr:`flushed`, all in the base, for plain Lance."""
        where = shutil.copytree(self.flushed, self._root / "compacted")
        lancewal.open(where).compact(optimize_indexes=True)
        return where

    @cached_property
    def due(self) -> Path:
        """Flushed entries that a collection has seen."""
        where = self._build("due", 1)
        table = lancewal.open(where)
        with table.writer() as writer:
            for number in range(DUE_ENTRIES):
                writer.put(rows(BASE_ROWS + number, 1))
        table.compact()
        table.gc(min_age=timedelta(days=99))
        return where

    def sharded(self, shards: int) -> Path:
        """Every shard has an SSTable and an entry in its log."""
        if shards not in self._many:
            self._many[shards] = self._with_entries(f"shards-{shards}", 1, shards)
        return self._many[shards]

    def _build(self, name: str, shards: int, *, indexes: bool = True) -> Path:
        where = self._root / name
        dataset = lance.write_dataset(pa.Table.from_batches([rows(0, BASE_ROWS)]), str(where))
        if indexes:
            dataset.create_scalar_index("id", "BTREE")
            dataset.create_scalar_index("text", "INVERTED", with_position=False)
            dataset.create_index("vector", "IVF_FLAT", metric="l2", num_partitions=2)
        sharding: dict[str, Any] = {"unsharded": True} if shards == 1 else {"bucket": ("id", shards)}
        lancewal.initialize(where, **sharding, writer_defaults=_SETTINGS)
        return where

    def _with_entries(self, name: str, entries: int, shards: int = 1) -> Path:
        where = self._build(name, shards)
        table = lancewal.open(where)
        spread = rows(BASE_ROWS, 1 if shards == 1 else shards * 8)
        with table.writer() as writer:
            writer.put(spread)
        # A writer without MemTables leaves its rows in the log when it is closed, as a crash would.
        with table.writer(enable_memtable=False) as writer:
            for number in range(entries):
                first = FRESH_KEY if number == 0 else FRESH_KEY + number * 10_000
                writer.put(rows(first, 1 if shards == 1 else shards * 8))
        return where


# ---------------------------------------------------------------------- writing


def _open_and_put(directory: Callable[[Lab], Path]) -> Callable[[Lab], Call]:
    def prepare(lab: Lab) -> Call:
        table = lab.far.place(directory(lab)).table()
        return lambda: lab.keep(table.writer()).put(rows(1, 1))

    return prepare


def _opened(lab: Lab) -> lancewal.TableWriter:
    writer = lab.keep(lab.far.place(lab.empty).table().writer())
    writer.put(rows(1, 1))
    return writer


def _durable_put(lab: Lab) -> Call:
    writer = _opened(lab)
    return lambda: writer.put(rows(2, 20))


def _threads(lab: Lab) -> Call:
    writer = _opened(lab)

    return lambda: by_threads(MANY_THREADS, PUTS_OF_A_THREAD, lambda number: writer.put(rows(number, 1)))


def _flush(lab: Lab) -> Call:
    writer = _opened(lab)
    writer.put(rows(1, 50))
    return writer.flush


def _close(lab: Lab) -> Call:
    writer = _opened(lab)
    writer.put(rows(1, 50))
    return writer.close


# ---------------------------------------------------------------------- reading


def _cold(
    directory: Callable[[Lab], Path], read: Callable[[lancewal.Table], object]
) -> Callable[[Lab], Call]:
    def prepare(lab: Lab) -> Call:
        table = lab.far.place(directory(lab)).table()
        return lambda: read(table)

    return prepare


def _warm(
    directory: Callable[[Lab], Path], read: Callable[[lancewal.Table], object]
) -> Callable[[Lab], Call]:
    def prepare(lab: Lab) -> Call:
        table = lab.far.place(directory(lab)).table()
        for _ in range(2):
            read(table)
        return lambda: read(table)

    return prepare


def _plain(read: Callable[[lance.LanceDataset], object]) -> Callable[[Lab], Call]:
    """Plain Lance on the same rows, compacted; it looks for a newer version, and is warm."""

    def prepare(lab: Lab) -> Call:
        dataset = lab.far.place(lab.compacted).dataset()

        def newest() -> object:
            dataset.checkout_latest()
            return read(dataset)

        for _ in range(2):
            newest()
        return newest

    return prepare


def _plain_cold(lab: Lab) -> Call:
    """Plain Lance on the same rows, compacted: it opens the table and reads all."""
    place = lab.far.place(lab.compacted)
    return lambda: place.dataset().to_table()


def _lookup(key: int) -> Callable[[lancewal.Table], object]:
    def lookup(table: lancewal.Table) -> None:
        if table.lookup(key) is None:
            raise RuntimeError(f"key {key} was not found")

    return lookup


def _scan(table: lancewal.Table) -> object:
    return table.scan().to_table()


def _search(table: lancewal.Table) -> object:
    return table.vector_search("vector", _VECTOR, k=5)


def _words(table: lancewal.Table) -> object:
    return table.full_text_search("text", "row text", k=5)


def _plain_search(dataset: lance.LanceDataset) -> object:
    return dataset.to_table(nearest={"column": "vector", "q": _VECTOR, "k": 5})


def _plain_words(dataset: lance.LanceDataset) -> object:
    return dataset.to_table(full_text_query="row text", limit=5)


def _poll(shards: int) -> Callable[[Lab], Call]:
    def prepare(lab: Lab) -> Call:
        place = lab.far.place(lab.tail if shards == 1 else lab.sharded(shards))
        feed = ChangeFeed.open(place.uri, place.options)
        here = feed.latest()
        feed.advance(here)

        def poll() -> None:
            if feed.advance(here) != here:
                raise RuntimeError("an idle feed found changes")

        return poll

    return prepare


# ---------------------------------------------------------------------- maintenance


def _collect(directory: Callable[[Lab], Path], later: timedelta) -> Callable[[Lab], Call]:
    """A collection as if so much time had passed since the last one."""

    def prepare(lab: Lab) -> Call:
        store = lab.far.place(directory(lab)).store()
        clock = HostClock(host_clock().name, lambda: boot_time() + later.total_seconds())
        now = datetime.now(UTC) + later if later else None
        if not later:
            collect_garbage(store)
        return lambda: collect_garbage(store, now=now, clock=clock)

    return prepare


def _compact(directory: Callable[[Lab], Path], **how: Any) -> Callable[[Lab], Call]:
    return _cold(directory, lambda table: table.compact(**how))


def _merge(
    directory: Callable[[Lab], Path], *then: Callable[[lance.LanceDataset], object]
) -> Callable[[Lab], Call]:
    """What plain Lance needs for the same: it is given the rows, and has the table open."""

    def prepare(lab: Lab) -> Call:
        dataset = lab.far.place(directory(lab)).dataset()
        again = (SSTABLES + 1) * ROWS_IN_SSTABLE // 2
        newest = pa.Table.from_batches([rows(0, again), rows(BASE_ROWS, SSTABLES * ROWS_IN_SSTABLE)])

        def run() -> None:
            dataset.merge_insert("id").when_matched_update_all().when_not_matched_insert_all().execute(newest)
            for each in then:
                each(dataset)

        return run

    return prepare


def _index(dataset: lance.LanceDataset) -> None:
    dataset.optimize.optimize_indices()


def _join(dataset: lance.LanceDataset) -> None:
    dataset.optimize.compact_files()


# ---------------------------------------------------------------------- Spark


def _micro_batch(lab: Lab) -> Call:
    """One transaction of the low-latency sink; driver, tasks and commit are processes of their own."""
    from lancewal.publish import Transaction
    from lancewal.spark import low_latency

    processes = _Processes(lab.far.place(lab.sharded(SPARK_SHARDS)))

    def write(number: int) -> None:
        # Columns are made by the JVM, which is not needed: the rows are routed already.
        as_many = mock.patch.object(low_latency, "_number_of_tasks", return_value=SPARK_SHARDS)
        with mock.patch.object(low_latency, "bucket_column"), as_many:
            transaction = Transaction("stream", number)
            low_latency.write_transaction(processes.rows, processes.options(), transaction, ())

    # A stream that has written before.
    for number in range(2):
        write(number)
    return lambda: write(2)


def _by_format(**options: str) -> Callable[[Lab], Call]:
    def prepare(lab: Lab) -> Call:
        processes = _Processes(lab.far.place(lab.sharded(SPARK_SHARDS)))
        return lambda: processes.write({"txnAppId": "job", "txnVersion": "1", **options})

    return prepare


def _micro_batch_by_format(lab: Lab) -> Call:
    processes = _Processes(lab.far.place(lab.sharded(SPARK_SHARDS)))
    # A stream that has written before.
    for number in range(2):
        processes.stream(number)
    return lambda: processes.stream(2)


class _Processes:
    """Spark's part of a write: plan, a task for each shard, commit; none knows what another has read."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._runs = 0
        router = place.as_process("router").table().router()
        parts = {shard.shard_id: part for shard, part in router.route(rows(0, SPARK_SHARDS * 8))}
        self._parts = [parts[shard.shard_id] for shard in router.known_shards()]
        self.rows: Any = _RoutedRows(self)

    def options(self) -> Any:
        """Those of the driver."""
        from lancewal.spark.options import Options

        return Options.parse(self._options("driver"))

    def _options(self, process: str) -> dict[str, str]:
        place = self._place.as_process(f"{process}-{self._runs}")
        return {"path": place.uri, **{f"storage.{name}": value for name, value in place.options.items()}}

    def append(self, appending: Any) -> list[Any]:
        """The tasks of the low-latency sink; each gets what the driver sends it."""
        from lancewal.spark.options import Options

        self._runs += 1

        def task(number: int) -> list[Any]:
            alone = replace(appending, options=Options.parse(self._options(f"task-{number}")))
            return list(alone.append(iter([self._parts[number]]), number))

        with ThreadPoolExecutor(SPARK_SHARDS) as slots:
            return [each for written in slots.map(task, range(SPARK_SHARDS)) for each in written]

    def write(self, options: dict[str, str]) -> None:
        """A write by format; tasks and commit get the writer of the plan, as Spark sends it to them."""
        from lancewal.spark.options import Options
        from lancewal.spark.sink import BatchSink

        def sink(process: str) -> BatchSink:
            return BatchSink(Options.parse({**self._options(process), **options}))

        self._runs += 1
        self._source("plan", options).writer(*_sink_arguments())
        sink("commit").commit(self._written(sink))

    def stream(self, batch_id: int) -> None:
        """A micro-batch by format; Spark makes a writer for the tasks, and another one for the commit."""
        from lancewal.spark.options import Options
        from lancewal.spark.sink import StreamSink

        options = {"txnAppId": "stream"}

        def sink(process: str) -> StreamSink:
            return StreamSink(Options.parse({**self._options(process), **options}))

        self._runs += 1
        self._source("plan", options).streamWriter(*_sink_arguments())
        messages = self._written(sink)
        self._source("commit", options).streamWriter(*_sink_arguments()).commit(messages, batch_id)

    def _source(self, process: str, options: dict[str, str]) -> Any:
        from lancewal.spark.source import DefaultSource

        return DefaultSource({**self._options(process), **options})

    def _written(self, sink: Callable[[str], Any]) -> list[Any]:
        """What the tasks of a write by format have for its commit."""
        from pyspark import TaskContext

        running = threading.local()

        def task(number: int) -> Any:
            running.context = _Task(number)
            return sink(f"task-{number}").write(iter([self._parts[number]]))

        told = mock.patch.object(TaskContext, "get", side_effect=lambda: running.context)
        with told, ThreadPoolExecutor(SPARK_SHARDS) as slots:
            return list(slots.map(task, range(SPARK_SHARDS)))


def _sink_arguments() -> tuple[Any, bool]:
    from lancewal.spark import spark_schema

    return spark_schema(SCHEMA), False


@dataclass(frozen=True)
class _Task:
    """What Spark tells a task about itself."""

    number: int

    def partitionId(self) -> int:  # noqa: N802
        return self.number

    def getLocalProperty(self, name: str) -> None:  # noqa: N802
        return None


class _RoutedRows:
    """A DataFrame as far as the low-latency sink uses one: routed already."""

    columns = SCHEMA.names

    def __init__(self, processes: _Processes) -> None:
        self._processes = processes
        self._written: list[Any] = []

    def _same(self, *arguments: object) -> _RoutedRows:
        return self

    repartitionById = drop = _same  # noqa: N815

    def mapInArrow(self, appending: Any, schema: str) -> _RoutedRows:  # noqa: N802
        self._written = self._processes.append(appending)
        return self

    def collect(self) -> list[Any]:
        return self._written


# ---------------------------------------------------------------------- all of them


def _a_poll(shards: int) -> Goal:
    return Goal(requests=shards + 1, text="1 GET per shard, and 1 LIST for new shards")


_OPEN = Goal(depth=7, text="depth ≤ 6 and the put")
_READ = Goal(depth=3, text="depth ≤ 3 beyond plain Lance")
#: What is read beside a merge may fall between its requests on a busy machine: the chain gets longer by one.
_ASIDE = 1.1
_COMPACT = Goal(depth=15, text="depth ≤ 15")
#: What pylance does in its calls is more than that already, see ``bench.chain``.
_NO_DEEPER = Goal(depth=0, text="no deeper than plain Lance")
_PER_SHARD = Goal(requests=12 * SPARK_SHARDS, text="≤ 12 requests per shard")

OPERATIONS: Sequence[Operation] = (
    Operation("open a fresh shard and put", _open_and_put(lambda lab: lab.empty), goal=_OPEN),
    Operation("reopen after a crash and put", _open_and_put(lambda lab: lab.tail), goal=_OPEN),
    Operation("replay 40 entries and put", _open_and_put(lambda lab: lab.long_tail)),
    Operation("durable put", _durable_put, goal=Goal(requests=1, text="1 PUT")),
    Operation("1,024 puts of 128 threads", _threads, goal=Goal(requests=64, text="≤ 64"), tolerance=4.0),
    Operation("flush with three indexes", _flush, goal=Goal(depth=10, text="depth ≤ 10")),
    Operation("close with rows in memory", _close),
    Operation("lookup of a fresh key, cold", _cold(lambda lab: lab.tail, _lookup(FRESH_KEY))),
    Operation(
        "lookup of a fresh key, warm",
        _warm(lambda lab: lab.tail, _lookup(FRESH_KEY)),
        goal=Goal(depth=2, text="depth ≤ 2"),
    ),
    Operation("lookup of a base key, cold", _cold(lambda lab: lab.flushed, _lookup(BASE_KEY))),
    Operation(
        "lookup of a base key, warm",
        _warm(lambda lab: lab.flushed, _lookup(BASE_KEY)),
        _plain(lambda dataset: dataset.to_table(filter=f"id = {BASE_KEY}")),
        goal=Goal(depth=2, text="depth ≤ 2"),
    ),
    Operation("scan of 8 SSTables, cold", _cold(lambda lab: lab.flushed, _scan)),
    Operation(
        "scan of 64 SSTables, cold",
        _cold(lambda lab: lab.much_flushed, _scan),
        _plain_cold,
        goal=Goal(depth=12, text="depth ≤ 12"),
        # Threads for so many reads do not all begin within a round trip on a busy machine.
        tolerance=1.5,
    ),
    Operation(
        "scan of 8 SSTables, warm",
        _warm(lambda lab: lab.flushed, _scan),
        _plain(lambda dataset: dataset.to_table()),
        goal=_READ,
        beyond_peer=True,
    ),
    Operation(
        "count of 8 SSTables, warm",
        _warm(lambda lab: lab.flushed, lambda table: table.count_rows()),
        _plain(lambda dataset: dataset.count_rows()),
        goal=_READ,
        beyond_peer=True,
    ),
    Operation(
        "vector search of 8 SSTables, warm",
        _warm(lambda lab: lab.flushed, _search),
        _plain(_plain_search),
        goal=_READ,
        beyond_peer=True,
    ),
    Operation(
        "text search of 8 SSTables, warm",
        _warm(lambda lab: lab.flushed, _words),
        _plain(_plain_words),
        goal=_READ,
        beyond_peer=True,
    ),
    Operation(
        "status",
        _warm(lambda lab: lab.tail, lambda table: table.status()),
        goal=Goal(depth=3, text="depth ≤ 3"),
    ),
    Operation(
        "compact 8 SSTables, rows and markers",
        _compact(lambda lab: lab.flushed, optimize_indexes=False, compact_files=False),
        _merge(lambda lab: lab.flushed),
        goal=_COMPACT,
        tolerance=_ASIDE,
    ),
    Operation(
        "compact 8 SSTables, no indexes",
        _compact(lambda lab: lab.plain),
        _merge(lambda lab: lab.plain),
        goal=_COMPACT,
        tolerance=_ASIDE,
    ),
    Operation(
        "compact 8 SSTables",
        _compact(lambda lab: lab.flushed),
        _merge(lambda lab: lab.flushed, _index),
        goal=_NO_DEEPER,
        beyond_peer=True,
        tolerance=_ASIDE,
    ),
    Operation(
        "compact 8 SSTables and join files",
        _compact(lambda lab: lab.scattered),
        _merge(lambda lab: lab.scattered, _index, _join, _index),
        goal=_NO_DEEPER,
        beyond_peer=True,
        tolerance=_ASIDE,
    ),
    Operation("gc with nothing to do", _collect(lambda lab: lab.flushed, timedelta(0))),
    Operation(
        "gc with nothing to do, 64 shards",
        _collect(lambda lab: lab.sharded(64), timedelta(0)),
        goal=Goal(depth=6, text="depth ≤ 6"),
        shards=64,
    ),
    Operation(
        f"gc of {DUE_ENTRIES} due entries",
        _collect(lambda lab: lab.due, _NINE_DAYS),
        goal=Goal(depth=20, text="depth ≤ 20"),
    ),
    Operation("checkpoint", _cold(lambda lab: lab.flushed, lambda table: table.checkpoint("one"))),
    Operation(
        "verify",
        _cold(lambda lab: lab.flushed, lambda table: table.verify()),
        goal=Goal(depth=12, text="depth ≤ 12"),
        # Checks that run beside each other may both read what one of them could have kept for the other.
        tolerance=1.15,
    ),
    Operation("idle feed poll", _poll(1), goal=_a_poll(1)),
    Operation("idle feed poll, 8 shards", _poll(8), goal=_a_poll(8), shards=8),
    Operation("idle feed poll, 64 shards", _poll(64), goal=_a_poll(64), shards=64),
    Operation("Spark micro-batch, 8 shards", _micro_batch, goal=_PER_SHARD, shards=8),
    Operation("Spark micro-batch by format, 8 shards", _micro_batch_by_format, goal=_PER_SHARD, shards=8),
    Operation("Spark write by format, 8 shards", _by_format(), shards=8),
    Operation("Spark write by format, 8 shards, as SSTables", _by_format(walBytes="0"), shards=8),
)
