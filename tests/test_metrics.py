"""One documented set of names, counters that only grow, and a page that Prometheus reads."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from lancewal import metrics
from lancewal import table as table_module
from lancewal.errors import InvalidInputError, StorageError
from lancewal.storage import ObjectStore, observe_all, read_times
from lancewal.table import Table
from lancewal.writer import open as writer_registry
from tests.faults import FaultyBackend
from tests.patience import PATIENCE
from tests.tables import rows, wal_table

DOCUMENTATION = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"


@pytest.fixture
def registry() -> Iterator[CollectorRegistry]:
    yield CollectorRegistry()
    observe_all(None)


class Samples:
    def __init__(self, registry: CollectorRegistry, table: Table) -> None:
        self._registry = registry
        self._table = table.uri

    def __getitem__(self, name: str) -> float:
        value = self._registry.get_sample_value(f"lancewal_{name}", {"table": self._table})
        assert value is not None, name
        return value


def test_writers_are_counted(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    metrics.register(registry)
    samples = Samples(registry, table)
    with table.writer() as writer:
        writer.put(rows(0, 10))
        writer.put(rows(10, 10))
        assert samples["puts_total"] == 4  # two shards each
        assert samples["put_rows_total"] == 20
        assert samples["wal_entries_total"] == samples["wal_puts_total"] == 4
        assert samples["wal_bytes_total"] > 1000
        assert samples["writers"] == 2
        assert samples["memtable_rows"] == 20
        assert samples["memtable_bytes"] > samples["memtable_index_bytes"] > 0
    assert samples["flushes_total"] == 2
    assert samples["flush_rows_total"] == 20


def test_puts_are_counted_by_how_long_they_took(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    metrics.register(registry)

    def bucket(bound: str) -> float | None:
        return registry.get_sample_value(
            "lancewal_put_latency_seconds_bucket", {"table": table.uri, "le": bound}
        )

    samples = Samples(registry, table)
    with table.writer() as writer:
        writer.put(rows(0, 10))
        for seconds, shard_writer in zip((0.0002, 0.02), writer.shard_writers.values(), strict=True):
            stats = shard_writer.stats_handle
            stats.reset()
            stats.add(put_count=1, put_time=seconds)
            stats.add(put_count=1, put_time=99.0)
        assert [bucket(bound) for bound in ("0.0001", "0.00025", "0.01", "0.025", "30.0", "+Inf")] == [
            *(0, 1, 1, 2, 2, 4)
        ]
        assert samples["put_latency_seconds_count"] == samples["puts_total"] == 4
        assert samples["put_latency_seconds_sum"] == pytest.approx(198.0202)
    with table.writer() as writer:
        writer.put(rows(0, 10))
    assert samples["put_latency_seconds_count"] == samples["puts_total"] == 6  # of both writers


def test_no_metric_is_told_twice(tmp_path: Path, registry: CollectorRegistry) -> None:
    """The bytes that wait for the WAL came as two families of one name, which Prometheus refuses."""
    table = wal_table(tmp_path / "t")
    metrics.register(registry, [table])
    with table.writer() as writer:
        writer.put(rows(0, 10))
        names = [family.name for family in registry.collect()]
    assert len(names) == len(set(names))


def test_counters_outlive_their_writers(tmp_path: Path, registry: CollectorRegistry) -> None:
    """A writer that was opened and closed between two looks was a gap in the counters once."""
    table = wal_table(tmp_path / "t")
    metrics.register(registry)
    samples = Samples(registry, table)
    for number in range(5):
        with table.writer() as writer:
            writer.put(rows(number, 1))
        del writer
        gc.collect()
        assert samples["puts_total"] == number + 1
    assert registry.get_sample_value("lancewal_writers", {"table": table.uri}) is None
    assert samples["wal_seconds_total"] > 0


def test_writers_that_are_gone_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    living = sum(writer() is not None for _, writer, _ in writer_registry._registry._opened)
    monkeypatch.setattr(writer_registry, "_FOLD_AFTER", living + 3)
    table = wal_table(tmp_path / "t")
    for _ in range(6):
        table.shard_writer(table.shard_for(), enable_memtable=False).close()
        gc.collect()
    assert len(writer_registry._registry._opened) <= living + 4


def test_a_writer_without_memtables_is_counted_too(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t")
    metrics.register(registry)
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 3))
        assert Samples(registry, table)["put_rows_total"] == 3
        assert Samples(registry, table)["memtable_rows"] == 0


def test_replay_is_counted(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer(enable_memtable=False) as writer:
        writer.put(rows(0, 3))
    metrics.register(registry)
    table.flush()
    samples = Samples(registry, table)
    assert (samples["replayed_entries_total"], samples["replayed_rows_total"]) == (1, 3)


def test_shards_can_be_told_apart(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    metrics.register(registry, per_shard=True)
    with table.writer() as writer:
        writer.put(rows(0, 20))
        shards = {str(shard) for shard in writer.shard_writers}
        found = {
            sample.labels["shard"]: sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "lancewal_put_rows_total" and sample.labels["table"] == table.uri
        }
    assert found.keys() == shards
    assert sum(found.values()) == 20


def test_compaction_and_collection_are_counted(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t")
    with table.writer() as writer:
        writer.put(rows(0, 20))
    metrics.register(registry)
    samples = Samples(registry, table)
    table.compact()
    assert samples["compactions_total"] == 1
    assert samples["compaction_rows_upserted_total"] == 20
    assert samples["compaction_generations_total"] == 1
    table.gc(dry_run=True)
    assert samples["collections_total"] == 0
    table.gc(min_age=timedelta(0))
    assert samples["collections_total"] == 1
    labels = {"table": table.uri, "resource": "sstables"}
    assert registry.get_sample_value("lancewal_collected_total", labels) == 1


def test_a_failed_compaction_is_counted(
    tmp_path: Path, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    metrics.register(registry)

    def fail(*args: object, **kwargs: object) -> None:
        raise StorageError("no reply")

    monkeypatch.setattr(table_module, "compact", fail)
    with pytest.raises(StorageError):
        table.compact()
    assert Samples(registry, table)["compaction_failures_total"] == 1


def test_the_object_store_is_timed_by_operation_and_error(registry: CollectorRegistry) -> None:
    store = ObjectStore.from_uri("memory://metrics")  # made before anybody asked for metrics
    metrics.register(registry)
    store.put("a", b"x")
    with pytest.raises(FileNotFoundError):
        store.get("missing")
    backend = FaultyBackend(store._backend)
    backend.faults.fail("read", times=None)
    with pytest.raises(StorageError):
        ObjectStore("memory://metrics", backend, sleep=lambda seconds: None).get("a")  # type: ignore[arg-type]

    def calls(operation: str, error: str) -> float | None:
        labels = {"operation": operation, "error": error}
        return registry.get_sample_value("lancewal_object_store_seconds_count", labels)

    assert calls("put", "") == 1
    assert calls("get", "FileNotFoundError") == 1
    assert calls("get", "StorageError") == 1
    observe_all(None)
    store.put("b", b"x")
    assert calls("put", "") == 1


def test_tables_are_watched_but_not_at_every_look(
    tmp_path: Path, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [wal_table(tmp_path / name) for name in ("a", "b")]
    for number, table in enumerate(tables, 1):
        with table.writer(enable_memtable=False) as writer:
            for place in range(number):
                writer.put(rows(place, 1))
    looks = []
    look = Table.status
    monkeypatch.setattr(Table, "status", lambda self: looks.append(self.uri) or look(self))
    metrics.register(registry, tables)
    for _ in range(3):
        assert Samples(registry, tables[0])["unflushed_entries"] == 1
        assert Samples(registry, tables[1])["unflushed_entries"] == 2
    assert sorted(looks) == sorted(table.uri for table in tables)


def test_metrics_are_served(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    with metrics.serve(0, tables=[table]) as endpoint:
        page = (
            urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", timeout=PATIENCE)
            .read()
            .decode()
        )
    assert "# TYPE lancewal_puts_total counter" in page
    assert f'lancewal_base_rows{{table="{table.uri}"}} 0.0' in page
    assert f'lancewal_garbage_bytes{{table="{table.uri}"}} 0.0' in page


def test_every_name_is_documented_and_every_documented_name_exists(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    metrics.register(registry, [wal_table(tmp_path / "t", bucket=("id", 2))])
    # Prometheus calls a counter by its family's name and "_total".
    exported = {family.name + ("_total" if family.type == "counter" else "") for family in registry.collect()}
    documented = set(re.findall(r"^\| `(lancewal_\w+)`", DOCUMENTATION.read_text(), re.MULTILINE))
    assert documented == exported


def test_without_the_client_the_error_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "try:\n    import lancewal.metrics\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(DOCUMENTATION.parents[1] / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install 'lancewal[metrics]'" in done.stdout


def test_reads_are_counted_by_how_long_they_took(tmp_path: Path, registry: CollectorRegistry) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 2))
    metrics.register(registry)

    def count(operation: str) -> float | None:
        labels = {"table": table.uri, "operation": operation}
        return registry.get_sample_value("lancewal_read_latency_seconds_count", labels)

    with table.writer() as writer:
        writer.put(rows(0, 10))
        assert count("lookup") is None
        table.lookup(3)
        table.lookup([1, 2])
        table.count_rows("id > 3")
        table.scan().to_table()
        stream = table.scan().to_batches()
        assert count("scan") == 1  # the stream has not ended
        stream.read_all()
        table.search("a", text_column="name")
        table.full_text_search("name", "a")
        with pytest.raises(InvalidInputError):
            table.lookup([{"no": 1}])
    assert [count(each) for each in ("lookup", "count", "scan", "search")] == [2, 1, 2, 2]

    read_times.add(table.uri, "lookup", 0.02)
    labels = {"table": table.uri, "operation": "lookup"}
    buckets = [
        registry.get_sample_value("lancewal_read_latency_seconds_bucket", {**labels, "le": bound})
        for bound in ("0.025", "+Inf")
    ]
    assert buckets[1] == 3
    assert buckets[0] is not None
    assert buckets[0] >= 1
    assert registry.get_sample_value("lancewal_read_latency_seconds_sum", labels) >= 0.02  # type: ignore[operator]
