"""Numbers for people: counts, bytes, durations, and a row of bars."""

from __future__ import annotations

from collections.abc import Sequence

_BARS = "▁▂▃▄▅▆▇█"
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def count(number: int) -> str:
    """
    >>> count(1234567)
    '1,234,567'
    """
    return f"{number:,}"


def plural(number: int, word: str, words: str | None = None) -> str:
    """
    >>> plural(1, "row"), plural(2, "row"), plural(2, "entry", "entries")
    ('1 row', '2 rows', '2 entries')
    """
    return f"{number:,} {word if number == 1 else words or word + 's'}"


def size(number: float) -> str:
    """
    >>> size(0), size(999), size(1234), size(56_700_000), size(1_500_000_000)
    ('0 B', '999 B', '1.2 kB', '57 MB', '1.5 GB')
    """
    value, place = float(number), 0
    while value >= 999.5 and place < len(_UNITS) - 1:
        value, place = value / 1000, place + 1
    shown = f"{value:.1f}" if place and value < 9.95 else f"{value:.0f}"
    return f"{shown} {_UNITS[place]}"


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0.0004, 0.25, 7, 75, 3_700, 200_000)]
    ['0 s', '0.2 s', '7 s', '1 min', '1 h 1 min', '2 d 7 h']
    """
    if seconds < 0.95:
        return "0 s" if seconds < 0.05 else f"{seconds:.1f} s"
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if hours else f"{days} d"


def rate(per_second: float) -> str:
    """
    >>> rate(0), rate(0.4), rate(1234.5)
    ('0/s', '0.4/s', '1,234/s')
    """
    return f"{per_second:.1f}/s" if 0 < per_second < 9.95 else f"{per_second:,.0f}/s"


def sparkline(values: Sequence[float]) -> str:
    """
    >>> sparkline([0, 1, 2, 4])
    '▁▃▅█'
    """
    highest = max(values, default=0)
    if highest <= 0:
        return _BARS[0] * len(values)
    return "".join(_BARS[min(7, round(value / highest * 7))] for value in values)
