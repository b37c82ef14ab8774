"""SSTables on object storage are made in a temporary directory and uploaded: all of each or nothing."""

from __future__ import annotations

import errno
import shutil
import tempfile
import uuid
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from lancewal.base import BaseTable
from lancewal.errors import OutcomeUnknownError, StorageError
from lancewal.index.kinds import BTreeParams, FullTextParams, IndexSpec, VectorParams
from lancewal.shard.discovery import discover_manifests
from lancewal.sstable import writer as sstable_writer
from lancewal.storage import ObjectStore, layout
from tests.faults import FaultyStore
from tests.servers import S3Server
from tests.sstable.tables import Base, Row, dead, key_field
from tests.tables import open_writer

INDEXES = [
    IndexSpec("number", "n", 1, BTreeParams()),
    IndexSpec("words", "t", 2, FullTextParams(with_position=True)),
    IndexSpec("near", "v", 3, VectorParams(2)),
]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files, with nothing else in it."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


@pytest.fixture
def base(s3: S3Server) -> Base:
    fields = [
        key_field("id", pa.int64()),
        pa.field("n", pa.int64()),
        pa.field("t", pa.string()),
        pa.field("v", pa.list_(pa.float32(), 2)),
    ]
    made = Base.create(s3.uri(uuid.uuid4().hex), fields, storage_options=s3.storage_options).initialize()
    made.store = FaultyStore(made.store)
    return made


def some_rows(count: int = 50) -> list[Row]:
    return [*({"id": i, "n": i, "t": f"word{i} all", "v": [i, 1.0]} for i in range(count)), dead(id=1000)]


def files(store: ObjectStore, directory: str) -> dict[str, bytes]:
    return {info.path.removeprefix(f"{directory}/"): store.get(info.path) for info in store.list(directory)}


def test_every_file_that_lance_and_we_make_is_uploaded(
    base: Base, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, bytes] = {}
    upload: Callable[..., None] = sstable_writer._upload

    def watched(local: ObjectStore, store: ObjectStore, directory: str, *more: object) -> None:
        root = Path(str(local.local_path(directory)))
        # By the file system: what our own listing left out would be left out twice.
        made.update(
            {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        )
        upload(local, store, directory, *more)

    monkeypatch.setattr(sstable_writer, "_upload", watched)
    entry = base.write(some_rows(), indexes=INDEXES)

    uploaded = files(base.store, layout.sstable_dir(base.shard_id, entry.path))
    newest = min(name for name in made if name.endswith(".manifest"))
    expected = {n: d for n, d in made.items() if not n.startswith(("_transactions/", "_versions/"))}
    assert uploaded == {**expected, newest: made[newest]}
    assert len({name.split("/")[1] for name in uploaded if name.startswith("_indices/")}) == 3
    dataset = base.lance_sstable(entry)
    assert dataset.to_table(filter="n = 7")["id"].to_pylist() == [7]
    assert dataset.to_table(full_text_query="word9")["id"].to_pylist() == [9]
    nearest = dataset.to_table(nearest={"column": "v", "q": [3.0, 1.0], "k": 1})
    assert nearest["id"].to_pylist() == [3]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("after", [False, True], ids=["not there", "perhaps there"])
def test_an_sstable_of_which_any_file_was_not_uploaded_is_refused(
    base: Base, temporary: Path, after: bool
) -> None:
    store = base.store
    assert isinstance(store, FaultyStore)
    base.write(some_rows(), indexes=INDEXES)
    puts = store.faults.count("put")
    assert puts > 10
    for nth in range(1, puts + 1):
        store.faults.clear()
        store.faults.fail("put", nth=nth, after=after, where=layout.shard_dir(base.shard_id))
        with pytest.raises(StorageError) as refused:
            base.write(some_rows(), indexes=INDEXES)
        assert not isinstance(refused.value, OutcomeUnknownError), "nobody has seen the directory"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("kind", ["data/", "_indices/", "_versions/", "bloom", "_pk_index", ".json"])
def test_a_manifest_never_lists_an_sstable_with_a_file_missing(
    base: Base, temporary: Path, kind: str
) -> None:
    store = base.store
    assert isinstance(store, FaultyStore)
    opened = BaseTable.open(base.uri, store.storage_options, store=store)
    writer = open_writer(opened, base.shard_id, store=store, indexes=INDEXES)
    rows = pa.Table.from_pylist(some_rows()[:-1], schema=base.dataset.schema)
    writer.put(rows)
    store.faults.fail("put", where=lambda path: "_gen_" in path and kind in path)
    writer.close()  # tries again

    (manifest,) = discover_manifests(store)
    directories = {info.path.split("/")[2] for info in store.list(layout.shard_dir(base.shard_id))}
    assert len([name for name in directories if "_gen_" in name]) == 2, "one failed"
    (entry,) = manifest.sstables
    assert base.lance_sstable(entry).count_rows() == 50
    assert len(base.lance_sstable(entry).describe_indices()) == 3
    listed = [call.path for call in store.faults.calls if call.kind in ("put", "put_if_absent")]
    commit = max(
        i for i, path in enumerate(listed) if "/manifest/" in path and path.endswith(layout.MANIFEST_SUFFIX)
    )
    assert max(i for i, path in enumerate(listed) if entry.path in path) < commit
    assert list(temporary.iterdir()) == []


def test_a_directory_for_temporary_files_that_fails_is_a_storage_error(
    base: Base, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(temporary / "gone"))
    with pytest.raises(StorageError, match="gone"):
        base.write(some_rows())
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))

    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sstable_writer, "_write_key_index", full)
    with pytest.raises(StorageError, match="No space left"):
        base.write(some_rows())
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize(
    "lost",
    ["", "data/*", "_versions/*", "_indices/*", "_indices/*/page_data*", "_pk_index/*", "bloom*", "*.json"],
)
def test_rows_were_lost_with_a_file_that_somebody_deleted_before_its_upload(
    base: Base, temporary: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """By a job that tidies up /tmp: the SSTable was listed without the file."""
    upload: Callable[..., None] = sstable_writer._upload

    def swept(local: ObjectStore, store: ObjectStore, directory: str, *more: object) -> None:
        root = Path(str(local.local_path(directory)))
        for each in sorted(root.glob(lost)) if lost else [root]:
            shutil.rmtree(each) if each.is_dir() else each.unlink()
        upload(local, store, directory, *more)

    monkeypatch.setattr(sstable_writer, "_upload", swept)
    with pytest.raises(StorageError, match="temporary files"):
        base.write(some_rows(), indexes=INDEXES)
    assert list(temporary.iterdir()) == []
