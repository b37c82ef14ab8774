"""JSON columns: text to users and in scans of Lance, binary where MemTables and WAL entries hold them.

Lance encodes JSON in a way of its own (JSONB), and replays no entry that holds the text. Its
public API converts only what is in a dataset. So it is asked to, with one in memory: every
value is encoded and decoded by Lance itself, and reads the same whether it is in memory, in an SSTable
or in the base table.
"""

from __future__ import annotations

import secrets

import lance
import pyarrow as pa

from lancewal.errors import InvalidInputError
from lancewal.format.schema import stored_field
from lancewal.format.spans import one_array

_TEXT = pa.field("json", pa.json_())
_ENCODED = stored_field(_TEXT)
#: A column that is only named is shown as text.
_AS_STORED = {"json": "json || X''"}


def encode_json(text: pa.Array) -> pa.Array:
    """JSON text (of the JSON type, or plain) in Lance's encoding; refuses what is no JSON.

    >>> decode_json(encode_json(pa.array(['{"b": 1, "a": null}', None]))).to_pylist()
    ['{"a":null,"b":1}', None]
    """
    storage = text.storage if isinstance(text, pa.ExtensionArray) else text
    given = pa.ExtensionArray.from_storage(_TEXT.type, storage.cast(pa.string()))
    if not len(given):
        return pa.array([], _ENCODED.type)
    try:
        return one_array(_dataset(given, _TEXT).scanner(columns=_AS_STORED).to_table().column(0))
    except (OSError, ValueError) as error:
        raise InvalidInputError(f"a JSON column is given text that is no JSON: {error}") from error


def decode_json(encoded: pa.Array) -> pa.Array:
    """JSON in Lance's encoding as text, in Arrow's JSON type."""
    if not len(encoded):
        return pa.array([], _TEXT.type)
    return one_array(_dataset(encoded, _ENCODED).to_table().column(0))


def _dataset(values: pa.Array, field: pa.Field) -> lance.LanceDataset:
    rows = pa.table([values], schema=pa.schema([field]))
    return lance.write_dataset(rows, f"memory://{secrets.token_hex(16)}", mode="create")
