"""Lance's SQL dialect, as text: values and names into it, filters out of it.

It is DataFusion's SQL with four differences: text in double quotes is a value, names
are quoted with backticks, a bare column name matches whatever its case when only one
column can be meant, and ``regexp_match`` counts as true where it matches.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import pyarrow as pa

from lancewal.errors import InvalidInputError

_TOKEN = re.compile(
    r"""(?P<text>'(?:[^']|'')*')
      | (?P<double>"(?:[^"]|"")*")
      | (?P<name>`(?:[^`]|``)*`)
      | (?P<space>\s+|--[^\n]*|/\*.*?\*/)
      | (?P<word>[^\W\d]\w*)
      | (?P<other>\d\w*|.)""",
    re.VERBOSE | re.DOTALL,
)
_REGEXP_MATCH = "regexp_match"


def for_datafusion(sql: str, columns: Sequence[str]) -> str:
    """``sql`` in Lance's dialect as DataFusion reads it (without folding the case of names).

    >>> for_datafusion('NAME = "x" AND Lower(City) = `y`', ["name", "city"])
    "name = 'x' AND lower(city) = `y`"
    """
    folded: dict[str, list[str]] = {}
    for column in columns:
        folded.setdefault(column.lower(), []).append(column)
    tokens = [(match.lastgroup or "", match.group()) for match in _TOKEN.finditer(sql)]
    out: list[str] = []
    for place, (kind, token) in enumerate(tokens):
        if kind == "double":
            text = token[1:-1].replace('""', '"')
            out.append(_quoted_text(text))
        elif kind == "word":
            following = tokens[place + 1 :]
            # A field of a struct keeps its case, and so does the letter before a literal as in X'00'.
            is_field = place > 0 and tokens[place - 1][1] == "."
            is_prefix = bool(following) and following[0][0] in ("text", "double")
            out.append(token if is_field or is_prefix else _resolved(token, columns, folded, following))
        else:
            out.append(token)
    return _with_boolean_matches(out)


def literal(value: pa.Scalar) -> str:
    """A value of a key column as Lance's SQL writes it.

    >>> literal(pa.scalar("it's")), literal(pa.scalar(b"\\x01")), literal(pa.scalar(-3))
    ("'it''s'", "X'01'", '-3')
    """
    plain = value.as_py()
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, int):
        return str(plain)
    if isinstance(plain, str):
        return _quoted_text(plain)
    if isinstance(plain, bytes):
        return f"X'{plain.hex()}'"
    raise InvalidInputError(f"{plain!r} ({value.type}) cannot be written as a literal of Lance's SQL")


def column_name(name: str) -> str:
    """A column's name, quoted.

    >>> column_name("my column")
    '`my column`'
    """
    return f"`{name}`"


def among(column: str, values: pa.Array) -> str:
    """The predicate that ``column`` has one of ``values``, which are not null.

    >>> among("id", pa.array([1])), among("id", pa.array([1, 2]))
    ('`id` = 1', '`id` IN (1, 2)')
    """
    if len(values) == 1:
        return f"{column_name(column)} = {literal(values[0])}"
    return f"{column_name(column)} IN ({', '.join(_literals(values))})"


def _literals(values: pa.Array) -> Iterable[str]:
    # Integers are the usual keys, and thousands of them come at a time.
    if pa.types.is_integer(values.type):
        return map(str, values.to_pylist())
    return map(literal, values)


def _quoted_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _resolved(
    word: str, columns: Sequence[str], folded: dict[str, list[str]], following: list[tuple[str, str]]
) -> str:
    """A bare word with the case of the function or column it names; keywords do not mind theirs."""
    if word in columns:
        return word
    after = next((token for kind, token in following if kind != "space"), "")
    if after == "(":
        return word.lower()
    candidates = folded.get(word.lower(), [])
    return candidates[0] if len(candidates) == 1 else word


def _with_boolean_matches(tokens: list[str]) -> str:
    """Every ``regexp_match(…)`` that stands where a boolean does, with ``IS NOT NULL`` after it."""
    out: list[str] = []
    open_calls: list[bool] = []
    for place, token in enumerate(tokens):
        out.append(token)
        if token == "(":
            open_calls.append(_last_word(out[:-1]) == _REGEXP_MATCH)
        elif token == ")" and open_calls and open_calls.pop():
            after = next((t.lower() for t in tokens[place + 1 :] if t.strip()), "")
            if after in ("", "and", "or", ")"):
                out.append(" IS NOT NULL")
    return "".join(out)


def _last_word(tokens: list[str]) -> str:
    return next((token for token in reversed(tokens) if token.strip()), "")
