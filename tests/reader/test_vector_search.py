"""Vector search over base, SSTables, MemTables and WAL tails."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import lancewal
from lancewal.errors import InvalidInputError
from lancewal.reader import sstable_source, words
from lancewal.reader.lance_search import LanceIndexes
from lancewal.reader.sstable_source import SsTableSource
from tests.reader.searched import (
    ALL_INDEXES,
    APPEND_ONLY,
    DIMENSION,
    FIELDS,
    NO_INDEXES,
    Row,
    Searched,
    as_table,
    by_distance,
    create_indexes,
    ids,
    kill,
    random_rows,
    row,
    seal,
)

METRICS = ["l2", "cosine", "dot"]
QUERY = [0.3, -0.2, 0.9, 0.1]


@pytest.fixture(params=["small", "large"])
def sstable_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to search an SSTable: row by row, and through its index."""
    if request.param == "large":
        monkeypatch.setattr(sstable_source, "EXACT_SSTABLE_ROWS", 0)
    return str(request.param)


def check(table: Searched, model: dict[int, Row], query: list[float], k: int, **options: Any) -> None:
    """The hits are those of a brute-force search of the model."""
    metric = options.get("metric", "l2").lower()
    expected = by_distance(model.values(), query, metric)[:k]
    found = table.near(query, k, **options)
    assert ids(found) == [id_ for id_, _ in expected]
    np.testing.assert_allclose([hit["_distance"] for hit in found], [d for _, d in expected], atol=1e-4)
    for hit in found:
        assert hit["n"] == model[hit["id"]]["n"]


def levels(table: Searched, model: dict[int, Row]) -> lancewal.TableWriter:
    """Newer and newer versions of some rows: base, two SSTables, a frozen and an active MemTable."""
    for seed, keys in enumerate([range(10, 40), range(20, 60)], 1):
        table.flushed(_changed(model, random_rows(keys, seed)))
    table.flushed([], deletes=[3, 25])
    for key in (3, 25):
        del model[key]
    writer = table.writer()
    writer.put(as_table(_changed(model, random_rows(range(30, 70, 3), 3))))
    writer.delete([30, 41])
    for key in (30, 41):
        model.pop(key, None)
    for shard_writer in writer.shard_writers.values():
        shard_writer._mode._flushes._worker.stop()  # what is frozen stays frozen
    seal(writer)
    writer.put(as_table(_changed(model, random_rows(range(0, 70, 7), 4))))
    return writer


def _changed(model: dict[int, Row], rows: list[Row]) -> list[Row]:
    model.update({each["id"]: each for each in rows})
    return rows


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("sharding", [{"unsharded": True}, {"bucket": ("id", 3)}])
@pytest.mark.usefixtures("sstable_size")
def test_fresh_and_old_rows_compete_on_equal_terms(
    tmp_path: Path, metric: str, sharding: dict[str, Any]
) -> None:
    base = random_rows(range(25), 0)
    table = Searched(tmp_path, base, **sharding)
    model = {each["id"]: each for each in base}
    writer = levels(table, model)
    for k in (1, 7, 200):
        check(table, model, QUERY, k, metric=metric)
    kill(writer)
    check(table, model, QUERY, 9, metric=metric)


@pytest.mark.usefixtures("sstable_size")
def test_a_filter_is_applied_before_the_cut_to_k(tmp_path: Path) -> None:
    base = random_rows(range(25), 0)
    table = Searched(tmp_path, base)
    model = {each["id"]: each for each in base}
    writer = levels(table, model)
    for filter_, keep in (
        ("n = 3", lambda r: r["n"] == 3),
        ("n BETWEEN 1 AND 2 AND text IS NOT NULL", lambda r: r["n"] in (1, 2)),
        ("text LIKE '%fox%'", lambda r: "fox" in r["text"]),
        ("id IN (1, 22, 33, 48)", lambda r: r["id"] in (1, 22, 33, 48)),
        ("n > 99", lambda r: False),
    ):
        check(table, {key: r for key, r in model.items() if keep(r)}, QUERY, 4, filter=filter_)
    kill(writer)


@pytest.mark.usefixtures("sstable_size")
def test_fresh_rows_do_not_fall_out_of_the_top_k_because_stale_ones_took_their_place(tmp_path: Path) -> None:
    near, far = [1.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]
    table = Searched(tmp_path, [row(i, v=near) for i in range(50)])
    table.flushed([row(i, v=near) for i in range(100, 150)])
    table.flushed([row(i, v=far) for i in [*range(49), *range(100, 149)]])
    # All but two of the nearest rows were moved away: in the base and in the first SSTable.
    assert ids(table.near(near, 2)) == [149, 49]
    assert [hit["_distance"] for hit in table.near(near, 4)] == [0.0, 0.0, 64.0, 64.0]
    with table.writer() as writer:
        writer.delete([49, 149])
        assert [hit["_distance"] for hit in table.near(near, 98)] == [64.0] * 98
        assert len(table.near(near, 1000)) == 98


def test_the_result_is_filled_up_to_k_where_the_probed_partitions_have_too_few_rows(tmp_path: Path) -> None:
    rows = random_rows(range(600), 0)
    table = Searched(
        tmp_path,
        rows,
        indexes={
            "v": {"index_type": "IVF_FLAT", "metric": "l2", "num_partitions": 30, "ivf_centroids": None}
        },
    )
    assert len(table.near(QUERY, 500, nprobes=1)) == 500
    rare = [each for each in rows if each["id"] % 60 == 7]
    found = table.near(QUERY, 10, nprobes=1, filter="id % 60 = 7")
    assert ids(found) == [id_ for id_, _ in by_distance(rare, QUERY)]


def test_rows_that_the_base_index_lags_behind_on_are_found_without_a_catch_up_entry(tmp_path: Path) -> None:
    """A missing entry was read as "caught up", and the rows vanished from searches."""
    table = Searched(tmp_path, random_rows(range(100, 140), 0))
    table.flushed([row(1, v=QUERY)])
    table.table.compact(optimize_indexes=False)
    base = table.live.base()
    assert base.details.compacted
    assert base.details.index_catchup == {}
    (index,) = {index.name for index in base.manifest.indexes if "v" in index.name}
    assert base.manifest.covered_fragments(index) < base.manifest.fragment_ids, "the index is up to date"
    assert ids(table.near(QUERY, 1)) == [1]
    lance.write_dataset(as_table([row(2, v=QUERY)]), table.uri, mode="append")
    assert sorted(ids(table.near(QUERY, 2))) == [1, 2]
    table.dataset.optimize.optimize_indices()
    assert sorted(ids(table.near(QUERY, 2))) == [1, 2]


def test_a_column_without_an_index_is_compared_row_by_row_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lancewal")
    base = random_rows(range(25), 0)
    table = Searched(tmp_path, base, indexes=NO_INDEXES)
    model = {each["id"]: each for each in base}
    writer = levels(table, model)
    for _ in range(3):
        check(table, model, QUERY, 12)
    kill(writer)
    hints = [r for r in caplog.records if "no vector index for l2" in r.message]
    assert len(hints) == 2, "once for each of the two readers"


def test_another_metric_than_that_of_the_index_is_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "lancewal")
    rows = random_rows(range(300), 0)
    table = Searched(tmp_path, rows)
    table.flushed(random_rows(range(300, 330), 1))
    model = {each["id"]: each for each in [*rows, *random_rows(range(300, 330), 1)]}
    check(table, model, QUERY, 5)
    assert "no vector index" not in caplog.text
    check(table, model, QUERY, 5, metric="cosine")
    assert "no vector index for cosine" in caplog.text
    check(table, model, QUERY, 5, metric="L2")


def test_the_metric_defaults_to_that_of_the_index(tmp_path: Path) -> None:
    rows = random_rows(range(50), 0)
    table = Searched(tmp_path, rows, indexes={"v": {"index_type": "IVF_FLAT", "metric": "cosine"}})
    with table.writer() as writer:
        writer.put(as_table(random_rows(range(50, 60), 1)))
        expected = by_distance([*rows, *random_rows(range(50, 60), 1)], QUERY, "cosine")
        assert ids(table.near(QUERY, 60)) == [id_ for id_, _ in expected]


@pytest.mark.usefixtures("sstable_size")
def test_undefined_distances_are_no_hits_on_any_level(tmp_path: Path) -> None:
    nan, zero = [float("nan"), 0.0, 0.0, 1.0], [0.0] * DIMENSION

    def odd(first: int) -> list[Row]:
        return [row(first, v=None), row(first + 1, v=nan), row(first + 2, v=zero), row(first + 3, v=QUERY)]

    table = Searched(tmp_path, odd(0))
    table.flushed(odd(10))
    with table.writer() as writer:
        writer.put(as_table(odd(20)))
        assert sorted(ids(table.near(QUERY, 100))) == [2, 3, 12, 13, 22, 23]
        assert sorted(ids(table.near(QUERY, 100, metric="cosine"))) == [3, 13, 23]
        assert sorted(ids(table.near(QUERY, 100, metric="dot"))) == [2, 3, 12, 13, 22, 23]
        assert table.near(zero, 100, metric="cosine") == [], "a zero vector has no direction"
        assert ids(table.near(zero, 3)) == [22, 12, 2], "under L2 it has distances, ties newest level first"
        # A null vector is stored all the same.
        assert table.live.lookup(20).table.to_pylist() == [row(20, v=None)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": [1.0, 2.0]}, r"shape \(2,\)"),
        ({"query": [[1.0] * DIMENSION]}, "shape"),
        ({"query": [1.0, float("nan"), 0.0, 0.0]}, "NaN"),
        ({"query": [1.0, float("inf"), 0.0, 0.0]}, "infinity"),
        ({"query": [1.0, None, 0.0, 0.0]}, "NaN|numbers"),
        ({"query": "close"}, "not a vector"),
        ({"query": None}, "shape|not a vector"),
        ({"k": 0}, "k must be"),
        ({"k": -3}, "k must be"),
        ({"k": 2.5}, "k must be"),
        ({"k": True}, "k must be"),
        ({"k": "ten"}, "k must be"),
        ({"nprobes": 0}, "nprobes"),
        ({"refine_factor": -1}, "refine_factor"),
        ({"metric": "hamming"}, "l2, cosine, dot"),
        ({"metric": 3}, "l2, cosine, dot"),
        ({"column": "absent"}, "no column 'absent'"),
        ({"column": "text"}, "string"),
        ({"column": "id"}, "int64"),
        ({"filter": "n >"}, "filter"),
        ({"filter": "absent = 1"}, "filter"),
        ({"filter": "n"}, "filter"),
        ({"columns": ["absent"]}, "no column 'absent'"),
        ({"columns": []}, "at least one"),
    ],
)
@pytest.mark.parametrize("empty", [True, False])
def test_what_cannot_be_searched_is_refused(
    tmp_path: Path, arguments: dict[str, Any], words: str, empty: bool
) -> None:
    table = Searched(tmp_path, [] if empty else random_rows(range(3), 0)).table
    options = {"column": "v", "query": QUERY, "k": 3, **arguments}
    with pytest.raises(InvalidInputError, match=words):
        table.vector_search(options.pop("column"), options.pop("query"), options.pop("k"), **options)


def test_columns_are_chosen_and_the_distance_comes_last(tmp_path: Path) -> None:
    table = Searched(tmp_path, random_rows(range(3), 0))
    with table.writer() as writer:
        writer.put(as_table(random_rows(range(3, 6), 1)))
        found = table.table.vector_search("v", QUERY, 4, columns=["text", "id"])
        assert found.schema.names == ["text", "id", "_distance"]
        assert found.schema.field("_distance").type == pa.float32()
        everything = table.table.vector_search("v", QUERY, 4)
        assert everything.schema.names == ["id", "n", "text", "v", "_distance"]
        assert everything.select(["text", "id", "_distance"]).to_pylist() == found.to_pylist()
        assert everything.select(["v"]).schema.field("v").type == FIELDS[3].type


@pytest.mark.parametrize("query", [QUERY, tuple(QUERY), pa.array(QUERY), np.array(QUERY)])
def test_queries_come_as_lists_arrays_and_arrow(tmp_path: Path, query: Any) -> None:
    table = Searched(tmp_path, random_rows(range(30), 0)).table
    expected = by_distance(random_rows(range(30), 0), QUERY)[:3]
    found = table.vector_search("v", query, np.int64(3))
    assert found["id"].to_pylist() == [id_ for id_, _ in expected]


def test_an_empty_table_has_no_hits(tmp_path: Path) -> None:
    table = Searched(tmp_path)
    found = table.table.vector_search("v", QUERY, 5, filter="n = 1")
    assert found.num_rows == 0
    assert found.schema.names == ["id", "n", "text", "v", "_distance"]
    table.flushed([row(1, v=QUERY)])
    table.flushed([], deletes=[1])
    assert table.near(QUERY, 5) == []


def test_equally_near_rows_come_in_the_same_order_every_time(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(i, v=QUERY) for i in range(100)])
    table.flushed([row(i, v=QUERY) for i in range(200, 220)])
    with table.writer() as writer:
        writer.put(as_table([row(i, v=QUERY) for i in range(300, 320)]))
        first = ids(table.near(QUERY, 50))
        # The newest level first, and within a level row by row.
        assert first[:40] == [*range(300, 320), *range(200, 220)]
        for _ in range(5):
            assert ids(table.near(QUERY, 50)) == first
            assert ids(table.near(QUERY, 30)) == first[:30]


@pytest.mark.usefixtures("sstable_size")
def test_without_a_key_every_row_counts(tmp_path: Path) -> None:
    rows = random_rows([1, 1, 2, 2, 3], 0)
    table = Searched(tmp_path, rows, schema=APPEND_ONLY)
    with table.writer() as writer:
        writer.put(as_table(rows, APPEND_ONLY))
    with table.writer() as writer:
        writer.put(as_table(rows, APPEND_ONLY))
        found = table.near(QUERY, 100)
        assert sorted(ids(found)) == sorted([1, 1, 2, 2, 3] * 3)
        assert len(table.near(QUERY, 100, filter="id = 2")) == 6


def test_an_index_of_an_sstable_was_filtered_by_the_values_of_a_dropped_field(
    tmp_path: Path, sstable_size: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The field that came in its place has nulls in that SSTable."""
    monkeypatch.setattr(words, "MAX_INDEXED_ROWS", 0 if sstable_size == "large" else 10)
    place = pa.field("place", pa.struct([pa.field("x", pa.int64()), pa.field("y", pa.int64())]))
    table = Searched(tmp_path, schema=pa.schema([*FIELDS, place]))
    table.flushed([row(i, "fox", QUERY) | {"place": {"x": i, "y": i}} for i in range(5)])
    table.dataset.drop_columns(["place.y"])
    table.dataset.add_columns(pa.schema([pa.field("place", pa.struct([pa.field("y", pa.int64())]))]))
    for filter_, expected in (("place.y = 3", []), ("place.y IS NULL", [0, 1, 2, 3, 4])):
        assert sorted(ids(table.near(QUERY, filter=filter_))) == expected
        assert sorted(ids(table.words("fox", filter=filter_))) == expected


@pytest.mark.usefixtures("sstable_size")
def test_a_renamed_vector_column_is_searched_on_every_level(tmp_path: Path) -> None:
    base = random_rows(range(30), 0)
    table = Searched(tmp_path, base)
    flushed, live = random_rows(range(30, 60), 1), random_rows(range(60, 80), 2)
    table.flushed(flushed)
    writer = table.writer()
    writer.put(as_table(live))
    table.dataset.alter_columns({"path": "v", "name": "embedding"}, {"path": "n", "name": "number"})
    expected = by_distance([*base, *flushed, *live], QUERY)[:40]
    found = table.near(QUERY, 40, "embedding")
    assert ids(found) == [id_ for id_, _ in expected]
    odd = [each for each in [*base, *flushed, *live] if each["n"] == 1]
    found = table.near(QUERY, 5, "embedding", filter="number = 1")
    assert ids(found) == [id_ for id_, _ in by_distance(odd, QUERY)[:5]]
    assert found[0]["number"] == 1
    with pytest.raises(InvalidInputError, match="no column 'v'"):
        table.near(QUERY, 5)
    # A new column under the old name is another one: old rows have nothing in it.
    table.dataset.add_columns(pa.field("v", pa.list_(pa.float32(), DIMENSION)))
    assert table.near(QUERY, 5, "v") == []
    with table.writer(take_over="now") as newer:
        newer.put(pa.Table.from_pylist([{"id": 500, "v": QUERY}], newer.schema))
        assert ids(table.near(QUERY, 5, "v")) == [500]
        assert 500 not in ids(table.near(QUERY, 1000, "embedding"))
    kill(writer)


@pytest.mark.usefixtures("sstable_size")
def test_filters_on_columns_that_came_later(tmp_path: Path) -> None:
    table = Searched(tmp_path, random_rows(range(10), 0))
    table.flushed(random_rows(range(10, 20), 1))
    table.dataset.add_columns(pa.field("late", pa.int64()))
    with table.writer() as writer:
        writer.put(pa.Table.from_pylist([{"id": 20, "v": QUERY, "late": 7}], writer.schema))
        assert ids(table.near(QUERY, 100, filter="late = 7")) == [20]
        assert sorted(ids(table.near(QUERY, 100, filter="late IS NULL"))) == list(range(20))
        table.dataset.drop_columns(["n"])
        assert len(table.near(QUERY, 100)) == 21


@pytest.mark.parametrize("type_", [pa.float16(), pa.float32(), pa.float64()])
@pytest.mark.usefixtures("sstable_size")
def test_vectors_of_every_float_type(tmp_path: Path, type_: pa.DataType) -> None:
    schema = pa.schema([*FIELDS[:3], pa.field("v", pa.list_(type_, 2))])
    table = Searched(tmp_path, schema=schema)

    def rows(first: int) -> pa.Table:
        places = range(first, first + 4)
        values = pa.array(np.array([[i, 1 + i % 3] for i in places], type_.to_pandas_dtype()).ravel())
        columns = {"id": pa.array(places), "v": pa.FixedSizeListArray.from_arrays(values, 2)}
        nulls = {name: pa.nulls(4, schema.field(name).type) for name in ("n", "text")}
        return pa.table({**columns, **nulls}).select(schema.names).cast(schema)

    lance.write_dataset(rows(0), table.uri, mode="append")
    with table.writer() as writer:
        writer.put(rows(4))
    with table.writer() as writer:
        writer.put(rows(8))
        for metric in METRICS:
            found = table.near([5.25, 1.0], 12, metric=metric)
            model = [{"id": i, "v": [float(i), float(1 + i % 3)]} for i in range(12)]
            expected = by_distance(model, [5.25, 1.0], metric)
            assert [hit["id"] for hit in found] == [id_ for id_, _ in expected]
            np.testing.assert_allclose(
                [hit["_distance"] for hit in found],
                [distance for _, distance in expected],
                rtol=2e-3,
                atol=2e-3,
            )


@pytest.mark.usefixtures("sstable_size")
def test_sstables_that_pylance_wrote(tmp_path: Path) -> None:
    base = random_rows(range(300), 0)
    table = Searched(tmp_path)
    lance.write_dataset(as_table(base), table.uri, mode="append")
    shard = str(table.table.shard_for())
    model = {each["id"]: each for each in base}
    with table.dataset.mem_wal_writer(shard) as writer:
        writer.put(as_table(_changed(model, random_rows(range(200, 400), 1))))
        writer.put(as_table(_changed(model, random_rows(range(250, 260), 2))))
        writer.delete(pa.table({"id": pa.array([5, 251], pa.int64())}))
    for key in (5, 251):
        del model[key]
    ((source,),) = [shard.sources for shard in table.live.snapshot().shards]
    assert isinstance(source, SsTableSource)
    sstable = source.sstable.dataset
    assert "IVF_HNSW_SQ" in {str(each.index_type) for each in sstable.describe_indices()}
    for metric in METRICS:
        check(table, model, QUERY, 10, metric=metric)
    check(table, {key: r for key, r in model.items() if r["n"] == 2}, QUERY, 10, filter="n = 2")


def test_rows_of_a_writer_in_another_process_are_found_once_they_are_durable(tmp_path: Path) -> None:
    table = Searched(tmp_path, random_rows(range(10), 0))
    writer = table.dataset.mem_wal_writer(str(table.table.shard_for()), durable_write=True)
    writer.put(as_table([row(100, v=QUERY)]))
    assert ids(table.near(QUERY, 1)) == [100]
    writer.delete(pa.table({"id": pa.array([100], pa.int64())}))
    assert 100 not in ids(table.near(QUERY, 100))
    del writer


def test_rows_that_wait_for_their_index_are_found(tmp_path: Path) -> None:
    table = Searched(tmp_path)
    with table.writer(sync_indexed_write=False, async_index_buffer_rows=1_000_000) as writer:
        model: dict[int, Row] = {}
        for seed in range(4):
            writer.put(as_table(_changed(model, random_rows(range(seed * 5, seed * 5 + 20), seed))))
            check(table, model, QUERY, 10)
            (shard_writer,) = writer.shard_writers.values()
            view = shard_writer.active_memtable_ref()
            assert view.indexes.rows_indexed < view.row_count
            if seed == 1:
                # A part is indexed, the rest is not.
                shard_writer._mode._active.update_indexes()
                check(table, model, QUERY, 10)


def test_large_sstables_and_the_base_are_searched_through_their_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Searched(tmp_path, random_rows(range(20), 0))
    table.flushed(random_rows(range(20, 40), 1))
    used: list[bool] = []
    by_lance = LanceIndexes.nearest

    def noted(*arguments: Any, use_index: bool, **options: Any) -> pa.Table:
        used.append(use_index)
        return by_lance(*arguments, use_index=use_index, **options)

    monkeypatch.setattr(LanceIndexes, "nearest", noted)
    for rows, metric, expected in (
        (4096, "l2", [True]),
        (10, "l2", [True, True]),
        (10, "cosine", [False]),
    ):
        monkeypatch.setattr(sstable_source, "EXACT_SSTABLE_ROWS", rows)
        assert len(nearest_ids(table, metric)) == 5
        assert used == expected
        del used[:]


def nearest_ids(table: Searched, metric: str) -> list[int]:
    return list(table.table.vector_search("v", QUERY, 5, metric=metric)["id"].to_pylist())


def test_indexes_are_described_once_per_base_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Searched(tmp_path, random_rows(range(10), 0))
    table.near(QUERY, 3)
    calls: list[int] = []
    describe = lance.LanceDataset.describe_indices
    monkeypatch.setattr(
        lance.LanceDataset,
        "describe_indices",
        lambda self: calls.append(1) or describe(self),  # type: ignore[func-returns-value]
    )
    table.near(QUERY, 3)
    assert not calls
    create_indexes(table.dataset, {"n": ALL_INDEXES["n"]})
    table.near(QUERY, 3)
    assert calls
