"""Ctrl-C at a chosen point: a KeyboardInterrupt raised inside the library, at each place where a signal can come.

The interpreter looks for signals when a call returns, when a function begins and when a loop turns, and calls
that wait raise by themselves. An exception raised between any other two instructions would be one that never
happens: there is no guarding against it, and no need to.
"""

import dis
import gc
import linecache
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import loglib

LIBRARY = str(Path(loglib.__file__).parent)
TOOL = 4  # of the monitoring tools, one that no profiler, debugger or coverage uses


@cache
def _points(code: CodeType) -> tuple[dict[int, str], dict[int, object]]:
    """By offset: the instruction, and the handler that guards it; without those that leave a `with` block."""
    instructions = list(dis.get_instructions(code))
    names = {each.offset: each.opname for each in instructions}
    handlers: dict[int, object] = {}
    for entry in dis._parse_exception_table(code):  # type: ignore[attr-defined]
        for offset in range(entry.start, entry.end, 2):
            handlers[offset] = entry.target
    for index, _ in enumerate(instructions):
        nones = instructions[index : index + 3]
        if [(each.opname, each.argval) for each in nones] == [("LOAD_CONST", None)] * 3:
            while instructions[index - 1].opname in ("SWAP", "NOP", "COPY"):
                index -= 1
            while not instructions[index].opname.startswith("CALL"):
                names[instructions[index].offset] = "leaving"
                index += 1
            names[instructions[index].offset] = "leaving"
    return names, handlers


def _calls(name: str) -> bool:
    """Whether the instruction calls something: the interpreter then looks for signals."""
    return name.startswith("CALL") and not name.startswith("CALL_INTRINSIC")


@cache
def _returns_at_once(filename: str, line: int) -> bool:
    """Whether the calls in this line neither wait nor look for signals before they have done their work."""
    return any(each in linecache.getline(filename, line) for each in (".close(", ".clear("))


Look = Callable[[FrameType, int], None]


@contextmanager
def _traced(look: Look) -> Iterator[None]:
    """Call `look` before each instruction of the library in this thread, with its frame and its offset there."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(LIBRARY):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            look(frame, frame.f_lasti)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextmanager
def _monitored(look: Look) -> Iterator[None]:
    """The same from Python 3.12 on, where a trace function that asks for opcodes does not get those of its frame."""
    monitoring = sys.monitoring  # type: ignore[attr-defined]
    thread = threading.get_ident()

    def instruction(code: CodeType, offset: int) -> Any:
        if not code.co_filename.startswith(LIBRARY):
            return monitoring.DISABLE
        if threading.get_ident() == thread:
            look(sys._getframe(1), offset)
        return None

    monitoring.use_tool_id(TOOL, "interrupts")
    monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, instruction)
    monitoring.set_events(TOOL, monitoring.events.INSTRUCTION)
    try:
        yield
    finally:
        monitoring.set_events(TOOL, 0)
        monitoring.register_callback(TOOL, monitoring.events.INSTRUCTION, None)
        monitoring.free_tool_id(TOOL)


_watched = _monitored if hasattr(sys, "monitoring") else _traced


class Interrupter:
    """Runs an action and raises at the `at`-th point (from 1) at which a signal could be noticed.

    Or, given the places that are done, at the first one that is not.
    """

    def __init__(
        self, at: int, *, lines_only: bool, error: type[BaseException] = KeyboardInterrupt,
        done: set[str] | None = None,
    ) -> None:  # fmt: skip
        self._at = at
        self._lines_only = lines_only
        self.error = error
        self._done = done
        self.seen = 0
        self.where = ""
        self._last: dict[FrameType, int] = {}
        self._line: dict[FrameType, int] = {}

    def run(self, action: Callable[[], Any]) -> Any:
        gc.disable()  # it would bring in other code, at other points each time
        try:
            with _watched(self._look):
                return action()
        finally:
            gc.enable()
            self._last.clear()
            self._line.clear()

    def _look(self, frame: FrameType, here: int) -> None:
        names, handlers = _points(frame.f_code)
        before = self._last.get(frame, -1)
        self._last[frame] = here
        name, previous = names.get(here, ""), names.get(before, "RESUME")
        waits = _calls(name) and not _returns_at_once(frame.f_code.co_filename, frame.f_lineno)
        returned = _calls(previous) or previous.startswith(("RESUME", "JUMP_BACKWARD"))
        same_guard = handlers.get(here) == handlers.get(before)
        if name == "leaving" or not (waits or (returned and same_guard)):
            return
        if self._lines_only and self._line.get(frame) == frame.f_lineno:
            return
        self._line[frame] = frame.f_lineno
        self.seen += 1
        where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {name} in {frame.f_code.co_name}"
        if self._is_new(where) if self._done is not None else self.seen == self._at:
            self.where = where
            raise self.error

    def _is_new(self, where: str) -> bool:
        assert self._done is not None
        if self.where or where in self._done:
            return False
        self._done.add(where)
        return True


def every_line(action: Callable[[Interrupter], bool]) -> Iterator[str]:
    """As `every_point`, but only when a place is reached for the first time."""
    done: set[str] = set()
    while True:
        interrupter = Interrupter(0, lines_only=True, done=done)
        if not action(interrupter):
            return
        yield interrupter.where


def every_point(
    action: Callable[[Interrupter], bool], *, lines_only: bool, error: type[BaseException] = KeyboardInterrupt
) -> Iterator[str]:
    """Call the action with interrupters for one point after another, until one is not reached; yields the places."""
    at = 0
    while True:
        at += 1
        interrupter = Interrupter(at, lines_only=lines_only, error=error)
        if not action(interrupter):
            return
        yield interrupter.where
