"""Files into a table, each row exactly once: what ``lancewal ingest`` does."""

from __future__ import annotations

from lancewal.ingest.files import Format, SourceFile, find_files
from lancewal.ingest.job import Ingestion, IngestReport
from lancewal.ingest.parts import LocalParts, Parts, PreparedPart, Step
from lancewal.ingest.reading import open_file
from lancewal.ingest.watching import watch

__all__ = [
    "Format",
    "IngestReport",
    "Ingestion",
    "LocalParts",
    "Parts",
    "PreparedPart",
    "SourceFile",
    "Step",
    "find_files",
    "open_file",
    "watch",
]
