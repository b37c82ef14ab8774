"""What is due: a function of a status and settings."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest

from lancewal.format import ShardStatus
from lancewal.maintenance import UpkeepSettings
from lancewal.service import Duty, Owner
from lancewal.status import IndexState, Lag, ShardState, TableStatus
from lancewal.upkeep import Work, plan_upkeep

NOW = datetime(2026, 1, 2, 12, 0, tzinfo=UTC)
_MB = 1 << 20


def ago(**span: float) -> datetime:
    return NOW - timedelta(**span)


def shard(shard_id: UUID | None = None, **state: Any) -> ShardState:
    usual: dict[str, Any] = {
        "shard_id": shard_id or uuid4(),
        "spec_id": 1,
        "values": {},
        "status": ShardStatus.ACTIVE,
        "epoch": 3,
        "current_generation": 5,
        "generations": (),
        "compacted_generation": 0,
        "wal_tip": 9,
        "tail_length": 0,
        "last_write": ago(hours=1),
        "unflushed": Lag(),
        "uncompacted": Lag(),
    }
    return ShardState(**{**usual, **state})


def status(*shards: ShardState, **state: Any) -> TableStatus:
    usual: dict[str, Any] = {
        "uri": "memory://t",
        "taken_at": NOW,
        "base_version": 3,
        "base_rows": 10,
        "base_fragments": 1,
        "primary_key": ("id",),
        "sharding": "by hand",
        "writer_defaults": {},
        "maintained_indexes": None,
        "indexes": (),
        "shards": shards,
    }
    return TableStatus(**{**usual, **state})


def owner(of: ShardState, *, age: timedelta = timedelta(0), epoch: int = 3) -> Owner:
    return Owner(
        "0" * 16,
        "host",
        1,
        "a machine",
        "",
        {of.shard_id: epoch},
        timedelta(seconds=10),
        None,
        NOW - age,
        NOW,
    )


def duty(work: Work, at: datetime) -> Duty:
    return Duty(str(work), "host", 1, "a machine", "", under_way=False, at=at)


def due(found: TableStatus, **settings: Any) -> list[Work]:
    return [task.work for task in plan_upkeep(found, UpkeepSettings(**settings))]


def test_a_table_in_shape_needs_nothing() -> None:
    fresh = Lag(4, 40, _MB, ago(seconds=30))
    found = status(
        shard(uncompacted=fresh, unflushed=fresh),
        indexes=(IndexState("i", "BTree", ("id",), 10, 10_000),),
        small_files=32,
        versions=Lag(50, None, 1, ago(days=6)),
    )
    assert due(found) == []
    assert str(plan_upkeep(found)) == "nothing is due"


@pytest.mark.parametrize(
    "waiting",
    [
        Lag(5, 40, _MB, ago(seconds=30)),
        Lag(1, 40, 513 * _MB, ago(seconds=30)),
        Lag(1, 40, _MB, ago(minutes=16)),
    ],
    ids=["number", "bytes", "age"],
)
def test_a_shard_beyond_any_limit_is_compacted_and_takes_the_others_along(waiting: Lag) -> None:
    much, some, none = shard(uncompacted=waiting), shard(uncompacted=Lag(1, 1, 1, NOW)), shard()
    (task,) = plan_upkeep(status(none, some, much))
    assert (task.work, task.shards) == (Work.COMPACT, (much.shard_id, some.shard_id))
    assert str(much.shard_id) in task.reason


def test_a_log_whose_owner_is_gone_or_slow_is_flushed() -> None:
    old = shard(unflushed=Lag(3, None, 9, ago(minutes=11)))
    assert due(status(old)) == [Work.FLUSH]
    assert due(status(old, owners=(owner(old),))) == [Work.FLUSH]
    large = shard(unflushed=Lag(3, None, 257 * _MB, ago(minutes=2)), last_write=ago(minutes=2))
    assert due(status(large)) == [Work.FLUSH]


def test_a_log_that_somebody_unknown_writes_to_is_left_alone() -> None:
    """It may be a writer of Lance's own, which a flush would fence."""
    busy = shard(unflushed=Lag(3, None, 9, ago(minutes=11)), last_write=ago(seconds=20))
    assert due(status(busy)) == []
    assert due(status(busy, owners=(owner(busy, epoch=2),))) == []  # an owner of an earlier epoch
    assert due(status(busy, owners=(owner(busy),))) == [Work.FLUSH]  # asked, not fenced
    assert due(status(busy, owners=(owner(busy, age=timedelta(hours=1)),))) == [Work.FLUSH]  # gone


def test_the_order_is_that_of_the_rows_way() -> None:
    found = status(
        shard(
            unflushed=Lag(1, None, 1, ago(hours=1)), uncompacted=Lag(9, 1, 1, NOW), garbage=Lag(3, 1, 1, NOW)
        ),
        indexes=(IndexState("i", "BTree", ("id",), 10, 10_001),),
        small_files=33,
        versions=Lag(50, None, 1, ago(days=8)),
    )
    assert due(found) == list(Work)
    assert [task["work"] for task in plan_upkeep(found).to_dict()["tasks"]] == [str(work) for work in Work]


def test_garbage_is_collected_a_few_times_in_its_age() -> None:
    found = status(shard(garbage=Lag(3, None, 9, ago(days=2))))
    assert due(found) == [Work.COLLECT]
    assert due(replace(found, duties=(duty(Work.COLLECT, ago(minutes=59)),))) == []
    assert due(replace(found, duties=(duty(Work.COLLECT, ago(minutes=61)),))) == [Work.COLLECT]
    assert due(replace(found, duties=(duty(Work.COMPACT, ago(minutes=1)),))) == [Work.COLLECT]
    recent = replace(found, duties=(duty(Work.COLLECT, ago(minutes=6)),))
    assert due(recent, garbage_age=timedelta(minutes=20)) == [Work.COLLECT]


def test_old_versions_stay_while_rows_wait_that_are_as_old() -> None:
    """They may be what tells how these rows belong to the table."""
    found = status(versions=Lag(50, None, 1, ago(days=8)))
    assert due(found) == [Work.VERSIONS]
    assert due(status(versions=Lag(1, None, 1, ago(days=8)))) == []
    stuck = status(shard(uncompacted=Lag(1, 1, 1, ago(days=8))), versions=Lag(50, None, 1, ago(days=8)))
    assert due(stuck) == [Work.COMPACT]


def test_what_is_paused_is_left_out() -> None:
    bad, good = (shard(uncompacted=Lag(5, 5, 5, NOW)) for _ in range(2))
    plan = plan_upkeep(status(bad, good), paused=lambda work, shard_id: shard_id == bad.shard_id)
    assert [task.shards for task in plan] == [(good.shard_id,)]
    assert len(plan_upkeep(status(bad), paused=lambda work, shard_id: True)) == 0


def test_more_bytes_of_garbage_than_wanted_are_kept_for_less_long() -> None:
    found = status(shard(garbage=Lag(3, None, 900, ago(days=2))))
    recent = replace(found, duties=(duty(Work.COLLECT, ago(minutes=3)),))
    assert due(recent) == due(recent, max_garbage_bytes=900) == []
    [task] = plan_upkeep(recent, UpkeepSettings(max_garbage_bytes=899))
    assert (task.work, task.min_age) == (Work.COLLECT, timedelta(minutes=10))
    assert task.to_dict()["min_age"] == 600.0
    assert "at most" in task.reason
    # Not with every look: what is younger than ten minutes stays in any case.
    just_now = replace(found, duties=(duty(Work.COLLECT, ago(minutes=2)),))
    assert due(just_now, max_garbage_bytes=899) == []
    # An age that is shorter anyway stays as it is.
    short = UpkeepSettings(max_garbage_bytes=899, garbage_age=timedelta(minutes=1))
    assert [each.min_age for each in plan_upkeep(found, short)] == [timedelta(minutes=1)]


def test_what_checkpoints_hold_would_have_been_collected_in_vain_again_and_again() -> None:
    found = status(shard(garbage=Lag(3, None, 900, ago(days=2))), held=Lag(2, None, 500, ago(days=2)))
    recent = replace(found, duties=(duty(Work.COLLECT, ago(minutes=3)),))
    assert due(recent, max_garbage_bytes=400) == []
    assert due(recent, max_garbage_bytes=399) == [Work.COLLECT]
