"""A table that looks after itself, and what its users can do by hand."""

from lancewal.upkeep.maintained import MaintainedTable

__all__ = ["MaintainedTable"]
