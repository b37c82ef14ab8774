"""KeyboardInterrupt at each bytecode of our code at which the interpreter delivers a signal.

CPython looks for signals when a function begins, after a call, and when a loop turns. An interrupt comes
there and nowhere else: not, for instance, between a lock that ``with`` has taken and the block below it.
"""

from __future__ import annotations

import contextlib
import dis
import itertools
import sys
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import lancewal

_OURS = (str(Path(lancewal.__file__).parent), contextlib.__file__)
_CALLS = ("CALL", "RESUME")
_TURNS = ("JUMP_BACKWARD", "POP_JUMP_BACKWARD", "JUMP_BACKWARD_NO_INTERRUPT")


class InterruptAt:
    """Raises KeyboardInterrupt in this thread at the ``nth`` place; ``seen`` counts them."""

    def __init__(self, nth: int) -> None:
        self._nth = nth
        self.seen = 0
        self.where = ""

    @property
    def raised(self) -> bool:
        return bool(self.where)

    def __enter__(self) -> InterruptAt:
        self._before = sys.gettrace()
        sys.settrace(self._enter_frame)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self._before)

    def _enter_frame(self, frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and not self.where and frame.f_lasti in places(frame.f_code):
            self.seen += 1
            if self.seen == self._nth:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"
                raise KeyboardInterrupt
        return self._step


@cache
def places(code: CodeType) -> frozenset[int]:
    """Offsets of the instructions before which a signal may be handled."""
    steps = list(dis.get_instructions(code))
    found = set()
    for step, following in itertools.pairwise(steps):
        if step.opname.startswith(_TURNS) and "NO_INTERRUPT" not in step.opname:
            offset = step.argval
        elif step.opname.startswith(_CALLS) and not step.opname.startswith("CALL_INTRINSIC"):
            offset = following.offset
        else:
            continue
        # The signal belongs to the call, and is dealt with as an error of the call. Where the next
        # instruction has another handler (a ``return`` out of a ``with``), raising there would differ.
        if _handler(code, step.offset) == _handler(code, offset):
            found.add(offset)
    return frozenset(found)


def _handler(code: CodeType, offset: int) -> int | None:
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        if entry.start <= offset < entry.end:
            return int(entry.target)
    return None
