"""OpenTelemetry spans, if the process has set up a tracer; ``docs/tracing.md`` lists them.

lancewal does not load OpenTelemetry by itself. A process that traces has already imported its API. If that
module is not loaded, or no provider was set, a span is one constant that does nothing.

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
#: The name of the instrumented library, with which a tracer is requested.
_SCOPE = "lancewal"


class NoSpan:
    """The span of a process that does not trace: it does nothing."""

    __slots__ = ()

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def note(self, **attributes: Any) -> None:
        """Do nothing."""


NO_SPAN = NoSpan()


class Span:
    """A span that begins and ends with a ``with`` block, and is the current span in it."""

    __slots__ = ("_arguments", "_current", "_entered", "_tracer")

    def __init__(self, tracer: Any, arguments: dict[str, Any]) -> None:
        self._tracer = tracer
        self._arguments = arguments

    def __enter__(self) -> Span:
        # OpenTelemetry would record the texts of all causes, and the texts of other libraries may contain
        # credentials. So ``_record`` decides what is recorded.
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
        """Add attributes that were not known at the start."""
        self._current.set_attributes(_named(attributes))


def span(
    name: str,
    about: Mapping[str, Any] | None = None,
    *,
    kind: str = "INTERNAL",
    parent: Mapping[str, str] | None = None,
    **attributes: Any,
) -> Span | NoSpan:
    """Make a span for a ``with`` block.

    ``about`` has attributes with full names; the names of ``attributes`` get the prefix ``lancewal.``.
    ``parent`` is the result of :func:`trace_headers` in another process. ``kind`` is the name of an
    OpenTelemetry ``SpanKind``.
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
    """Headers that pass the current span to another process; empty if this process does not trace."""
    if _API not in sys.modules or _tracer()[1] is None:
        return {}
    from opentelemetry.propagate import inject

    headers: dict[str, str] = {}
    inject(headers)
    return headers


def in_this_trace(call: Callable[[], R]) -> Callable[[], R]:
    """Wrap a call for another thread, so that its spans are children of this thread's current span."""
    if _API not in sys.modules or _tracer()[1] is None:
        return call
    return partial(contextvars.copy_context().run, call)


def trace_runner() -> Callable[..., Any]:
    """A function that runs calls in the current trace, from any thread, one at a time."""
    if _API not in sys.modules or _tracer()[1] is None:
        return _plainly
    return contextvars.copy_context().run


def _plainly(call: Callable[..., R], *args: Any) -> R:
    return call(*args)


def _tracer() -> tuple[Any, Any]:
    """The loaded API, and the tracer of the provider that was set; ``None`` if no provider was set."""
    api: Any = sys.modules[_API]
    provider = api.get_tracer_provider()
    # ProxyTracerProvider is the placeholder until a provider is set. The class comes from the loaded module,
    # because this file does not import OpenTelemetry.
    return api, None if type(provider) is api.ProxyTracerProvider else provider.get_tracer(_SCOPE)


def _extracted(headers: Mapping[str, str]) -> Any:
    from opentelemetry.propagate import extract

    return extract(headers)


def _named(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {f"lancewal.{name}": value for name, value in attributes.items()}


def _record(current: Any, error: BaseException) -> None:
    """Record the error's class, and its text only if it is our own: our texts contain no credentials."""
    from opentelemetry.trace import Status, StatusCode

    name = type(error).__name__
    current.set_attribute("error.type", name)
    text = f"{name}: {error}" if isinstance(error, LanceWalError) else name
    current.set_status(Status(StatusCode.ERROR, text))
