"""Verification of a table's write path, one module for each level."""

from lancewal.maintenance.verify.findings import REPAIRABLE, Finding, Kind, Severity, VerifyReport
from lancewal.maintenance.verify.run import verify

__all__ = ["REPAIRABLE", "Finding", "Kind", "Severity", "VerifyReport", "verify"]
