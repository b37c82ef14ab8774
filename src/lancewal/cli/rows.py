"""Rows for people and for scripts."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from lancewal.cli.console import visible

if TYPE_CHECKING:
    import pyarrow as pa

_MAX_CELL = 60
_MIN_TEXT = 12
_SHOWN_ELEMENTS = 3


def json_rows(batch: pa.RecordBatch | pa.Table) -> Iterator[dict[str, Any]]:
    """Each row as what JSON can hold: bytes as base64, times as ISO 8601, NaN as null."""
    for row in batch.to_pylist():
        yield {name: json_value(value) for name, value in row.items()}


def json_value(value: Any) -> Any:
    """
    >>> json_value({"a": b"x", "b": [1.5, float("nan")]})
    {'a': 'eA==', 'b': [1.5, None]}
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        return {str(key): json_value(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(each) for each in value]
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def table_of(rows: pa.Table) -> Table:
    """Rows as a table on the terminal; long values are cut, numbers never."""
    import pyarrow as pa

    shown = Table(box=None, pad_edge=False, header_style="bold")
    columns = [[cell(value) for value in column.to_pylist()] for column in rows.columns]
    for field, cells in zip(rows.schema, columns, strict=True):
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
        widest = max((text.cell_len for text in cells), default=0)
        shown.add_column(
            Text(visible(field.name)),
            justify="right" if number else "left",
            overflow="ellipsis",
            no_wrap=True,
            min_width=max(widest, len(field.name)) if number else min(widest, _MIN_TEXT),
        )
    for row in zip(*columns, strict=True):
        shown.add_row(*row)
    return shown


def cell(value: Any) -> Text:
    if value is None:
        return Text("null", style="dim")
    return Text(_cut(visible(_short(value))))


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return _list(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_short(each)}" for key, each in value.items()) + "}"
    return " ".join(str(value).split())


def _list(values: Sequence[Any]) -> str:
    parts = [
        f"{value:.3g}" if isinstance(value, float) else _short(value) for value in values[:_SHOWN_ELEMENTS]
    ]
    first = ", ".join(parts)
    return f"[{first}, … {len(values)}]" if len(values) > _SHOWN_ELEMENTS else f"[{first}]"


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"
