"""Docstrings of the package as Markdown, for the pages of the API.

They are written for ``help()``, in reStructuredText; pages are Markdown. mkdocstrings loads this
(see ``mkdocs.yml``) and hands it every object that it has read.
"""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension

_ROLE = re.compile(r":(?:class|func|meth|mod|data|attr|exc):`(~?)([^`]+)`")
_CODE = re.compile(r"^\.\. code-block:: (\w+)\n\n((?:    .*\n|\n)+)", re.MULTILINE)
_EXAMPLE = re.compile(r"^>>> .*\n(?:.+\n)*", re.MULTILINE)
_DEFINITION = re.compile(r"^(``.+``)\n    (?=\S)", re.MULTILINE)


def markdown(text: str) -> str:
    """What the docstrings use of reStructuredText, as Markdown."""
    text = _ROLE.sub(lambda found: f"`{_shown(found[2], short=bool(found[1]))}`", text + "\n")
    text = _CODE.sub(lambda found: f"```{found[1]}\n{_outdented(found[2])}```\n", text)
    text = _EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}```\n", text)
    text = _DEFINITION.sub(r"\1\n:   ", text)
    text = re.sub(r"::$", ":", text, flags=re.MULTILINE)
    return re.sub(r"``([^`\n]+)``", r"`\1`", text).strip()


def _shown(name: str, *, short: bool) -> str:
    return name.rpartition(".")[2] if short else name


def _outdented(block: str) -> str:
    return re.sub(r"^    ", "", block.strip("\n") + "\n", flags=re.MULTILINE)


class Docstrings(Extension):
    """Called by griffe, which reads the source for mkdocstrings."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)
