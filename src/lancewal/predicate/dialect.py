"""Lance's SQL dialect: writes values and names in it, and translates filters to DataFusion's dialect.

It is DataFusion's SQL with four differences: text in double quotes is a value, names
are quoted with backticks, a bare column name matches in any case if that is unambiguous,
and ``regexp_match`` is true if it matches.
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
#: The most terms and parts of a term in one chain. Twice as many fill the stack of a thread.
_MOST_DEPTH = 1250

#: The least 64-bit integer needs another form: Lance reads the digits without the sign, finds them too large
#: for an integer, and takes the literal for a float, which it then refuses to compare with an integer column.
_LEAST_INT64 = -(1 << 63)
_LEAST_INT64_LITERAL = f"({_LEAST_INT64 + 1} - 1)"


def refuse_deep(sql: str, what: str = "filter") -> None:
    """Refuse SQL whose tree may be too deep.

    Lance and DataFusion walk the tree by recursion, and a process ends without an error when its stack is
    full. The terms of a chain of AND and OR lie below each other, and so do the parts of a term.

    >>> refuse_deep("id" + " + 1" * 2000 + " = 1")
    Traceback (most recent call last):
        ...
    lancewal.errors.InvalidInputError: the filter has too many parts in one chain; name values with IN (…)
    """
    if len(sql) <= _MOST_DEPTH:
        return
    terms = parts = longest = 0
    is_range = False
    for match in _TOKEN.finditer(sql):
        if match.lastgroup == "space":
            continue
        word = match.group().upper()
        if word in (",", "AND", "OR"):
            # The AND of a BETWEEN joins no terms.
            terms += word != "," and not is_range
            is_range, parts = False, 0
            continue
        is_range |= word == "BETWEEN"
        parts += 1
        longest = max(longest, parts)
    if terms + longest > _MOST_DEPTH:
        raise InvalidInputError(f"the {what} has too many parts in one chain; name values with IN (…)")


def for_datafusion(sql: str, columns: Sequence[str]) -> str:
    """Translate ``sql`` from Lance's dialect to DataFusion's (which must not fold the case of names).

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
            following = tokens[place + 1] if place + 1 < len(tokens) else ("", "")
            # The fields of a struct keep their case, and so does the letter before a literal, as in X'00'.
            is_field = place > 0 and tokens[place - 1][1] == "."
            is_prefix = following[0] in ("text", "double")
            # By numbers, not in slices: a filter may have a hundred thousand tokens.
            ahead = range(place + 1, len(tokens))
            after = next((tokens[at][1] for at in ahead if tokens[at][0] != "space"), "")
            out.append(token if is_field or is_prefix else _resolved(token, columns, folded, after))
        else:
            out.append(token)
    return _with_boolean_matches(out)


def with_readable_integers(sql: str) -> str:
    """``sql`` with the least 64-bit integer written so that Lance and DataFusion read it as an integer.

    >>> with_readable_integers("a >= -9223372036854775808 AND b = '-9223372036854775808'")
    "a >= (-9223372036854775807 - 1) AND b = '-9223372036854775808'"
    """
    digits = str(-_LEAST_INT64)
    if digits not in sql:
        return sql
    out: list[str] = []
    for match in _TOKEN.finditer(sql):
        token = match.group()
        sign = _last_place(out) if token == digits else None
        if sign is not None and out[sign] == "-" and _is_sign(out[:sign]):
            out[sign:] = [_LEAST_INT64_LITERAL]
        else:
            out.append(token)
    return "".join(out)


def literal(value: pa.Scalar) -> str:
    """A value of a key column as a literal of Lance's SQL.

    >>> literal(pa.scalar("it's")), literal(pa.scalar(b"\\x01")), literal(pa.scalar(-3))
    ("'it''s'", "X'01'", '-3')
    """
    plain = value.as_py()
    if isinstance(plain, bool):
        return "true" if plain else "false"
    if isinstance(plain, int):
        return _LEAST_INT64_LITERAL if plain == _LEAST_INT64 else str(plain)
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
    """A filter for rows whose ``column`` has one of ``values``, which are not null.

    >>> among("id", pa.array([1])), among("id", pa.array([1, 2]))
    ('`id` = 1', '`id` IN (1, 2)')
    """
    if len(values) == 1:
        return f"{column_name(column)} = {literal(values[0])}"
    return f"{column_name(column)} IN ({', '.join(_literals(values))})"


def _literals(values: pa.Array) -> Iterable[str]:
    # A fast path: most keys are integers, and there may be thousands of them.
    if pa.types.is_integer(values.type):
        plain = values.to_pylist()
        if pa.types.is_int64(values.type) and _LEAST_INT64 in plain:
            return [_LEAST_INT64_LITERAL if value == _LEAST_INT64 else str(value) for value in plain]
        return map(str, plain)
    return map(literal, values)


def _quoted_text(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _resolved(word: str, columns: Sequence[str], folded: dict[str, list[str]], after: str) -> str:
    """A bare word in the case of the function or column that it names; keywords stay as they are."""
    if word in columns:
        return word
    if after == "(":
        return word.lower()
    candidates = folded.get(word.lower(), [])
    return candidates[0] if len(candidates) == 1 else word


def _with_boolean_matches(tokens: list[str]) -> str:
    """Add ``IS NOT NULL`` to every ``regexp_match(…)`` that is used as a boolean."""
    out: list[str] = []
    open_calls: list[bool] = []
    for place, token in enumerate(tokens):
        out.append(token)
        if token == "(":
            open_calls.append(_last_word(out, len(out) - 1) == _REGEXP_MATCH)
        elif token == ")" and open_calls and open_calls.pop():
            after = next(
                (tokens[at].lower() for at in range(place + 1, len(tokens)) if tokens[at].strip()), ""
            )
            if after in ("", "and", "or", ")"):
                out.append(" IS NOT NULL")
    return "".join(out)


def _last_word(tokens: list[str], end: int | None = None) -> str:
    place = _last_place(tokens, end)
    return "" if place is None else tokens[place]


def _last_place(tokens: list[str], end: int | None = None) -> int | None:
    """The place of the last token, before ``end``, that is not a space."""
    places = reversed(range(len(tokens) if end is None else end))
    return next((place for place in places if tokens[place].strip()), None)


def _is_sign(before: list[str]) -> bool:
    """Whether a minus after these tokens is the sign of a number, not a subtraction."""
    word = _last_word(before)
    return not word or word in "(,=<>+-*/%" or word.lower() in ("and", "or", "not", "between", "in", "then")
