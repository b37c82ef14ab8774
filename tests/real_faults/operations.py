"""Every operation of a table that has rows at every level, and what is known of the rows afterwards."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import lance
import pyarrow as pa

import lancewal
from lancewal.errors import LanceWalError, OutcomeUnknownError, PartialWriteError
from lancewal.ingest import Ingestion, find_files
from lancewal.publish import ChangeFeed
from lancewal.storage import ObjectStore
from tests.faults import Faults, FaultyStore
from tests.maintenance.support import collect_later
from tests.tables import KEY

DIMENSION = 4
SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)
BASE_ROWS, ROWS = 40, 12
#: Where rows of what is under test begin.
FRESH = 1000
_DEFAULTS = {"stats_log_interval_ms": "0"}


def rows(start: int, count: int, word: str = "old") -> pa.RecordBatch:
    ids = range(start, start + count)
    return pa.record_batch(
        [
            pa.array(ids, pa.int64()),
            pa.array([f"{word} text {i}" for i in ids]),
            pa.array([[float(i)] * DIMENSION for i in ids], SCHEMA.field("vector").type),
        ],
        schema=SCHEMA,
    )


def build(where: Path) -> dict[int, str]:
    """A table with base, compacted and flushed rows, a tail, and garbage; returns its rows."""
    dataset = lance.write_dataset(pa.Table.from_batches([rows(0, BASE_ROWS)]), str(where), schema=SCHEMA)
    dataset.create_scalar_index("text", "INVERTED", with_position=False)
    table = lancewal.initialize(where, bucket=("id", 2), writer_defaults={"fsync": "false", **_DEFAULTS})
    for start in (10, 50):
        with table.writer(take_over="now") as writer:
            writer.put(rows(start, ROWS, "new"))
        if start == 10:
            table.compact()
    writer = table.writer(take_over="now")
    writer.put(rows(56, ROWS, "newest"))
    writer.delete([0, 1])
    _leave_tail(writer)
    return contents(table)


def contents(table: lancewal.Table) -> dict[int, str]:
    found = table.scan(columns=["id", "text"]).to_table()
    texts = dict(zip(found["id"].to_pylist(), found["text"].to_pylist(), strict=True))
    assert len(texts) == found.num_rows, "a key is there twice"
    return texts


@dataclass
class Scene:
    """A table on the disk that will fail, a way to it that a test can see, and what must be in it."""

    place: Path
    known: dict[int, str]
    #: Rows of a call that failed: each is as before, or as the call wanted it; ``None`` is a delete.
    open: dict[int, str | None] = field(default_factory=dict)
    faults: Faults = field(default_factory=Faults)
    #: What the operation raised.
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.uri = self.place / "table"
        self.store = FaultyStore(ObjectStore.from_uri(self.uri, fsync=True), self.faults)
        self.table = lancewal.Table.open(self.uri, store=self.store)
        self.writer: lancewal.TableWriter | None = None
        self.opened: list[lancewal.ShardWriter] = []

    def writes(self, wanted: dict[int, str | None], call: Callable[[], object]) -> None:
        """Make a call that writes: when it returns, its rows are there."""
        try:
            call()
        except LanceWalError as error:
            if isinstance(error, OutcomeUnknownError | PartialWriteError):
                self.open.update(wanted)
            raise
        except BaseException:
            self.open.update(wanted)
            raise
        for key, text in wanted.items():
            if text is None:
                self.known.pop(key, None)
            else:
                self.known[key] = text

    def check(self, table: lancewal.Table) -> None:
        """The acknowledged rows are there, each once, and nothing that was not asked for."""
        found = contents(table)
        keys = found.keys() | self.known.keys()
        wrong = [
            (key, found.get(key), self.known.get(key))
            for key in sorted(keys)
            if found.get(key) != self.known.get(key)
            and not (key in self.open and found.get(key) == self.open[key])
        ]
        assert not wrong, f"(key, found, expected): {wrong[:5]}; the call ended with {self.error!r}"

    def let_go(self) -> None:
        """After the fault: the writers go on or say why not, and are closed."""
        if self.writer is not None:
            put = self.writer.put
            with suppress(LanceWalError):
                self.writes({FRESH + 500: "again text"}, lambda: put(_one(FRESH + 500, "again text")))
        for writer in (*self.opened, self.writer):
            with suppress(LanceWalError):
                if writer is not None:
                    writer.close()
        self.opened, self.writer = [], None


Operation = Callable[[Scene], Callable[[], object]]
_operations: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    """A function that prepares and returns the call under test."""
    _operations[function.__name__.removeprefix("do_")] = function
    return function


@operation
def do_put(scene: Scene) -> Callable[[], object]:
    scene.writer = writer = scene.table.writer(take_over="now")
    batch = rows(FRESH, ROWS, "put")
    wanted: dict[int, str | None] = dict(zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True))
    return lambda: scene.writes(wanted, lambda: writer.put(batch))


@operation
def do_delete(scene: Scene) -> Callable[[], object]:
    scene.writer = writer = scene.table.writer(take_over="now")
    keys = [3, 12, 57]
    return lambda: scene.writes(dict.fromkeys(keys), lambda: writer.delete(keys))


@operation
def do_flush(scene: Scene) -> Callable[[], object]:
    scene.writer = writer = _with_rows(scene)
    return writer.flush


@operation
def do_flush_of_others(scene: Scene) -> Callable[[], object]:
    _leave_tail(_with_rows(scene))
    return scene.table.flush


@operation
def do_close(scene: Scene) -> Callable[[], object]:
    scene.writer = writer = _with_rows(scene)
    return writer.close


@operation
def do_open(scene: Scene) -> Callable[[], object]:
    """Takes both shards over, and replays their tails."""
    shards = [shard.shard_id for shard in scene.table.shards()]

    def call() -> None:
        for shard in shards:
            scene.opened.append(scene.table.shard_writer(shard, take_over="now"))

    return call


@operation
def do_open_table(scene: Scene) -> Callable[[], object]:
    return lambda: lancewal.open(scene.uri).count_rows()


@operation
def do_scan(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        assert contents(scene.table) == scene.known

    return call


@operation
def do_first_scan(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        assert contents(lancewal.open(scene.uri)) == scene.known

    return call


@operation
def do_count(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        assert scene.table.count_rows("id > 5") == sum(key > 5 for key in scene.known)

    return call


@operation
def do_lookup(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        for key in (0, 5, 12, 52, 60, 70):
            row = scene.table.lookup(key)
            assert (row["text"] if row else None) == scene.known.get(key), key

    return call


@operation
def do_vector_search(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        found = scene.table.vector_search("vector", [60.0] * DIMENSION, 3, columns=["id"])
        assert sorted(found["id"].to_pylist()) == [59, 60, 61]

    return call


@operation
def do_text_search(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        found = scene.table.full_text_search("text", "newest", 50, columns=["id"])
        assert sorted(found["id"].to_pylist()) == sorted(
            key for key, text in scene.known.items() if text.startswith("newest")
        )

    return call


@operation
def do_status(scene: Scene) -> Callable[[], object]:
    return scene.table.status


@operation
def do_compact(scene: Scene) -> Callable[[], object]:
    return scene.table.compact


@operation
def do_gc(scene: Scene) -> Callable[[], object]:
    scene.table.compact()
    return lambda: collect_later(scene.store)


@operation
def do_verify(scene: Scene) -> Callable[[], object]:
    def call() -> None:
        assert scene.table.verify().ok

    return call


@operation
def do_backup(scene: Scene) -> Callable[[], object]:
    return lambda: scene.table.backup(scene.place / "backup")


@operation
def do_ingest(scene: Scene) -> Callable[[], object]:
    folder = scene.place / "files"
    folder.mkdir(exist_ok=True)
    lines = [f"{FRESH + i},ingested {i}" for i in range(ROWS)]
    (folder / "rows.csv").write_text("\n".join(["id,text", *lines, ""]))
    wanted: dict[int, str | None] = {FRESH + i: f"ingested {i}" for i in range(ROWS)}
    files = list(find_files([folder / "rows.csv"]))

    def call() -> None:
        try:
            scene.writes(wanted, lambda: Ingestion(str(scene.uri), store=scene.store).run(files))
        except LanceWalError:
            # A file is complete only at its end; the next run makes it so.
            scene.open.update(wanted)
            raise

    return call


@operation
def do_feed(scene: Scene) -> Callable[[], object]:
    def changes() -> list[int]:
        feed = ChangeFeed(scene.store, ChangeFeed.open(str(scene.uri))._table_schema)
        return [i for batch in feed.changes(feed.earliest(), feed.latest()) for i in batch["id"].to_pylist()]

    expected = changes()

    def call() -> None:
        assert changes() == expected

    return call


def _with_rows(scene: Scene) -> lancewal.TableWriter:
    writer = scene.table.writer(take_over="now")
    batch = rows(FRESH, ROWS, "put")
    writer.put(batch)
    scene.known.update(zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True))
    return writer


def _leave_tail(writer: lancewal.TableWriter) -> None:
    """Drop the writer as a crash would: its rows stay in the log."""
    for shard in writer.shard_writers.values():
        shard._finalizer()


OPERATIONS = dict(_operations)


def settle(scene: Scene) -> None:
    """Long after the fault the table takes and shows rows, is compacted, and is whole."""
    table = lancewal.open(scene.uri)
    scene.check(table)
    with table.writer(take_over="now", fsync=False) as writer:
        scene.writes({FRESH + 600: "last text"}, lambda: writer.put(_one(FRESH + 600, "last text")))
    scene.check(table)
    table.compact()
    scene.check(table)
    report = table.verify()
    assert report.ok, report


def _one(key: int, text: str) -> pa.Table:
    return pa.table({"id": [key], "text": [text]})


def copy(template: Path, to: Path) -> None:
    shutil.copytree(template, to / "table")
