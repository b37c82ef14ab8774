"""Indexes of rows in memory: ordered, full text, vectors."""

from lancewal.index.bm25 import CorpusStatistics
from lancewal.index.btree import BTreeIndex, Matches
from lancewal.index.distance import Nearest, Vector, checked_query
from lancewal.index.full_text import OPERATORS, FullTextIndex, TextHits, index_of, is_text
from lancewal.index.kinds import (
    BTreeParams,
    FullTextParams,
    IndexKind,
    IndexSpec,
    Metric,
    VectorParams,
)
from lancewal.index.primary_key import PrimaryKeyIndex
from lancewal.index.specs import full_text_params, maintained_specs
from lancewal.index.store import IndexInsertError, IndexStore
from lancewal.index.tokens import QueryTerm, Tokenizer
from lancewal.index.vector import VectorIndex, is_vector, search_rows

__all__ = [
    "OPERATORS",
    "BTreeIndex",
    "BTreeParams",
    "CorpusStatistics",
    "FullTextIndex",
    "FullTextParams",
    "IndexInsertError",
    "IndexKind",
    "IndexSpec",
    "IndexStore",
    "Matches",
    "Metric",
    "Nearest",
    "PrimaryKeyIndex",
    "QueryTerm",
    "TextHits",
    "Tokenizer",
    "Vector",
    "VectorIndex",
    "VectorParams",
    "checked_query",
    "full_text_params",
    "index_of",
    "is_text",
    "is_vector",
    "maintained_specs",
    "search_rows",
]
