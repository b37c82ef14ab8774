"""Every code block of the documentation runs, and what it names exists."""

from __future__ import annotations

import ast
import dataclasses
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
import pytest
import typer

import lancewal
from lancewal.cli.app import app
from lancewal.maintenance import Kind
from lancewal.storage import observe_all
from tests.cli.support import ok
from tests.docs.beside import WriterBeside
from tests.docs.blocks import PAGES, ROOT, Runner, blocks, run_page, run_page_alone, runs
from tests.tables import KEYED, rows

#: Languages that nothing runs.
_SHOWN = {"text", "mermaid"}


@contextmanager
def _beside_a_writer(directory: Path) -> Iterator[dict[str, Any]]:
    """What the page on operations is about: a table that another process writes to."""
    _small_table(directory)
    with WriterBeside(directory / "table") as beside:
        yield {"beside": beside}


def _small_table(directory: Path) -> None:
    lance.write_dataset(pa.Table.from_batches([rows(0, 10)]), str(directory / "table"), schema=KEYED)
    table = lancewal.initialize(directory / "table", bucket=("id", 2), writer_defaults={"fsync": "false"})
    with table.writer() as writer:
        writer.put(rows(10, 20))


#: What there is before a page begins, and the names that its hidden blocks may use.
SITUATIONS: dict[str, Callable[[Path], AbstractContextManager[dict[str, Any]]]] = {
    "operations.md": _beside_a_writer
}
#: A Spark session of their own would become that of all later tests.
ALONE = {"spark.md"}
WITH_CODE = [
    pytest.param(page, marks=pytest.mark.soak if page.name in ALONE else ())
    for page in PAGES
    if any(runs(block) for block in blocks(page))
]


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    if page.name in ALONE:
        run_page_alone(page, tmp_path)
        return
    situation = SITUATIONS.get(page.name, lambda _: nullcontext({}))
    try:
        with situation(tmp_path) as names:
            run_page(page, tmp_path, names)
    finally:
        observe_all(None)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_nothing_is_left_out_without_a_reason(page: Path) -> None:
    for block in blocks(page):
        assert runs(block) or block.marked or block.language in _SHOWN, f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", page.read_text()):
        assert f"def {name}(" in (ROOT / path).read_text(), f"{page.name} names {path}::{name}"


def test_guarantees_name_a_test_for_each() -> None:
    sections = re.split(r"^## (?=\d)", (ROOT / "docs" / "guarantees.md").read_text(), flags=re.MULTILINE)[1:]
    assert len(sections) == 13
    assert all("::test_" in section for section in sections)


def test_every_setting_of_a_writer_is_documented() -> None:
    text = (ROOT / "docs" / "configuration.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)`", text, re.MULTILINE))
    known = {field.name for field in dataclasses.fields(lancewal.ShardWriterConfig)}
    assert known <= documented
    assert {name for name in documented if name.islower()} <= known


def test_every_finding_of_verify_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    kinds = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    assert {str(kind) for kind in Kind} <= {name for row in kinds for name in re.findall(r"`(\w+)`", row)}


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        assert f"lancewal {name}" in text or f"### {name}" in text, name
        for parameter in command.params:
            for option in [*parameter.opts, *parameter.secondary_opts]:
                if option.startswith("--") and option not in ("--help", "--json"):
                    assert option in text, f"{name} {option}"


# cli.md, operations.md and python-service.md name what disturbs a writer and what does not.


def test_maintenance_fences_no_writer_elsewhere(tmp_path: Path) -> None:
    table = str(tmp_path / "table")
    with _beside_a_writer(tmp_path) as names:
        for name, *arguments in (["compact"], ["gc"], ["verify"], ["verify", "--repair"], ["status"]):
            ok(name, table, *arguments)
            assert names["beside"].put() == "written", name


@pytest.mark.parametrize("command", ["flush", "compact --flush", "ingest FILE", "delete KEY"])
def test_what_writes_leaves_a_writer_elsewhere_alone(command: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(f'{{"id": {WriterBeside.KEY}, "name": "taken"}}\n')
    given = {"KEY": str(WriterBeside.KEY), "FILE": str(file)}
    name, *arguments = (given.get(word, word) for word in command.split())
    with _beside_a_writer(tmp_path) as names:
        ok(name, str(tmp_path / "table"), *arguments)
        assert names["beside"].put() == "written"


def test_the_examples_can_fail(tmp_path: Path) -> None:
    """What keeps the pages honest must notice a wrong value, a missing error and a failing command."""
    page = tmp_path / "page.md"
    for body, reason in [
        ("```python\n1 + 1  # → 3\n```\n", "2 instead of 3"),
        ("```python\nint('1')  # raises ValueError\n```\n", "no ValueError was raised"),
        ("```python\nint('x')  # raises KeyError\n```\n", "instead of KeyError"),
        ("<!-- run -->\n```console\n$ lancewal status nothing\n```\n", "there is no Lance table"),
        ("<!-- run -->\n```console\nlancewal status nothing\n```\n", "runs nothing"),
    ]:
        page.write_text(body)
        (block,) = blocks(page)
        assert runs(block)
        with pytest.raises(AssertionError, match=reason):
            Runner(page, tmp_path).run(block)


def test_the_recipe_for_taking_a_shard_back_failed_at_close(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the situation that it is about: another process has taken the shards, again and again."""
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "python-service.md"
    names: dict[str, Any] = {"__name__": "service"}
    for block in blocks(page):
        wanted = (
            [
                statement
                for statement in ast.parse(block.body).body
                if isinstance(
                    statement, ast.Import | ast.ImportFrom | ast.ClassDef | ast.FunctionDef | ast.Assign
                )
                or "write_dataset" in ast.unparse(statement)
            ]
            if block.language == "python" and "durable_write" not in block.body
            else []
        )
        exec(compile(ast.Module(wanted, []), str(page), "exec"), names)
    notes, take_back = names["notes"], names["save_or_take_back"]
    for number in range(8):
        rows_ = [{"id": f"{number}-{n}", "body": "mine", "vector": [n, n]} for n in range(8)]
        notes.save(rows_)
        rival = lancewal.open("notes.lance").writer(take_over="now")
        rival.put(pa.Table.from_pylist([{**row, "body": "theirs"} for row in rows_], names["schema"]))
        take_back(notes, rows_)
        rival.close()
    notes.close()
    kept = lancewal.open("notes.lance").scan(columns=["body"]).to_table()["body"].to_pylist()
    assert kept == ["mine"] * 64
