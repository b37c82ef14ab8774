"""Real documents that every Python carries: its own language reference, paragraph by paragraph."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
import numpy.typing as npt
import pyarrow as pa

DIMENSION = 64
PARTS = 4

SCHEMA = pa.schema(
    [
        pa.field("id", pa.int64(), nullable=False, metadata={"lance-schema:unenforced-primary-key": "true"}),
        pa.field("topic", pa.string()),
        pa.field("text", pa.string()),
        pa.field("vector", pa.list_(pa.float32(), DIMENSION)),
    ]
)

_WORD = re.compile(r"[a-z]{3,}")


@dataclass(frozen=True)
class Corpus:
    """All paragraphs as one table; ids count from 0 in reading order."""

    table: pa.Table

    @classmethod
    def load(cls) -> Corpus:
        names, texts = [], []
        for name, body in sorted(topics.items()):
            for paragraph in body.split("\n\n"):
                text = " ".join(paragraph.split())
                if len(text) >= 40:
                    names.append(name)
                    texts.append(text)
        return cls(documents(range(len(texts)), names, texts))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def slice(self, start: int, count: int) -> pa.Table:
        return self.table.slice(start, count)


def documents(ids: range, names: list[str], texts: list[str]) -> pa.Table:
    """Rows of the demo table."""
    vectors = np.stack([embed(text) for text in texts]) if texts else np.empty((0, DIMENSION), np.float32)
    column = pa.FixedSizeListArray.from_arrays(pa.array(vectors.ravel()), DIMENSION)
    return pa.table([pa.array(ids, pa.int64()), pa.array(names), pa.array(texts), column], schema=SCHEMA)


def embed(text: str) -> npt.NDArray[np.float32]:
    """A unit vector of hashed words: crude, but texts with the same words are close."""
    vector = np.zeros(DIMENSION, np.float32)
    for word in _WORD.findall(text.lower()):
        code = zlib.crc32(word.encode())
        vector[code % DIMENSION] += 1.0 if code & 0x8000_0000 else -1.0
    norm = float(np.linalg.norm(vector))
    return vector / norm if norm else vector
