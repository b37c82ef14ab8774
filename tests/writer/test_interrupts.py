"""Ctrl-C at every line of the write path: nothing is doubled or halved, and nobody hangs.

An interrupt is raised before the n-th line that a call runs inside the writer's modules,
for every n until the call gets through.
"""

from __future__ import annotations

import dis
import gc
import json
import linecache
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import lance
import pytest

import lancewal.shard.log
import lancewal.storage.parallel
import lancewal.writer.flush
import lancewal.writer.group_commit
import lancewal.writer.shard_writer
import lancewal.writer.state
import lancewal.writer.table_writer
from lancewal.base.table import BaseTable
from lancewal.errors import StorageError
from lancewal.writer import ShardWriter
from tests.patience import PATIENCE
from tests.shards import wal_entries
from tests.tables import APPEND_ONLY, KEYED, abandon, ids, new_table, open_writer, rows

WRITER_FILES = str(Path(lancewal.writer.__file__).parent)
COMMIT_LOG_FILE = lancewal.writer.group_commit.__file__
SHARD_WRITER_FILE = lancewal.writer.shard_writer.__file__
WRITER_STATE_FILE = lancewal.writer.state.__file__
APPENDER_FILE = lancewal.shard.log.__file__
TABLE_WRITER_FILE = lancewal.writer.table_writer.__file__
PARALLEL_FILE = lancewal.storage.parallel.__file__


class InterruptAtLine:
    """Raises KeyboardInterrupt in this thread, before the ``nth`` line that runs in ``files``."""

    def __init__(self, nth: int, *files: str) -> None:
        self._left = nth
        self._files = files
        self.raised = False

    def __enter__(self) -> InterruptAtLine:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        return self._at_line if frame.f_code.co_filename.startswith(self._files) else None

    def _at_line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and not self.raised and not _no_signal_here(frame):
            self._left -= 1
            if self._left == 0:
                self.raised = True
                raise KeyboardInterrupt
        return self._at_line


def _no_signal_here(frame: FrameType) -> bool:
    """Whether the line only ends a block. No signal is handled between a block's last call and
    the release of its lock, but a trace function is called there."""
    operation = dis.opname[frame.f_code.co_code[frame.f_lasti]]
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
    return operation == "NOP" or (line.startswith("with ") and not operation.startswith("LOAD_FAST"))


def interrupt_everywhere(attempt: Callable[[InterruptAtLine], None], *files: str) -> int:
    """Run ``attempt`` with an interrupt at line 1, 2, 3… until it gets through; how many there were."""
    nth = 1
    while True:
        interrupt = InterruptAtLine(nth, *files)
        attempt(interrupt)
        if not interrupt.raised:
            return nth - 1
        nth += 1


@pytest.fixture
def base(tmp_path: Path) -> BaseTable:
    return new_table(tmp_path / "t", APPEND_ONLY)


def batch(number: int, count: int = 2) -> list[Any]:
    """One put of two record batches, so that half of it can be told from all of it."""
    return [rows(number * 10 + i, 1, schema=APPEND_ONLY) for i in range(count)]


def check_whole(found: list[int], acknowledged: list[int], attempted: list[int]) -> None:
    counts = Counter(found)
    for number in attempted:
        copies = [counts.pop(number * 10 + i, 0) for i in range(2)]
        allowed = [[1, 1]] if number in acknowledged else [[1, 1], [0, 0]]
        assert copies in allowed, f"put {number}: copies of its rows are {copies}"
    assert not counts


def without_flush(writer: ShardWriter) -> ShardWriter:
    """Rows stay in the WAL, so that what was written can be counted there."""

    def fail(memtable: object) -> None:
        raise StorageError("no flush in this test")

    writer._mode._flushes._write_sstable = fail  # type: ignore[attr-defined]
    return writer


class Puts:
    """Numbered puts, and which of them were acknowledged."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self.attempted: list[int] = []
        self.acknowledged: list[int] = []

    def __call__(self, number: int) -> None:
        self.attempted.append(number)
        self._writer.put(batch(number))
        self.acknowledged.append(number)

    def check(self, found: list[int]) -> None:
        check_whole(found, self.acknowledged, self.attempted)


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("memtable", [True, False])
def test_an_interrupted_put_is_there_whole_or_not_at_all(
    base: BaseTable, durable: bool, memtable: bool
) -> None:
    """The entry was written, the interrupt came before that was noted, and the next put wrote it again."""
    usable = 0

    def attempt(interrupt: InterruptAtLine) -> None:
        nonlocal usable
        shard = uuid.uuid4()
        writer = open_writer(
            base,
            shard,
            enable_memtable=memtable,
            durable_write=durable,
            max_wal_flush_interval=None,
            max_memtable_batches=4,
        )
        put = Puts(without_flush(writer) if memtable else writer)
        put(0)
        try:
            with interrupt:
                put(1)  # which fills the MemTable
        except KeyboardInterrupt:
            assert interrupt.raised
        ended = ""
        try:
            put(2)
            put(3)
            writer._log.commit_all()
            usable += 1
        except StorageError as error:
            ended = str(error)
            put.acknowledged = put.acknowledged if durable else []
        assert not ended or "open a new writer" in ended
        abandon(writer)
        put.check([i for entry in wal_entries(base, shard) for b in entry.batches for i in ids(b)])

    lines = interrupt_everywhere(attempt, WRITER_FILES, APPENDER_FILE)
    assert lines > 20
    assert usable > lines * 0.6, "an interrupt should rarely end the writer"


def test_an_interrupted_put_leaves_no_other_thread_asleep(base: BaseTable) -> None:
    """The interrupted thread led the group commit, and nobody took the lead over."""

    def attempt(interrupt: InterruptAtLine) -> None:
        shard = uuid.uuid4()
        writer = without_flush(open_writer(base, shard, max_memtable_batches=6))
        put = Puts(writer)
        start = threading.Barrier(3)

        def work(first: int) -> None:
            start.wait(PATIENCE)
            with suppress(StorageError):  # the interrupt may have ended the writer
                for number in range(first, first + 3):
                    put(number)

        threads = [threading.Thread(target=work, args=(first,), daemon=True) for first in (10, 20)]
        for thread in threads:
            thread.start()
        start.wait(PATIENCE)
        with suppress(KeyboardInterrupt), interrupt:
            put(1)
        for thread in threads:
            thread.join(PATIENCE)
            assert not thread.is_alive(), "a waiter was never woken"
        with suppress(StorageError):
            put(2)
        abandon(writer)
        put.check([i for entry in wal_entries(base, shard) for b in entry.batches for i in ids(b)])

    assert interrupt_everywhere(attempt, COMMIT_LOG_FILE) > 20


@pytest.mark.parametrize("memtable", [True, False])
def test_an_interrupted_leader_leaves_the_puts_of_others_whole(base: BaseTable, memtable: bool) -> None:
    """It had taken in the rows of another put, but not said so: the next leader took them in again.

    And a put that is interrupted while it stands in line has no effect.
    """
    withdrawn = 0

    def attempt(interrupt: InterruptAtLine) -> None:
        nonlocal withdrawn
        shard = uuid.uuid4()
        writer = open_writer(base, shard, enable_memtable=memtable, max_memtable_batches=100)
        put = Puts(without_flush(writer) if memtable else writer)
        held, in_write = threading.Event(), threading.Event()
        append = writer._log._appender.append_encoded

        def hold(data: memoryview) -> int:
            in_write.set()
            assert held.wait(PATIENCE)
            return append(data)

        writer._log._appender.append_encoded = hold  # type: ignore[method-assign]

        first = threading.Thread(target=_put, args=(put, 10), daemon=True)
        first.start()
        assert in_write.wait(PATIENCE)

        def follow() -> None:
            """The put that is interrupted is the next to lead; two more come behind it."""
            while not writer._log._arrived and not interrupt.raised:
                time.sleep(0.0005)
            more = [threading.Thread(target=_put, args=(put, n), daemon=True) for n in (20, 30)]
            for count, thread in enumerate(more, start=2):
                thread.start()
                while len(writer._log._arrived) < count and not interrupt.raised:
                    time.sleep(0.0005)
            held.set()
            for thread in more:
                thread.join(PATIENCE)
                alive.append(thread.is_alive())

        alive: list[bool] = []
        follower = threading.Thread(target=follow, daemon=True)
        follower.start()
        in_line = False
        try:
            with suppress(StorageError), interrupt:
                put(1)
        except KeyboardInterrupt:
            in_line = not held.is_set()
        follower.join(PATIENCE)
        first.join(PATIENCE)
        assert alive == [False, False], "a waiter was never woken"
        assert not first.is_alive()
        abandon(writer)
        found = [i for entry in wal_entries(base, shard) for b in entry.batches for i in ids(b)]
        put.check(found)
        if in_line:
            withdrawn += 1
            assert 10 not in found, "a put that had raised was taken in later"

    assert interrupt_everywhere(attempt, WRITER_FILES, APPENDER_FILE) > 60
    assert withdrawn > 10


def _put(put: Puts, number: int) -> None:
    with suppress(StorageError):  # the interrupt may have ended the writer
        put(number)


def test_an_interrupted_wait_for_durability_can_be_repeated(base: BaseTable) -> None:
    def attempt(interrupt: InterruptAtLine) -> None:
        shard = uuid.uuid4()
        writer = open_writer(base, shard, durable_write=False, max_wal_flush_interval=None)
        result = writer.put(batch(1))
        with suppress(KeyboardInterrupt), interrupt:
            result.durable.wait()
        assert result.durable.wait(PATIENCE)
        assert ids(writer.scan()) == [10, 11]
        abandon(writer)
        assert [i for entry in wal_entries(base, shard) for b in entry.batches for i in ids(b)] == [10, 11]

    assert interrupt_everywhere(attempt, WRITER_FILES, APPENDER_FILE) > 20


def test_an_interrupted_close_loses_nothing_and_leaves_no_thread(
    base: BaseTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kept error held the frames that it was raised through, and with them the dropped writer."""
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)

    def attempt(interrupt: InterruptAtLine) -> None:
        shard = uuid.uuid4()
        writer = without_flush(open_writer(base, shard))
        writer.put(batch(1))
        with suppress(KeyboardInterrupt, StorageError), interrupt:
            writer.close()
        with suppress(StorageError):
            writer.close()
        del writer
        gc.collect()
        assert not [thread for thread in threading.enumerate() if str(shard) in thread.name]
        with open_writer(base, shard) as again:
            assert ids(again.scan()) == [10, 11]
            abandon(again)
            again._state.closed = True

    assert interrupt_everywhere(attempt, SHARD_WRITER_FILE) > 10


@pytest.mark.parametrize("memtable", [True, False])
def test_an_interrupt_at_the_start_of_a_close_lost_rows_that_were_queued(
    base: BaseTable, memtable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer counted as closed, so the next close did nothing, and nobody wrote the queue."""
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)

    def attempt(interrupt: InterruptAtLine) -> None:
        shard = uuid.uuid4()
        settings = {"durable_write": False, "max_wal_flush_interval": None}
        writer = open_writer(base, shard, enable_memtable=memtable, **settings)
        if memtable:
            without_flush(writer)
        writer.put(batch(1))
        with suppress(KeyboardInterrupt, StorageError), interrupt:
            writer.close()
        with suppress(StorageError):
            writer.close()
        assert writer.closed
        assert [i for entry in wal_entries(base, shard) for b in entry.batches for i in ids(b)] == [10, 11]

    assert interrupt_everywhere(attempt, SHARD_WRITER_FILE, WRITER_STATE_FILE) > 10


# ---------------------------------------------------------------- real signals, real processes

LOOP = """
import faulthandler, json, random, signal, sys
import lancewal
from lancewal.errors import LanceWalError
from tests.tables import rows

uri, seed, durable = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "durable"
random.seed(seed)
table = lancewal.open(uri)
hits = 0

def interrupt(number, frame):
    global hits
    if frame.f_code.co_filename != "<string>":  # this script itself is not what is tested
        hits += 1
        raise KeyboardInterrupt

faulthandler.enable()
signal.signal(signal.SIGALRM, interrupt)
acknowledged, number, round_ = [], 0, 0
# On a busy machine a round has fewer of them.
while round_ < 40 or hits < 40:
    round_ += 1
    # A hang is told by who stands where, and ends the process.
    faulthandler.dump_traceback_later(100, exit=True)
    try:
        writer = table.writer(durable_write=durable, max_memtable_rows=200)
        # Again and again: an interrupt may also come while another is dealt with.
        signal.setitimer(signal.ITIMER_REAL, random.uniform(0.001, 0.03), random.choice([0.0004, 0.0007]))
        while True:
            number += 1
            result = writer.put(rows(number * 8, 8))
            if durable or result.done():
                acknowledged.append(number)
    except (KeyboardInterrupt, LanceWalError):
        pass  # an interrupt may end the writer, which then says so
    if round_ % 2:
        signal.setitimer(signal.ITIMER_REAL, 0)
    for _ in range(3):  # an interrupted close is completed by the next
        try:
            writer.close()
            break
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except LanceWalError:
            break  # an interrupt has ended it; what was durable is in the log
    signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps([hits, acknowledged]))
"""


@pytest.mark.parametrize("durable", ["durable", "in memory"])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ctrl_c_in_a_loop_of_puts_over_shards_hung_for_good(tmp_path: Path, seed: int, durable: str) -> None:
    """An interrupt inside a Condition or a thread pool left a lock locked, or a thread that never ran."""
    uri = tmp_path / "t"
    lance.write_dataset(KEYED.empty_table(), str(uri))
    table = lancewal.initialize(uri, bucket=("id", 8), writer_defaults={"fsync": "false"})
    done = subprocess.run(
        [sys.executable, "-c", LOOP, str(uri), str(seed), durable],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    hits, acknowledged = json.loads(done.stdout.splitlines()[-1])
    assert hits >= 40
    found = set(ids(table.scan(columns=["id"]).to_table()))
    assert not [number for number in acknowledged if not set(range(number * 8, number * 8 + 8)) <= found]
    assert table.verify().ok


@pytest.mark.parametrize("durable", [True, False])
def test_an_interrupted_put_over_several_shards_leaves_a_writer_that_closes(
    tmp_path: Path, durable: bool
) -> None:
    """At every line of the table writer and of what it waits with."""
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", bucket=("id", 3), writer_defaults={"fsync": "false"})
    written = 0

    def attempt(interrupt: InterruptAtLine) -> None:
        nonlocal written
        writer = table.writer(durable_write=durable)
        writer.put(rows(0, 6))
        with suppress(KeyboardInterrupt), interrupt:
            writer.put(rows(100, 6))
        # At once: nobody waits for what the interrupted put did not say.
        writer.put(rows(200, 6))
        writer.flush()
        written += 1
        writer.close()
        assert set(ids(table.scan().to_table())) >= {*range(6), *range(200, 206)}

    lines = interrupt_everywhere(attempt, TABLE_WRITER_FILE, PARALLEL_FILE)
    assert lines > 20
    assert written == lines + 1


def test_an_interrupted_close_of_several_shards_is_completed_by_the_next(tmp_path: Path) -> None:
    """The second close took the first one's word for it, and left shards open."""
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t", bucket=("id", 3), writer_defaults={"fsync": "false"})

    def attempt(interrupt: InterruptAtLine) -> None:
        writer = table.writer()
        writer.put(rows(0, 6))
        with suppress(KeyboardInterrupt), interrupt:
            writer.close()
        writer.close()
        assert all(each.closed for each in writer.shard_writers.values())

    assert interrupt_everywhere(attempt, TABLE_WRITER_FILE, PARALLEL_FILE) > 10
