"""A table whose disk is unmounted under its writer, and mounted again: nothing is written to where it was."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import lancewal
from lancewal.errors import LanceWalError, StorageError
from lancewal.sstable import write_sstable
from lancewal.storage import ObjectStore
from tests.shards import stored_batches
from tests.tables import ids, rows, wal_table


@contextmanager
def unmounted(place: Path, *, mount_point: bool) -> Iterator[None]:
    """As long as the block runs, ``place`` is not there, or an empty directory as a mount point is one."""
    away = place.with_name("away")
    os.rename(place, away)
    if mount_point:
        place.mkdir()
    yield
    if place.exists():
        os.rename(place, place.with_name("shadow"))
    os.rename(away, place)


@pytest.mark.parametrize("mount_point", [True, False], ids=["mount point", "below it"])
def test_a_put_while_the_disk_was_unmounted_was_acknowledged_and_lost(
    tmp_path: Path, mount_point: bool
) -> None:
    """The directories were made again on the disk below. When its own was back, the row was out of sight."""
    table = wal_table(tmp_path / "table")
    writer = table.writer(take_over="now")
    writer.put(rows(0, 3))
    refusal = pytest.raises(LanceWalError, match="see that its disk is mounted")
    with unmounted(tmp_path / "table", mount_point=mount_point), refusal:
        writer.put(rows(10, 3))
    with suppress(LanceWalError):
        writer.close()
    with table.writer(take_over="now") as writer:
        writer.put(rows(20, 3))
    assert ids(lancewal.open(table.uri).scan().to_table()) == [0, 1, 2, 20, 21, 22]


@pytest.mark.parametrize("mount_point", [True, False], ids=["mount point", "below it"])
def test_an_sstable_that_lance_wrote_while_the_disk_was_unmounted_could_be_published(
    tmp_path: Path, mount_point: bool
) -> None:
    """Lance makes what is missing of the path; the next try listed that SSTable when the disk was back."""
    table = wal_table(tmp_path / "table")
    writer = table.writer(take_over="now")
    writer.put(rows(0, 3))
    (shard,) = writer.shard_writers.values()
    flushes = shard._mode._flushes  # type: ignore[attr-defined]
    memtable = shard._mode._active  # type: ignore[attr-defined]
    with unmounted(tmp_path / "table", mount_point=mount_point), pytest.raises(StorageError, match="mounted"):
        flushes._write_sstable(memtable)
    writer.close()
    assert ids(lancewal.open(table.uri).scan().to_table()) == [0, 1, 2]
    assert table.verify().ok


def test_files_in_a_directory_that_could_not_be_listed_were_not_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The walk passed over it in silence, and the manifest named an SSTable that a power cut could take."""
    table = wal_table(tmp_path / "table")
    base = table._reader.base()
    store = ObjectStore.from_uri(table.uri, fsync=True)
    real = os.scandir

    def scandir(path: object = ".") -> object:
        if str(path).endswith("/data"):
            raise OSError(24, "Too many open files", path)
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match="cannot sync"):
        write_sstable(
            store=store,
            shard_id=table.shard_for(),
            generation=1,
            schema=base.schema,
            batches=stored_batches(base, rows(0, 3)),
            storage_version=base.storage_version,
        )
