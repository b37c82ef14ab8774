"""Bytes to values and back, without I/O: one module per on-disk format."""
