"""The effect of a handle: the intent in one commit, a call of the world, and the result in another commit.

The exception that ends a run or an effect is stored in the same form.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Any, Final, Literal, Self

from helix_store import conf
from helix_store.core import validation
from helix_store.core.effects import Effect, EffectState, Reconcile, effect_key
from helix_store.core.payloads import decode_optional, encode
from helix_store.engine.async_twins import BothContexts, async_twin, in_thread_to_the_end
from helix_store.engine.uncommitted import UncommittedWrite
from helix_store.exceptions import (
    ConflictError,
    EffectUnknown,
    FencedOutError,
    InvalidPayload,
    shown_id,
)
from helix_store.sessions.effects import End, Entered, Intent, Outcome, StoredEffect, encoded_result
from helix_store.stores.session import NotCopied, SessionHandleBase

_logger = logging.getLogger(__name__)
_NOT_BEGUN: Final = datetime.min.replace(tzinfo=UTC)


class OpenEffect(NotCopied, BothContexts, Effect):
    """An effect that this worker attempts, from `__enter__` to `__exit__`.

    Entering stores the intent in a transaction of its own. In the block, call the service unless the effect
    `is_done`, and pass `key` to it. Then call `done` or `not_done`. If the block raises before that, nobody
    knows whether the effect happened: it becomes unknown, and the exception propagates.

    Example::

        sent: dict[str, str] = {}  # the mails that your service lists, by idempotency key

        def ask(effect: OpenEffect) -> None:
            if effect.key in sent:
                effect.done(sent[effect.key])
            else:
                effect.not_done("the service does not list it")

        mail = session.effect("call-1", tool_name="mail", input={"to": "ada"}, reconcile=ask)
    """

    def __init__(
        self,
        session: SessionHandleBase,
        effect_id: str,
        *,
        tool_name: str = "",
        input: Any = None,
        approval: bool = False,
        retry: bool = False,
        reconcile: Reconcile | None = None,
    ) -> None:
        self._session = session
        self._stores = session._stores
        self._fencing_token = session.fencing_token
        self._intends = _checked(
            effect_id, tool_name, input, approval, session._stores.limits.max_message_bytes
        )
        self._may_retry = _flag(retry, "retry")
        if reconcile is not None and not callable(reconcile):
            raise InvalidPayload(path="reconcile", reason="expected a function")
        self._reconciles = reconcile
        self._mutex = threading.RLock()
        self._is_used = self._is_open = self._is_reconciling = self._attempts = False
        self._stored: StoredEffect | None = None
        self._ended: Literal["done", "not_done"] | None = None
        self._uncommitted: UncommittedWrite | None = None
        self.session_id, self.id = session.id, effect_id
        self.key = effect_key(getattr(session._stores, "tenant", ""), session.id, effect_id)
        self.sequence = self.attempt = 0
        self.tool_name, self.input = tool_name, input
        self.error: dict[str, Any] | None = None
        self.actors: list[str] = []
        self.run_id: str | None = None
        self.step_count: int | None = None
        self.started_at = _NOT_BEGUN
        self.ended_at: datetime | None = None

    @property
    def state(self) -> EffectState:  # type: ignore[override]  # read-only here
        """The stored state. The end counts as not stored if its transaction was rolled back."""
        with self._mutex:
            if self._uncommitted is not None and self._uncommitted.is_lost:
                self._ended = self._uncommitted = None
            if self._ended is not None:
                return self._ended
            return "started" if self._stored is None else self._stored.state_as_read

    @property
    def result(self) -> Any:
        """The stored result; ``None`` unless the effect is done."""
        stored = self._stored
        return decode_optional(stored.result) if self.is_done and stored is not None else None

    # Entering

    def __enter__(self) -> Self:
        with self._entering():
            entered = self._entered(may_retry=self._may_retry and self._reconciles is None)
            if entered.outcome is Outcome.OPEN and self._reconciles is not None:
                if inspect.iscoroutinefunction(self._reconciles):
                    reason = "it is a coroutine function; enter the effect with `async with`"
                    raise InvalidPayload(path="reconcile", reason=reason)
                with self._reconciling():
                    self._reconciles(self)
                entered = self._reconciled(entered)
            self._open(entered)
        return self

    async def __aenter__(self) -> Self:
        with self._entering():
            first = partial(self._entered, may_retry=self._may_retry and self._reconciles is None)
            entered = await self._in_thread(first)
            if entered.outcome is Outcome.OPEN and self._reconciles is not None:
                with self._reconciling():
                    if inspect.iscoroutinefunction(self._reconciles):
                        await self._reconciles(self)
                    else:
                        asked = await in_thread_to_the_end(partial(self._reconciles, self))
                        if inspect.isawaitable(asked):
                            await asked
                entered = await self._in_thread(partial(self._reconciled, entered))
            await in_thread_to_the_end(partial(self._open, entered))
        return self

    async def _in_thread(self, enter: Callable[[], Entered]) -> Entered:
        try:
            return await in_thread_to_the_end(enter)
        except asyncio.CancelledError:
            # The block never runs, so this attempt has not happened. With `retry`, an earlier one may have.
            if self._stored is not None and self._stored.state == "started" and self._attempts:
                is_repeat = self._may_retry and self._stored.attempt > 1
                state: Literal["unknown", "not_done"] = "unknown" if is_repeat else "not_done"
                await in_thread_to_the_end(partial(self._store_end, state))
            raise

    @contextmanager
    def _entering(self) -> Iterator[None]:
        if self._is_used:
            raise ConflictError("An effect is entered once; begin another one with effect().")
        self._is_used = True
        try:
            yield
        except BaseException:
            self._end()
            raise

    def _entered(self, *, may_retry: bool) -> Entered:
        """Store the intent. Raises the errors of `Turn.effect`, but not `EffectUnknown`."""
        if self._stores.in_callers_transaction:
            raise ConflictError(
                "An effect cannot begin in a transaction: its intent would not be durable before the call. "
                "Leave the atomic() block first."
            )
        self._begin()
        intent = replace(self._intends, may_retry=may_retry, run_id=self.run_id, step_count=self.step_count)
        entered = self._stores.enter_effect(self.session_id, intent, self._fencing_token)
        self._take(entered)
        return entered

    @contextmanager
    def _reconciling(self) -> Iterator[None]:
        self._is_reconciling = True
        try:
            yield
        finally:
            self._is_reconciling = False

    def _reconciled(self, entered: Entered) -> Entered:
        """Return what to do after ``reconcile``, which may have left the effect open."""
        state = self.state
        if state == "done":
            return entered._replace(outcome=Outcome.DONE)
        if state == "not_done" or self._may_retry:
            self._ended = None
            self._end()
            return self._entered(may_retry=self._may_retry)
        return entered

    def _take(self, entered: Entered) -> None:
        stored = self._stored = entered.effect
        self._attempts = entered.outcome is Outcome.BEGUN
        if entered.outcome is Outcome.DONE:
            self._ended = "done"
        value = stored.value("")
        for name in _SHOWN:
            setattr(self, name, getattr(value, name))

    def _open(self, entered: Entered) -> None:
        if entered.outcome is Outcome.OPEN:
            unknown = EffectUnknown(self.id, self.tool_name, self.started_at)
            unknown._of = self._stores, self.session_id
            self._stop(unknown)
            raise unknown
        self._is_open = True

    # In the block

    def done(self, result: Any = None) -> None:
        """Store that the effect has happened, with its result, a JSON value.

        In a transaction of the caller, the result commits or is rolled back with it; otherwise it commits at
        once. Raises `ConflictError` if the effect is done, or if it was settled or repeated meanwhile.
        """
        text = encoded_result(result, self._stores.limits.max_message_bytes)
        with self._undecided("done"):
            self._store_end("done", result=text)

    def not_done(self, reason: str = "") -> None:
        """Store that the effect has certainly not happened, so that the next entry attempts it again."""
        checked = validation.reason(reason)
        error = encode({"reason": checked}) if checked else None
        with self._undecided("not_done"):
            self._store_end("not_done", error=error)

    adone = async_twin(done)
    anot_done = async_twin(not_done)

    @contextmanager
    def _undecided(self, call: str) -> Iterator[None]:
        with self._mutex:
            if not (self._is_open or self._is_reconciling):
                raise ConflictError(
                    f"The effect {shown_id(self.id)} is not open; call {call}() inside of its `with` block."
                )
            if self.state in ("done", "not_done"):
                raise ConflictError(f"The effect {shown_id(self.id)} is decided already: {self.state}.")
            yield

    def _store_end(
        self,
        state: Literal["done", "not_done", "unknown"],
        *,
        result: str | None = None,
        error: str | None = None,
    ) -> None:
        stored = self._stored
        if stored is None:
            return
        end = End(of=stored, state=state, result=result, error=error)
        self._stores.end_effect(self.session_id, end, self._fencing_token)
        if state != "unknown":
            self._uncommitted = self._stores.uncommitted_write()
            self._stored = stored._replace(result=result)
            self._ended = state

    # Leaving

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        with self._mutex:
            if not self._is_open:
                return False
            self._is_open = False
        try:
            if self.state in ("done", "not_done"):
                return False
            described = None if error is None else encode(described_error(error))
            try:
                self._store_end("unknown", error=described)
            except Exception as exc:  # noqa: BLE001  the error of the block is the one to raise
                # The intent stays, which reads as unknown once this worker has lost the lock.
                quiet = isinstance(exc, FencedOutError | ConflictError)
                log = _logger.info if quiet else _logger.warning
                log("The effect %r was not marked as unknown.", self.id, exc_info=not quiet)
            if error is None:
                raise ConflictError(
                    f"The block of the effect {shown_id(self.id)} called neither done() nor not_done(), so "
                    "nobody knows whether it happened."
                )
            return False
        finally:
            self._end()

    # For effects of a turn

    def _begin(self) -> None:
        """Check that an attempt may begin, and set the run and the step."""

    def _end(self) -> None:
        """Forget the attempt. It may be called twice."""

    def _stop(self, unknown: EffectUnknown) -> None:
        """Tell the project that nobody knows whether the effect happened, after the run of an open turn."""
        turn = self._session._open_turn
        if turn is None or not turn._announces(self.id):
            self._stores.announce_unknown(self.session_id, self.id)


_SHOWN: Final = tuple(each.name for each in fields(Effect) if each.name not in ("key", "state", "result"))


def _checked(effect_id: str, tool_name: str, value: Any, approval: bool, limit: int) -> Intent:
    validation.identifier(effect_id, "effect_id")
    if _flag(approval, "approval"):
        for name, given in (("tool_name", tool_name != ""), ("input", value is not None)):
            if given:
                reason = "the approved call has one; do not pass it with approval=True"
                raise InvalidPayload(path=name, reason=reason)
        return Intent(effect_id=effect_id, call=None, may_retry=False)
    name = "" if tool_name == "" else validation.identifier(tool_name, "tool_name")
    text = encode(value, limit=limit, name="max_message_bytes", path="/input")
    return Intent(effect_id=effect_id, call=(name, text), may_retry=False)


def _flag(value: Any, name: str) -> bool:
    if type(value) is not bool:
        raise InvalidPayload(path=name, reason="expected True or False")
    return value


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
