"""How an exception is stored, with the run or the effect that it has ended."""

from __future__ import annotations

import traceback
from typing import Any, Final

from helix_store import conf

_LONGEST_MESSAGE: Final = 2_000
_LONGEST_TRACEBACK: Final = 8_000
_MOST_FRAMES: Final = 30
_LEFT_OUT: Final = "[…]"


def described_error(error: BaseException) -> dict[str, Any]:
    """Return an exception's type and, unless the settings omit them, its shortened message and traceback.

    Of a message, the beginning is kept. The end of a traceback is kept, because it shows where the exception
    was raised.
    """
    described: dict[str, Any] = {"type": type(error).__name__}
    if conf.run_error_details():
        described["message"] = _shortened(_message_of(error), _LONGEST_MESSAGE)
        described["traceback"] = _traceback_of(error)
    return described


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  an exception of somebody else, whose __str__ is broken
        return "<the exception has no readable message>"


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - len(_LEFT_OUT)] + _LEFT_OUT


def _traceback_of(error: BaseException) -> str:
    # Only frames are kept: the message is already stored, and earlier errors could be of any size.
    lines = traceback.format_tb(error.__traceback__, limit=-_MOST_FRAMES)
    text = "".join(lines)
    if len(text) > _LONGEST_TRACEBACK:
        text = _LEFT_OUT + text[len(_LEFT_OUT) - _LONGEST_TRACEBACK :]
    return text
