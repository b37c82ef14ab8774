"""Keeps credentials out of error texts, logs and reprs.

Other libraries quote their input: a URL with its password, a signed query, a header. This module
remembers the secrets of storage options, and removes them from every text of those libraries that
we show.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable
from typing import TypeVar
from urllib.parse import quote, unquote, urlsplit

E = TypeVar("E", bound=BaseException)

_HIDDEN = "***"
# A shorter secret would also match ordinary words.
_SHORTEST = 4
#: Bounds the memory of a process whose credentials are renewed every hour.
_MOST = 4_096

# An error may quote a signed URL.
_SIGNED = re.compile(r"(?i)\b(sig|[a-z_-]*(?:signature|credential|token|password|secret))=[^&\s\"'<>)]+")
# In Azure's URLs the container is in the place of a user: abfss://container@account.
_URL_USER = re.compile(r"(?i)(?<!abfss)(://)[^/\s?#\"'<>]*@")

#: Not a cache: a forgotten secret would be shown. The newest is last.
_known: dict[str, None] = {}
_lock = threading.Lock()


def remember_secrets(values: Iterable[str]) -> None:
    """Make every later :func:`scrubbed` remove ``values``, also in their URL-encoded forms."""
    spelled = {each for value in values for each in (value, quote(value), quote(value, ""), unquote(value))}
    with _lock:
        for secret in spelled:
            if len(secret) >= _SHORTEST:
                _known.pop(secret, None)
                _known[secret] = None
        while len(_known) > _MOST:
            del _known[next(iter(_known))]


def remember_password(url: str) -> None:
    """Like :func:`remember_secrets`, for the password in a URL, if there is one."""
    try:
        password = urlsplit(url).password if "@" in url else None
    except ValueError:
        return
    if password:
        remember_secrets([password])


def scrubbed(text: str) -> str:
    """``text`` without credentials.

    >>> scrubbed("GET http://me:mine@host/?sig=a%2Bb&n=1 failed; not abfss://box@account/t")
    'GET http://***@host/?sig=***&n=1 failed; not abfss://box@account/t'
    """
    with _lock:
        known = sorted(_known, key=len, reverse=True)
    for secret in known:
        text = text.replace(secret, _HIDDEN)
    return _URL_USER.sub(rf"\1{_HIDDEN}@", _SIGNED.sub(rf"\1={_HIDDEN}", text))


def scrub_error(error: E) -> E:
    """``error`` itself, with credentials removed from its text and from its causes."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.args = tuple(scrubbed(part) if isinstance(part, str) else part for part in each.args)
        if isinstance(each, OSError):
            for name in ("strerror", "filename", "filename2"):
                part = getattr(each, name)
                if isinstance(part, str):
                    setattr(each, name, scrubbed(part))
        if notes := getattr(each, "__notes__", None):
            notes[:] = map(scrubbed, notes)
        left += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            left += each.exceptions
    return error


def is_panic(error: BaseException) -> bool:
    """Whether native code panicked: a ``BaseException`` whose class cannot be imported."""
    return type(error).__name__ == "PanicException"
