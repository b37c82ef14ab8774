"""Filters: one engine for every level of a table and for Spark."""

from lancewal.predicate.conditions import Among, Compare, Condition, Every, IsNull
from lancewal.predicate.dialect import among, column_name, literal
from lancewal.predicate.predicate import Expression, Predicate, selected, sql_of

__all__ = [
    "Among",
    "Compare",
    "Condition",
    "Every",
    "Expression",
    "IsNull",
    "Predicate",
    "among",
    "column_name",
    "literal",
    "selected",
    "sql_of",
]
