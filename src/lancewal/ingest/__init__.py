"""Ingests files into a table, each row exactly once."""

from lancewal.ingest.files import Format, SourceFile, directories_of, find_files, watch
from lancewal.ingest.job import Ingestion, IngestReport, LocalParts, PreparedPart, Step
from lancewal.ingest.journal import Part
from lancewal.ingest.reading import open_file

__all__ = [
    "Format",
    "IngestReport",
    "Ingestion",
    "LocalParts",
    "Part",
    "PreparedPart",
    "SourceFile",
    "Step",
    "directories_of",
    "find_files",
    "open_file",
    "watch",
]
