"""Whether the base table has a key more than once."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from lancewal.base import BaseTable
from lancewal.format.keys import key_values
from lancewal.format.siphash import siphash13_spans
from lancewal.format.spans import byte_spans, numbers
from lancewal.lance_errors import lance_errors


def doubled_keys(base: BaseTable) -> tuple[int, int]:
    """How many rows there are, and how many of them share a key with an earlier one.

    Keeps eight bytes a row. Text and composite keys are compared by a 64-bit hash, which takes two
    of them for one about once in ten thousand tables of a billion rows.
    """
    words: list[npt.NDArray[np.uint64]] = []
    with lance_errors("read the keys of the base table"):
        for batch in base.dataset.scanner(columns=list(base.schema.primary_key)).to_batches():
            words.append(_words(key_values(batch.columns)))
    if not words:
        return 0, 0
    every = np.sort(np.concatenate(words))
    return len(every), int(np.count_nonzero(every[1:] == every[:-1]))


def _words(values: pa.Array) -> npt.NDArray[np.uint64]:
    if pa.types.is_integer(values.type) or pa.types.is_boolean(values.type):
        return numbers(values).astype(np.int64 if values.type != pa.uint64() else np.uint64).view(np.uint64)
    return siphash13_spans(byte_spans(values))
