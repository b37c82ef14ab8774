"""Nothing below a table is followed out of it: neither symbolic links nor names in records."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import pytest

import lancewal
from lancewal.base.table import BaseTable
from lancewal.errors import (
    CorruptManifestError,
    InvalidInputError,
    LanceWalError,
    StorageError,
    WalCorruptError,
)
from lancewal.format.protos import ShardManifestMessage
from lancewal.format.shard_manifest import SsTableEntry, encode_manifest
from lancewal.format.wal_entry import WalEntry
from lancewal.maintenance import Resource
from lancewal.maintenance.reports import Kind
from lancewal.publish.feed import ChangeFeed
from lancewal.publish.sstable_pointers import SsTablePointer
from lancewal.reader.table_reader import TableReader
from lancewal.sstable import SsTable
from lancewal.storage import ObjectStore, layout
from lancewal.table import Table
from tests.maintenance.support import Site, three_generations
from tests.tables import rows

PRECIOUS = "a year of work"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return three_generations(tmp_path / "table")


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A directory that looks like an SSTable and is not the table's."""
    outside = tmp_path / "outside"
    for name in ("_versions/1.manifest", "data/x.lance", ".half.tmp"):
        (outside / name).parent.mkdir(parents=True, exist_ok=True)
        (outside / name).write_text(PRECIOUS)
    return outside


def untouched(outside: Path) -> bool:
    files = [path for path in outside.rglob("*") if path.is_file()]
    return len(files) == 3 and all(path.read_text() == PRECIOUS for path in files)


def place(site: Site, *parts: str) -> Path:
    return Path(site.store.uri, layout.shard_dir(site.shard_id), *parts)


class TestDoor:
    """What the store itself does; ``table/link`` leads to ``outside``."""

    @pytest.fixture
    def store(self, tmp_path: Path, outside: Path) -> ObjectStore:
        store = ObjectStore.from_uri(tmp_path / "table", fsync=False)
        store.put("shard/a", b"x")
        os.symlink(outside, tmp_path / "table" / "link")
        os.symlink(outside / "data" / "x.lance", tmp_path / "table" / "shard" / "file")
        return store

    @pytest.mark.parametrize(
        "call",
        [
            lambda store: store.get("link/data/x.lance"),
            lambda store: store.get("shard/file"),
            lambda store: store.get_range("shard/file", 0, 1),
            lambda store: store.head("link/data/x.lance"),
            lambda store: store.head("shard/file"),
            lambda store: store.put("link/new", b"x"),
            lambda store: store.put_if_absent("link/data/new", b"x"),
            lambda store: store.list("link"),
            lambda store: store.list("link/data"),
            lambda store: store.link("link/data"),
            lambda store: store.list_staging("link/data"),
            lambda store: store.list_directories("link"),
            lambda store: store.list_directories("link/data"),
            lambda store: store.delete("link/data/x.lance"),
            lambda store: store.delete_prefix("link/_versions"),
            lambda store: store.refuse_links("link"),
            lambda store: store.refuse_links("shard"),
        ],
    )
    def test_no_way_leads_through_a_link(
        self, store: ObjectStore, outside: Path, call: Callable[[ObjectStore], object]
    ) -> None:
        with pytest.raises(StorageError, match="symbolic link"):
            call(store)
        assert untouched(outside)

    def test_a_link_is_listed_as_itself(self, store: ObjectStore) -> None:
        assert [info.path for info in store.list()] == ["link", "shard/a", "shard/file"]
        link = store.link("link")
        assert link is not None
        assert link.path == "link"
        assert (store.link("shard"), store.link("shard/a"), store.link("nothing/here")) == (None, None, None)
        assert store.list_directories() == ["link", "shard"]
        assert store.list_directories("shard") == ["file"]
        assert store.list_staging() == []

    def test_a_link_is_deleted_as_itself(self, store: ObjectStore, outside: Path) -> None:
        store.delete("shard/file")
        assert store.delete_prefix("link") == 1
        assert untouched(outside)
        assert [info.path for info in store.list()] == ["shard/a"]

    def test_a_put_replaces_a_link_by_an_object(self, store: ObjectStore, outside: Path) -> None:
        store.put("shard/file", b"ours")
        assert (store.get("shard/file"), untouched(outside)) == (b"ours", True)

    def test_a_link_that_leads_nowhere(self, store: ObjectStore) -> None:
        os.symlink("nowhere", Path(store.uri) / "broken")
        with pytest.raises(StorageError, match="symbolic link"):
            store.get("broken")
        store.delete("broken")
        assert store.head("broken") is None

    def test_a_directory_that_becomes_a_link_is_not_deleted_through(
        self, store: ObjectStore, outside: Path
    ) -> None:
        """The store knows the directory as its own from before."""
        store.put("shard/deep/x.lance", b"x")
        shutil.rmtree(Path(store.uri) / "shard" / "deep")
        os.symlink(outside / "data", Path(store.uri) / "shard" / "deep")
        for call in (store.delete, store.list, store.delete_prefix):
            with pytest.raises(StorageError, match="symbolic link"):
                call("shard/deep/x.lance" if call is store.delete else "shard/deep/below")
        assert untouched(outside)


class TestTheTableItself:
    def test_may_be_reached_through_links(self, tmp_path: Path) -> None:
        site = three_generations(tmp_path / "disk" / "table")
        os.symlink(tmp_path / "disk", tmp_path / "mount")
        os.symlink(tmp_path / "mount" / "table", tmp_path / "name")
        expected = site.merged()
        linked = Site.__new__(Site)
        linked.store, linked.shard_id = ObjectStore.from_uri(tmp_path / "name", fsync=False), site.shard_id
        linked.flush(rows(90, 1))
        assert linked.merged() == sorted([*expected, (90, "name_90")])
        linked.compact()
        linked.collect()
        assert linked.verify().findings == []
        assert linked.plain() == site.merged()


class TestGarbageCollection:
    @pytest.mark.parametrize("min_age", [None, timedelta(0)])
    def test_does_not_delete_what_a_link_leads_to(
        self, site: Site, outside: Path, min_age: timedelta | None
    ) -> None:
        names = ["0123abcd_gen_1", f"0123abcd_gen_{1 << 62}", "0123abcd_gen_2"]
        for name in names:
            os.symlink(outside, place(site, name))
        report = site.collect(min_age=min_age)
        assert untouched(outside)
        assert {name for name in names if name in report.names(Resource.ORPHANS)} == set(names)
        assert not any(os.path.lexists(place(site, name)) for name in names)
        assert len(site.merged()) == 32

    def test_does_not_follow_a_link_to_half_written_files(self, site: Site, outside: Path) -> None:
        os.symlink(outside, Path(site.store.uri, layout.MEM_WAL_DIR, "elsewhere"))
        os.symlink(outside, place(site, "wal", "elsewhere"))
        site.collect()
        assert untouched(outside)

    def test_unlinks_a_wal_entry_that_is_a_link(self, site: Site, outside: Path) -> None:
        entry = Path(site.store.uri, layout.wal_entry(site.shard_id, 1))
        entry.unlink()
        os.symlink(outside / "data" / "x.lance", entry)
        site.collect()
        assert (os.path.lexists(entry), untouched(outside)) == (False, True)


def moved(path: Path, to: Path) -> Path:
    """As somebody does who is short of space."""
    shutil.move(path, to)
    os.symlink(to, path)
    return path


class TestParts:
    """A part of the table that was moved away and linked is missing, and nobody takes it for empty."""

    @pytest.mark.parametrize("part", ["_mem_wal", "shard", "wal", "manifest"])
    def test_every_operation_says_so(self, site: Site, tmp_path: Path, part: str) -> None:
        where = {"_mem_wal": Path(site.store.uri, "_mem_wal"), "shard": place(site)}
        moved(where.get(part, place(site, part)), tmp_path / "moved")
        before = sorted(path for path in (tmp_path / "moved").rglob("*"))
        for name, operation in operations(site.store.uri, site.shard_id).items():
            if part == "wal" and name in ("compact", "shards"):
                # They need no log.
                continue
            with pytest.raises(LanceWalError, match="symbolic link"):
                operation()
        assert sorted(path for path in (tmp_path / "moved").rglob("*")) == before

    @pytest.mark.parametrize("part", ["", "data", "_versions", "_pk_index"])
    def test_an_sstable_is_not_read_through_a_link(self, site: Site, tmp_path: Path, part: str) -> None:
        entry = site.manifest.sstables[0]
        moved(place(site, entry.path, part), tmp_path / "moved")
        for read in (
            lambda: TableReader(site.store).scan().to_table(),
            lambda: SsTable.open(site.store, site.shard_id, entry).dataset,
            site.compact,
        ):
            with pytest.raises(LanceWalError, match="symbolic link"):
                read()
        assert Kind.SSTABLE_UNREADABLE in {finding.kind for finding in site.verify().findings}


def operations(uri: str, shard_id: UUID) -> dict[str, Callable[[], object]]:
    """What users do with a table, each from a fresh start."""

    def table() -> Table:
        return lancewal.open(uri)

    def changes() -> object:
        store = ObjectStore.from_uri(uri)
        feed = ChangeFeed(store, BaseTable.open(uri, store=store).schema)
        return list(feed.changes(feed.earliest(), feed.latest()))

    return {
        "scan": lambda: table().scan().to_table(),
        "lookup": lambda: table().lookup([1]),
        "count": lambda: table().count_rows(),
        "changes": changes,
        "write": lambda: table().shard_writer(shard_id),
        "flush": lambda: table().flush(),
        "compact": lambda: table().compact(),
        "gc": lambda: table().gc(),
        "status": lambda: table().status(),
        "shards": lambda: table().shards(),
    }


class TestNamesInRecords:
    PATHS = ("../../outside", "/outside", "..", "a/b", "", "\\outside")

    @pytest.mark.parametrize("path", PATHS)
    def test_every_operation_refuses_a_manifest_that_leads_out(
        self, site: Site, outside: Path, path: str
    ) -> None:
        manifest = site.manifest
        later = replace(manifest, version=manifest.version + 1)
        message = ShardManifestMessage.FromString(encode_manifest(later))
        message.sstables[0].path = path
        file = layout.manifest_file(site.shard_id, later.version)
        site.store.put(file, message.SerializeToString(deterministic=True))
        for operation in operations(site.store.uri, site.shard_id).values():
            with pytest.raises(CorruptManifestError, match="path"):
                operation()
        found = site.verify().findings
        assert Kind.MANIFEST_UNREADABLE in {finding.kind for finding in found}
        assert untouched(outside)

    @pytest.mark.parametrize("name", PATHS)
    def test_a_pointer_that_leads_out_is_corrupt(self, site: Site, name: str) -> None:
        entry = WalEntry(
            site.shard_id,
            3,
            1,
            None,
            [],
            sentinel=True,
            tags=SsTablePointer("run", (name,), 1, f"{'0' * 32}:1").tags(),
        )
        with pytest.raises(WalCorruptError, match="out of the shard"):
            SsTablePointer.of(entry)

    @pytest.mark.parametrize("tag", ["../../../../outside:1", "", "0" * 32, f"{'0' * 32}:x"])
    def test_a_pointer_of_no_transaction_is_corrupt(self, site: Site, tag: str) -> None:
        tags = SsTablePointer("run", ("0a1b2c3d_gen_1",), 1, tag).tags()
        entry = WalEntry(site.shard_id, 3, 1, None, [], sentinel=True, tags=tags)
        with pytest.raises(WalCorruptError, match="transaction"):
            SsTablePointer.of(entry)

    @pytest.mark.parametrize("name", PATHS)
    def test_no_path_is_made_of_a_name_that_leads_out(self, site: Site, name: str) -> None:
        with pytest.raises(InvalidInputError, match="directory"):
            SsTable.open(site.store, site.shard_id, SsTableEntry(1, name))
