"""Spans where a process has set a tracer up, and nothing at all where none has."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import lancewal
from lancewal.errors import InvalidInputError, LanceWalError
from lancewal.gateway import Gateway
from lancewal.storage.tracing import NO_SPAN, span
from tests.tables import rows, wal_table


class Recorded:
    """The spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    def forget(self) -> None:
        self._exporter.clear()

    def of(self, name: str) -> list[ReadableSpan]:
        return [each for each in self._exporter.get_finished_spans() if each.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.of(name)
        return found

    def parent(self, child: ReadableSpan) -> str | None:
        """The name of a span's parent."""
        spans = {each.context.span_id: each for each in self._exporter.get_finished_spans() if each.context}
        return None if child.parent is None else spans[child.parent.span_id].name


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """As an application sets tracing up, for the time of one test."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    return Recorded(exporter)


def test_a_put_and_its_entry_are_spans_of_the_callers_trace(tmp_path: Path, recorded: Recorded) -> None:
    table = wal_table(tmp_path / "t", bucket=("id", 4))
    with table.writer() as writer:
        writer.put(rows(0, 8))
        recorded.forget()
        with trace.get_tracer("application").start_as_current_span("request"):
            writer.put(rows(8, 8))
        puts, entries = recorded.of("lancewal.put"), recorded.of("lancewal.wal_entry")
        assert {recorded.parent(each) for each in puts} == {"request"}  # threads of other shards included
        assert sum(each.attributes["lancewal.rows"] for each in puts if each.attributes) == 8
        assert {each.attributes["lancewal.table"] for each in puts if each.attributes} == {table.uri}
        assert len(entries) == len(puts) > 1
        assert {recorded.parent(each) for each in entries} == {"lancewal.put"}


@pytest.mark.sharding(unsharded=True)
def test_opening_flushing_and_maintenance_are_spans(table: lancewal.Table, recorded: Recorded) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 3))
        assert recorded.parent(recorded.one("lancewal.replay")) == "lancewal.open"
    flush = recorded.one("lancewal.flush")
    assert flush.attributes is not None
    assert (flush.attributes["lancewal.table"], flush.attributes["lancewal.generation"]) == (table.uri, 1)
    table.compact()
    table.gc()
    for name in ("lancewal.compaction", "lancewal.collection"):
        attributes = recorded.one(name).attributes
        assert attributes is not None
        assert attributes["lancewal.table"] == table.uri


@pytest.mark.sharding(unsharded=True)
def test_replayed_rows_are_told(table: lancewal.Table, recorded: Recorded) -> None:
    script = (
        "import os, sys, lancewal; writer = lancewal.open(sys.argv[1]).writer();"
        "writer.put([{'id': 1}, {'id': 2}]); os._exit(0)"
    )
    subprocess.run([sys.executable, "-c", script, table.uri], check=True)
    with table.writer() as writer:
        writer.put(rows(0, 1))
    attributes = recorded.one("lancewal.replay").attributes
    assert attributes is not None
    assert (attributes["lancewal.entries"], attributes["lancewal.rows"]) == (1, 2)


def test_reads_are_spans_of_the_callers_trace(table: lancewal.Table, recorded: Recorded) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 5))
        with trace.get_tracer("application").start_as_current_span("request"):
            table.scan(filter="id > 1").to_table()
            table.count_rows()
            table.lookup(3)
        for name in ("lancewal.scan", "lancewal.count", "lancewal.lookup"):
            assert recorded.parent(recorded.one(name)) == "request"


def test_a_stream_of_rows_is_a_span_until_it_ends_wherever_it_is_read(
    table: lancewal.Table, recorded: Recorded
) -> None:
    with table.writer() as writer:
        writer.put(rows(0, 5))
        with trace.get_tracer("application").start_as_current_span("request"):
            stream = table.scan().to_batches()
        assert recorded.of("lancewal.scan") == []
        reader = threading.Thread(target=stream.read_all)
        reader.start()
        reader.join()
        assert recorded.parent(recorded.one("lancewal.scan")) == "request"
        assert trace.get_current_span() is trace.INVALID_SPAN


def test_a_failed_call_says_why_and_shows_no_text_of_other_libraries(
    table: lancewal.Table, recorded: Recorded
) -> None:
    with pytest.raises(InvalidInputError):
        table.lookup([{"no": 1}])
    failed = recorded.one("lancewal.lookup")
    assert failed.status.status_code is StatusCode.ERROR
    assert failed.attributes is not None
    assert failed.attributes["error.type"] == "InvalidInputError"
    assert str(failed.status.description).startswith("InvalidInputError: ")
    assert failed.events == ()  # no trace of causes

    with pytest.raises(LanceWalError), span("lancewal.test"):
        raise LanceWalError("ours") from OSError("signature=secret")
    with pytest.raises(OSError), span("lancewal.other"):
        raise OSError("signature=secret")
    assert recorded.one("lancewal.test").status.description == "LanceWalError: ours"
    assert recorded.one("lancewal.other").status.description == "OSError"


def test_a_trace_goes_on_behind_a_gateway(table: lancewal.Table, recorded: Recorded) -> None:
    with (
        Gateway({"t": table}, upkeep=False) as gateway,
        lancewal.connect(gateway.address) as remote,
        remote.writer() as writer,
    ):
        writer.put(rows(0, 1))  # opens the stream: its headers belong to no trace
        recorded.forget()
        tracer = trace.get_tracer("application")
        with tracer.start_as_current_span("writes"):
            writer.put(rows(1, 1))
        with tracer.start_as_current_span("reads"):
            remote.lookup([1])
            remote.count_rows()
            remote.scan().to_batches().read_all()
    served, calls = recorded.of("lancewal.serve"), recorded.of("lancewal.call")
    operations = {each.attributes["lancewal.operation"]: each for each in served if each.attributes}
    assert set(operations) >= {"put", "lookup", "count_rows", "scan"}
    for each in operations.values():
        assert each.kind is SpanKind.SERVER
        assert recorded.parent(each) == "lancewal.call"
    assert {each.kind for each in calls} == {SpanKind.CLIENT}
    assert recorded.parent(recorded.one("lancewal.put")) == "lancewal.serve"
    assert recorded.parent(recorded.one("lancewal.lookup")) == "lancewal.serve"
    assert recorded.parent(recorded.one("lancewal.scan")) == "lancewal.serve"
    writes, reads = recorded.one("writes"), recorded.one("reads")
    assert operations["put"].context.trace_id == writes.context.trace_id
    assert operations["scan"].context.trace_id == reads.context.trace_id


def test_without_a_tracer_nothing_is_imported_and_no_span_is_made(tmp_path: Path) -> None:
    script = f"""
import sys, lancewal
table = lancewal.create({str(tmp_path / "t")!r}, [{{"id": 1}}], key="id")
with table.writer() as writer:
    writer.put({{"id": 2}})
table.compact(); table.lookup(2); table.scan().to_table()
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", script], check=True)
    assert span("lancewal.put") is NO_SPAN  # its API is loaded here, and no provider is set


def test_a_put_without_a_tracer_makes_no_object_for_its_span() -> None:
    assert span("lancewal.put", {"lancewal.table": "t"}, rows=1) is span("lancewal.flush")
