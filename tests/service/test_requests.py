"""Requests to an owner: it flushes and adopts in its own order, exactly once, and nobody fences it."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any
from uuid import UUID

import pyarrow as pa
import pytest

import lancewal
from lancewal.base import BaseTable
from lancewal.cli.exits import TAKEN_OVER
from lancewal.errors import (
    InvalidInputError,
    OutcomeUnknownError,
    PartialWriteError,
    ShardOwnedError,
    StorageError,
)
from lancewal.format import encode_record
from lancewal.ingest import Ingestion, find_files
from lancewal.publish import (
    Adoption,
    ChangeFeed,
    Staged,
    StagedAge,
    Stager,
    Transaction,
    adopt_sstables,
)
from lancewal.publish.transactions import Run, TransactionLog
from lancewal.service import Owner, publish_through_owners
from lancewal.service import requests as requests_module
from lancewal.service.presence import presence_at
from lancewal.service.requests import flush_by_owners
from lancewal.shard import ShardRouter
from lancewal.shard.discovery import discover_manifests
from lancewal.storage import ObjectStore, layout
from lancewal.writer import Intake
from tests.cli.support import ok, run
from tests.faults import FaultyStore
from tests.service.child import WritingProcess
from tests.service.test_owners import anywhere, forged, one, shard_of, until  # noqa: F401
from tests.tables import FAST_DEFAULTS, ids, rows, wal_table, writable_table, write_parquet


def owned(table: lancewal.Table, process: WritingProcess) -> UUID:
    """Wait until the process is known to have the table's shard."""
    found = until(lambda: [each for each in table.owners() if each.pid == process.pid and each.shards])
    return next(iter(found[0].shards))


def staged(table: lancewal.Table, *batches: pa.RecordBatch) -> list[Staged]:
    base = BaseTable.open(table.uri, dict(table._store.storage_options))
    stager = Stager(base, table._store, ShardRouter.of_table(base, table._store))
    intake = Intake(base.schema)
    for batch in batches:
        for accepted in intake.shaped([batch]).batches:
            stager.add(accepted)
    return stager.finish()


def published(table: lancewal.Table, files: list[Staged], version: int = 0) -> list[Any]:
    base = BaseTable.open(table.uri, dict(table._store.storage_options))
    return publish_through_owners(base, table._store, files, Transaction("load", version))


def names(table: lancewal.Table) -> dict[int, str]:
    return {row["id"]: row["name"] for row in table.scan().to_table().to_pylist()}


def followed(table: lancewal.Table) -> dict[int, str]:
    """The table as somebody has it who applied the change feed in its order."""
    feed = ChangeFeed.open(table.uri)
    return {
        row["id"]: row["name"]
        for batch in feed.changes(feed.earliest(), feed.latest())
        for row in batch.to_pylist()
    }


# ------------------------------------------------------------------ flush


def test_a_flush_from_another_process_does_not_fence_the_owner(anywhere: lancewal.Table) -> None:  # noqa: F811
    with WritingProcess(anywhere) as owner:
        owner.ask("put", start=0, count=10)
        owned(anywhere, owner)
        epoch = anywhere.shards()[0].epoch
        anywhere.flush()
        (shard,) = anywhere.shards()
        assert (shard.epoch, shard.generations, shard.tail_length) == (epoch, (1,), 0)
        assert owner.ask("put", start=10, count=1) == {"done": 1}
    assert ids(anywhere.scan().to_table()) == list(range(11))


def test_a_flush_claims_only_when_the_owner_is_gone(one: lancewal.Table) -> None:  # noqa: F811
    with WritingProcess(one, lease=1) as owner:
        owner.ask("put", start=0, count=10)
        owned(one, owner)
        epoch = one.shards()[0].epoch
        owner.signal(signal.SIGSTOP)
        one.flush()
        assert one.shards()[0].epoch > epoch
        owner.signal(signal.SIGCONT)
        # Nobody has the shard any more: it comes back.
        assert owner.ask("put", start=10, count=1) == {"done": 1}
    assert ids(one.scan().to_table()) == list(range(11))


def test_a_flush_stopped_an_owner_whose_shard_had_nothing_to_flush(one: lancewal.Table) -> None:  # noqa: F811
    """Rows that the owner put while other shards were flushed had its shard drained by whoever flushed."""
    with one.writer() as writer:
        writer.put(rows(0, 1))
    (manifest,) = discover_manifests(one._store)
    assert flush_by_owners(one._store, [manifest]) == {}
    forged(one._store, manifest.shard_id, manifest.writer_epoch, lease_seconds=600)
    assert flush_by_owners(one._store, [manifest]) == {manifest.shard_id: 0}


def test_an_owner_that_stood_still_listed_sstables_that_were_collected(one: lancewal.Table) -> None:  # noqa: F811
    """Both before it begins, and between the pointer and the manifest, it looks how old they are by now."""
    with one.shard_writer(shard_of(one)) as writer:
        writer.put(rows(0, 1))
        files = staged(one, rows(1, 5))
        transaction = Transaction("load", 0)
        run = Run(0, sstables={shard_of(one): tuple(each.entry.path for each in files)})
        TransactionLog(one._store, transaction).start(run)
        entries = tuple(each.entry for each in files)
        old = Adoption(shard_of(one), entries, transaction, run.run_id, StagedAge(13 * 3600))
        with pytest.raises(InvalidInputError, match="hours ago"):
            adopt_sstables(writer, one._store, old)
        writer.put(rows(10, 1))  # it was refused, and nothing else
        young = Adoption(shard_of(one), entries, transaction, run.run_id, StagedAge(60))
        assert adopt_sstables(writer, one._store, young).rows == 5
    assert ids(one.scan().to_table()) == [0, 1, 2, 3, 4, 5, 10]


def test_sstables_that_no_run_has_announced_are_not_adopted(one: lancewal.Table) -> None:  # noqa: F811
    with one.shard_writer(shard_of(one)) as writer:
        writer.put(rows(0, 1))
        entries = tuple(each.entry for each in staged(one, rows(1, 5)))
        transaction = Transaction("load", 0)
        TransactionLog(one._store, transaction).start(run := Run(0, sstables={shard_of(one): ("another",)}))
        with pytest.raises(InvalidInputError, match="not announced"):
            adopt_sstables(
                writer, one._store, Adoption(shard_of(one), entries, transaction, run.run_id, StagedAge(0))
            )
    assert ids(one.scan().to_table()) == [0]


def test_a_fault_while_an_answer_was_waited_for_read_as_not_done(
    one: lancewal.Table,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(requests_module, "_ask", fails)
    files = staged(one, rows(1, 5))
    with one.writer() as writer:
        writer.put(rows(0, 1))
    (manifest,) = discover_manifests(one._store)
    forged(one._store, manifest.shard_id, manifest.writer_epoch, lease_seconds=600)
    with pytest.raises(PartialWriteError) as error:
        published(one, files)
    assert isinstance(error.value.failed[manifest.shard_id], OutcomeUnknownError)


def test_an_owner_that_cannot_flush_is_left_alone(one: lancewal.Table) -> None:  # noqa: F811
    with WritingProcess(one, enable_memtable=False) as owner:
        owner.ask("put", start=0, count=1)
        owned(one, owner)
        with pytest.raises(PartialWriteError) as error:
            one.flush()
        (failure,) = error.value.failed.values()
        assert isinstance(failure, ShardOwnedError)
        assert "WAL-only" in str(failure)
        assert owner.ask("put", start=1, count=1) == {"done": 1}


def test_a_table_without_owners_is_flushed_as_ever(one: lancewal.Table) -> None:  # noqa: F811
    writer = one.shard_writer(shard_of(one))
    writer.put(rows(0, 3))
    writer._finalizer()
    del writer
    one.flush()
    assert one.status().unflushed.count == 0
    assert one.count_rows() == 3


# ------------------------------------------------------------------ adopt


def test_an_owner_adopts_in_its_own_order(anywhere: lancewal.Table) -> None:  # noqa: F811
    """Older than what it takes afterwards, newer than what it acknowledged before."""
    with WritingProcess(anywhere) as owner:
        owner.ask("put", start=0, count=6, prefix="before")
        shard = owned(anywhere, owner)
        epoch = anywhere.shards()[0].epoch
        (write,) = published(anywhere, staged(anywhere, rows(2, 6, prefix="loaded")))
        assert (write.shard_id, write.rows, write.skipped) == (shard, 6, False)
        assert owner.ask("put", start=4, count=1, prefix="after") == {"done": 1}
        assert anywhere.shards()[0].epoch == epoch
        expected = {
            **{n: f"before_{n}" for n in range(2)},
            **{n: f"loaded_{n}" for n in range(2, 8)},
            4: "after_4",
        }
        assert names(anywhere) == expected
        assert owner.ask("close") == {"done": None}
    assert names(anywhere) == expected
    anywhere.compact()
    assert names(anywhere) == expected


def test_a_load_lands_once_however_often_it_is_sent(one: lancewal.Table) -> None:  # noqa: F811
    files = staged(one, rows(0, 3))
    with WritingProcess(one) as owner:
        owner.ask("put", start=10, count=1)
        owned(one, owner)
        assert [each.skipped for each in published(one, files)] == [False]
        assert published(one, files) == []
        (shard,) = one.shards()
        assert len(shard.generations) == 2
    assert ids(one.scan().to_table()) == [0, 1, 2, 10]


def test_an_owner_is_asked_again_for_what_it_has_done_and_does_nothing(
    one: lancewal.Table,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever asked was killed before it could record that all shards have the load."""

    def killed(*args: Any) -> None:
        raise OutcomeUnknownError("killed")

    files = staged(one, rows(0, 3))
    with WritingProcess(one) as owner:
        owner.ask("put", start=10, count=1)
        owned(one, owner)
        with monkeypatch.context() as patch:
            patch.setattr("lancewal.publish.transactions.TransactionLog.finish", killed)
            with pytest.raises(OutcomeUnknownError):
                published(one, files)
        assert [each.skipped for each in published(one, files)] == [True]
        assert len(one.shards()[0].generations) == 2
    assert ids(one.scan().to_table()) == [0, 1, 2, 10]


def test_an_owner_that_died_with_a_load_is_replaced_and_the_load_lands_once(
    one: lancewal.Table,  # noqa: F811
) -> None:
    files = staged(one, rows(0, 3))
    with WritingProcess(one, lease=600) as owner:
        owner.ask("put", start=10, count=1)
        owned(one, owner)
        owner.signal(signal.SIGSTOP)
        loading = threading.Thread(target=published, args=(one, files))
        loading.start()
        until(lambda: [i for i in one._store.list(layout.OWNERS_DIR) if i.path.endswith(".asked")])
        owner.kill()
        loading.join()
        assert published(one, files) == []
    assert ids(one.scan().to_table()) == [0, 1, 2, 10]


def test_a_load_through_a_writer_of_the_same_process_does_not_fence_it(one: lancewal.Table) -> None:  # noqa: F811
    with one.writer() as writer:
        writer.put(rows(0, 2, prefix="before"))
        published(one, staged(one, rows(1, 2, prefix="loaded")))
        writer.put(rows(2, 2, prefix="after"))
        assert names(one) == {0: "before_0", 1: "loaded_1", 2: "after_2", 3: "after_3"}
    assert followed(one) == names(one)
    assert names(one) == {0: "before_0", 1: "loaded_1", 2: "after_2", 3: "after_3"}


def test_a_load_whose_sstables_were_gone_stopped_the_puts_of_its_owner(
    one: lancewal.Table,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each later put got the refusal of the load. Seeds 16467, 16739 and 32291 of the simulator."""

    def gone(*_: object) -> None:
        raise InvalidInputError("1 of 1 staged SSTables are gone")

    files = staged(one, rows(1, 2))
    with one.writer() as writer:
        writer.put(rows(0, 1))
        (shard,) = one.shards()
        with monkeypatch.context() as patch:
            patch.setattr(Adoption, "check_present", gone)
            with pytest.raises(PartialWriteError) as error:
                published(one, files)
        assert isinstance(error.value.failed[shard.shard_id], InvalidInputError)
        writer.put(rows(3, 1))
        assert ids(one.scan().to_table()) == [0, 3]
    assert ids(one.scan().to_table()) == [0, 3]


def test_puts_and_loads_at_the_same_time_lose_and_double_nothing(tmp_path: Path) -> None:
    """Each round overwrites the same keys; whoever comes last wins, in memory, on storage and in the feed."""
    table = wal_table(tmp_path / "table", writer_defaults=FAST_DEFAULTS)
    rounds, done = 5, threading.Event()
    failures: list[BaseException] = []

    def put() -> None:
        number = 0
        try:
            while not done.wait(0.005):
                writer.put(rows(1000 + number, 1))
                number += 1
        except BaseException as error:
            failures.append(error)
        acknowledged.append(number)

    acknowledged: list[int] = []
    with table.writer(max_memtable_rows=40) as writer:
        writer.put(rows(0, 1))
        thread = threading.Thread(target=put)
        thread.start()
        for number in range(rounds):
            published(table, staged(table, rows(0, 5, prefix=f"load{number}")), number)
            assert names(table)[4] == f"load{number}_4"
        done.set()
        thread.join()
        assert failures == []
    found = names(table)
    assert followed(table) == found
    assert sorted(found) == [*range(5), *range(1000, 1000 + acknowledged[0])]
    assert table.verify().ok


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("step", ["pointer", "manifest", "confirmation"])
def test_a_load_that_failed_anywhere_lands_once_when_it_is_sent_again(
    tmp_path: Path, step: str, after: bool
) -> None:
    """The shard's writer ends, because its pointer may stand in the log; the next one finds out."""
    uri = tmp_path / "table"
    wal_table(uri, writer_defaults=FAST_DEFAULTS)
    store = FaultyStore(ObjectStore.from_uri(uri, fsync=False))
    table = lancewal.Table.open(uri, store=store)
    with table.writer(fsync=False) as writer:
        writer.put(rows(10, 1))
        shard = shard_of(table)
        files = staged(table, rows(0, 3))
        where = layout.manifest_dir(shard) if step == "manifest" else layout.wal_dir(shard)
        writer.flush()
        nth = 2 if step == "confirmation" else 1
        store.faults.fail("put_if_absent", nth=nth, times=None, after=after, where=where)
        with pytest.raises(PartialWriteError):
            published(table, files)
        store.faults.clear()
        epoch = table.shards()[0].epoch
        writer.put(rows(11, 1))
        assert table.shards()[0].epoch == epoch + 1
        assert all(each.skipped for each in published(table, files)) == (
            (step == "manifest" and after) or step == "confirmation"
        )
        writer.put(rows(12, 1))
    assert ids(table.scan().to_table()) == [0, 1, 2, 10, 11, 12]
    assert table.verify().ok


# ------------------------------------------------------------------ strangers and late ones


def test_a_forged_request_is_refused_and_harms_nobody(one: lancewal.Table) -> None:  # noqa: F811
    with one.writer() as writer:
        writer.put(rows(0, 1))
        presence = presence_at(one.uri)
        until(lambda: presence._is_stored)
        directory = layout.owner_dir(presence.owner_id)
        entry = {
            "generation": 1,
            "path": "../../elsewhere",
            "in_memory_bytes": None,
            "physical_rows": 1,
            "primary_key_bytes": None,
            "notes": "",
            "unknown": "",
        }
        of_nobody = {"do": "adopt", "app": "x", "version": 0, "run": "r"}
        shard = str(shard_of(one))
        contents = [
            b"\x00",
            encode_record({"do": "drop everything", "shards": {}}),
            encode_record({**of_nobody, "shards": {shard: [entry]}}),
            encode_record({**of_nobody, "shards": {shard: [{**entry, "path": "0a1b2c3d_gen_1"}]}}),
            encode_record({"do": "flush", "shards": {"no shard": None}}),
            encode_record({**of_nobody, "version": float("inf"), "age": 0.0, "shards": {shard: []}}),
        ]
        for number, content in enumerate(contents):
            one._store.put(f"{directory}/{number}.asked", content)
        until(
            lambda: (
                len([i for i in one._store.list(directory) if i.path.endswith(".answered")]) == len(contents)
            )
        )
        writer.put(rows(1, 1))
    assert ids(one.scan().to_table()) == [0, 1]
    assert one.verify().ok


def test_a_request_to_somebody_who_never_was_ends_with_the_lease(one: lancewal.Table) -> None:  # noqa: F811
    writer = one.shard_writer(shard_of(one))
    writer.put(rows(0, 1))
    writer._finalizer()
    del writer
    forged(one._store, shard_of(one), 99, lease_seconds=1.0)
    one.flush()
    assert one.status().unflushed.count == 0
    assert not [i for i in one._store.list(layout.OWNERS_DIR) if i.path.endswith(".asked")]


def test_whoever_asked_waited_for_the_answer_to_a_request_that_was_deleted(
    one: lancewal.Table,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For as long as the owner lived. Seed 14731 of the simulator.

    The owner deletes what nobody fetches for sixty leases, and so does a collection after a day: by then
    whoever asked is mostly dead, but it may only have been stopped.
    """

    def deleted(_: Owner) -> bool:
        one._store.delete_many(asked(one))
        return False

    writer = one.shard_writer(shard_of(one))
    writer.put(rows(0, 1))
    writer._finalizer()
    del writer
    forged(one._store, shard_of(one), 99, lease_seconds=1.0)
    monkeypatch.setattr(requests_module, "is_dead_here", deleted)
    with pytest.raises(OutcomeUnknownError, match="was deleted before its answer was read"):
        flush_by_owners(one._store, discover_manifests(one._store))


def test_files_are_ingested_through_the_owner(one: lancewal.Table, tmp_path: Path) -> None:  # noqa: F811
    path = write_parquet(tmp_path / "rows.parquet", 0, 20)
    with WritingProcess(one) as owner:
        owner.ask("put", start=100, count=1)
        owned(one, owner)
        epoch = one.shards()[0].epoch
        assert Ingestion(one.uri).run(find_files([path])).rows == 20
        assert Ingestion(one.uri).run(find_files([path])).skipped == 1
        assert one.shards()[0].epoch == epoch
        assert owner.ask("put", start=101, count=1) == {"done": 1}
    assert ids(one.scan().to_table()) == [*range(20), 100, 101]


# ------------------------------------------------------------------ the command line beside an owner


def test_commands_go_through_the_owner_and_leave_it_its_shards(tmp_path: Path) -> None:
    """Each is newer than what the owner took before, older than what it takes afterwards, and there once."""
    table = writable_table(tmp_path / "table")
    file = write_parquet(tmp_path / "rows.parquet", 0, 8)
    with WritingProcess(table) as owner:
        owner.ask("put", start=0, count=12, prefix="first")
        owned(table, owner)
        epochs = {shard.shard_id: shard.epoch for shard in table.shards()}
        assert ok("ingest", table.uri, file, "--json").document["rows"] == 8
        assert ok("ingest", table.uri, file, "--json").document["skipped"] == 1
        assert names(table)[3] == "name_3"
        assert owner.ask("put", start=3, count=1, prefix="after") == {"done": 1}
        assert ok("delete", table.uri, "0", "9", "77", "--json").document == {"deleted": 3}
        assert ok("delete", table.uri, "--filter", "id >= 10", "--yes", "--json").document == {"deleted": 2}
        assert owner.ask("put", start=9, count=1, prefix="again") == {"done": 1}
        assert ok("flush", table.uri, "--json").document["left"] == 0
        assert {shard.shard_id: shard.epoch for shard in table.shards()} == epochs
        expected = {n: f"name_{n}" for n in range(1, 8)} | {3: "after_3", 8: "first_8", 9: "again_9"}
        assert names(table) == expected
        assert owner.ask("put", start=3, count=1, prefix="last") == {"done": 1}
        assert owner.ask("close") == {"done": None}
    table.compact()
    assert names(table) == expected | {3: "last_3"}
    assert table.verify().ok


def test_a_delete_takes_the_shards_of_an_owner_that_is_gone(one: lancewal.Table) -> None:  # noqa: F811
    with WritingProcess(one) as owner:
        owner.ask("put", start=0, count=3)
        owned(one, owner)
        owner.kill()
        assert ok("delete", one.uri, "1", "--json").document == {"deleted": 1}
    assert ids(one.scan().to_table()) == [0, 2]


def test_a_delete_is_told_when_the_owner_may_not_be_disturbed_or_is_to_be_stopped(
    one: lancewal.Table,  # noqa: F811
) -> None:
    with WritingProcess(one) as owner:
        owner.ask("put", start=0, count=3)
        owned(one, owner)
        refused = run("delete", one.uri, "1", "--take-over", "never")
        assert refused.code == TAKEN_OVER
        assert str(owner.pid) in refused.error
        assert owner.ask("put", start=3, count=1) == {"done": 1}
        epoch = one.shards()[0].epoch
        ok("delete", one.uri, "1", "--take-over", "now")
        assert one.shards()[0].epoch > epoch
    assert ids(one.scan().to_table()) == [0, 2, 3]


def test_sealing_stops_an_owner_after_it_flushed(
    one: lancewal.Table,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    ask = requests_module._ask

    def noted(store: ObjectStore, owner: Owner, request: dict[str, object]) -> object:
        asked.append(request["do"])
        return ask(store, owner, request)

    monkeypatch.setattr(requests_module, "_ask", noted)
    with WritingProcess(one) as owner:
        owner.ask("put", start=0, count=3)
        one.seal_shard(owned(one, owner))
        assert asked == ["flush"]
        assert [shard.generations for shard in one.shards()] == [(1,)]
        assert "error" in owner.ask("put", start=3, count=1)
    assert ids(one.scan().to_table()) == [0, 1, 2]


# ------------------------------------------------------------------ take_over of jobs and commands


def left_in_the_log(table: lancewal.Table) -> UUID:
    """A shard with rows in its log, and the record of somebody elsewhere who has it and was heard of."""
    with table.shard_writer(shard_of(table), enable_memtable=False) as writer:
        writer.put(rows(0, 3))
    [shard] = table.shards()
    forged(table._store, shard.shard_id, shard.epoch, lease_seconds=300.0)
    return shard.shard_id


def asked(table: lancewal.Table) -> list[str]:
    return [each.path for each in table._store.list(layout.CLOCK_DIR) if each.path.endswith(".asked")]


@pytest.mark.parametrize("how", ["flush", "ingest"])
def test_jobs_could_not_be_told_to_leave_the_shards_of_others_alone(
    one: lancewal.Table,  # noqa: F811
    tmp_path: Path,
    how: str,
) -> None:
    left_in_the_log(one)
    before = one.shards()
    if how == "flush":
        with pytest.raises(PartialWriteError, match="leaves it alone"):
            one.flush(take_over="never")
        assert run("flush", one.uri, "--take-over", "never").code == TAKEN_OVER
    else:
        files = find_files([write_parquet(tmp_path / "a.parquet", 3, 3)])
        with pytest.raises(ShardOwnedError, match="leaves it alone"):
            Ingestion(one.uri, take_over="never").run(files)
        done = run("ingest", one.uri, str(tmp_path / "a.parquet"), "--take-over", "never")
        assert done.code == TAKEN_OVER
    assert (one.shards(), asked(one), ids(one.scan().to_table())) == (before, [], [0, 1, 2])


@pytest.mark.parametrize("how", ["flush", "ingest"])
def test_jobs_could_not_take_shards_from_others_at_once(
    one: lancewal.Table,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    """The owner would have been asked, and waited for until its lease is over."""
    left_in_the_log(one)
    monkeypatch.setattr(requests_module, "_ask", lambda *_: pytest.fail("the owner was asked"))
    [before] = one.shards()
    if how == "flush":
        ok("flush", one.uri, "--take-over", "now")
    else:
        write_parquet(tmp_path / "a.parquet", 3, 3)
        ok("ingest", one.uri, str(tmp_path / "a.parquet"), "--take-over", "now")
    [after] = one.shards()
    assert (after.epoch > before.epoch, one.status().unflushed.count) == (True, 0)
    assert ids(one.scan().to_table()) == ([0, 1, 2] if how == "flush" else [0, 1, 2, 3, 4, 5])


def test_a_take_over_that_is_none_is_refused(one: lancewal.Table) -> None:  # noqa: F811
    for call in (lambda: one.flush(take_over="soon"), lambda: Ingestion(one.uri, take_over="soon")):  # type: ignore[arg-type]
        with pytest.raises(InvalidInputError, match="take_over"):
            call()
