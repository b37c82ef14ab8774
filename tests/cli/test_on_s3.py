"""Every command on a table in a bucket: the same output and the documented exit codes as on a disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import lancewal
from lancewal.cli import exits
from lancewal.storage import ObjectStore, PutOutcome, layout
from tests.cli.support import Outcome, new_table, run
from tests.servers import S3Server

Run = Callable[..., Outcome]


@pytest.fixture
def command(s3: S3Server) -> Run:
    """Runs commands with the options of the server; ``code`` is how they must end."""

    def call(*arguments: object, code: int = 0) -> Outcome:
        options = [each for pair in s3.storage_options.items() for each in ("--option", "=".join(pair))]
        outcome = run(*arguments, *options)
        assert outcome.code == code, (outcome.out, outcome.err)
        return outcome

    return call


@pytest.fixture
def uri(s3: S3Server, command: Run, tmp_path: Path) -> str:
    """A table with ids 1 and 2, flushed."""
    place = s3.uri(f"{tmp_path.name}/docs.lance")
    (tmp_path / "rows.jsonl").write_text('{"id": 1, "text": "a red fox"}\n{"id": 2, "text": "a wolf"}\n')
    command("ingest", place, tmp_path / "rows.jsonl", "--create", "--key", "id", "--bucket", "id:2")
    return place


def _table(s3: S3Server, uri: str) -> lancewal.Table:
    return lancewal.open(uri, storage_options=s3.storage_options)


def _checks(outcome: Outcome) -> dict[str, Any]:
    return {check["name"]: check["ok"] for check in outcome.document["storage"]}


def test_the_doctor_tries_out_a_bucket_and_leaves_nothing_behind(
    command: Run, s3: S3Server, uri: str
) -> None:
    store = ObjectStore.from_uri(uri, s3.storage_options)
    before = {info.path for info in store.list("")}
    found = _checks(command("doctor", uri, "--json"))
    assert found.keys() == {"table", "create", "read", "list", "clock", "delete", "space", "owners"}
    assert False not in found.values()
    assert found["create"] is True
    assert {info.path for info in store.list("")} == before
    assert "✗" not in command("doctor", uri).out


def test_the_doctor_names_what_a_bucket_does_not_do(
    command: Run, uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a gateway does that takes every put for an overwrite."""

    def overwrite(self: ObjectStore, path: str, data: bytes) -> PutOutcome:
        self.put(path, data)
        return PutOutcome.CREATED

    monkeypatch.setattr(ObjectStore, "put_if_absent", overwrite)
    found = command("doctor", uri, "--json", code=exits.PROBLEMS)
    assert [name for name, ok in _checks(found).items() if ok is False] == ["create"]


def test_reading_and_changing_rows_ends_as_documented(command: Run, uri: str) -> None:
    assert command("query", uri, "--filter", "id = 1", "--json").document["text"] == "a red fox"
    assert command("sql", uri, "SELECT count(*) AS n FROM t", "--json").document == {"n": 2}
    assert command("get", uri, "2", "--json").document["text"] == "a wolf"
    command("get", uri, "3", code=exits.NOT_FOUND)
    command("get", uri, "x", code=exits.REFUSED)
    command("query", uri, "--filter", "nope = 1", code=exits.REFUSED)
    changed = command("update", uri, "--where", "id = 1", "--set", "text=a dog", "--yes", "--json")
    assert changed.document == {"updated": 1}
    command("update", uri, "--where", "id = 1", "--set", "id=7", "--yes", code=exits.REFUSED)
    assert command("delete", uri, "2", "--json").document == {"deleted": 1}
    kinds = [each["_change_type"] for each in command("tail", uri, "--all", "--json").documents]
    assert sorted(kinds) == ["delete", "upsert", "upsert", "upsert"]
    assert command("query", uri, "--json").document["text"] == "a dog"


def test_maintenance_ends_as_documented(command: Run, s3: S3Server, uri: str) -> None:
    with _table(s3, uri).writer() as writer:
        writer.put({"id": 3, "text": "a bear"})
    assert command("status", uri, "--json").document["primary_key"] == ["id"]
    command("flush", uri, "--json")
    assert command("compact", uri, "--json").document["rows_inserted"] == 3
    assert command("upkeep", uri, "--dry-run", "--json").documents[0]["uri"] == uri
    command("gc", uri, "--min-age", "0s", "--json")
    command("checkpoint", "create", uri, "one")
    command("checkpoint", "create", uri, "one", code=exits.REFUSED)
    assert command("query", uri, "--at", "one", "--count", "--json").document == {"rows": 3}
    command("checkpoint", "drop", uri, "one")
    shard = str(_table(s3, uri).shards()[0].shard_id)
    assert command("seal", uri, shard, "--json").document["status"] == "sealed"
    assert command("unseal", uri, shard, "--json").document["status"] == "active"
    assert command("verify", uri, "--json").document["ok"] is True


def test_damage_in_a_bucket_is_a_problem(command: Run, s3: S3Server, uri: str) -> None:
    store = ObjectStore.from_uri(uri, s3.storage_options)
    rows = [info.path for info in store.list(layout.MEM_WAL_DIR) if info.path.endswith(".lance")]
    store.delete_many(rows[:1])
    found = command("verify", uri, "--json", code=exits.PROBLEMS)
    assert found.document["ok"] is False


def test_a_shard_that_another_process_has_is_said(command: Run, s3: S3Server, uri: str) -> None:
    with _table(s3, uri).writer() as writer:
        writer.put([{"id": 1, "text": "mine"}, {"id": 2, "text": "mine"}])
        never = ("--take-over", "never")
        assert "process" in command("delete", uri, "1", *never, code=exits.TAKEN_OVER).error


def test_a_backup_goes_from_a_bucket_to_a_disk_and_into_another_place(
    command: Run, s3: S3Server, uri: str, tmp_path: Path
) -> None:
    command("backup", uri, tmp_path / "backups", "--check", "--json")
    place = s3.uri(f"{tmp_path.name}/restored.lance")
    command("restore", tmp_path / "backups", place)
    assert command("query", place, "--count", "--json").document == {"rows": 2}
    command("restore", tmp_path / "backups", place, code=exits.REFUSED)
    command("restore", tmp_path / "none", place + "2", code=exits.REFUSED)


def test_a_table_of_a_disk_is_not_looked_for_in_a_bucket(command: Run, tmp_path: Path) -> None:
    """Options of a bucket do not change where a path leads."""
    new_table(tmp_path / "t", 1)
    assert command("query", tmp_path / "t", "--count", "--json").document == {"rows": 1}
