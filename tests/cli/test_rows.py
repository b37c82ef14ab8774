"""query, sql, get and tail."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import lance
import pyarrow as pa
import pytest

import lancewal
from lancewal.cli import exits
from tests.cli.support import new_table, ok, run, start
from tests.patience import PATIENCE
from tests.tables import APPEND_ONLY, KEY, rows

DOCUMENTS = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata=KEY),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
        pa.field("raw", pa.binary()),
        pa.field("score", pa.float64()),
    ]
)


@pytest.fixture
def table(table: lancewal.Table) -> lancewal.Table:
    """Ids 0 to 9 in the base, 10 to 29 above it."""
    with table.writer() as writer:
        writer.put(rows(10, 20))
    return table


@pytest.fixture
def documents(tmp_path: Path) -> lancewal.Table:
    table = new_table(tmp_path / "d", schema=DOCUMENTS)
    with table.writer() as writer:
        writer.put(
            pa.table(
                {
                    "id": [1, 2, 3],
                    "text": ["a red fox", "a blue whale", "the red planet"],
                    "vector": [[0.0, 0.0], [1.0, 0.0], [5.0, 5.0]],
                    "raw": [b"\x00\xff", None, b""],
                    "score": [float("nan"), 1.5, None],
                },
                DOCUMENTS,
            )
        )
    return table


def found(outcome_documents: list[dict[str, object]]) -> list[object]:
    return [row["id"] for row in outcome_documents]


# --- query --------------------------------------------------------------------------------


def test_query_reads_all_levels(table: lancewal.Table) -> None:
    assert sorted(found(ok("query", table.uri, "--json").documents)) == list(range(30))
    rows_ = ok("query", table.uri, "-f", "id > 7 and id < 12", "-c", "id", "--json").documents
    assert sorted(found(rows_)) == [8, 9, 10, 11]
    assert set(rows_[0]) == {"id"}


def test_query_on_a_terminal_stops_early_and_says_so(table: lancewal.Table) -> None:
    outcome = ok("query", table.uri)
    assert outcome.out.splitlines()[0].split() == ["id", "name"]
    assert len(outcome.out.splitlines()) == 21
    assert "20 rows; there are more, see --limit" in outcome.err
    assert "more" not in ok("query", table.uri, "-n", "5").err


def test_query_counts_and_explains(table: lancewal.Table) -> None:
    assert ok("query", table.uri, "--count").out == "30\n"
    assert ok("query", table.uri, "--count", "-f", "id < 3", "--json").document == {"rows": 3}
    assert "base: 10 rows" in ok("query", table.uri, "--explain").out
    assert ok("query", table.uri, "-n", "0", "--json").out == ""


def test_query_tells_where_rows_come_from(table: lancewal.Table) -> None:
    sources = {row["_source"] for row in ok("query", table.uri, "--source", "--json").documents}
    assert len(sources) > 1


def test_query_finds_the_nearest(documents: lancewal.Table, tmp_path: Path) -> None:
    near = ok("query", documents.uri, "--vector", "vector=[0.9, 0]", "-n", "2", "--json").documents
    assert found(near) == [2, 1]
    (tmp_path / "q.json").write_text("[5, 4]")
    assert found(
        ok("query", documents.uri, "--vector", f"vector=@{tmp_path}/q.json", "-n", "1", "--json").documents
    ) == [3]
    assert found(ok("query", documents.uri, "--vector", "vector=key:1", "-n", "1", "--json").documents) == [1]
    assert "_distance" in ok("query", documents.uri, "--vector", "vector=key:1").out


def test_query_finds_words(documents: lancewal.Table) -> None:
    assert sorted(found(ok("query", documents.uri, "--words", "text=red", "--json").documents)) == [1, 3]


def test_json_rows_are_json(documents: lancewal.Table) -> None:
    by_id = {row["id"]: row for row in ok("query", documents.uri, "--json").documents}
    assert by_id[1]["raw"] == "AP8="
    assert by_id[1]["score"] is None
    assert by_id[2]["vector"] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["-f", "nothing = 1"], exits.REFUSED, "nothing"),
        (["-c", "nothing"], exits.REFUSED, "nothing"),
        (["--vector", "vector"], exits.REFUSED, "COLUMN=VECTOR"),
        (["--vector", "vector=[1"], exits.REFUSED, "JSON list"),
        (["--vector", "vector=[1]"], exits.REFUSED, "vector"),
        (["--vector", "vector=key:77"], exits.NOT_FOUND, "77"),
        (["--words", "text=a", "--metric", "l2"], exits.REFUSED, "metric"),
        (["--words", "text=a", "--count"], exits.REFUSED, "not for searches"),
        (["--vector", "vector=@/no/such/file"], exits.FAILED, "No such file"),
    ],
)
def test_query_explains_what_it_refuses(
    documents: lancewal.Table, arguments: list[str], code: int, words: str
) -> None:
    outcome = run("query", documents.uri, *arguments)
    assert outcome.code == code
    assert words in outcome.err
    assert "Traceback" not in outcome.err


# --- get and delete -----------------------------------------------------------------------


def test_get_shows_rows_and_misses(table: lancewal.Table) -> None:
    assert ok("get", table.uri, "3", "12", "--json").documents == [
        {"id": 3, "name": "name_3"},
        {"id": 12, "name": "name_12"},
    ]
    assert "name_3" in ok("get", table.uri, "3").out
    outcome = run("get", table.uri, "3", "99", "-c", "name")
    assert (outcome.code, outcome.error) == (exits.NOT_FOUND, "no row with key 99")
    assert "name_3" in outcome.out


def test_a_key_of_the_wrong_type_is_refused(table: lancewal.Table) -> None:
    outcome = run("get", table.uri, "three")
    assert outcome.code == exits.REFUSED
    assert "id (int64)" in outcome.err


def test_keys_of_several_columns_are_json(tmp_path: Path) -> None:
    schema = pa.schema(
        [
            pa.field(
                "tenant", pa.string(), False, {**KEY, "lance-schema:unenforced-primary-key:position": "1"}
            ),
            pa.field("id", pa.int32(), False, {**KEY, "lance-schema:unenforced-primary-key:position": "2"}),
            pa.field("name", pa.string()),
        ]
    )
    lance.write_dataset(
        pa.table({"tenant": ["a", "b"], "id": [1, 1], "name": ["x", "y"]}, schema), str(tmp_path / "t")
    )
    ok("init", tmp_path / "t", "--identity", "tenant")
    assert ok("get", tmp_path / "t", '{"tenant": "b", "id": 1}', "--json").document["name"] == "y"
    assert ok("get", tmp_path / "t", '["a", 1]', "--json").document["name"] == "x"
    refused = run("get", tmp_path / "t", "b")
    assert refused.code == exits.REFUSED
    assert "tenant" in refused.err
    ok("delete", tmp_path / "t", '["a", 1]')
    assert run("get", tmp_path / "t", '["a", 1]').code == exits.NOT_FOUND


TEXT_KEY = pa.schema([pa.field("name", pa.string(), False, KEY)])
ATTACK = "\x1b]0;pwned\x07\x1b[31mred\x9b2J\u202eabc[bold]"
COMMANDS = "\x1b\x07\x9b\u202e"


@pytest.mark.parametrize("command", [["query"], ["get", ATTACK], ["tail", "--all"], ["status"]], ids=str)
def test_escape_sequences_in_rows_reached_the_terminal(tmp_path: Path, command: list[str]) -> None:
    schema = pa.schema([pa.field("id", pa.string(), False, KEY), pa.field(ATTACK, pa.string())])
    lance.write_dataset(schema.empty_table(), str(tmp_path / "[red]t"))
    table = lancewal.initialize(tmp_path / "[red]t", identity="id", writer_defaults={"fsync": "false"})
    with table.writer() as writer:
        writer.put(pa.table({"id": [ATTACK], ATTACK: [ATTACK]}))
    name, *rest = command
    shown = ok(name, table.uri, *rest, columns=400)
    assert not set(COMMANDS) & set(shown.out + shown.err)
    assert "\\x1b]0;pwned\\x07" in shown.out
    assert "abc[bold]" in shown.out
    as_json = ok(name, table.uri, *rest, "--json")
    assert not set(COMMANDS) & set(as_json.out)
    if name != "status":
        assert as_json.documents[0][ATTACK] == ATTACK


def test_escape_sequences_in_errors_and_names_reached_the_terminal(tmp_path: Path) -> None:
    table = new_table(tmp_path / "t", schema=TEXT_KEY, bucket=("name", 2))
    missing = run("get", table.uri, ATTACK)
    assert missing.code == exits.NOT_FOUND
    assert "\\x1b]0;pwned" in missing.error
    assert not set(COMMANDS) & set(missing.err)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a[b]\x1b.jsonl").write_text('{"id": 1}\n')
    taken = ok(
        "ingest", tmp_path / "t[/x]", tmp_path / "in", "--create", "--stream", "--looks", 3, "--every", 0.1
    )
    assert "a[b]\\x1b.jsonl" in taken.out
    assert not set(COMMANDS) & set(taken.out + taken.err)


def test_a_table_without_a_key_has_no_rows_by_key(tmp_path: Path) -> None:
    table = new_table(tmp_path / "a", 3, APPEND_ONLY)
    for arguments in (
        ["get", table.uri, "1"],
        ["delete", table.uri, "1"],
        ["delete", table.uri, "-f", "id = 1", "-y"],
    ):
        outcome = run(*arguments)
        assert outcome.code == exits.REFUSED
        assert "no primary key" in outcome.error


# --- tail ---------------------------------------------------------------------------------


def test_tail_shows_the_last_changes_of_each_shard(table: lancewal.Table) -> None:
    with table.writer() as writer:
        writer.delete(3)
    lines = ok("tail", table.uri, "-n", "2", "--json").documents
    assert len(lines) == 4
    assert {line["_change_type"] for line in lines} == {"upsert", "delete"}
    assert len(ok("tail", table.uri, "--all", "--json").documents) == 21
    text = ok("tail", table.uri, "-n", "1").out
    assert "- delete" in text
    assert "id=3" in text


def test_tail_may_leave_columns_out(table: lancewal.Table) -> None:
    (first, *_) = ok("tail", table.uri, "--json", "-c", "id").documents
    assert set(first) == {"id", "_change_type", "_shard_id", "_wal_position", "_writer_epoch"}
    refused = run("tail", table.uri, "-c", "nothing")
    assert refused.code == exits.REFUSED
    assert "nothing" in refused.err


def test_tail_follows_until_it_is_stopped(table: lancewal.Table) -> None:
    with start("tail", table.uri, "--follow", "--json", "-n", "1") as process:
        assert process.stdout is not None
        seen = [json.loads(process.stdout.readline())["id"] for _ in range(2)]
        with table.writer() as writer:
            writer.put(rows(500, 1))
        assert json.loads(process.stdout.readline())["id"] == 500
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert len(seen) == 2
    assert (process.returncode, err) == (0, "")


# --- checkpoints --------------------------------------------------------------------------


def test_checkpoints_are_made_listed_read_and_dropped(table: lancewal.Table) -> None:
    made = ok("checkpoint", "create", table.uri, "v1", "--keep", "30d", "--json").document
    assert (made["name"], made["problem"]) == ("v1", None)
    ok("delete", table.uri, "3")
    assert ok("query", table.uri, "--at", "v1", "--count").out == "30\n"
    assert ok("query", table.uri, "--count").out == "29\n"
    assert ok("get", table.uri, "3", "--at", "v1", "--json").documents == [{"id": 3, "name": "name_3"}]
    assert run("get", table.uri, "3").code == exits.NOT_FOUND
    assert ok("checkpoint", "list", table.uri, "--json").documents == [made]
    assert "v1  base version" in ok("checkpoint", "list", table.uri).out
    assert "v1 dropped" in ok("checkpoint", "drop", table.uri, "v1").out
    assert ok("checkpoint", "list", table.uri, "--json").out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["checkpoint", "create", "TABLE", "a/b"], "name of a checkpoint"),
        (["checkpoint", "create", "TABLE", "a", "--keep", "soon"], "no duration"),
        (["checkpoint", "drop", "TABLE", "a"], "no checkpoint 'a'"),
        (["query", "TABLE", "--at", "a"], "no checkpoint 'a'"),
    ],
)
def test_checkpoints_that_cannot_be_are_refused(
    table: lancewal.Table, arguments: list[str], words: str
) -> None:
    outcome = run(*[table.uri if each == "TABLE" else each for each in arguments])
    assert outcome.code == exits.REFUSED
    assert words in outcome.err


def test_a_vector_and_words_together_are_a_hybrid_search(tmp_path: Path) -> None:
    animals = [
        {"id": 1, "text": "a red fox", "v": [1.0, 0.0]},
        {"id": 2, "text": "a red wolf", "v": [0.0, 1.0]},
        {"id": 3, "text": "a whale", "v": [0.9, 0.1]},
    ]
    table = lancewal.create(tmp_path / "t", animals, key="id")
    asked = ("--vector", "v=[1,0]", "--words", "text=fox", "-c", "id")
    found = ok("query", table.uri, *asked, "--json").documents
    assert found == table.hybrid_search("v", [1, 0], "text", "fox", columns=["id"]).to_pylist()
    assert found[0]["id"] == 1
    assert "_relevance" in found[0]
    filtered = ok("query", table.uri, *asked, "-f", "id > 1", "-n", "1", "--json").document
    assert filtered["id"] == 3


def test_a_plan_can_be_had_as_json(tmp_path: Path) -> None:
    table = lancewal.create(tmp_path / "t", [{"id": 1}], key="id")
    plan = ok("query", table.uri, "--explain", "--json").document["plan"]
    assert plan == table.scan().explain()
