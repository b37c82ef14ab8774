"""One shard, written in turns by us and by pylance: each replays the other's rows and heeds its fence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import lance
import pyarrow as pa
import pytest

from lancewal.base.table import table_schema
from lancewal.errors import FencedError, InvalidInputError
from lancewal.format.shard_manifest import ShardFieldEntry
from lancewal.format.wal_entry import WalEntry
from lancewal.shard import WalAppender, WalTailer
from lancewal.shard.log import retained_positions
from lancewal.shard.manifest import ShardManifestStore
from lancewal.shard.tail import Replay
from lancewal.storage import ObjectStore, layout
from tests.servers import S3Server

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("name", pa.string()),
        pa.field("tags", pa.struct([("kind", pa.dictionary(pa.int32(), pa.string())), ("n", pa.int32())])),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)


class Peers:
    """A table and one of its shards, seen through both libraries."""

    def __init__(self, uri: str, options: dict[str, str] | None = None) -> None:
        self.dataset = lance.write_dataset(SCHEMA.empty_table(), uri, schema=SCHEMA, storage_options=options)
        self.dataset.initialize_mem_wal(unsharded=True)
        self.store = ObjectStore.from_uri(uri, options, fsync=False)
        self.shard = uuid4()
        self.columns = table_schema(self.dataset).stored
        self.manifests = ShardManifestStore(self.store, self.shard)

    def ours(self) -> WalAppender:
        known = self.manifests.read_latest()
        return WalAppender.open(self.store, self.shard, known.shard_spec_id if known else 0)

    def entries(self) -> list[WalEntry]:
        return list(WalTailer(self.store, self.shard))

    def positions(self) -> list[int]:
        return retained_positions(self.store, self.shard)

    @contextmanager
    def theirs(self) -> Iterator[lance.mem_wal.ShardWriter]:
        """pylance's writer. Closing it flushes, unless it was fenced."""
        writer = self.dataset.mem_wal_writer(str(self.shard), durable_write=True, max_wal_flush_interval_ms=1)
        try:
            yield writer
        finally:
            with suppress(OSError):
                writer.close()

    def rows(self, writer: lance.mem_wal.ShardWriter) -> dict[int, str | None]:
        found = writer.lsm_scanner().to_table()
        return dict(zip(found["id"].to_pylist(), found["name"].to_pylist(), strict=True))


def as_put(rows: dict[int, str]) -> pa.RecordBatch:
    """Rows as a user passes them to pylance."""
    return pa.record_batch(
        [
            pa.array(rows, pa.int64()),
            pa.array(rows.values()),
            pa.array([{"kind": name[:1], "n": key} for key, name in rows.items()], SCHEMA.field("tags").type),
            pa.array([[key, 0.5] for key in rows], SCHEMA.field("vector").type),
        ],
        schema=SCHEMA,
    )


def as_stored(columns: pa.Schema, rows: dict[int, str], *, deleted: bool = False) -> pa.RecordBatch:
    """Rows as they stand in an entry, with field ids and the tombstone."""
    if deleted:
        nulls = [pa.nulls(len(rows), field.type) for field in SCHEMA][1:]
        values = [pa.array(rows, pa.int64()), *nulls]
    else:
        values = as_put(rows).columns
    arrays = [array.cast(field.type) for array, field in zip(values, columns, strict=False)]
    return pa.record_batch([*arrays, pa.array([deleted] * len(rows))], schema=columns)


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    return Peers(str(tmp_path / "table"))


@pytest.fixture
def remote_peers(s3: S3Server) -> Peers:
    return Peers(s3.uri(f"{uuid4().hex}/table"), s3.storage_options)


def check_pylance_replays_our_entries(peers: Peers) -> None:
    appender = peers.ours()
    appender.append(
        [as_stored(peers.columns, {1: "a", 2: "b"})], generation=1, tags={"query": "q", "batch": "7"}
    )
    appender.append(
        [as_stored(peers.columns, {2: "newer"}), as_stored(peers.columns, {3: "c", 4: "d"})], generation=1
    )
    appender.append_pointer({"sstables": "none"})
    appender.append([as_stored(peers.columns, {1: ""}, deleted=True)], generation=1)
    appender.append([as_stored(peers.columns, {5: "e"})])
    with peers.theirs() as writer:
        assert peers.rows(writer) == {2: "newer", 3: "c", 4: "d", 5: "e"}
        found = writer.lsm_scanner().filter("id = 4").to_table().to_pylist()
        assert found == [{"id": 4, "name": "d", "tags": {"kind": "d", "n": 4}, "vector": [4.0, 0.5]}]


def test_pylance_replays_our_entries(peers: Peers) -> None:
    check_pylance_replays_our_entries(peers)


def test_pylance_replays_our_entries_on_s3(remote_peers: Peers) -> None:
    check_pylance_replays_our_entries(remote_peers)


def test_pylance_replays_several_claims_of_ours(peers: Peers) -> None:
    for number in range(3):
        peers.ours().append([as_stored(peers.columns, {number: f"epoch {number + 1}"})], generation=1)
    assert [entry.sentinel for entry in peers.entries()] == [False, True, False, True, False]
    with peers.theirs() as writer:
        assert peers.rows(writer) == {0: "epoch 1", 1: "epoch 2", 2: "epoch 3"}


def test_pylance_opens_a_shard_that_we_initialised(peers: Peers) -> None:
    made = peers.manifests.initialize_shard(1, [ShardFieldEntry("bucket", b"\x02\0\0\0")])
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
        assert peers.rows(writer) == {1: "a"}
    after = peers.manifests.require_latest()
    assert (after.field_values, after.shard_spec_id) == (made.field_values, 1)
    assert (after.writer_epoch, after.current_generation) == (1, 2)


def test_we_read_what_pylance_wrote(peers: Peers) -> None:
    first, second = as_put({1: "a", 2: "b"}), as_put({3: "c"})
    with peers.theirs() as writer:
        writer.put(first)
        writer.put(second)
        writer.delete(pa.table({"id": pa.array([2], pa.int64())}))
        entries = peers.entries()
        assert [(entry.position, entry.writer_epoch, entry.generation) for entry in entries] == [
            (1, 1, 1),
            (2, 1, 1),
            (3, 1, 1),
        ]
        assert [entry.write_id for entry in entries] == [None] * 3
        for entry in entries:
            assert entry.batches[0].schema.equals(peers.columns, check_metadata=True)
        rows = [row for entry in entries for row in entry.batches[0].to_pylist()]
        assert rows == [
            *({**row, "_tombstone": False} for row in [*first.to_pylist(), *second.to_pylist()]),
            {"id": 2, "name": None, "tags": None, "vector": None, "_tombstone": True},
        ]


def test_we_restore_what_pylance_left_unflushed(peers: Peers) -> None:
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
    with peers.theirs() as writer:
        writer.put(as_put({2: "b", 3: "c"}))
        # The rows of its first life are in an SSTable; these are not.
        appender = peers.ours()
        replay = Replay(appender, WalTailer(peers.store, peers.shard))
        assert [row["id"] for entry in replay.entries() for row in entry.batches[0].to_pylist()] == [2, 3]
        assert {entry.generation for entry in replay.entries()} == {2}


def test_our_sentinel_stops_pylances_next_durable_put(peers: Peers) -> None:
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
        appender = peers.ours()
        assert (appender.epoch, appender.sentinel_position) == (2, 2)
        for _ in range(2):
            with pytest.raises(OSError, match="fenced"):
                writer.put(as_put({2: "refused"}))
        with pytest.raises(OSError, match="fenced"):
            writer.close()
    assert peers.positions() == [1, 2]
    assert peers.manifests.require_latest().current_generation == 1
    appender.check_fenced()


def test_pylances_open_stops_our_appender(peers: Peers) -> None:
    appender = peers.ours()
    appender.append([as_stored(peers.columns, {1: "a"})], generation=1)
    with peers.theirs() as writer:
        for _ in range(2):
            with pytest.raises(FencedError) as refusal:
                appender.append([as_stored(peers.columns, {2: "refused"})], generation=1)
            assert (refusal.value.local_epoch, refusal.value.stored_epoch) == (1, 2)
        assert [(entry.writer_epoch, entry.sentinel) for entry in peers.entries()] == [(1, False), (2, True)]
        writer.put(as_put({3: "c"}))
        assert peers.rows(writer) == {1: "a", 3: "c"}


def test_pylances_open_stops_an_appender_that_never_wrote(peers: Peers) -> None:
    appender = peers.ours()
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
        with pytest.raises(FencedError):
            appender.append([as_stored(peers.columns, {2: "refused"})], generation=1)
    assert peers.manifests.require_latest().writer_epoch == 2


def test_a_shard_changes_hands_and_keeps_every_row(peers: Peers) -> None:
    model: dict[int, str] = {}
    for turn in range(4):
        mine = {turn: "ours", 100: f"ours in turn {turn}"}
        appender = peers.ours()
        manifest = peers.manifests.require_latest()
        appender.append([as_stored(peers.columns, mine)], generation=manifest.current_generation)
        model |= mine
        yours = {10 + turn: "theirs", 100: f"theirs in turn {turn}"}
        with peers.theirs() as writer:
            assert peers.rows(writer) == model
            writer.put(as_put(yours))
            model |= yours
            assert peers.rows(writer) == model
    epochs = [entry.writer_epoch for entry in peers.entries()]
    assert epochs == sorted(epochs)
    assert peers.positions() == list(range(1, len(epochs) + 1))


def test_a_cursor_hint_of_ours_does_not_disturb_a_live_pylance_writer(peers: Peers) -> None:
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
        peers.manifests.commit_update(None, lambda m: replace(m, wal_entry_position_last_seen=1))
        writer.put(as_put({2: "b"}))
        writer.close()
    manifest = peers.manifests.require_latest()
    assert (manifest.writer_epoch, manifest.current_generation) == (1, 2)
    assert manifest.replay_after_wal_entry_position == 2


def test_we_refuse_a_shard_of_pylances_under_another_spec(peers: Peers) -> None:
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
    before = {info.path: info.size for info in peers.store.list()}
    spec = peers.manifests.require_latest().shard_spec_id
    with pytest.raises(InvalidInputError, match=f"{peers.shard} belongs to sharding spec {spec}"):
        WalAppender.open(peers.store, peers.shard, spec + 1)
    assert {info.path: info.size for info in peers.store.list()} == before


def test_both_go_on_above_the_cursor_when_the_newest_covered_entry_was_kept(peers: Peers) -> None:
    with peers.theirs() as writer:
        for number in range(4):
            writer.put(as_put({number: "flushed"}))
    cursor = peers.manifests.require_latest().replay_after_wal_entry_position
    for position in range(1, cursor):
        peers.store.delete(layout.wal_entry(peers.shard, position))
    with peers.theirs() as writer:
        assert peers.positions() == [cursor, cursor + 1]
        appender = peers.ours()
        assert appender.sentinel_position == cursor + 2
        with pytest.raises(OSError, match="fenced"):
            writer.put(as_put({9: "refused"}))


def test_pylance_fences_below_the_cursor_when_the_wal_was_emptied(peers: Peers) -> None:
    """Why a collector must keep the newest covered entry: pylance's fence depends on it, ours does not."""
    with peers.theirs() as writer:
        for number in range(4):
            writer.put(as_put({number: "flushed"}))
    cursor = peers.manifests.require_latest().replay_after_wal_entry_position
    for position in range(1, cursor + 1):
        peers.store.delete(layout.wal_entry(peers.shard, position))
    with peers.theirs():
        assert peers.positions() == [1]
        # Our reader and our next claim are not led astray by it.
        tailer = WalTailer(peers.store, peers.shard)
        assert tailer.first_position() == tailer.next_position() == cursor + 1
        assert peers.ours().sentinel_position == cursor + 1


def test_shards_are_directories_that_both_name_alike(peers: Peers) -> None:
    with peers.theirs() as writer:
        writer.put(as_put({1: "a"}))
    (name,) = peers.store.list_directories(layout.MEM_WAL_DIR)
    assert layout.parse_shard_dir(name) == UUID(str(peers.shard))
    below = {
        path.rsplit("/", 1)[-1]
        for path in (info.path for info in peers.store.list(layout.shard_dir(peers.shard)))
    }
    assert layout.wal_entry(peers.shard, 1).rsplit("/", 1)[-1] in below
    assert layout.manifest_file(peers.shard, 2).rsplit("/", 1)[-1] in below
    (sstable,) = peers.manifests.require_latest().sstables
    assert layout.parse_sstable_name(sstable.path) == 1
    assert layout.BLOOM_FILTER_NAME in below
    assert peers.manifests.read_hint() == 2
