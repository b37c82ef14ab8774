"""What goes wrong, how the command says so, and how it behaves as a process."""

from __future__ import annotations

import errno
import importlib
import json
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import lance
import pyarrow as pa
import pytest
import typer
from typer.core import TyperGroup

import lancewal
from lancewal.cli import exits
from lancewal.cli.console import parse_duration
from lancewal.cli.options import complete_path
from lancewal.errors import ConflictError, FencedError, PartialWriteError
from lancewal.storage import local
from lancewal.table import Table
from tests.cli.support import SOURCE, new_table, ok, run, spawn
from tests.servers import S3Server
from tests.tables import FAST_DEFAULTS, KEYED

#: The package exports the Typer application under the name of its module.
cli_app = importlib.import_module("lancewal.cli.app")


COMMANDS = [
    ["status"], ["query"], ["get", "1"], ["delete", "1"], ["tail"],
    ["flush"], ["compact"], ["gc"], ["verify"],
]  # fmt: skip


def with_table(command: list[str], where: Path) -> list[str]:
    return [command[0], str(where), *command[1:]]


@pytest.mark.parametrize("command", [*COMMANDS, ["init"]], ids=lambda command: command[0])
def test_a_wrong_path_is_said_plainly(tmp_path: Path, command: list[str]) -> None:
    outcome = run(*with_table(command, tmp_path / "nothing"))
    assert outcome.code == exits.NOT_FOUND
    assert "there is no Lance table at" in outcome.error


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_table_without_a_write_path_says_how_to_get_one(tmp_path: Path, command: list[str]) -> None:
    lance.write_dataset(KEYED.empty_table(), str(tmp_path / "t"))
    outcome = run(*with_table(command, tmp_path / "t"))
    assert outcome.code == exits.NOT_FOUND
    assert f"lancewal init {tmp_path / 't'}" in outcome.error


@pytest.mark.parametrize(
    ("number", "words"), [(errno.EACCES, "permission denied"), (errno.ENOSPC, "the disk is full")]
)
def test_a_storage_that_refuses_is_one_sentence(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    def refuse(self: object, directory: str, target: str, data: memoryview) -> bool:
        raise OSError(number, "refused", target)

    monkeypatch.setattr(local.LocalBackend, "_create", refuse)
    outcome = run("delete", table.uri, "1")
    assert outcome.code == exits.FAILED
    assert words in outcome.error
    monkeypatch.undo()
    assert table.count_rows() == 10
    assert "1 key deleted" in ok("delete", table.uri, "1").out


def test_a_table_that_is_missing_on_s3_ends_as_documented(s3: S3Server, tmp_path: Path) -> None:
    options = [each for pair in s3.storage_options.items() for each in ("-o", "=".join(pair))]
    uri = s3.uri(f"missing-{tmp_path.name}")
    for command in (["status", uri], ["get", uri, "1"], ["init", uri], ["ingest", uri, tmp_path]):
        outcome = run(*command, *options)
        assert outcome.code == exits.NOT_FOUND
        assert f"there is no Lance table at {uri}" in outcome.error
    (tmp_path / "rows.jsonl").write_text('{"id": 1}\n')
    made = ["init", uri, "--like", tmp_path / "rows.jsonl", "--key", "id"]
    assert run(*made, "--bucket", "id:0", *options).code == exits.REFUSED
    assert run("status", uri, *options).code == exits.NOT_FOUND
    ok(*made, *options)
    assert "already" in run(*made, *options).error


def test_missing_credentials_and_storage_that_is_not_there_end_as_documented(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ["-o", f"aws_endpoint={s3.endpoint}", "-o", "allow_http=true", "-o", "aws_region=us-east-1"]
    outcome = run("status", s3.uri("any"), *options)
    assert outcome.code == exits.FAILED
    assert "no credentials" in outcome.error
    nowhere = {**s3.storage_options, "aws_endpoint": "http://127.0.0.1:9", "client_max_retries": "0"}
    outcome = run("status", s3.uri("any"), *(e for p in nowhere.items() for e in ("-o", "=".join(p))))
    assert outcome.code == exits.FAILED


def test_a_kind_of_storage_that_is_unknown() -> None:
    outcome = run("status", "nosuch://bucket/t")
    assert outcome.code == exits.REFUSED
    assert "nosuch" in outcome.error


def test_errors_of_the_library_have_codes(table: lancewal.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = table.shards()[0].shard_id
    fenced = FencedError(shard, 1, 2)
    for error, code in [
        (fenced, exits.TAKEN_OVER),
        (ConflictError("lost"), exits.TAKEN_OVER),
        (PartialWriteError("flush", {shard: fenced}, {}), exits.TAKEN_OVER),
        (PartialWriteError("flush", {shard: fenced, uuid4(): OSError("x")}, {}), exits.FAILED),
        (OSError(errno.EIO, "I/O error", "/x"), exits.FAILED),
    ]:

        def fail(self: object, error: Exception = error, **_: object) -> None:
            raise error

        monkeypatch.setattr(Table, "flush", fail)
        outcome = run("flush", table.uri)
        assert outcome.code == code
        assert outcome.error


def test_a_failure_in_many_shards_gives_each_reason_once(table: lancewal.Table) -> None:
    failed = {uuid4(): OSError("the disk is full") for _ in range(3)}
    text = exits.plain_sentence(PartialWriteError("put", failed, {uuid4(): 7}))
    assert text == (
        "put failed in 3 of the table's shards: the disk is full (7 rows of other shards are written)"
    )


def test_a_bug_is_a_sentence_and_debug_shows_where(
    table: lancewal.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object, **_: object) -> None:
        raise RuntimeError("what nobody thought of")

    monkeypatch.setattr(Table, "flush", fail)
    outcome = run("flush", table.uri)
    assert outcome.code == exits.FAILED
    assert "RuntimeError: what nobody thought of (this is a bug; --debug shows where)" in outcome.error
    assert "Traceback" in run("flush", table.uri, "--debug").err


def test_sources_of_lance_are_not_shown() -> None:
    text = "LanceError(IO): Generic error: no such thing, /home/x/lance/rust/lance-io/src/local.rs:12:34"
    assert exits.plain_sentence(OSError(text)) == "Generic error: no such thing"


def test_ages_in_words() -> None:
    assert parse_duration("1.5 h", "--x") == timedelta(minutes=90)


def test_storage_options_by_argument_and_by_environment(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = s3.uri(f"{uuid4().hex}/t")
    (tmp_path / "rows.csv").write_text("id,name\n1,a\n2,b\n")
    options = [part for key, value in s3.storage_options.items() for part in ("-o", f"{key}={value}")]
    ok("ingest", uri, tmp_path / "rows.csv", "--create", "--key", "id", "--bucket", "id:2", *options)
    monkeypatch.setenv("LANCEWAL_OPTIONS", " ".join(f"{k}={v}" for k, v in s3.storage_options.items()))
    assert ok("status", uri, "--json").document["uncompacted"]["rows"] == 2
    ok("compact", uri)
    assert ok("query", uri, "--count").out == "2\n"
    assert run("status", uri, "-o", "novalue").code == exits.REFUSED


# --- as a process -------------------------------------------------------------------------


def test_the_command_starts_fast_and_prints_its_version() -> None:
    outcome = spawn("--version")
    assert (outcome.code, outcome.out) == (0, f"lancewal {lancewal.__version__}\n")


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from lancewal.cli import app\n"
        "assert CliRunner().invoke(app, ['--help']).exit_code == 0\n"
        "assert CliRunner().invoke(app, ['query', '--help']).exit_code == 0\n"
        "heavy = ('lance', 'pyarrow', 'datafusion', 'pyspark', 'faiss')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(SOURCE)},
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == "[]\n"


def test_completion_for_the_shell_is_there() -> None:
    outcome = spawn("--show-completion", "bash", env={"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert "_LANCEWAL_COMPLETE" in outcome.out


def test_paths_are_completed(tmp_path: Path) -> None:
    (tmp_path / "table").mkdir()
    (tmp_path / "tab.csv").write_text("")
    assert complete_path(f"{tmp_path}/ta") == [f"{tmp_path}/tab.csv", f"{tmp_path}/table/"]


def test_output_may_be_cut_off_by_its_reader(tmp_path: Path) -> None:
    table = new_table(tmp_path / "t", 20_000)
    command = f"{sys.executable} -m lancewal.cli query {table.uri} --json | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert json.loads(done.stdout)["id"] is not None
    assert done.stderr == ""
    assert done.returncode == 141


def test_bench_needs_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli_app.checkout() is not None
    monkeypatch.setattr(cli_app, "checkout", lambda: None)
    outcome = run("bench")
    assert outcome.code == exits.FAILED
    assert "not part of the installed package" in outcome.error


def test_bench_lists_its_workloads() -> None:
    assert "append" in spawn("bench", "--", "--list").out


def test_defaults_reach_the_table(tmp_path: Path) -> None:
    assert new_table(tmp_path / "t").details.writer_config_defaults == FAST_DEFAULTS


@pytest.mark.parametrize(("ended", "code"), [(0, 0), (3, 3), (-9, 137)])
def test_the_demo_is_a_program_whose_code_is_passed_on(
    monkeypatch: pytest.MonkeyPatch, ended: int, code: int
) -> None:
    started: list[list[str]] = []

    def remember(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        return subprocess.CompletedProcess(command, ended)

    monkeypatch.setattr(cli_app.subprocess, "run", remember)
    assert run("demo", "somewhere").code == code
    assert run("demo", "--no-spark", "--quick").code == code
    program = [sys.executable, "-m", "demo"]
    assert started == [[*program, "somewhere"], [*program, "demo-output", "--no-spark", "--quick"]]


def test_every_command_about_a_table_takes_json() -> None:
    group = typer.main.get_command(cli_app.app)
    assert isinstance(group, TyperGroup)
    commands = dict(group.commands)
    checkpoint = commands.pop("checkpoint")
    assert isinstance(checkpoint, TyperGroup)
    commands |= checkpoint.commands
    for shown in ("demo", "bench"):  # they show what a clone does
        del commands[shown]
    without = [
        name
        for name, command in commands.items()
        if "--json" not in {text for each in command.params for text in each.opts}
    ]
    assert len(commands) > 20
    assert without == []


@pytest.mark.parametrize("kind", ["local", "s3"])
def test_exit_codes_are_the_same_on_every_store(
    kind: str, s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri, options = str(tmp_path / "t"), {}
    if kind == "s3":
        uri, options = s3.uri(f"{uuid4().hex}/t"), s3.storage_options
    given = [each for pair in options.items() for each in ("-o", "=".join(pair))]

    def code(command: str, *rest: str) -> int:
        return run(command, uri, *rest, *given).code

    for command in (("status",), ("query",), ("get", "1"), ("tail",), ("compact",), ("gc",), ("verify",)):
        assert code(*command) == exits.NOT_FOUND, command
    lance.write_dataset(pa.table({"id": [1]}), uri, storage_options=options)
    assert code("status") == exits.NOT_FOUND  # no write path
    assert code("delete", "1") == exits.NOT_FOUND
    assert code("init", "--key", "id", "--bucket", "no:2") == exits.REFUSED
    assert code("init", "--key", "id", "--unsharded") == 0
    assert code("get", "1") == 0
    assert code("get", "2") == exits.NOT_FOUND
    assert code("query", "-f", "nothing = 1") == exits.REFUSED
    assert code("sql", "SELECT nothing FROM t") == exits.REFUSED
    assert code("query", "--words", "id=a") == exits.REFUSED
    assert code("update", "-f", "id = 1", "--set", "id=2", "--yes") == exits.REFUSED
    assert code("seal", "nothing") in (exits.REFUSED, exits.NOT_FOUND)
    assert code("delete", "1") == 0
    assert code("verify") == 0
