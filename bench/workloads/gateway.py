"""Puts through a gateway in a process of its own, beside puts in this process and beside peers.

The clients are threads of this process with one writer, as the threads of a service are, or its coroutines,
which SlateDB's clients are too: what they put at the same time goes as one message. Other lines have clients
that are processes: beside puts in this process, and beside the same messages to a server of Arrow Flight that
stores nothing, which is the most that this machine can do. On two cores clients and gateway take each other's
time, which puts in one process do not. Peers are the ways for several processes to write one table without a
gateway. Lance's and LanceDB's merge_insert and Delta's merge commit a version with each call, and conflict;
SlateDB has one process with a log of its own. Those that are not installed are left out.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import lance
import pyarrow as pa

import lancewal
from bench.comparison import Comparison
from bench.context import Context, Laps, by_threads
from bench.registry import workload
from bench.tables import expect, vector_batches, vector_schema

CLIENTS = (16, 128)
_SERVE = """
import sys, lancewal
with lancewal.Gateway({"table": lancewal.open(sys.argv[1])}, fsync=False) as gateway:
    print(gateway.address, flush=True)
    sys.stdin.read()
"""
_CLIENT = """
import sys, lancewal
from bench.tables import vector_batches
batches = vector_batches(int(sys.argv[2]), rows=20, dimension=8)
with lancewal.connect(sys.argv[1]) as table, table.writer() as writer:
    while print("ready", flush=True) or sys.stdin.readline():
        for batch in batches:
            writer.put(batch)
        print("done", flush=True)
"""
#: A server of Arrow Flight that does nothing with what it gets but to answer, and its client.
_IDLE_SERVER = """
import sys, pyarrow.flight as flight
class Server(flight.FlightServerBase):
    def do_put(self, context, descriptor, reader, writer):
        for chunk in reader:
            writer.write(b"1")
with Server("grpc://127.0.0.1:0") as server:
    print(f"grpc://127.0.0.1:{server.port}", flush=True)
    sys.stdin.read()
"""
_IDLE_CLIENT = """
import sys, pyarrow.flight as flight
from bench.tables import vector_batches
batches = vector_batches(int(sys.argv[2]), rows=20, dimension=8)
with flight.connect(sys.argv[1]) as client:
    writer, answers = client.do_put(flight.FlightDescriptor.for_path("table"), batches[0].schema)
    while print("ready", flush=True) or sys.stdin.readline():
        for batch in batches:
            writer.write_batch(batch)
            answers.read()
        print("done", flush=True)
    writer.close()
"""
#: Prepares a peer's table where it is asked to, else makes calls when it is told to begin.
_PEER = """
import sys
from bench.tables import vector_batches, vector_schema
where, calls, tasks, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
batches = vector_batches(calls, rows=20, dimension=8)
{prepare}
if what == "prepare":
    make()
    sys.exit()
begin = opened()
print("ready", flush=True)
sys.stdin.readline()
begin()
print("done", flush=True)
"""
_LANCE = """
import lance
def make():
    lance.write_dataset(vector_schema(8).empty_table(), where)
def opened():
    def begin():
        for batch in batches:
            merge = lance.dataset(where).merge_insert("id").when_matched_update_all()
            merge.when_not_matched_insert_all().conflict_retries(50).execute(batch)
    return begin
"""
_LANCEDB = """
import time, lancedb
def make():
    lancedb.connect(where).create_table("t", schema=vector_schema(8))
def opened():
    table = lancedb.connect(where).open_table("t")
    def begin():
        for batch in batches:
            while True:
                try:
                    table.checkout_latest()
                    merge = table.merge_insert("id").when_matched_update_all()
                    merge.when_not_matched_insert_all().execute(batch)
                    break
                except RuntimeError as error:
                    if "conflict" not in str(error).lower():
                        raise
    return begin
"""
_DELTA = """
import pyarrow as pa
from deltalake import DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError
columns = pa.schema([("id", pa.int64()), (vector_schema(8).names[1], pa.list_(pa.float32()))])
def make():
    write_deltalake(where, columns.empty_table())
def opened():
    def begin():
        for batch in batches:
            rows = pa.Table.from_batches([batch]).cast(columns)
            while True:
                try:
                    merge = DeltaTable(where).merge(rows, "s.id = t.id", source_alias="s", target_alias="t")
                    merge.when_matched_update_all().when_not_matched_insert_all().execute()
                    break
                except CommitFailedError:
                    pass
    return begin
"""
_SLATEDB = """
import asyncio, os
from slatedb.uniffi import DbBuilder, ObjectStore, Settings, WriteBatch
def make():
    os.makedirs(where)
def opened():
    async def build():
        settings = Settings.default()
        settings.set("flush_interval", '"1ms"')
        builder = DbBuilder(f"{where}/db".lstrip("/"), ObjectStore.resolve("file:///"))
        builder.with_settings(settings)
        return await builder.build()
    runner = asyncio.Runner()
    db = runner.run(build())
    async def client():
        for batch in batches:
            writes = WriteBatch()
            for row in batch.to_pylist():
                writes.put(b"%d" % row.pop("id"), repr(row).encode())
            await db.write(writes)
    async def clients():
        await asyncio.gather(*(client() for _ in range(tasks)))
    return lambda: runner.run(clients())
"""
#: The peers for each number of clients, with the processes that write and the puts that each of them has
#: under way at a time. More processes make those that commit to a table slower: they conflict.
_PEERS = {
    16: {
        "Lance merge_insert, 4 processes": (_LANCE, 4, 1),
        "LanceDB merge_insert, 4 processes": (_LANCEDB, 4, 1),
        "Delta merge, 4 processes": (_DELTA, 4, 1),
        "SlateDB, 16 tasks of a process": (_SLATEDB, 1, 16),
    },
    128: {"SlateDB, 128 tasks of a process": (_SLATEDB, 1, 128)},
}


def _table(where: Path) -> lancewal.Table:
    lance.write_dataset(vector_schema(8).empty_table(), str(where))
    return lancewal.initialize(str(where), unsharded=True)


@contextmanager
def _talking(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A Python process that runs ``program`` until its input ends."""
    child = subprocess.Popen(
        [sys.executable, "-c", program, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdin is not None
    try:
        yield child
    finally:
        child.stdin.close()
        child.wait()


def _tell(child: subprocess.Popen[str], what: str) -> None:
    assert child.stdin is not None
    child.stdin.write(f"{what}\n")
    child.stdin.flush()


def _heard(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


@contextmanager
def _served(table: lancewal.Table) -> Iterator[tuple[str, lancewal.RemoteTable]]:
    with _talking(_SERVE, table.uri) as child:
        address = _heard(child)
        with lancewal.connect(address) as remote:
            yield address, remote


def _rate(puts: Sequence[Callable[[pa.RecordBatch], object]], batches: list[pa.RecordBatch]) -> float:
    """Puts per second of the second round, a thread for each of ``puts``; the first round warms up."""
    each = len(batches)
    for _ in range(2):
        started = time.perf_counter()
        by_threads(len(puts), each, lambda number: puts[number // each](batches[number % each]))
        seconds = time.perf_counter() - started
    return len(puts) * each / seconds


def _rate_of_coroutines(remote: lancewal.RemoteTable, clients: int, batches: list[pa.RecordBatch]) -> float:
    """As :func:`_rate`, by coroutines of one event loop."""

    async def client(writer: lancewal.AsyncWriter) -> None:
        for batch in batches:
            await writer.put(batch)

    async def run() -> float:
        async with lancewal.AsyncTable(remote).writer() as writer:
            for _ in range(2):
                started = time.perf_counter()
                await asyncio.gather(*(client(writer) for _ in range(clients)))
                seconds = time.perf_counter() - started
            return clients * len(batches) / seconds

    return asyncio.run(run())


def _rate_apart(address: str, clients: int, puts: int, program: str = _CLIENT) -> float:
    """As :func:`_rate`, by clients that are processes of their own: each put is a message then."""
    with ExitStack() as stack:
        children = [stack.enter_context(_talking(program, address, str(puts))) for _ in range(clients)]
        for _ in range(2):
            for child in children:
                expect(_heard(child), "ready")
            started = time.perf_counter()
            for child in children:
                _tell(child, "go")
            for child in children:
                expect(_heard(child), "done")
            seconds = time.perf_counter() - started
    return clients * puts / seconds


@workload("gateway", "durable puts of 20 rows × 8-d by 1, 16 and 128 clients of a gateway")
def gateway(context: Context) -> list[Comparison]:
    ours = _table(context.directory("in_process") / "table")
    remote_table = _table(context.directory("served") / "table")
    found: list[Comparison] = []
    with (
        ours.writer(fsync=False) as local,
        _served(remote_table) as (address, remote),
        remote.writer() as writer,
    ):
        batches = vector_batches(context.size(full=400, quick=5), rows=20, dimension=8)
        laps = context.alternate(
            len(batches),
            20,
            gateway=lambda index: writer.put(batches[index]),
            local=lambda index: local.put(batches[index]),
        )
        added = (laps["gateway"].percentile(50) - laps["local"].percentile(50)) * 1e3
        found += [
            Comparison("added by the gateway, p50, goal 0.5", added, 0.5, "ms", False, "goal"),
            _latency("one client, p50", laps, 50),
            _latency("one client, p99", laps, 99),
        ]
        for clients in CLIENTS:
            some = vector_batches(context.size(full=6400 // clients, quick=2), rows=20, dimension=8)
            rates = context.in_turn(
                gateway=partial(_rate, [writer.put] * clients, some),
                coroutines=partial(_rate_of_coroutines, remote, clients, some),
                local=partial(_rate, [local.put] * clients, some),
            )
            peers = _peer_rates(context, clients)
            for side, name in (("gateway", "clients"), ("coroutines", "coroutines")):
                found.append(
                    Comparison(
                        f"{clients} {name}",
                        rates[side],
                        rates["local"],
                        "puts/s",
                        True,
                        "in this process",
                        0.5,
                    )
                )
                found += _beside(rates[side], f"{clients} {name}", peers)
            if clients == CLIENTS[0]:
                apart = _rate_apart(address, clients, len(some))
                name = f"{clients} clients, each a process of its own"
                found.append(Comparison(name, apart, rates["local"], "puts/s", True, "in this process"))
                with _talking(_IDLE_SERVER) as server:
                    idle = _rate_apart(_heard(server), clients, len(some), _IDLE_CLIENT)
                name = f"{clients} processes, beside a server that stores nothing"
                found.append(Comparison(name, apart, idle, "puts/s", True, "bare Arrow Flight"))
        expect(remote.count_rows(), ours.count_rows())
    return found


def _latency(name: str, laps: dict[str, Laps], percent: float) -> Comparison:
    through, local = (laps[side].percentile(percent) * 1e3 for side in ("gateway", "local"))
    return Comparison(name, through, local, "ms", False, "in this process")


def _peer_rates(context: Context, clients: int) -> dict[str, float]:
    """The puts per second of each peer that is installed."""
    rates = {name: _peer_rate(context, *peer) for name, peer in _PEERS[clients].items()}
    return {name: rate for name, rate in rates.items() if rate is not None}


def _beside(ours: float, clients: str, peers: dict[str, float]) -> list[Comparison]:
    return [
        Comparison(f"{clients}, beside {name}", ours, rate, "puts/s", True, name.partition(",")[0], 20.0)
        for name, rate in peers.items()
    ]


def _peer_rate(context: Context, program: str, processes: int, tasks: int) -> float | None:
    """Puts per second of a peer; ``None`` if it is not installed."""
    where = context.directory(f"peer-{abs(hash((program, tasks)))}") / "table"
    calls = context.size(full=25, quick=2)
    command = [sys.executable, "-c", _PEER.format(prepare=program), str(where), str(calls), str(tasks)]
    prepared = subprocess.run([*command, "prepare"], capture_output=True, text=True, check=False)
    if "ModuleNotFoundError" in prepared.stderr:
        return None
    expect(prepared.returncode, 0)
    children = [
        subprocess.Popen([*command, "write"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(processes)
    ]
    for child in children:
        expect(_heard(child), "ready")
    started = time.perf_counter()
    for child in children:
        _tell(child, "go")
    for child in children:
        expect(_heard(child), "done")
    seconds = time.perf_counter() - started
    for child in children:
        expect(child.wait(), 0)
    return processes * tasks * calls / seconds
