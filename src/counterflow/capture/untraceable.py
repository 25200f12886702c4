"""Reasons for which a model's forward cannot be traced, and their places."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import torch


class Unfollowed(Exception):  # noqa: N818 - nothing is wrong with the model
    """A forward that cannot be traced.

    Args:
        path: path of the opened module; empty: the model itself.
        why: what it does, in words that continue "the forward ...".
        line: line of the user's code; empty: unknown.
        opens: path of a module whose own forward has to be traced for this one; empty: there is none.
        needs_values: whether it fails because tensors have no values, also in a module that is not traced.
    """

    def __init__(
        self, path: str, why: str, line: str = "", *, opens: str = "", needs_values: bool = False
    ) -> None:
        super().__init__(f"{path or 'the model'}: {why} ({line})")
        self.path, self.why, self.line, self.opens = path, why, line, opens
        self.needs_values = needs_values


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


_DECIDES = ("DataDependentOutputException", "GuardOnDataDependentSymNode", "DynamicOutputShapeException")


def failed(path: str, error: Exception) -> Unfollowed:
    """Reason that an error in an opened module, or in one that it calls, gives."""
    line = line_of(traceback.extract_tb(error.__traceback__))
    if type(error).__name__ in _DECIDES:
        return Unfollowed(path, "decides by a tensor's values", line, needs_values=True)
    why = f"fails on tensors without values ({_first_line(error)})"
    return Unfollowed(path, why, line, needs_values=True)


_NOT_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def called_by_user(depth: int) -> bool:
    """Tell whether the code some frames above is neither torch's nor a recording's."""
    file = sys._getframe(depth + 1).f_code.co_filename  # noqa: SLF001 - a public function
    return not file.startswith(_NOT_USERS)


def line_of(frames: Sequence[traceback.FrameSummary]) -> str:
    """The last line of the user's code in a traceback, as ``file:12: text``; empty: there is none."""
    for frame in reversed(frames):
        if not frame.filename.startswith((*_NOT_USERS, "<")):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return ""


def _clear_callers(frames: TracebackType | None) -> None:
    """Free the variables of the calls that have ended, and that only a frame of the traceback refers to."""
    caller = None if frames is None else frames.tb_frame.f_back
    with suppress(RuntimeError):  # a call that has not ended, so its callers have not either
        while caller is not None:
            caller.clear()
            caller = caller.f_back


def clear_frames(error: BaseException | None) -> None:
    """Free the variables of all frames that an error and its causes passed, which contain tensors."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        _clear_callers(error.__traceback__)
        error = error.__cause__ or error.__context__
