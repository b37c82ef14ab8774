"""``docs/testing.md`` says what the layers have stored, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import report


def test_the_page_is_what_the_generator_writes() -> None:
    assert report.PAGE.read_text() == report.page(), "run `python -m tests.report`"


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
