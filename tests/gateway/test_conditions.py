"""What a client changes by a condition, and reads at a checkpoint: as on a local table."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError, LanceWalError, OutcomeUnknownError, UnavailableError
from lancewal.gateway import Gateway
from lancewal.gateway.aio import AsyncTable
from tests.tables import APPEND_ONLY, ids, rows, wal_table


def test_a_client_deletes_and_updates_what_matches(remote: lancewal.RemoteTable) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 10))
        assert writer.delete(where="id >= 8").num_rows == 2
        assert writer.delete(where="id > 100").num_rows == 0
        assert writer.update("id < 3", {"name": "low"}).num_rows == 3
        assert writer.update("id = 5", set_sql={"name": "upper(name)"}).num_rows == 1
        assert writer.update("id > 100", {"name": "none"}).num_rows == 0
    found = remote.scan().to_table().sort_by("id").to_pydict()
    names = ["low", "low", "low", "name_3", "name_4", "NAME_5", "name_6", "name_7"]
    assert found == {"id": list(range(8)), "name": names}


def test_conditions_that_cannot_be_are_refused_before_anything_is_written(
    remote: lancewal.RemoteTable,
) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 3))
        for wrong in (
            lambda: writer.delete(),
            lambda: writer.delete([1], where="id = 1"),
            lambda: writer.delete(where="nope = 1"),
            lambda: writer.delete("id = 1"),
            lambda: writer.update("id = 1"),
            lambda: writer.update("id = 1", {"id": 7}),
            lambda: writer.update("id = 1", {"nope": 7}),
            lambda: writer.update("id = 1", {"name": "a"}, set_sql={"name": "name"}),
            lambda: writer.update("id = 1", set_sql={"name": "nope"}),
            lambda: writer.update(None, {"name": "x"}),  # type: ignore[arg-type]
        ):
            with pytest.raises(InvalidInputError):
                wrong()
    assert remote.scan().to_table().sort_by("id")["name"].to_pylist() == ["name_0", "name_1", "name_2"]


def test_a_table_without_a_key_has_nothing_to_change(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t", APPEND_ONLY)
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
        writer = remote.writer()
        with pytest.raises(InvalidInputError, match="no primary key"):
            writer.update("id = 1", {"name": "x"})
        with pytest.raises(InvalidInputError, match="no primary key"):
            writer.delete(where="id = 1")


def test_an_update_by_a_client_that_does_not_know_a_new_column_does_not_empty_it(tmp_path: Path) -> None:
    table = wal_table(tmp_path / "t")
    with Gateway({"t": table}) as gateway, lancewal.connect(gateway.address) as remote:
        writer = remote.writer()
        writer.put(rows(0, 3))
        lance.dataset(table.uri).add_columns(pa.field("extra", pa.int64()))
        with pytest.raises(InvalidInputError, match="columns have changed"):
            writer.update("id = 1", {"name": "new"})
        assert remote.lookup(1) == {"id": 1, "name": "name_1", "extra": None}


def test_an_update_that_is_cut_short_says_what_it_did(
    remote: lancewal.RemoteTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that heard "nothing was written" would add one to some rows twice."""
    with remote.writer() as writer:
        writer.put(rows(0, 10))
        find = writer._matching._find
        assert find is not None

        def cut_short(where: str, columns: Any) -> Any:
            yield from find(where, columns)
            raise UnavailableError("the gateway is gone")

        monkeypatch.setattr(writer._matching, "_find", cut_short)
        with pytest.raises(OutcomeUnknownError, match="5 rows were updated"):
            writer.update("id < 5", {"name": "x"})
        with pytest.raises(UnavailableError):
            writer.update("id > 100", {"name": "x"})


def test_a_client_reads_a_checkpoint_as_it_was(remote: lancewal.RemoteTable, events: lancewal.Table) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 10))
        events.checkpoint("then")
        writer.put(rows(0, 20, prefix="newer"))
        writer.delete([3])
    then = remote.at("then")
    assert ids(then.scan().to_table()) == list(range(10))
    assert sum(batch.num_rows for batch in then.scan(filter="id < 4").to_batches()) == 4
    assert then.count_rows() == then.scan().count_rows() == 10
    assert then.lookup(3) == {"id": 3, "name": "name_3"}
    assert then.lookup([3, 15]).found.tolist() == [True, False]  # type: ignore[union-attr]
    assert then.full_text_search("name", "name_3", 1)["id"].to_pylist() == [3]
    assert then.sql("SELECT count(*) AS n FROM t").to_pylist() == [{"n": 10}]
    assert then.schema.equals(events.schema)
    assert remote.count_rows() == 19
    assert not hasattr(then, "writer")
    with pytest.raises(LanceWalError, match="other"):
        remote.at("other")
    with pytest.raises(InvalidInputError):
        remote.at(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["local", "remote"])
def test_coroutines_change_what_matches_and_read_a_checkpoint(
    events: lancewal.Table, gateway: Gateway, where: str
) -> None:
    async def run(table: AsyncTable) -> Any:
        async with table.writer() as writer:
            await writer.put(rows(0, 10))
            events.checkpoint("then")
            assert await writer.delete(where="id >= 8") == 2
            assert await writer.delete([0]) == 1
            assert await writer.update("id < 3", {"name": "low"}) == 2
            assert await writer.update("id = 4", set_sql={"name": "upper(name)"}) == 1
            with pytest.raises(InvalidInputError):
                await writer.update("id = 4", {"nope": 1})
            then = await table.at("then")
            assert await then.count_rows() == 10
            assert (await then.lookup(1))["name"] == "name_1"
            then.close()
        assert (await table.sql("SELECT count(*) AS n FROM t")).to_pylist() == [{"n": 7}]
        return [(await table.lookup(number))["name"] for number in (1, 4, 5)]

    if where == "local":
        found = asyncio.run(run(AsyncTable(events)))
    else:
        with lancewal.connect(gateway.address) as remote:
            found = asyncio.run(run(AsyncTable(remote)))
    assert found == ["low", "NAME_4", "name_5"]


def test_conditions_beside_puts_of_other_threads(remote: lancewal.RemoteTable) -> None:
    with remote.writer() as writer:
        writer.put(rows(0, 100))

        def others() -> None:
            for number in range(1000, 1050):
                writer.put(rows(number, 1))

        thread = threading.Thread(target=others)
        thread.start()
        assert writer.update("id < 100", {"name": "x"}).num_rows == 100
        thread.join()
    assert remote.count_rows("name = 'x'") == 100
    assert remote.count_rows() == 150


def test_many_batches_of_one_put_are_one_batch(remote: lancewal.RemoteTable) -> None:
    with remote.writer() as writer:
        assert writer.put([rows(0, 5), rows(5, 5)]).num_rows == 10
        assert writer.put([]).num_rows == 0
        with pytest.raises(InvalidInputError, match="different columns"):
            writer.put([rows(0, 5), pa.record_batch({"id": [1]})])
