"""A call that is repeated after failures that may pass."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

logger = logging.getLogger(__name__)


def retried(
    call: Callable[[], T],
    failure: type[Exception],
    *,
    attempts: int,
    first_pause: float,
    longest_pause: float = 10.0,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """What ``call`` returns; it is called again after a ``failure``, the last of which is raised.

    Each pause is about twice as long as the one before, and of random length: callers that
    got into each other's way must not meet again.

    >>> answers = iter([1, 0])
    >>> retried(lambda: 1 / (1 - next(answers)), ZeroDivisionError, attempts=2, first_pause=0)
    1.0
    """
    for attempt in range(1, attempts):
        try:
            return call()
        except failure as error:
            logger.debug("attempt %d of %d: %s", attempt, attempts, error)
        sleep(min(first_pause * 2 ** (attempt - 1), longest_pause) * random.uniform(0.5, 1.0))
    return call()
