"""How a command ends: one sentence on standard error, and an exit code that scripts can branch on."""

from __future__ import annotations

import functools
import os
import re
import signal
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn, ParamSpec, TypeVar

import typer

from lancewal.cli import console
from lancewal.errors import (
    ConflictError,
    FencedError,
    InvalidInputError,
    LanceWalError,
    NotInitializedError,
    PartialWriteError,
    SealedShardError,
    ShardOwnedError,
    SplitShardError,
    TableNotFoundError,
)

P = ParamSpec("P")
R = TypeVar("R")

#: Seconds between two checks for a signal.
_LOOK_SECONDS = 0.2

FAILED = 1
#: Wrong usage, or input that was refused before anything was written.
REFUSED = 2
#: ``verify`` or ``doctor`` found problems.
PROBLEMS = 3
#: There is no table, no write path, or no row with that key.
NOT_FOUND = 4
#: Another process writes to the same shards; the command may be repeated.
TAKEN_OVER = 5
INTERRUPTED = 130
BROKEN_PIPE = 141
TERMINATED = 143

#: The source position that Lance adds to an error; it does not help a user.
_LANCE_PLACE = re.compile(r",? ?\S*/rust/\S+\.rs:\d+:\d+")
_LANCE_NAME = re.compile(r"LanceError\((\w+)\): |Generic \w+ error: | \(os error \d+\)")
#: A file of the write path, whose name does not help a user; ``--debug`` shows it.
_INNER_FILE = re.compile(r"'([^']*?)/_mem_wal/[^']*'")
#: Advice by the text of the message.
_ADVICE = (
    (re.compile(r"ENOSPC|No space left on device"), "free some space"),
    (
        re.compile(r"instance metadata|169\.254\.169\.254|AWS credentials"),
        "set credentials in the environment (AWS_ACCESS_KEY_ID and so on)",
    ),
    (re.compile(r"EACCES|EPERM|EROFS|[Pp]ermission denied"), "see that you may write there"),
)


class CommandError(Exception):
    """Ends the command with a sentence and an exit code."""

    def __init__(self, text: str, code: int = FAILED) -> None:
        super().__init__(text)
        self.code = code


class Terminated(KeyboardInterrupt):
    """SIGTERM, which container runtimes send before they kill; handled like Ctrl-C."""


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turn a command's errors into a sentence and an exit code; ``--debug`` shows the traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            with _termination_as_interrupt():
                return command(*args, **kwargs)
        except (typer.Exit, typer.BadParameter, typer.Abort):
            raise
        except BrokenPipeError:
            # The reader of our output, such as `head`, has closed the pipe. Redirect the stream, or the
            # interpreter would raise another error when it flushes it at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(BROKEN_PIPE) from None
        except KeyboardInterrupt as error:
            _end(error, str(error) or "interrupted", _interrupt_code(error), label="stopped")
        except CommandError as error:
            _end(error, str(error), error.code)
        except LanceWalError as error:
            _end(error, advised(plain_sentence(error)), exit_code(error))
        except OSError as error:
            _end(error, advised(_os_sentence(error)), FAILED)
        except Exception as error:
            text = f"{type(error).__name__}: {plain_sentence(error)} (this is a bug; --debug shows where)"
            _end(error, text, FAILED)

    return run


@contextmanager
def resumable(state: str) -> Iterator[None]:
    """Work that may be interrupted anywhere; ``state`` describes the table after an interruption."""
    try:
        yield
    except KeyboardInterrupt as error:
        text = f"interrupted; {state}, run the same command again to go on"
        raise KeyboardInterrupt(text) from error


def exit_code(error: BaseException) -> int:
    """The code for an error of the library."""
    if isinstance(error, NotInitializedError | TableNotFoundError):
        return NOT_FOUND
    if isinstance(error, InvalidInputError | SealedShardError | SplitShardError):
        return REFUSED
    if isinstance(error, FencedError | ConflictError | ShardOwnedError):
        return TAKEN_OVER
    if isinstance(error, PartialWriteError):
        codes = {exit_code(each) for each in error.failed.values()}
        return codes.pop() if len(codes) == 1 else FAILED
    return FAILED


def plain_sentence(error: BaseException) -> str:
    """The error's text on one line, without the source positions that Lance adds."""
    if isinstance(error, PartialWriteError):
        return _partial_sentence(error)
    text = _LANCE_NAME.sub("", _LANCE_PLACE.sub("", str(error)))
    text = _INNER_FILE.sub(r"a file in \1/_mem_wal", text)
    return " ".join(text.split()) or type(error).__name__


def advised(text: str, again: str = "") -> str:
    """``text`` with advice for a storage failure, and with ``again``, what to do afterwards.

    >>> advised("cannot create the table: the disk is full (ENOSPC)")
    'cannot create the table: the disk is full (ENOSPC); free some space, then run the command again'
    """
    help_first = next((f"{words}, then " for sign, words in _ADVICE if sign.search(text)), "")
    again = again or ("run the command again" if help_first else "")
    return f"{text}; {help_first}{again}" if again else text


def _partial_sentence(error: PartialWriteError) -> str:
    """A sentence with each reason once, without shard ids, which do not help on a terminal."""
    reasons = dict.fromkeys(plain_sentence(each) for each in error.failed.values())
    text = f"{error.doing} failed in {len(error.failed)} of the table's shards: {'; '.join(reasons)}"
    rows = sum(error.written.values())
    return f"{text} ({rows} rows of other shards are written)" if rows else text


def _os_sentence(error: OSError) -> str:
    if error.strerror and error.filename:
        return f"{error.strerror}: {error.filename}"
    return plain_sentence(error)


def _interrupt_code(error: KeyboardInterrupt) -> int:
    cause = error.__cause__ if isinstance(error.__cause__, KeyboardInterrupt) else error
    return TERMINATED if isinstance(cause, Terminated) else INTERRUPTED


def _end(error: BaseException, text: str, code: int, label: str = "error") -> NoReturn:
    console.error(text, label)
    if console.settings.debug:
        console.traceback(error)
    raise typer.Exit(code) from error


def wait_until_stopped() -> None:
    """Wait until SIGTERM or Ctrl-C, which end a command that runs until it is stopped."""
    with suppress(KeyboardInterrupt):
        while True:
            # Not one endless sleep: the system may deliver the signal to any thread. Python handles it only
            # in the main thread, and nothing would wake that.
            time.sleep(_LOOK_SECONDS)


@contextmanager
def _termination_as_interrupt() -> Iterator[None]:
    """Make SIGTERM raise :class:`Terminated` in the main thread; other threads cannot set handlers."""

    def terminate(number: int, frame: types.FrameType | None) -> None:
        raise Terminated

    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if is_main else None
    try:
        yield
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)
