"""Computes what a table costs on object storage, and which limits a load reaches first.

Everything is computed from the measured requests of each operation (``measured``), from prices and from a
load. No request is made.
"""

from __future__ import annotations

from lancewal.cost.bill import Line, Prices, per_day, per_idle_day, per_million
from lancewal.cost.limits import Limit, limits
from lancewal.cost.load import Load
from lancewal.cost.measured import Measured, measured

__all__ = [
    "Limit",
    "Line",
    "Load",
    "Measured",
    "Prices",
    "limits",
    "measured",
    "per_day",
    "per_idle_day",
    "per_million",
]
