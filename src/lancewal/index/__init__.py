"""Indexes of rows in memory: BTree, full text, vector."""

from lancewal.index.btree import BTreeIndex, Matches
from lancewal.index.distance import Vector, checked_query
from lancewal.index.full_text import OPERATORS, CorpusStatistics, FullTextIndex, index_of, is_text
from lancewal.index.kinds import (
    FullTextParams,
    IndexSpec,
    Metric,
    VectorParams,
)
from lancewal.index.specs import full_text_params, maintained_specs
from lancewal.index.store import IndexStore
from lancewal.index.tokens import QueryTerm, Tokenizer
from lancewal.index.vector import is_vector, search_rows

__all__ = [
    "OPERATORS",
    "BTreeIndex",
    "CorpusStatistics",
    "FullTextIndex",
    "FullTextParams",
    "IndexSpec",
    "IndexStore",
    "Matches",
    "Metric",
    "QueryTerm",
    "Tokenizer",
    "Vector",
    "VectorParams",
    "checked_query",
    "full_text_params",
    "index_of",
    "is_text",
    "is_vector",
    "maintained_specs",
    "search_rows",
]
