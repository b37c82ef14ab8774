"""``docs/testing.md`` says what the layers have stored, and nothing else."""

from __future__ import annotations

import importlib.util
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import report

REPOSITORY = report.DOCS.parent


def test_the_page_is_what_the_generator_writes() -> None:
    assert report.PAGE.read_text() == report.page(), "run `python -m tests.report`"


@pytest.mark.parametrize("layer", report.ORDER)
def test_every_layer_has_text_figures_and_a_command(layer: str) -> None:
    """A section was empty once: its figures lay in a form that the generator does not know."""
    stored = report.stored(layer)
    assert stored is not None, f"{layer} has stored nothing"
    for part in ("text", "command"):
        assert stored.get(part), f"{layer} has no {part}"
    tables = stored.get("tables", [])
    assert stored.get("figures") or tables, f"{layer} has no figures"
    assert all(table["rows"] for table in tables), f"{layer} has an empty table"
    assert stored.keys() <= report.PARTS, f"{layer} has what no page shows"
    section = report.PAGE.read_text().partition(f"## {stored['title']}\n")[2].partition("\n## ")[0]
    assert "|---|" in section, f"the section of {layer} has no figures"


@pytest.mark.parametrize("layer", report.ORDER)
def test_the_command_of_a_layer_runs(layer: str) -> None:
    """Its module is there, and takes the arguments; what it does takes minutes to hours."""
    stored = report.stored(layer)
    assert stored is not None
    runner, *words = shlex.split(stored["command"])
    if runner == "pytest":
        assert all((REPOSITORY / word).exists() for word in words)
        return
    assert (runner, words[0]) == ("python", "-m")
    module, arguments = words[1], words[2:]
    assert importlib.util.find_spec(module) is not None
    flags = [word for word in arguments if word.startswith("--")]
    if flags:
        done = subprocess.run(
            [sys.executable, "-m", module, "--help"], capture_output=True, text=True, cwd=REPOSITORY
        )
        assert all(flag in done.stdout for flag in flags), done.stdout + done.stderr


def test_a_layer_becomes_a_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "LAYERS", tmp_path)
    monkeypatch.setattr(report, "PAGE", tmp_path / "testing.md")
    report.store("zebra", {"title": "Last"})
    report.store(
        "planted",
        {
            "title": "First",
            "text": ["Why."],
            "figures": [["seeds", 2000]],
            "tables": [{"caption": "Of them", "columns": ["a", "b"], "rows": [[1, None], ["x|y", 0.5]]}],
            "lists": [{"caption": "Found", "items": ["one"]}],
            "command": "make soak",
        },
    )
    text = report.PAGE.read_text()
    assert text == report.page()
    assert text.index("## First") < text.index("## Last")
    for line in (
        "Why.",
        "| seeds | 2,000 |",
        "| x\\|y | 0.5 |",
        "| 1 |  |",
        "Found:\n\n- one",
        "Again: `make soak`",
    ):
        assert line in text
