"""asyncio: many coroutines, one thread, few calls; local and remote alike."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import BusyError, ClosedError, ForkedError, InvalidInputError, StorageError
from lancewal.gateway import Gateway, aio, gathering
from lancewal.gateway.aio import AsyncTable, AsyncWriter
from lancewal.gateway.gathering import Turnout
from tests.patience import PATIENCE, wait_until
from tests.tables import APPEND_ONLY, fast, ids, rows, wal_table


@pytest.fixture(params=["local", "remote"])
def table(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AsyncTable]:
    local = wal_table(tmp_path / "table", APPEND_ONLY, bucket=("id", 2))
    if request.param == "local":
        yield AsyncTable(local)
        return
    with Gateway({"table": local}) as gateway, lancewal.connect(gateway.address, timeout=PATIENCE) as remote:
        yield AsyncTable(remote)


def some(start: int, count: int = 1) -> pa.RecordBatch:
    return rows(start, count, schema=APPEND_ONLY)


def test_a_thousand_coroutines_put_with_one_thread(table: AsyncTable) -> None:
    async def run() -> list[int]:
        before = threading.active_count()
        async with table.writer() as writer:
            done = await asyncio.gather(*(writer.put(some(number)) for number in range(1000)))
            assert done == [1] * 1000
            named = [thread.name for thread in threading.enumerate()]
            assert named.count("lancewal-async-write") == 1
            assert threading.active_count() < before + 100
        return ids(await table.scan())

    assert asyncio.run(run()) == list(range(1000))


def test_waiting_puts_go_together() -> None:
    calls: list[int] = []
    first_is_under_way, go = threading.Event(), threading.Event()

    class Slow:
        def put(self, data: Any) -> Any:
            calls.append(len(data))
            first_is_under_way.set()
            assert go.wait(30)
            return lancewal.TableWriteResult(sum(batch.num_rows for batch in data), {})

        def delete(self, keys: Any) -> Any:
            raise AssertionError

        def close(self) -> None:
            calls.append(-1)

    async def run() -> None:
        async with AsyncWriter(Slow) as writer:
            first = asyncio.create_task(writer.put(some(0)))
            while not first_is_under_way.is_set():
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(writer.put(some(number))) for number in range(1, 50)]
            await asyncio.sleep(0)
            go.set()
            assert await first == 1
            assert await asyncio.gather(*others) == [1] * 49

    asyncio.run(run())
    assert calls == [1, 49, -1]


class Gated:
    """A writer whose calls wait until they may end; it notes how many puts each call has."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.may_end = threading.Semaphore(0)

    def batches(self, data: Any) -> Any:
        raise AssertionError

    def put(self, data: Any) -> Any:
        self.calls.append(len(data))
        assert self.may_end.acquire(timeout=PATIENCE)
        return lancewal.TableWriteResult(sum(batch.num_rows for batch in data), {})

    def delete(self, keys: Any = None, *, where: str | None = None) -> Any:
        raise AssertionError

    update = delete

    def close(self) -> None: ...


def test_coroutines_of_one_call_hear_its_outcome_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    writer, told = Gated(), []
    tell = aio._tell
    monkeypatch.setattr(aio, "_tell", lambda settled: (told.append(len(settled)), tell(settled)))

    async def run() -> None:
        async with AsyncWriter(lambda: writer) as puts:
            first = asyncio.create_task(puts.put(some(0)))
            while not writer.calls:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(puts.put(some(number))) for number in range(1, 50)]
            await asyncio.sleep(0)
            writer.may_end.release(2)
            assert await asyncio.gather(first, *others) == [1] * 50

    asyncio.run(run())
    assert told == [1, 49]


def test_a_call_waits_for_the_coroutines_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "_GATHER_SHARE", 1e6)  # the wait ends because all have come
    monkeypatch.setattr(gathering, "_LONG", 1e6)
    writer = Gated()

    async def client(puts: AsyncWriter, number: int) -> None:
        with contextlib.suppress(ClosedError):
            while True:
                await puts.put(some(number))
                await asyncio.sleep(0.002 * number)

    async def run() -> None:
        async with AsyncWriter(lambda: writer) as puts:
            clients = [asyncio.create_task(client(puts, number)) for number in range(8)]
            deadline = time.monotonic() + PATIENCE
            while writer.calls[-3:] != [8, 8, 8] and time.monotonic() < deadline:
                writer.may_end.release()
                await asyncio.sleep(0.02)
            writer.may_end.release(100)
        await asyncio.gather(*clients)

    asyncio.run(run())
    assert [8, 8, 8] in [writer.calls[at : at + 3] for at in range(len(writer.calls))]


def test_a_call_waits_for_no_coroutine_that_does_not_put_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turnout = Turnout()
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=100.0)
    monkeypatch.setattr(gathering, "time", clock)
    assert turnout.seconds_left(1) == 0, "a lone put is written at once"
    turnout.note(16, 2, 0.010)
    assert turnout.expected == 18
    assert turnout.seconds_left(17) == pytest.approx(0.005)
    assert turnout.seconds_left(18) == 0
    clock.now += 0.006
    assert turnout.seconds_left(1) == 0
    turnout.note(3, 0, 5.0)  # an outage says nothing about who puts next
    assert turnout.seconds_left(1) == 0


#: A row that looks like the others until its values are looked at.
NO_ID = pa.RecordBatch.from_arrays([pa.array([None], pa.int64()), pa.array(["x"])], schema=APPEND_ONLY)


def test_a_refused_put_fails_alone(table: AsyncTable) -> None:
    async def run() -> list[Any]:
        async with table.writer() as writer:
            wrong = pa.record_batch({"id": pa.array([None], pa.int64()), "name": ["x"]})
            wrong = wrong.cast(APPEND_ONLY.set(0, APPEND_ONLY.field(0).with_nullable(True)))
            puts = [
                writer.put(wrong.cast(wrong.schema) if number == 7 else some(number)) for number in range(20)
            ]
            return await asyncio.gather(*puts, return_exceptions=True)

    outcomes = asyncio.run(run())
    assert isinstance(outcomes[7], InvalidInputError)
    assert [each for number, each in enumerate(outcomes) if number != 7] == [1] * 19


def test_puts_of_one_coroutine_keep_their_order(tmp_path: Path) -> None:
    table = AsyncTable(wal_table(tmp_path / "table"))

    async def run() -> Any:
        async with table.writer() as writer:
            for turn in range(30):
                await writer.put(rows(1, 1, prefix=str(turn)))
            await writer.delete(2)
            assert await table.lookup(2) is None
            return await table.lookup(1)

    assert asyncio.run(run())["name"] == "29_1"


def test_reads_and_batches(table: AsyncTable) -> None:
    async def run() -> tuple[int, int]:
        async with table.writer() as writer:
            await writer.put(some(0, 50))
            await table.flush()
            assert await table.count_rows("id < 10") == 10
            assert await table.status()
            return await table.count_rows(), sum([batch.num_rows async for batch in table.batches()])

    assert asyncio.run(run()) == (50, 50)


def test_after_close_nothing_is_taken(table: AsyncTable) -> None:
    async def run() -> None:
        writer = table.writer()
        await writer.put(some(0))
        await writer.close()
        await writer.close()
        with pytest.raises(ClosedError):
            await writer.put(some(1))

    asyncio.run(run())


def test_a_writer_that_cannot_be_opened_tells_every_put() -> None:
    def fails() -> Any:
        raise InvalidInputError("no table here")

    async def run() -> list[Any]:
        async with AsyncWriter(fails) as writer:
            return await asyncio.gather(*(writer.put(some(n)) for n in range(5)), return_exceptions=True)

    assert [str(each) for each in asyncio.run(run())] == ["no table here"] * 5


class Panic(BaseException):
    """What a library in Rust raises when it panics: it is no ``Exception``."""


def test_puts_waited_for_ever_after_a_panic_while_their_writer_was_opened() -> None:
    def panics() -> Any:
        raise Panic("no table here")

    async def run() -> list[Any]:
        async with AsyncWriter(panics) as writer:
            together = await asyncio.gather(*(writer.put(some(n)) for n in range(2)), return_exceptions=True)
            return [*together, *await asyncio.gather(writer.put(some(2)), return_exceptions=True)]

    assert [type(each) for each in asyncio.run(run())] == [Panic] * 3


def test_a_cancelled_coroutine_disturbs_nobody(table: AsyncTable) -> None:
    async def run() -> list[int]:
        async with table.writer() as writer:
            tasks = [asyncio.create_task(writer.put(some(number))) for number in range(50)]
            await asyncio.sleep(0)
            for task in tasks[::5]:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        found = ids(await table.scan())
        assert {number for number in range(50) if number % 5} <= set(found)
        assert len(found) == len(set(found))
        return found

    asyncio.run(run())


def test_puts_of_cancelled_coroutines_stayed_in_line_and_were_written_long_after() -> None:
    writer = Gated()
    in_line: list[int] = []

    async def run() -> None:
        async with AsyncWriter(lambda: writer) as puts:
            first = asyncio.create_task(puts.put(some(0)))
            while not writer.calls:
                await asyncio.sleep(0.001)
            others = [asyncio.create_task(puts.put(some(number))) for number in range(1, 50)]
            await asyncio.sleep(0)
            in_line.append(len(puts._line._waiting))
            for each in others:
                each.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            in_line.append(len(puts._line._waiting))
            writer.may_end.release(100)
            assert await first == 1
            assert await puts.put(some(50)) == 1

    asyncio.run(run())
    assert in_line == [49, 0]
    assert writer.calls == [1, 1]


def test_a_writer_whose_waiting_coroutines_were_all_cancelled_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While its thread waits a moment for more of them."""
    monkeypatch.setattr(gathering, "_LONG", 10.0)
    writer = Gated()
    writer.may_end.release(100)

    async def run() -> None:
        async with AsyncWriter(lambda: writer) as puts:
            for number in range(3):
                puts._line._turnout.note(2, 0, 0.2)
                put = asyncio.create_task(puts.put(some(number)))
                while puts._line._wanted == 1 and not put.done():
                    await asyncio.sleep(0.001)
                put.cancel()
                await asyncio.sleep(0.2)
            assert await puts.put(some(3)) == 1

    asyncio.run(run())


def test_a_writer_that_was_closed_while_it_was_opened_stayed_open() -> None:
    begun, go = threading.Event(), threading.Event()
    closed: list[bool] = []

    class Slow(Gated):
        def batches(self, data: Any) -> Any:
            return [some(0)]

        def close(self) -> None:
            closed.append(True)

    def opened() -> Slow:
        begun.set()
        assert go.wait(PATIENCE)
        return Slow()

    async def run() -> None:
        writer = AsyncWriter(opened)
        put = asyncio.create_task(writer.put({"id": 0}))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        closing = asyncio.create_task(writer.close())
        await asyncio.sleep(0)
        go.set()
        await closing
        with pytest.raises(ClosedError):
            await put
        with pytest.raises(ClosedError):
            await writer.put({"id": 1})

    asyncio.run(run())
    assert closed == [True]


def test_a_forked_child_waited_for_a_lock_that_a_thread_of_its_parent_held(tmp_path: Path) -> None:
    writer = AsyncTable(wal_table(tmp_path / "table")).writer()
    with writer._line._opening:
        child = os.fork()
        if not child:
            code = 1
            try:
                asyncio.new_event_loop().run_until_complete(asyncio.wait_for(writer.put({"id": 1}), 30))
            except ForkedError:
                code = 0
            finally:
                os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_rows_of_a_put_that_failed_stayed_in_memory_until_the_garbage_collector_came() -> None:
    class Failing(Gated):
        def put(self, data: Any) -> Any:
            raise StorageError("no")

    async def run(writer: AsyncWriter) -> None:
        freed = weakref.ref(data := Rows([some(0)]))
        with pytest.raises(StorageError):
            await writer._submit("put", data, data[0].schema, 1, 8)
        del data
        while freed() is not None:  # the thread that writes lets go of them a moment later
            await asyncio.sleep(0.001)

    async def main() -> None:
        async with AsyncWriter(Failing) as writer:
            gc.disable()
            try:
                await asyncio.wait_for(run(writer), PATIENCE)
            finally:
                gc.enable()

    asyncio.run(main())


class Rows(list[pa.RecordBatch]):
    """Rows that can be referred to weakly."""


def test_rows_of_python_go_together_and_their_vectors_are_rounded(tmp_path: Path) -> None:
    first = [{"id": 0, "vector": [0.5, 1.0]}]
    table = lancewal.create(tmp_path / "t", first, key="id", writer_defaults=fast())

    async def main() -> int:
        async with AsyncTable(table).writer() as writer:
            await asyncio.gather(*(writer.put({"id": n, "vector": [0.1, n]}) for n in range(1, 20)))
            with pytest.raises(InvalidInputError, match="column id, row 0"):
                await writer.put({"id": "x"})
        async with AsyncTable(table).writer() as writer:
            with pytest.raises(InvalidInputError, match="no column nope"):
                await writer.put({"nope": 1})
        return await AsyncTable(table).count_rows()

    assert asyncio.run(main()) == 20
    assert table.lookup(7) == {"id": 7, "vector": [pytest.approx(0.1), 7.0]}
    assert table.owners() == [], "the writers were closed"


def test_search_finds_the_words_of_rows_just_put(table: AsyncTable) -> None:
    async def run() -> tuple[list[int], list[int]]:
        async with table.writer() as writer:
            await writer.put([{"id": 1, "name": "red fox"}, {"id": 2, "name": "blue hen"}])
            one, batch = await asyncio.gather(table.search("fox"), table.search(["hen", "fox"]))
            return one["id"].to_pylist(), batch["id"].to_pylist()

    assert asyncio.run(run()) == ([1], [2, 1])


def test_a_put_that_found_no_thread_left_all_later_ones_waiting_for_it(
    table: AsyncTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> list[int]:
        async with table.writer() as writer:
            with monkeypatch.context() as limits:
                limits.setattr(threading.Thread, "start", _no_thread)
                with pytest.raises(BusyError, match="nothing was written"):
                    await writer.put(some(0))
            assert await writer.put(some(1)) == 1
        return ids(await table.scan())

    assert asyncio.run(run()) == [1]


def _no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_reads_of_a_closed_table_said_that_futures_cannot_be_scheduled(table: AsyncTable) -> None:
    table.close()
    with pytest.raises(ClosedError):
        asyncio.run(table.count_rows())


@pytest.mark.parametrize("remote", [False, True])
def test_a_writer_that_was_dropped_without_close_kept_its_thread_and_its_shards(
    tmp_path: Path, remote: bool
) -> None:
    local = wal_table(tmp_path / "table")

    def writing() -> list[str]:
        return [each.name for each in threading.enumerate() if each.name == "lancewal-async-write"]

    async def put_and_forget(table: lancewal.Table | lancewal.RemoteTable) -> None:
        with contextlib.closing(AsyncTable(table)) as events:
            await events.writer().put(rows(0, 3))

    with contextlib.ExitStack() as stack:
        table: lancewal.Table | lancewal.RemoteTable = local
        if remote:
            gateway = stack.enter_context(lancewal.Gateway({"t": local}))
            table = stack.enter_context(lancewal.connect(gateway.address))
        asyncio.run(put_and_forget(table))
        wait_until(lambda: gc.collect() >= 0 and not writing())
        wait_until(lambda: remote or not local.owners())
    assert local.count_rows() == 3
