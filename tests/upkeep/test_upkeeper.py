"""Upkeep in a thread: it does what is due, rests, and ends when it is told to."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path

import lance
import pytest

from lancewal.base import BaseTable
from lancewal.maintenance import UpkeepSettings, at_crash_points
from lancewal.storage import ObjectStore, process_totals
from lancewal.upkeep import TaskOutcome, Upkeep, Upkeeper, UpkeepTask, Work
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until
from tests.tables import ids, rows, wal_table

QUICK = UpkeepSettings(max_sstables=1, interval=timedelta(seconds=0.05), max_share=1)


def running() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "lancewal-upkeep"]


def test_a_writer_with_upkeep_needs_no_other_call(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", upkeep=QUICK)
    with table.writer(upkeep=True) as writer:
        for number in range(6):
            writer.put(rows(10 * number, 10))
            writer.flush()
        wait_until(lambda: table.status().uncompacted.count <= 1, "the SSTables to be compacted")
        writer.put(rows(0, 1, prefix="newer"))
        assert running()
    assert not running()
    assert len(table.scan().to_table()) == 60
    assert table.lookup(0) == {"id": 0, "name": "newer_0"}
    assert table.verify().ok


def test_programs_that_put_and_end_leave_a_table_in_shape(tmp_path: Path) -> None:
    """Each is gone before the first look is due: it looks at its end."""
    table = wal_table(tmp_path / "t")
    counts = []
    for number in range(12):
        with table.writer(upkeep=True) as writer:
            writer.put(rows(10 * number, 10))
        counts.append(table.status().uncompacted.count)
    assert max(counts) <= 4
    assert lance.dataset(table.uri).count_rows() >= 50


def test_a_writer_that_was_dropped_takes_its_upkeep_along(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", upkeep=QUICK)
    writer = table.writer(upkeep=True)
    writer.put(rows(0, 1))
    wait_until(running, "upkeep to run")
    del writer
    gc.collect()
    wait_until(lambda: not running(), "upkeep to end")


def _keeper(store: ObjectStore, done: list[TaskOutcome]) -> Upkeeper:
    upkeep = Upkeep.here(store, lambda: BaseTable.open(store.uri, store=store))
    return Upkeeper(upkeep, report=done.append, settings=QUICK).start()


def test_after_a_task_it_rests_for_its_share_of_the_time() -> None:
    settings = UpkeepSettings(max_share=0.25)

    class Busy:
        uri = "memory://t"

        def do_next(self, *_: object) -> tuple[TaskOutcome, UpkeepSettings]:
            return TaskOutcome(UpkeepTask(Work.COMPACT, "too many SSTables"), seconds=800.0), settings

    keeper = Upkeeper(Busy())  # type: ignore[arg-type]
    assert keeper._step() == pytest.approx(2400.0)
    assert 0 < keeper._step() <= 2400.0
    assert keeper.looks == 1


def test_looks_that_fail_are_counted_and_tried_again(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    for number in range(3):
        with table.writer() as writer:
            writer.put(rows(10 * number, 10))
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    store.faults.fail("list")
    done: list[TaskOutcome] = []
    keeper = _keeper(store, done)
    try:
        wait_until(lambda: any(each.task.work is Work.COMPACT for each in done), "a look that does not fail")
    finally:
        keeper.stop()
    assert process_totals.by_table()[table.uri]["upkeep.look.failures"] >= 1
    assert table.status().uncompacted.count == 0


def test_upkeep_that_is_stopped_in_a_task_ends_with_it(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    for number in range(3):
        with table.writer() as writer:
            writer.put(rows(10 * number, 10))
    store = FaultyStore(ObjectStore.from_uri(table.uri, fsync=False))
    done: list[TaskOutcome] = []
    with store.faults.pause("put", where="upkeep/compact") as pause:
        keeper = _keeper(store, done)
        pause.wait_until_reached()
        stopping = threading.Thread(target=keeper.stop)
        stopping.start()
        wait_until(lambda: keeper._worker.stopping)
        pause.release()
        stopping.join()
    assert not running()
    # It had not begun: nothing is half done, and the next one does it.
    assert [str(each.task.work) for each in done] == ["compact"]
    assert table.status().uncompacted.count == 3
    assert table.upkeep(QUICK).ok


def test_puts_do_not_wait_for_upkeep(tmp_path: Path) -> None:
    """While a compaction stands still with its rows in hand, others go in, are read, and are flushed."""
    table = wal_table(tmp_path / "t", upkeep=QUICK)
    reached, go_on = threading.Event(), threading.Event()

    def stand_still(point: str) -> None:
        if point == "merge: rows are read":
            reached.set()
            go_on.wait(PATIENCE)

    done: list[TaskOutcome] = []
    at_crash_points(stand_still)
    try:
        with table.writer() as writer:
            for number in range(3):
                writer.put(rows(10 * number, 10))
                writer.flush()
            keeper = _keeper(ObjectStore.from_uri(table.uri, fsync=False), done)
            assert reached.wait(PATIENCE)
            writer.put(rows(100, 10))
            writer.flush()
            assert len(table.scan().to_table()) == 40
            assert not done
            go_on.set()
            wait_until(lambda: done)
            keeper.stop()
    finally:
        go_on.set()
        at_crash_points(None)
    assert len(table.scan().to_table()) == 40


_FORKS = """
import lancewal, os, pyarrow as pa, sys, threading
table = lancewal.open(sys.argv[1])
writer = table.writer(upkeep=True)
writer.put(pa.table({"id": [1], "name": ["a"]}))
child = os.fork()
if child == 0:
    try:
        writer.close()
        names = [each.name for each in threading.enumerate()]
        os._exit(0 if "lancewal-upkeep" not in names else 3)
    except BaseException:
        os._exit(4)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
writer.put(pa.table({"id": [2], "name": ["b"]}))
writer.close()
sys.exit(code)
"""


def test_a_forked_child_has_no_upkeep(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", upkeep=QUICK)
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", _FORKS, table.uri], check=False)
    assert done.returncode == 0
    assert ids(table.scan().to_table()) == [1, 2]


@pytest.mark.parametrize("ends", ["sys.exit()", "raise SystemExit(0)", "pass"])
def test_a_program_that_ends_without_close_ends(tmp_path: Path, ends: str) -> None:
    table = wal_table(tmp_path / "t", upkeep=QUICK)
    code = (
        "import lancewal, pyarrow as pa, sys\n"
        f"writer = lancewal.open({table.uri!r}).writer(upkeep=True)\n"
        "writer.put(pa.table({'id': [1], 'name': ['a']}))\n"
        f"{ends}\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, env=dict(os.environ), timeout=PATIENCE)
    assert done.returncode == 0
    assert ids(table.scan().to_table()) == [1]
