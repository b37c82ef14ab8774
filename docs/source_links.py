"""Pages link to modules, which is of use in a checkout only: on the site the link's text is left."""

from __future__ import annotations

import re
from typing import Any

_TO_SOURCE = re.compile(r"\[(`[^`\]]+`)\]\((?:\.\./)+(?:src|tests)/[^)]+\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by MkDocs with every page."""
    return _TO_SOURCE.sub(r"\1", markdown)
