"""In-memory indexes of one MemTable: primary key, BTree, full text, vector.

Rows are numbered from 0 in insertion order. One thread inserts, any number search, each
up to its own bound: a row at or above it is never returned.
"""

from lancewal.index.bm25 import CorpusStatistics
from lancewal.index.btree import BTreeIndex
from lancewal.index.distance import Nearest
from lancewal.index.full_text import FullTextIndex, TextHits
from lancewal.index.kinds import (
    BTreeParams,
    FullTextParams,
    IndexKind,
    IndexSpec,
    Metric,
    VectorParams,
    memory_estimate,
)
from lancewal.index.primary_key import PrimaryKeyIndex
from lancewal.index.specs import maintained_specs
from lancewal.index.store import IndexInsertError, IndexStore
from lancewal.index.vector import VectorIndex

__all__ = [
    "BTreeIndex",
    "BTreeParams",
    "CorpusStatistics",
    "FullTextIndex",
    "FullTextParams",
    "IndexInsertError",
    "IndexKind",
    "IndexSpec",
    "IndexStore",
    "Metric",
    "Nearest",
    "PrimaryKeyIndex",
    "TextHits",
    "VectorIndex",
    "VectorParams",
    "maintained_specs",
    "memory_estimate",
]
