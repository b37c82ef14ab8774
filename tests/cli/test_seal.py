"""seal and unseal."""

from __future__ import annotations

import pytest

import lancewal
from lancewal.cli import exits
from lancewal.errors import LanceWalError
from tests.cli.support import ok, run
from tests.tables import rows


def test_a_sealed_shard_takes_rows_again_once_it_is_unsealed(table: lancewal.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(10, 20))
        shard = str(next(iter(writer.shard_writers)))
    assert ok("seal", table.uri, shard, "--json").document == {"shard_id": shard, "status": "sealed"}
    assert states(table)[shard] == "sealed"
    assert "is sealed" in ok("seal", table.uri, shard).out  # as it is
    with pytest.raises(LanceWalError, match="sealed"), table.writer() as writer:
        writer.put(rows(10, 20))
    assert table.count_rows() == 30
    assert ok("unseal", table.uri, shard[:13], "--json").document == {"shard_id": shard, "status": "active"}
    assert states(table)[shard] == "active"
    with table.writer() as writer:
        writer.put(rows(30, 20))
    assert table.count_rows() == 50


def test_sealing_flushes_the_rows_of_a_writer_that_lives(table: lancewal.Table) -> None:
    with table.writer() as writer:
        writer.put(rows(10, 20))
        shard = str(next(iter(writer.shard_writers)))
        ok("seal", table.uri, shard)
        (state,) = [each for each in table.status().shards if str(each.shard_id) == shard]
        assert state.unflushed.count == 0
        assert table.count_rows() == 30


@pytest.mark.parametrize("command", ["seal", "unseal"])
def test_a_shard_that_is_not_there_or_not_the_only_one(table: lancewal.Table, command: str) -> None:
    with table.writer() as writer:
        writer.put(rows(10, 20))
    unknown = run(command, table.uri, "nope")
    assert unknown.code == exits.NOT_FOUND
    assert "no shard nope" in unknown.error
    several = run(command, table.uri, "")
    assert several.code == exits.REFUSED
    assert "shards begin with" in several.error
    assert set(states(table).values()) == {"active"}


def states(table: lancewal.Table) -> dict[str, str]:
    return {str(each.shard_id): each.status.name.lower() for each in table.shards()}
