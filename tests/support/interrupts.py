"""Ctrl-C at a chosen place of a call: `points` counts the places where Python would hear it, `press` presses it there.

Python looks for signals when a function begins, when a loop goes back, and after a call of a function in C; nowhere
else. So a trace of the instructions knows every place at which a real Ctrl-C can come in this thread.
"""

import dis
import signal
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any

_ENTERS = {dis.opmap[name] for name in ("RESUME", "JUMP_BACKWARD") if name in dis.opmap}
_CALLS = {
    number
    for name, number in dis.opmap.items()
    if (name.startswith("CALL") and "INTRINSIC" not in name) or name == "PRECALL"
}
_TOOL = 4  # an id of sys.monitoring that coverage, debuggers and profilers do not use
_PLACES = ("/flatroll/", "/buffers/", "/wrappers/")


class Press:
    """Traces a call, and presses Ctrl-C at place number ``at`` (None: only counts the places)."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0
        self.where, self._muted = "", 0
        self._codes: dict[CodeType, bytes] = {}
        self._last: dict[FrameType, int] = {}  # the instruction before, of each frame under way
        self._entered: set[FrameType] = set()  # frames whose last call was one of Python's functions

    def run(self, call: Callable[[], Any]) -> Any:
        """Call; KeyboardInterrupt may come out."""
        if sys.version_info >= (3, 13):
            sys.monitoring.use_tool_id(_TOOL, __name__)
            sys.monitoring.register_callback(_TOOL, sys.monitoring.events.INSTRUCTION, self._instruction)
            sys.monitoring.set_events(_TOOL, sys.monitoring.events.INSTRUCTION)
        sys.settrace(self._enter)
        try:
            return call()
        finally:
            sys.settrace(None)
            if sys.version_info >= (3, 13):
                sys.monitoring.set_events(_TOOL, 0)
                sys.monitoring.register_callback(_TOOL, sys.monitoring.events.INSTRUCTION, None)
                sys.monitoring.free_tool_id(_TOOL)

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        # An object is made, and called, by a function in C.
        if frame.f_back in self._last and frame.f_code.co_name not in ("__init__", "__call__"):
            assert frame.f_back is not None
            self._entered.add(frame.f_back)
        name = frame.f_code.co_filename
        # What stands for other processes hears no Ctrl-C, and what is raised in __del__ Python drops.
        if self._muted or name.endswith("/fake_ray.py") or frame.f_code.co_name == "__del__":
            self._muted += 1
            frame.f_trace_lines = False
            return self._leave
        if not any(place in name for place in _PLACES) or "/tests/" in name or "/site-packages/" in name:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = sys.version_info < (3, 13), False
        self._last[frame] = -1
        return self._step

    def _instruction(self, code: CodeType, offset: int) -> None:
        """From Python 3.13 on: f_trace_opcodes takes effect only when a function begins once more."""
        frame = sys._getframe(1)
        if frame in self._last:
            self._step(frame, "opcode", None)

    def _leave(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._muted -= event == "return"
        return self._leave

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return":
            self._last.pop(frame, None)
            self._entered.discard(frame)
        elif event == "opcode":
            code = self._codes.get(frame.f_code)
            if code is None:
                code = self._codes[frame.f_code] = frame.f_code.co_code
            last, self._last[frame] = self._last.get(frame, -1), code[frame.f_lasti]
            in_python = frame in self._entered
            self._entered.discard(frame)
            if last in _ENTERS or (last in _CALLS and not in_python and code[frame.f_lasti] not in _CALLS):
                self.count += 1
                if self.count == self.at:
                    self.where = f"{frame.f_code.co_filename.split('/flatroll/')[-1]}:{frame.f_lineno}"
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGINT)  # its handler is called before the next line
        return self._step


def points(call: Callable[[], Any]) -> int:
    """Call, and return the number of places."""
    press = Press(None)
    press.run(call)
    return press.count


def press(call: Callable[[], Any], at: int) -> tuple[Any, str | None]:
    """Call with Ctrl-C at place ``at``: what it returns (None if it was interrupted), and where it was; None if not."""
    pressed = Press(at)
    try:
        result = pressed.run(call)
    except KeyboardInterrupt:
        return None, pressed.where
    return result, None
