"""Processes that stand still for longer than garbage is kept, copies of them, and clocks that are wrong."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import lancewal
from tests.maintenance.support import collect_later
from tests.patience import PATIENCE
from tests.tables import ids, rows, wal_table

FIRST = 1_000_000
_CHILD = Path(__file__).with_name("stalled_child.py")


def until(condition: Callable[[], bool], child: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert child.poll() is None or condition(), "the child has ended"
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("wall", "busy"),
    [(0.0, False), (86_400.0, True), (-86_400.0, True)],
    ids=["successor is silent", "clock a day ahead", "clock a day behind"],
)
def test_a_writer_that_was_stopped_beyond_the_collection_age_never_acknowledges_again(
    tmp_path: Path, wall: float, busy: bool
) -> None:
    """Its slot was emptied meanwhile; its wall clock was stepped while it slept."""
    table = wal_table(tmp_path / "table")
    clocks, journal = tmp_path / "clocks", tmp_path / "journal"
    clocks.write_text("0 0")
    journal.touch()
    command = [sys.executable, str(_CHILD), table.uri, str(clocks), str(journal)]
    path = os.pathsep.join(each for each in sys.path if each)
    child = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path})
    try:
        until(lambda: journal.read_text().count("\n") > 20, child)
        os.kill(child.pid, signal.SIGSTOP)
        until(lambda: _state(child.pid) == "T", child)

        with table.writer(take_over="now") as successor:
            successor.put(rows(0, 1))
            if busy:
                for number in range(1, 30):
                    successor.put(rows(number, 1))
        before = set(ids(table.scan().to_table()))
        table.compact()
        collect_later(table._store)
        # A year has passed, on the clock that nobody sets; the wall clock was set besides.
        clocks.write_text(f"31536000 {wall}")
        acknowledged = journal.read_text().splitlines()
        os.kill(child.pid, signal.SIGCONT)
        assert child.wait(PATIENCE) == 0
    finally:
        child.kill()
        child.wait()
    *later, end = journal.read_text().splitlines()[len(acknowledged) :]
    assert end == "ended FencedError"
    # The stop may have come between an acknowledgement and its note: that row was there before.
    assert {FIRST + int(each) for each in later} <= before
    found = ids(lancewal.open(table.uri).scan().to_table())
    assert set(found) == before
    assert {FIRST + int(each) for each in acknowledged if each} <= before
    assert table.verify().ok


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


CLONES = """
import json, os, sys
import lancewal
from lancewal.errors import LanceWalError
from lancewal.storage import forks
from tests.tables import rows

table = lancewal.open(sys.argv[1])
shard = table.shard_for()
writer = table.shard_writer(shard, fsync=False, enable_memtable=sys.argv[2] == "memtable")
writer.put(rows(0, 3))
reading, writing = os.pipe()
child = os.fork()
forks._forked = False  # a copied machine has no way to notice
mine, ended = [], ""
first = 1000 if child == 0 else 2000
for number in range(first, first + 60):
    try:
        writer.put(rows(number, 1))
    except LanceWalError as error:
        ended = type(error).__name__
        break
    mine.append(number)
if child == 0:
    os.write(writing, json.dumps([mine, ended]).encode())
    os._exit(0)
os.close(writing)
with open(reading) as file:
    theirs = json.loads(file.read())
os.waitpid(child, 0)
print(json.dumps([[mine, ended], theirs]), flush=True)
os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.parametrize("mode", ["memtable", "log only"])
def test_of_two_copies_of_a_writer_one_ends_and_no_acknowledged_row_is_lost(
    tmp_path: Path, mode: str
) -> None:
    """As after a virtual machine was cloned: one epoch, the same memory, and nobody knows of the other."""
    table = wal_table(tmp_path / "table")
    path = os.pathsep.join(each for each in sys.path if each)
    done = subprocess.run(
        [sys.executable, "-c", CLONES, table.uri, mode],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    (mine, my_end), (theirs, their_end) = json.loads(done.stdout.splitlines()[-1])
    assert sorted([my_end, their_end]) in (["", "FencedError"], ["FencedError", "FencedError"])
    found = ids(lancewal.open(table.uri).scan().to_table())
    assert len(found) == len(set(found))
    assert {0, 1, 2, *mine, *theirs} <= set(found)
    with table.writer(take_over="now") as writer:
        writer.put(rows(5000, 1))
    table.compact()
    assert {0, 1, 2, *mine, *theirs, 5000} <= set(ids(table.scan().to_table()))
    assert table.verify().ok
