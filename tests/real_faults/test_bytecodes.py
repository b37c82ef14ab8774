"""Ctrl-C at the bytecodes of put, delete, close and compact: no row is lost or doubled, and nobody hangs."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import lancewal
import lancewal.writer.flush
from lancewal.errors import LanceWalError
from tests.real_faults.signals import InterruptAt
from tests.tables import APPEND_ONLY, KEYED, ids, rows, wal_table

#: How many of the places of a call an ordinary run tries; the soak tests try all of them.
_TRIED = 8
#: The first key of what is in the base table of a template, and of what was flushed since.
_COMPACTED, _FLUSHED = 0, 10
_IN_TEMPLATE = frozenset([*range(_COMPACTED, _COMPACTED + 6), *range(_FLUSHED, _FLUSHED + 6)])
_SETTINGS = {"max_memtable_rows": 12, "stats_log_interval": None, "fsync": False}
Writer = lancewal.TableWriter | lancewal.ShardWriter


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lancewal.writer.flush, "FIRST_RETRY_SECONDS", 0.001)


class Trial:
    """One interrupted call on a copy of a small table, and whether its rows are right afterwards."""

    def __init__(self, template: Path, place: Path, one_shard: bool, there: Iterable[int]) -> None:
        shutil.copytree(template, place)
        self.uri = place
        self.table = lancewal.open(place)
        self._one_shard = one_shard
        self.there = set(there)
        #: Rows of calls that raised: there or not, but not twice.
        self.open: set[int] = set()

    def writer(self, **settings: Any) -> Writer:
        settings = {**_SETTINGS, **settings}
        if self._one_shard:
            return self.table.shard_writer(self.table.shards()[0].shard_id, take_over="now", **settings)
        return self.table.writer(take_over="now", **settings)

    def put(self, writer: Writer, start: int, count: int = 6) -> None:
        schema = KEYED if self.table.primary_key else APPEND_ONLY
        keys = set(range(start, start + count))
        self.open |= keys
        writer.put(rows(start, count, schema=schema))
        self.open -= keys
        self.there |= keys

    def delete(self, writer: Writer, keys: Iterable[int]) -> None:
        keys = set(keys)
        self.open |= keys
        self.there -= keys
        writer.delete(sorted(keys))
        self.open -= keys

    def check(self, *, compacted: bool = True) -> None:
        table = lancewal.open(self.uri)
        for _ in range(1 + compacted):
            found = ids(table.scan().to_table())
            assert len(found) == len(set(found)), "a row is there twice"
            assert self.there - self.open <= set(found), "an acknowledged row is gone"
            assert set(found) <= self.there | self.open, "a row is there that was deleted or never put"
            if compacted:
                table.flush()
                table.compact()

    def end(self, writer: Writer) -> None:
        """As a program goes on after Ctrl-C: it writes, or hears why it cannot, and closes."""
        with suppress(LanceWalError):
            self.put(writer, 500)
        with suppress(LanceWalError):
            writer.close()


def put(trial: Trial, interrupt: InterruptAt) -> None:
    writer = trial.writer()
    trial.put(writer, 100)
    with suppress(KeyboardInterrupt), interrupt:
        trial.put(writer, 200, 10)  # which fills the MemTable
    trial.end(writer)


def put_in_memory(trial: Trial, interrupt: InterruptAt) -> None:
    writer = trial.writer(durable_write=False)
    with suppress(KeyboardInterrupt), interrupt:
        trial.put(writer, 200, 10)
    with suppress(LanceWalError):
        trial.put(writer, 500)
    try:
        writer.close()
    except LanceWalError:
        trial.open |= set(range(100, 600))  # they were in memory, and it says so


def delete(trial: Trial, interrupt: InterruptAt) -> None:
    writer = trial.writer()
    trial.put(writer, 100)
    with suppress(KeyboardInterrupt), interrupt:
        trial.delete(writer, [1, 3, 11, 101])
    trial.end(writer)


def close(trial: Trial, interrupt: InterruptAt) -> None:
    writer = trial.writer()
    trial.put(writer, 100)
    with suppress(KeyboardInterrupt), interrupt:
        writer.close()
    with suppress(LanceWalError):
        writer.close()


def close_in_memory(trial: Trial, interrupt: InterruptAt) -> None:
    """Rows that only the close makes durable: the second close does it where the first was interrupted."""
    writer = trial.writer(durable_write=False, max_wal_flush_interval=None)
    trial.put(writer, 100)
    with suppress(KeyboardInterrupt), interrupt:
        writer.close()
    try:
        writer.close()
    except LanceWalError:
        trial.open |= set(range(100, 106))


def compact(trial: Trial, interrupt: InterruptAt) -> None:
    with suppress(KeyboardInterrupt, LanceWalError), interrupt:
        trial.table.compact()


def flush_more(trial: Trial) -> None:
    """What a compaction finds besides; once for all trials of it."""
    with trial.writer() as writer:
        trial.put(writer, 100)
        if trial.table.primary_key:
            trial.delete(writer, [1, 11])


CALLS: dict[str, Callable[[Trial, InterruptAt], None]] = {
    call.__name__: call for call in (put, put_in_memory, delete, close, close_in_memory, compact)
}


@pytest.fixture(scope="session")
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Tables with and without a key, of one and of two shards, with rows in the base and flushed ones."""
    made = {}
    for keyed, one_shard in itertools.product(("keyed", "append only"), (True, False)):
        made[keyed, one_shard] = tmp_path_factory.mktemp("template") / "table"
        make_template(made[keyed, one_shard], keyed=keyed == "keyed", one_shard=one_shard)
    return made


def make_template(where: Path, *, keyed: bool, one_shard: bool) -> None:
    schema = KEYED if keyed else APPEND_ONLY
    sharding: dict[str, Any] = {"unsharded": True} if one_shard else {"bucket": ("id", 2)}
    table = wal_table(where, schema, **sharding)
    for start in (_COMPACTED, _FLUSHED):
        with table.writer(**_SETTINGS) as writer:
            writer.put(rows(start, 6, schema=schema))
        if start == _COMPACTED:
            table.compact()


def attempts(
    call: str, template: Path, directory: Path, one_shard: bool, places: Callable[[int], Iterable[int]]
) -> int:
    """Interrupt the call at each of ``places``; returns how many there were."""
    first = Trial(template, directory / "prepared", one_shard, _IN_TEMPLATE)
    if call == "compact":
        flush_more(first)
    first.check(compacted=False)
    trial = Trial(first.uri, directory / "0", one_shard, first.there)
    counted = InterruptAt(0)
    CALLS[call](trial, counted)
    trial.check()
    raised = 0
    for nth in places(counted.seen):
        interrupt = InterruptAt(nth)
        place = directory / str(nth)
        trial = Trial(first.uri, place, one_shard, first.there)
        CALLS[call](trial, interrupt)
        try:
            trial.check(compacted=nth % 5 == 0)
        except AssertionError as error:
            raise AssertionError(f"after an interrupt at place {nth}, {interrupt.where}: {error}") from error
        raised += interrupt.raised
        shutil.rmtree(place)
    return raised


CASES = [
    pytest.param(call, one_shard, keyed, id=f"{call}-{'shard' if one_shard else 'table'}-{keyed}")
    for call in CALLS
    for one_shard in (True, False)
    for keyed in ("keyed", "append only")
    # Without a key there are no deletes, and a compaction is not a writer's.
    if (keyed == "keyed" or call in ("put", "compact")) and not (call == "compact" and one_shard)
]


@pytest.mark.parametrize(("call", "one_shard", "keyed"), CASES)
def test_an_interrupt_at_some_bytecodes(
    call: str, one_shard: bool, keyed: str, templates: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    chance = random.Random(f"{call} {one_shard} {keyed}")

    def some(count: int) -> list[int]:
        assert count > _TRIED
        return sorted(chance.sample(range(1, count + 1), _TRIED))

    raised = attempts(call, templates[keyed, one_shard], tmp_path, one_shard, some)
    assert raised > _TRIED / 2


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("call", "one_shard", "keyed"), CASES)
def test_an_interrupt_at_every_bytecode(
    call: str, one_shard: bool, keyed: str, templates: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    from tests.real_faults.report import keep_interrupts  # which has this module's cases

    counted: list[int] = []

    def all_of_them(count: int) -> range:
        counted.append(count)
        return range(1, count + 1)

    raised = attempts(call, templates[keyed, one_shard], tmp_path, one_shard, all_of_them)
    keep_interrupts(call, one_shard, keyed, counted[0], raised)
    assert raised > 100
