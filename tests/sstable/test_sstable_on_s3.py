"""SSTables on object storage."""

from __future__ import annotations

import uuid

import numpy as np
import pyarrow as pa
import pytest

from lancewal.format.schema import TOMBSTONE
from lancewal.index.kinds import BTreeParams, IndexSpec
from lancewal.sstable import rebuild_sidecars
from lancewal.storage import layout
from tests.servers import S3Server
from tests.sstable.tables import Base, by_key, dead, key_field, rows_of, where


@pytest.fixture
def base(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> Base:
    # Without the storage options nothing may find the server.
    for name in ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name, raising=False)
    fields = [pa.field("gone", pa.int32()), key_field("id", pa.int64()), pa.field("t", pa.string())]
    return Base.create(
        s3.uri(uuid.uuid4().hex),
        fields,
        [{"id": 1, "t": "base"}, {"id": 2, "t": "base"}],
        storage_options=s3.storage_options,
    ).initialize()


def test_storage_options_reach_the_sstable_writer_and_every_reader(base: Base) -> None:
    index = IndexSpec("t_idx", "t", 2, BTreeParams())
    first = base.write([{"id": 5, "t": "a"}, {"id": 5, "t": "b"}, dead(id=1)], indexes=[index])
    base.dataset.drop_columns(["gone"])
    second = base.write([{"id": 6, "t": "c"}], generation=2)

    rows = base.lsm(first, second).to_table().to_pylist()
    assert by_key(rows, ["id"]) == {
        (2,): {"id": 2, "t": "base"},
        (5,): {"id": 5, "t": "b"},
        (6,): {"id": 6, "t": "c"},
    }
    table = base.open(first)
    assert table.lookup([pa.array([1, 5, 6])]).tolist() == [1, 0, -1]
    assert table.take(np.array([1, 0]), base.schema, ["id"], with_tombstone=True).to_pylist() == [
        {"id": 1, TOMBSTONE: True},
        {"id": 5, TOMBSTONE: False},
    ]
    assert rows_of(base.open(second).scan(base.schema, ["t"], filter=where("id = 6", base.schema))) == [
        {"t": "c"}
    ]


def test_sidecars_are_rebuilt_on_object_storage(base: Base) -> None:
    entry = base.write([{"id": 5, "t": "a"}, {"id": 6, "t": "b"}])
    directory = layout.sstable_dir(base.shard_id, entry.path)
    before = {info.path for info in base.store.list(directory)}
    for name in (layout.BLOOM_FILTER_NAME, layout.PK_PAGE_DATA_NAME, layout.PK_PAGE_LOOKUP_NAME):
        base.store.delete(f"{directory}/{name}")
    rebuild_sidecars(base.store, base.shard_id, entry, base.schema)
    assert {info.path for info in base.store.list(directory)} == before
    assert base.open(entry).lookup([pa.array([6, 7])]).tolist() == [1, -1]
