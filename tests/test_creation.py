"""New tables in one call, keys of tables that exist, and the way back."""

from __future__ import annotations

import dataclasses
import importlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import lance
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import lancewal
from lancewal.base import BaseTable, keys
from lancewal.errors import ConflictError, InvalidInputError, NotInitializedError, ShardOwnedError
from lancewal.initialization import undo
from lancewal.shard import ShardManifestStore
from lancewal.storage import ObjectStore
from tests.servers import S3Server
from tests.tables import KEY, fast

#: The module: the room's door has a function of this name.
CREATE: Any = importlib.import_module("lancewal.initialization.create")
ROWS = [{"id": 1, "text": "a", "vector": [0.1, 1.0]}, {"id": 2, "text": "b", "vector": [0.0, 2.0]}]
VECTOR = pa.list_(pa.float32(), 2)
COLUMNS = pa.schema([("id", pa.int64()), ("text", pa.string()), ("vector", VECTOR)])


@dataclasses.dataclass
class Document:
    id: int
    text: str
    vector: list[float]


FORMS: dict[str, Callable[[], Any]] = {
    "dicts": lambda: ROWS,
    "dataclasses": lambda: [Document(**row) for row in ROWS],  # type: ignore[arg-type]
    "pandas": lambda: pd.DataFrame(ROWS),
    "polars": lambda: pl.DataFrame(ROWS),
    "arrow": lambda: pa.Table.from_pylist(ROWS, COLUMNS),
    "batches": lambda: pa.Table.from_pylist(ROWS, COLUMNS).to_batches(),
    "reader": lambda: pa.Table.from_pylist(ROWS, COLUMNS).to_reader(),
}


@pytest.mark.parametrize("form", FORMS)
def test_one_call_makes_a_keyed_table_of_any_rows_and_writes_them(tmp_path: Path, form: str) -> None:
    table = lancewal.create(tmp_path / "t", FORMS[form](), key="id", writer_defaults=fast())
    assert table.primary_key == ("id",)
    assert table.schema.field("vector").type == VECTOR
    assert (table.router().column, table.router().num_buckets) == ("id", 4)
    with table.writer() as writer:
        writer.put({"id": 2, "text": "newer", "vector": [0.0, 3.0]})
        writer.delete(1)
    found = table.scan(columns=["id", "text", "vector"]).to_table()
    assert found.to_pylist() == [{"id": 2, "text": "newer", "vector": [0.0, 3.0]}]
    assert [row["id"] for row in table.vector_search("vector", [0, 3], k=5).to_pylist()] == [2]


def test_a_schema_makes_an_empty_table_and_keeps_what_it_says(tmp_path: Path) -> None:
    mine = pa.schema(
        [pa.field("a", pa.string()), pa.field("b", pa.int32(), False), pa.field("c", pa.float64())]
    )
    table = lancewal.create(tmp_path / "t", mine, key=["b", "a"], identity="a")
    assert table.primary_key == ("b", "a")
    assert [(f.name, f.nullable) for f in table.schema] == [("a", False), ("b", False), ("c", True)]
    assert (table.count_rows(), table.router().transform) == (0, "identity")
    assert lancewal.create(tmp_path / "u", mine).router().transform == "unsharded"
    marked = pa.schema([pa.field("id", pa.int64(), False, KEY)])
    assert lancewal.create(tmp_path / "v", marked).primary_key == ("id",)


@pytest.mark.parametrize(
    ("data", "how", "text"),
    [
        ([{"id": 1}, {"id": 1}], {"key": "id"}, r"key \(id\).* such as 1"),
        ([{"id": 1}, {"id": None}], {"key": "id"}, "id has nulls"),
        ([{"id": 1, "x": None}], {"key": "id"}, "x holds nothing but nulls"),
        ([{"id": 1}], {"key": "no"}, "no column 'no'"),
        ([{"id": 1.5}], {"key": "id"}, "has type double"),
        ([{"id": 1}, {"id": "a"}], {"key": "id"}, "column id, row 1"),
        ([{"id": 1}], {"key": ["id", "id"]}, "each once"),
        ([], {}, "no rows"),
        (iter([{"id": 1}]), {}, "with a schema"),
        ([{"id": 1}], {"key": "id", "bucket": ("x", 2)}, "no column 'x' to shard by"),
        ([{"id": 1}], {"unsharded": True, "by_hand": True}, "choose one"),
        ([{"id": 1}], {"writer_defaults": {"max_memtable_size": "none"}}, "max_memtable_size"),
        ([{"id": 1, "_distance": 1.0}], {"key": "id"}, "_distance"),
        (7, {}, "cannot read rows from int"),
    ],
)
def test_what_is_refused_makes_no_table(tmp_path: Path, data: Any, how: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        lancewal.create(tmp_path / "t", data, **how)
    assert not (tmp_path / "t").exists()


def test_a_table_that_is_there_is_not_touched(tmp_path: Path) -> None:
    lancewal.create(tmp_path / "t", ROWS, key="id")
    with pytest.raises(lancewal.errors.LanceWalError, match="already exists"):
        lancewal.create(tmp_path / "t", ROWS, key="id")
    assert lancewal.open(tmp_path / "t").count_rows() == 2


def test_on_object_storage_too(s3: S3Server) -> None:
    uri = s3.uri(f"{uuid4().hex}/t")
    table = lancewal.create(uri, ROWS, key="id", storage_options=s3.storage_options)
    with table.writer() as writer:
        writer.put({"id": 3, "text": "c", "vector": [1, 1]})
    lancewal.uninitialize(uri, storage_options=s3.storage_options)
    assert lance.dataset(uri, storage_options=s3.storage_options).count_rows() == 3
    assert ObjectStore.from_uri(uri, s3.storage_options).list("_mem_wal") == []


# --- the key of a table that exists ------------------------------------------------------


def plain(where: Path, ids: list[int | None]) -> lance.LanceDataset:
    """A Lance table whose field ids are not its places, with an index."""
    data = pa.table(
        {"gone": pa.nulls(len(ids), pa.int8()), "id": pa.array(ids, pa.int64()), "x": range(len(ids))}
    )
    dataset = lance.write_dataset(data, str(where))
    dataset.drop_columns(["gone"])
    dataset.create_scalar_index("id", "BTREE")
    return lance.dataset(str(where))


def test_a_nullable_column_becomes_the_key_in_one_commit(tmp_path: Path) -> None:
    dataset = plain(tmp_path / "t", [3, 1, 2])
    before = [(f.name(), f.id()) for f in dataset.lance_schema.fields()]
    table = lancewal.initialize(dataset.uri, key="id")
    newest = lance.dataset(dataset.uri)
    assert newest.version == dataset.version + 2, "one for the key, one for the write path"
    assert [(f.name(), f.id()) for f in newest.lance_schema.fields()] == before
    assert not newest.schema.field("id").nullable
    assert [each.name for each in newest.describe_indices() if not each.name.startswith("__")] == ["id_idx"]
    assert newest.to_table().to_pylist() == dataset.to_table().to_pylist()
    with table.writer() as writer:
        writer.put({"id": 1, "x": 7})
    assert table.lookup(1) == {"id": 1, "x": 7}
    table.compact()
    assert lance.dataset(table.uri).to_table().sort_by("id")["x"].to_pylist() == [7, 2, 0]


@pytest.mark.parametrize(
    ("ids", "how", "text"),
    [
        ([1, 2, 1], {"key": "id"}, "such as 1"),
        ([1, None], {"key": "id"}, "IS NULL"),
        ([1], {"key": "y"}, "no column 'y'"),
        ([1], {"key": "id", "bucket": ("x", 2)}, "not part of the primary key"),
        ([1], {"key": "id", "maintained_indexes": ["nope"]}, "no index 'nope'"),
        ([1], {"key": []}, "name its columns"),
    ],
)
def test_a_key_that_cannot_be_one_leaves_the_table_as_it_was(
    tmp_path: Path, ids: list[int | None], how: dict[str, Any], text: str
) -> None:
    dataset = plain(tmp_path / "t", ids)
    with pytest.raises(InvalidInputError, match=text):
        lancewal.initialize(dataset.uri, **how)
    assert lance.dataset(dataset.uri).version == dataset.version


def test_another_key_than_the_table_has_is_refused_and_the_same_is_fine(tmp_path: Path) -> None:
    data = pa.table(
        {"id": [1], "x": [2]}, pa.schema([pa.field("id", pa.int64(), False, KEY), ("x", pa.int64())])
    )
    dataset = lance.write_dataset(data, str(tmp_path / "t"))
    with pytest.raises(InvalidInputError, match="cannot be changed"):
        lancewal.initialize(dataset.uri, key="x")
    assert lancewal.initialize(dataset.uri, key="id").primary_key == ("id",)


@pytest.mark.parametrize(("rival", "accepted"), [([9], True), ([1], False), ([None], False)])
def test_rows_that_come_while_the_key_is_checked_are_checked_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rival: list[int | None], accepted: bool
) -> None:
    dataset = plain(tmp_path / "t", [1, 2])
    commit = keys._commit
    later = [pa.table({"id": pa.array(rival, pa.int64()), "x": [0]})]

    def commit_after_rival(*args: Any) -> bool:
        if later:
            lance.write_dataset(later.pop(), dataset.uri, mode="append")
        return commit(*args)

    monkeypatch.setattr(keys, "_commit", commit_after_rival)
    if accepted:
        assert lancewal.initialize(dataset.uri, key="id").count_rows() == 3
    else:
        with pytest.raises(InvalidInputError):
            lancewal.initialize(dataset.uri, key="id")
        with pytest.raises(NotInitializedError):
            lancewal.open(dataset.uri)


def test_initialize_alone_gives_a_table_that_can_be_written(tmp_path: Path) -> None:
    lance.write_dataset(pa.table({"x": [1]}), str(tmp_path / "t"))
    table = lancewal.initialize(tmp_path / "t")
    with table.writer() as writer:
        writer.put({"x": 2})
    assert sorted(table.scan().to_table()["x"].to_pylist()) == [1, 2]


def test_a_key_that_cannot_be_hashed_goes_to_one_shard(tmp_path: Path) -> None:
    """Lance takes these as a key and buckets none of them."""
    narrow = pa.schema([("n", pa.binary())])
    assert lancewal.create(tmp_path / "t", narrow, key="n").router().transform == "unsharded"
    both = pa.schema([("n", pa.binary()), ("id", pa.int64())])
    assert lancewal.create(tmp_path / "u", both, key=["n", "id"]).router().column == "id"


# --- the way back ------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["id", None])
@pytest.mark.parametrize("flushed", [True, False])
def test_uninitialize_leaves_an_ordinary_table_with_all_rows(
    tmp_path: Path, key: str | None, flushed: bool
) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key=key, writer_defaults=fast(enable_memtable=flushed))
    for number in (3, 4):
        with table.writer() as writer:
            writer.put({"id": number, "text": "c"})
    with table.writer() as writer:
        if key:
            writer.delete(3)
    lancewal.uninitialize(table.uri)
    dataset = lance.dataset(table.uri)
    assert sorted(dataset.to_table()["id"].to_pylist()) == ([1, 2, 4] if key else [1, 2, 3, 4])
    assert dataset.mem_wal_index_details() is None
    assert not (tmp_path / "t" / "_mem_wal").exists()
    dataset.insert(pa.table({"id": [5], "text": ["d"]}).cast(dataset.schema.remove(2)))
    with pytest.raises(NotInitializedError):
        table.count_rows()
    with pytest.raises(NotInitializedError):
        lancewal.uninitialize(table.uri)

    again = lancewal.initialize(table.uri)
    with again.writer() as writer:
        writer.put({"id": 2 if key else 6, "text": "newest"})
    expected = [1, 2, 4, 5] if key else [1, 2, 3, 4, 5, 6]
    assert sorted(again.scan().to_table()["id"].to_pylist()) == expected
    assert again.count_rows("text = 'newest'") == 1
    assert again.verify().ok
    again.compact()
    assert sorted(lance.dataset(table.uri).to_table()["id"].to_pylist()) == expected


def test_uninitialize_waits_for_no_writer_that_lives(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast())
    with table.writer() as writer:
        writer.put({"id": 3})
        with pytest.raises(ShardOwnedError, match="not uninitialised"):
            lancewal.uninitialize(table.uri)
        writer.put({"id": 4})
    assert table.count_rows() == 4


def test_a_failure_leaves_the_table_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast())

    def fail(base: object) -> None:
        raise lancewal.errors.StorageError("no storage")

    with monkeypatch.context() as patched:
        patched.setattr(undo, "_drop_index", fail)
        with pytest.raises(lancewal.errors.StorageError, match="no storage"):
            lancewal.uninitialize(table.uri)
    # The record that the base table holds all rows outlived rows that came later.
    assert table._store.head(undo._DONE_WITH) is None
    with table.writer() as writer:
        writer.put({"id": 3})
    assert table.count_rows() == 3
    lancewal.uninitialize(table.uri)
    assert lance.dataset(table.uri).count_rows() == 3


def test_a_failure_after_the_index_was_dropped_leaves_the_way_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast())
    drop = undo._drop_index

    def drop_and_fail(base: BaseTable) -> None:
        drop(base)
        raise lancewal.errors.OutcomeUnknownError("the reply was lost")

    with monkeypatch.context() as patched:
        patched.setattr(undo, "_drop_index", drop_and_fail)
        with pytest.raises(lancewal.errors.OutcomeUnknownError, match="was lost"):
            lancewal.uninitialize(table.uri)
    lancewal.uninitialize(table.uri)
    assert not (tmp_path / "t" / "_mem_wal").exists()
    assert lance.dataset(table.uri).count_rows() == 2


def test_one_that_was_killed_before_the_end_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast())
    with table.writer() as writer:
        writer.put({"id": 3})
    with monkeypatch.context() as patched:
        patched.setattr(undo, "_remove", lambda store: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            lancewal.uninitialize(table.uri)
    assert lance.dataset(table.uri).count_rows() == 3
    with pytest.raises(InvalidInputError, match="call it again"):
        lancewal.initialize(table.uri)
    lancewal.uninitialize(table.uri)
    assert lancewal.initialize(table.uri).count_rows() == 3


def test_a_shard_that_turns_up_while_the_index_goes_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", by_hand=True, writer_defaults=fast())
    with table.shard_writer(table.create_shard()) as writer:
        writer.put({"id": 3})
    drop, fresh = undo._drop_index, uuid4()

    def drop_beside_a_writer(base: Any) -> None:
        ShardManifestStore(ObjectStore.from_uri(table.uri), fresh).initialize_shard()
        drop(base)

    with monkeypatch.context() as patched:
        patched.setattr(undo, "_drop_index", drop_beside_a_writer)
        with pytest.raises(ConflictError, match=str(fresh)):
            lancewal.uninitialize(table.uri)
    assert table.count_rows() == 3
    with table.shard_writer(fresh) as writer:
        writer.put({"id": 4})
    assert (table.count_rows(), table.verify().ok) == (4, True)
    assert table.compact().base_version
    assert lance.dataset(table.uri).count_rows() == 4, "what was compacted before is not compacted again"


@pytest.mark.parametrize("sharding", [{}, {"by_hand": True}, {"identity": "id"}])
def test_a_writer_that_was_idle_meanwhile_writes_nothing(tmp_path: Path, sharding: dict[str, Any]) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast(), **sharding)
    idle = table.shard_writer if "by_hand" in sharding else table.writer
    writer = table.writer() if "by_hand" not in sharding else None
    lancewal.uninitialize(table.uri)
    with pytest.raises((NotInitializedError, lancewal.errors.PartialWriteError), match="MemWAL index"):
        writer.put({"id": 9}) if writer else idle(uuid4())
    assert not (tmp_path / "t" / "_mem_wal").exists()
    assert lancewal.initialize(table.uri).count_rows() == 2


def test_numpy_rows_make_a_table(tmp_path: Path) -> None:
    kind = np.dtype([("id", "<i8"), ("name", "U5"), ("vector", "<f8", (2,))])
    rows = np.array([(1, "a", [0.5, 1.0]), (2, "b", [0.25, 2.0])], kind)
    table = lancewal.create(tmp_path / "t", rows, key="id")
    assert table.schema.field("vector").type == VECTOR
    assert table.lookup(2) == {"id": 2, "name": "b", "vector": [0.25, 2.0]}


def test_of_two_that_make_a_table_at_a_time_neither_is_put_over_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, write = tmp_path / "t", CREATE.write_fragments

    def write_beside_a_rival(*args: Any, **how: Any) -> Any:
        made = write(*args, **how)
        monkeypatch.undo()
        rival = lancewal.create(uri, [{"id": 1, "text": "rival"}], key="id", writer_defaults=fast())
        with rival.writer() as writer:
            writer.put({"id": 2, "text": "rival"})
        return made

    monkeypatch.setattr(CREATE, "write_fragments", write_beside_a_rival)
    with pytest.raises(InvalidInputError, match="already exists"):
        lancewal.create(uri, [{"id": 1, "text": "late"}], key="id")
    table = lancewal.open(uri)
    assert table.scan(["text"]).to_table()["text"].to_pylist() == ["rival", "rival"]
    assert table.verify().ok


def test_a_table_whose_commit_lost_its_reply_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = lance.LanceDataset.commit

    def commit_without_reply(*args: Any, **how: Any) -> None:
        commit(*args, **how)
        monkeypatch.undo()
        raise OSError("connection reset")

    monkeypatch.setattr(lance.LanceDataset, "commit", staticmethod(commit_without_reply))
    assert lancewal.create(tmp_path / "t", ROWS, key="id").count_rows() == len(ROWS)


def test_create_makes_nothing_where_shards_of_an_earlier_table_are(tmp_path: Path) -> None:
    earlier = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast())
    with pytest.raises(InvalidInputError, match="already exists"):
        lancewal.create(tmp_path / "t", ROWS, key="id")
    for each in Path(earlier.uri).iterdir():
        if each.name != "_mem_wal":
            shutil.rmtree(each)
    with pytest.raises(InvalidInputError, match="earlier table"):
        lancewal.create(tmp_path / "t", ROWS, key="id")
    assert [each.name for each in Path(earlier.uri).iterdir()] == ["_mem_wal"]


def test_a_key_beside_the_marks_of_another_is_refused(tmp_path: Path) -> None:
    columns = pa.schema([pa.field("id", pa.int64(), False, KEY), pa.field("text", pa.string())])
    with pytest.raises(InvalidInputError, match="marked with the key"):
        lancewal.create(tmp_path / "t", columns, key="text")
    with pytest.raises(InvalidInputError, match="the key is 5"):
        lancewal.create(tmp_path / "t", columns, key=5)  # type: ignore[arg-type]
    assert not (tmp_path / "t").exists()
    assert lancewal.create(tmp_path / "t", columns, key="id").primary_key == ("id",)


def test_checkpoints_are_not_lost_with_the_write_path_and_leave_no_tags(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", ROWS, key="id", writer_defaults=fast())
    table.checkpoint("training")
    with pytest.raises(InvalidInputError, match="training"):
        lancewal.uninitialize(table.uri)
    assert table.at("training").count_rows() == len(ROWS)
    table.drop_checkpoint("training")
    lance.dataset(table.uri).tags.create("lancewal-half_made-0123456789abcdef", 1)
    lance.dataset(table.uri).tags.create("release", 1)
    lancewal.uninitialize(table.uri)
    assert list(lance.dataset(table.uri).tags.list()) == ["release"]


def test_a_schema_that_arrow_makes_no_rows_of_was_an_untyped_error(tmp_path: Path) -> None:
    columns = pa.schema({"id": pa.int64(), "either": pa.sparse_union([pa.field("a", pa.int32())])})
    with pytest.raises(InvalidInputError, match="union"):
        lancewal.create(tmp_path / "t", columns, key="id")
