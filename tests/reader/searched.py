"""A table with vectors and texts, and brute-force searches of what it should hold."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lance
import numpy as np
import numpy.typing as npt
import pyarrow as pa

import lancewal
from lancewal.reader import TableReader, TableView
from lancewal.service import TakeOver
from lancewal.storage import ObjectStore
from lancewal.writer import ShardWriter
from lancewal.writer.table_writer import TableWriter
from tests.tables import KEY, abandon, fast

Row = dict[str, Any]

DIMENSION = 4
FIELDS = [
    pa.field("id", pa.int64(), nullable=False, metadata=KEY),
    pa.field("n", pa.int64()),
    pa.field("text", pa.string()),
    pa.field("v", pa.list_(pa.float32(), DIMENSION)),
]
SCHEMA = pa.schema(FIELDS)
APPEND_ONLY = pa.schema([FIELDS[0].remove_metadata(), *FIELDS[1:]])

ALL_INDEXES: Mapping[str, Mapping[str, Any]] = {
    "n": {"index_type": "BTREE"},
    "text": {"index_type": "INVERTED", "with_position": True},
    "v": {"index_type": "IVF_FLAT", "metric": "l2"},
}
NO_INDEXES: Mapping[str, Mapping[str, Any]] = {}


def row(id_: int, text: str | None = None, v: Sequence[float] | None = None, n: int | None = None) -> Row:
    return {"id": id_, "n": n, "text": text, "v": v}


def as_table(rows: Iterable[Row], schema: pa.Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema)


def random_rows(ids: Iterable[int], seed: int) -> list[Row]:
    """Rows with vectors and words of their own."""
    random = np.random.default_rng(seed)
    words = ["alpha", "beta", "gamma", "delta", "fox", "dog", "running", "jumps", "the", "lazy"]
    return [
        row(id_, " ".join(random.choice(words, 4)), random.normal(size=DIMENSION).tolist(), id_ % 5)
        for id_ in ids
    ]


def create_indexes(dataset: lance.LanceDataset, indexes: Mapping[str, Mapping[str, Any]]) -> None:
    for column, options in indexes.items():
        kind = options["index_type"]
        others = {name: value for name, value in options.items() if name != "index_type"}
        if kind.startswith("IVF"):
            dimension = dataset.schema.field(column).type.list_size
            # A centroid that is given need not be trained, not even on an empty table.
            trained = {"num_partitions": 1, "ivf_centroids": np.zeros((1, dimension), np.float32)}
            dataset.create_index(column, kind, **{**trained, **others})
        else:
            dataset.create_scalar_index(column, kind, **others)


class Searched:
    """``live`` reads through writers of this process, ``other`` as another process would."""

    def __init__(
        self,
        where: Path,
        base: Sequence[Row] = (),
        *,
        schema: pa.Schema = SCHEMA,
        indexes: Mapping[str, Mapping[str, Any]] = ALL_INDEXES,
        **initialize: Any,
    ) -> None:
        self.uri = str(where / "table")
        dataset = lance.write_dataset(as_table(base, schema), self.uri, schema=schema)
        create_indexes(dataset, indexes)
        self.table = lancewal.initialize(self.uri, **(initialize or {"unsharded": True}))
        self.store = ObjectStore.from_uri(self.uri, fsync=False)
        self.live = TableReader(self.store)
        self.other = TableReader(self.store, live_writers=False)

    @property
    def dataset(self) -> lance.LanceDataset:
        return lance.dataset(self.uri)

    def writer(self, take_over: TakeOver = "when_gone", **settings: Any) -> TableWriter:
        return self.table.writer(fast(**settings), take_over=take_over)

    def flushed(self, rows: Sequence[Row], deletes: Sequence[int] = ()) -> None:
        """The rows and deletes in SSTables, one in each shard they are for."""
        with self.writer() as writer:
            if rows:
                writer.put(as_table(rows, writer.schema))
            if deletes:
                writer.delete(list(deletes))

    def near(self, query: Sequence[float], k: int = 10, column: str = "v", **options: Any) -> list[Row]:
        """Hits of a vector search, the same whoever reads."""
        return self._agreed(
            lambda view: view.vector_search(column, np.array(query, np.float32), k, **options)
        )

    def words(self, query: str, k: int = 1000, column: str = "text", **options: Any) -> list[Row]:
        """Hits of a full-text search, the same whoever reads."""
        return self._agreed(lambda view: view.full_text_search(column, query, k, **options))

    def _agreed(self, search: Callable[[TableView], pa.Table]) -> list[Row]:
        live, other = (
            search(TableView(self.store, reader)).to_pylist() for reader in (self.live, self.other)
        )
        assert live == other
        keys = [found["id"] for found in live if "id" in found]
        if self.table.primary_key:
            assert len(keys) == len(set(keys)), f"hits came twice: {keys}"
        return list(live)


def ids(hits: Iterable[Row]) -> list[int]:
    return [hit["id"] for hit in hits]


def by_distance(rows: Iterable[Row], query: Sequence[float], metric: str = "l2") -> list[tuple[int, float]]:
    """Ids and distances of all rows that have one, nearest first."""
    wanted = np.array(query, np.float64)
    found = []
    for each in rows:
        if each["v"] is not None and np.isfinite(each["v"]).all():
            distance = _distance(np.array(each["v"], np.float32).astype(np.float64), wanted, metric)
            if distance is not None:
                found.append((int(each["id"]), distance))
    return sorted(found, key=lambda hit: (hit[1], hit[0]))


def _distance(vector: npt.NDArray[np.float64], query: npt.NDArray[np.float64], metric: str) -> float | None:
    if metric == "l2":
        return float(((vector - query) ** 2).sum())
    if metric == "dot":
        return float(1 - vector @ query)
    lengths = np.linalg.norm(vector) * np.linalg.norm(query)
    return float(1 - vector @ query / lengths) if lengths else None


def by_score(rows: Iterable[Row], query: str, operator: str = "or", **tokenizer: Any) -> dict[int, float]:
    """Ids and BM25 scores of the rows that match, over these rows as the whole corpus."""
    texts = {each["id"]: _tokens(each["text"], **tokenizer) for each in rows if each["text"]}
    texts = {id_: tokens for id_, tokens in texts.items() if tokens}
    terms = _tokens(query, **tokenizer)
    count = len(texts)
    average = sum(map(len, texts.values())) / max(count, 1)
    scores: dict[int, float] = {}
    for id_, tokens in texts.items():
        held = Counter(tokens)
        matched = [term for term in terms if held[term]]
        if not matched or (operator == "and" and len(matched) < len(terms)):
            continue
        for term in matched:
            documents = sum(term in other for other in texts.values())
            weight = math.log(1 + (count - documents + 0.5) / (documents + 0.5))
            damping = 1.2 * (0.25 + 0.75 * len(tokens) / average)
            scores[id_] = scores.get(id_, 0.0) + weight * 2.2 * held[term] / (held[term] + damping)
    return scores


def _tokens(text: str, **tokenizer: Any) -> list[str]:
    return [token.text for token in lance.tokenize(text, **tokenizer)]


def kill(writer: TableWriter) -> None:
    """End a writer as a crash would."""
    for shard_writer in _shard_writers(writer):
        abandon(shard_writer)


def seal(writer: TableWriter, *, wait: bool = False) -> None:
    """Freeze the active MemTables, and wait for their flush if asked."""
    for shard_writer in _shard_writers(writer):
        shard_writer.force_seal_active()
        if wait:
            shard_writer.wait_for_flush_drain()


def _shard_writers(writer: TableWriter) -> list[ShardWriter]:
    return list(writer.shard_writers.values())
