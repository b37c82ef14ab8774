"""Who writes: records, heartbeats, and a shard that changes hands only when its owner is gone."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest

import lancewal
from lancewal.base import BaseTable
from lancewal.errors import (
    FencedError,
    InvalidInputError,
    OutcomeUnknownError,
    PartialWriteError,
    ShardOwnedError,
    StorageError,
)
from lancewal.format import decode_record, encode_record
from lancewal.service import delete_through_owners
from lancewal.service import owners as module
from lancewal.service.owners import Owner, is_dead_here, read_owners, runs_here, wait_until_gone
from lancewal.service.presence import _FAREWELLS, _Heart, _heart, presence_at
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore, Pause
from tests.patience import wait_until
from tests.servers import S3Server
from tests.service.child import LEASE, WritingProcess
from tests.tables import APPEND_ONLY, FAST_DEFAULTS, KEYED, ids, new_table, open_writer, rows, wal_table

SHORT = timedelta(seconds=LEASE)


def until(condition: Callable[[], Any]) -> Any:
    """Wait for progress, for as long as it takes."""
    while not (found := condition()):
        time.sleep(0.02)
    return found


def owner_of(error: pytest.ExceptionInfo[PartialWriteError]) -> ShardOwnedError:
    (failure,) = error.value.failed.values()
    assert isinstance(failure, ShardOwnedError)
    return failure


@pytest.fixture
def one(tmp_path: Path) -> lancewal.Table:
    """A table with one shard."""
    return wal_table(tmp_path / "table", writer_defaults=FAST_DEFAULTS)


@pytest.fixture(params=["local", "s3"])
def anywhere(request: pytest.FixtureRequest, tmp_path: Path) -> lancewal.Table:
    if request.param == "local":
        return wal_table(tmp_path / "table", writer_defaults=FAST_DEFAULTS)
    s3: S3Server = request.getfixturevalue("s3")
    uri = s3.uri(f"{uuid4().hex}/table")
    new_table(uri, KEYED, storage_options=s3.storage_options)
    return lancewal.open(uri, s3.storage_options)


def forged(store: ObjectStore, shard_id: UUID, epoch: int, **changes: Any) -> str:
    """The record of an owner on another host that nobody has ever met."""
    owner_id = uuid4().hex[:16]
    record = {
        "owner": owner_id,
        "host": "elsewhere",
        "pid": 4711,
        "machine": "elsewhere/boot",
        "started": "1",
        "shards": {str(shard_id): epoch},
        "lease_seconds": LEASE,
        "address": None,
        "beat": 1,
        **changes,
    }
    store.put(layout.owner_record(owner_id), encode_record(record))
    return owner_id


def shard_of(table: lancewal.Table) -> UUID:
    return table.shard_for()


# ------------------------------------------------------------------ lives
# First of all: where these answers are wrong, other tests wait for leases of hours.


def _as_owner(pid: int, started: str, machine: str) -> Owner:
    now = datetime.now(UTC)
    return Owner("0" * 16, "host", pid, machine, started, {}, timedelta(1), None, now, now)


def test_an_owner_has_a_shard_until_another_claims_it() -> None:
    shard, other = UUID(int=1), UUID(int=2)
    owner = replace(_as_owner(os.getpid(), "1", "here"), shards={shard: 3, other: 0})
    assert owner.has(shard, 3)
    assert not owner.has(shard, 4)
    assert not owner.has(UUID(int=3), 1)
    assert not owner.has(other, 0)


def test_a_process_id_that_was_given_again_is_another_process() -> None:
    machine, started = module.machine(), module.started_at(os.getpid())
    assert started
    assert runs_here(_as_owner(os.getpid(), started, machine))
    assert is_dead_here(_as_owner(os.getpid(), "1", machine))
    assert not is_dead_here(_as_owner(os.getpid(), "1", "another container"))
    assert not runs_here(_as_owner(os.getpid(), started, "another container"))
    assert not is_dead_here(_as_owner(10**30, "1", machine))


def test_a_child_that_has_ended_is_dead_and_one_that_was_stopped_is_not() -> None:
    machine = module.machine()
    process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    started = module.started_at(process.pid)
    assert started
    child = _as_owner(process.pid, started, machine)
    try:
        assert runs_here(child)
        process.send_signal(signal.SIGSTOP)
        until(lambda: not runs_here(child))
        assert not is_dead_here(child)
    finally:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        is_dead_while_linux_knows_its_number = is_dead_here(child)
        process.wait()
    assert is_dead_while_linux_knows_its_number
    assert is_dead_here(child)


# ------------------------------------------------------------------ records


def test_a_process_that_writes_says_so_until_it_closes(anywhere: lancewal.Table) -> None:
    assert anywhere.owners() == []
    with anywhere.writer() as writer:
        writer.put(rows(0, 3))
        (owner,) = until(anywhere.owners)
        ((shard, epoch),) = owner.shards.items()
        assert (owner.pid, owner.gone, epoch) == (os.getpid(), False, anywhere.shards()[0].epoch)
        assert shard == anywhere.shards()[0].shard_id
        assert owner.age < owner.lease
        assert owner.address is None
        assert anywhere.status().owners[0].owner_id == owner.owner_id
        assert anywhere.status().to_dict()["owners"][0]["pid"] == os.getpid()
    assert anywhere.owners() == []


def test_one_record_names_all_shards_of_a_process(table: lancewal.Table) -> None:
    with table.writer() as writer, table.writer() as other:
        writer.put(rows(0, 100))
        first = len(writer.shard_writers)
        assert first > 1
        (owner,) = until(lambda: [each for each in table.owners() if len(each.shards) == first])
        assert owner.shards == {shard: each.epoch for shard, each in writer.shard_writers.items()}
        other.close()
        assert len(table.owners()) == 1
    assert table.owners() == []


def test_a_heartbeat_costs_one_write_and_nothing_for_each_shard(table: lancewal.Table) -> None:
    written: list[str] = []
    store = table._store
    counting = ObjectStore.from_uri(store.uri, fsync=False)
    put = counting.put

    def counted(path: str, data: Any, *, durable: bool = True) -> None:
        written.append(path)
        put(path, data, durable=durable)

    counting.put = counted  # type: ignore[method-assign]
    with table.writer() as writer:
        writer.put(rows(0, 100))
        presence = presence_at(table.uri)
        until(lambda: presence._is_stored)
        presence._store = counting
        for _ in range(5):
            presence.beat()
        records = [path for path in written if path == layout.owner_record(presence.owner_id)]
        assert 5 <= len(records) <= 6  # the timed one may come in between
        assert len(written) == len(records)


def test_the_interval_derives_from_the_lease(one: lancewal.Table) -> None:
    with one.writer(owner_lease=timedelta(seconds=30)) as writer:
        writer.put(rows(0, 1))
        assert presence_at(one.uri).interval == 10
    with pytest.raises(InvalidInputError, match="owner_lease must be above zero"):
        one.writer(owner_lease=timedelta(0))


def test_heartbeats_go_on_after_a_failure_and_are_counted(one: lancewal.Table) -> None:
    with one.writer(owner_lease=SHORT) as writer:
        writer.put(rows(0, 1))
        presence = presence_at(one.uri)
        until(lambda: presence._is_stored)
        store = presence.store
        broken = ObjectStore.from_uri("memory://no-such-place")

        def fail(*args: Any, **kwargs: Any) -> None:
            raise StorageError("no")

        broken.put = fail  # type: ignore[method-assign, assignment]
        presence._store = broken
        until(lambda: presence.failures >= 2)
        presence._store = store
        before = one.owners()[0].last_beat
        until(lambda: one.owners()[0].last_beat > before)
        writer.put(rows(1, 1))
    assert one.count_rows() == 2


def test_a_record_on_a_storage_that_is_gone_was_taken_back_for_ever(one: lancewal.Table) -> None:
    presence = presence_at(one.uri)
    with one.writer(owner_lease=SHORT) as writer:
        writer.put(rows(0, 1))
        until(lambda: presence._is_stored)
        broken = ObjectStore.from_uri("memory://no-such-place")

        def fail(*args: Any, **kwargs: Any) -> None:
            raise StorageError("gone for good")

        broken.delete = broken.put = fail  # type: ignore[method-assign, assignment]
        presence._store = broken
        until(lambda: presence.failures > 2 * _FAREWELLS)
        assert presence.is_needed()  # while a shard is held it goes on trying
    until(lambda: not presence.is_needed())


def test_a_table_that_was_opened_while_the_storage_of_another_hung_had_no_heartbeat(
    local_store: ObjectStore,
) -> None:
    heart = _Heart()
    hanging, hangs = heart.presence("memory://hanging"), threading.Event()
    answer = threading.Event()
    silent = ObjectStore.from_uri("memory://hanging")

    def hang(*args: Any, **kwargs: Any) -> None:
        hangs.set()
        answer.wait()

    try:
        hanging.announce(ObjectStore.from_uri("memory://hanging"), "somewhere")
        silent.put = hang  # type: ignore[method-assign, assignment]
        hanging._store, hanging._lease = silent, SHORT
        hanging._schedule()
        assert hangs.wait(60)
        other = heart.presence(local_store.uri)
        other._lease = SHORT
        other.announce(local_store, "elsewhere")
        wait_until(lambda: other._beats >= 3, "heartbeats at the table that was opened last")
    finally:
        answer.set()
        for each in (hanging, other):
            each.announce(local_store, None)


def test_a_shard_whose_log_took_long_to_replay_was_taken_for_left(one: lancewal.Table) -> None:
    """Between the claim and the open writer there was no heartbeat."""
    shard, presence = shard_of(one), presence_at(one.uri)
    presence.claimed(shard, one._store, SHORT, 7)
    try:
        [owner] = one.owners()
        wait_until(
            lambda: one.owners()[0].last_beat > owner.last_beat, "a heartbeat while the log is replayed"
        )
        assert one.owners()[0].shards == {shard: 7}
    finally:
        presence.give_up(shard)
    assert one.owners() == []


def test_tables_that_nobody_writes_to_any_more_were_kept_in_mind_for_ever(one: lancewal.Table) -> None:
    uri = one.uri.rstrip("/")
    with one.writer(owner_lease=SHORT) as writer:
        writer.put(rows(0, 1))
        held = presence_at(uri).owner_id
        gc.collect()
        assert presence_at(uri).owner_id == held
    del writer
    one.status()
    wait_until(lambda: gc.collect() >= 0 and uri not in _heart._presences)
    assert one.count_rows() == 1


def test_the_heartbeat_thread_ends_with_the_last_writer(one: lancewal.Table) -> None:
    def beating() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name == "lancewal-heartbeat"]

    with one.writer(owner_lease=timedelta(seconds=0.3)) as writer:
        writer.put(rows(0, 1))
        until(beating)
        assert all(t.daemon for t in threading.enumerate() if t.name == "lancewal-heartbeat")
    until(lambda: not beating())


def test_garbage_collection_removes_records_of_the_long_dead_only(one: lancewal.Table) -> None:
    shard = shard_of(one)
    dead = forged(one._store, shard, 1)
    path = one._store.local_path(layout.owner_record(dead))
    assert path is not None
    os.utime(path, (0, 0))
    living = forged(one._store, shard, 1)
    assert [each.name for each in one.gc(dry_run=True).collected] == [layout.owner_record(dead)]
    one.gc()
    assert [each.owner_id for each in read_owners(one._store)] == [living]


# ------------------------------------------------------------------ taking over


def test_a_second_process_is_refused_while_the_owner_lives(anywhere: lancewal.Table) -> None:
    with WritingProcess(anywhere) as owner:
        assert owner.ask("put", start=0, count=3) == {"done": 3}
        until(lambda: [each for each in anywhere.owners() if each.shards])
        with anywhere.writer() as writer:
            with pytest.raises(PartialWriteError) as error:
                writer.put(rows(3, 3))
            refusal = owner_of(error)
            assert refusal.pid == owner.pid
            assert str(refusal.pid) in str(refusal)
            # It was not disturbed.
            assert owner.ask("put", start=6, count=1) == {"done": 1}
            assert owner.ask("close") == {"done": None}
            # It has handed over, and the same writer goes on.
            writer.put(rows(3, 3))
    assert ids(anywhere.scan().to_table()) == [0, 1, 2, 3, 4, 5, 6]


def test_a_killed_owner_on_this_host_is_replaced_at_once(one: lancewal.Table) -> None:
    with WritingProcess(one, lease=600) as owner:
        owner.ask("put", start=0, count=3)
        until(lambda: [each for each in one.owners() if each.shards])
        os.kill(owner.pid, signal.SIGKILL)
        until(lambda: one.owners()[0].gone)  # before it is waited for: a zombie is dead
        with one.writer() as writer:
            writer.put(rows(3, 1))
            until(lambda: [each.pid for each in one.owners()] == [os.getpid()])
    assert ids(one.scan().to_table()) == [0, 1, 2, 3]


def test_a_stalled_owner_is_replaced_after_its_lease_and_never_writes_again(one: lancewal.Table) -> None:
    with WritingProcess(one) as owner:
        owner.ask("put", start=0, count=3)
        until(lambda: [each for each in one.owners() if each.shards])
        owner.signal(signal.SIGSTOP)
        until(lambda: (module._stat(owner.pid) or "?")[0] == "T")
        with one.writer(owner_lease=SHORT) as writer:
            writer.put(rows(3, 1))
            owner.signal(signal.SIGCONT)
            assert owner.ask("put", start=100, count=1)["error"] in ("FencedError", "ShardOwnedError")
            writer.put(rows(4, 1))
    assert ids(one.scan().to_table()) == [0, 1, 2, 3, 4]


def test_an_owner_elsewhere_that_is_not_heard_of_is_waited_for(anywhere: lancewal.Table) -> None:
    shard = shard_of(anywhere)
    forged(anywhere._store, shard, 1)
    with anywhere.writer(owner_lease=SHORT) as writer:
        writer.put(rows(0, 1))
        assert until(lambda: [each.pid for each in anywhere.owners()] == [os.getpid()])


def test_a_hand_over_of_one_shard_deleted_the_record_of_an_owner_that_has_others(
    one: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waited for the shard took its owner for gone, and the next comer saw nobody in the others."""
    shard, other = shard_of(one), uuid4()
    owner_id = forged(one._store, shard, 1, shards={str(shard): 1, str(other): 1}, lease_seconds=600)
    path = layout.owner_record(owner_id)
    record = decode_record(one._store.get(path))

    def let_go(seconds: float) -> None:
        one._store.put(path, encode_record({**record, "shards": {str(other): 1}}))

    monkeypatch.setattr(module.time, "sleep", let_go)
    (owner,) = one.owners()
    assert not wait_until_gone(one._store, owner, shard)
    monkeypatch.undo()
    with one.writer(owner_lease=SHORT) as writer:
        writer.put(rows(0, 1))
        beats = presence_at(one.uri)._beats
        until(lambda: presence_at(one.uri)._beats > beats + 1)
        assert {each.owner_id for each in one.owners()} >= {owner_id}


def test_an_owner_elsewhere_that_is_heard_of_meanwhile_is_left_alone(one: lancewal.Table) -> None:
    shard = shard_of(one)
    owner_id = forged(one._store, shard, 1, lease_seconds=600, address="grpc://elsewhere:1")
    path, stop = layout.owner_record(owner_id), threading.Event()
    data = one._store.get(path)

    def beat() -> None:
        while not stop.wait(0.05):
            one._store.put(path, data)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with one.writer() as writer:
            with pytest.raises(PartialWriteError) as error:
                writer.put(rows(0, 1))
            refusal = owner_of(error)
            assert (refusal.host, refusal.pid, refusal.address) == ("elsewhere", 4711, "grpc://elsewhere:1")
            assert "connect to grpc://elsewhere:1" in str(refusal)
    finally:
        stop.set()
        thread.join()
    assert one.shards()[0].epoch == 0


def test_a_shard_is_taken_by_force_only_when_asked(one: lancewal.Table) -> None:
    with WritingProcess(one, lease=600) as owner:
        owner.ask("put", start=0, count=3)
        until(lambda: [each for each in one.owners() if each.shards])
        with one.writer(take_over="never") as careful, pytest.raises(PartialWriteError, match="never"):
            careful.put(rows(3, 1))
        with one.writer(take_over="now") as writer:
            writer.put(rows(3, 1))
            assert "error" in owner.ask("put", start=4, count=1)
        owner.kill()
        forged(one._store, shard_of(one), 99)
        with one.writer(take_over="never") as careful, pytest.raises(PartialWriteError, match="gone"):
            careful.put(rows(3, 1))
    with pytest.raises(InvalidInputError, match="when_gone"):
        one.writer(take_over="perhaps")  # type: ignore[arg-type]


def test_never_leaves_a_shard_alone_whose_owner_died_on_this_host(one: lancewal.Table) -> None:
    with WritingProcess(one, lease=600) as owner:
        owner.ask("put", start=0, count=3)
        until(lambda: [each for each in one.owners() if each.shards])
        owner.kill()
        with (
            one.writer(take_over="never") as careful,
            pytest.raises(PartialWriteError, match="or gone"),
        ):
            careful.put(rows(3, 1))
        with one.writer() as writer:
            writer.put(rows(3, 1))


def test_a_second_writer_of_the_same_process_is_refused_too(one: lancewal.Table) -> None:
    with one.writer() as first, one.writer() as second:
        first.put(rows(0, 1))
        with pytest.raises(PartialWriteError) as error:
            second.put(rows(1, 1))
        assert owner_of(error).pid == os.getpid()
        assert "this process" in str(owner_of(error))
        first.put(rows(2, 1))
        with pytest.raises(ShardOwnedError):
            one.shard_writer(shard_of(one))
        with one.shard_writer(shard_of(one), take_over="now") as third:
            third.put(rows(3, 1))
            with pytest.raises((PartialWriteError, FencedError)):
                first.put(rows(4, 1))
    with one.writer() as last:
        last.put(rows(5, 1))
    assert ids(one.scan().to_table()) == [0, 2, 3, 5]


def test_a_writer_that_was_dropped_or_failed_holds_nothing(one: lancewal.Table) -> None:
    writer = one.shard_writer(shard_of(one))
    writer.put(rows(0, 1))
    writer._finalizer()
    with one.writer() as again:
        again.put(rows(1, 1))
    assert ids(one.scan().to_table()) == [0, 1]


# ------------------------------------------------------------------ coming back


def test_a_writer_that_was_taken_for_gone_comes_back_when_the_other_one_is(one: lancewal.Table) -> None:
    with WritingProcess(one, lease=600) as other, one.writer() as writer:
        writer.put(rows(0, 1))
        with pytest.MonkeyPatch.context() as patch:
            # The other one cannot see that this process lives.
            patch.setattr("lancewal.service.presence.Presence.shards", lambda self: {})
            presence_at(one.uri).beat()
            assert other.ask("put", start=1, count=1) == {"done": 1}
        until(lambda: other.pid in [each.pid for each in one.owners()])
        with pytest.raises(PartialWriteError) as error:
            writer.put(rows(2, 1))
        assert owner_of(error).pid == other.pid
        other.ask("close")
        writer.put(rows(3, 1))
    assert ids(one.scan().to_table()) == [0, 1, 3]


def lost(one: lancewal.Table) -> None:
    """Somebody without a record takes the shard and lets it go."""
    open_writer(BaseTable.open(one.uri), shard_of(one)).close()


def test_a_put_that_finds_the_shard_lost_waits_and_is_written_once(one: lancewal.Table) -> None:
    with one.writer() as writer:
        writer.put(rows(0, 1))
        lost(one)
        writer.put(rows(1, 1))
        assert writer.flush() is None
    assert ids(one.scan().to_table()) == [0, 1]


def test_a_writer_comes_back_once_within_a_lease(one: lancewal.Table) -> None:
    with one.writer(owner_lease=timedelta(hours=1)) as writer:
        writer.put(rows(0, 1))
        lost(one)
        writer.put(rows(1, 1))
        lost(one)
        with pytest.raises(PartialWriteError) as error:
            writer.put(rows(2, 1))
        (failure,) = error.value.failed.values()
        assert isinstance(failure, FencedError)
    assert ids(one.scan().to_table()) == [0, 1]


def test_rows_that_are_lost_with_the_shard_are_told(one: lancewal.Table) -> None:
    """Without durable_write what was acknowledged may be in memory alone: no silent coming back."""
    writer = one.writer(durable_write=False, max_wal_flush_interval=None)
    result = writer.put(rows(0, 1))
    lost(one)
    with pytest.raises(FencedError):
        result.wait()
    with pytest.raises(PartialWriteError) as error:
        writer.put(rows(1, 1))
    (failure,) = error.value.failed.values()
    assert isinstance(failure, FencedError)
    with pytest.raises(PartialWriteError):
        writer.close()


def test_a_row_that_may_be_in_the_log_is_not_written_twice_without_a_key(tmp_path: Path) -> None:
    """The storage stores the entry, loses its reply, and another claims the shard before the next try."""
    uri = tmp_path / "table"
    wal_table(uri, APPEND_ONLY, writer_defaults=FAST_DEFAULTS)
    store = FaultyStore(ObjectStore.from_uri(uri, fsync=False))
    table = lancewal.Table.open(uri, store=store)
    with table.writer() as writer:
        writer.put(rows(0, 1, schema=APPEND_ONLY))

        def lose_reply_and_shard() -> OutcomeUnknownError:
            lost(table)
            return OutcomeUnknownError("the reply was lost")

        where = layout.wal_dir(shard_of(table))
        store.faults.fail("put_if_absent", after=True, where=where, error=lose_reply_and_shard)
        with pytest.raises(PartialWriteError) as error:
            writer.put(rows(1, 1, schema=APPEND_ONLY))
        (failure,) = error.value.failed.values()
        assert isinstance(failure, FencedError)
        assert failure.may_be_written
        writer.put(rows(2, 1, schema=APPEND_ONLY))
    assert ids(table.scan().to_table()) == [0, 1, 2]


# ------------------------------------------------------------------ safety without records


@pytest.mark.parametrize("how", ["deleted", "damaged", "future", "past"])
def test_records_are_courtesy_and_the_epoch_is_safety(one: lancewal.Table, how: str) -> None:
    """Whatever becomes of the records, one of two processes writes, and nothing acknowledged is lost."""
    with WritingProcess(one, lease=600, take_over="now") as other:
        acknowledged = set(other.ask("fill", start=0, count=5)["done"])
        (owner,) = until(lambda: [each for each in one.owners() if each.shards])
        path = layout.owner_record(owner.owner_id)
        local = one._store.local_path(path)
        assert local is not None
        if how == "deleted":
            one._store.delete(path)
        elif how == "damaged":
            one._store.put(path, b'{"owner": 1')
        else:
            stamp = time.time() + (10**8 if how == "future" else -(10**8))
            os.utime(local, (stamp, stamp))
        with one.writer(take_over="now" if how == "future" else "when_gone") as writer:
            writer.put(rows(100, 5))
            refused = other.ask("put", start=50, count=1)
            assert "error" in refused
            writer.put(rows(105, 5))
    found = set(ids(one.scan().to_table()))
    assert found == acknowledged | set(range(100, 110))


def test_a_record_from_the_future_holds_a_shard_for_a_lease_at_most(one: lancewal.Table) -> None:
    owner_id = forged(one._store, shard_of(one), 1, lease_seconds=1.0)
    path = one._store.local_path(layout.owner_record(owner_id))
    assert path is not None
    os.utime(path, (time.time() + 10**8,) * 2)
    with one.writer() as writer:
        writer.put(rows(0, 1))


def test_a_record_that_asks_for_a_century_is_not_believed(one: lancewal.Table) -> None:
    forged(one._store, shard_of(one), 1, lease_seconds=3e9)
    assert one.owners()[0].lease == timedelta(minutes=10)


def test_an_owner_of_an_earlier_epoch_holds_nothing(one: lancewal.Table) -> None:
    with one.writer() as writer:
        writer.put(rows(0, 1))
    earlier = one.shards()[0].epoch
    forged(one._store, shard_of(one), earlier - 1, lease_seconds=600)
    with one.writer() as writer:
        writer.put(rows(1, 1))
        assert one.shards()[0].epoch > earlier


def test_owners_that_cannot_be_listed_stop_nobody(
    one: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> list[Owner]:
        raise StorageError("no permission")

    monkeypatch.setattr("lancewal.service.presence.read_owners", fail)
    with one.writer() as writer:
        writer.put(rows(0, 1))
    assert one.count_rows() == 1


def test_ages_do_not_depend_on_this_machines_clock(
    one: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    forged(one._store, shard_of(one), 1, lease_seconds=60)
    monkeypatch.setattr(module.time, "time", lambda: 10.0**9)
    (owner,) = one.owners()
    assert owner.age < timedelta(seconds=30)
    assert not owner.gone


# ------------------------------------------------------------------ processes


def test_a_forked_child_says_nothing(one: lancewal.Table) -> None:
    with one.writer(owner_lease=SHORT) as writer:
        writer.put(rows(0, 1))
        (owner,) = until(one.owners)
        pid = os.fork()
        if pid == 0:
            presence = presence_at(one.uri)
            os._exit(0 if presence.owner_id != owner.owner_id and not presence.is_needed() else 1)
        assert os.waitpid(pid, 0)[1] == 0
        until(lambda: one.owners()[0].last_beat > owner.last_beat)
        assert [each.owner_id for each in one.owners()] == [owner.owner_id]


def test_a_process_that_does_not_close_is_not_kept_alive(one: lancewal.Table) -> None:
    with WritingProcess(one) as owner:
        owner.ask("put", start=0, count=1)
        process = owner._process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == 0


def test_a_heart_in_which_nothing_was_due_yet_died(local_store: ObjectStore) -> None:
    """While a process opened its first shard: it slept for ever, which no lock can, and never beat again."""
    heart = _Heart()
    presence = heart.presence(local_store.uri)
    presence.claimed(UUID(int=1), local_store, timedelta(seconds=10), epoch=1)
    try:
        assert presence.is_needed()
        pause = heart._step()
        assert pause is not None
        assert pause <= presence.interval
    finally:
        presence.give_up(UUID(int=1))


# ------------------------------------------------------------------ closing


@pytest.fixture
def closing(one: lancewal.Table) -> Iterator[tuple[lancewal.Table, Pause]]:
    """A table whose writer is being closed: its last flush waits for the storage."""
    store = FaultyStore(ObjectStore.from_uri(one.uri))
    table = lancewal.Table.open(one.uri, store=store)
    writer = table.writer(owner_lease=SHORT)
    writer.put(rows(0, 10))
    with store.faults.pause("put_if_absent", where="manifest") as pause:
        thread = threading.Thread(target=writer.close)
        thread.start()
        pause.wait_until_reached()
        yield table, pause
        pause.release()
        thread.join()
    assert ids(table.scan().to_table()) == list(range(10))


def test_a_writer_that_took_long_to_close_had_lost_its_shard_with_the_next_heartbeat(
    closing: tuple[lancewal.Table, Pause],
) -> None:
    table, _ = closing
    presence_at(table.uri).beat()
    [owner] = table.owners()
    assert shard_of(table) in owner.shards


@pytest.mark.parametrize(
    "other",
    [
        lambda table: table.flush(),
        lambda table: table.shard_writer(shard_of(table)).close(),
        lambda table: delete_through_owners(BaseTable.open(table.uri), table._store, [[99]]),
    ],
    ids=["flush", "writer", "load"],
)
def test_a_writer_was_fenced_by_its_own_process_while_it_was_closed(
    closing: tuple[lancewal.Table, Pause], other: Callable[[lancewal.Table], Any]
) -> None:
    table, pause = closing
    epoch = table.shards()[0].epoch
    thread = threading.Thread(target=other, args=[table])
    thread.start()
    thread.join(0.5)  # long enough to do harm
    assert table.shards()[0].epoch == epoch
    pause.release()
    thread.join()


def test_a_request_that_came_while_the_shard_was_closed_fenced_its_owner(
    closing: tuple[lancewal.Table, Pause],
) -> None:
    table, pause = closing
    epoch = table.shards()[0].epoch
    presence = presence_at(table.uri)
    presence.beat()
    with WritingProcess(table) as other:
        other.send({"do": "flush"})

        def names() -> list[str]:
            return [info.path for info in table._store.list(layout.owner_dir(presence.owner_id))]

        until(lambda: any(name.endswith(".asked") for name in names()) and presence.serving.locked())
        assert not any(name.endswith(".answered") for name in names())
        pause.release()
        assert other.answer() == {"done": None}
    assert table.shards()[0].epoch == epoch
