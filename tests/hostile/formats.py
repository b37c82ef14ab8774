"""Every format that lancewal decodes: real files of it, and a decoder that can be called on other bytes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa

from lancewal.base.columns import ColumnRuns
from lancewal.errors import StorageError
from lancewal.format import (
    BloomFilter,
    decode_entry,
    decode_header,
    decode_manifest,
    decode_record,
    encode_entry,
    encode_record,
    encode_sentinel,
    entry_schema,
    read_base_manifest,
)
from lancewal.ingest.journal import Journal, Part
from lancewal.maintenance.backup import BackupRecord, CopiedFile
from lancewal.maintenance.checkpoints import _Record
from lancewal.maintenance.needs import StoredLooks
from lancewal.maintenance.plan import CompactionPlan, plan_compaction
from lancewal.maintenance.settings import UpkeepSettings, read_upkeep_settings, store_upkeep_settings
from lancewal.publish.sstable_pointers import SsTablePointer
from lancewal.publish.transactions import Run, ShardWrite, Transaction, TransactionLog, Unsettled
from lancewal.reader import ShardPlace, TableState
from lancewal.service.duties import note_duty, read_duties
from lancewal.service.owners import encoded_owner, read_owners
from lancewal.service.presence import presence_at
from lancewal.service.requests import _answer as answer_to
from lancewal.shard import ShardManifestStore
from lancewal.sstable import SsTableNotes
from lancewal.storage import ObjectStore, layout
from tests.maintenance.support import Site
from tests.tables import KEYED, rows

SHARD = uuid.UUID(int=7)
_TEXTS = pa.array(["a", None, "c" * 40])
_COLUMNS = {
    "id": pa.array([1, 2, 3]),
    "text": _TEXTS,
    "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(12, dtype=np.float32)), 4),
    "tags": pa.array([["x"], [], None]),
    "place": pa.array([{"x": 1}, None, {"x": 3}]),
    "word": _TEXTS.dictionary_encode(),
    "price": pa.array([1, 2, None]).cast(pa.decimal128(21, 2)),
}


@dataclass(frozen=True)
class Format:
    """``decode`` returns what can be compared. ``is_sealed``: a checksum tells damaged files from others."""

    name: str
    files: Sequence[bytes]
    decode: Callable[[bytes], Any]
    is_sealed: bool


def formats(where: Path) -> list[Format]:
    """All of them; ``where`` is an empty directory."""
    site = _site(where / "table")
    return [
        *_wal_entries(where, site),
        *_manifests(where, site),
        *_sidecars(site),
        *_records(),
        *_records_of_processes(),
        *_plans(site),
    ]


def _site(where: Path) -> Site:
    site = Site(where, data=pa.Table.from_batches([rows(0, 20)]))
    lance.dataset(str(where)).create_scalar_index("id", "BTREE")
    for start in (0, 10):
        site.flush(rows(start, 12), [start])
    site.compact()
    site.flush(rows(5, 12))
    return site


def _entry(data: bytes) -> Any:
    entry = decode_entry(data, SHARD, 1)
    found = [batch.to_pydict() for batch in entry.batches]
    return entry.writer_epoch, entry.generation, entry.sentinel, entry.tags, entry.base_version, found


def _wal_entries(where: Path, site: Site) -> Iterator[Format]:
    batch = pa.record_batch(_COLUMNS)
    ours = [
        bytes(encode_entry(entry_schema(batch.schema, 3, 2), [batch, batch], {"run": "7"}, base_version=4)),
        bytes(encode_entry(entry_schema(KEYED, 3, None), [rows(0, 30)])),
        bytes(encode_sentinel(4, SsTablePointer("r", ("a_gen_1",), 1, f"{'0' * 32}:1").tags())),
    ]
    peer_table = where / "peer"
    lance.write_dataset(KEYED.empty_table(), str(peer_table), schema=KEYED).initialize_mem_wal(unsharded=True)
    with lance.dataset(str(peer_table)).mem_wal_writer(str(SHARD), durable_write=True) as writer:
        writer.put(pa.Table.from_batches([rows(0, 5)]))
        theirs = [path.read_bytes() for path in sorted(peer_table.rglob("wal/*.arrow"))]
    assert theirs
    yield Format("WAL entry of ours", ours, _entry, True)
    yield Format("WAL entry of Lance's", theirs, _entry, False)
    yield Format("header of a WAL entry", [*ours, *theirs], lambda d: decode_header(d, SHARD, 1), False)
    yield Format(
        "pointer in a WAL entry", ours[2:], lambda d: SsTablePointer.of(decode_entry(d, SHARD, 1)), True
    )


def _manifests(where: Path, site: Site) -> Iterator[Format]:
    ours = [site.store.get(info.path) for info in site.store.list(layout.manifest_dir(site.shard_id))]
    ours = [bytes(each) for each in ours if not bytes(each).startswith(b"{")]
    theirs = [path.read_bytes() for path in sorted((where / "peer").rglob("manifest/*.binpb"))]
    base = [path.read_bytes() for path in sorted((where / "table" / "_versions").glob("*.manifest"))]
    yield Format("shard manifest of ours", ours, decode_manifest, True)
    yield Format("shard manifest of Lance's", theirs, decode_manifest, False)
    yield Format("manifest of the base table", base[:6], read_base_manifest, False)


def _sidecars(site: Site) -> Iterator[Format]:
    directory = layout.sstable_dir(site.shard_id, site.manifest.sstables[-1].path)
    notes = bytes(site.store.get(f"{directory}/{layout.SSTABLE_NOTES_NAME}"))
    bloom = bytes(site.store.get(f"{directory}/{layout.BLOOM_FILTER_NAME}"))
    columns = bytes(site.store.get(layout.COLUMN_HISTORY))
    hint = bytes(site.store.get(layout.version_hint(site.shard_id)))
    store = ObjectStore.from_uri("memory://hints/table")

    def read_hint(data: bytes) -> Any:
        store.put(layout.version_hint(SHARD), data)
        return _present(ShardManifestStore(store, SHARD).read_hint())

    yield Format(
        "notes of an SSTable", [notes], lambda d: SsTableNotes.parse(d.decode(errors="replace"), "t"), True
    )
    yield Format("bloom filter", [bloom], lambda d: BloomFilter.from_bytes(d).to_bytes(), False)
    # Whoever finds no history reads the versions themselves.
    yield Format("history of columns", [columns], lambda d: _present(ColumnRuns.from_json(d)), True)
    yield Format("version hint", [hint], read_hint, False)


_NO_TIME = datetime.min.replace(tzinfo=UTC)


def _present(found: Any) -> Any:
    """Some records are as good as absent if they are damaged."""
    if not found:
        raise StorageError("it is damaged, and begins anew")
    return found


def _text(data: bytes) -> str:
    return data.decode(errors="replace")


def _records() -> Iterator[Format]:
    """Records that are read from a store: the damaged one takes the place of the file."""
    started, ended, begun = (
        ObjectStore.from_uri(f"memory://hostile/{name}") for name in ("started", "ended", "begun")
    )
    log = TransactionLog(started, Transaction("app", 3))
    log.start(Run(3, "0a1b2c3d" * 4, {SHARD: 4}, {SHARD: ("a_gen_1",)}))
    assert log.read().runs
    yield _stored(started, "start of a transaction", lambda: (log.read(), len(Unsettled.read(started))))
    done = TransactionLog(ended, Transaction("app", 3))
    done.finish([ShardWrite(SHARD, 7, False, 9, 1_200, 1, 2)], {SHARD: 9})
    yield _stored(
        ended,
        "end of a transaction",
        lambda: (done.read(), done.floors(done.read()), done.last_written()),
    )
    journal = Journal(begun, "/files")
    journal.begin(0, Part("a.parquet", 10, 20, 0, 5, False))
    yield _stored(begun, "journal of an ingest", journal.read)


def _records_of_processes() -> Iterator[Format]:
    """Who writes, who is asked for something, who keeps the table in shape, and by which settings."""
    owned, asked, dutiful, settled = (
        ObjectStore.from_uri(f"memory://hostile/{name}") for name in ("owned", "asked", "dutiful", "settled")
    )
    owner_id = "0a1b2c3d4e5f6071"
    owned.put(
        layout.owner_record(owner_id), encoded_owner(owner_id, {SHARD: 4}, timedelta(30), "host:9465", 7)
    )

    def owners() -> Any:
        """Without their times, which are the storage's."""
        return _present([replace(each, last_beat=_NO_TIME, now=_NO_TIME) for each in read_owners(owned)])

    yield _stored(owned, "record of an owner", owners)

    request = f"{layout.owner_dir(owner_id)}/0011223344556677.asked"
    asked.put(request, encode_record({"do": "flush", "shards": {str(SHARD): {}}}))
    presence = presence_at(asked.uri)

    def answer() -> Any:
        info = asked.head(request)
        assert info is not None
        answer_to(presence, asked, info)
        answered = request.replace("asked", "answered")
        try:
            found = decode_record(asked.get(answered), must_have_checksum=True)
        finally:
            asked.delete(answered)
        if "refused" in found:
            raise StorageError(found["refused"])
        return found

    yield _stored(asked, "request to an owner", answer)
    note_duty(dutiful, "compact", under_way=False, seconds=1.5, done="2 shards", failures=1)
    yield _stored(
        dutiful,
        "duty of upkeep",
        lambda: _present([replace(each, at=_NO_TIME) for each in read_duties(dutiful).values()]),
    )
    store_upkeep_settings(settled, UpkeepSettings(max_sstables=9, version_age=timedelta(days=3)))

    def settings() -> Any:
        found = read_upkeep_settings(settled)
        return _present(None if found == UpkeepSettings() else found)

    # The defaults count where it is damaged.
    yield _stored(settled, "settings of upkeep", settings)


def _stored(store: ObjectStore, name: str, read: Callable[[], Any]) -> Format:
    (path,) = [info.path for info in store.list("")]
    original = bytes(store.get(path))

    def decode(data: bytes) -> Any:
        store.put(path, data)
        try:
            return read()
        finally:
            store.put(path, original)

    return Format(name, [original], decode, True)


def _plans(site: Site) -> Iterator[Format]:
    plan = plan_compaction(site.store).to_json().encode()
    site.look()
    shard_looks = f"{layout.LOOKS_DIR}/{site.shard_id}.json"
    looks = bytes(site.store.get(shard_looks))

    def read_looks(data: bytes) -> Any:
        site.store.put(shard_looks, data)
        return _present(StoredLooks.read(site.store, site.shard_id).looks)

    # Whoever finds no looks begins anew, and deletes nothing too early.
    yield Format("looks of a collection", [looks], read_looks, True)
    yield Format(
        "plan of a compaction", [plan], lambda d: CompactionPlan.from_json(d.decode(errors="replace")), False
    )
    record = BackupRecord("b1", "now", 3, "m", (CopiedFile("a.lance", "f/a", 7, 9),)).to_json()
    state = TableState(site.store.uri, 3, (ShardPlace(site.manifest, 7),), 11)
    checkpoint = _Record(state, timedelta(days=2)).encode()
    yield Format("checkpoint", [checkpoint], lambda d: _Record.decode(d, "c", site.store.uri), True)
    yield Format("record of a backup", [record], lambda d: BackupRecord.from_json(d, "t"), True)
