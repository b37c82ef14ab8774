"""Full-text search over base, SSTables, MemTables and WAL tails."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest

from lancewal.errors import InvalidInputError
from lancewal.index.full_text import FullTextIndex
from lancewal.index.kinds import FullTextParams
from lancewal.reader import lance_search, words
from lancewal.reader.lance_search import LanceIndexes, LanceLevel
from lancewal.reader.search import checked_words, text_levels
from lancewal.reader.words import IndexedLevel, ReadLevel
from lancewal.writer.table_writer import TableWriter
from tests.reader.searched import (
    ALL_INDEXES,
    APPEND_ONLY,
    FIELDS,
    NO_INDEXES,
    Row,
    Searched,
    as_table,
    by_score,
    create_indexes,
    ids,
    kill,
    random_rows,
    row,
    seal,
)
from tests.tables import KEY

QUERIES = ["fox", "running dogs", "alpha the beta", "fox fox lazy", "absent", "absent gamma"]
WORDS = {"text": ALL_INDEXES["text"]}


@pytest.fixture(params=["small", "large"])
def level_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to search SSTables and the base: indexed in memory, and by Lance (or row by row)."""
    if request.param == "large":
        monkeypatch.setattr(words, "MAX_INDEXED_ROWS", 0)
    return str(request.param)


def check(table: Searched, model: dict[int, Row], query: str, *, scores: bool = True, **options: Any) -> None:
    """The hits, and where asked their scores, are those of a brute-force search of the model."""
    expected = by_score(model.values(), query, options.get("operator", "or"))
    found = table.words(query, **options)
    assert set(ids(found)) == set(expected)
    order = [hit["_score"] for hit in found]
    assert order == sorted(order, reverse=True)
    if scores:
        assert {hit["id"]: hit["_score"] for hit in found} == pytest.approx(expected, rel=1e-4)
    for hit in found:
        assert hit["text"] == model[hit["id"]]["text"]


def _changed(model: dict[int, Row], rows: list[Row]) -> list[Row]:
    model.update({each["id"]: each for each in rows})
    return rows


def levels(table: Searched, model: dict[int, Row]) -> TableWriter:
    """Newer and newer versions of some rows: base, two SSTables, a frozen and an active MemTable."""
    table.flushed(_changed(model, random_rows(range(10, 40), 1)))
    table.flushed(_changed(model, random_rows(range(20, 60), 2)), deletes=[3, 25])
    for key in (3, 25):
        del model[key]
    writer = table.writer()
    writer.put(as_table(_changed(model, random_rows(range(30, 70, 3), 3))))
    for shard_writer in writer.shard_writers.values():
        shard_writer._mode._flushes._worker.stop()  # what is frozen stays frozen
    seal(writer)
    writer.put(as_table(_changed(model, random_rows(range(0, 70, 7), 4))))
    writer.delete([30, 41])
    for key in (30, 41):
        model.pop(key, None)
    return writer


@pytest.mark.parametrize("sharding", [{"unsharded": True}, {"bucket": ("id", 3)}])
@pytest.mark.parametrize("indexes", [ALL_INDEXES, NO_INDEXES])
def test_fresh_and_old_rows_are_scored_as_one_corpus(
    tmp_path: Path, sharding: dict[str, Any], indexes: dict[str, Any]
) -> None:
    base = random_rows(range(25), 0)
    table = Searched(tmp_path, base, indexes=indexes, **sharding)
    model = {each["id"]: each for each in base}
    writer = levels(table, model)
    for query in QUERIES:
        check(table, model, query)
        check(table, model, query, operator="and")
    kill(writer)
    check(table, model, "fox lazy")


@pytest.mark.usefixtures("level_size")
@pytest.mark.parametrize("indexes", [ALL_INDEXES, NO_INDEXES])
def test_the_same_rows_match_however_large_their_level_is(tmp_path: Path, indexes: dict[str, Any]) -> None:
    base = random_rows(range(25), 0)
    table = Searched(tmp_path, base, indexes=indexes)
    model = {each["id"]: each for each in base}
    writer = levels(table, model)
    for query in QUERIES:
        check(table, model, query, scores=False)
        check(table, model, query, operator="and", scores=False)
    for filter_, keep in (
        ("n = 3", lambda r: r["n"] == 3),
        ("n IS NOT NULL AND id % 3 = 1", lambda r: r["id"] % 3 == 1),
        ("id IN (1, 22, 33, 48)", lambda r: r["id"] in (1, 22, 33, 48)),
        ("n > 99", lambda r: False),
    ):
        kept = {key: r for key, r in model.items() if keep(r)}
        check(table, kept, "fox running", filter=filter_, scores=False)
    kill(writer)


@pytest.mark.usefixtures("level_size")
def test_an_update_that_moves_a_row_out_of_the_match_set_hides_the_old_version(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "fox"), row(2, "fox"), row(3, "fox")])
    table.flushed([row(10, "fox"), row(11, "fox"), row(12, "fox")])
    table.flushed([row(1, "dog"), row(10, "dog")], deletes=[2, 11])
    assert sorted(ids(table.words("fox"))) == [3, 12]
    with table.writer() as writer:
        writer.put(as_table([row(3, "dog"), row(12, None), row(1, "foxes")]))
        assert ids(table.words("fox")) == [1]
        assert sorted(ids(table.words("dog"))) == [3, 10]


@pytest.mark.usefixtures("level_size")
def test_stale_rows_do_not_take_the_place_of_fresh_ones_in_the_top_k(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(i, "fox fox fox") for i in range(50)])
    table.flushed([row(i, "fox fox fox") for i in range(100, 150)])
    table.flushed([row(i, "dog") for i in [*range(49), *range(100, 149)]])
    assert sorted(ids(table.words("fox", 2))) == [49, 149]
    with table.writer() as writer:
        writer.put(as_table([row(i, "a fox ran over the hills") for i in range(40)]))
        writer.delete([49, 149])
        assert len(table.words("fox", 30)) == 30
        assert sorted(ids(table.words("fox", 1000))) == list(range(40))


@pytest.mark.usefixtures("level_size")
def test_a_column_without_an_index_is_read_row_by_row_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It returned nothing, silently. What is found does not change while rows wander down the levels."""
    caplog.set_level(logging.INFO, "lancewal")
    table = Searched(tmp_path, [row(1, "The Foxes"), row(2, "dogs")], indexes=NO_INDEXES)
    writer = table.writer()
    writer.put(as_table([row(3, "a fox"), row(4, "FOX-trot"), row(5, None)]))
    for step in (None, writer.close, table.table.compact):
        if step is not None:
            step()
        assert sorted(ids(table.words("fox"))) == [1, 3, 4]
        assert ids(table.words("Dog")) == [2]
        assert table.words("the") == []
        assert ids(table.words("fox trot", phrase=True)) == [4]
        assert sorted(ids(table.words("fox", filter="id != 3"))) == [1, 4]
    assert "no full-text index" in caplog.text


@pytest.mark.usefixtures("level_size")
def test_rows_that_the_base_index_lags_behind_on_are_found(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(i, "lazy dog") for i in range(100, 110)])
    table.flushed([row(1, "a running fox")])
    table.table.compact(optimize_indexes=False)
    assert table.live.base().details.index_catchup == {}
    lance.write_dataset(as_table([row(2, "fox running wild")]), table.uri, mode="append")
    table.flushed([row(3, "the fox")])
    assert sorted(ids(table.words("fox"))) == [1, 2, 3]
    assert sorted(ids(table.words("fox", filter="id < 3"))) == [1, 2]
    assert ids(table.words("running fox", phrase=True)) == [1]


@pytest.mark.usefixtures("level_size")
def test_phrases_are_found_on_every_level(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "quick brown fox"), row(2, "brown quick fox")])
    table.flushed([row(11, "a quick brown dog"), row(12, "brown and quick")])
    with table.writer() as writer:
        writer.put(as_table([row(21, "so quick brown"), row(22, "quick, then brown")]))
        assert sorted(ids(table.words("quick brown", phrase=True))) == [1, 11, 21]
        assert sorted(ids(table.words("quick brown", operator="and"))) == [1, 2, 11, 12, 21, 22]


@pytest.mark.usefixtures("level_size")
def test_sstables_with_another_tokenizer_than_the_base_has_now(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "foxes")], indexes=WORDS)
    table.flushed([row(11, "foxes"), row(12, "fox")])
    writer = table.writer()
    writer.put(as_table([row(21, "foxes"), row(22, "fox")]))
    assert sorted(ids(table.words("fox"))) == [1, 11, 12, 21, 22]
    table.dataset.create_scalar_index("text", "INVERTED", name="text_idx", replace=True, stem=False)
    assert sorted(ids(table.words("fox"))) == [12, 22], "as the new index takes words, on every level"
    assert sorted(ids(table.words("foxes"))) == [1, 11, 21]
    with pytest.raises(InvalidInputError, match="with_position=True"):
        table.words("a fox", phrase=True)
    kill(writer)


@pytest.mark.usefixtures("level_size")
def test_a_renamed_text_column_is_searched_on_every_level(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "fox")])
    table.flushed([row(2, "fox", n=5)])
    writer = table.writer()
    writer.put(as_table([row(3, "fox", n=5)]))
    assert sorted(ids(table.words("fox"))) == [1, 2, 3]
    table.dataset.alter_columns({"path": "text", "name": "body"}, {"path": "n", "name": "number"})
    assert sorted(ids(table.words("fox", column="body"))) == [1, 2, 3]
    assert sorted(ids(table.words("fox", column="body", filter="number = 5"))) == [2, 3]
    with pytest.raises(InvalidInputError, match="no column 'text'"):
        table.words("fox")
    # A new column under the old name is another one: old rows have nothing in it.
    table.dataset.add_columns(pa.field("text", pa.string()))
    assert table.words("fox") == []
    with table.writer(take_over="now") as newer:
        newer.put(pa.Table.from_pylist([{"id": 4, "text": "fox"}, {"id": 5, "body": "fox"}], newer.schema))
        assert ids(table.words("fox")) == [4]
        assert sorted(ids(table.words("fox", column="body"))) == [1, 2, 3, 5]
    kill(writer)


@pytest.mark.usefixtures("level_size")
def test_without_a_key_every_row_counts(tmp_path: Path) -> None:
    rows = [row(1, "fox"), row(1, "fox"), row(2, "dog")]
    table = Searched(tmp_path, rows, schema=APPEND_ONLY)
    for _ in range(2):
        with table.writer() as writer:
            writer.put(as_table(rows, APPEND_ONLY))
    with table.writer() as writer:
        writer.put(as_table(rows, APPEND_ONLY))
        assert ids(table.words("fox")) == [1] * 8
        assert len(table.words("fox", 5)) == 5


@pytest.mark.usefixtures("level_size")
def test_a_key_of_text_that_was_deleted_is_no_hit(tmp_path: Path) -> None:
    schema = pa.schema([pa.field("title", pa.string(), False, KEY), pa.field("n", pa.int64())])
    table = Searched(tmp_path, schema=schema, indexes={"title": {"index_type": "INVERTED"}})
    rows = [{"title": f"fox number {i}", "n": i} for i in range(5)]
    table.flushed(rows[:3])
    with table.writer() as writer:
        writer.put(as_table(rows[3:], schema))
        writer.delete(["fox number 1", "fox number 3"])
    for _ in range(2):
        found = table.words("fox", column="title")
        assert sorted(hit["n"] for hit in found) == [0, 2, 4]
        assert [hit["n"] for hit in table.words("fox", column="title", filter="n > 2")] == [4]
        table.table.compact()


@pytest.mark.parametrize("type_", [pa.string(), pa.large_string()])
@pytest.mark.usefixtures("level_size")
def test_text_of_either_width(tmp_path: Path, type_: pa.DataType) -> None:
    schema = pa.schema([FIELDS[0], pa.field("text", type_)])
    rows = [{"id": 1, "text": "fox"}, {"id": 2, "text": None}, {"id": 3, "text": "ÜBER foxes"}]
    table = Searched(tmp_path, rows, schema=schema, indexes=WORDS)
    table.flushed([{**each, "id": each["id"] + 10} for each in rows])
    with table.writer() as writer:
        writer.put(as_table([{**each, "id": each["id"] + 20} for each in rows], schema))
        assert sorted(ids(table.words("fox"))) == [1, 3, 11, 13, 21, 23]
        assert sorted(ids(table.words("uber"))) == [3, 13, 23]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"query": ""}, "at least one word"),
        ({"query": "  \n"}, "at least one word"),
        ({"query": None}, "at least one word"),
        ({"query": 7}, "at least one word"),
        ({"k": 0}, "k must be"),
        ({"k": -1}, "k must be"),
        ({"k": 1.5}, "k must be"),
        ({"column": "absent"}, "no column 'absent'"),
        ({"column": "n"}, "int64"),
        ({"column": "v"}, "needs text"),
        ({"operator": "xor"}, "or, and"),
        ({"filter": "n = = 1"}, "filter"),
        ({"filter": "absent IS NULL"}, "filter"),
        ({"columns": ["text", "text"]}, "each once"),
    ],
)
@pytest.mark.parametrize("empty", [True, False])
def test_what_cannot_be_searched_is_refused(
    tmp_path: Path, arguments: dict[str, Any], words: str, empty: bool
) -> None:
    table = Searched(tmp_path, [] if empty else random_rows(range(3), 0)).table
    options = {"column": "text", "query": "fox", "k": 3, **arguments}
    with pytest.raises(InvalidInputError, match=words):
        table.full_text_search(options.pop("column"), options.pop("query"), options.pop("k"), **options)


@pytest.mark.usefixtures("level_size")
@pytest.mark.parametrize("query", ["the", "the and of", "!!!", "…"])
def test_a_query_without_words_finds_nothing(tmp_path: Path, query: str) -> None:
    table = Searched(tmp_path, [row(1, "the fox and the dog !!!")])
    with table.writer() as writer:
        writer.put(as_table([row(2, "the end of the fox …")]))
        assert table.words(query) == []


def test_columns_are_chosen_and_the_score_comes_last(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "fox")])
    with table.writer() as writer:
        writer.put(as_table([row(2, "fox")]))
        found = table.table.full_text_search("text", "fox", columns=["n", "id"])
        assert found.schema.names == ["n", "id", "_score"]
        assert found.schema.field("_score").type == pa.float32()
        assert table.table.full_text_search("text", "fox").schema.names == ["id", "n", "text", "v", "_score"]
        assert table.table.full_text_search("text", "none").schema.names == ["id", "n", "text", "v", "_score"]


def test_equally_good_rows_come_in_the_same_order_every_time(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(i, "fox") for i in range(100)])
    table.flushed([row(i, "fox") for i in range(200, 220)])
    with table.writer() as writer:
        writer.put(as_table([row(i, "fox") for i in range(300, 320)]))
        first = ids(table.words("fox", 60))
        assert first == [*range(300, 320), *range(200, 220), *range(20)]
        for _ in range(5):
            assert ids(table.words("fox", 25)) == first[:25]


@pytest.mark.usefixtures("level_size")
def test_sstables_that_pylance_wrote(tmp_path: Path) -> None:
    base = random_rows(range(100), 0)
    table = Searched(tmp_path, base)
    model = {each["id"]: each for each in base}
    with table.dataset.mem_wal_writer(str(table.table.shard_for())) as writer:
        writer.put(as_table(_changed(model, random_rows(range(70, 150), 1))))
        writer.put(as_table(_changed(model, random_rows(range(80, 90), 2))))
        writer.delete(pa.table({"id": pa.array([5, 81], pa.int64())}))
    for key in (5, 81):
        del model[key]
    for query in QUERIES:
        check(table, model, query, scores=False)


def test_rows_that_wait_for_their_index_are_found_and_scored_alike(tmp_path: Path) -> None:
    table = Searched(tmp_path)
    with table.writer(sync_indexed_write=False, async_index_buffer_rows=1_000_000) as writer:
        model: dict[int, Row] = {}
        for seed in range(5):
            writer.put(as_table(_changed(model, random_rows(range(seed * 5, seed * 5 + 20), seed))))
            (shard_writer,) = writer.shard_writers.values()
            view = shard_writer.active_memtable_ref()
            assert view.indexes.rows_indexed < view.row_count
            check(table, model, "fox running")
            if seed in (1, 3):
                # A part is indexed, the rest is not.
                shard_writer._mode._active.update_indexes()
                check(table, model, "fox running")


@pytest.mark.usefixtures("level_size")
def test_indexes_that_a_search_made_serve_the_next_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level_size: str
) -> None:
    table = Searched(tmp_path, random_rows(range(20), 0), indexes=NO_INDEXES)
    table.flushed(random_rows(range(20, 40), 1))
    writer = table.writer()
    writer.put(as_table(random_rows(range(40, 60), 2)))
    expected = table.words("fox")
    inserted: list[int] = []
    insert = FullTextIndex.insert

    def counted(self: FullTextIndex, column: pa.Array, first_row: int) -> None:
        inserted.append(len(column))
        insert(self, column, first_row)

    monkeypatch.setattr(FullTextIndex, "insert", counted)
    assert table.words("fox") == expected
    # Only a large base without an index is read each time: by two readers, twice each.
    assert sum(inserted) == (0 if level_size == "small" else 4 * 20)
    del inserted[:]
    writer.put(as_table(random_rows([60], 3)))
    table.words("fox")
    assert inserted.count(1) == 2, "the new row is added to what there is, by each of the two readers"
    kill(writer)


def test_each_level_is_searched_in_the_way_that_fits_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Searched(tmp_path, random_rows(range(20), 0), indexes=WORDS)
    table.flushed(random_rows(range(20, 40), 1))
    writer = table.writer()
    writer.put(as_table(random_rows(range(40, 45), 2)))

    def ways() -> list[type]:
        snapshot = table.live.snapshot()
        query = checked_words(snapshot, "text", "fox", 5)
        return [type(level) for level in text_levels(snapshot, query)]

    in_memory, by_lance = IndexedLevel, LanceLevel
    assert ways() == [in_memory, in_memory, in_memory]
    monkeypatch.setattr(words, "MAX_INDEXED_ROWS", 10)
    assert ways() == [in_memory, by_lance, by_lance]
    table.dataset.create_scalar_index("text", "INVERTED", name="text_idx", replace=True, stem=False)
    assert ways() == [in_memory, in_memory, by_lance], "the SSTable's index has another tokenizer"
    table.dataset.drop_index("text_idx")
    assert ways() == [in_memory, in_memory, ReadLevel]
    kill(writer)


def test_a_table_that_was_made_anew_in_the_same_place_is_another_one(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "fox"), row(2, "dog")], indexes=WORDS)
    assert ids(table.words("fox")) == [1]
    shutil.rmtree(table.uri)
    again = Searched(tmp_path, [row(1, "dog"), row(2, "fox")], indexes=WORDS)
    assert again.live.base().version == table.live._base.base.version  # type: ignore[union-attr]
    assert ids(again.words("fox")) == [2]


def test_statistics_of_a_lance_index_count_the_words_as_they_were_written(tmp_path: Path) -> None:
    """A stemmed word that is stemmed once more may become another one."""
    rows = [row(i, "generous analyses" if i % 2 else "nothing of note") for i in range(40)]
    table = Searched(tmp_path, [*rows, row(100, None)])
    dataset = table.dataset
    indexes = LanceIndexes(lambda: dataset)
    params = indexes.text_params("text")
    assert params == FullTextParams(with_position=True)
    found = indexes.statistics("text", params, "Generous analyses, nothing")
    exact = by_terms(rows, "Generous analyses, nothing")
    assert found.document_frequency == exact
    assert (found.documents, found.tokens) == (40, 80)


def by_terms(rows: list[Row], text: str) -> dict[str, int]:
    terms = [token.text for token in lance.tokenize(text)]
    texts = [{token.text for token in lance.tokenize(each["text"])} for each in rows]
    return {term: sum(term in tokens for tokens in texts) for term in terms}


def test_statistics_of_frequent_words_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lance_search, "_MAX_COUNTED", 5)
    rows = [row(i, "fox" if i % 4 else "fox dog") for i in range(1000)]
    table = Searched(tmp_path, rows)
    indexes = LanceIndexes(lambda: table.dataset)
    params = indexes.text_params("text")
    assert params is not None
    found = indexes.statistics("text", params, "fox dog cat")
    assert found.documents == 1000
    assert found.tokens == pytest.approx(1250, rel=0.1)
    assert found.document_frequency["fox"] == 1000
    assert found.document_frequency["dog"] == pytest.approx(250, rel=0.3)
    assert found.document_frequency["cat"] == 0


def test_a_tokenizer_that_does_not_work_here_is_refused_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Searched(tmp_path, [row(1, "fox")])

    def broken(self: LanceIndexes, column: str) -> FullTextParams:
        return FullTextParams(base_tokenizer="no such tokenizer")

    monkeypatch.setattr(LanceIndexes, "text_params", broken)
    with pytest.raises(InvalidInputError, match="cannot be searched here"):
        table.words("fox")


def test_an_index_that_was_added_later_counts_from_then_on(tmp_path: Path) -> None:
    table = Searched(tmp_path, [row(1, "foxes run")], indexes=NO_INDEXES)
    assert ids(table.words("fox")) == [1]
    create_indexes(table.dataset, {"text": {"index_type": "INVERTED", "stem": False}})
    assert table.words("fox") == []
    assert ids(table.words("foxes")) == [1]
