"""Compact flushed generations into the base table, collect garbage, verify and repair."""
