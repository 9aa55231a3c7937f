"""Stores with one planted fault each, which the checker of histories has to find."""

from __future__ import annotations

import copy
import dataclasses
from types import SimpleNamespace
from typing import Any, Final

from helix_store.core.types import SessionStatus, StatusChange, StatusConflict
from helix_store.exceptions import IntegrityFault, OutcomeUnknown, StaleStateError, StoreUnavailable
from helix_store.stores import InMemoryLockManager, InMemoryStateStore, InMemoryUsageStore

__all__ = ["PLANTED", "PLANTED_IN_USAGE", "GivesTokensTwice"]

_NTH: Final = 3


class _Planted(InMemoryStateStore):
    """Calls ``super`` and is wrong at each third call that counts."""

    calls = 0

    def _is_due(self) -> bool:
        self.calls += 1
        return self.calls % _NTH == 0

    def _step(self, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return super().save_state_and_promote_staging(*arguments, **options)


class IgnoresTheVersion(_Planted):
    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        return self._step(arguments, {**options, "expected_version": None})


class IgnoresTheFence(_Planted):
    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        return self._step(arguments, {**options, "fencing_token": None})


class ForgetsSteps(_Planted):
    """Acknowledges what it does not write."""

    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        if self._is_due():
            return SimpleNamespace(new_version=options["expected_version"] + 1)
        return self._step(arguments, options)


class RefusesAfterWriting(_Planted):
    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        commit = self._step(arguments, options)
        if self._is_due():
            raise StaleStateError(options["expected_version"], commit.new_version)
        return commit


class LosesMessagesOfSteps(_Planted):
    def save_state_and_promote_staging(
        self, session_id: Any, state: Any, append_messages: Any, step: Any, **options: Any
    ) -> Any:
        return self._step((session_id, state, [] if self._is_due() else append_messages, step), options)


class LosesStatesOfSteps(_Planted):
    def save_state_and_promote_staging(
        self, session_id: Any, state: Any, append_messages: Any, step: Any, **options: Any
    ) -> Any:
        if self._is_due():
            state.custom_state = {"list": state.custom_state["list"][:-2]}
        return self._step((session_id, state, append_messages, step), options)


class DoublesMessages(_Planted):
    def append_messages(self, session_id: Any, messages: Any, **options: Any) -> int:
        return super().append_messages(session_id, messages * 2 if self._is_due() else messages, **options)


class LosesMessages(_Planted):
    def append_messages(self, session_id: Any, messages: Any, **options: Any) -> int:
        if self._is_due():
            return self.get_message_count(session_id) + len(messages)
        return super().append_messages(session_id, messages, **options)


class StoresHalfOfTheMessages(_Planted):
    def append_messages(self, session_id: Any, messages: Any, **options: Any) -> int:
        return super().append_messages(session_id, messages[:1] if self._is_due() else messages, **options)


class TurnsMessagesRound(_Planted):
    def append_messages(self, session_id: Any, messages: Any, **options: Any) -> int:
        return super().append_messages(session_id, messages[::-1] if self._is_due() else messages, **options)


class CountsWrongly(_Planted):
    def append_messages(self, session_id: Any, messages: Any, **options: Any) -> int:
        return super().append_messages(session_id, messages, **options) - self._is_due()


class GivesVersionsTwice(_Planted):
    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        commit = self._step(arguments, options)
        if self._is_due():
            return dataclasses.replace(commit, new_version=commit.new_version - 1)
        return commit


class ReadsOldStates(_Planted):
    old: Any = None

    def load_state(self, session_id: str) -> Any:
        if self._is_due() and self.old is not None:
            return copy.deepcopy(self.old)
        state = super().load_state(session_id)
        self.old = self.old or copy.deepcopy(state)
        return state


class ReadsTheVersionOfAnotherState(_Planted):
    def load_state(self, session_id: str) -> Any:
        state = super().load_state(session_id)
        if self._is_due() and state is not None and state.version > 1:
            state.version -= 1
        return state


class ReadsAnotherStatus(_Planted):
    def load_state(self, session_id: str) -> Any:
        state = super().load_state(session_id)
        if self._is_due() and state is not None:
            state.status = SessionStatus.FAILED
        return state


class RefusesForGood(_Planted):
    """Ends in an error that nobody repeats."""

    def append_messages(self, session_id: str, messages: Any, **options: Any) -> int:
        if self._is_due():
            raise IntegrityFault
        return super().append_messages(session_id, messages, **options)


class LosesTheIdOfAnUnknownOutcome(_Planted):
    def save_state_and_promote_staging(self, *arguments: Any, **options: Any) -> Any:
        if self._is_due():
            raise OutcomeUnknown(None)
        return self._step(arguments, options)


class ReadsUncommittedMessages(_Planted):
    def get_messages(self, session_id: str, **options: Any) -> Any:
        page = super().get_messages(session_id, **options)
        if self._is_due():
            page.messages.append({"role": "user", "content": -1})
        return page


class ShowsMessagesOutOfOrder(_Planted):
    def get_messages(self, session_id: str, **options: Any) -> Any:
        page = super().get_messages(session_id, **options)
        page.messages[:2] = page.messages[1::-1]
        return page


class SetsAnyStatus(_Planted):
    def compare_and_set_status(self, session_id: str, expected: Any, status: Any, **options: Any) -> Any:
        return StatusChange(new_version=self.update_status(session_id, status))


class ReportsAnotherStatus(_Planted):
    """Looks a second time for what has caused the refusal, and finds that of a later moment."""

    def compare_and_set_status(self, session_id: str, expected: Any, status: Any, **options: Any) -> Any:
        answer = super().compare_and_set_status(session_id, expected, status, **options)
        if isinstance(answer, StatusConflict):
            (wrong,) = expected
            return dataclasses.replace(answer, current_status=type(answer.current_status)(wrong))
        return answer


PLANTED: Final[list[type[_Planted]]] = [
    each for each in list(globals().values()) if isinstance(each, type) and issubclass(each, _Planted)
][1:]


class ForgetsUsage(InMemoryUsageStore):
    def record_entry(self, entry: Any) -> str:
        return str(entry.id) if entry.amount % _NTH == 0 else super().record_entry(entry)


class DoublesUsage(InMemoryUsageStore):
    def record_entry(self, entry: Any) -> str:
        super().record_entry(entry)
        return super().record_entry(dataclasses.replace(entry, id=f"{entry.id}-again"))


class RefusesUsageAfterRecording(InMemoryUsageStore):
    def record_entry(self, entry: Any) -> str:
        super().record_entry(entry)
        raise StoreUnavailable


PLANTED_IN_USAGE: Final = [ForgetsUsage, DoublesUsage, RefusesUsageAfterRecording]


class GivesTokensTwice(InMemoryLockManager):
    def acquire(self, *arguments: Any, **options: Any) -> Any:
        lock = super().acquire(*arguments, **options)
        return None if lock is None else SimpleNamespace(fencing_token=lock.fencing_token // 4)
