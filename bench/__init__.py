"""Measurements of lancewal against its peers: ``python -m bench --list``.

Ours and the peer run in the same process and in turn, so that a noisy machine is
noisy for both: read the ratios, not the absolute figures.
"""
