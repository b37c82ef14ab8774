"""Finding files, knowing them again, reading them in every format."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path

import lance
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.feather as feather
import pyarrow.ipc as paipc
import pyarrow.parquet as pq
import pytest

from lancewal.errors import InvalidInputError, StorageError
from lancewal.ingest import Format, find_files, open_file
from lancewal.ingest.files import directories_of, format_of
from tests.servers import S3Server

TABLE = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False),
        pa.field("name", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), 2)),
    ]
)
ROWS = pa.table(
    {
        "id": pa.array([1, 2, 3], pa.int64()),
        "name": ["a", None, "c"],
        "vector": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
    },
    schema=TABLE,
)
FLAT = ROWS.select(["id", "name"])


def write_json(path: Path, rows: pa.Table = ROWS) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))


def write_stream(path: Path) -> None:
    with paipc.new_stream(path, ROWS.schema) as writer:
        writer.write_table(ROWS)


def read(path: Path, schema: pa.Schema | None = TABLE, **options: bool) -> pa.Table:
    (file,) = find_files([path])
    opened = open_file(file, schema, **options)
    batches = list(opened.batches)
    assert opened.fraction() == pytest.approx(1.0)
    return pa.Table.from_batches(batches)


# --- formats ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl", "rows.arrow", "rows.arrows", "rows.lance"])
def test_every_format_gives_the_same_rows(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name == "rows.lance":
        lance.write_dataset(ROWS, str(path))
    else:
        {"parquet": lambda p: pq.write_table(ROWS, p), "jsonl": write_json, "arrows": write_stream}.get(
            path.suffix[1:], lambda p: feather.write_feather(ROWS, str(p), compression="uncompressed")
        )(path)
    assert read(path).to_pylist() == ROWS.to_pylist()


def test_csv_takes_the_tables_types_and_tells_null_from_empty(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('id,name\n1,\n2,""\n3,NULL\n')
    rows = read(path)
    assert rows.schema.field("id").type == pa.int64()
    assert rows.column("name").to_pylist() == [None, "", "NULL"]


def test_text_may_be_packed(tmp_path: Path) -> None:
    plain, packed = tmp_path / "rows.csv", tmp_path / "rows.csv.gz"
    pacsv.write_csv(FLAT, plain)
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed).to_pylist() == FLAT.to_pylist()


def test_tabs_separate_a_tsv(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_text("id\tname\n7\ta,b\n")
    assert read(path).to_pylist() == [{"id": 7, "name": "a,b"}]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_an_empty_json_file_has_no_rows(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    (file,) = find_files([tmp_path / name])
    assert list(open_file(file, TABLE).batches) == []


def test_a_csv_cannot_hold_vectors_and_says_what_can(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,vector\n1,2\n")
    with pytest.raises(InvalidInputError, match=r"vector.*JSON lines or Parquet"):
        read(path)


def test_unknown_columns_can_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1, "extra": {"deep": [1]}}\n')
    assert "extra" in read(path).column_names
    assert "extra" not in read(path, drop_unknown=True).column_names


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.parquet", b"PAR1 no"),
        ("rows.jsonl", b'{"id": }\n'),
        ("rows.arrow", b"ARROW1 no"),
        ("rows.csv", b""),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises((InvalidInputError, StorageError), match=f"cannot read .*{name}"):
        read(tmp_path / name)


# --- finding ------------------------------------------------------------------------------


def test_a_directory_gives_its_files_sorted_and_below(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    lance.write_dataset(ROWS, str(tmp_path / "table.lance"))
    for name in ("b.csv", "a.jsonl", "sub/c.parquet", "notes.txt", ".hidden.csv", "_SUCCESS", "_tmp.csv"):
        (tmp_path / name).write_text("x")
    found = find_files([tmp_path])
    assert [str(file).removeprefix(f"{tmp_path}/") for file in found] == [
        "a.jsonl",
        "b.csv",
        "sub/c.parquet",
        "table.lance",
    ]
    assert [file.format for file in found] == [Format.JSON_LINES, Format.CSV, Format.PARQUET, Format.LANCE]


def test_a_file_named_twice_is_found_once(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("id\n1\n")
    assert len(find_files([tmp_path / "a.csv", tmp_path, tmp_path / "." / "a.csv"])) == 1


def test_a_format_is_for_files_without_an_ending(tmp_path: Path) -> None:
    (tmp_path / "part-0").write_text("id\n1\n")
    with pytest.raises(InvalidInputError, match="format"):
        find_files([tmp_path / "part-0"])
    (file,) = find_files([tmp_path / "part-0"], "csv")
    assert file.format is Format.CSV
    assert len(find_files([tmp_path], "csv")) == 1
    with pytest.raises(InvalidInputError, match="unknown format 'xlsx'"):
        find_files([tmp_path], "xlsx")


def test_a_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="there is no file or directory"):
        find_files([tmp_path / "nothing"])


def test_a_file_that_changed_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("id\n1\n")
    (before,) = find_files([path])
    assert before.is_unchanged()
    path.write_text("id\n2\n")
    os.utime(path, ns=(1, before.modified + 1))
    (after,) = find_files([path])
    assert after.identity != before.identity
    assert not before.is_unchanged()


def test_a_new_version_of_a_lance_table_is_another_file(tmp_path: Path) -> None:
    lance.write_dataset(ROWS, str(tmp_path / "t.lance"))
    (before,) = find_files([tmp_path / "t.lance"])
    lance.write_dataset(ROWS, str(tmp_path / "t.lance"), mode="append")
    (after,) = find_files([tmp_path / "t.lance"])
    assert before.identity != after.identity
    assert sum(batch.num_rows for batch in open_file(before).batches) == 3


def test_directories_of_files_that_are_gone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    assert directories_of([tmp_path / "gone.csv", tmp_path / "sub"]) == [str(tmp_path), str(tmp_path / "sub")]


@pytest.mark.parametrize("name", ["a.parquet.gz", "a.txt", "a", "a.gz"])
def test_endings_that_tell_nothing(name: str) -> None:
    assert format_of(name) is None


def test_files_on_s3(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore
    from obstore.store import S3Store

    key, secret = s3.storage_options["aws_access_key_id"], s3.storage_options["aws_secret_access_key"]
    endpoint = s3.storage_options["aws_endpoint"]
    bucket = s3.uri("x").removeprefix("s3://").partition("/")[0]
    store = S3Store(
        bucket,
        config={
            "access_key_id": key,
            "secret_access_key": secret,
            "endpoint": endpoint,
            "region": "us-east-1",
        },
        client_options={"allow_http": True},
    )
    obstore.put(store, "incoming/a.csv", b"id,name\n1,x\n")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    host = endpoint.removeprefix("http://")
    (file,) = find_files([f"s3://{bucket}/incoming?endpoint_override={host}&scheme=http&region=us-east-1"])
    assert str(file) == f"s3://{bucket}/incoming/a.csv"
    assert pa.Table.from_batches(open_file(file, TABLE).batches).to_pylist() == [{"id": 1, "name": "x"}]
