"""``docs/testing.md``, from what each layer of the tests has stored in ``docs/testing/*.json``.

``python -m tests.report`` writes the page. A layer's file holds:

- ``title``, and ``text``: a list of paragraphs;
- ``command``: what a reader runs to get the figures again;
- ``figures``: pairs of a name and a number or a text;
- ``tables``: each with a ``caption``, ``columns`` and ``rows``;
- ``lists``: each with a ``caption`` and ``items``. Of these only the title is needed.

:func:`store` writes such a file, and the page with it.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGE = DOCS / "testing.md"
LAYERS = DOCS / "testing"
#: Those that come first, in this order; others follow by name.
ORDER = ("simulation", "planted", "protocol", "faults", "fuzz", "stores", "endurance")

#: What a layer may store.
PARTS = {"title", "text", "command", "figures", "tables", "lists"}

INTRODUCTION = """\
# How it is attacked

What the tests of lancewal do to it, layer by layer, and what came of it. The figures are those of the last
run that stored them: each layer has a file in `docs/testing/`, and `python -m tests.report` makes this page
of them. What is promised, and which test would fail without it, is in [Guarantees](guarantees.md).
"""


def page() -> str:
    """The page, as it has to be."""
    present = {path.stem: path for path in LAYERS.glob("*.json")}
    ordered = [name for name in ORDER if name in present] + sorted(present.keys() - set(ORDER))
    sections = ("\n".join(_section(json.loads(present[name].read_text()))) for name in ordered)
    return "\n".join([INTRODUCTION, *sections]).rstrip() + "\n"


def store(layer: str, content: Mapping[str, Any]) -> None:
    """Keep what a layer has found, and write the page anew."""
    assert content.keys() <= PARTS, f"no page shows {content.keys() - PARTS}"
    LAYERS.mkdir(exist_ok=True)
    (LAYERS / f"{layer}.json").write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page())


def stored(layer: str) -> dict[str, Any] | None:
    """What a layer has stored before, if anything."""
    path = LAYERS / f"{layer}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _section(content: Mapping[str, Any]) -> Iterator[str]:
    yield f"## {content['title']}\n"
    for paragraph in content.get("text", ()):
        yield textwrap.fill(paragraph, 110, break_long_words=False, break_on_hyphens=False) + "\n"
    if figures := content.get("figures"):
        yield from _table(["figure", "value"], figures)
    for table in content.get("tables", ()):
        yield f"{table['caption']}:\n"
        yield from _table(table["columns"], table["rows"])
    for each in content.get("lists", ()):
        yield f"{each['caption']}:\n"
        yield from (f"- {item}" for item in each["items"])
        yield ""
    if command := content.get("command"):
        yield f"Again: `{command}`\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Iterator[str]:
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(_cell(value) for value in row) + " |"
    yield ""


def _cell(value: Any) -> str:
    """
    >>> _cell(1234567), _cell(0.5), _cell("a|b < c"), _cell(None)
    ('1,234,567', '0.5', 'a\\\\|b &lt; c', '')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "" if value is None else str(value).replace("|", "\\|").replace("<", "&lt;")


def summary() -> Iterator[str]:
    """The figures of each layer, for whoever ran them."""
    for name in ORDER:
        if content := stored(name):
            yield content["title"]
            yield from (f"  {figure}: {_cell(value)}" for figure, value in content.get("figures", ()))


if __name__ == "__main__":
    PAGE.write_text(page())
    print("\n".join(summary()))
    print(PAGE.relative_to(DOCS.parent))
