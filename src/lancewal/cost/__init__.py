"""What a table costs on object storage, and which limits a load meets first.

Everything is computed from the requests of each operation as they were counted
(``measured``), from prices and from a load; nothing is asked of any storage.
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
