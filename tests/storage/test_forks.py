"""A forked child of a process that has used lancewal: refused, never hanging, never heard of in the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lance
import pytest

import lancewal
from lancewal.gateway import Gateway
from tests.patience import PATIENCE
from tests.tables import KEYED, ids

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")

PRELUDE = """
import json, os, sys, threading, time, warnings
warnings.filterwarnings("ignore")
import lancewal
from tests.tables import rows

def in_child(work):
    '''What ``work`` gave or raised in a forked child, which ends as any process does.'''
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = type(error).__name__
        os.write(writing, json.dumps(answer).encode())
        os.close(writing)
        sys.exit(0)
    os.close(writing)
    with open(reading) as answers:
        answer = answers.read()
    _, status = os.waitpid(child, 0)
    return [json.loads(answer) if answer else None, status]

def refused(*calls):
    '''Whether each was refused.'''
    names = []
    for call in calls:
        try:
            call()
            names.append("")
        except BaseException as error:
            names.append(type(error).__name__)
    return names
"""


def run(script: str, uri: Path | str) -> Any:
    """What a process that runs ``script`` prints as its last line."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + script, str(uri)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture
def uri(tmp_path: Path) -> Path:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    lancewal.initialize(tmp_path / "t", bucket=("id", 3), writer_defaults={"fsync": "false"})
    return tmp_path / "t"


def test_rows_that_forked_children_put_through_an_inherited_writer_were_lost(uri: Path) -> None:
    """All puts returned, and the parent's flush passed over the entries of its children."""
    script = """
table = lancewal.open(sys.argv[1])
writer = table.writer()
writer.put(rows(0, 10))

def put(number):
    writer.put(rows(100 * number, 5))
    return "acknowledged"

answers = [in_child(lambda: put(number)) for number in (1, 2, 3)]
writer.put(rows(10, 1))
writer.close()
print(json.dumps(answers))
"""
    assert run(script, uri) == [["ForkedError", 0]] * 3
    table = lancewal.open(uri)
    assert ids(table.scan().to_table()) == list(range(11))
    assert table.verify().ok


def test_nothing_that_a_child_inherits_works_there_and_nothing_hangs(uri: Path) -> None:
    """Also with every lock of the writer held by threads that the child does not have."""
    script = """
import gc
table = lancewal.open(sys.argv[1])
writer = table.writer(durable_write=False, max_wal_flush_interval=None)  # nothing is durable yet
result = writer.put(rows(0, 10))
shard = next(iter(writer.shard_writers.values()))
inner = table.shard_writer(shard.shard_id, take_over="now")
inner.put(rows(0, 1))
scan = table.scan()
locks = [writer._lock, writer._close_lock, writer._under_way._lock, shard._mode.lock, shard._close_lock,
         shard._log._lock, shard._mode._flushes._lock, shard._backpressure._lock, shard._state._lock,
         shard._stats._lock, shard._appender._lock, shard._mode._flushes._worker._lock]
from lancewal.storage import process_totals
from lancewal.index.graph import BUILDER
from lancewal.writer import open as registry
locks += [registry._registry._lock, process_totals._lock, BUILDER._lock]

def work():
    assert not registry.open_writers() and not registry.written() and not process_totals.by_table()
    with writer, shard:  # whose ends do nothing here
        names = refused(
            lambda: writer.put(rows(1, 1)), lambda: writer.delete(1), writer.flush, writer.stats,
            lambda: shard.put(rows(1, 1)), lambda: shard.delete(1), shard.scan, shard.force_seal_active,
            shard.wait_for_flush_drain, shard.flush, shard.memtable_stats, shard.wal_stats, shard.stats,
            shard.manifest, shard.check_fenced, shard.active_memtable_ref,
            lambda: shard._appender.append([rows(1, 1)]),
            result.wait, lambda: table.lookup(1), table.count_rows, scan.to_table, scan.count_rows,
            lambda: scan.to_batches().read_all(), table.flush, table.compact, table.gc, table.verify,
            table.status, lambda: table.schema, lambda: lancewal.open(sys.argv[1]),
        )
    writer.close(), shard.close(), inner.close()
    gc.collect()
    return names

for lock in locks:
    lock.acquire()
answer = in_child(work)
for lock in locks:
    lock.release()
inner.close()
print(json.dumps(answer), flush=True)
os._exit(0)  # the table's other writers were fenced on purpose
"""
    names, status = run(script, uri)
    assert set(names) == {"ForkedError"}, names
    assert status == 0


def test_a_forked_reader_served_stale_rows(uri: Path) -> None:
    """It read the memory of a writer that it did not have."""
    script = """
table = lancewal.open(sys.argv[1])
writer = table.writer()
writer.put(rows(0, 3))
assert table.count_rows() == 3
go = os.pipe()

def read():
    os.read(go[0], 1)
    return table.count_rows()

thread = threading.Timer(0.05, lambda: (writer.put(rows(3, 3)), os.write(go[1], b"x")))
thread.start()
answer = in_child(read)
thread.join()
writer.close()
print(json.dumps([answer, table.count_rows()]))
"""
    assert run(script, uri) == [["ForkedError", 0], 6]


def test_a_process_that_forks_before_it_uses_a_table_is_like_any_other(uri: Path) -> None:
    script = """
import multiprocessing

def work(number):
    table = lancewal.open(sys.argv[1])
    with table.shard_writer(table.shard_for(number)) as writer:
        writer.put(rows(number, 1))
    return table.count_rows(f"id = {number}")

with multiprocessing.get_context("fork").Pool(2) as pool:
    print(json.dumps(pool.map(work, [1])))
"""
    assert run(script, uri) == [1]
    assert ids(lancewal.open(uri).scan().to_table()) == [1]


def test_a_program_can_be_started_from_a_process_that_has_writers(uri: Path) -> None:
    script = """
import subprocess
writer = lancewal.open(sys.argv[1]).writer()
writer.put(rows(0, 3))
code = "import lancewal, sys; print(lancewal.open(sys.argv[1]).count_rows())"
started = subprocess.run([sys.executable, "-c", code, sys.argv[1]], capture_output=True, text=True,
                         preexec_fn=os.getpid)
writer.close()
print(json.dumps(started.stdout.strip()))
"""
    assert run(script, uri) == "3"


def test_the_parent_goes_on_as_before(uri: Path) -> None:
    script = """
table = lancewal.open(sys.argv[1])
with table.writer() as writer:
    for number in range(5):
        writer.put(rows(number, 1))
        in_child(lambda: None)
print(json.dumps(table.count_rows()))
"""
    assert run(script, uri) == 5


def test_a_lookup_of_a_table_that_may_be_stale_hung_in_a_forked_child(uri: Path) -> None:
    """It asked storage for nothing, and so nobody asked whose process this is."""
    script = """
table = lancewal.open(sys.argv[1], max_staleness=3600)
with table.writer() as writer:
    writer.put(rows(0, 5))
table.lookup([1, 2])
print(json.dumps(in_child(lambda: refused(lambda: table.lookup([1, 2])))))
"""
    assert run(script, uri) == [["ForkedError"], 0]


def test_an_acknowledged_put_of_a_client_was_lost_after_a_fork(uri: Path) -> None:
    """Its forked child sent rows under the same id, and the gateway took the parent's for a second try."""
    script = """
table = lancewal.connect(sys.argv[1], timeout=30)
writer = table.writer()
writer.put(rows(0, 1))

def work():
    with table, writer:  # whose ends do nothing here
        return refused(lambda: writer.put(rows(10, 1)), table.count_rows, table.status)

answer = in_child(work)
writer.put(rows(1, 1))
print(json.dumps(answer))
"""
    with Gateway({"t": lancewal.open(uri)}) as gateway:
        assert run(script, gateway.address) == [["ForkedError"] * 3, 0]
    assert ids(lancewal.open(uri).scan().to_table()) == [0, 1]


def test_a_forked_child_waited_for_threads_of_asyncio_that_it_has_not(uri: Path) -> None:
    script = """
import asyncio
table = lancewal.AsyncTable(lancewal.open(sys.argv[1]))
writer = table.writer()

async def put(start):
    return await writer.put(rows(start, 3)), await table.count_rows()

async def close():
    await writer.close()

def work():
    answers = refused(lambda: asyncio.run(put(10)), lambda: asyncio.run(table.count_rows()))
    asyncio.run(close())
    return answers

asyncio.run(put(0))
answer = in_child(work)
print(json.dumps([answer, asyncio.run(put(3))]))
asyncio.run(close())
"""
    assert run(script, uri) == [[["ForkedError"] * 2, 0], [3, 6]]


def test_a_forked_child_that_left_a_shared_table_hung(uri: Path) -> None:
    """It waited for calls of its parent's, and would have taken the socket away from all processes."""
    script = """
import pathlib
directory = pathlib.Path(sys.argv[1]).parent
shared = lancewal.share(sys.argv[1], directory=directory)
writer = shared.writer()
writer.put(rows(0, 1))
child = os.fork()
if child == 0:
    with shared, writer:  # whose ends do nothing here
        names = refused(lambda: writer.put(rows(10, 1)), shared.flush)
    # As multiprocessing ends its children: at an exit like any other pyarrow would shut its server down.
    os._exit(0 if names == ["ForkedError"] * 2 else 1)
_, status = os.waitpid(child, 0)
writer.put(rows(1, 1))
sockets = len(list(directory.glob("*.sock")))
shared.close()
print(json.dumps([status, sockets]))
"""
    assert run(script, uri) == [0, 1]
    assert ids(lancewal.open(uri).scan().to_table()) == [0, 1]


def test_a_forked_child_of_a_gateway_never_ended(uri: Path) -> None:
    """pyarrow shuts every server down at the end of a process, and waited for threads of the parent."""
    script = """
table = lancewal.open(sys.argv[1])
with lancewal.Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
    with remote.writer() as writer:
        writer.put(rows(0, 3))
        answer = in_child(lambda: "ended")
        writer.put(rows(3, 3))
print(json.dumps([answer, table.count_rows()]))
"""
    assert run(script, uri) == [["ended", 0], 6]
