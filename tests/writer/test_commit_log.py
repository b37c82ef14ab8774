from __future__ import annotations

import gc
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
import pytest

from lancewal.errors import FencedError, InvalidInputError, LanceWalError, StorageError
from lancewal.memtable import MemTable
from lancewal.shard import WalAppender, WalTailer
from lancewal.storage import ObjectStore
from lancewal.writer import WriteStats
from lancewal.writer.group_commit import CommitLog, Put
from lancewal.writer.intake import Rows
from lancewal.writer.shard_writer import Durability
from lancewal.writer.state import WriterState
from tests.faults import FaultyStore
from tests.patience import PATIENCE, wait_until


def batch(value: int, count: int = 1) -> pa.RecordBatch:
    return pa.record_batch({"id": [value] * count})


class Memory:
    """Stands for a MemTable, and tells which entries its rows went to."""

    def __init__(self, generation: int, fixture: Fixture) -> None:
        self.generation = generation
        self.fixture = fixture
        #: WAL positions, each with what was durable when the MemTable was told.
        self.told: list[tuple[int, int]] = []

    @property
    def covered_wal_position(self) -> int:
        return self.told[-1][0] if self.told else 0

    @covered_wal_position.setter
    def covered_wal_position(self, position: int) -> None:
        self.told.append((position, self.fixture.log.durable_position))


class Mode:
    """Queues the rows of a put for whoever leads, after ``before``, which may raise."""

    def __init__(self, fixture: Fixture, before: Callable[[], object], queues: bool = True) -> None:
        self.fixture = fixture
        self.before = before
        self.queues = queues

    def insert(self, put: Put) -> None:
        self.before()
        if self.queues:
            self.fixture.log.enqueue(put, self.fixture.memtable(1))


class Fixture:
    def __init__(self, store: ObjectStore, max_entry_bytes: int = 1 << 20) -> None:
        self.store = FaultyStore(store)
        self.shard = uuid.uuid4()
        self.appender = WalAppender.open(self.store, self.shard)
        self.stats = WriteStats()
        self.state = WriterState(self.shard, self.appender.epoch)
        self.log = CommitLog(
            self.appender, self.state, self.stats, max_entry_bytes, sleep=lambda seconds: None
        )
        self.memtables: dict[int, Memory] = {}
        self._order = threading.Lock()

    def memtable(self, generation: int) -> MemTable:
        return self.memtables.setdefault(generation, Memory(generation, self))  # type: ignore[return-value]

    def enqueue(self, value: int, generation: int = 1, count: int = 1, batches: int = 1) -> int:
        put = Put(Rows.of([batch(value, count)] * batches), None)  # type: ignore[arg-type]
        with self._order:
            self.log.enqueue(put, self.memtable(generation))
        return put.end_position

    def put(self, value: int, before: Callable[[], object] = lambda: None, *, queues: bool = True) -> range:
        """A put whose rows are to be queued by whoever leads."""
        put = Put(Rows.of([batch(value)]), Mode(self, before, queues))
        with put.present:
            self.log.commit_put(put)
        return put.positions

    def wait_for_puts(self, number: int) -> None:
        wait_until(lambda: len(self.log._arrived) >= number, "the puts")

    def entries(self) -> list[list[int]]:
        tailer = WalTailer(self.store, self.shard)
        return [[v for b in e.batches for v in b.column("id").to_pylist()] for e in tailer]


@pytest.fixture
def fixture(memory_store: ObjectStore) -> Fixture:
    return Fixture(memory_store)


def test_rows_are_not_durable_before_a_commit(fixture: Fixture) -> None:
    end = fixture.enqueue(1)
    durability = Durability(fixture.log, end)
    assert not durability.done()
    assert fixture.log.pending_batches == 1
    assert durability.wait(PATIENCE)
    assert durability.done()
    assert fixture.log.pending_batches == 0
    assert fixture.log.pending_bytes == 0
    assert fixture.entries() == [[1]]


def test_one_commit_makes_everything_queued_durable_in_one_entry(fixture: Fixture) -> None:
    first = fixture.enqueue(1)
    fixture.enqueue(2)
    fixture.enqueue(3)
    fixture.log.commit(first)
    assert fixture.entries() == [[1, 2, 3]]
    assert fixture.stats.snapshot().avg_group_size() == 3.0


def test_an_entry_never_spans_two_generations(fixture: Fixture) -> None:
    fixture.enqueue(1, generation=1)
    fixture.enqueue(2, generation=1)
    fixture.enqueue(3, generation=2)
    fixture.log.commit_all()
    assert fixture.entries() == [[1, 2], [3]]
    tailer = WalTailer(fixture.store, fixture.shard)
    assert [entry.generation for entry in tailer] == [1, 2]


def test_a_group_is_split_by_size_but_a_put_never(memory_store: ObjectStore) -> None:
    fixture = Fixture(memory_store, max_entry_bytes=4 * 8)
    fixture.enqueue(1, count=3)
    fixture.enqueue(2, count=3)
    fixture.enqueue(3, count=100)
    fixture.log.commit_all()
    assert [len(values) for values in fixture.entries()] == [3, 3, 100]


def test_waiting_threads_share_an_entry(fixture: Fixture) -> None:
    """While the leader is inside its write, all others queue up and become one group."""
    with fixture.store.faults.pause("put_if_absent", where="/wal/") as pause:
        leader = threading.Thread(target=fixture.log.commit, args=(fixture.enqueue(0),))
        leader.start()
        pause.wait_until_reached()
        others = [
            threading.Thread(target=fixture.log.commit, args=(fixture.enqueue(i),)) for i in range(1, 9)
        ]
        for thread in others:
            thread.start()
    for thread in [leader, *others]:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    groups = fixture.entries()
    assert groups[0] == [0]
    assert [value for group in groups for value in group] == list(range(9))
    assert len(groups) < 9, "nobody shared an entry"


def test_many_threads_all_get_through_in_order(fixture: Fixture) -> None:
    acknowledged: list[int] = []
    lock = threading.Lock()

    def work(base: int) -> None:
        for i in range(50):
            value = base + i
            fixture.log.commit(fixture.enqueue(value))
            with lock:
                acknowledged.append(value)

    threads = [threading.Thread(target=work, args=(n * 1000,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a waiter was never woken"
    stored = [value for group in fixture.entries() for value in group]
    assert sorted(stored) == sorted(acknowledged)
    assert len(stored) == len(set(stored)) == 400
    for base in range(0, 8000, 1000):
        mine = [value for value in stored if base <= value < base + 1000]
        assert mine == sorted(mine), "one thread's rows changed order"


def test_a_failed_wal_put_leaves_no_hole_and_latches(fixture: Fixture) -> None:
    """A write that keeps failing ends the writer; nothing may follow what is missing."""
    fixture.log.commit(fixture.enqueue(1))
    fixture.store.faults.fail("put_if_absent", times=None, where="/wal/")
    lost = fixture.enqueue(2)
    with pytest.raises(StorageError, match="injected"):
        fixture.log.commit(lost)
    fixture.store.faults.clear()
    with pytest.raises(StorageError, match="injected"):
        fixture.log.commit(fixture.enqueue(3))
    assert fixture.entries() == [[1]]
    assert isinstance(fixture.state.ended.failure, StorageError)
    assert fixture.state.ended.poisoned


def test_a_passing_fault_is_ridden_out(fixture: Fixture) -> None:
    fixture.store.faults.fail("put_if_absent", times=2, where="/wal/")
    fixture.log.commit(fixture.enqueue(1))
    assert fixture.entries() == [[1]]


def test_a_lost_reply_of_the_own_write_is_not_taken_for_a_rival(fixture: Fixture) -> None:
    fixture.store.faults.fail("put_if_absent", after=True, where="/wal/")
    fixture.log.commit(fixture.enqueue(1))
    fixture.log.commit(fixture.enqueue(2))
    assert fixture.entries() == [[1], [2]]


def test_an_error_reaches_every_waiter(fixture: Fixture) -> None:
    errors: list[BaseException] = []

    def wait(end: int) -> None:
        try:
            fixture.log.commit(end)
        except LanceWalError as error:
            errors.append(error)

    with fixture.store.faults.pause("put_if_absent", where="/wal/") as pause:
        leader = threading.Thread(target=wait, args=(fixture.enqueue(0),))
        leader.start()
        pause.wait_until_reached()
        others = [threading.Thread(target=wait, args=(fixture.enqueue(i),)) for i in range(1, 5)]
        for thread in others:
            thread.start()
        while len(fixture.log._line) < 4:
            time.sleep(0.001)
        # A successor takes the shard while the leader is stalled inside its write.
        WalAppender.open(fixture.store, fixture.shard)
    for thread in [leader, *others]:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert [type(error) for error in errors] == [FencedError] * 5
    assert len({id(error) for error in errors}) == 5, "each thread needs an error object of its own"


def test_wait_gives_up_after_its_timeout_and_the_commit_goes_on(fixture: Fixture) -> None:
    with fixture.store.faults.pause("put_if_absent", where="/wal/") as pause:
        leader = threading.Thread(target=fixture.log.commit, args=(fixture.enqueue(0),))
        leader.start()
        pause.wait_until_reached()
        late = Durability(fixture.log, fixture.enqueue(1))
        assert late.wait(0.01) is False
        assert not late.done()
    leader.join(PATIENCE)
    assert late.wait(PATIENCE)
    assert fixture.entries() == [[0], [1]]


def test_an_interrupted_leader_leaves_its_rows_to_the_next(fixture: Fixture) -> None:
    """Ctrl-C inside the write, after the entry landed: the next leader must recognise it."""
    end = fixture.enqueue(1)
    fixture.store.faults.fail("put_if_absent", after=True, error=KeyboardInterrupt(), where="/wal/")
    with pytest.raises(KeyboardInterrupt):
        fixture.log.commit(end)
    assert fixture.state.ended.log_failure is None
    fixture.log.commit(fixture.enqueue(2))
    assert fixture.entries() == [[1], [2]]


def test_fail_wakes_those_who_wait(fixture: Fixture) -> None:
    fixture.log.fail(StorageError("closed for good"), memory_ahead_of_log=False)
    with pytest.raises(StorageError, match="closed for good"):
        fixture.log.commit(fixture.enqueue(1))


def test_a_memtable_knows_its_last_entry_before_its_rows_count_as_durable(fixture: Fixture) -> None:
    """A flush publishes that position once it finds the rows durable: a lower one would replay them again."""
    ends = []
    for i in range(2):
        fixture.enqueue(i, batches=2)
        fixture.log.commit_all()
        ends.append(fixture.log.durable_position)
    assert ends == [2, 4]
    assert fixture.memtables[1].told == [(1, 0), (2, 2)]


class TestPutsThatTheLeaderTakesIn:
    def test_positions_are_returned_once_the_rows_are_durable(self, fixture: Fixture) -> None:
        assert fixture.put(1) == range(1)
        assert fixture.put(2) == range(1, 2)
        assert fixture.log.durable_position == 2
        assert fixture.entries() == [[1], [2]]

    def test_one_leader_takes_in_the_rows_of_all_who_wait(self, fixture: Fixture) -> None:
        callers: list[int] = []
        results: dict[int, range] = {}

        def put(value: int) -> None:
            results[value] = fixture.put(value, before=lambda: callers.append(threading.get_ident()))

        with waiting_puts(fixture, put, [1, 2, 3, 4]):
            assert callers == callers[:1], "rows were taken in while an entry was being written"
        assert len(set(callers[1:])) == 1
        assert [sorted(values) for values in fixture.entries()] == [[0], [1, 2, 3, 4]]
        positions = sorted(results.values(), key=lambda positions: positions.start)
        assert positions == [range(i, i + 1) for i in range(5)]

    def test_a_put_that_is_refused_fails_alone(self, fixture: Fixture) -> None:
        outcomes: dict[int, object] = {}

        def put(value: int) -> None:
            def refuse_odd() -> None:
                if value % 2:
                    raise InvalidInputError(f"{value} is odd")

            try:
                outcomes[value] = fixture.put(value, before=refuse_odd)
            except InvalidInputError as error:
                outcomes[value] = str(error)

        with waiting_puts(fixture, put, [1, 2, 3, 4, 5]):
            assert outcomes == {}
        assert {value: outcomes[value] for value in (1, 3, 5)} == {v: f"{v} is odd" for v in (1, 3, 5)}
        assert sorted(value for values in fixture.entries() for value in values) == [0, 2, 4]
        assert fixture.state.ended.log_failure is None

    def test_refused_puts_alone_write_nothing(self, fixture: Fixture) -> None:
        def refuse() -> None:
            raise InvalidInputError("no")

        for _ in range(3):
            with pytest.raises(InvalidInputError, match="no"):
                fixture.put(0, before=refuse)
        assert fixture.entries() == []
        assert fixture.put(1) == range(1)

    def test_a_put_without_rows_is_an_error_and_no_endless_wait(self, fixture: Fixture) -> None:
        with pytest.raises(StorageError, match="none of its rows"):
            fixture.put(1, queues=False)

    def test_a_leader_that_goes_on_lets_those_go_that_it_has_served(self, memory_store: ObjectStore) -> None:
        """They waited until the leader's own rows, several entries later, were written too."""
        fixture = Fixture(memory_store, max_entry_bytes=8)
        first = fixture.enqueue(1)
        last = fixture.enqueue(2)
        with fixture.store.faults.pause("put_if_absent", where="/wal/", nth=1) as one:
            leader = threading.Thread(target=fixture.log.commit, args=(last,))
            leader.start()
            one.wait_until_reached()
            served = threading.Thread(target=fixture.log.commit, args=(first,))
            served.start()
            while not fixture.log._line:
                time.sleep(0.001)
            with fixture.store.faults.pause("put_if_absent", where="/wal/", nth=1) as two:
                one.release()
                two.wait_until_reached()
                served.join(PATIENCE)
                assert not served.is_alive()
                assert leader.is_alive()
        leader.join(PATIENCE)
        assert fixture.entries() == [[1], [2]]

    def test_nothing_is_taken_in_once_the_log_has_failed(self, fixture: Fixture) -> None:
        taken: list[int] = []
        errors: list[str] = []

        def put(value: int) -> None:
            try:
                fixture.put(value, before=lambda: taken.append(value))
            except StorageError as error:
                errors.append(str(error))

        with waiting_puts(fixture, put, [1, 2, 3]):
            fixture.log.fail(StorageError("closed for good"), memory_ahead_of_log=False)
        assert taken == [0]
        assert errors == ["closed for good"] * 3
        assert not fixture.log._arrived

    def test_a_put_keeps_nothing_alive(self, fixture: Fixture) -> None:
        """The log kept the last put, and so its rows and the writer itself."""

        def put(kept: list[weakref.ref[pa.RecordBatch]], *, refused: bool) -> None:
            def insert() -> None:
                if refused:
                    raise InvalidInputError("refused")

            one = Put(Rows.of([batch(1)]), Mode(fixture, insert))
            kept.append(weakref.ref(one.rows.batches[0]))
            with suppress(InvalidInputError), one.present:
                fixture.log.commit_put(one)

        put([], refused=False)  # which looks for the log's end, and so is not like the others
        gc.disable()
        try:
            for refused in (False, True):
                kept: list[weakref.ref[pa.RecordBatch]] = []
                put(kept, refused=refused)
                assert kept[0]() is None
        finally:
            gc.enable()

    def test_a_refusal_that_is_kept_does_not_keep_the_rows_of_others(self, fixture: Fixture) -> None:
        """The error's frames were the leader's, which held the other puts."""
        refusals: list[Exception] = []
        others: list[weakref.ref[pa.RecordBatch]] = []

        def put(value: int) -> None:
            def refuse_two() -> None:
                if value == 2:
                    raise InvalidInputError("refused")

            one = Put(Rows.of([batch(value)]), Mode(fixture, refuse_two))
            if value != 2:
                others.append(weakref.ref(one.rows.batches[0]))
            try:
                with one.present:
                    fixture.log.commit_put(one)
            except InvalidInputError as error:
                refusals.append(error)

        fixture.put(9)
        with waiting_puts(fixture, put, [1, 2, 3]):
            assert refusals == []
        gc.collect()
        assert len(refusals) == 1
        assert [kept() for kept in others] == [None] * 3


@contextmanager
def waiting_puts(fixture: Fixture, put: Callable[[int], None], values: list[int]) -> Iterator[None]:
    """``put(0)`` is inside its write, and ``put`` of all ``values`` waits, until the block ends."""
    with fixture.store.faults.pause("put_if_absent", where="/wal/") as pause:
        threads = [threading.Thread(target=put, args=(0,))]
        threads[0].start()
        pause.wait_until_reached()
        for count, value in enumerate(values, start=1):
            threads.append(threading.Thread(target=put, args=(value,)))
            threads[-1].start()
            fixture.wait_for_puts(count)
        yield
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "a waiter was never woken"


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert {t for t in set(threading.enumerate()) - before if "cursor" not in t.name} == set()
