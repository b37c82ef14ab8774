"""Durations as people write them."""

from __future__ import annotations

import re
from datetime import timedelta

import typer

_UNITS = {
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "min": timedelta(minutes=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
}
_FORM = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|m|h|d)")


def parse_duration(text: str, option: str) -> timedelta:
    """
    >>> parse_duration("90min", "--min-age")
    datetime.timedelta(seconds=5400)
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise typer.BadParameter(f"{text!r} is no duration such as 90s, 30min, 12h or 7d", param_hint=option)
    return float(match[1]) * _UNITS[match[2]]
