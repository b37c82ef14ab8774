"""``lancewal doctor`` and ``lancewal sql``: for people and for scripts."""

from __future__ import annotations

import pytest

import lancewal
from lancewal.cli import exits
from lancewal.storage import ObjectStore, PutOutcome
from tests.cli.support import ok, run


def test_the_doctor_finds_everything_in_order(table: lancewal.Table) -> None:
    out = ok("doctor", table.uri).out
    for part in ("environment", "pylance", "storage", "one was told that it did", "nobody writes to it now"):
        assert part in out
    assert "✗" not in out
    assert ok("doctor", "--json").document.keys() == {"environment"}


def test_the_doctor_ends_with_code_3_when_rows_would_be_lost(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ObjectStore, "put_if_absent", lambda self, path, data: PutOutcome.CREATED)
    done = run("doctor", table.uri, "--json")
    assert done.code == exits.PROBLEMS
    assert {key: value for key, value in done.document["storage"][1].items() if key != "text"} == {
        "name": "create",
        "ok": False,
    }


def test_sql_is_answered_for_people_and_for_scripts(table: lancewal.Table) -> None:
    assert ok("sql", table.uri, "SELECT count(*) AS n FROM t", "--json").document == {"n": 10}
    assert "name_3" in ok("sql", table.uri, "SELECT name FROM t WHERE id = 3").out
    refused = run("sql", table.uri, "DROP TABLE t")
    assert refused.code == exits.REFUSED
    assert "the table is called t" in refused.err
