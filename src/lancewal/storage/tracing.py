"""Spans of OpenTelemetry, where the process has set a tracer up; ``docs/tracing.md`` lists them.

lancewal imports nothing of OpenTelemetry. A process that traces has imported its API itself: where no such
module is loaded, or no provider was set, a span is one constant that does nothing.

>>> with span("lancewal.put", rows=3) as current:
...     current is NO_SPAN
True
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from lancewal.errors import LanceWalError

R = TypeVar("R")

_API = "opentelemetry.trace"
#: The library that the spans are of, as tracers are asked for.
_SCOPE = "lancewal"


class NoSpan:
    """A span where nobody traces."""

    __slots__ = ()

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def note(self, **attributes: Any) -> None:
        """Nothing listens."""


NO_SPAN = NoSpan()


class Span:
    """A span that is begun and ended with a ``with`` block, and is the current one in it."""

    __slots__ = ("_arguments", "_current", "_entered", "_tracer")

    def __init__(self, tracer: Any, arguments: dict[str, Any]) -> None:
        self._tracer = tracer
        self._arguments = arguments

    def __enter__(self) -> Span:
        # Its own record of an exception has the texts of all causes, and those of other libraries may show
        # credentials: what is recorded is said below.
        self._entered = self._tracer.start_as_current_span(
            **self._arguments, record_exception=False, set_status_on_exception=False
        )
        self._current = self._entered.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, GeneratorExit):
            _record(self._current, error)
        self._entered.__exit__(None, None, None)

    def note(self, **attributes: Any) -> None:
        """Add attributes that are known only now."""
        self._current.set_attributes(_named(attributes))


def span(
    name: str,
    about: Mapping[str, Any] | None = None,
    *,
    kind: str = "INTERNAL",
    parent: Mapping[str, str] | None = None,
    **attributes: Any,
) -> Span | NoSpan:
    """A span for a ``with`` block.

    ``about`` has attributes by their whole names; others get ``lancewal.`` before theirs. ``parent`` is what
    :func:`trace_headers` gave in another process. ``kind`` is one of OpenTelemetry's.
    """
    if _API not in sys.modules:
        return NO_SPAN
    api, tracer = _tracer()
    if tracer is None:
        return NO_SPAN
    arguments = {
        "name": name,
        "kind": api.SpanKind[kind],
        "attributes": {**(about or {}), **_named(attributes)},
        "context": _extracted(parent) if parent else None,
    }
    return Span(tracer, arguments)


def trace_headers() -> dict[str, str]:
    """What tells another process of the current span; empty where nobody traces."""
    if _API not in sys.modules or _tracer()[1] is None:
        return {}
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers)
    return headers


def in_this_trace(call: Callable[[], R]) -> Callable[[], R]:
    """A call for another thread, whose spans belong to the current one of this thread."""
    if _API not in sys.modules or _tracer()[1] is None:
        return call
    return partial(contextvars.copy_context().run, call)


def trace_runner() -> Callable[..., Any]:
    """What makes calls, one after the other and from any thread, as part of the trace of this moment."""
    if _API not in sys.modules or _tracer()[1] is None:
        return _plainly
    return contextvars.copy_context().run


def _plainly(call: Callable[..., R], *args: Any) -> R:
    return call(*args)


def _tracer() -> tuple[Any, Any]:
    """The loaded API, and the tracer of the provider that was set; ``None`` where none was."""
    api: Any = sys.modules[_API]
    provider = api.get_tracer_provider()
    # The stand-in until one is set. Not asked for by ``isinstance`` of something imported here: see above.
    return api, None if type(provider) is api.ProxyTracerProvider else provider.get_tracer(_SCOPE)


def _extracted(headers: Mapping[str, str]) -> Any:
    from opentelemetry.propagate import extract

    return extract(headers)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"lancewal.{name}": value for name, value in attributes.items()}


def _record(current: Any, error: BaseException) -> None:
    """The error's class, and what it says where that is ours: our texts show no credentials."""
    from opentelemetry.trace import Status, StatusCode

    name = type(error).__name__
    current.set_attribute("error.type", name)
    text = f"{name}: {error}" if isinstance(error, LanceWalError) else name
    current.set_status(Status(StatusCode.ERROR, text))
